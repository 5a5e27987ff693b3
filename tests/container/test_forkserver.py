"""The C programs in front of the hook and the wrapper runtime, and the fork server behind them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from oci_hook.forkserver import MAX_CHILDREN, N_SPARE
from tests.container.bundles import HOOK, Runtime
from tests.container.conftest import FORKSERVER, ForkServer, HookNode
from tests.container.nodes import wait_for

PROGRAMS = ("tidegate-hook", "tidegate-runtime")


def executed(trace: Path) -> list[str]:
    """Return the programs that were executed, from strace's output."""
    lines = trace.read_text().splitlines()
    return [line.split('execve("')[1].split('"')[0] for line in lines if " = 0" in line]


def traced(trace: Path, *command: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    words = ["strace", "-f", "-qq", "-e", "trace=execve", "-e", "signal=none", "-o", str(trace)]
    return subprocess.run([*words, *command], input=stdin, capture_output=True, check=False)


def state(bundle: Path, pid: int = 1 << 21) -> bytes:
    """Return what a runtime writes to a hook's standard input."""
    document = {
        "ociVersion": "1.0.2", "id": "one", "status": "creating", "pid": pid,
        "bundle": str(bundle), "annotations": {},
    }  # fmt: skip
    return json.dumps(document).encode()


@pytest.fixture
def front(node: HookNode, fronts: Path) -> HookNode:
    """A node that uses the C programs."""
    node.program = fronts / "tidegate-hook"
    return node


def interpreted(front: HookNode) -> list[str]:
    """Return the programs that run when no fork server serves."""
    return [str(front.program), str(HOOK)]


def test_the_programs_are_static(front: HookNode) -> None:
    """A static program has no loader, so no environment variable can make a loader bring code into it."""
    for name in PROGRAMS:
        path = front.program.with_name(name)
        done = subprocess.run(["readelf", "-ld", path], capture_output=True, text=True, check=True)
        assert "INTERP" not in done.stdout
        assert "NEEDED" not in done.stdout


def test_a_container_without_a_request_starts_no_interpreter(front: HookNode) -> None:
    bundle = front.bundle("true", annotations={})
    bundle.config["annotations"] = {"other/name": "x"}
    del bundle.config["hooks"]
    bundle.write()
    trace = front.base / "trace"
    done = traced(trace, *front.hook, "createRuntime", stdin=state(bundle.path))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert executed(trace) == [str(front.program)]


@pytest.mark.parametrize("with_server", ["", "server"])
def test_a_governed_start_needs_an_interpreter_only_without_the_server(
    front: HookNode, with_server: str
) -> None:
    server = ForkServer(front.base / "run") if with_server else None
    bundle = front.bundle("true")
    bundle.write()
    trace = front.base / "trace"
    done = traced(trace, *front.hook, "createRuntime", stdin=state(bundle.path))
    assert done.returncode != 0  # the process does not exist
    assert done.stderr.startswith(b"tidegate: ")
    expected = [str(front.program)] if server else interpreted(front)
    assert executed(trace) == expected
    if server:
        server.stop()


@pytest.mark.parametrize("stage", ["createRuntime", "prestart"])
@pytest.mark.usefixtures("forkserver")
def test_a_container_is_prepared_by_the_server(
    front: HookNode, runtime: Runtime, stage: str
) -> None:
    bundle = front.bundle("ls -A /run/tidegate", stage=stage)
    ran = runtime.run(bundle)
    assert (ran.status, ran.stderr) == (0, "")
    assert "grant" in ran.stdout.split()
    assert [event["outcome"] for event in front.events()] == ["prepared", "released"]


@pytest.mark.usefixtures("forkserver")
def test_an_error_of_the_servers_child_is_reported_as_the_hooks(
    front: HookNode, runc: Runtime
) -> None:
    front.governor.mode = "refuse"
    ran = runc.run(front.bundle("true"))
    assert ran.status != 0
    assert "8Gi asked, 2Gi free" in ran.stderr
    assert "exit status 77" in ran.stderr


def test_many_starts_at_once_are_served(front: HookNode, forkserver: ForkServer) -> None:
    bundle = front.bundle("true")
    bundle.write()
    running = [
        subprocess.Popen(
            [*front.hook, "createRuntime"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(40)
    ]
    errors = {one.communicate(state(bundle.path))[1] for one in running}
    plain = subprocess.run(
        [str(HOOK), *front.hook[1:], "createRuntime"],
        input=state(bundle.path), capture_output=True, check=False,
    )  # fmt: skip
    assert plain.returncode != 0
    assert {one.returncode for one in running} == {plain.returncode}
    assert errors == {plain.stderr}
    # The server reaps its children.
    wait_for(lambda: len(children(forkserver)) == N_SPARE, "the children to be gone")


def children(server: ForkServer) -> list[int]:
    pid = server.process.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Waiting:
    """A start in which the hook waits for the governor: the runtime, the hook's process and the server's child."""

    runtime: subprocess.Popen[str]
    hook: int
    child: int


@pytest.fixture
def waiting(front: HookNode, forkserver: ForkServer, runc: Runtime) -> Iterator[Waiting]:
    front.governor.mode = "silent"
    bundle = front.bundle("true")
    bundle.write()
    started = subprocess.Popen(
        runc.command("run", "-b", str(bundle.path), "waits"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: front.governor.requests, "the governor to be asked")
    own = Path(f"/proc/{forkserver.process.pid}/fd/0").readlink()
    [child] = [pid for pid in children(forkserver) if Path(f"/proc/{pid}/fd/0").readlink() != own]
    [hook] = [
        pid
        for pid in map(int, filter(str.isdecimal, (path.name for path in Path("/proc").iterdir())))
        if runs(pid, front)
    ]
    yield Waiting(started, hook, child)
    front.governor.mode = "grant"  # so that the report of the container's end is answered
    started.communicate(timeout=30)


def runs(pid: int, front: HookNode) -> bool:
    """Return whether a process is a hook of this node. Hooks of other workers' tests run the same program."""
    process = Path(f"/proc/{pid}")
    try:
        is_ours = os.fsencode(front.base) in (process / "cmdline").read_bytes()
        return is_ours and (process / "exe").readlink() == front.program
    except OSError:
        return False


def test_a_child_ends_with_the_hook(front: HookNode, waiting: Waiting) -> None:
    """A runtime that gives up on the hook kills it and then removes the container."""
    os.kill(waiting.hook, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{waiting.child}").exists(), "the child to be gone")
    front.governor.wait_idle()


def test_a_child_that_is_killed_fails_the_start(front: HookNode, waiting: Waiting) -> None:
    front.governor.mode = "grant"  # for what follows the start
    os.kill(waiting.child, signal.SIGKILL)
    _, errors = waiting.runtime.communicate(timeout=30)
    assert waiting.runtime.returncode != 0
    assert "the fork server's process ended before the container was prepared" in errors


def test_a_server_that_is_stopped_finishes_what_it_began(
    front: HookNode, forkserver: ForkServer, runc: Runtime
) -> None:
    asked = []

    def stop() -> None:
        forkserver.process.terminate()
        wait_for(lambda: not forkserver.socket.exists(), "the server to stop listening")
        asked.append(True)

    front.governor.before_admit = stop
    ran = runc.run(front.bundle("ls -A /run/tidegate"))
    assert "grant" in ran.stdout.split(), ran.stderr
    assert asked
    # When the container ended, no server was running, so the script reported the end to the
    # governor.
    assert [event["outcome"] for event in front.events()] == ["prepared", "released"]
    forkserver.stop()


def copy_code(directory: Path, fronts: Path, version: str = "") -> Path:
    """Install the hook's code with the C programs in a separate directory; return the directory of the scripts."""
    shutil.copytree(HOOK.parent, directory / "oci_hook", ignore=shutil.ignore_patterns("front"))
    (directory / "oci_hook/front").mkdir()
    for name in PROGRAMS:
        shutil.copy(fronts / name, directory / "oci_hook/front")
    (directory / "governor").mkdir()
    if version:
        (directory / "governor/__init__.py").write_text(f'VERSION = "{version}"\n')
    else:
        shutil.copy(HOOK.parents[1] / "governor/__init__.py", directory / "governor")
    return directory / "oci_hook"


def asked(front: HookNode, program: Path) -> list[str]:
    """Return what a start by this program executes, the program itself included."""
    if not (front.base / "bundle").exists():
        front.bundle("true").write()
    trace = front.base / "trace"
    front.program = program
    traced(trace, *front.hook, "createRuntime", stdin=state(front.base / "bundle"))
    return executed(trace)


def test_a_server_ends_when_its_code_is_replaced(
    front: HookNode, fronts: Path, tmp_path: Path
) -> None:
    code = copy_code(tmp_path / "copy", fronts)
    program = code / "front/tidegate-hook"
    server = ForkServer(front.base / "run", code / "tidegate-forkserver")
    assert asked(front, program) == [str(program)]
    (code / "plan.py").write_text("# another version\n")
    assert asked(front, program) == [str(program), str(code / "tidegate-hook")]
    server.stop()
    assert not server.socket.exists()


@pytest.mark.parametrize("version", ["", "0.0.1"])
def test_a_server_of_another_installation_or_version_is_not_used(
    front: HookNode, fronts: Path, tmp_path: Path, version: str
) -> None:
    code = copy_code(tmp_path / "copy", fronts, version)
    own = front.program
    server = ForkServer(front.base / "run", code / "tidegate-forkserver")
    assert asked(front, own) == [str(own), str(HOOK)]
    program = code / "front/tidegate-hook"
    expected = [str(program), str(code / "tidegate-hook")] if version else [str(program)]
    assert asked(front, program) == expected
    server.stop()


def test_a_server_that_waits_takes_the_place_of_one_that_ends(
    front: HookNode, forkserver: ForkServer
) -> None:
    """This happens when one pod replaces another: the new server starts before the old one ends."""
    command = [str(FORKSERVER), "--wait", "--runtime-dir", str(front.base / "run")]
    following = subprocess.Popen(command)
    try:
        before = forkserver.socket.stat().st_ino
        wait_for(lambda: blocked(following.pid), "it to wait for the lock")
        assert asked(front, front.program) == [str(front.program)]
        assert forkserver.socket.stat().st_ino == before
        forkserver.stop()
        wait_for(forkserver.socket.exists, "it to listen")
        assert asked(front, front.program) == [str(front.program)]
    finally:
        following.terminate()
    assert following.wait(40) == 0
    assert not forkserver.socket.exists()


def blocked(pid: int) -> bool:
    """Return whether a process waits for a file lock."""
    return any(
        line.split()[1] == "->" and int(line.split()[5]) == pid
        for line in Path("/proc/locks").read_text().splitlines()
    )


@pytest.mark.parametrize("namespace", ["mount", "pid", "user"])
@pytest.mark.usefixtures("forkserver")
def test_a_caller_in_another_namespace_is_not_served(front: HookNode, namespace: str) -> None:
    """In another namespace, a path or a PID may refer to something else."""
    bundle = front.bundle("true")
    bundle.write()
    trace = front.base / "trace"
    options = {
        "mount": ["--mount"], "pid": ["--pid", "--fork"], "user": ["--user", "--map-root-user"],
    }[namespace]  # fmt: skip
    command = ["unshare", *options, *front.hook, "createRuntime"]
    traced(trace, *command, stdin=state(bundle.path))
    assert executed(trace)[-2:] == interpreted(front)


def test_another_user_can_neither_reach_the_server_nor_impersonate_it(
    front: HookNode, forkserver: ForkServer
) -> None:
    assert forkserver.socket.stat().st_mode & 0o777 == 0o600
    assert forkserver.socket.stat().st_uid == 0
    forkserver.stop()
    front.base.chmod(0o755)
    (front.base / "run").chmod(0o777)
    listen = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX,"
        " socket.SOCK_SEQPACKET); s.bind(sys.argv[1]); s.listen(); print(flush=True);"
        " c = s.accept()[0]; data = c.recv(4096); print(len(data), flush=True)"
    )
    for directory in front.base.parents:
        if directory.stat().st_mode & 0o005 != 0o005 and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    other = subprocess.Popen(
        [sys.executable, "-c", listen, str(forkserver.socket)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    other.stdout.readline()
    forkserver.socket.chmod(0o777)
    bundle = front.bundle("true")
    bundle.write()
    trace = front.base / "trace"
    traced(trace, *front.hook, "createRuntime", stdin=state(bundle.path))
    assert executed(trace) == interpreted(front)
    assert other.communicate(timeout=10)[0] == "0\n"  # it received no data


def test_a_server_that_does_not_answer_is_not_waited_for(front: HookNode) -> None:
    """The server is stopped, as by a debugger: the script takes over after a quarter of a
    second.
    """
    server = ForkServer(front.base / "run")
    wait_for(lambda: len(children(server)) == N_SPARE, "its children")
    stopped = [server.process.pid, *children(server)]
    bundle = front.bundle("true")
    bundle.write()
    trace = front.base / "trace"
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        traced(trace, *front.hook, "createRuntime", stdin=state(bundle.path))
        assert executed(trace) == interpreted(front)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    time.sleep(0.2)
    # The abandoned request is not carried out afterwards.
    assert [event["outcome"] for event in front.events()] == ["failed"]
    server.stop()


@pytest.mark.usefixtures("forkserver")
def test_two_servers_cannot_serve_one_directory(front: HookNode) -> None:
    command = [str(HOOK.with_name("tidegate-forkserver")), "--runtime-dir", str(front.base / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 75
    assert done.stderr == (
        f"tidegate-forkserver: another server is already serving {front.base}/run; stop it first,"
        " or use --wait to take over when it has exited\n"
    )


def test_a_socket_left_by_a_killed_server_does_no_harm(
    front: HookNode, forkserver: ForkServer
) -> None:
    forkserver.process.kill()
    forkserver.process.communicate()
    bundle = front.bundle("true")
    bundle.write()
    trace = front.base / "trace"
    traced(trace, *front.hook, "createRuntime", stdin=state(bundle.path))
    assert executed(trace) == interpreted(front)
    forkserver.socket.unlink()
    ForkServer(front.base / "run").stop()


def ask(front: HookNode) -> list[str]:
    """Start a hook for a process that does not exist; return what was executed."""
    trace = front.base / "trace"
    done = traced(trace, *front.hook, "createRuntime", stdin=state(front.base / "bundle"))
    assert done.stderr.startswith(b"tidegate: "), done.stderr
    assert b"fork server" not in done.stderr  # the message is from the server's child
    return executed(trace)


def test_a_server_that_cannot_fork_continues(front: HookNode) -> None:
    """This happens when a limit on processes is reached. If the server ended, the starts that it
    serves would be killed.
    """
    front.bundle("true").write()
    # The server's first child is the first process of a PID namespace. When that process has ended,
    # the kernel refuses further forks.
    server = ForkServer(front.base / "run", under=("unshare", "--pid"))
    wait_for(lambda: len(children(server)) == N_SPARE, "its children")
    os.kill(children(server)[0], signal.SIGKILL)
    wait_for(lambda: not children(server), "the children to be gone")
    for _ in range(3):
        assert ask(front) == interpreted(front)
    server.stop()


def test_the_number_of_a_servers_children_is_limited(
    front: HookNode, forkserver: ForkServer
) -> None:
    """Each child may need 48 MiB, and all together have a limit: further callers execute the script."""
    front.bundle("true").write()
    executed_it = False
    for _ in range(10):  # on a busy machine the first may end before the last begins
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_CHILDREN):
                client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(client).connect(
                    str(forkserver.socket)
                )  # a caller that sends nothing
            executed_it = ask(front) == interpreted(front)
            assert len(children(forkserver)) <= MAX_CHILDREN
        if executed_it:
            break
    assert executed_it
    wait_for(lambda: len(children(forkserver)) == N_SPARE, "the children to be gone")
    assert ask(front) == [str(front.program)]


def test_a_server_without_descriptors_continues(front: HookNode, forkserver: ForkServer) -> None:
    front.bundle("true").write()
    wait_for(lambda: len(children(forkserver)) == N_SPARE, "its children")
    limited = [forkserver.process.pid, *children(forkserver)]
    before = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in limited]
    for pid, limits in zip(limited, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    assert ask(front) == interpreted(front)
    for pid, limits in zip(limited, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    wait_for(lambda: ask(front) == [str(front.program)], "the server to serve again")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_spare_children_end_with_the_server(front: HookNode, number: signal.Signals) -> None:
    """This holds however the server ends: a child that continued would listen in place of the next
    server.
    """
    server = ForkServer(front.base / "run")
    wait_for(lambda: len(children(server)) == N_SPARE, "its children")
    spares = [Path(f"/proc/{pid}") for pid in children(server)]
    server.process.send_signal(number)
    server.process.communicate(timeout=40)
    wait_for(lambda: not any(spare.exists() for spare in spares), "the children to be gone")


def test_a_child_that_is_killed_while_it_waits_for_a_caller_is_replaced(
    front: HookNode, forkserver: ForkServer
) -> None:
    front.bundle("true").write()
    wait_for(lambda: len(children(forkserver)) == N_SPARE, "its children")
    before = children(forkserver)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(set(children(forkserver)) - set(before)) == N_SPARE, "others")
    assert ask(front) == [str(front.program)]


def test_a_server_that_was_started_without_standard_descriptors_serves(front: HookNode) -> None:
    front.bundle("true").write()
    server = ForkServer(front.base / "run", under=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "without"))
    assert ask(front) == [str(front.program)]
    server.stop()


def test_a_signal_between_the_check_and_the_wait_stops_the_server(front: HookNode) -> None:
    """The signal goes to another thread here, so that it interrupts no call of the thread that serves."""
    program = """
import signal, sys, threading
sys.path.insert(0, sys.argv[1])
from oci_hook.forkserver import ForkingServer
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
server = ForkingServer(sys.argv[2])
print(flush=True)
server.run()
"""
    command = [sys.executable, "-c", program, str(HOOK.parents[1]), str(front.base / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.5)  # until it waits
    process.terminate()
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    assert not (front.base / "run/forkserver.sock").exists()


def test_paths_do_not_depend_on_the_servers_locale(
    front: HookNode, tmp_path: Path, runc: Runtime, require: Callable[..., None]
) -> None:
    """systemd gives services the system's locale; runtimes write UTF-8 in any locale."""
    require("localedef")
    name = "en_US.ISO-8859-1"
    subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / name)], check=True
    )
    locale = {"LOCPATH": str(tmp_path), "LC_ALL": name}
    server = ForkServer(front.base / "run", environment=locale)
    ran = runc.run(front.bundle("ls -A /run/tidegate", name="bündel"))
    assert "grant" in ran.stdout.split(), ran.stderr
    server.stop()


@pytest.mark.usefixtures("forkserver")
def test_a_caller_with_another_root_directory_is_not_served(
    front: HookNode, tmp_path: Path
) -> None:
    """The caller's paths lead to other files than the server's."""
    front.bundle("true").write()
    root = tmp_path / "root"
    inside = [front.program.parent, front.base]
    for path in inside:
        place = root / str(path).lstrip("/")
        place.mkdir(parents=True)
        subprocess.run(["mount", "--bind", path, place], check=True)
    try:
        done = subprocess.run(
            ["chroot", root, *front.hook, "createRuntime"],
            input=state(front.base / "bundle"), capture_output=True, check=False,
        )  # fmt: skip
    finally:
        for path in inside:
            subprocess.run(["umount", root / str(path).lstrip("/")], check=True)
    assert done.returncode == 71
    assert b"cannot be executed" in done.stderr  # there is no Python


@pytest.mark.usefixtures("forkserver")
def test_a_state_that_is_too_large_is_refused_with_the_same_line(front: HookNode) -> None:
    data = b'{"annotations": {"a": "' + b"x" * (5 << 20)
    results = [
        subprocess.run([*hook, "createRuntime"], input=data, capture_output=True, check=False)
        for hook in (front.hook, [str(HOOK), *front.hook[1:]])
    ]
    assert results[0].stderr.startswith(b"tidegate: the OCI state on stdin is larger than 4194304")
    assert [(one.returncode, one.stderr) for one in results] == [(65, results[0].stderr)] * 2


def test_the_script_reports_errors_of_a_command_line(front: HookNode) -> None:
    for arguments in ([], ["createRuntim"], ["--timeout", "0", "prestart"], ["--claim", "a"]):
        results = [
            subprocess.run([str(program), *arguments], capture_output=True, check=False)
            for program in (front.program, HOOK)
        ]
        assert results[0].returncode == results[1].returncode != 0
        assert results[0].stderr == results[1].stderr


@pytest.mark.usefixtures("forkserver")
def test_precreate_returns_all_of_its_input_from_a_pipe(front: HookNode) -> None:
    data = json.dumps({"annotations": {"a": "b"}, "x": "y" * (1 << 20)}).encode()
    done = subprocess.run([*front.hook, "precreate"], input=data, capture_output=True, check=False)
    assert (done.returncode, done.stdout == data, done.stderr) == (0, True, b"")


@pytest.mark.parametrize(
    "arguments",
    [
        ("createRuntim",), ("--timeout", "0", "prestart"), ("--timeout", "soon", "createRuntime"),
        ("--claim", "a", "createRuntime"), ("--claim", "a", "--share", "b", "precreate"),
    ],
)  # fmt: skip
def test_a_command_line_error_is_reported_even_if_the_container_asks_for_nothing(
    front: HookNode, arguments: tuple[str, ...]
) -> None:
    """Otherwise the mistake would show only with the first container that asks for something."""
    bundle = front.bundle("true", annotations={})
    del bundle.config["hooks"]
    bundle.write()
    results = [
        subprocess.run(
            [program, *arguments], input=state(bundle.path), capture_output=True, check=False
        )
        for program in (front.program, HOOK)
    ]
    assert results[0].returncode == results[1].returncode == 70
    assert results[0].stderr == results[1].stderr
    assert results[0].stdout == b""


@pytest.mark.parametrize("stage", ["createRuntime", "poststop"])
def test_a_runtime_that_does_not_close_stdin_is_not_waited_for(front: HookNode, stage: str) -> None:
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [front.program, "--timeout", "0.5", stage],
            stdin=reading, capture_output=True, timeout=15, check=False,
        )  # fmt: skip
    finally:
        os.close(reading)
        os.close(writing)
    assert done.returncode == (0 if stage == "poststop" else 71)
    assert done.stderr == (
        b"tidegate: the hook did not finish within 0.5 s; see the hook's log on the node\n"
    )


def test_a_configuration_without_a_reader_is_an_error(front: HookNode) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [front.program, "precreate"],
        input=b"{}", stdout=writing, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 71
    assert b"config.json could not be written to standard output" in done.stderr


def test_an_incompletely_read_configuration_is_an_error(front: HookNode) -> None:
    """Otherwise Podman would use the part that had arrived by then, without the rest."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.write(writing, b'{"annotations": ')
    done = subprocess.run(
        [front.program, "precreate"], stdin=reading, capture_output=True, check=False
    )
    os.close(reading)
    os.close(writing)
    assert (done.returncode, done.stdout) == (71, b"")
    assert done.stderr.startswith(b"tidegate: standard input cannot be read to the end")


def wrapper_settings(front: HookNode, real: str) -> list[str]:
    """Write settings that make a program the real runtime; return the wrapper's command line with them."""
    program = front.base / "real"
    program.write_text(real)
    program.chmod(0o755)
    settings = front.base / "settings"
    settings.write_text(f"runtime {program}\nruntime-dir {front.base}/run\n")
    return [str(front.program.with_name("tidegate-runtime")), "--tidegate-config", str(settings)]


def test_a_command_line_of_any_length_reaches_the_runtime(front: HookNode) -> None:
    """The words of `runc exec`, for example, may be anything, even the name of a command."""
    wrapper = wrapper_settings(front, '#!/bin/sh\necho "$#"\n')
    words = ["exec", "one", "seq", *map(str, range(3000)), "run"]
    done = subprocess.run([*wrapper, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{len(words)}\n"), done.stderr


def test_an_empty_bundle_is_the_working_directory(
    front: HookNode, require: Callable[..., None]
) -> None:
    """The wrapper treats it as runc does, and does not use a config.json in the root directory."""
    require("strace")
    wrapper = wrapper_settings(front, "#!/bin/sh\n")
    trace = front.base / "trace"
    words = ["strace", "-qq", "-e", "trace=openat,open", "-o", str(trace), *wrapper]
    bundle = front.base / "plain"
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")
    subprocess.run([*words, "create", "--bundle", "", "one"], cwd=bundle, check=True)
    assert '"/config.json"' not in trace.read_text()
    assert '"./config.json"' in trace.read_text()


def test_a_slow_delete_is_still_served(front: HookNode, forkserver: ForkServer) -> None:
    """`delete --force` waits for the container's end, for longer than the server waits for a request."""
    wrapper = wrapper_settings(front, "#!/bin/sh\nsleep 2\n")
    (front.base / "run/traces").mkdir(mode=0o700, exist_ok=True)
    (front.base / "run/traces/one").write_text("")
    trace = front.base / "trace"
    assert traced(trace, *wrapper, "delete", "--force", "one").returncode == 0
    assert str(HOOK.with_name("tidegate-runtime")) not in executed(trace)
    assert forkserver.process.poll() is None


@pytest.mark.parametrize("with_server", ["", "server"])
def test_a_deleted_container_leaves_nothing_in_its_root(
    front: HookNode, runtime: Runtime, with_server: str, require: Callable[..., None]
) -> None:
    require("strace")
    server = ForkServer(front.base / "run") if with_server else None
    bundle = front.bundle("true")
    del bundle.config["hooks"]["poststop"]
    before = {str(path.relative_to(bundle.rootfs)) for path in bundle.rootfs.rglob("*")}
    settings = front.base / "settings"
    real = shutil.which(runtime.name)
    settings.write_text(f"runtime {real}\nruntime-dir {front.base}/run\n")
    wrapper = [str(front.program.with_name("tidegate-runtime")), "--tidegate-config", str(settings)]
    bundle.write()
    command = runtime.command("create", "-b", str(bundle.path), "kept")
    with (front.base / "output").open("wb") as output:  # the container keeps it open
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        )
    assert done.returncode == 0, (front.base / "output").read_text()
    assert (front.base / "run/traces/kept").exists()
    trace = front.base / "trace"
    command = runtime.command("delete", "--force", "kept")
    at = command.index(runtime.name)
    deleted = traced(trace, *command[:at], *wrapper, *command[at + 1 :])
    assert deleted.returncode == 0, deleted.stderr
    # On a host with control groups of both versions, crun runs in its own mount namespace and is not served.
    served = with_server != "" and "unshare" not in command
    assert (str(HOOK.with_name("tidegate-runtime")) in executed(trace)) == (not served)
    assert not (front.base / "run/traces/kept").exists()
    after = {str(path.relative_to(bundle.rootfs)) for path in bundle.rootfs.rglob("*")}
    assert after - before <= {"run/tidegate"} | before
    if server:
        server.stop()
