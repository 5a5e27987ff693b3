"""Test the names of the governor's threads in /proc."""

from __future__ import annotations

import threading
from pathlib import Path

from governor.threads import LONGEST, show_name


def test_a_thread_has_its_name_in_proc() -> None:
    found = []

    def run() -> None:
        show_name()
        found.append(Path("/proc/thread-self/comm").read_text().strip())

    thread = threading.Thread(target=run, name="tidegate-a-rather-long-name")
    thread.start()
    thread.join()
    assert found == ["tidegate-a-rather-long-name"[:LONGEST]]
