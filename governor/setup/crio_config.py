"""Interpret CRI-O's configuration files according to the rules of CRI-O 1.24 to 1.36.

`crio config` merges the files, but does not check programs. The daemon checks them when it starts,
and exits if the monitor of any handler is missing. The rules are those of UpdateFromPath, Validate,
ValidateRuntimes and TranslateMonitorFields in CRI-O's pkg/config/config.go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

MAIN = "/etc/crio/crio.conf"
DROP_INS = "/etc/crio/crio.conf.d"
HOOKS_DIR = "/usr/share/containers/oci/hooks.d"
# CRI-O has a handler of this name even without files: crun since 1.31, runc before.
BUILT_IN = ("crun", "runc")
# Values of runtime_type for which conmon is the monitor; the others have their own monitor.
BY_CONMON = ("", "oci")
# Stages that are accepted in a hook's file; with any other stage CRI-O does not start.
STAGES = frozenset(
    ("createContainer", "createRuntime", "poststart", "poststop", "prestart", "startContainer")
)
# Directories in which a systemd service finds programs.
SEARCH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

Runs = Callable[[str], bool]  # whether there is a program at an absolute path


@dataclass
class Configuration:
    """CRI-O's merged files: [crio.runtime], and its handlers with the file of each.

    `named_by` maps a key of [crio.runtime] to its file.
    """

    runtime: dict[str, Any] = field(default_factory=dict)
    handlers: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    named_by: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, document: dict[str, Any]) -> None:
        """Add another file: a handler replaces an earlier one of the same name entirely."""
        crio = document.get("crio")
        runtime = crio.get("runtime") if isinstance(crio, dict) else None
        if not isinstance(runtime, dict):
            return
        handlers = runtime.get("runtimes")
        for name, handler in handlers.items() if isinstance(handlers, dict) else ():
            self.handlers[name] = handler if isinstance(handler, dict) else {}
            self.origins[name] = path
        named = {key: value for key, value in runtime.items() if key != "runtimes"}
        self.runtime |= named
        self.named_by |= dict.fromkeys(named, path)

    def text(self, key: str, handler: str | None = None) -> str:
        """Return a string from a handler, or from [crio.runtime]; "" if it has none."""
        table = self.runtime if handler is None else self.handlers.get(handler, {})
        value = table.get(key)
        return value if isinstance(value, str) else ""

    @property
    def hooks_directories(self) -> tuple[str, ...]:
        """The directories in which CRI-O looks for hooks."""
        found = self.runtime.get("hooks_dir", [HOOKS_DIR])
        names = found if isinstance(found, list) else []
        return tuple(name.rstrip("/") for name in names if isinstance(name, str))

    def default(self, runs: Runs) -> str:
        """Return the default handler's name; if none is set, the built-in one that is installed."""
        named = self.text("default_runtime")
        return named or next((name for name in BUILT_IN if self.program(name, runs)), BUILT_IN[0])

    def program(self, name: str, runs: Runs) -> str | None:
        """Return the program of a handler, or None if it does not exist."""
        if self.handlers.get(name, {}).get("inherit_default_runtime") is True:
            name = self.text("default_runtime") or name
        path = self.text("runtime_path", name)
        if path:
            return path if runs(path) else None
        return search(name, runs)

    def monitor(self, name: str, runs: Runs) -> str | None:
        """Return the conmon of a handler, or None if it does not exist."""
        path = self.text("conmon") or self.text("monitor_path", name)
        if path:
            return path if runs(path) else None
        return search("conmon", runs)

    def faults(self, runs: Runs) -> Iterator[tuple[str, str]]:
        """Yield the faults that keep CRI-O from starting, each with its remedy."""
        default = self.default(runs)
        if default not in (*self.handlers, *BUILT_IN):
            yield (
                f"default_runtime is {default}, but no file has a handler of that name",
                f"write [crio.runtime.runtimes.{default}], or correct default_runtime",
            )
        for name in {default: None, **self.handlers}:
            origin = self.origins.get(name, "its built-in default")
            if self.program(name, runs) is None:
                # CRI-O ignores any other handler whose program is missing.
                if name == default and (name in self.handlers or name in BUILT_IN):
                    path = self.text("runtime_path", name)
                    lack = "which is missing" if path else "which is not in any program directory"
                    yield (
                        f"the default handler {name} ({origin}) runs {path or name}, {lack}",
                        f"install it, or correct the runtime_path of the handler {name}",
                    )
            elif self.text("runtime_type", name) in BY_CONMON and not self.monitor(name, runs):
                path = self.text("conmon") or self.text("monitor_path", name)
                yield (
                    f"the handler {name} ({origin}) has the monitor {path}, which is missing"
                    if path
                    else f"the handler {name} ({origin}) names no monitor_path, and conmon is not"
                    " in any program directory",
                    f"install conmon, or correct the monitor_path of the handler {name}",
                )


def search(program: str, runs: Runs) -> str | None:
    """Return the path at which a service finds a program, or None if it finds none."""
    if not program or "/" in program:
        return None
    return next((path for d in SEARCH if runs(path := f"{d}/{program}")), None)


def files(names: Callable[[str], Iterable[str]], is_directory: Runs) -> Iterator[str]:
    """Yield CRI-O's files in its reading order: the main file, then all drop-ins by name."""
    yield MAIN
    yield from _below(DROP_INS, names, is_directory)


def _below(
    directory: str, names: Callable[[str], Iterable[str]], is_directory: Runs
) -> Iterator[str]:
    for name in sorted(names(directory)):
        path = f"{directory}/{name}"
        if is_directory(path):
            yield from _below(path, names, is_directory)
        else:
            yield path


def unknown_stages(hook: object) -> list[str]:
    """Return the stages in a hook's file that keep CRI-O from starting."""
    stages = hook.get("stages") if isinstance(hook, dict) else None
    return [str(s) for s in stages if s not in STAGES] if isinstance(stages, list) else []
