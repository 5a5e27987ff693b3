"""Two drivers on a node, of which the second replaces the first: real processes, with a kubelet that registers both."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kube.driver import ClaimDriver
from kube.errors import SocketError
from kube.instances import Instance
from kube.names import DRIVER
from tests.kubernetes.conftest import Stand
from tests.kubernetes.documents import NODE, claim, reference, result
from tests.kubernetes.kubelet import Kubelet, wait_for
from tests.kubernetes.test_dra_loop import AnsweringGovernor, FailingClaims

OLD, NEW = "0b7e3c2c", "f1a0c9d4"
"""Instance names. In a cluster the name is a pod's uid. It would be too long here, because the paths of sockets are
limited, and those of tests are longer than a kubelet's.
"""


def sockets(stand: Stand) -> set[str]:
    return {path.name for path in stand.kubelet.directory.rglob("*.sock")}


def named(uid: str) -> set[str]:
    return {f"dra-{uid}.sock", f"tidegate.gpu-{uid}-reg.sock"}


class TwoDrivers:
    """A `Stand` with a second driver, and with the kubelet's connection to that driver."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.kubelet = Kubelet(stand.kubelet.directory)
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = stand.base / "ready-new"

    def start(self) -> None:
        """Start the second driver while the first runs."""
        first, self.stand.ready = self.stand.process, self.ready
        self.process = self.stand.start("--instance", NEW)
        self.stand.process = first

    def up(self) -> None:
        """Start the second driver, and have the kubelet register it."""
        self.start()
        self.kubelet.register(instance=NEW)
        wait_for(self.ready.exists, f"the new one is ready\n{self.stand.text()}")

    def close(self) -> None:
        self.kubelet.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait(15)


@pytest.fixture
def two(stand: Stand) -> Iterator[TwoDrivers]:
    made = TwoDrivers(stand)
    stand.up("--instance", OLD)
    yield made
    made.close()


def test_a_new_driver_serves_before_the_old_one_ends(two: TwoDrivers) -> None:
    """Both drivers are called while both run, and each can take back what the other prepared."""
    stand = two.stand
    documents = [claim(f"c{i}", "ns", result(0, compute="5")) for i in range(4)]
    uids = [document["metadata"]["uid"] for document in documents]
    for document in documents:
        stand.api.add_claim(document)
    stand.kubelet.prepare(*map(reference, documents[:2]))
    two.up()
    assert sockets(stand) == named(OLD) | named(NEW)
    wait_for(lambda: stand.logged("another-leads"), "the old one stands down")
    assert stand.kubelet.prepare(reference(documents[2]))[uids[2]].error == ""
    assert two.kubelet.prepare(reference(documents[3]))[uids[3]].error == ""
    assert two.kubelet.unprepare(reference(documents[0]))[uids[0]].error == ""
    assert stand.kubelet.unprepare(reference(documents[3]))[uids[3]].error == ""
    time.sleep(1.5)  # several rounds of both loops: no claim that was taken back reappears
    assert set(stand.governor.claims) == {uids[1], uids[2]}
    assert stand.files() == sorted(f"tidegate.gpu-claim_{uid}.json" for uid in uids[1:3])
    assert stand.kill(signal.SIGTERM) == 0
    assert sockets(stand) == named(NEW)
    assert two.ready.exists()
    assert two.kubelet.unprepare(*map(reference, documents[1:3]))[uids[1]].error == ""
    assert (stand.governor.claims, stand.files()) == ({}, [])


def test_only_one_of_two_drivers_writes_the_slice(two: TwoDrivers) -> None:
    stand = two.stand
    assert stand.api.counts()["create", "resourceslices"] == 1
    two.up()
    wait_for(lambda: stand.logged("another-leads"), "the old one stands down")
    stand.governor.gpus[1]["lost"] = "fell off the bus"
    wait_for(lambda: stand.api.counts()["update", "resourceslices"], "the slice of a change")
    time.sleep(1.5)
    assert stand.api.counts()["update", "resourceslices"] == 1
    # The new driver is killed: the old driver continues, and removes the new one's sockets.
    assert two.process is not None
    two.process.kill()
    two.process.wait(15)
    wait_for(lambda: stand.logged("leads"), "the old one leads again")
    wait_for(lambda: sockets(stand) == named(OLD), "its sockets alone")
    del stand.governor.gpus[1]
    wait_for(lambda: stand.api.counts()["update", "resourceslices"] == 2, "the next change")


def test_calls_that_wait_during_a_replacement_are_answered(two: TwoDrivers) -> None:
    """The kubelet aborts a driver's calls when the driver's registration socket disappears."""
    stand = two.stand
    full, waiting = claim("full", "ns", result(0, compute="100")), claim("waiting", "ns", result(0))
    for document in (full, waiting):
        stand.api.add_claim(document)
    stand.kubelet.prepare(reference(full))
    call = stand.kubelet.begin(reference(waiting))
    wait_for(lambda: stand.logged("claim-waits"), "it waits")
    two.up()
    wait_for(lambda: stand.logged("another-leads"), "the old one stands down")
    old = stand.process
    assert old is not None
    old.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert sockets(stand) == named(OLD) | named(NEW)
    assert two.kubelet.unprepare(reference(full))[full["metadata"]["uid"]].error == ""
    assert call.result(10).claims[waiting["metadata"]["uid"]].error == ""
    assert old.wait(15) == 0
    assert sockets(stand) == named(NEW)
    assert set(stand.governor.claims) == {waiting["metadata"]["uid"]}


def test_a_driver_without_a_successor_ends_although_a_call_waits(two: TwoDrivers) -> None:
    """The call may be waiting for a governor that only the next pod starts."""
    stand = two.stand
    full, waiting = claim("full", "ns", result(0, compute="100")), claim("waiting", "ns", result(0))
    for document in (full, waiting):
        stand.api.add_claim(document)
    stand.kubelet.prepare(reference(full))
    call = stand.kubelet.begin(reference(waiting))
    wait_for(lambda: stand.logged("claim-waits"), "it waits")
    assert not call.done()
    assert stand.kill(signal.SIGTERM) == 0
    assert sockets(stand) == set()
    assert set(stand.governor.claims) == {full["metadata"]["uid"]}


def test_a_driver_that_is_not_registered_leaves_the_slice_alone(two: TwoDrivers) -> None:
    two.start()
    wait_for(lambda: sockets(two.stand) == named(OLD) | named(NEW), "both listen")
    # The new driver logs that the old one leads.
    wait_for(lambda: two.stand.logged("another-leads"), "the new one stands back")
    time.sleep(1.5)
    assert two.stand.api.counts()["update", "resourceslices"] == 0
    assert not two.ready.exists()


def test_fixed_socket_names_and_named_instances_exclude_each_other(two: TwoDrivers) -> None:
    stand = two.stand
    log, first = len(stand.text()), stand.process
    second = stand.start()
    assert second.wait(60) == 73
    assert "another driver is already using" in stand.text()[log:]
    stand.process = first
    stand.kill()
    stand.start()
    wait_for(lambda: sockets(stand) == {"dra.sock", "tidegate.gpu-reg.sock"}, "its own alone")
    log, first = len(stand.text()), stand.process
    second = stand.start("--instance", NEW)
    assert second.wait(60) == 73
    assert "another driver with fixed socket names, or the device plugin," in stand.text()[log:]
    stand.process = first


# ---- without processes ----


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "plugins", tmp_path / "registry"


def test_files_of_dead_instances_are_removed_and_those_of_live_ones_stay(
    places: tuple[Path, Path],
) -> None:
    alive, dead = Instance(*places, "alive"), Instance(*places, "dead")
    for instance in (alive, dead):
        instance.start()
        for path in (instance.socket, instance.registration):
            path.touch()
    others = places[1] / "other.example-reg.sock"
    others.touch()
    assert dead._own is not None
    os.close(dead._own)  # as the kernel does for a process that is killed
    dead._own = None
    new = Instance(*places, "new")
    new.start()
    assert alive.socket.exists()
    assert alive.registration.exists()
    assert not dead.socket.exists()
    assert not dead.registration.exists()
    assert others.exists()
    assert sorted(path.name for path in places[0].glob("*.lock")) == [
        "claims.lock", "instance-alive.lock", "instance-new.lock",
    ]  # fmt: skip
    for instance in (alive, new, dead):
        instance.close()


def test_the_latest_registered_instance_leads(places: tuple[Path, Path]) -> None:
    old, new = Instance(*places, "z-old"), Instance(*places, "a-new")
    old.start()
    assert old.leads()  # it is the only instance
    old.note_registered(True)
    new.start()
    assert (old.leads(), new.leads(), old.has_successor()) == (True, False, False)
    new.note_registered(True)
    assert (old.leads(), new.leads(), old.has_successor()) == (False, True, True)
    old.note_registered(True)  # a kubelet that starts registers both, in any order
    assert (old.leads(), new.leads()) == (False, True)
    new.note_registered(False)
    assert (old.leads(), new.leads()) == (True, False)
    new.note_registered(True)
    old.close()
    assert new.leads()
    assert not new.has_successor()
    new.close()


def test_a_driver_whose_directory_was_removed_ends_with_one_line(stand: Stand) -> None:
    stand.up("--instance", OLD)
    shutil.rmtree(stand.kubelet.directory / "plugins" / DRIVER)
    assert stand.process is not None
    assert stand.process.wait(15) == SocketError.status
    # Which part of the driver notices it first depends on the moment.
    assert "Traceback" not in stand.text()
    assert stand.text().splitlines()[-1].startswith("tidegate-dra: ")


def test_an_instance_without_its_directory_has_no_successor(places: tuple[Path, Path]) -> None:
    own = Instance(*places, "own")
    own.start()
    shutil.rmtree(places[0])
    with pytest.raises(SocketError, match="No such file or directory"):
        own.leads()
    assert not own.has_successor()
    own.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"started": "x"}', '{"registered": true}'])
def test_an_invalid_lock_file_counts_as_not_registered(
    places: tuple[Path, Path], text: str
) -> None:
    own, other = Instance(*places, "own"), Instance(*places, "other")
    own.start()
    own.note_registered(True)
    other.start()
    (places[0] / "instance-other.lock").write_text(text)
    assert own.leads()
    other.close()
    own.close()


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "-", "x" * 64, "ä"])
def test_an_instance_name_cannot_name_another_path(places: tuple[Path, Path], name: str) -> None:
    with pytest.raises(SocketError, match="cannot be part of a socket's name"):
        Instance(*places, name)


def test_two_drivers_do_not_work_on_a_claim_at_the_same_time(places: tuple[Path, Path]) -> None:
    """The other driver is a process, because the kernel's lock does not exclude threads."""
    own = Instance(*places, "own")
    own.start()
    entered = threading.Event()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child holds u-1 until the pipe is closed
        try:
            with own.hold("u-1", lambda: None):
                os.close(write)
                (places[0] / "held").touch()
                os.read(read, 1)
        finally:
            os._exit(0)
    os.close(read)
    wait_for((places[0] / "held").exists, "the other holds it")
    with own.hold("u-2", lambda: None):
        pass

    def enter() -> None:
        with own.hold("u-1", lambda: None):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.3)
    with pytest.raises(SocketError, match="given up"), own.hold("u-1", _give_up):
        pass
    os.close(write)
    assert entered.wait(10)
    thread.join(10)
    os.waitpid(pid, 0)
    own.close()


def _give_up() -> None:
    raise SocketError("given up", hint="-")


def test_a_claim_that_another_driver_took_back_is_not_prepared_again(tmp_path: Path) -> None:
    """The cluster still has the claim: its pod is ending, and the kubelet has called the other driver."""
    from kube.cdi import Directory
    from kube.claims import Reference

    document = claim("a", "ns", result(), uid="u-1")
    governor, directory = AnsweringGovernor(), Directory(tmp_path)
    old, new = (
        ClaimDriver(NODE, governor, FailingClaims(document), directory, others=lambda: True)
        for _ in range(2)
    )
    named = Reference(*reference(document))
    new.prepare(named)
    old.unprepare(named)
    assert new.differs()
    new.reconcile()
    assert not new.differs()
    assert (governor.booked, directory.uids()) == ({}, set())
    # A claim that is marked as leaving was also taken back, although containers still use it.
    new.prepare(named)
    governor.booked["u-1"] = {**governor.booked["u-1"], "leaving": True}
    directory.remove("u-1")
    new.reconcile()
    assert governor.booked["u-1"]["leaving"]
    assert (directory.uids(), new.differs()) == (set(), False)


def test_the_lock_of_the_device_plugin_excludes_instances(places: tuple[Path, Path]) -> None:
    places[0].mkdir()
    fd = os.open(places[0], os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(SocketError, match="or the device plugin, is already using"):
        Instance(*places, "a").start()
    os.close(fd)
    instance = Instance(*places, "a")
    instance.start()
    assert json.loads((places[0] / "instance-a.lock").read_text())["registered"] is False
    instance.close()
    assert not (places[0] / "instance-a.lock").exists()
