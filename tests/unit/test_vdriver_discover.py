"""Where a driver is found: hosts as file trees, drivers as compiled libraries."""

import os
import subprocess

import pytest

from tests.unit.vdriver_trees import elf, for_aarch64, link, put, put_driver, put_kernel
from vdriver.discover import find_driver
from vdriver.errors import DriverError
from vdriver.tables import read_tables
from vdriver.tree import Tree

V = "535.261.03"
DEBIAN = "usr/lib/x86_64-linux-gnu"


def names(files):
    return [f.name for f in files]


def test_ubuntu_has_it_in_the_multiarch_directory(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put(tmp_path / DEBIAN / f"libnvidia-nvvm.so.{V}", elf("libnvidia-nvvm.so.4"))
    put(tmp_path / DEBIAN / f"vdpau/libvdpau_nvidia.so.{V}", elf("libvdpau_nvidia.so.1"))
    put(tmp_path / DEBIAN / "libnvidia-nvvm.so.12.0.0", elf("libnvidia-nvvm.so.12"))
    put(tmp_path / DEBIAN / "libfoo.so.1.2.3", elf("libfoo.so.1"))
    put(tmp_path / "usr/bin/nvidia-smi", elf(program=True), 0o755)
    driver = find_driver(tmp_path)
    assert (driver.version, driver.kind, driver.machine) == (V, "nvidia", "x86_64")
    assert driver.cuda.path == f"/{DEBIAN}/libcuda.so.{V}"
    assert driver.nvml.library.soname == "libnvidia-ml.so.1"
    assert [(f.name, f.capability) for f in driver.libraries] == [
        (f"libnvidia-nvvm.so.{V}", "compute"),
        (f"libvdpau_nvidia.so.{V}", "video"),
    ]
    assert [(f.path, f.capability) for f in driver.programs] == [("/usr/bin/nvidia-smi", "utility")]
    assert driver.skipped == ()


def test_debian_has_it_behind_alternatives_with_absolute_links(tmp_path):
    current = tmp_path / DEBIAN / "nvidia/current"
    put_driver(current, V)
    put(
        tmp_path / DEBIAN / f"libnvidia-pkcs11-openssl3.so.{V}",
        elf(f"libnvidia-pkcs11-openssl3.so.{V}"),
    )
    put(tmp_path / "usr/lib/nvidia/current/nvidia-smi", elf(program=True), 0o755)
    link(tmp_path / DEBIAN / "libcuda.so.1", "/etc/alternatives/libcuda.so.1")
    link(tmp_path / "etc/alternatives/libcuda.so.1", f"/{DEBIAN}/nvidia/current/libcuda.so.1")
    link(tmp_path / "usr/bin/nvidia-smi", "/etc/alternatives/nvidia-smi")
    link(tmp_path / "etc/alternatives/nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi")
    driver = find_driver(tmp_path)
    assert driver.cuda.path == f"/{DEBIAN}/nvidia/current/libcuda.so.{V}"
    assert names(driver.libraries) == [f"libnvidia-pkcs11-openssl3.so.{V}"]
    assert driver.programs[0].path == "/usr/lib/nvidia/current/nvidia-smi"


def test_an_alternative_leads_to_a_directory_that_nobody_listed(tmp_path):
    put_driver(tmp_path / DEBIAN / "nvidia/tesla-470", "470.256.02")
    for stem in ("libcuda", "libnvidia-ml"):
        link(tmp_path / DEBIAN / f"{stem}.so.1", f"/etc/alternatives/{stem}")
        link(tmp_path / f"etc/alternatives/{stem}", f"/{DEBIAN}/nvidia/tesla-470/{stem}.so.1")
    assert find_driver(tmp_path).version == "470.256.02"


def test_a_mounted_driver_is_in_usr_local_nvidia(tmp_path):
    put_driver(tmp_path / "usr/local/nvidia/lib64", "580.159.04")
    put(tmp_path / "usr/local/nvidia/bin/nvidia-smi", elf(program=True), 0o755)
    put(
        tmp_path / "usr/bin/nvidia-smi",
        b"#!/bin/sh\nexec /usr/local/nvidia/bin/nvidia-smi\n",
        0o755,
    )
    put(tmp_path / "usr/bin/nvidia-debugdump", b"#!/bin/sh\n", 0o755)
    put_kernel(tmp_path, "580.159.04", opened=True)
    driver = find_driver(tmp_path)
    assert [(s.path, s.reason) for s in driver.skipped] == [
        ("/usr/bin/nvidia-debugdump", "not an ELF file")
    ]
    assert driver.cuda.path == "/usr/local/nvidia/lib64/libcuda.so.580.159.04"
    assert driver.kernel_version == "580.159.04"
    assert driver.programs[0].path == "/usr/local/nvidia/bin/nvidia-smi"


def test_fedora_has_it_in_lib64_with_a_merged_usr_and_32_bit_beside(tmp_path):
    put_driver(tmp_path / "usr/lib64", V)
    link(tmp_path / "lib64", "usr/lib64")
    put(tmp_path / f"usr/lib64/libnvidia-tls.so.{V}", elf(f"libnvidia-tls.so.{V}", bits=32))
    put(tmp_path / f"usr/lib64/libnvidia-cfg.so.{V}", elf("libnvidia-cfg.so.1"))
    driver = find_driver(tmp_path)
    assert driver.cuda.path == f"/usr/lib64/libcuda.so.{V}"
    assert names(driver.libraries) == [f"libnvidia-cfg.so.{V}"]
    assert [(s.path, s.reason) for s in driver.skipped] == [
        (f"/usr/lib64/libnvidia-tls.so.{V}", "32-bit i386")
    ]


def test_a_driver_container_is_a_root_of_its_own(tmp_path):
    inner = tmp_path / "run/nvidia/driver"
    put_driver(inner / DEBIAN, V, links=False)
    link(inner / "usr/lib64", f"/{DEBIAN}")
    put_kernel(tmp_path, V)
    driver = find_driver(tmp_path)
    assert driver.root == str(inner)
    assert driver.cuda.path == f"/{DEBIAN}/libcuda.so.{V}"


def test_the_loaders_cache_names_a_directory_that_nobody_listed(tmp_path, require):
    require("ldconfig")
    put_driver(tmp_path / "opt/gpu/lib", V)
    conf = put(tmp_path / "ld.so.conf", f"{tmp_path}/opt/gpu/lib\n".encode())
    cache = tmp_path / "etc/ld.so.cache"
    cache.parent.mkdir()
    subprocess.run(
        ["ldconfig", "-f", conf, "-C", tmp_path / "made"], check=True, capture_output=True
    )
    # the cache has absolute host paths; below the root they start without the root's own name
    cache.write_bytes(
        (tmp_path / "made")
        .read_bytes()
        .replace(str(tmp_path).encode() + b"/opt", b"/" * len(str(tmp_path)) + b"/opt")
    )
    assert find_driver(tmp_path).cuda.path == f"/opt/gpu/lib/libcuda.so.{V}"


def test_a_damaged_cache_is_a_hint_less(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put(tmp_path / "etc/ld.so.cache", b"glibc-ld.so.cache1.1\xff\xff\xff\xff")
    assert find_driver(tmp_path).version == V


def test_a_simulated_driver_says_so_and_is_no_business_of_the_kernel_module(tmp_path):
    put_driver(tmp_path / "sim", "999.10.1", simulated=True)
    put_kernel(tmp_path, V)
    driver = find_driver(tmp_path, ["/sim"])
    assert (driver.version, driver.kind, driver.kernel_version) == ("999.10.1", "simulated", None)


def test_only_the_directories_that_are_named_are_searched(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put_driver(tmp_path / "other", "550.54.14")
    assert find_driver(tmp_path, ["/other"]).version == "550.54.14"


def test_of_two_versions_the_kernel_modules_is_taken(tmp_path):
    put_driver(tmp_path / "usr/local/nvidia/lib64", "550.54.14")
    put_driver(tmp_path / DEBIAN, V)
    put_kernel(tmp_path, V)
    assert find_driver(tmp_path).version == V


def test_two_versions_and_no_kernel_module_is_an_error_that_names_both(tmp_path):
    put_driver(tmp_path / "usr/local/nvidia/lib64", "550.54.14")
    put_driver(tmp_path / DEBIAN, V)
    with pytest.raises(DriverError) as caught:
        find_driver(tmp_path)
    assert f"550.54.14 in {tmp_path}/usr/local/nvidia/lib64" in str(caught.value)
    assert f"{V} in {tmp_path}/{DEBIAN}" in str(caught.value)


def test_libraries_of_another_version_than_the_kernel_module_are_an_error_that_names_both(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put_kernel(tmp_path, "580.159.04")
    with pytest.raises(
        DriverError, match=r"kernel module is 580\.159\.04, but the libraries are 535\.261\.03"
    ):
        find_driver(tmp_path)


def test_forward_compatibility_libraries_alone_do_not_compete(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put(tmp_path / "usr/lib64/libcuda.so.580.159.04", elf("libcuda.so.1", tag="compat"))
    assert find_driver(tmp_path).version == V


def test_half_a_driver_is_an_error_that_names_the_other_half(tmp_path):
    put(tmp_path / DEBIAN / f"libcuda.so.{V}", elf("libcuda.so.1"))
    with pytest.raises(DriverError, match=rf"stands alone: no libnvidia-ml\.so\.{V}"):
        find_driver(tmp_path)


def test_no_driver_is_an_error_that_says_where_was_looked(tmp_path):
    (tmp_path / "usr/lib64").mkdir(parents=True)
    with pytest.raises(DriverError, match=rf"no libcuda.*{tmp_path}/usr/lib64; install"):
        find_driver(tmp_path)
    with pytest.raises(DriverError, match="any known directory"):
        find_driver(tmp_path / "nowhere")


def test_a_damaged_libcuda_is_an_error_and_a_damaged_other_is_left_out(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put(tmp_path / DEBIAN / f"libnvidia-cfg.so.{V}", b"")
    put(
        tmp_path / DEBIAN / f"libnvidia-allocator.so.{V}",
        for_aarch64(elf("libnvidia-allocator.so.1")),
    )
    driver = find_driver(tmp_path)
    assert driver.libraries == ()
    assert [s.reason for s in driver.skipped] == ["64-bit aarch64", "not an ELF file"]
    put(tmp_path / DEBIAN / f"libcuda.so.{V}", b"\x7fELF")
    with pytest.raises(DriverError, match=r"libcuda\.so\.535\.261\.03"):
        find_driver(tmp_path)


def test_pipes_and_loops_named_like_a_driver_never_hang(tmp_path):
    (tmp_path / DEBIAN).mkdir(parents=True)
    os.mkfifo(tmp_path / DEBIAN / "libcuda.so.1.2.3")
    link(tmp_path / DEBIAN / "libnvidia-ml.so.1.2.3", "libnvidia-ml.so.1.2.3")
    link(tmp_path / DEBIAN / "libcuda.so.1", "../x86_64-linux-gnu/libcuda.so.1")
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/ld.so.cache")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    os.mkfifo(tmp_path / "proc/driver/nvidia/version")
    with pytest.raises(DriverError, match="no libcuda"):
        find_driver(tmp_path)
    put_driver(tmp_path / DEBIAN, V, links=False)
    os.mkfifo(tmp_path / DEBIAN / f"libnvidia-cfg.so.{V}")
    driver = find_driver(tmp_path)
    assert [s.reason for s in driver.skipped] == ["not a regular file below the root"]


def test_links_never_lead_out_of_the_root(tmp_path):
    root = tmp_path / "root"
    put_driver(tmp_path / "outside", V)
    link(root / "usr/lib64", "../../../outside")
    link(root / DEBIAN, str(tmp_path / "outside"))
    with pytest.raises(DriverError, match="no libcuda"):
        find_driver(root)
    # the same texts below the root are found
    put_driver(root / "outside", V)
    assert find_driver(root).cuda.path == f"/outside/libcuda.so.{V}"


def test_a_tree_resolves_as_for_a_process_whose_root_it_is(tmp_path):
    put(tmp_path / "a/b/file", b"x")
    link(tmp_path / "abs", "/a/b")
    link(tmp_path / "a/up", "../../../../a")
    link(tmp_path / "loop", "/loop")
    tree = Tree(str(tmp_path))
    assert tree.resolve("/abs/file") == "/a/b/file"
    assert tree.resolve("/a/up/b/../b/file") == "/a/b/file"
    assert tree.resolve("/../..") == "/"
    assert tree.resolve("/loop") is None
    assert tree.resolve("/a/b/file/x") is None
    assert tree.regular("/abs") is None
    assert tree.read("/abs/file", 10) == b"x"


def test_the_table_names_each_library_once():
    """Fix by removing the second mention in vdriver/libraries.toml."""
    import tomllib
    from pathlib import Path

    data = tomllib.loads(Path("vdriver/libraries.toml").read_text())
    mentioned = [n for c in data["capability"].values() for n in c["libraries"]]
    assert len(mentioned) == len(set(mentioned)) == len(read_tables().libraries)
    assert all(c["source"] for c in data["capability"].values())
    assert read_tables().capability("libnvidia-of-tomorrow.so.700.1") == "compute"
