"""Generates packaging/man, from the table of command lines and the configuration's schema.

`python tools/man_pages.py` writes the pages; `--check` fails if they are stale. They are in man(7)
format, which both man-db and mandoc read.
"""

from __future__ import annotations

import posixpath
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import governor.errors  # noqa: E402
import oci_hook.errors  # noqa: E402
import vdriver.errors  # noqa: E402
from governor.config import Config, effect_of, read_schema  # noqa: E402
from tools import command_table  # noqa: E402
from tools.command_table import HOOK, RUNTIME, RUNTIME_SETTINGS, Command  # noqa: E402
from tools.config_reference import accepted, shown  # noqa: E402
from tools.generated import write_or_check  # noqa: E402

DIRECTORY = ROOT / "packaging/man"
DATE = "2026-11-22"
"""Date of the last review of all pages, and not the current date: builds must be reproducible."""

SPECIAL = {"\\": "\\e", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", "-": "\\-"}

EFFECTS = {
    "now": "A reload applies a new value at once.",
    "next": "After a reload a new value applies to containers and processes that start later.",
    "restart": "A new value needs a restart of the governor.",
}


def plain(text: str) -> str:
    """Return text as roff that shows every character verbatim."""
    return "".join(SPECIAL.get(char, char) for char in text)


def words(text: str) -> str:
    """Return prose that may contain Markdown's code and links as roff.

    A link at the end of a clause or sentence is replaced by the path of the document, and any other
    link by its text.
    """
    text = " ".join(text.split())
    text = re.sub(r"\[[^]]*\]\(([^)]*)\)(?=[.,;)]|$)", lambda link: _document(link[1]), text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"`([^`]*)`", text)
    return "".join(
        f"\\fB{plain(part)}\\fR" if i % 2 else _prose(part) for i, part in enumerate(parts)
    )


def _document(link: str) -> str:
    """Return the path of the document that a link in a page in docs/reference points to."""
    return posixpath.normpath(f"docs/reference/{link.partition('#')[0]}")


def _prose(text: str) -> str:
    """Return prose: hyphens within words are kept, and those that begin options become minuses."""
    return "-".join(plain(part) for part in re.split(r"(?<=\w)-(?=\w)", text))


def option_words(text: str) -> str:
    """Return an option with its value: bold for literal text, italic for placeholders."""
    flag, _, value = text.partition(" ")
    if not flag.startswith("-"):
        return f"\\fI{plain(text)}\\fR"
    return f"\\fB{plain(flag)}\\fR" + (f" \\fI{plain(value)}\\fR" if value else "")


def _wrapped(text: str) -> list[str]:
    """Return a paragraph as source lines, none of which roff takes for a request."""
    lines = textwrap.wrap(text, 78, break_long_words=False, break_on_hyphens=False)
    return [f"\\&{line}" if line.startswith((".", "'")) else line for line in lines]


class ManPage:
    """A page while it is being built."""

    def __init__(self, name: str, section: int, summary: str, comment: str) -> None:
        self.lines = [
            f'.\\" Written by `python tools/man_pages.py` from {comment}.',
            f'.TH "{plain(name.upper())}" "{section}" "{DATE}" "Tidegate {governor.VERSION}"',
            ".SH NAME",
            f"{plain(name)} \\- {words(summary)}",
        ]

    def section(self, title: str) -> None:
        """Begin a section."""
        self.lines.append(f'.SH "{title}"')

    def part(self, title: str) -> None:
        """Begin a subsection."""
        self.lines.append(f'.SS "{plain(title)}"')

    def say(self, *paragraphs: str) -> None:
        """Add paragraphs of prose."""
        for paragraph in paragraphs:
            if not self.lines[-1].startswith((".SH", ".SS")):
                self.lines.append(".PP")
            self.lines += _wrapped(words(paragraph))

    def items(self, rows: Iterable[tuple[str, str]]) -> None:
        """Add a list of terms, which have to be roff, with their meanings."""
        for term, text in rows:
            self.lines += [".TP", term, *_wrapped(words(text) or "\\&")]

    def literal(self, *lines: str) -> None:
        """Add verbatim lines."""
        begin = [".PP"] if not self.lines[-1].startswith((".SH", ".SS")) else []
        self.lines += [*begin, ".nf", ".RS 4"]
        self.lines += [plain(line) or "\\&" for line in lines]
        self.lines += [".RE", ".fi"]

    def synopsis(self, commands: Sequence[Command]) -> None:
        """Add the synopsis of programs."""
        self.section("SYNOPSIS")
        for i, command in enumerate(commands):
            if i:
                self.lines.append(".br")
            self.lines.append(_call(command))

    def options(self, command: Command) -> None:
        """Add a command's options."""
        self.items(
            (option_words(option.shown), _sentence(option.doc))
            for option in command.options
            if "--help" not in option.flags
        )

    def see(self, *pages: str) -> None:
        """Add the related pages."""
        self.section("SEE ALSO")
        named = [
            re.sub(r"(.*)\((\d)\)", r"\\fB\1\\fR(\2)", page).replace("-", "\\-") for page in pages
        ]
        self.lines.append(",\n".join(named))

    def text(self) -> str:
        """Return the page."""
        return "\n".join(self.lines) + "\n"


def _call(command: Command) -> str:
    program = " ".join(command.path)
    head = f"\\fB{plain(program)}\\fR"
    parts = re.findall(r"\[[^]]*\]|[^\s\[\]]+", command.synopsis().removeprefix(program))
    return " ".join([head, *(_call_part(part) for part in parts)])


def _call_part(part: str) -> str:
    if part.startswith("["):
        return f"[{option_words(part[1:-1])}]"
    return option_words(part) if part != "..." else plain(part)


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def statuses(*sources: tuple[object, set[str]]) -> list[tuple[str, str]]:
    """Return exit statuses with their meanings, for the errors in each module with these codes."""
    found: dict[int, list[str]] = {}
    for module, codes in sources:
        for kind in vars(module).values():
            if isinstance(kind, type) and vars(kind).get("code") in codes:
                meaning = (kind.__doc__ or "").strip().partition("\n")[0]
                found.setdefault(vars(kind)["status"], []).append(f"`{kind.code}`: {meaning}")  # type: ignore[attr-defined]
    if any("internal" in codes for _, codes in sources):
        found[70] = ["`internal`: An internal error in Tidegate: report it."]
    return [(f"\\fB{status}\\fR", " ".join(meanings)) for status, meanings in sorted(found.items())]


RUNTIME_CODES = {"annotation", "bundle", "driver", "internal", "mount", "mirror", "device"} | {
    *("governor", "image", "refused")
}
HOOK_CODES = RUNTIME_CODES | {"state"}


CONFIG_FILES = (
    ("\\fB/etc/tidegate/config.yaml\\fR", "The configuration, tidegate.yaml(5)."),
    ("\\fB/etc/tidegate/config.d/*.yaml\\fR", "Drop-ins, read in the order of their names."),
)


def _tidegate_statuses() -> list[tuple[str, str]]:
    return [
        ("\\fB0\\fR", "Success."),
        (
            "\\fB1\\fR",
            "`tidegate doctor` found a problem. With a traceback: an internal error; report it.",
        ),
        ("\\fB2\\fR", "The command line is wrong."),
        *statuses(
            (governor.errors, {"config", "request", "refused", "governor", "database", "setup"}),
            (vdriver.errors, {"library", "driver", "nvml", "mirror"}),
            (oci_hook.errors, {"annotation", "bundle", "driver", "mirror", "image"}),
        ),
        (
            "\\fB130\\fR, \\fB141\\fR",
            "The command was interrupted (130), or the reader of its output closed the pipe (141).",
        ),
    ]


def tidegate_1() -> str:
    """Return tidegate(1)."""
    command = command_table.tidegate()
    page = ManPage("tidegate", 1, "share GPUs among containers by quota", "governor/verbs")
    page.section("SYNOPSIS")
    page.lines += [
        "\\fBtidegate\\fR \\fIverb\\fR [\\fIoption\\fR ...]",
        ".br",
        "\\fBtidegate\\fR [\\fIverb\\fR] \\fB\\-\\-help\\fR",
        ".br",
        "\\fBtidegate \\-\\-version\\fR",
    ]
    page.section("DESCRIPTION")
    page.say(
        """
        Containers share a node's GPUs if their annotations request it, each within its quota of
        memory and of GPU time. `tidegate` shows the containers and their use of the GPUs,
        changes quotas, checks the node and its configuration, sets up container engines and
        maintains the mirror of the driver.
        """,
        """
        The output of a verb is for people, and may change. With `--json` it is for programs:
        later releases may add members, but do not remove one or change its meaning.
        """,
    )
    page.section("VERBS")
    for verb in command.commands:
        for one in verb.walk():
            page.part(" ".join(one.path[1:]))
            page.lines += [_call(one)]
            page.say(_sentence(one.summary))
            if not one.commands:
                page.options(one)
            if one.more:
                page.say(*one.more.strip().split("\n\n"))
    page.section("EXIT STATUS")
    page.items(_tidegate_statuses())
    page.say("Each error is one line on standard error: the problem, a semicolon, and the remedy.")
    page.section("FILES")
    page.items(
        [
            *CONFIG_FILES,
            ("\\fB/run/tidegate/governor.sock\\fR", "The governor's socket, for root only."),
            ("\\fB/var/lib/tidegate/driver\\fR", "The mirror of the driver."),
        ]
    )
    page.section("EXAMPLES")
    page.literal(
        "tidegate ps",
        "tidegate top --interval 1",
        "tidegate set 3f1c --compute 40 --memory 12Gi",
        "tidegate events --follow",
        "tidegate check /etc/tidegate/config.d/50-quantum.yaml && tidegate reload",
    )
    page.see(
        *("tidegate-governor(1)", "tidegate-hook(1)", "tidegate-runtime(1)", "tidegate.yaml(5)")
    )
    return page.text()


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def governor_1() -> str:
    """Return tidegate-governor(1)."""
    command = command_table.governor()
    page = ManPage("tidegate-governor", 1, _lower(command.summary), "governor/daemon.py")
    page.synopsis([command])
    page.section("DESCRIPTION")
    page.say(
        """
        The governor admits containers, accounts for the memory and time of each GPU, grants GPU
        time, and compares the driver's figures with each container's quota. It runs as root, as
        `tidegate-governor.service`, and logs one event per line on standard error: JSON, or text
        if standard error is a terminal.
        """,
        """
        The governor may terminate at any time and for any reason: running containers keep to
        their quotas without it, no new container starts, and the next governor takes over the
        running ones.
        """,
    )
    page.section("OPTIONS")
    page.options(command)
    page.items([("\\fB\\-\\-help\\fR", "Print the usage, and exit.")])
    page.section("SIGNALS")
    page.items(
        [
            (
                "\\fBSIGHUP\\fR",
                """Read the configuration again, as `tidegate reload` does. If it is not valid, the
                governor logs `configuration-refused`, and keeps its current configuration.""",
            ),
            ("\\fBSIGTERM\\fR, \\fBSIGINT\\fR", "Stop the governor. Containers keep running."),
        ]
    )
    page.section("EXIT STATUS")
    page.items(
        [
            ("\\fB0\\fR", "The governor was stopped by a signal."),
            ("\\fB2\\fR", "The command line is wrong."),
            *statuses(
                (governor.errors, {"config", "governor", "database"}),
                (vdriver.errors, {"driver", "nvml"}),
            ),
        ]
    )
    page.section("FILES")
    page.items(
        [
            *CONFIG_FILES,
            ("\\fB/run/tidegate\\fR", "Sockets, and the containers' grant pages."),
            ("\\fB/var/lib/tidegate/state.db\\fR", "The state that the next governor takes over."),
        ]
    )
    page.see("tidegate(1)", "tidegate.yaml(5)", "systemctl(1)")
    return page.text()


def hook_1() -> str:
    """Return tidegate-hook(1)."""
    page = ManPage("tidegate-hook", 1, HOOK.summary, "tools/command_table.py")
    page.synopsis([HOOK])
    page.section("DESCRIPTION")
    page.say(
        """
        Container runtimes call the hook with the container's state on standard input, as the OCI
        runtime specification requires; `tidegate setup` configures them to do so. If the
        container's annotations ask for a GPU (`tidegate.gpu/memory`, `tidegate.gpu/compute` and
        others), the hook mounts the mirrored driver and the container's grant into it. A
        container that asks for nothing is left alone.
        """,
        """
        For the stage `precreate` the hook reads config.json, adds device nodes and itself as a
        hook, and prints the result.
        """,
        """
        The hook fails closed: an error is one line on standard error, and an event in the node's
        log, which `tidegate events` finds; the container does not start, and everything that the
        hook did for it is undone.
        """,
    )
    page.section("OPTIONS")
    page.options(HOOK)
    page.section("EXIT STATUS")
    page.items([("\\fB0\\fR", "Success."), *statuses((oci_hook.errors, HOOK_CODES))])
    page.see("tidegate(1)", "tidegate-runtime(1)", "oci-hooks(5)", "runc(8)")
    return page.text()


def runtime_1() -> str:
    """Return tidegate-runtime(1)."""
    page = ManPage("tidegate-runtime", 1, RUNTIME.summary, "tools/command_table.py")
    page.section("SYNOPSIS")
    page.lines += [
        "\\fBtidegate\\-runtime\\fR [\\fB\\-\\-tidegate\\-config\\fR \\fIFILE\\fR]",
        "\\fIargument\\fR ...",
    ]
    page.section("DESCRIPTION")
    page.say(
        """
        Docker, containerd, CRI-O and Podman execute this runtime in place of runc. It accepts the
        command line of the runtime that it executes. Before `create`, `run` and `restore` of a
        container that requests a GPU it writes device nodes and the hook into the bundle's
        config.json; after `delete` it removes what the start left in the image's layer. Every other
        command is passed directly to that runtime.
        """,
    )
    page.section("OPTIONS")
    page.options(RUNTIME)
    page.say("All other options are those of the runtime that it executes.")
    page.section("SETTINGS")
    page.say(
        """
        `/etc/tidegate/runtime` has one setting per line, a name and a value. Lines that begin
        with `#` are comments. If there is no file, all defaults apply.
        """,
    )
    page.items((f"\\fB{plain(name)}\\fR", _sentence(doc)) for name, doc in RUNTIME_SETTINGS.items())
    page.section("EXIT STATUS")
    page.say("That of the runtime that it executes. Before that runtime is executed:")
    page.items(statuses((oci_hook.errors, RUNTIME_CODES)))
    page.section("FILES")
    page.items([("\\fB/etc/tidegate/runtime\\fR", "The settings.")])
    page.see("tidegate(1)", "tidegate-hook(1)", "runc(8)", "crun(1)")
    return page.text()


def yaml_5() -> str:
    """Return tidegate.yaml(5)."""
    page = ManPage("tidegate.yaml", 5, "configuration of a node", "governor/config.schema.json")
    page.section("SYNOPSIS")
    page.lines += ["/etc/tidegate/config.yaml", ".br", "/etc/tidegate/config.d/*.yaml"]
    page.section("DESCRIPTION")
    page.say(
        """
        YAML, without aliases. The files in `config.d` are read after `config.yaml`, in the
        order of their names, if they end in `.yaml` and do not begin with a dot. If an option is
        given in several files, the last value wins: mappings are merged key by key, and a list
        replaces the earlier one. If there is no file, all defaults apply. A file other
        than `config.yaml`, named by `--config`, has drop-ins of its own: those of `node.yaml` are
        in `node.d` in the same directory.
        """,
        """
        An unknown option, an option that is given twice in one file, and a value that is not
        accepted are errors that name the file and the option. The governor does not start with
        such a file, and a running governor keeps its configuration. `tidegate check FILE` reports
        whether a file is accepted. `tidegate reload` applies it and reports which options
        need a restart; `tidegate reload --dry-run` reports both in advance.
        """,
        """
        Sizes are bytes, or whole numbers with `Ki`, `Mi`, `Gi` or `Ti`. A name with a dot is an
        option within another: `defaults.memory` is `memory:` below `defaults:`.
        """,
    )
    page.section("OPTIONS")
    page.items(_option_items(read_schema()["properties"], Config()))
    page.section("EXAMPLES")
    page.literal(
        "placement: pack",
        "memory_reserve: 1Gi",
        "defaults:",
        "  memory: 4Gi",
        "  compute: 10",
        "metrics:",
        "  listen: unix",
    )
    page.see("tidegate(1)", "tidegate-governor(1)")
    return page.text()


def _option_items(
    options: dict[str, dict[str, object]], values: object, prefix: str = ""
) -> Iterable[tuple[str, str]]:
    for name, option in options.items():
        inner = option.get("properties")
        if isinstance(inner, dict):
            yield from _option_items(inner, getattr(values, name), f"{prefix}{name}.")
            continue
        default = shown(name, getattr(values, name), option)
        says = _sentence(str(option["description"]))
        means = f"Accepted: {accepted(name, option)}. Default: {default}."
        effect = EFFECTS[effect_of(prefix + name)]
        yield f"\\fB{plain(prefix + name)}\\fR", f"{says} {means} {effect}"


def files() -> dict[Path, str]:
    """Return every page with its expected content."""
    return {
        DIRECTORY / "tidegate.1": tidegate_1(),
        DIRECTORY / "tidegate-governor.1": governor_1(),
        DIRECTORY / "tidegate-hook.1": hook_1(),
        DIRECTORY / "tidegate-runtime.1": runtime_1(),
        DIRECTORY / "tidegate.yaml.5": yaml_5(),
    }


if __name__ == "__main__":
    sys.exit(write_or_check(files(), "tools/man_pages.py"))
