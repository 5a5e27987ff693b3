"""Check NVIDIA's kernel module, its device nodes, and the settings of its GPUs."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from governor.doctor.finding import (
    Finding,
    UnseenError,
    name_gpus,
    note,
    ok,
    unseen,
    warning,
    wrong,
)
from governor.doctor.mirror import kind_of_mirror
from governor.doctor.node import AS_ROOT, ExaminedNode
from oci_hook.errors import HookError
from oci_hook.manifest import MODULE_VERSION, module_version

GPUS = "/proc/driver/nvidia/gpus"
MAJOR = 195  # Documentation/admin-guide/devices.txt
CONTROL_MINOR = 255
QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,mig.mode.current,compute_mode,persistence_mode",
    "--format=csv,noheader",
)


@dataclass(frozen=True)
class ModuleGpu:
    """A GPU, as the kernel module reports it under its PCI address."""

    address: str
    uuid: str
    minor: int


def gpus(node: ExaminedNode) -> tuple[ModuleGpu, ...]:
    """Return the GPUs that the kernel module reports."""
    found = []
    for address in node.names(GPUS):
        text = node.read(f"{GPUS}/{address}/information") or ""
        minor = re.search(r"^Device Minor:\s*([0-9]+)", text, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE)
        if minor:
            found.append(ModuleGpu(address, uuid[1] if uuid else "", int(minor[1])))
    return tuple(found)


def needs_none(node: ExaminedNode) -> str | None:
    """Return why this node does not need NVIDIA's kernel module, or None if it does need it."""
    kind = kind_of_mirror(node)
    if kind == "simulated":
        return "the mirror's driver is the simulated GPU's, which has no kernel module"
    if kind == "wsl" or node.stat("/dev/dxg") is not None:
        return "WSL 2: the driver's kernel part belongs to Windows"
    return None


def _module(node: ExaminedNode) -> str | None:
    host = node.host(MODULE_VERSION)
    try:
        return module_version(host) if host else None
    except HookError as e:
        raise UnseenError(e.message, remedy=e.hint) from e


def module(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the kernel module is loaded, and report its version."""
    version = _module(node)
    why = needs_none(node)
    if version is not None:
        kind = (
            "open" if "Open Kernel Module" in (node.read(MODULE_VERSION) or "") else "proprietary"
        )
        yield ok(f"NVIDIA's {kind} kernel module {version} is loaded; GPUs: {len(gpus(node))}")
    elif why is not None:
        yield ok(why)
    elif node.stat("/sys/module/nvidia") is not None:
        yield wrong(
            f"the kernel module nvidia is loaded, but {MODULE_VERSION} has no version",
            "journalctl -k --grep NVRM, then reload the module",
        )
    else:
        yield wrong(
            "NVIDIA's kernel module is not loaded",
            "modprobe nvidia (if there is no such module, install the driver first)",
        )


def libraries(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether a refresh would find a complete driver."""
    from vdriver.discover import find_driver
    from vdriver.errors import VdriverError

    if kind_of_mirror(node) == "simulated":
        yield note(
            "the mirror's driver is the simulated GPU's; its directory must be specified explicitly"
        )
        return
    try:
        driver = find_driver(node.root)
    except VdriverError as e:
        # With a mirror, this is only a warning: the mirror still serves, and such an error is
        # normal after an upgrade.
        yield (warning if kind_of_mirror(node) else wrong)(e.message, e.hint)
        return
    yield ok(f"driver {driver.version} ({driver.kind}, {driver.machine}) is complete")


def nodes(node: ExaminedNode) -> Iterator[Finding]:
    """Check whether the device nodes that programs open exist."""
    if needs_none(node) is not None or _module(node) is None:
        yield note("there are no device nodes without NVIDIA's kernel module")
        return
    numbers = {
        fields[1]: int(fields[0])
        for line in (node.read("/proc/devices") or "").splitlines()
        if len(fields := line.split()) == 2 and fields[0].isdigit()
    }
    wanted: dict[str, tuple[int | None, int]] = {
        "/dev/nvidiactl": (MAJOR, CONTROL_MINOR),
        # Its major number is assigned when the module is loaded.
        "/dev/nvidia-uvm": (numbers.get("nvidia-uvm"), 0),
        **{f"/dev/nvidia{gpu.minor}": (MAJOR, gpu.minor) for gpu in gpus(node)},
    }
    right = []
    for path, (major, minor) in wanted.items():
        make = f"nvidia-modprobe {'-u ' * path.endswith('-uvm')}-c {minor}"
        status = node.stat(path)
        if status is None:
            yield wrong(f"{path} is missing: programs find no GPU", make)
        elif not stat.S_ISCHR(status.st_mode):
            yield wrong(f"{path} is not a character device", f"rm {path} && {make}")
        elif major is None:
            yield wrong(
                f"{path} exists, but its module nvidia-uvm is not loaded", "modprobe nvidia-uvm"
            )
        elif (found := _number(status)) != (major, minor):
            yield wrong(
                f"{path} is {found[0]}:{found[1]}; it must be {major}:{minor}",
                f"rm {path} && {make}",
            )
        elif status.st_mode & 0o006 != 0o006:
            yield warning(
                f"{path} has mode {stat.S_IMODE(status.st_mode):03o}: programs run by "
                "users other than root find no GPU",
                f"chmod 0666 {path}, and set NVreg_DeviceFileMode=0666 for the module",
            )
        else:
            right.append(path)
    if right:
        yield ok(f"{', '.join(right)}")


def _number(status: os.stat_result) -> tuple[int, int]:
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def links(node: ExaminedNode) -> Iterator[Finding]:
    """Check the links in /dev/char, which keep containers' GPUs usable when systemd reloads."""
    if node.stat("/run/systemd/system") is None:
        yield note("systemd is not running here: no links in /dev/char are needed")
        return
    if node.stat("/dev/nvidiactl") is None:
        yield note("there are no device nodes that need a link")
        return
    lacking = [
        name
        for name, minor in (
            ("nvidiactl", CONTROL_MINOR),
            *((f"nvidia{g.minor}", g.minor) for g in gpus(node)),
        )
        if node.stat(f"/dev/char/{MAJOR}:{minor}") is None
    ]
    if lacking:
        yield warning(
            f"/dev/char has no links to {', '.join(lacking)}: where runc lets systemd create "
            "the control groups, containers lose their GPUs on `systemctl daemon-reload`",
            f"ln -s ../nvidiactl /dev/char/{MAJOR}:{CONTROL_MINOR} and so on, in a udev rule "
            "(nvidia-ctk system create-dev-char-symlinks --create-all creates them)",
        )
    else:
        yield ok("/dev/char has links to the device nodes")


class NothingToAskError(Exception):
    """There is no NVIDIA GPU to examine; the message gives the reason."""


def _of_gpus(
    check: Callable[[ExaminedNode, list[list[str]]], Iterator[Finding]],
) -> Callable[[ExaminedNode], Iterator[Finding]]:
    """Turn a check of nvidia-smi's output into a check of the node."""

    @functools.wraps(check)
    def asked(node: ExaminedNode) -> Iterator[Finding]:
        try:
            rows = _smi(node)
        except NothingToAskError as e:
            yield note(str(e))
            return
        yield from check(node, rows)

    return asked


def _smi(node: ExaminedNode) -> list[list[str]]:
    """Return what nvidia-smi reports per GPU: index, UUID, MIG, compute mode, persistence."""
    if (why := needs_none(node)) is not None or _module(node) is None:
        raise NothingToAskError(
            why or "nvidia-smi is not run: NVIDIA's kernel module is not loaded"
        )
    # nvidia-smi is run instead of calling NVML: a call could hang on a GPU that fell off the bus,
    # but a process can be abandoned.
    rows = [[cell.strip() for cell in row.split(",")] for row in node.run(*QUERY).splitlines()]
    return [row for row in rows if len(row) == QUERY[1].count(",") + 1]


@_of_gpus
def mig(_node: ExaminedNode, rows: list[list[str]]) -> Iterator[Finding]:
    """Check whether MIG is enabled on a GPU: programs can then use only its instances."""
    cut = [index for index, _, mode, *_ in rows if mode == "Enabled"]
    for index in cut:
        yield warning(
            f"GPU {index} has MIG enabled: Tidegate shares whole GPUs, not instances",
            f"nvidia-smi -i {index} -mig 0, or do not share this GPU",
        )
    if not cut:
        yield ok("MIG is not enabled on any GPU")


@_of_gpus
def compute_mode(node: ExaminedNode, rows: list[list[str]]) -> Iterator[Finding]:
    """Check whether the GPUs accept processes of several containers."""
    closed = False
    for index, uuid, _, mode, _ in rows:
        strategy = node.config.strategy_of(int(index) if index.isdigit() else -1, uuid)
        # With MPS, the server is the only process on the GPU, for all clients.
        if mode == "Prohibited" or (mode.startswith("Exclusive") and strategy != "mps"):
            closed = True
            yield wrong(
                f"GPU {index} is in compute mode {mode}: it accepts "
                + ("no process" if mode == "Prohibited" else "only one process"),
                f"nvidia-smi -i {index} -c DEFAULT",
            )
    if not closed:
        yield ok("the GPUs accept processes of several containers")


@_of_gpus
def persistence(node: ExaminedNode, rows: list[list[str]]) -> Iterator[Finding]:
    """Check whether the GPUs stay initialised while no program uses them."""
    off = [index for index, *_, mode in rows if mode == "Disabled"]
    if off and node.stat("/run/nvidia-persistenced/socket") is None:
        yield note(
            f"persistence mode is off for {name_gpus(off)}: while no governor is running, the "
            "first program waits for the GPU to be initialised",
            "systemctl enable --now nvidia-persistenced",
        )
    else:
        yield ok("the GPUs stay initialised while no program uses them")


def mps(node: ExaminedNode) -> Iterator[Finding]:
    """Check for MPS daemons that are not the governor's: their clients are not accounted for."""
    own = f"{node.config.runtime_dir}/mps/"
    seen, hidden = 0, 0
    for pid in node.names("/proc"):
        if not pid.isdigit() or not _is_mps(node, pid):
            continue
        try:
            variables = (node.read(f"/proc/{pid}/environ") or "").split("\0")
        except UnseenError:
            hidden += 1
            continue
        pipe = next(
            (v.partition("=")[2] for v in variables if v.startswith("CUDA_MPS_PIPE_DIRECTORY=")),
            "/tmp/nvidia-mps",  # noqa: S108 - the daemon's own default
        )
        if pipe.startswith(own):
            seen += 1
        else:
            yield warning(
                f"process {pid} is an MPS daemon that is not the governor's ({pipe}): its clients "
                "use a GPU outside of all quotas",
                f"echo quit | CUDA_MPS_PIPE_DIRECTORY={pipe} nvidia-cuda-mps-control",
            )
            return  # the daemon and its server are one installation
    if hidden:
        yield unseen(f"it is not known whether {hidden} MPS daemons are the governor's", AS_ROOT)
    else:
        yield ok("the MPS daemons are the governor's" if seen else "no MPS daemon is running")


def _is_mps(node: ExaminedNode, pid: str) -> bool:
    """Return whether this pid is an MPS daemon or server, and not a zombie."""
    try:
        if not (node.read(f"/proc/{pid}/comm") or "").startswith("nvidia-cuda-mps"):
            return False
        state = (node.read(f"/proc/{pid}/stat") or "").rpartition(") ")[2][:1]
    except UnseenError:
        return False  # it cannot be examined
    return state not in ("Z", "X")
