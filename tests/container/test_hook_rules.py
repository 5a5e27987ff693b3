"""Attacks on the hook under runc and crun; tests/mutants/rules.toml says which rule each is for.

In each attack the hook is run step by step (tests/container/steps.py), next to a directory of the
host that nothing may touch (tests/container/canary.py), and with traps in the image
(tests/container/assault.py). `assault` asserts what holds for all of them: nothing outside the
container was opened, read, made, changed or mounted on, nothing from the image ran or was loaded on
the host, and every call of the hook was one that cannot leave the container's root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.container.assault import (
    LOOK,
    AttackOutcome,
    assault,
    below_root,
    lay_traps,
    put_link,
    put_odd,
    remove,
    run_nothing,
    traps,
)
from tests.container.bundles import LIBDIR, TARGET, DiskBundle, Runtime, add_user_namespace
from tests.container.canary import SECRET, Canary
from tests.container.conftest import HookNode
from tests.container.held import HeldContainer
from tests.container.test_hook_attack import wait_for

Attack = Callable[[DiskBundle, Canary], None]

# Every component of every path below the root that the hook walks.
WALKED = [
    "usr",
    "usr/lib",
    LIBDIR,
    f"{LIBDIR}/glibc-hwcaps",
    TARGET,
    f"{LIBDIR}/libc.so.6",
    "lib64",
    "usr/lib64",
    "usr/lib64/ld-linux-x86-64.so.2",
    "usr/bin",
    "usr/bin/nvidia-smi",
    "run",
    "run/tidegate",
    "etc",
    "etc/ld.so.cache",
]
MADE = [TARGET, "run/tidegate", "usr/bin/nvidia-smi", "etc/ld.so.cache"]


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path / "canary")


def settled(outcome: AttackOutcome) -> None:
    """Require that the container started, or that the hook or the runtime gave the reason in one
    line.
    """
    if outcome.ran.status == 0:
        assert outcome.outcome in ("prepared", "without-gpu")
    if outcome.outcome == "failed":
        assert outcome.code in ("mount", "image"), outcome.event
        assert outcome.ran.status != 0


def assert_own_mounts(outcome: AttackOutcome, *targets: str) -> None:
    """Require that a read-only mount of something outside the image covers each of these places."""
    lines = [line.split(" ") for line in outcome.ran.stdout.splitlines() if " - " in line]
    mounts = {words[4]: words for words in lines}
    device, root = mounts["/"][2:4]
    for target in targets:
        words = mounts[f"/{target}"]
        assert "ro" in words[5].split(","), words
        assert words[2] != device or not words[3].startswith(f"{root.rstrip('/')}/"), words


def link_texts(place: str) -> dict[str, str]:
    """Return the targets for a link at `place`; {canary} is the host's directory."""
    up = "../" * (place.count("/") + 12)
    return {
        "absolute": "{canary}/" + place,
        "dots": up.rstrip("/") + "{canary}/" + place,
        "root of init": "/proc/1/root{canary}/" + place,
        "own root": "/proc/self/root{canary}/" + place,
        "own cwd": "/proc/self/cwd",
        "descriptor": "/proc/self/fd/13",
        "chain": "/first",  # continues over further links of different kinds
        "itself": place.rpartition("/")[2],
        "nowhere": "/nowhere/at/all",
    }


def chain(bundle: DiskBundle, last: str) -> None:
    (bundle.rootfs / "first").symlink_to("var/../second")
    (bundle.rootfs / "second").symlink_to("./third/.")
    (bundle.rootfs / "third").symlink_to(last)


QUICK = {"absolute", "chain"}
LINKS = [
    pytest.param(place, kind, marks=() if kind in QUICK else pytest.mark.slow)
    for place in WALKED
    for kind in link_texts("x")
]


@pytest.mark.parametrize(("place", "kind"), LINKS)
def test_a_link_at_each_component(
    node: HookNode, runtime: Runtime, canary: Canary, place: str, kind: str
) -> None:
    """R2, R3, R4: the link is followed inside the root, or refused."""
    bundle = node.bundle(LOOK)
    if kind == "chain":
        chain(bundle, str(canary.path / place))
    put_link(bundle.rootfs / place, link_texts(place)[kind].format(canary=canary.path))
    outcome = assault(node, runtime, bundle, canary)
    settled(outcome)
    assert outcome.steps, "the runtime did not start the hook"


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(p, marks=() if p in (*MADE, "usr", LIBDIR) else pytest.mark.slow)
        for p in WALKED
    ],
)
def test_a_link_whose_target_is_in_the_image_too(
    node: HookNode, runtime: Runtime, canary: Canary, place: str
) -> None:
    """R2: a path exists in the image and on the host; the hook uses that of the image."""
    bundle = node.bundle(LOOK)
    inside = below_root(bundle, canary.path) / place
    inside.parent.mkdir(parents=True)
    if (bundle.rootfs / place).exists() and place != "lib64":
        (bundle.rootfs / place).rename(inside)
    put_link(bundle.rootfs / place, str(canary.path / place))
    outcome = assault(node, runtime, bundle, canary)
    settled(outcome)
    assert outcome.steps


KINDS = ["fifo", "socket", "char", "block", "directory", "endless", "empty", "dangling"]
ODD_PLACES = [
    f"{LIBDIR}/libc.so.6",
    "usr/lib64/ld-linux-x86-64.so.2",
    f"{LIBDIR}/glibc-hwcaps",
    TARGET,
    "usr/bin/nvidia-smi",
    "run",
    "run/tidegate",
    "etc",
    "etc/ld.so.cache",
    "usr/lib/i386-linux-gnu/libc.so.6",
]
QUICK_KINDS = {"fifo", "char"}


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        pytest.param(place, kind, marks=() if kind in QUICK_KINDS else pytest.mark.slow)
        for place in ODD_PLACES
        for kind in KINDS
    ],
)
def test_odd_files_at_each_place(
    node: HookNode, runtime: Runtime, canary: Canary, place: str, kind: str
) -> None:
    """R10, R14: the type of a file is checked on its descriptor before it is opened for reading; sizes are bounded."""
    bundle = node.bundle(
        "", annotations={"tidegate.gpu/memory": "8Gi", "tidegate.gpu/capabilities": "all"}
    )
    put_odd(bundle.rootfs / place, kind)
    run_nothing(bundle)
    outcome = assault(node, runtime, bundle, canary)
    settled(outcome)
    for step in outcome.steps:  # only regular files and directories were opened for reading
        assert (
            step.file != str(bundle.rootfs / place)
            or step.numbers[2] & 0o10000000
            or (kind in ("endless", "empty", "directory"))
        ), step


PROC = {
    "own root": "/proc/self/root/etc",
    "own mounts": "/proc/self/mountinfo",
    "threads": "/proc/thread-self/fd",
    "sysrq": "/proc/sysrq-trigger",
    "core_pattern": "/proc/sys/kernel/core_pattern",
    "release_agent": "/sys/fs/cgroup",
    "dev": "/dev",
    "null": "/dev/null",
}


QUICK_PROC = {"own root", "threads", "sysrq", "dev"}
INTO_PROC = [
    pytest.param(
        place,
        kind,
        host_pids,
        marks=() if kind in QUICK_PROC and place in MADE[:2] else pytest.mark.slow,
    )
    for place in MADE
    for kind in PROC
    for host_pids in ((False, True) if kind in ("own root", "own mounts", "threads") else (False,))
]


@pytest.mark.parametrize(("place", "kind", "host_pids"), INTO_PROC)
def test_links_into_proc_sys_and_dev(
    node: HookNode, runtime: Runtime, canary: Canary, *, place: str, kind: str, host_pids: bool
) -> None:
    """R10, R11: nothing is written there. With the host's PID namespace, /proc/self is the hook itself."""
    bundle = node.bundle(LOOK)
    if host_pids:
        namespaces = bundle.config["linux"]["namespaces"]
        bundle.config["linux"]["namespaces"] = [n for n in namespaces if n["type"] != "pid"]
    put_link(bundle.rootfs / place, PROC[kind])
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    outcome = assault(node, runtime, bundle, canary)
    settled(outcome)
    assert outcome.steps
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


@pytest.mark.parametrize("target", ["/dev", "/proc", "/sys", "/proc/sys", "/", "/data"])
@pytest.mark.parametrize("place", [TARGET, "run/tidegate"])
def test_a_link_does_not_cover_what_the_runtime_mounts(
    node: HookNode, runtime: Runtime, canary: Canary, place: str, target: str
) -> None:
    """R10: a runtime hides files of /proc with the container's /dev/null, and leaves them visible
    if that is missing.

    If a link of the image could make the hook mount the driver or the grant on /dev, the container
    would see these files (as with CVE-2025-31133).
    """
    bundle = node.bundle("cat /proc/timer_list /proc/self/mountinfo; echo end")
    bundle.config["mounts"].append(
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]}
    )
    bundle.config["linux"]["maskedPaths"] = ["/proc/timer_list", "/proc/kcore", "/proc/keys"]
    source = node.base / "volume"
    source.mkdir()
    volume(bundle, source, "data")
    (bundle.rootfs / "data").mkdir()
    put_link(bundle.rootfs / place, target)
    outcome = assault(node, runtime, bundle, canary)
    assert (outcome.outcome, outcome.code) == ("failed", "image"), (outcome.ran, outcome.event)
    assert outcome.ran.stdout == ""


@pytest.mark.parametrize("place", [TARGET, "run/tidegate"])
def test_files_that_a_runtime_hides_stay_hidden(
    node: HookNode, runtime: Runtime, canary: Canary, place: str
) -> None:
    """R10: if the configuration binds a directory on /dev, runc does not create /dev/null in the
    container.
    """
    bundle = node.bundle("cat /proc/timer_list")
    bundle.config["mounts"] = [m for m in bundle.config["mounts"] if m["destination"] != "/dev"]
    source = node.base / "devices"
    source.mkdir()
    os.mknod(source / "null", 0o020666, os.makedev(1, 3))
    volume(bundle, source, "dev", "rprivate", "rw")
    bundle.config["linux"]["maskedPaths"] = ["/proc/timer_list"]
    put_link(bundle.rootfs / place, "/dev")
    outcome = assault(node, runtime, bundle, canary)
    assert outcome.ran.stdout == ""


@pytest.mark.parametrize("name", ["proc", "sys", "dev"])
@pytest.mark.parametrize("kind", ["link", "files"])
def test_proc_sys_and_dev_from_the_image(
    node: HookNode, runtime: Runtime, canary: Canary, name: str, kind: str
) -> None:
    """R10, R11: the hook uses the host's /proc, through a descriptor that it opened before it
    examined the image.
    """
    if (runtime.name, name, kind) == ("runc", "dev", "link"):
        pytest.skip("runc 1.1 itself makes its links in /dev there (CVE-2026-41579)")
    bundle = node.bundle(LOOK)
    path = bundle.rootfs / name
    remove(path)
    if kind == "link":
        path.symlink_to(canary.path)
    else:
        for below in ("self/fd", "thread-self/fd", "self/ns"):
            (path / below).mkdir(parents=True)
        for below in ("self/mountinfo", "thread-self/mountinfo"):
            (path / below).write_text("1 1 1:1 / / rw shared:1 - x x x\n")
        for n in range(32):
            (path / "self/fd" / str(n)).symlink_to(canary.path / "file")
        bundle.config["mounts"] = [
            m for m in bundle.config["mounts"] if m["destination"] != f"/{name}"
        ]
    settled(assault(node, runtime, bundle, canary))


def volume(bundle: DiskBundle, source: Path, destination: str, *options: str) -> None:
    bundle.config["mounts"].append(
        {
            "destination": f"/{destination}",
            "type": "bind",
            "source": str(source),
            "options": ["rbind", *(options or ("rprivate",))],
        }
    )


@pytest.mark.parametrize("readonly", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "place",
    [
        "etc",
        "usr/bin",
        TARGET,
        f"{LIBDIR}/glibc-hwcaps",
        "usr/share",
        "etc/vulkan",
        "run/tidegate",
        "data by links",
        "data by links above",
    ],
)
def test_a_directory_of_the_host_in_the_way(
    node: HookNode, runtime: Runtime, canary: Canary, place: str, *, readonly: bool
) -> None:
    """R3: the hook makes nothing in a volume, whether the volume is mounted at the place or a link
    of the image leads to it.
    """
    bundle = node.bundle(
        "cat /proc/self/mountinfo",
        annotations={"tidegate.gpu/memory": "8Gi", "tidegate.gpu/capabilities": "graphics"},
    )
    source = node.base / "volume"
    source.mkdir()
    (source / "mine").touch()
    if place == "etc":
        shutil.copy(bundle.rootfs / "etc/ld.so.cache", source)
    if place == "usr/bin":
        for name in ("sh", "cat"):
            shutil.copy(bundle.rootfs / "usr/bin" / name, source)
    volume(bundle, source, place.partition(" ")[0], "rprivate", "ro" if readonly else "rw")
    if place == "data by links":
        for name in ("run/tidegate", f"{LIBDIR}/glibc-hwcaps", "etc/vulkan"):
            put_link(bundle.rootfs / name, f"/data/{Path(name).name}")
    if place == "data by links above":
        for name in ("run", f"{LIBDIR}/glibc-hwcaps"):
            (bundle.rootfs / name).mkdir(exist_ok=True)
            put_link(bundle.rootfs / name, "/data")
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    settled(assault(node, runtime, bundle, canary))
    assert {p.name: p.read_bytes() for p in source.iterdir() if p.is_file()} == before
    assert sorted(p.name for p in source.iterdir()) == sorted(before)


@pytest.mark.parametrize("place", ["run", "usr/bin"])
def test_a_volume_that_only_a_link_leads_to_gets_no_files(
    node: HookNode, runtime: Runtime, canary: Canary, place: str
) -> None:
    """R3: a volume to which only a link of the image leads does not count as mounted at the place
    by the configuration.
    """
    bundle = run_nothing(node.bundle(""))
    source = node.base / "volume"
    source.mkdir()
    volume(bundle, source, "data")
    put_link(bundle.rootfs / place, "/data")
    settled(assault(node, runtime, bundle, canary))
    assert list(source.iterdir()) == []


@pytest.mark.parametrize("place", MADE)
def test_a_single_file_or_directory_of_the_host_over_a_place(
    node: HookNode, runtime: Runtime, canary: Canary, place: str
) -> None:
    """R3, R10: a bind mount over the place itself is covered or refused; the file or directory of
    the host is unchanged.
    """
    bundle = node.bundle("cat /proc/self/mountinfo")
    source = node.base / "volume"
    if place in (TARGET, "run/tidegate"):
        source.mkdir()
    else:
        source.write_text("of the host\n")
    stat = source.stat()
    volume(bundle, source, place)
    settled(assault(node, runtime, bundle, canary))
    after = source.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_mode, after.st_uid) == (
        (stat.st_size, stat.st_mtime_ns, stat.st_mode, stat.st_uid)
    )


@pytest.mark.parametrize("place", ["usr/lib", "run", "etc", "usr/bin"])
def test_an_overlay_in_the_way(
    node: HookNode, runtime: Runtime, canary: Canary, place: str
) -> None:
    """R3: the hook makes nothing that an overlay of the configuration would copy up into a directory of the host."""
    bundle = node.bundle("cat /proc/self/mountinfo")
    lower, upper, work = (node.base / name for name in ("lower", "upper", "work"))
    shutil.copytree(bundle.rootfs / place, lower, symlinks=True)
    upper.mkdir()
    work.mkdir()
    bundle.config["mounts"].append(
        {
            "destination": f"/{place}",
            "type": "overlay",
            "source": "overlay",
            "options": [f"lowerdir={lower}", f"upperdir={upper}", f"workdir={work}"],
        }
    )
    lay_traps(bundle)
    outcome = settled_with(node, runtime, bundle, canary, skip=("upper", "work"))
    made = {str(p.relative_to(upper)) for p in upper.rglob("*")}
    # `run` is the only directory at the grant's place that a configuration may mount
    assert made == ({"tidegate"} if place == "run" and outcome.outcome == "prepared" else set())


def settled_with(
    node: HookNode, runtime: Runtime, bundle: DiskBundle, canary: Canary, *, skip: tuple[str, ...]
) -> AttackOutcome:
    """Run `assault` without its check of the files outside the container's root whose names start
    with one of `skip`, and require that the outcome is settled.
    """
    import tests.container.assault as module

    everything = module.elsewhere

    def without(node: HookNode, bundle: DiskBundle) -> dict[str, tuple[int, int, int]]:
        return {n: w for n, w in everything(node, bundle).items() if not n.startswith(skip)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "elsewhere", without)
        outcome = assault(node, runtime, bundle, canary)
    settled(outcome)
    return outcome


@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
@pytest.mark.parametrize("env", ["entry", "none"])
def test_a_hostile_environment_and_modules_are_ignored(
    node: HookNode,
    runtime: Runtime,
    canary: Canary,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stage: str,
    env: str,
) -> None:
    """R5, R7: the hook ignores the environment, the working directory and the image's modules,
    whatever the runtime passes to it.
    """
    bundle = node.bundle(LOOK)
    module = f"import os\nos.close(os.open({str(traps() / 'marker')!r}, os.O_CREAT))\n"
    names = (
        "json",
        "socket",
        "oci_hook",
        "sitecustomize",
        "usercustomize",
        "ctypes",
        "re",
        "os",
        "encodings",
    )
    for directory in (bundle.path, bundle.rootfs):
        for name in names:
            (directory / f"{name}.py").write_text(module)
    library = f"{bundle.rootfs}/trap.so"
    hostile = [
        f"PYTHONPATH={bundle.rootfs}",
        f"PYTHONHOME={bundle.rootfs}",
        f"PYTHONSTARTUP={bundle.rootfs}/json.py",
        "PYTHONINSPECT=1",
        "PYTHONBREAKPOINT=json.x",
        f"PYTHONUSERBASE={bundle.rootfs}",
        f"PATH={bundle.rootfs}/usr/bin:/usr/bin",
    ]
    bundle.config["process"]["env"] += [
        *hostile[:-1], f"LD_PRELOAD={library}", f"LD_AUDIT={library}", f"LD_LIBRARY_PATH={bundle.rootfs}",
    ]  # fmt: skip
    if env == "none":  # then the hook inherits the runtime's environment
        import tests.container.assault as attack

        def without_env(config: dict, argv: list[str], **named: object) -> None:
            add_hook(config, argv, **named)
            for entry in config["hooks"].values():
                del entry[0]["env"]

        from tests.container.bundles import add_hook

        monkeypatch.setattr(attack, "add_hook", without_env)
        run = runtime.run
        monkeypatch.setattr(
            runtime, "run", lambda b: run(b, env=dict(e.split("=", 1) for e in hostile))
        )
    outcome = assault(node, runtime, bundle, canary, stage=stage)
    assert outcome.outcome == "prepared", (outcome.event, outcome.ran.stderr)


P = "tidegate.gpu/"
HOSTILE = {
    "unknown": {P + "memoryy": "8Gi"},
    "unknown besides": {P + "memory": "8Gi", P + "debug": "1"},
    "bare prefix": {P: "1"},
    "shell": {P + "memory": "$(touch {marker})`touch {marker}`;touch {marker}"},
    "path": {P + "devices": "../../../../etc/passwd"},
    "absolute path": {P + "strategy": "{canary}/file"},
    "format": {P + "strategy": "%s%n%x{0}{__class__}"},
    "terminal": {P + "strategy": "\n\x1b[2J\x1b]0;x\x07\r"},
    "nul": {P + "strategy": "auto\x00passthrough"},
    "bidi": {P + "strategy": "\u202eotua"},
    "surrogate": {P + "strategy": "\ud800"},
    "digits": {P + "memory": "9" * 10_000},
    "other digits": {P + "compute": "\u0661\u0660"},  # Arabic-Indic 10: int() accepts it
    "plus": {P + "compute": "+10"},
    "newline": {P + "compute": "10\n"},
    "zero": {P + "memory": "0"},
    "too many": {P + "count": "65"},
    "huge list": {P + "devices": ",".join(str(n % 64) for n in range(20_000))},
    "both": {P + "count": "1", P + "devices": "0"},
    "many": {f"{P}x{n}": "1" for n in range(2000)},
    "long name": {P + "k" * 200_000: "1"},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_annotations_are_data(node: HookNode, runtime: Runtime, canary: Canary, kind: str) -> None:
    """R14, R15: annotations are refused with one printable line, and reach no shell, path or
    format. The governor is not asked.
    """
    annotations = {
        name: value.replace("{marker}", str(traps() / "marker")).replace(
            "{canary}", str(canary.path)
        )
        for name, value in HOSTILE[kind].items()
    }
    outcome = assault(node, runtime, node.bundle("echo started", annotations=annotations), canary)
    assert "started" not in outcome.ran.stdout
    assert outcome.ran.status != 0
    if outcome.steps:  # runc itself refuses a lone surrogate
        assert outcome.code in ("annotation", "bundle", "state"), outcome.event
        line = f"{outcome.event['message']}; {outcome.event['hint']}"
        assert line.isprintable()
        assert line.isascii()
        assert len(line) < 1000
    assert node.governor.requests == []


def padded(size: int) -> dict[str, str]:
    return {"org.example/note": "x" * size}


CONFIGS: dict[str, Callable[[], tuple[dict[str, str], str]]] = {
    "9 MiB of text": lambda: (padded(9 << 20), "state bundle"),
    "3 MiB of text": lambda: (padded(3 << 20), ""),
    "50000 annotations": lambda: ({f"org.example/{n}": "x" for n in range(50_000)}, ""),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_of_any_size(node: HookNode, runtime: Runtime, canary: Canary, kind: str) -> None:
    """R14: the hook reads at most a fixed size, and finishes within seconds."""
    annotations, codes = CONFIGS[kind]()
    bundle = node.bundle("echo started", annotations={"tidegate.gpu/memory": "8Gi", **annotations})
    outcome = assault(node, runtime, bundle, canary)
    if codes:
        assert (outcome.code in codes.split(), outcome.ran.stdout) == (True, ""), outcome.event
    elif outcome.steps:
        assert (outcome.outcome, outcome.ran.stdout) == ("prepared", "started\n"), outcome.event


@pytest.mark.parametrize("size", [5 << 20, 64 << 20])
def test_a_state_of_any_size(node: HookNode, size: int) -> None:
    """R14: the hook stops reading if a runtime writes without end."""
    from tests.container.held import HeldContainer

    with HeldContainer(node.bundle("true")) as held:
        done = held.hook(node.hook, stdin=held.state(annotations={"org.example/note": "x" * size}))
    assert done.returncode == 65, done.stderr
    assert "is larger than 4194304 bytes" in done.stderr


def test_a_state_that_never_ends(node: HookNode) -> None:
    """R14: the hook has its own deadline, because the runtime may have none."""
    node.timeout = 0.5
    with subprocess.Popen(
        [*node.hook, "createRuntime"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as hook:
        try:
            assert hook.wait(timeout=10) == 71
            assert hook.stderr is not None
            assert b"did not finish within 0.5 s" in hook.stderr.read()
        finally:
            hook.kill()


def test_mounts_shared_on_the_host_are_private_in_the_container(node: HookNode) -> None:
    """R8: the mirror and the grant are on a shared mount, as everything is under systemd; the
    hook's mounts have no peers.
    """
    from tests.container.held import HeldContainer

    bundle = node.bundle("true")
    share = f'mount --bind {node.base} {node.base} && mount --make-shared {node.base} && mount --bind "$1" "$1"'
    with HeldContainer(bundle, mount=share) as host, HeldContainer(bundle, host=host) as held:
        base = next(
            line for line in Path(f"/proc/{host.process.pid}/mountinfo").read_text().splitlines()
            if line.split()[4] == str(node.base)
        )  # fmt: skip
        assert " shared:" in base
        node.own_mirror()  # on that mount
        assert held.hook(node.hook).returncode == 0
        lines = Path(f"/proc/{held.process.pid}/mountinfo").read_text().splitlines()
    hook_mounts = [line for line in lines if line.split()[4].startswith(f"{bundle.rootfs}/")]
    assert len(hook_mounts) == 3
    assert [line for line in hook_mounts if " shared:" in line or " master:" in line] == []


@pytest.mark.parametrize(
    "env",
    [
        ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all"],
        ["tidegate.gpu/memory=8Gi", "tidegate.gpu/compute=100"],
        ["TIDEGATE_GPU_MEMORY=8Gi", "TIDEGATE_MEMORY=8Gi", "CUDA_VISIBLE_DEVICES=0"],
    ],
)
@pytest.mark.parametrize("asks", [False, True])
def test_the_environment_grants_nothing(
    node: HookNode, runtime: Runtime, env: list[str], *, asks: bool
) -> None:
    """R9: the environment yields neither a GPU nor a larger share of one."""
    wanted = {"tidegate.gpu/memory": "1Gi"} if asks else {}
    bundle = node.bundle("ls -A /run", annotations=wanted)
    bundle.config["process"]["env"] += env
    assert runtime.run(bundle).status == 0
    assert [r["annotations"] for r in node.governor.requests if r["op"] == "admit"] == (
        [wanted] if asks else []
    )


SOCKETS = [
    "missing",
    "file",
    "directory",
    "fifo",
    "dangling",
    "no listener",
    "datagram",
    "garbage",
    "close",
    "endless",
    "another user",
]


@pytest.mark.parametrize("kind", SOCKETS)
def test_a_replaced_socket_of_the_governor(
    node: HookNode, runtime: Runtime, canary: Canary, kind: str
) -> None:
    """R13, R14: the hook neither hangs nor trusts the socket, and never uses the image's own socket
    at that path.
    """
    bundle = node.bundle("echo started")
    node.timeout = 3.0
    path = node.base / "run/governor.sock"
    inside = below_root(bundle, path)
    inside.parent.mkdir(parents=True)
    style = socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX) as image, socket.socket(socket.AF_UNIX, style) as other:
        directory = os.open(inside.parent, os.O_PATH)
        image.bind(f"/proc/self/fd/{directory}/governor.sock")
        image.listen(4)
        image.settimeout(0)
        os.close(directory)
        helper = None
        if kind in ("garbage", "close"):
            node.governor.mode = kind
        else:
            path.unlink()
        match kind:
            case "file":
                path.touch()
            case "directory":
                path.mkdir()
            case "fifo":
                os.mkfifo(path)
            case "dangling":
                path.symlink_to("nowhere")
            case "no listener" | "datagram":
                other.bind(str(path))
            case "endless":
                helper = impostor(path, "endless")
            case "another user":
                helper = impostor(path, str(canary.path))
        try:
            outcome = assault(node, runtime, bundle, canary)
        finally:
            if helper:
                helper.kill()
                helper.wait()
        with pytest.raises(BlockingIOError):
            image.accept()
    assert (outcome.ran.stdout, outcome.code) == ("", "governor"), outcome.event
    assert outcome.ran.status != 0


IMPOSTOR = """
import json, os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
s.listen(4)
if sys.argv[2] != "endless":
    os.setgid(65534)
    os.setuid(65534)
    s.listen(4)  # SO_PEERCRED reports the credentials at the last listen
print("ready", flush=True)
while True:
    c, _ = s.accept()
    try:
        while c.recv(65536):
            while sys.argv[2] == "endless":
                c.sendall(b"0" * 65536)
            c.sendall(json.dumps({
                "ok": True, "key": "k", "directory": sys.argv[2], "devices": [], "memory": 0, "compute": 0,
            }).encode() + b"\\n")
    except OSError:
        pass
"""


def impostor(path: Path, grants: str) -> subprocess.Popen[bytes]:
    """Listen on the governor's socket: as the user nobody, grant a directory of the host, or as
    root, send data without end (`endless`).
    """
    process = subprocess.Popen(
        ["/usr/bin/python3", "-c", IMPOSTOR, str(path), grants], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    return process


PAGES = {
    "write": "echo x > /run/tidegate/grant",
    "append": "echo x >> /run/tidegate/grant",
    "truncate": "(: > /run/tidegate/grant)",
    "touch": "touch /run/tidegate/grant /run/tidegate/new",
    "unlink": "probe-file unlink /run/tidegate/grant",
    "rename": "probe-file rename /run/tidegate/grant /run/tidegate/other",
    "link out": "probe-file link /run/tidegate/grant /grant && echo x > /grant",
    "ftruncate": "probe-file reopen /run/tidegate/grant",
    "chmod": "probe-file chmod /run/tidegate/grant",
    "mmap": "probe-file mmap /run/tidegate/grant",
    "remount": "probe-file remount /run/tidegate",
    "library": f"echo x > /{TARGET}/libcuda.so.1; probe-file reopen /{TARGET}/libcuda.so.1",
    "program": "echo x > /usr/bin/nvidia-smi; probe-file unlink /usr/bin/nvidia-smi",
    "mknod": "probe-file mknod /run/tidegate/dev; probe-file mknod /run/tidegate/grant",
}
PROBE_FILE_C = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
/* Tries to change a file, and reports if that worked. */
int main(int argc, char **argv) {
        const char *what = argv[1], *path = argv[2];
        int done = -1;
        if (!strcmp(what, "unlink")) done = unlink(path);
        if (!strcmp(what, "rename")) done = rename(path, argv[3]);
        if (!strcmp(what, "link")) done = link(path, argv[3]);
        if (!strcmp(what, "chmod")) done = chmod(path, 0666);
        if (!strcmp(what, "mknod")) done = mknod(path, S_IFBLK | 0600, makedev(7, 0));
        if (!strcmp(what, "remount")) done = mount("", path, "", MS_REMOUNT | MS_BIND, "");
        if (!strcmp(what, "reopen")) {
                char name[64];
                int fd = open(path, O_RDONLY);
                snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
                done = ftruncate(fd, 0);
                if (done < 0) done = open(name, O_RDWR);
                if (done < 0) done = open(name, O_RDONLY | O_TRUNC);
        }
        if (!strcmp(what, "mmap")) {
                int fd = open(path, O_RDONLY);
                done = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED ? -1 : 0;
        }
        if (done >= 0) printf("%s of %s WORKED\n", what, path);
        return 0;
}
"""


@pytest.mark.parametrize("kind", PAGES)
def test_pages_and_libraries_cannot_be_changed(
    node: HookNode, runtime: Runtime, canary: Canary, kind: str
) -> None:
    """R8: the container's root cannot write to, truncate, replace or remount what the hook mounted."""
    from tests.container.bundles import compile_c

    bundle = node.bundle(f"{PAGES[kind]} 2>/dev/null; echo end")
    compile_c(PROBE_FILE_C, bundle.rootfs / "usr/bin/probe-file")
    node_files = {p: p.read_bytes() for p in node.driver_dir.resolve().rglob("*") if p.is_file()}
    outcome = assault(node, runtime, bundle, canary)
    assert (outcome.ran.status, outcome.ran.stdout) == (0, "end\n"), outcome.ran
    assert {p: p.read_bytes() for p in node_files} == node_files
    (directory,) = (node.base / "run/containers").iterdir()
    assert [p.name for p in directory.iterdir()] == ["grant"]
    assert (directory / "grant").read_bytes() == b"TIDEGATE".ljust(4096, b"\0")
    assert (directory / "grant").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("kind", ["compat", "program", "grant", "manifest"])
def test_no_file_of_the_image_is_mounted_anywhere(
    node: HookNode, runtime: Runtime, canary: Canary, kind: str
) -> None:
    """R1: the image has files like a driver's, some of them under the host's paths; the hook mounts
    the host's files.
    """
    bundle = node.bundle(
        f"cat /usr/bin/nvidia-smi; cat /run/tidegate/grant; ls /{TARGET}; cat /proc/self/mountinfo"
    )
    match kind:
        case "compat":
            for name in ("libcuda.so.1", "libcuda.so.999.1", "libnvidia-ml.so.1"):
                put_link(bundle.rootfs / "usr/local/cuda/compat" / name, str(canary.path / "file"))
        case "program":
            (bundle.rootfs / "usr/bin/nvidia-smi").write_text("#!/bin/sh\necho the image's\n")
            generation = node.driver_dir.resolve() / (node.driver_dir / "current").readlink()
            inside = below_root(bundle, generation / "bin")
            inside.mkdir(parents=True)
            (inside / "nvidia-smi").write_text("of the image")
        case "grant":
            inside = below_root(bundle, node.base / "run/containers/key1")
            inside.mkdir(parents=True)
            (inside / "grant").write_text("of the image")
        case "manifest":
            put_link(below_root(bundle, node.driver_dir), str(canary.path))
    outcome = assault(node, runtime, bundle, canary)
    assert outcome.outcome == "prepared", outcome.event
    assert outcome.ran.stdout.startswith("#!/bin/sh\necho tidegate test smi\nTIDEGATE")
    assert "of the image" not in outcome.ran.stdout
    assert_own_mounts(outcome, TARGET, "run/tidegate", "usr/bin/nvidia-smi")
    assert "libcuda.so.999.1" not in outcome.ran.stdout


@pytest.mark.parametrize("cwd", ["/", "/proc", "/run/tidegate", "/proc/self/cwd", "/var"])
def test_a_working_directory_and_descriptors(
    node: HookNode, runtime: Runtime, canary: Canary, cwd: str
) -> None:
    """R12: no descriptor of the hook or of the runtime's caller is open in the container; the
    runtime sets the working directory.
    """
    bundle = node.bundle("cd /proc/self/fd; ls -l . | cat; cat /proc/self/mountinfo > /dev/null")
    bundle.config["process"]["cwd"] = cwd
    bundle.config["root"]["readonly"] = cwd == "/var"
    leak = os.open(canary.path / "etc", os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        outcome = assault(node, runtime, bundle, canary)
    finally:
        os.close(leak)
    assert outcome.outcome == "prepared", outcome.event
    for text in (str(canary.path), str(node.driver_dir.resolve()), "/tidegate", "containers/"):
        assert text not in outcome.ran.stdout, outcome.ran.stdout


@pytest.mark.parametrize(
    "root", ["/", "//", "/.", "/proc/1/root", "/proc/self/root", "../../../../../../../..", "link"]
)
def test_the_hosts_own_root_is_refused(node: HookNode, runtime: Runtime, root: str) -> None:
    """R16: the hook itself refuses, whatever the runtime tells it; nothing is mounted or made."""
    from tests.container.held import HeldContainer
    from tests.container.test_hook_start import host_mounts

    bundle = node.bundle("true")
    if root == "link":
        (bundle.path / "link").symlink_to("/")
    with HeldContainer(bundle) as held:
        bundle.config["root"]["path"] = root
        bundle.write()
        before = held.all_mounts(), host_mounts(node.base)
        done = held.hook(node.hook, stage="prestart" if runtime.name == "crun" else "createRuntime")
        assert done.returncode == 66, done.stderr
        assert "root.path" in done.stderr
        # The kernel protects /proc/PID/root of a process that has more capabilities than ours.
        assert "the host's own root" in done.stderr or root == "/proc/1/root"
        assert (held.all_mounts(), host_mounts(node.base)) == before
    assert node.governor.requests == []


@pytest.mark.parametrize("place", [TARGET, "run/tidegate", "usr/bin", "etc", "usr/bin/nvidia-smi"])
def test_a_link_in_a_user_namespace(
    node: HookNode, runtime: Runtime, canary: Canary, place: str
) -> None:
    """R3: what the hook makes is given to the mapped root by descriptor; no file of the host
    changes its owner.
    """
    bundle = node.bundle(LOOK)
    put_link(bundle.rootfs / place, str(canary.path / place))
    inside = below_root(bundle, canary.path)
    inside.mkdir(parents=True)
    add_user_namespace(bundle)
    for directory in [bundle.path, *bundle.path.parents][:-2]:
        directory.chmod(directory.stat().st_mode | 0o011)
    settled(assault(node, runtime, bundle, canary))


def test_the_traps_work() -> None:
    """Each trap creates its file when it is run or loaded on the host. Otherwise the other tests,
    which find no such file, would prove nothing.
    """
    marker = traps() / "marker"
    for command, env in (
        ([str(traps() / "program")], {}),
        (["/bin/true"], {"LD_PRELOAD": str(traps() / "trap.so")}),
    ):
        subprocess.run(command, env=env, check=True)
        assert marker.exists()
        marker.unlink()


def test_the_canary_detects_each_access(tmp_path: Path) -> None:
    canary = Canary(tmp_path / "canary")
    canary.watch()
    canary.check()
    for touch in (
        (canary.path / "file").read_bytes,
        lambda: os.truncate(canary.path / "file", 1),
        (canary.path / "etc/new").touch,
        (canary.path / "run/new").mkdir,
        lambda: list((canary.path / "usr/bin").iterdir()),
        lambda: (canary.path / "file").chmod(0o600),
        (canary.path / "etc" / SECRET).unlink,
    ):
        canary.watch()
        touch()
        with pytest.raises(AssertionError):
            canary.check()


def test_closed_standard_descriptors_are_not_reused_by_the_hook(node: HookNode) -> None:
    """R12: otherwise a message to standard error would be written into one of the hook's files."""
    node.governor.mode = "silent"
    node.timeout = 4.0
    with HeldContainer(node.bundle("true")) as held:
        hook = subprocess.Popen(
            ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *node.hook, "createRuntime"],
            stdin=subprocess.PIPE,
        )
        assert hook.stdin is not None
        hook.stdin.write(held.state())
        hook.stdin.close()
        wait_for(lambda: node.governor.requests)
        found = [Path(f"/proc/{hook.pid}/fd/{n}").readlink() for n in (1, 2)]
        assert hook.wait() == 75
    assert found == [Path("/dev/null")] * 2
