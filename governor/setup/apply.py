"""Write the files of a plan completely or not at all, or undo that with the journal."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from governor.errors import SetupError
from governor.setup import journal as journals
from governor.setup.files import Root
from governor.setup.journal import DIRECTORY, ChangedFile, Part
from governor.setup.plan import SetupPlan
from governor.setup.takeout import take_out


@dataclass(frozen=True)
class Edit:
    """A file's bytes before and after; None if there is no file."""

    path: str
    before: bytes | None
    after: bytes | None
    parts: tuple[Part, ...] = ()

    def diff(self, root: Root) -> str:
        """Return the unified difference, safe for a terminal."""
        name = root.shown(self.path)
        lines = difflib.unified_diff(
            _lines(self.before),
            _lines(self.after),
            "/dev/null" if self.before is None else name,
            "/dev/null" if self.after is None else name,
        )
        return "".join(_printable(line) for line in lines)


@dataclass
class SetupUndo:
    """The edits that undo an engine's setup, and notes for the operator."""

    edits: list[Edit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def edits(root: Root, plan: SetupPlan) -> list[Edit]:
    """Return the edits of a plan, in order, without files that already match it."""
    found = []
    for change in plan.changes:
        file = root.read(change.path)
        before = file.data if file else None
        after = None if change.text is None else change.text.encode()
        if before != after:
            found.append(Edit(change.path, before, after, change.parts))
    return found


def set_up(root: Root, engine: str, changes: list[Edit]) -> None:
    """Make these changes; the journal is written first, and a failure is rolled back."""
    made = root.missing(DIRECTORY)
    former = journals.read(root)
    try:
        root.make_directory(DIRECTORY, 0o700)
        with journals.exclusive(root):
            _require_unchanged(root, changes)
            former, journal = journals.read(root), journals.read(root)
            for change in changes:
                journal.record(engine, change.path, change.before, change.after, list(change.parts))
                if change.after is not None:
                    made += [d for d in root.missing(_parent(change.path)) if d not in made]
            journal.directories |= dict.fromkeys(made, engine)
            try:
                journals.write(root, journal)
                for change in changes:
                    if change.after is not None:
                        root.make_directory(_parent(change.path))
                    _put(root, change.path, change.after)
            except BaseException:
                for change in reversed(changes):
                    file = root.read(change.path)
                    if (file.data if file else None) == change.after:
                        _put(root, change.path, change.before)
                journals.write(root, former)
                raise
            _remove_emptied(root, engine, changes)
    except BaseException:
        for directory in sorted(made, key=len, reverse=True):
            if directory not in former.directories:
                root.remove_directory(directory)
        raise


def _remove_emptied(root: Root, engine: str, changes: list[Edit]) -> None:
    """Remove directories that setup created and that moving files has emptied."""
    journal = journals.read(root)
    emptied = {_parent(change.path) for change in changes if change.after is None}
    for directory in sorted(journal.directories, key=len, reverse=True):
        below = any(f"{one}/".startswith(f"{directory}/") for one in emptied)
        if below and journal.directories[directory] == engine and root.remove_directory(directory):
            del journal.directories[directory]
    journals.write(root, journal)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def plan_undo(root: Root, engine: str) -> SetupUndo:
    """Return the edits that undo an engine's setup; unedited files are restored exactly."""
    undo = SetupUndo()
    for entry in reversed(journals.read(root).engines.get(engine, [])):
        file = root.read(entry.path)
        before = file.data if file else None
        after, edited = _reverted(entry, before)
        if edited and after is not None:
            after = _take_out(root, entry, after, undo)
        if after != before:
            undo.edits.append(Edit(entry.path, before, after))
    return undo


def undo(root: Root, engine: str, changes: list[Edit]) -> None:
    """Make the changes of `plan_undo`, and remove the engine's journal and directories."""
    if engine not in journals.read(root).engines:
        return
    with journals.exclusive(root):
        _require_unchanged(root, changes)
        for change in changes:
            _put(root, change.path, change.after)
        journal = journals.read(root)
        for entry in journal.engines[engine]:
            root.sweep(entry.path)
        del journal.engines[engine]
        journals.write(root, journal)
        for directory in sorted(journal.directories, key=len, reverse=True):
            if journal.engines and journal.directories[directory] != engine:
                continue
            if root.remove_directory(directory):
                del journal.directories[directory]
            elif journal.engines:
                # The directory has files of another engine, and is removed with the last of them.
                journal.directories[directory] = next(iter(journal.engines))
        if journal.engines:
            journals.write(root, journal)


def _reverted(entry: ChangedFile, now: bytes | None) -> tuple[bytes | None, bool]:
    """Revert step by step; also return whether the file was edited in between."""
    for step in reversed(entry.steps):
        if now == step.after:
            now = step.before
        elif now != step.before:
            return now, True
    return now, False


def _take_out(root: Root, entry: ChangedFile, data: bytes, undo: SetupUndo) -> bytes | None:
    """Remove Tidegate's parts from an edited file; a file that setup created is renamed."""
    shown = root.shown(entry.path)
    if any("whole" in part for part in entry.parts):
        aside = f"{entry.path}.edited"
        if root.read(aside) is not None:
            raise SetupError(f"{root.shown(aside)} already exists", hint="move it away")
        undo.edits.append(Edit(aside, None, data))
        undo.notes.append(f"{shown} has been edited since: it is kept as {root.shown(aside)}")
        return None
    try:
        rest = take_out(data.decode(), entry.parts, made=entry.steps[0].before is None)
    except ValueError as e:
        raise SetupError(
            f"{shown} has been edited since, and Tidegate's part cannot be told from the rest: {e}",
            hint="correct it or remove it manually, then run the command again",
        ) from e
    undo.notes.append(f"{shown} has been edited since: only Tidegate's part is removed")
    return None if rest is None else rest.encode()


def _require_unchanged(root: Root, changes: list[Edit]) -> None:
    for change in changes:
        file = root.read(change.path)
        if (file.data if file else None) != change.before:
            raise SetupError(
                f"{root.shown(change.path)} was changed by another program in the meantime",
                hint="run the command again",
            )


def _put(root: Root, path: str, data: bytes | None) -> None:
    if data is None:
        root.remove(path)
    else:
        root.write(path, data)


def _lines(data: bytes | None) -> list[str]:
    text = (data or b"").decode(errors="replace").replace("\r\n", "\n")
    return [line + "\n" for line in text.removesuffix("\n").split("\n")] if text else []


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() or c in "\t\n" else "?" for c in line)
