"""Test the governor's database: promises survive a kill, and damage is detected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from governor import state as module
from governor.cgroups import Membership
from governor.container import container_key
from governor.daemon import listening, wait_for_lock
from governor.errors import GovernorError, StateError
from governor.processes import FileIdentity, Identity
from governor.quota import Quota
from governor.state import NAME, ContainerRow, ProcessRow, State
from tests.conftest import examples, need

GIB = 1 << 30
UUID = "GPU-00000000-0000-0000-0000-000000000001"
ROOT = Path(__file__).resolve().parents[2]
MEMBERSHIPS = (
    Membership({"": "/a.slice/docker-1.scope", "name=systemd": "/a.slice/\udcff"}, (4, 2**32 - 1)),
    Membership({"cpu,cpuacct": "/1"}),
    Membership(),
    None,  # from a governor that did not record it
)


def row(number: int, *, confirmed: bool = False, memory: int = GIB) -> ContainerRow:
    return ContainerRow(
        container_key(f"container-{number}"),
        f"container-{number}",
        Identity(1000 + number, 5_000_000 + number),
        Quota(memory, 1 + number % 50, 100),
        (UUID,),
        FileIdentity(1, 77 + number),
        confirmed,
        MEMBERSHIPS[number % len(MEMBERSHIPS)],
    )


def process(slot: int, pid: int) -> ProcessRow:
    return ProcessRow(slot, Identity(pid, pid * 10), 1_700_000_000_000_000 + pid)


def opened(path: Path) -> State:
    state = State(path)
    state.load()
    return state


def image(path: Path, to: Path) -> State:
    """Return the state that another governor finds if the governor with `path` is killed now."""
    to.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        shutil.copy(file, to)
    return opened(to / path.name)


def filled(directory: Path, count: int = 12) -> Path:
    """Make a database as a kill leaves it: some rows are only in the write-ahead log."""
    state = opened(directory / "made" / NAME)
    for number in range(count):
        state.put(row(number, confirmed=number % 3 > 0))
        state.register(row(number).key, process(number % 5, 3000 + number))
    assert state._db is not None
    state._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for number in range(count):
        state.register(row(number).key, process(7, 4000 + number))
    image(directory / "made" / NAME, directory / "left").close()
    shutil.rmtree(directory / "left")
    (directory / "left").mkdir()
    for file in (directory / "made").iterdir():
        shutil.copy(file, directory / "left")
    state.close()
    return directory / "left" / NAME


class OperationsWithKills(RuleBasedStateMachine):
    """Any sequence of a governor's operations, with a kill at any time."""

    keys = st.integers(0, 5)
    slots = st.integers(0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.images = 0
        self.state = opened(self.directory / NAME)
        self.containers: dict[str, ContainerRow] = {}
        self.processes: dict[tuple[str, int], ProcessRow] = {}

    @rule(number=keys)
    def admit(self, number: int) -> None:
        self.containers[row(number).key] = row(number)
        self.state.put(row(number))

    @rule(number=keys, memory=st.integers(1, 2**62))
    def confirm_or_change(self, number: int, memory: int) -> None:
        key = row(number).key
        if key in self.containers:
            changed = replace(self.containers[key], confirmed=True, quota=Quota(memory, 1, 2))
            self.containers[key] = changed
            self.state.put(changed)

    @rule(number=keys, slot=slots, pid=st.integers(1, 2**22))
    def register(self, number: int, slot: int, pid: int) -> None:
        key = row(number).key
        if key in self.containers:
            self.processes[key, slot] = process(slot, pid)
            self.state.register(key, process(slot, pid))

    @rule(number=keys, slot=slots)
    def end_process(self, number: int, slot: int) -> None:
        self.processes.pop((row(number).key, slot), None)
        self.state.unregister(row(number).key, slot)

    @rule(number=keys)
    def end(self, number: int) -> None:
        key = row(number).key
        self.containers.pop(key, None)
        self.processes = {at: p for at, p in self.processes.items() if at[0] != key}
        self.state.leave(key)

    @rule()
    def be_killed(self) -> None:
        before, self.images = self.state, self.images + 1
        self.state = image(before._path or Path(), self.directory / str(self.images))
        before.close()

    @rule()
    def stop(self) -> None:
        path = self.state._path
        self.state.close()
        self.state = opened(path or Path())

    @precondition(lambda self: not self.state._behind)
    @rule()
    def be_full(self) -> None:
        """Let writes fail for a while: promises are refused, and registrations are written
        later.
        """
        db = self.state._db
        assert db is not None
        with contextlib.closing(sqlite3.connect(":memory:")) as nothing:
            self.state._db = nothing  # no tables, so each write fails
            with pytest.raises(StateError):
                self.state.put(row(99))
            assert row(99).key not in self.state.containers
            for key in list(self.containers)[:1]:
                self.processes[key, 0] = process(0, 4711)
                self.state.register(key, process(0, 4711))
        self.state._db = db
        self.state.retry()

    @invariant()
    def nothing_is_lost(self) -> None:
        found = {
            (key, slot): p for key, ps in self.state.processes.items() for slot, p in ps.items()
        }
        assert (self.state.containers, found) == (self.containers, self.processes)

    def teardown(self) -> None:
        self.be_killed()
        self.nothing_is_lost()
        self.state.close()
        shutil.rmtree(self.directory)


OperationsWithKills.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
TestJournal = OperationsWithKills.TestCase


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.unit.test_governor_state import opened, process, row
state = opened(Path(sys.argv[1]))
for number in range(100_000):
    state.put(row(number))
    state.register(row(number).key, process(0, number + 1))
    if number >= 20:
        state.leave(row(number - 20).key)
    print(number, flush=True)
"""


def test_promises_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / NAME
    draw = random.Random(1)  # noqa: S311
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(ROOT)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(draw.randrange(1, 400))]
        writer.send_signal(signal.SIGKILL)
        told += [
            int(line) for line in writer.stdout.read().splitlines(keepends=True) if "\n" in line
        ]
        writer.stdout.close()
        writer.wait()
        state = opened(path)
        last = told[-1]
        for number in range(max(0, last - 18), last + 1):
            key = row(number).key
            assert state.containers[key] == row(number)
            assert state.processes[key] == {0: process(0, number + 1)}
        assert len(state.containers) <= 22  # ended containers are not kept
        for key in list(state.containers):
            state.leave(key)
        state.close()
    assert [p.name for p in tmp_path.iterdir() if "damaged" in p.name] == []


def test_only_root_can_read_the_database(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        state = opened(tmp_path / "new" / NAME)
        state.put(row(1))
        modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "new").iterdir()}
    finally:
        os.umask(before)
    state.close()
    assert modes == {NAME: 0o600, f"{NAME}-wal": 0o600}


def test_rows_of_another_boot_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path)
    monkeypatch.setattr(module, "boot_id", lambda: "another")
    state = opened(path)
    assert (state.containers, state.processes) == ({}, {})
    state.put(row(1))
    state.close()
    again = opened(path)
    assert again.containers == {row(1).key: row(1)}
    again.close()
    monkeypatch.undo()
    first = opened(path)
    assert first.containers == {}  # the first write removed the rows of the first boot
    first.close()


def test_two_governors_do_not_share_a_database(tmp_path: Path) -> None:
    first = opened(tmp_path / NAME)
    with pytest.raises(GovernorError, match="is open in another process; stop the other governor"):
        opened(tmp_path / NAME)
    first.put(row(1))
    first.close()


# ---- versions ----


def test_a_file_of_an_older_version_is_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(tmp_path)
    later = (*module.MIGRATIONS, ("ALTER TABLE processes ADD COLUMN more TEXT DEFAULT 'x'",))
    monkeypatch.setattr(module, "MIGRATIONS", later)
    monkeypatch.setattr(module, "VERSION", len(later))
    state = opened(path)
    assert len(state.containers) == 12
    assert state._db is not None
    assert state._db.execute("PRAGMA user_version").fetchone() == (len(later),)
    assert state._db.execute("SELECT DISTINCT more FROM processes").fetchall() == [("x",)]
    state.close()


def test_a_row_of_an_older_version_has_no_membership(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / NAME
    state = opened(path)
    state.put(row(1))
    state.close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        [(text,)] = db.execute("SELECT row FROM containers").fetchall()
        values = json.loads(text)
        del values["membership"]
        db.execute("UPDATE containers SET row = ?, seal = ?", module._seal(values))
    state = opened(path)
    assert state.containers == {row(1).key: replace(row(1), membership=None)}
    state.close()
    assert capfd.readouterr().out == ""


def test_a_file_of_a_newer_version_is_set_aside(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = filled(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    state = opened(path)
    assert state.containers == {}
    assert path.with_name(f"{NAME}.newer-1").exists()
    said = capfd.readouterr().out
    assert "database-newer" in said
    assert "the file has version 99, but this governor supports 2 at most" in said
    state.put(row(1))
    newer = tmp_path / "copy"
    shutil.copy(path.with_name(f"{NAME}.newer-1"), newer)
    for file in path.parent.glob(f"{NAME}*"):
        file.unlink()
    newer.rename(path)  # while the governor runs
    state.retry()
    assert path.with_name(f"{NAME}.newer-1").exists()
    assert "database-newer" in capfd.readouterr().out
    later = image(path, tmp_path / "later")
    assert later.containers == {row(1).key: row(1)}
    later.close()
    state.close()


# ---- damage ----


def not_a_database(path: Path) -> None:
    path.write_bytes(b"containers: []\n" * 100)


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(4096 + 100)
    path.with_name(f"{NAME}-wal").unlink()


def a_row_changed(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE containers SET row = replace(row, '1073741824', '9073741824')")
        db.commit()


def a_row_moved(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE processes SET slot = slot + 20")
        db.commit()


def a_row_of_bytes(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE containers SET row = x'ff00fe', seal = 5")
        db.commit()


def no_table(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE processes")


def no_version(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 0")


def a_version_below_all(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = -5")


DAMAGES = [
    not_a_database, cut_short, a_row_changed, a_row_moved, a_row_of_bytes, no_table, no_version,
    a_version_below_all,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_file_is_set_aside_and_logged(tmp_path, capfd, damage) -> None:
    path = filled(tmp_path)
    damage(path)
    before = path.read_bytes()
    state = opened(path)
    assert (state.containers, state.processes) == ({}, {})
    aside = path.with_name(f"{NAME}.damaged-1")
    assert aside.exists()
    assert len(aside.read_bytes()) >= len(before) or aside.read_bytes() == before
    said = capfd.readouterr().out
    assert said.count("database-damaged") == 1
    assert str(aside) in said
    state.put(row(1))
    state.close()
    again = opened(path)
    assert again.containers == {row(1).key: row(1)}
    again.close()
    assert not path.with_name(f"{NAME}.damaged-2").exists()
    not_a_database(path)
    opened(path).close()
    assert path.with_name(f"{NAME}.damaged-2").exists()


def test_an_empty_file_is_used_as_a_new_database(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / NAME).touch()
    state = opened(tmp_path / NAME)
    state.put(row(1))
    state.close()
    assert "damaged" not in capfd.readouterr().out


def test_random_damage_is_never_believed(tmp_path: Path) -> None:
    """Whichever bytes change, the start succeeds, and everything that is read was once written."""
    path = filled(tmp_path)
    truth = image(path, tmp_path / "truth")
    truth.close()
    draw = random.Random(7)  # noqa: S311
    set_aside = 0
    for number in range(300):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(path.parent, copy)
        for _ in range(draw.choice((1, 1, 2, 10, 200))):
            victim = copy / draw.choice((NAME, NAME, f"{NAME}-wal"))
            with victim.open("r+b") as file:
                file.seek(draw.randrange(victim.stat().st_size))
                file.write(draw.randbytes(draw.choice((1, 1, 4, 64))))
        state = opened(copy / NAME)
        for key, found in state.containers.items():
            assert found == truth.containers[key]
        for key, found in state.processes.items():
            assert found.items() <= truth.processes[key].items()
        state.put(row(99))
        state.close()
        set_aside += any("damaged" in p.name or "newer" in p.name for p in copy.iterdir())
        shutil.rmtree(copy)
    assert 50 < set_aside < 300


# ---- a file that cannot be written ----


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[State, sqlite3.Connection]]:
    """A state with a file that cannot grow."""
    state = opened(tmp_path / NAME)
    state.put(row(0))
    assert state._db is not None
    (pages,) = state._db.execute("PRAGMA page_count").fetchone()
    state._db.execute(f"PRAGMA max_page_count = {pages}")
    yield state, state._db
    state.close()


def test_a_full_disk_refuses_promises_and_forgets_nothing(full, capfd, tmp_path: Path) -> None:
    state, db = full
    with pytest.raises(
        StateError, match="cannot be written: database or disk is full; free disk space"
    ):
        [state.put(row(number)) for number in range(1, 1000)]
    admitted = len(state.containers) - 1
    assert set(state.containers) == {row(number).key for number in range(admitted + 1)}
    assert admitted > 1
    for slot in range(60):
        state.register(row(0).key, process(slot, 100 + slot))
    for slot in range(60):
        state.register(row(1).key, process(slot, 100 + slot))
    state.leave(row(2).key)
    assert "database-unwritable" in capfd.readouterr().out
    for _ in range(5):
        state.retry()
    assert "database-unwritable" not in capfd.readouterr().out  # reported once
    db.execute("PRAGMA max_page_count = 100000")
    state.retry()
    assert "database-written" in capfd.readouterr().out
    later = image(tmp_path / NAME, tmp_path / "later")
    assert (later.containers, later.processes) == (state.containers, state.processes)
    assert len(later.processes[row(0).key]) == len(later.processes[row(1).key]) == 60
    later.close()


def test_an_unusable_state_directory_does_not_stop_the_governor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("in the way\n")
    state = opened(tmp_path / "state" / NAME)
    assert "database-unwritable" in capfd.readouterr().out
    with pytest.raises(StateError, match="cannot be written"):
        state.put(row(1))
    state.note(row(2))
    state.register(row(2).key, process(1, 5))
    state.retry()
    (tmp_path / "state").unlink()
    state.retry()
    state.put(row(3))
    later = image(tmp_path / "state" / NAME, tmp_path / "later")
    assert set(later.containers) == {row(2).key, row(3).key}
    assert later.processes == {row(2).key: {1: process(1, 5)}}
    later.close()
    state.close()


def test_a_removed_file_is_created_again(tmp_path: Path) -> None:
    state = opened(tmp_path / NAME)
    state.put(row(1))
    for file in tmp_path.iterdir():
        file.unlink()
    state.retry()
    later = image(tmp_path / NAME, tmp_path / "later")
    assert later.containers == {row(1).key: row(1)}
    later.close()
    state.close()


def test_a_replaced_file_is_written(tmp_path: Path) -> None:
    """An older copy replaces the file: new rows go to the file that the next governor reads."""
    state = opened(tmp_path / NAME)
    state.put(row(1))
    old = image(tmp_path / NAME, tmp_path / "old")
    old.close()
    state.put(row(2))
    for file in tmp_path.glob(f"{NAME}*"):
        file.unlink()
    (tmp_path / "old" / NAME).rename(tmp_path / NAME)
    state.retry()
    state.put(row(3))
    later = image(tmp_path / NAME, tmp_path / "later")
    assert set(later.containers) == {row(number).key for number in (1, 2, 3)}
    later.close()
    state.close()


def test_two_governors_do_not_share_a_directory(tmp_path: Path) -> None:
    """This holds even if the first governor's socket is gone, as when both start at once."""
    path = tmp_path / "governor.sock"
    with listening(path) as first:
        path.unlink()
        with pytest.raises(GovernorError, match="another governor is running in"), listening(path):
            pass
        assert not path.exists()
        assert first.fileno() >= 0
    with listening(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))  # a governor that ended leaves no lock behind


def test_a_user_of_the_host_cannot_hold_the_lock(tmp_path: Path) -> None:
    """Any user can open and lock the runtime directory, so the lock is on a file that only root can open."""
    need("setpriv")
    tmp_path.chmod(0o755)
    script = (
        "import fcntl, os, time\n"
        "held = []\n"
        "for name in ('.', 'governor.lock', 'governor.sock'):\n"
        "    try:\n"
        "        held.append(os.open(name, os.O_RDONLY))\n"
        "        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except OSError as e:\n"
        "        print(name, e.strerror)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "governor.sock"
    with listening(path):
        pass
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    # The directories above, which only their owner may search, matter to absolute paths alone.
    with subprocess.Popen(
        [*nobody, "/usr/bin/python3", "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        try:
            assert process.stdout
            said = [process.stdout.readline().strip() for _ in range(3)]
            assert said == [
                "governor.lock Permission denied",
                "governor.sock No such file or directory",
                "ready",
            ]
            with listening(path):
                pass
        finally:
            process.kill()


def test_a_governor_that_answers_excludes_another_even_without_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "governor.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
        old.listen(0)
        for _ in range(3):  # the last one finds a full queue
            with (
                pytest.raises(GovernorError, match="another governor is running in"),
                listening(path),
            ):
                pass
        assert path.exists()
    with listening(path):  # the socket that is left does not answer
        pass


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "governor.lock").symlink_to(tmp_path / "elsewhere")
    path = tmp_path / "governor.sock"
    with pytest.raises(GovernorError, match=r"governor\.lock: Too many levels"), listening(path):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_waiting_governor_starts_when_the_other_has_ended(tmp_path: Path) -> None:
    """Until then the first governor keeps the socket. A signal ends the wait."""
    path = tmp_path / "governor.sock"

    async def scene() -> None:
        stop = asyncio.Event()
        with listening(path) as first:
            waiting = asyncio.create_task(wait_for_lock(tmp_path, stop))
            also = asyncio.create_task(wait_for_lock(tmp_path, ended := asyncio.Event()))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                first.accept()[0].close()
            ended.set()
            assert await asyncio.wait_for(also, 5) is None
        lock = await asyncio.wait_for(waiting, 5)
        assert lock is not None
        with listening(path, lock) as second, socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            second.accept()[0].close()
            with (
                pytest.raises(GovernorError, match="another governor is running in"),
                listening(path),
            ):
                pass
        with listening(path):  # the lock was released as well
            pass

    asyncio.run(scene())


def test_a_file_that_is_damaged_while_it_is_open_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = opened(tmp_path / NAME)
    state.put(row(1))
    assert state._db is not None
    state._db.execute("DROP TABLE containers")
    with pytest.raises(StateError):
        state.put(row(2))
    state.register(row(1).key, process(1, 5))  # the next write makes a new file
    assert "database-damaged" in capfd.readouterr().out
    assert (tmp_path / f"{NAME}.damaged-1").exists()
    later = image(tmp_path / NAME, tmp_path / "later")
    assert later.containers == {row(1).key: row(1)}
    assert later.processes == {row(1).key: {1: process(1, 5)}}
    later.close()
    state.close()
