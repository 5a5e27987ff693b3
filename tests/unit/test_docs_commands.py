"""Test that each command in the documents is accepted by its parser or listed as run elsewhere.

Readers copy the shell blocks. Each command in them is either one of ours, which its real parser
accepts, or a system program, for which `SYSTEM` states where it is run or why it is not run. Any
other program fails the test. tests/container/test_tutorial.py types docs/tutorial.md as a whole.
"""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from governor import cli
from governor.config import parse_config
from oci_hook.quick import parse_arguments
from oci_hook.request import parse_annotations
from tests.unit.shell_blocks import ROOT, ShellCommand, blocks, commands, inline, pages, script_of
from tools import markdown

ENGINES = "an engine's: tests/container/test_engines.py and test_setup_engines.py do the same with each engine"
PACKAGES = (
    "changes a Debian, an RPM or a Python installation: tests/packages does, in roots of its own"
)
SYSTEMD = (
    "a node's service manager: tests/container/test_systemd.py and tests/packages, under a real one"
)
CLUSTER = "needs a cluster"
DRIVER = "needs a driver's package, from the network: tests/unit/test_vdriver_debian.py"
SHELL = "a shell's own, or a program that any system has"

SYSTEM = {
    **dict.fromkeys(("docker", "podman", "ctr", "nerdctl", "containerd", "crictl"), ENGINES),
    "crio": "an engine's: tests/container/test_crio.py runs it where it is to be had",
    **dict.fromkeys(("apt", "apt-get", "apt-cache", "dnf", "rpm", "dpkg-deb"), PACKAGES),
    **dict.fromkeys(
        ("semodule", "restorecon", "setsebool"),
        "needs SELinux that enforces: not tried, as the page says",
    ),
    **dict.fromkeys(("systemctl", "journalctl", "systemd-escape"), SYSTEMD),
    "kubectl": CLUSTER,
    "helm": "renders a chart of another project",
    "runc": "tests/container/test_tutorial.py types it",
    "ssh": "needs a second machine",
    "curl": "tests/unit/test_governor_metrics.py and test_governor_web.py ask the same of the same sockets",
    "NVIDIA-Linux-x86_64-595.45.run": DRIVER,
    "jq": "tests/unit/test_governor_listing.py reads the same members",
    **dict.fromkeys(
        (
            "mkdir",
            "echo",
            "cat",
            "grep",
            "head",
            "touch",
            "rm",
            "cp",
            "cd",
            "sleep",
            "wait",
            "kill",
            "sh",
            "git",
            "mktemp",
        ),
        SHELL,
    ),
    **dict.fromkeys(("pip", "venv"), PACKAGES),
}
READERS = {"train.py"}  # programs that readers provide
OURS = {"tidegate", "tidegate-governor", "tidegate-hook"}
SCRIPTS = {"tests/gpu/run", "tools/", "examples/", "build/meson/"}

VARIABLES = set(
    re.findall(r"\b([A-Za-z_]+)\b\s*\??:?=|\$\(([A-Za-z_]+)\)", (ROOT / "Makefile").read_text())
)
UNITS = {path.name for path in (ROOT / "packaging/systemd").iterdir()}
UNITS |= {"docker", "containerd", "crio", "podman", "prometheus", "kubelet"}  # others' units


class ParsedError(Exception):
    """The command line was accepted. Nothing was done."""


def ours(command: ShellCommand) -> list[str] | None:
    """Return the arguments of one of our programs or of python -m, or None for another program."""
    name = command.program.rpartition("/")[2]
    where = command.program.removesuffix(name)
    if name in OURS and where in {"", ".venv/bin/", "/usr/bin/", "/opt/tidegate/bin/"}:
        return [name, *command.words[1:]]
    if name in {"python", "python3"} and where in {"", ".venv/bin/"} and len(command.words) > 1:
        return ["python", *command.words[1:]]
    return None


def without_brackets(words: list[str]) -> list[str]:
    """Return a synopsis as a command with all its options. Placeholders for more arguments are dropped."""
    return [
        word.strip("[]") if word[0] == "[" or word[-1] == "]" else word
        for word in words
        if word != "..."
    ]


def parse_by(monkeypatch: pytest.MonkeyPatch, module: str, arguments: list[str]) -> None:
    """Run a module until it has parsed its command line."""
    real = argparse.ArgumentParser.parse_args

    def parse(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(ParsedError):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def module_file(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"


ALL = sorted({(c.words, c) for c in commands()}, key=lambda pair: str(pair[1]))
PARSED = [c for _, c in ALL if ours(c)]


def test_every_block_names_its_language():
    """To fix a failure, write sh, console, text, json or another language after the three
    backticks.
    """
    unnamed = [
        f"{page.relative_to(ROOT)}:{fence.line}"
        for page in pages()
        for fence in markdown.fences(page.read_text())
        if not fence.language
    ]
    assert unnamed == []


def test_shell_blocks_are_valid_shell():
    for page, fence in blocks():
        script = re.sub(r"\[(--[^]]*)\]", r"\1", script_of(fence))
        done = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}:{fence.line}: {done.stderr}"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", PARSED, ids=str)
def test_a_command_of_ours_is_accepted_by_its_own_parser(command, monkeypatch):
    words = without_brackets(ours(command))
    if words[0] == "python" and words[1] != "-m":
        assert words[1] in READERS or (ROOT / words[1]).exists(), command
    elif words[0] == "python" and words[2] in {"venv", "pip"}:
        assert words[2] in SYSTEM
    elif words[0] == "python":
        assert module_file(words[2]).exists(), command
        if "argparse" in module_file(words[2]).read_text() or words[2] == "simgpu":
            parse_by(monkeypatch, words[2], words[3:])
    elif words[0] == "tidegate":
        assert cli.parser().parse_args(words[1:]).verb == words[1]
    elif words[0] == "tidegate-hook":
        parse_arguments(words[1:])
    else:
        parse_by(monkeypatch, "governor.daemon", words[1:])


def test_every_other_command_is_in_the_table():
    """To fix a failure, add the program to SYSTEM, with where it is run or why it cannot be."""
    strange = []
    for _, command in ALL:
        program = command.program
        if ours(command) or program == "make" or program.startswith(tuple(SCRIPTS)):
            continue
        name = program.rpartition("/")[2] if program.startswith(("/usr/", "/opt/")) else program
        if name not in SYSTEM:
            strange.append(str(command))
    assert strange == []


def test_make_has_the_targets_and_variables_that_are_named():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = {name for pair in VARIABLES for name in pair if name}
    for command in [*(c for _, c in ALL), *inline()]:
        if command.program != "make":
            continue
        for word in command.words[1:]:
            name, equals, _ = word.partition("=")
            assert name in (variables if equals else targets), command


def test_units_that_are_named_exist():
    for _, command in ALL:
        if command.program == "systemctl":
            words = [w for w in command.words[2:] if not w.startswith(("-", "$"))]
        elif command.program == "journalctl" and "-u" in command.words:
            words = [command.words[command.words.index("-u") + 1]]
        else:
            continue
        for word in words:
            assert word in UNITS or f"{word}.service" in UNITS, command


def test_annotations_that_are_given_are_accepted():
    for _, command in ALL:
        given = dict(
            word.removeprefix("--annotation=").split("=", 1)
            for before, word in zip(("", *command.words), command.words, strict=False)
            if before in {"--annotation", "-l"} and word.startswith("tidegate.gpu/")
        )
        if given:
            given.setdefault("tidegate.gpu/memory", "1Gi")
            parse_annotations(given)


def test_paths_of_the_repository_that_are_named_exist():
    top = "tools|tests|bench|docs|examples|packaging|governor|oci_hook|vdriver|libcontrol|simgpu"
    for _, command in ALL:
        for word in command.words:
            for path in re.findall(rf"(?:^|\$PWD/|=)((?:{top})/[\w./-]+)", word):
                assert (ROOT / path).exists(), command


def test_commands_in_the_text_name_verbs_and_options_that_exist():
    """Commands in the text may be abbreviated, so only the names are checked.

    docs/benchmarks.md is left out, because it contains commands that were run only once.
    """
    verbs = {
        verb: choice
        for action in cli.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
        for verb, choice in action.choices.items()
    }
    for command in inline():
        words = ours(command)
        if words is None or len(words) < 2 or command.page == "docs/benchmarks.md":
            continue
        words = without_brackets(words)
        if words[0] == "python":
            assert words[1] != "-m" or len(words) == 2 or module_file(words[2]).exists(), command
        elif words[0] == "tidegate" and not words[1].startswith("-"):
            assert words[1] in verbs, command
            known = {flag for a in _actions(verbs[words[1]]) for flag in a.option_strings}
            named = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
            assert named <= known, command


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the actions of a verb and of its subcommands."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found += _actions(inner)
    return found


FOREIGN_YAML = {"apiVersion", "scrape_configs", "rule_files", "services"}


def test_blocks_of_yaml_are_configurations_or_foreign():
    for page in pages():
        for fence in markdown.fences(page.read_text()):
            if fence.language in {"yaml", "yml"}:
                document = yaml.safe_load(fence.text)
                if isinstance(document, dict) and not FOREIGN_YAML & set(document):
                    parse_config(fence.text, f"{page.name}:{fence.line}")
