"""Find and parse the events that the hook and the governor wrote to the node's log.

Both write one JSON object per line. The hook, like the wrapper runtime, sends its lines to syslog
(tag `tidegate-hook`), or to a separate file. The governor writes its lines to standard error,
which its unit sends to the journal. There are thus three sources: the journal, the text files of a
syslog daemon, and files of JSON lines. This module reads all three.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from governor.errors import RequestError

UNIT = "tidegate-governor.service"
HOOK = "tidegate-hook"
GOVERNOR = "tidegate-governor"
MATCHES = (
    f"SYSLOG_IDENTIFIER={HOOK}",
    "+",
    f"SYSLOG_IDENTIFIER={GOVERNOR}",
    "+",
    f"_SYSTEMD_UNIT={UNIT}",
)
SYSLOG_FILES = ("/var/log/syslog", "/var/log/messages", "/var/log/daemon.log")
POLL_S = 0.5

_TAG = re.compile(rf"\b({HOOK}|{GOVERNOR})(?:\[[0-9]+\])?: *(?=\{{)")
_STAMP = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(?:Z|[+-][0-9:]+)?|[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8}"
)
_FAILURES = {"failed", "without-gpu"}
_LEVELS = {"warning", "error", "critical"}
_REFUSALS = {"request-refused", "process-refused"}


@dataclass(frozen=True)
class Event:
    """One event: its time (as its source wrote it), its source, and its fields."""

    time: str
    source: str  # hook, runtime, governor, or "user NUMBER": any user can log
    fields: dict[str, Any]

    @property
    def name(self) -> str:
        """The kind of event: the hook's outcome, or the governor's name for it."""
        return str(self.fields.get("outcome") or self.fields.get("event") or "?")

    @property
    def container(self) -> str:
        """The container that the event concerns; empty if none."""
        for field in ("id", "container", "key"):
            if isinstance(value := self.fields.get(field), str):
                return value
        return ""

    @property
    def failure(self) -> bool:
        """Whether the event reports a failure."""
        return (
            self.fields.get("outcome") in _FAILURES
            or self.fields.get("level") in _LEVELS
            or self.fields.get("event") in _REFUSALS
            or bool(self.fields.get("skipped") or self.fields.get("left_behind"))
        )

    def about(self, container: str) -> bool:
        """Return whether the event concerns a container, given by its id, an id prefix, or its key.

        A pod or claim may also be given as NAMESPACE/NAME, a claim by its uid.
        """
        named = [self.fields.get(field) for field in ("id", "container", "key")]
        # No prefixes here: a pod's name may be a prefix of other pods' names.
        whole = [self.fields.get(field) for field in ("pod", "claim", "uid")]
        claims = self.fields.get("claims")
        whole += claims if isinstance(claims, list) else ()
        return container in whole or any(
            isinstance(name, str) and name.startswith(container) for name in named
        )

    def text(self) -> str:
        """Return the event's content as text."""
        fields = self.fields
        if "message" in fields:
            code = f"{fields['code']}: " if fields.get("code") else ""
            hint = f"; {fields['hint']}" if fields.get("hint") else ""
            return f"{code}{fields['message']}{hint}{self._owner_text()}"
        hidden = {"event", "outcome", "level", "timestamp", "time", "id", "container", "key"}
        hidden |= {"stage", "plan", "ms", "total_ms"}
        return ", ".join(f"{name} {value}" for name, value in fields.items() if name not in hidden)

    def _owner_text(self) -> str:
        """Return the pod and the claims that the event names, if any."""
        claims = self.fields.get("claims")
        named = [("pod", self.fields.get("pod")), ("claim", self.fields.get("claim"))]
        named += [("claim", claim) for claim in (claims if isinstance(claims, list) else ())]
        said = ", ".join(f"{what} {name}" for what, name in named if name)
        return f" ({said})" if said else ""


def parse_line(line: str, source: str = "", stamp: str = "") -> Event | None:
    """Return the event in one line: JSON, alone or after the prefix of a syslog daemon.

    Return None for any other line. A `source` or `stamp` that the log itself records takes
    precedence over the line's prefix; a timestamp in the JSON takes precedence over both.
    """
    text = line.strip()
    if not text.startswith("{"):
        tag = _TAG.search(text)
        if tag is None:
            return None
        source = source or tag[1].removeprefix("tidegate-")
        found = _STAMP.match(text)
        stamp = stamp or (found[0] if found else "")
        text = text[tag.end() :]
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return None
    if not source:
        source = "hook" if fields["event"].startswith("hook-") else "governor"
    if source == "hook" and fields.get("stage") == "runtime":
        source = "runtime"
    return Event(str(fields.get("timestamp") or stamp), source, fields)


def parse_journal(line: str) -> Event | None:
    """Return the event in one line of `journalctl -o json`, or None if it is not Tidegate's."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    message = entry.get("MESSAGE")
    if isinstance(message, list):
        # A message that contains an unprintable byte comes as a list of numbers.
        with contextlib.suppress(ValueError, TypeError):
            message = bytes(message).decode(errors="replace")
    if not isinstance(message, str):
        return None
    stamp = ""
    with contextlib.suppress(ValueError, TypeError, OverflowError, OSError):
        at = datetime.fromtimestamp(int(entry["__REALTIME_TIMESTAMP"]) / 1e6, UTC)
        stamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    tag = str(entry.get("SYSLOG_IDENTIFIER", ""))
    source = "hook" if tag == HOOK else "governor"
    # The journal records the user who wrote the entry; the tag is not verified. A rootless
    # engine's hook runs as that engine's user.
    if (user := str(entry.get("_UID", "0"))) != "0":
        source = f"user {user}"
    event = parse_line(message, source, stamp)
    if event is None and source == "governor" and message.startswith(f"{GOVERNOR}: "):
        # The error of a governor that cannot start is meant for its caller, and is not JSON.
        said = {"event": "governor-failed", "level": "error"}
        event = Event(stamp, source, {**said, "message": message.removeprefix(f"{GOVERNOR}: ")})
    return event


def journal_command(since: str | None, *, follow: bool) -> list[str]:
    """Return the command that prints Tidegate's lines from the journal."""
    # Without --all, a message of more than 4096 bytes, such as a plan, is shown as `null`.
    command = ["journalctl", "--quiet", "--no-pager", "--all", "--output=json"]
    command += [f"--since={since}"] if since else []
    command += ["--follow", "--lines=all"] if follow else []
    return [*command, *MATCHES]


def read_journal(since: str | None, *, follow: bool) -> Iterator[Event]:
    """Yield the journal's events, oldest first; raise RequestError if it cannot be read."""
    command = journal_command(since, follow=follow)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as e:
        raise RequestError(f"journalctl: {e.strerror}", hint="name a file with --log") from e
    with process:
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018, S101
        try:
            for line in process.stdout:
                if event := parse_journal(line.decode(errors="replace")):
                    yield event
            said = " ".join(process.stderr.read().decode(errors="replace").split())
        finally:
            process.terminate()
        if process.wait() > 0:
            raise RequestError(
                f"journalctl: {said[:200]}", hint="run it as root, or name a file with --log"
            )


def read_files(paths: Sequence[Path], *, follow: bool) -> Iterator[Event]:
    """Yield the events in files, one file after the other.

    Raise RequestError if one cannot be read.
    """
    followed: list[tuple[Path, Iterator[str]]] = []
    for path in paths:
        lines = _lines(path, follow=follow)
        followed.append((path, lines))
        yield from _events(lines)
    while follow:
        time.sleep(POLL_S)
        for _, lines in followed:
            yield from _events(lines)


def _events(lines: Iterator[str]) -> Iterator[Event]:
    for line in lines:
        if not line:
            return  # nothing more, for now
        if event := parse_line(line):
            yield event


def _lines(path: Path, *, follow: bool) -> Iterator[str]:
    """Yield lines; when following, only whole ones, and an empty line if there are no more for now.

    A file that was truncated or replaced is read from its beginning.
    """
    rest = b""
    other: BufferedReader | None = None
    try:
        file = path.open("rb")
    except OSError as e:
        raise RequestError(f"{path}: {e.strerror}", hint="name a file that can be read") from e
    try:
        while True:
            with contextlib.suppress(OSError):
                if file.tell() > os.fstat(file.fileno()).st_size:
                    file.seek(0)  # truncated
                    rest = b""
            while data := file.read(1 << 20):
                *whole, rest = (rest + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole if line)
            if not follow:
                if rest:
                    yield rest.decode(errors="replace")
                return
            if other is not None:  # all of the renamed file has been read
                file.close()
                file, other, rest = other, None, b""
                continue
            yield ""
            # A rotation renames the file; later lines are in a new file with the same name.
            with contextlib.suppress(OSError):
                if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                    other = path.open("rb")
    finally:
        file.close()
        if other is not None:
            other.close()


def has_journal() -> bool:
    """Return whether this node keeps a journal."""
    return any(
        next(Path(directory).glob("*/*.journal"), None) is not None
        for directory in ("/var/log/journal", "/run/log/journal")
    )


def select(events: Iterable[Event], container: str | None, *, everything: bool) -> Iterator[Event]:
    """Yield the events of a container, if one is given; only failures unless `everything`."""
    for event in events:
        if container is not None and not event.about(container):
            continue
        if everything or event.failure:
            yield event
