"""Manual pages and completions agree with what the programs parse, and their readers accept them.

The readers are man, mandoc and real shells. tools/man_pages.py and tools/completions.py write the
pages and the completions.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import stat
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from governor import cli, daemon
from governor.config import effect_of, read_schema
from oci_hook import quick, runtime
from tools import command_table, completions, man_pages

ROOT = Path(__file__).resolve().parents[2]
MAN = ROOT / "packaging/man"
COMPLETIONS = ROOT / "packaging/completions"
PAGES = (
    "tidegate.1",
    "tidegate-governor.1",
    "tidegate-hook.1",
    "tidegate-runtime.1",
    "tidegate.yaml.5",
)


@pytest.mark.parametrize("made", [man_pages.files, completions.files])
def test_pages_and_completions_are_up_to_date(made: Callable[[], dict[Path, str]]) -> None:
    """To fix a failure, run `python tools/man_pages.py` and `python tools/completions.py`."""
    for path, text in made().items():
        assert path.read_text() == text, path
    there = {path for top in (MAN, COMPLETIONS) for path in top.rglob("*") if path.is_file()}
    assert there == {*man_pages.files(), *completions.files()}


def test_pages_and_completions_contain_no_path_of_this_checkout() -> None:
    for path in (*man_pages.files(), *completions.files()):
        text = path.read_text().replace("\\", "")  # zsh's descriptions have escaped slashes
        assert str(ROOT) not in text
        assert "build/meson" not in text


def test_the_table_has_the_options_that_the_hook_and_the_wrapper_accept() -> None:
    """The hook and the wrapper have no argparse parser; to fix a failure, edit
    tools/command_table.py.
    """
    with_value = {flag for o in command_table.HOOK.options if o.value for flag in o.flags}
    flags = {flag for o in command_table.HOOK.options if not o.value for flag in o.flags}
    [stages] = [o.choices for o in command_table.HOOK.options if not o.flags]
    assert with_value == set(quick.WITH_VALUE)
    assert flags == {"--governed"}
    assert stages == quick.STAGES
    names = {slot.replace("_", "-") for slot in runtime.NodeSettings.__slots__}
    assert set(command_table.RUNTIME_SETTINGS) == names


def test_the_table_has_the_options_that_the_command_and_the_governor_accept() -> None:
    top = command_table.tidegate()
    assert [one.name for one in top.commands] == list(cli.VERBS)
    for one in top.walk():
        assert one.summary, one.path
        for option in one.options:
            assert option.doc, (one.path, option)
    ps = next(one for one in top.commands if one.name == "ps")
    assert ps.synopsis() == "tidegate ps [--config FILE] [--runtime-dir DIR] [--json]"
    assert {f for o in command_table.governor().options for f in o.flags} == {
        *("-h", "--help", "--config", "--wait"),
        *("--" + name.replace("_", "-") for name in daemon.OVERRIDES),
    }  # fmt: skip


# ---- manual pages


def test_only_the_literal_words_of_a_synopsis_are_bold() -> None:
    lines = (MAN / "tidegate.1").read_text().splitlines()
    assert r"\fBtidegate cdi\fR \fIACTION\fR ..." in lines


def rendered(page: str) -> str:
    """Return the rendered text of a page, without emphasis and with no word split over lines."""
    done = subprocess.run(
        ["man", "-P", "cat", "--no-hyphenation", "--no-justification", "-l", str(MAN / page)],
        env={**os.environ, "MANWIDTH": "400", "LC_ALL": "C.UTF-8"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return re.sub(r".\x08", "", done.stdout)


@pytest.mark.parametrize("page", PAGES)
def test_man_and_mandoc_report_nothing_about_a_page(
    page: str, require: Callable[..., None]
) -> None:
    require("man", "mandoc")
    for command in (
        ["mandoc", "-T", "lint", str(MAN / page)],
        ["man", "--warnings", "-Tutf8", "-l", str(MAN / page)],
    ):
        done = subprocess.run(
            command, env={**os.environ, "MANROFFSEQ": "", "LC_ALL": "C.UTF-8"}, check=True, capture_output=True, text=True
        )  # fmt: skip
        said = done.stdout if command[0] == "mandoc" else done.stderr
        assert said == ""


def test_man_and_mandoc_report_an_invalid_page(
    tmp_path: Path, require: Callable[..., None]
) -> None:
    """This shows that the test above can fail."""
    require("man", "mandoc")
    page = tmp_path / "tidegate.1"
    page.write_text((MAN / "tidegate.1").read_text().replace(".TP\n", ".TQ P\n.XX\n", 1))
    lint = subprocess.run(
        ["mandoc", "-T", "lint", str(page)], capture_output=True, text=True, check=False
    )
    assert lint.stdout
    read = subprocess.run(
        ["man", "--warnings", "-Tutf8", "-l", str(page)], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert read.stderr


def test_every_verb_and_option_is_in_the_page_as_it_is_typed(require: Callable[..., None]) -> None:
    require("man")
    for program, page in (
        (command_table.tidegate(), "tidegate.1"),
        (command_table.governor(), "tidegate-governor.1"),
        (command_table.HOOK, "tidegate-hook.1"),
        (command_table.RUNTIME, "tidegate-runtime.1"),
    ):
        text = rendered(page)
        assert text.split()[0] == f"{program.name.upper()}(1)"
        for command in program.walk():
            for option in command.options:
                for flag in option.flags:
                    if flag.startswith("--"):
                        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", text), (page, flag)
    text = rendered("tidegate.1")
    for status in (0, 1, 2, 64, 69, 75, 77, 78):
        assert re.search(rf"^       {status} +\S", text, re.MULTILINE), status


def test_every_option_of_the_configuration_is_in_its_page(require: Callable[..., None]) -> None:
    require("man")
    text = rendered("tidegate.yaml.5")
    assert "TIDEGATE.YAML(5)" in text
    for name, option in read_schema()["properties"].items():
        for full in [f"{name}.{inner}" for inner in option.get("properties", ())] or [name]:
            paragraph = re.search(rf"^       {full}\s+(.*)", text, re.MULTILINE)
            assert paragraph, full
            assert man_pages.EFFECTS[effect_of(full)] in paragraph[1], full


def test_roff_shows_text_unchanged() -> None:
    assert man_pages.words("a-b `--c-d` \\ 'e' [f](g) ~ [h](../i.md#j).") == (
        "a-b \\fB\\-\\-c\\-d\\fR \\e \\(aqe\\(aq f \\(ti docs/i.md."
    )
    page = man_pages.ManPage("x", 1, "y", "z")
    page.section("A")
    page.say("." + "word " * 40 + ".end 'x")
    assert all(not line.startswith((".word", ".end", "'")) for line in page.lines)


# ---- completions


ZSHRC = """
PS1='<>'; PS2=''; setopt no_beep list_ambiguous; unsetopt auto_menu menu_complete zle_bracketed_paste
fpath=({functions} $fpath)
autoload -Uz compinit; compinit -u -d {dump}
LISTMAX=1000; KEYTIMEOUT=1  # after ^X, which longer keys begin with too
zstyle ':completion:*' list-packed no
zstyle ':completion:*' verbose no
bindkey '^I' complete-word
bindkey '^L' list-choices
mark() {{ print -n '\\0' }}; zle -N mark; bindkey '^X' mark
"""


@pytest.fixture(scope="module")
def zsh_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of zsh's cache of completion functions: reading all of the functions takes 0.5 s."""
    return tmp_path_factory.mktemp("zsh") / "dump"


@pytest.fixture
def directory(tmp_path: Path, zsh_dump: Path) -> Path:
    """A directory with files, a subdirectory, and a `tidegate` that knows two containers."""
    (tmp_path / ".zshenv").write_text("skip_global_compinit=1\n")  # skip Ubuntu's own compinit
    (tmp_path / ".zshrc").write_text(ZSHRC.format(functions=COMPLETIONS / "zsh", dump=zsh_dump))
    for name in ("node.yaml", "a b.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    command = tmp_path / "bin/tidegate"
    command.parent.mkdir()
    command.write_text(
        '#!/bin/sh\n[ "$1" = ps ] || exit 1\n'
        "echo 'CONTAINER  GPU  STATE'\necho '4f3a  0  ok'\necho '77bb  0  violation: memory'\n"
        "echo 'violation: 77bb: much, GPU 0, process 1, for 2 s'\n"
        "echo 'not its own: 77bb: 9 MiB held outside its quota, GPU 1, process 1'\n"
        "echo 'unknown functions: 77bb: cuOfTomorrow'\n"
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def environment(directory: Path) -> dict[str, str]:
    return {
        "PATH": f"{directory}/bin:{os.environ['PATH']}", "HOME": str(directory), "LC_ALL": "C.UTF-8",
        "TERM": "dumb", "XDG_CONFIG_HOME": f"{directory}/none", "XDG_DATA_HOME": f"{directory}/none",
    }  # fmt: skip


BASH = """
source {script}
COMP_LINE=$1; COMP_POINT=${{#1}}
# As bash splits a line: at blanks, and at = on its own.
COMP_WORDS=()
for word in ${{1//=/ = }}; do COMP_WORDS+=("$word"); done
[[ $1 == *[\\ =] && $1 != *= ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
compopt() {{ :; }}
{function}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def bash(line: str, directory: Path) -> set[str]:
    """Return what bash offers, by calling the completion function."""
    program = line.split(maxsplit=1)[0]
    script = BASH.format(
        script=COMPLETIONS / "bash" / program, function="_" + program.replace("-", "_")
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line], cwd=directory, env=environment(directory),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return {word for word in done.stdout.splitlines() if word}


def fish(line: str, directory: Path) -> set[str]:
    """Return what fish itself offers."""
    program = line.split(maxsplit=1)[0]
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {COMPLETIONS}/fish/{program}.fish; complete -C $argv[1]", line],
        cwd=directory, env=environment(directory), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return {word.partition("\t")[0].rstrip("/") for word in done.stdout.splitlines()}


def zsh(line: str, directory: Path) -> set[str]:
    """Return what zsh itself lists in a terminal, one word a line."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (200, 30))  # narrow, so one word a line
    process = subprocess.Popen(
        ["zsh", "-i"], cwd=directory, env={**environment(directory), "ZDOTDIR": str(directory)},
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    os.close(slave)

    def read_until(word: str, seconds: float) -> str:
        text, until = "", time.monotonic() + seconds
        while word not in text and time.monotonic() < until:
            if select.select([master], [], [], 0.05)[0]:
                text += os.read(master, 1 << 16).decode()
        return text

    try:
        assert "<>" in read_until("<>", 20)
        os.write(master, line.encode())
        read_until(line.rsplit(maxsplit=1)[-1], 5)
        os.write(master, b"\x0c\x18")
        shown = read_until("\x00", 20)
        assert "\x00" in shown
    finally:
        process.kill()
        process.wait()
        os.close(master)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", shown)
    # Split into columns, for names with blanks, and into words, for candidates with a description
    # next to them.
    return {
        word.strip().rstrip("/")
        for line in plain.splitlines()
        for word in (*re.split("  +", line), *line.split())
        if word.strip()
    }


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


@pytest.fixture(params=SHELLS)
def complete(
    request: pytest.FixtureRequest, directory: Path, require: Callable[..., None]
) -> Callable[[str], set[str]]:
    """`complete(line)` asks a shell for the possible continuations of a line."""
    require(request.param)
    return lambda line: SHELLS[request.param](line, directory)


def test_verbs_are_offered(complete: Callable[[str], set[str]]) -> None:
    offered = complete("tidegate ")
    assert set(cli.VERBS) <= {word.split()[0] for word in offered}
    assert {word.split()[0] for word in complete("tidegate re")} >= {"reload", "refresh"}
    assert not {"ps", "top"} & {word.split()[0] for word in complete("tidegate re")}


def test_a_verbs_own_options_are_offered(complete: Callable[[str], set[str]]) -> None:
    offered = {word.split()[0].rstrip("=") for word in complete("tidegate top --")}
    assert {"--interval", "--count", "--json", "--config", "--runtime-dir"} <= offered
    assert "--dry-run" not in offered
    offered = {word.split()[0].rstrip("=") for word in complete("tidegate cdi generate --")}
    assert {"--output", "--hook-argument"} <= offered
    assert {"--state-dir", "--config"} <= {
        word.split()[0].rstrip("=") for word in complete("tidegate-governor --")
    }


def test_values_of_positional_arguments_are_offered(complete: Callable[[str], set[str]]) -> None:
    assert {"docker", "podman", "containerd", "crio"} <= complete("tidegate setup ")
    assert {"generate", "list"} <= {word.split()[0] for word in complete("tidegate cdi ")}
    offered = complete("tidegate check ")
    assert {"node.yaml", "a b.yaml"} <= {word.replace("\\ ", " ") for word in offered}
    directories = complete("tidegate ps --runtime-dir ")
    assert "sub" in directories
    assert "node.yaml" not in directories
    assert "node.yaml" not in complete("tidegate top --interval ")


def test_containers_are_offered_and_lines_about_violations_are_not(
    complete: Callable[[str], set[str]],
) -> None:
    for line in ("tidegate inspect ", "tidegate set ", "tidegate events --container "):
        assert complete(line) >= {"4f3a", "77bb"}
        assert not any("violation" in word or word == "CONTAINER" for word in complete(line))


@pytest.mark.parametrize(
    "name",
    ["$(touch${IFS}made)", "`touch${IFS}made`", "$HOME", "--json", "a;touch", "~", "*", "{a,b}"],
)
def test_no_shell_interprets_a_containers_id(
    complete: Callable[[str], set[str]], directory: Path, name: str
) -> None:
    """A container's id may be any text without a slash."""
    command = directory / "bin/tidegate"
    table = f"CONTAINER  GPU  STATE\n{name}  0  ok\n77bb-x_1.+  0  ok\n"
    (directory / "table").write_text(table)
    command.write_text(f'#!/bin/sh\n[ "$1" != ps ] || cat {directory}/table\n')
    for line in ("tidegate inspect ", "tidegate set ", "tidegate events --container "):
        offered = complete(line)
        assert "77bb-x_1.+" in {word.replace("\\", "") for word in offered}
        assert not offered & {name, str(directory), "a", "b", "bin", "table", "made"}
    assert not (directory / "made").exists()


def test_an_option_and_its_value_in_one_word_are_completed(directory: Path) -> None:
    """Bash splits this into three words."""
    assert "sub" in bash("tidegate ps --runtime-dir=", directory)
    assert bash("tidegate ps --runtime-dir=su", directory) == {"sub"}
    assert bash("tidegate top --interval=", directory) == set()


def test_completion_scripts_parse(require: Callable[..., None]) -> None:
    for shell in ("bash", "zsh", "fish"):
        require(shell)
        for path in (COMPLETIONS / shell).iterdir():
            done = subprocess.run(
                [shell, "-n", str(path)], capture_output=True, text=True, check=False
            )
            assert (done.returncode, done.stderr) == (0, ""), path
    if shutil.which("shellcheck"):
        for path in (COMPLETIONS / "bash").iterdir():
            subprocess.run(["shellcheck", str(path)], check=True)
