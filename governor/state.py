"""Persistent state of the governor: claims, containers and their processes, in SQLite.

The database is in WAL mode. An answer is sent only after the row that it promises has been written,
so if a governor is killed, every promise that it made is known to the next one. Writes do not wait
for the disk (fsync): the kernel keeps the writes of a killed process, and after a loss of power the
processes that they describe are gone as well.

The model in memory is authoritative. While the file cannot be written (for example, on a full
disk), requests that can be refused are refused. Events that have happened (a process started or
ended) are kept in memory and written as soon as possible.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from governor.cgroups import Membership
from governor.claims import Claim, Use, parse_claim
from governor.errors import GovernorError, StateError, TidegateError
from governor.processes import FileIdentity, Identity, boot_id
from governor.quota import THROUGHPUT, Quota

log = structlog.get_logger()

Row = TypeVar("Row")

NAME = "state.db"

MIGRATIONS = (
    (
        "CREATE TABLE containers (key TEXT PRIMARY KEY, row TEXT, seal TEXT)",
        """CREATE TABLE processes (
            key TEXT, slot INTEGER, row TEXT, seal TEXT, PRIMARY KEY (key, slot)
        )""",
    ),
    ("CREATE TABLE claims (uid TEXT PRIMARY KEY, row TEXT, seal TEXT)",),
)
"""Statements that migrate each version of the schema to the next, beginning with an empty file.

Rows are JSON with a digest: SQLite detects an invalid page, but not a value that was corrupted on
the disk.
"""
VERSION = len(MIGRATIONS)

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_MISMATCH)


@dataclass(frozen=True)
class ProcessRow:
    """A registered process; `start_us` is when it registered, in microseconds since 1970."""

    slot: int
    process: Identity
    start_us: int


@dataclass(frozen=True)
class Owner:
    """The owner of a container, as its engine reports it.

    The bundle, and `pod`, `namespace`, `name` and so on, are untrusted text, kept for display. Any
    of them may be missing.
    """

    bundle: str = ""
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MemberRow:
    """One of the containers that use the same shares of claims."""

    identifier: str | None
    process: Identity
    confirmed: bool = False
    membership: Membership | None = None
    owner: Owner = field(default_factory=Owner)


@dataclass(frozen=True)
class ContainerRow:
    """A container; `identifier` is None if only its digest, the key, is known.

    `membership` is None if the governor that wrote the row did not store it. `uses` are shares of
    claims, if the container's quota comes from them. In that case `others` are the other containers
    that use the same shares; this one is the oldest. `suspended` is true if some of its processes
    may be suspended.
    """

    key: str
    identifier: str | None
    process: Identity
    quota: Quota
    devices: tuple[str, ...]
    ledger: FileIdentity
    confirmed: bool = False
    membership: Membership | None = None
    owner: Owner = field(default_factory=Owner)
    uses: tuple[Use, ...] = ()
    others: tuple[MemberRow, ...] = ()
    suspended: bool = False

    @property
    def members(self) -> tuple[MemberRow, ...]:
        """All members, oldest first."""
        first = MemberRow(
            self.identifier, self.process, self.confirmed, self.membership, self.owner
        )
        return (first, *self.others)

    def of(self, members: Sequence[MemberRow]) -> ContainerRow:
        """Return the same row with other members, of which there is at least one."""
        first, *others = members
        return replace(self, **vars(first), others=tuple(others))


class _DamageError(Exception):
    """The file exists, but its content is not valid."""


class _NewerError(Exception):
    """The file was written by a later version of the governor."""


class State:
    """The model, and the file at `path`; without a path, the model alone.

    `load` opens the file, which stays locked while it is open, so no other process can open it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._boot = boot_id()
        self._db: sqlite3.Connection | None = None
        self._behind = path is not None  # the file lacks changes made to the model
        self._failing = False
        self._file: FileIdentity | None = None  # identity of the open file
        self.containers: dict[str, ContainerRow] = {}
        self.processes: dict[str, dict[int, ProcessRow]] = {}
        self.claims: dict[str, Claim] = {}

    def load(self) -> None:
        """Read the file; a damaged or newer one is set aside and logged, and the model stays empty.

        Raise GovernorError if another process has the file open. If the file cannot be read or
        created, that is logged, and `retry` tries again.
        """
        if self._path is None:
            return
        try:
            self._open(self._path)
        except (_DamageError, _NewerError) as e:
            self._set_aside(self._path, e)
        except sqlite3.Error as e:
            if _code(e) == sqlite3.SQLITE_BUSY:
                raise GovernorError(
                    f"{self._path} is open in another process",
                    hint="stop the other governor, or give this one a state_dir of its own",
                ) from e
            self._log_failure(e)
        except OSError as e:
            self._log_failure(e)

    def _open(self, path: Path) -> sqlite3.Connection:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # SQLite creates its other files with the mode of this one.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        path.chmod(0o600)
        db = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            # The lock lasts until this process ends, however it ends.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            self._migrate(db)
            claims = self._read_claims(db)
            containers, processes, old = self._read(db)
        except (sqlite3.Error, ValueError, TypeError, KeyError, OverflowError, TidegateError) as e:
            with contextlib.suppress(sqlite3.Error):
                db.close()
            if isinstance(e, sqlite3.Error) and not _is_damage(e):
                raise
            raise _DamageError(str(e) or type(e).__name__) from e
        except BaseException:
            db.close()
            raise
        self._db, self.containers, self.processes = db, containers, processes
        self.claims = claims
        self._file = _file_identity(path)
        self._behind = old
        return db

    def _migrate(self, db: sqlite3.Connection) -> None:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version < 0:
            raise _DamageError(f"the file has version {version}")
        if version > VERSION:
            raise _NewerError(
                f"the file has version {version}, but this governor supports {VERSION} at most"
            )
        (check,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if check != "ok":
            raise _DamageError(check)
        for number in range(version, VERSION):
            with _transaction(db):
                for statement in MIGRATIONS[number]:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {number + 1}")

    @staticmethod
    def _read_claims(db: sqlite3.Connection) -> dict[str, Claim]:
        """Return the claims, including those from earlier boots: they are not announced again."""
        claims: dict[str, Claim] = {}
        for uid, text, seal in db.execute("SELECT uid, row, seal FROM claims"):
            values = _unseal(text, seal)
            if values["uid"] != uid:
                raise ValueError(f"claim {uid} is stored as {values['uid']}")
            claims[uid] = parse_claim(values, leaving=values["leaving"])
        return claims

    def _read(
        self, db: sqlite3.Connection
    ) -> tuple[dict[str, ContainerRow], dict[str, dict[int, ProcessRow]], bool]:
        """Return the rows from this boot, and whether the file has rows from other boots."""
        containers: dict[str, ContainerRow] = {}
        processes: dict[str, dict[int, ProcessRow]] = {}
        old = False
        for key, text, seal in db.execute("SELECT key, row, seal FROM containers"):
            values = _unseal(text, seal)
            if values["boot"] != self._boot:
                old = True
                continue
            row = ContainerRow(
                values["key"],
                values["identifier"],
                Identity(*values["process"]),
                Quota(*values["quota"]),
                tuple(values["devices"]),
                FileIdentity(*values["ledger"]),
                values["confirmed"],
                _membership(values.get("membership")),
                Owner(*values.get("whose", ())),
                tuple((uid, name) for uid, name in values.get("uses", ())),
                tuple(_member(one) for one in values.get("others", ())),
                values.get("suspended", False),
            )
            if row.key != key:
                raise ValueError(f"container {key} is stored as {row.key}")
            containers[key] = row
        for key, slot, text, seal in db.execute("SELECT key, slot, row, seal FROM processes"):
            values = _unseal(text, seal)
            if values["key"] != key or values["slot"] != slot:
                raise ValueError(f"process {slot} of {key} is stored in the place of another")
            if key not in containers:
                old = True  # from another boot, or of a removed container
                continue
            processes.setdefault(key, {})[slot] = ProcessRow(
                slot, Identity(*values["process"]), values["start_us"]
            )
        return containers, processes, old

    @staticmethod
    def _set_aside(path: Path, why: _DamageError | _NewerError) -> None:
        """Move the file and its companions away, and log that."""
        damaged = isinstance(why, _DamageError)
        name = f"{path.name}.damaged" if damaged else f"{path.name}.newer"
        number = 1
        while (aside := path.with_name(f"{name}-{number}")).exists():
            number += 1
        moved_to: Path | None = aside
        try:
            for suffix in ("-wal", "-shm"):
                companion = path.with_name(path.name + suffix)
                if companion.exists():
                    companion.rename(aside.with_name(aside.name + suffix))
            path.rename(aside)
        except OSError as e:
            log.error("database-stays", path=str(path), error=str(e))
            moved_to = None
        log.error(
            "database-damaged" if damaged else "database-newer",
            path=str(path),
            error=str(why),
            moved_to=str(moved_to),
        )

    # ---- promises: if one cannot be written, StateError is raised and nothing changes ----

    def put(self, row: ContainerRow) -> None:
        """Add a container, or change it. Raise StateError if that cannot be written."""
        self._promise(self.containers, row.key, row, lambda db: self._put(db, row))

    def put_claim(self, claim: Claim) -> None:
        """Add a claim, or change it. Raise StateError if that cannot be written."""
        self._promise(self.claims, claim.uid, claim, lambda db: self._put_claim(db, claim))

    def strike_claim(self, uid: str) -> None:
        """Remove a claim. Raise StateError if that cannot be written."""
        self._promise(
            self.claims,
            uid,
            None,
            lambda db: db.execute("DELETE FROM claims WHERE uid = ?", (uid,)),
        )

    def _promise(
        self,
        model: dict[str, Row],
        key: str,
        row: Row | None,
        write: Callable[[sqlite3.Connection], object],
    ) -> None:
        before = model.get(key)
        if row is None:
            model.pop(key, None)
        else:
            model[key] = row
        try:
            self._write(write)
        except (sqlite3.Error, OSError) as e:
            if before is None:
                model.pop(key, None)
            else:
                model[key] = before
            self._log_failure(e)
            raise StateError(
                f"{self._path} cannot be written: {e}",
                hint="free disk space, or make the file writable; running containers keep running",
            ) from e

    # ---- events: kept in memory if they cannot be written ----

    def note(self, row: ContainerRow) -> None:
        """Add a running container, even if that cannot be written."""
        self.containers[row.key] = row
        self._note(lambda db: self._put(db, row))

    def leave(self, key: str) -> None:
        """Remove a container with its processes; an unknown one is not an error."""
        if self.containers.pop(key, None) is None:
            return
        self.processes.pop(key, None)

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM containers WHERE key = ?", (key,))
            db.execute("DELETE FROM processes WHERE key = ?", (key,))

        self._note(write)

    def leave_claim(self, uid: str) -> None:
        """Remove a claim after its last container has ended; an unknown one is not an error."""
        if self.claims.pop(uid, None) is not None:
            self._note(lambda db: db.execute("DELETE FROM claims WHERE uid = ?", (uid,)))

    def note_claim(self, claim: Claim) -> None:
        """Add a claim that containers use, even if that cannot be written."""
        self.claims[claim.uid] = claim
        self._note(lambda db: self._put_claim(db, claim))

    def register(self, key: str, row: ProcessRow) -> None:
        """Add a process with its slot."""
        self.processes.setdefault(key, {})[row.slot] = row
        self._note(lambda db: self._put_process(db, key, row))

    def unregister(self, key: str, slot: int) -> None:
        """Remove a process."""
        if self.processes.get(key, {}).pop(slot, None) is not None:
            self._note(
                lambda db: db.execute(
                    "DELETE FROM processes WHERE key = ? AND slot = ?", (key, slot)
                )
            )

    def retry(self) -> None:
        """Retry writes that failed; create the file again if it was removed."""
        if self._path is None:
            return
        if self._db is not None and _file_identity(self._path) != self._file:
            log.error("database-gone", path=str(self._path))
            self._drop()
        if self._behind:
            self._note(None)

    def close(self) -> None:
        """Close the file; its content stays."""
        self._drop()

    # ---- writing ----

    def _put(self, db: sqlite3.Connection, row: ContainerRow) -> None:
        text, seal = _seal(
            {
                "key": row.key,
                "identifier": row.identifier,
                "boot": self._boot,
                "process": row.process,
                "quota": _quota_values(row.quota),
                "devices": row.devices,
                "ledger": row.ledger,
                "confirmed": row.confirmed,
                "membership": row.membership and [row.membership.cgroups, row.membership.namespace],
                "whose": [row.owner.bundle, dict(row.owner.identity)],
                "uses": row.uses,
                "suspended": row.suspended,
                "others": [
                    {
                        "identifier": one.identifier,
                        "process": one.process,
                        "confirmed": one.confirmed,
                        "membership": one.membership
                        and [one.membership.cgroups, one.membership.namespace],
                        "whose": [one.owner.bundle, dict(one.owner.identity)],
                    }
                    for one in row.others
                ],
            }
        )
        db.execute("INSERT OR REPLACE INTO containers VALUES (?, ?, ?)", (row.key, text, seal))

    @staticmethod
    def _put_claim(db: sqlite3.Connection, claim: Claim) -> None:
        text, seal = _seal({**claim.describe(), "leaving": claim.leaving})
        db.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?)", (claim.uid, text, seal))

    @staticmethod
    def _put_process(db: sqlite3.Connection, key: str, row: ProcessRow) -> None:
        text, seal = _seal(
            {"key": key, "slot": row.slot, "process": row.process, "start_us": row.start_us}
        )
        db.execute(
            "INSERT OR REPLACE INTO processes VALUES (?, ?, ?, ?)", (key, row.slot, text, seal)
        )

    def _note(self, write: Callable[[sqlite3.Connection], object] | None) -> None:
        try:
            self._write(write)
        except (sqlite3.Error, OSError) as e:
            self._log_failure(e)

    def _write(self, write: Callable[[sqlite3.Connection], object] | None) -> None:
        """Write one change, or the whole model if the file lacks more than that."""
        if self._path is None:
            return
        db = self._db or self._reopen(self._path)
        try:
            with _transaction(db):
                if self._behind or write is None:
                    self._write_all(db)
                else:
                    write(db)
        except sqlite3.Error as e:
            self._behind = True
            if _is_damage(e):
                self._drop()
            raise
        self._behind = False
        if self._failing:
            self._failing = False
            log.info("database-written", path=str(self._path))

    def _write_all(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM containers")
        db.execute("DELETE FROM processes")
        db.execute("DELETE FROM claims")
        for claim in self.claims.values():
            self._put_claim(db, claim)
        for row in self.containers.values():
            self._put(db, row)
        for key, processes in self.processes.items():
            for process in processes.values():
                self._put_process(db, key, process)

    def _reopen(self, path: Path) -> sqlite3.Connection:
        """Reopen the file, but keep the model in memory, which is newer than the file."""
        containers, processes, claims = self.containers, self.processes, self.claims
        try:
            return self._open(path)
        except (_DamageError, _NewerError) as e:
            self._set_aside(path, e)
            try:
                return self._open(path)
            except (_DamageError, _NewerError) as again:
                raise OSError(f"the new file is damaged as well: {again}") from again
        finally:
            self.containers, self.processes, self.claims = containers, processes, claims
            self._behind = True

    def _drop(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = None
        self._behind = self._path is not None

    def _log_failure(self, e: Exception) -> None:
        self._behind = True
        if not self._failing:
            log.error("database-unwritable", path=str(self._path), error=str(e))
        self._failing = True


def _quota_values(quota: Quota) -> list[int | str]:
    """Return the values that make up a `Quota`.

    Defaults at the end are omitted, so that an older governor that does not support these values
    can read the row.
    """
    values: list[int | str] = [quota.memory, quota.compute, quota.compute_limit]
    if quota.parking:
        return [*values, quota.work_class, quota.parking]
    return values if quota.work_class == THROUGHPUT else [*values, quota.work_class]


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # After an error like a full disk, SQLite has already rolled back the transaction.
        if db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise


def _file_identity(path: Path) -> FileIdentity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return FileIdentity(status.st_dev, status.st_ino)


def _code(e: sqlite3.Error) -> int:
    code: int = getattr(e, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF


def _is_damage(e: sqlite3.Error) -> bool:
    """Return whether an error is due to the content; a missing table has no specific code."""
    code = _code(e)
    return code in _DAMAGED or code in (sqlite3.SQLITE_OK, sqlite3.SQLITE_ERROR)


def _member(values: dict[str, Any]) -> MemberRow:
    return MemberRow(
        values["identifier"],
        Identity(*values["process"]),
        values["confirmed"],
        _membership(values["membership"]),
        Owner(*values["whose"]),
    )


def _membership(value: Any) -> Membership | None:
    if value is None:
        return None
    cgroups, namespace = value
    if namespace is not None:
        device, inode = namespace
        namespace = device, inode
    return Membership(dict(cgroups), namespace)


def _seal(values: dict[str, Any]) -> tuple[str, str]:
    text = json.dumps(values)
    return text, hashlib.sha256(text.encode()).hexdigest()[:16]


def _unseal(text: object, seal: object) -> dict[str, Any]:
    if (
        not isinstance(text, str)
        or hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16] != seal
    ):
        raise ValueError("a row is not as it was written")
    values: dict[str, Any] = json.loads(text)
    return values
