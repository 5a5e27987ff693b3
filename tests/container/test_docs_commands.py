"""The documents' `tidegate` commands, run one after the other on a node that is made for them.

The node has the machine's files, but its own /run, /var/lib, /etc and /usr/bin. It has the
simulated GPU's driver, a governor, and a container that works. Placeholders that a reader fills in
are replaced by values of this node. tests/unit/test_docs_commands.py checks all other commands;
docs/tutorial.md is run unchanged by test_tutorial.py.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.shell_blocks import ShellCommand, commands

ROOT = Path(__file__).resolve().parents[2]
SUBSTITUTES = {
    "ID": "first",
    "3f1c": "first",
    "trainer": "first",
    "ENGINE": "podman",
    "pods.yaml": "$OUT/pods.yaml",
}
ENDLESS = 124  # status of timeout for a command that runs until it is stopped

READS = {"ps", "doctor", "events", "verify"}
"""Verbs that change nothing: a command that several pages contain is run only once."""

NOT_HERE = {
    "docs/tutorial.md": "tests/container/test_tutorial.py types it",
    "docs/howto/add-a-driver-branch.md": "wants a driver's files: tests/unit/test_vdriver_debian.py has some",
}

# Allowed exit statuses by the first words of a command; the longest match applies. Other commands exit with 0.
STATUSES = {
    "tidegate doctor": {0, 1},  # a machine without a GPU and packages has problems
    "tidegate events --follow": {ENDLESS},
    "tidegate events --all --since": {65},  # needs the journal; this node has a syslog
    "tidegate top": {0, ENDLESS},
    "tidegate refresh": {0, 69},  # there may be no driver
    "tidegate refresh --library-dir": {0},
    "tidegate refresh --repair": {0, 69},
}

NODE = r"""
set -eu
mount --make-rprivate /
for directory in /run /var/lib /var/log /dev/shm; do mount -t tmpfs -o mode=755 tmpfs $directory; done
mkdir /run/layers
mount -t tmpfs tmpfs /run/layers
for directory in /etc /usr/bin; do
    mkdir -p /run/layers$directory/upper /run/layers$directory/work
    mount -t overlay -o lowerdir=$directory,upperdir=/run/layers$directory/upper,workdir=/run/layers$directory/work \
        overlay $directory
done
ln -sf $ROOT/.venv/bin/tidegate /usr/bin/tidegate
ln -sf $ROOT/oci_hook/tidegate-hook $ROOT/oci_hook/tidegate-runtime /usr/bin/
touch /var/log/syslog
# No engine runs here. CRI-O's setup checks that CRI-O's monitor exists, so this link replaces it.
[ -e /usr/bin/conmon ] || ln -s true /usr/bin/conmon
mkdir -p /etc/tidegate/config.d
echo 'placement: pack' >/etc/tidegate/config.yaml
echo 'memory_reserve: 1Gi' >/etc/tidegate/config.d/50-ours.yaml
export SIMGPU_DIR=/dev/shm/gpus
.venv/bin/python -m simgpu create --dir $SIMGPU_DIR --devices 2 >/dev/null
.venv/bin/tidegate refresh --library-dir $ROOT/build/meson/simgpu >/dev/null
.venv/bin/tidegate-governor 2>$OUT/governor.log &
until .venv/bin/tidegate check >/dev/null 2>&1; do sleep 0.1; done
examples/first-container/bundle $OUT/bundle --seconds 120
runc run --bundle $OUT/bundle first </dev/null >$OUT/first 2>&1 &
until .venv/bin/tidegate ps | grep -q first; do sleep 0.1; done
.venv/bin/python - <<'END'
from governor.client import ask
from governor.config import Config

gpu = ask(Config(), "gpus")["gpus"][1]
share = {"name": "gpu", "device": gpu["uuid"], "memory": 1 << 30, "compute": 30}
ask(Config(), "claim", uid="1-2-3", namespace="ml", name="train", shares=[share])
END
cat >$OUT/pods.yaml <<'END'
apiVersion: v1
kind: Pod
metadata: {name: old}
spec:
  containers:
    - name: main
      image: registry.example/main
      resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 4000, nvidia.com/gpucores: 30}}
END
set +e
endless=()
"""


SYNOPSIS = "--root DIR"  # doctor's synopsis: its options cannot be combined


def chosen() -> list[ShellCommand]:
    """Return the commands that can be run here."""
    found = []
    for command in commands():
        if command.page in NOT_HERE or not command.page.startswith(("docs/", "README")):
            continue
        ours = command.program.rpartition("/")[2] == "tidegate"
        if ours and SYNOPSIS not in " ".join(command.words):
            found.append(command)
    return found


def typed(command: ShellCommand) -> str:
    """Return the arguments of a command, quoted for the shell and with values of this node."""
    words = [word.strip("[]") if "[" in word or "]" in word else word for word in command.words[1:]]
    return " ".join(
        SUBSTITUTES.get(word, word if word.startswith("$") else shlex.quote(word)) for word in words
    )


def allowed(command: ShellCommand) -> set[int]:
    """Return the statuses that a command may exit with."""
    text = "tidegate " + " ".join(command.words[1:])
    fits = [begin for begin in STATUSES if text.startswith(begin)]
    return STATUSES[max(fits, key=len)] if fits else {0}


@pytest.fixture(scope="module")
def ended(
    require: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """Return the status and the output of each command."""
    require("runc", "unshare", "bash", "timeout")
    out = tmp_path_factory.mktemp("docs")
    script, ran = [NODE], dict[str, int]()
    for number, command in enumerate(chosen()):
        words = typed(command)
        if command.words[1] in READS and ran.setdefault(words, number) != number:
            continue
        endless = ENDLESS in allowed(command)
        run = (
            f"timeout -k 5 {3 if endless else 30} /usr/bin/tidegate {words}"
            f" >{out}/{number} 2>&1 </dev/null; echo $? >{out}/{number}.status"
        )
        # Commands that run until they are stopped run in the background.
        script.append(f"({run}) & endless+=($!)" if endless else run)
    script.append('wait "${endless[@]}"; runc kill first KILL; wait %2; kill %1; wait')
    shell = subprocess.Popen(
        ["unshare", "--mount", "bash", "-c", "\n".join(script)],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "ROOT": str(ROOT),
            "OUT": str(out),
            "PWD": str(ROOT),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=180)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    found = {}
    for number, command in enumerate(chosen()):
        run = ran.get(typed(command), number)
        status = out / f"{run}.status"
        assert status.exists(), f"{said}\n{(out / 'governor.log').read_text()}"
        found[str(command)] = int(status.read_text()), (out / str(run)).read_text()
    return found


@pytest.mark.parametrize("command", chosen(), ids=str)
def test_a_command_of_the_documents_works_on_a_node(command: ShellCommand, ended) -> None:
    status, said = ended[str(command)]
    assert status in allowed(command), said
    assert "Traceback" not in said
    if status not in {0, ENDLESS} and command.words[1] != "doctor":
        assert said.count("\n") == 1, said
