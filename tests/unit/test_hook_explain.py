"""Tests of `tidegate explain`: from a generation and an image's files to the printed lines."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from governor import cli
from oci_hook.errors import show
from tests.unit.test_hook_plan import DOCUMENT, GLX, V

TARGET = "/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A generation in force whose manifest watches one file, and an image in Debian's layout."""
    watched = tmp_path / "control"
    watched.write_bytes(b"as it was")
    stat = watched.stat()
    document: dict[str, Any] = copy.deepcopy(DOCUMENT)
    for file in document["files"]:
        if file["role"] == "library":
            file["capability"] = "graphics" if "GLX" in file["path"] else "compute"
        if "odd" in file["path"]:
            file["capability"] = "video"
    document["binds"].append({"path": str(tmp_path / "sockets"), "capability": "utility"})
    document["source"]["watch"] = [
        {
            "path": str(watched),
            "role": "control",
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
        }
    ]
    generation = tmp_path / "drivers" / f"{V}-0123456789ab"
    generation.mkdir(parents=True)
    (generation / "manifest.json").write_text(json.dumps(document))
    (generation.parent / "current").symlink_to(generation.name)
    (tmp_path / "sockets").mkdir()
    for path, content in {
        "usr/lib/x86_64-linux-gnu/libc.so.6": b"libc",
        "lib64/ld-linux-x86-64.so.2": b"\x7fELF glibc-hwcaps",
        "etc/vulkan/icd.d/intel.json": b"{}",
    }.items():
        (tmp_path / "image" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "image" / path).write_bytes(content)
    return tmp_path


def explain(
    node: Path, capsys: pytest.CaptureFixture[str], *annotations: str, configuration: str = "{}"
) -> list[str]:
    (node / "config.yaml").write_text(configuration)
    options = [
        "--config",
        f"{node}/config.yaml",
        "--driver-dir",
        f"{node}/drivers",
        "--module-version",
        f"{node}/version",
        "--rootfs",
        f"{node}/image",
    ]
    for annotation in annotations:
        options += ["--annotation", f"tidegate.gpu/{annotation}"]
    assert cli.main(["explain", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_default_is_explained(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generation = f"{node}/drivers/{V}-0123456789ab"
    assert explain(node, capsys, "memory=8Gi", "compute=30", "compute-limit=60") == [
        "request",
        "  memory        8Gi of each GPU",
        "  compute       30 % of each GPU's time, guaranteed",
        "  compute-limit 60 %: idle time is lent up to this limit",
        "  devices       1, chosen by the governor",
        "  class         throughput",
        "  parking       allowed, but never needed: this node grants no more memory than its GPUs have",
        "  strategy      auto",
        "  capabilities  compute, utility",
        "  driver        required",
        "driver",
        f"  {V} (x86_64), generation {V}-0123456789ab",
        "  set of libraries for compute, utility: the smallest that has compute, utility",
        "  programs nvidia-smi (utility)",
        "libraries",
        "  control           1: libcuda.so.1",
        "  compute           1: libnvidia-nvvm.so.4",
        "image",
        "  /usr/lib/x86_64-linux-gnu holds its C library",
        f"  {TARGET} is where its loader looks first",
        "  has no ld.so.cache",
        "directories of this host",
        "  /run/nvidia-persistenced (utility): does not exist now, left out",
        f"  {node}/sockets (utility)",
        "result, if the governor admits it",
        f"  bind {generation}/sets/compute,utility/lib64 -> {TARGET} [ro,nosuid,nodev]",
        "  bind /run/tidegate/containers/<key> -> /run/tidegate [ro,nosuid,nodev,noexec]",
        f"  bind {generation}/bin/nvidia-smi -> /usr/bin/nvidia-smi [ro,nosuid,nodev,file]",
        f"  bind {node}/sockets -> {node}/sockets [ro,nosuid,nodev,noexec]",
    ]


@pytest.mark.parametrize(
    ("configuration", "annotations", "said"),
    [
        (
            "{}", ["count=1"],
            ["memory        not given, and this node has no default: the container would be refused",
             "compute       1 % of each GPU's time, guaranteed, the node's default",
             "compute-limit 100 %, the node's default: idle time is lent up to this limit"],
        ),
        (
            "defaults: {memory: 8Gi, compute: 20, compute_limit: 60}", ["count=1"],
            ["memory        8Gi of each GPU, the node's default",
             "compute       20 % of each GPU's time, guaranteed, the node's default",
             "compute-limit 60 %, the node's default: idle time is lent up to this limit"],
        ),
        (
            "defaults: {compute: 20}", ["memory=1Gi", "compute-limit=10"],
            ["memory        1Gi of each GPU",
             "compute       10 % of each GPU's time, guaranteed, because of the limit",
             "compute-limit 10 %: no idle time is lent"],
        ),
    ],
)  # fmt: skip
def test_the_nodes_defaults_are_explained(
    node: Path,
    capsys: pytest.CaptureFixture[str],
    configuration: str,
    annotations: list[str],
    said: list[str],
) -> None:
    lines = explain(node, capsys, *annotations, configuration=configuration)
    assert [line.strip() for line in lines[1:4]] == said


def test_all_capabilities_are_explained(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output explains each library, the target of each place, and everything that is left out."""
    (node / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {V}  Mon\n")
    (node / "image/usr/lib/x86_64-linux-gnu/gbm").touch()
    lines = explain(node, capsys, "capabilities=all")
    start, end = lines.index("driver"), lines.index("directories of this host")
    assert lines[start:end] == [
        "driver",
        f"  {V} (x86_64), generation {V}-0123456789ab",
        f"  the kernel module is {V} too",
        "  set of libraries for compute, display, graphics, utility: the largest",
        "  32-bit libraries where the image has a 32-bit C library",
        "  programs nvidia-smi (utility), nvidia-ngx-updater (graphics)",
        "libraries",
        "  control           1: libcuda.so.1",
        "  compute           1: libnvidia-nvvm.so.4",
        "  graphics          1: libGLX_nvidia.so.0",
        "  needed by these   1: libodd.so.1",
        "  32-bit graphics   1: libGLX_nvidia.so.0",
        "image",
        "  /usr/lib/x86_64-linux-gnu holds its C library",
        f"  {TARGET} is where its loader looks first",
        "  has no ld.so.cache",
        (
            "  accepts no 32-bit libraries: the image has no 32-bit glibc (no libc.so.6 for i386 in"
            " /usr/lib/i386-linux-gnu, /lib/i386-linux-gnu, /usr/lib32, /lib32, /usr/lib, /lib)"
        ),
        "places",
        "  vulkan-icd (graphics): /usr/share/vulkan/icd.d, the whole directory: nvidia_icd.json, nvidia_layers.json",
        "    not /etc/vulkan/icd.d: the image has files there",
        "  gbm (display): left out",
        "    not /usr/lib/x86_64-linux-gnu/gbm: /usr/lib/x86_64-linux-gnu/gbm is not a directory",
    ]


def test_without_an_image_places_are_named(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--driver-dir", f"{node}/drivers", "--module-version", f"{node}/version"]
    annotation = ["--annotation", "tidegate.gpu/capabilities=display"]
    assert cli.main(["explain", *arguments, *annotation]) == 0
    out = capsys.readouterr().out
    assert (
        "  vulkan-icd: /etc/vulkan/icd.d or /usr/share/vulkan/icd.d\n  gbm: {libdir}/gbm\n" in out
    )
    assert (
        "libraries for compute, display, graphics, utility: the smallest that has display\n" in out
    )
    assert GLX not in out


def test_explain_fails_as_the_hook_would(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--driver-dir", f"{node}/drivers", "--module-version", f"{node}/version"]
    annotation = ["--annotation", "tidegate.gpu/capabilities=compat32,display"]
    assert cli.main(["explain", *arguments, "--rootfs", f"{node}/image", *annotation]) == 76
    assert "the image has no 32-bit glibc" in capsys.readouterr().err
    (node / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  1.2.3  Mon\n")
    assert cli.main(["explain", *arguments, *annotation]) == 72
    assert f"is for driver {V}, but the kernel module is 1.2.3" in capsys.readouterr().err


def fail(node: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    """Run `explain` for a container that asks for graphics; return the status and the output."""
    arguments = ["--driver-dir", f"{node}/drivers", "--module-version", f"{node}/version"]
    annotation = ["--annotation", "tidegate.gpu/capabilities=graphics"]
    status = cli.main(["explain", *arguments, *annotation, *options])
    return status, *capsys.readouterr()


def test_a_missing_root_is_reported_first(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(node, capsys, "--rootfs", f"{node}/nowhere") == (
        65,
        "",
        (
            f"tidegate: root file system {node}/nowhere: No such file or directory; name its directory"
            " with --rootfs\n"
        ),
    )


@pytest.mark.parametrize("root", ["/", "/proc/self/root", "//", "/usr/.."])
def test_the_hosts_own_root_is_refused_as_by_the_hook(
    node: Path, capsys: pytest.CaptureFixture[str], root: str
) -> None:
    line = f"tidegate: root file system {root} is the host's own root; name the container's with --rootfs\n"
    assert fail(node, capsys, "--rootfs", root) == (66, "", line)


PARKED_WHILE_IDLE = (
    "allowed: while it is idle, its memory may be parked in host memory; this node reserves"
    " 64Gi for that, of which this container needs up to 8Gi"
)


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ((), PARKED_WHILE_IDLE),
        (("parking=never",), "never"),
        (("count=2",), "allowed, but not possible with several GPUs"),
        (("devices=0,1",), "allowed, but not possible with several GPUs"),
        (
            ("capabilities=compute,utility,graphics",),
            "allowed, but not possible with the capability graphics",
        ),
    ],
)
def test_whether_memory_may_be_parked_is_explained(
    node: Path, capsys: pytest.CaptureFixture[str], annotations: tuple[str, ...], said: str
) -> None:
    configuration = "memory: {overbook: 1.5, host: 64Gi}"
    lines = explain(node, capsys, "memory=8Gi", *annotations, configuration=configuration)
    assert f"  parking       {said}" in lines


def test_a_bundle_without_config_is_reported_with_a_hint(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail(node, capsys, "--bundle", f"{node}/image") == (
        66,
        "",
        (
            f"tidegate: {show(f'{node}/image/config.json')}: No such file or directory; name a bundle with --bundle,"
            " or give --rootfs and --annotation instead\n"
        ),
    )


def test_missing_32_bit_libraries_are_reported_once(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    annotation = ("--annotation", "tidegate.gpu/capabilities=compat32,display")
    status, out, err = fail(node, capsys, "--rootfs", f"{node}/image", *annotation)
    assert (status, "32-bit glibc" in out, err.count("the image has no 32-bit glibc")) == (
        76,
        False,
        1,
    )


@pytest.mark.parametrize(
    ("mounts", "shown"),
    [
        ([], "/usr/share/vulkan/icd.d, the whole directory"),
        ([{"destination": "/usr/share/vulkan"}], "/etc/vulkan/icd.d, single files"),
        ([{"destination": "usr//share/vulkan/icd.d/"}], "/etc/vulkan/icd.d, single files"),
        (
            [{"destination": "/usr/share/vul"}, {"destination": 7}, 7],
            "/usr/share/vulkan/icd.d, the whole",
        ),
        ([{"destination": "/usr/share"}, {"destination": "/etc"}], "left out"),
        ({"destination": "/usr/share"}, "/usr/share/vulkan/icd.d, the whole directory"),
    ],
)
def test_the_drivers_files_are_not_placed_on_volumes(
    node: Path, capsys: pytest.CaptureFixture[str], mounts: object, shown: str
) -> None:
    """The image has files in the first directory."""
    config = {"root": {"path": "image"}, "mounts": mounts}
    (node / "config.json").write_text(json.dumps(config))
    status, out, err = fail(node, capsys, "--bundle", str(node))
    assert (status, err) == (0, "")
    assert f"  vulkan-icd (graphics): {shown}" in out
    assert out.count(": it is on a volume\n") == (2 if shown == "left out" else 0)


def test_many_names_take_several_lines(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = node / "drivers" / "current" / "manifest.json"
    document = json.loads(path.read_text())
    names = [f"libnvidia-number-{i:02}.so.1" for i in range(12)]
    document["sets"][2]["names64"] += names
    document["files"] += [
        {"path": f"lib64/{name}", "role": "library", "capability": "compute", "soname": name}
        for name in names
    ]
    path.write_text(json.dumps(document))
    lines = explain(node, capsys, "capabilities=compute")
    at = next(i for i, line in enumerate(lines) if line.startswith("  compute          "))
    assert lines[at].startswith("  compute          13: libnvidia-number-00.so.1, ")
    assert lines[at + 1].startswith(" " * 23 + "libnvidia-number-")
    assert max(map(len, lines[at : at + 4])) <= 112


def test_the_images_own_driver_in_its_search_path_is_explained(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hook mounts the node's driver below that directory."""
    (node / "image/opt/own").mkdir(parents=True)
    (node / "image/opt/own/libcuda.so.1").touch()
    config = {
        "root": {"path": "image"},
        "annotations": {"tidegate.gpu/memory": "1Gi"},
        "process": {"cwd": "/", "args": ["/bin/true"], "env": ["LD_LIBRARY_PATH=/opt/own"]},
    }
    (node / "config.json").write_text(json.dumps(config))
    status, out, err = fail(node, capsys, "--bundle", str(node))
    assert (status, err) == (0, "")
    assert "/opt/own/glibc-hwcaps/x86-64-v2" in out


def test_a_container_with_a_claim_gets_its_quota_from_the_claim(
    node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tidegate-hook", "--claim", "4c6e", "--share", "gpu", "createRuntime"]
    config = {
        "root": {"path": str(node / "image")},
        "hooks": {"createRuntime": [{"path": "/usr/bin/tidegate-hook", "args": words}]},
    }
    (node / "config.json").write_text(json.dumps(config))
    options = ["--driver-dir", f"{node}/drivers", "--module-version", f"{node}/version"]
    options += ["--bundle", str(node)]
    assert cli.main(["explain", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "claims 4c6e determine which GPUs it gets and how much of each: tidegate claims shows them",
        "request",
        "  capabilities  compute, utility",
        "  driver        required",
    ]
    assert "result, if the governor admits it" in lines
    assert cli.main(["explain", *options, "--annotation", "tidegate.gpu/memory=8Gi"]) != 0
    assert "conflicts with claim 4c6e" in capsys.readouterr().err
    # Entries of another hook are not recognised.
    assert cli.main(["explain", *options, "--hook", "/opt/hook"]) == 0
    assert "left alone" in capsys.readouterr().out
