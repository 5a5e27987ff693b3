"""Tests of vdriver.discover, with hosts as file trees and drivers as compiled libraries."""

import json
import os
import subprocess

import pytest

from oci_hook.request import CAPABILITIES
from tests.unit.vdriver_trees import elf, for_aarch64, link, put, put_driver, put_kernel
from vdriver.discover import find_driver
from vdriver.errors import DriverError
from vdriver.fixed_dirs import portable
from vdriver.manifest import Bind
from vdriver.tables import read_tables
from vdriver.tree import Tree

V = "535.261.03"
DEBIAN = "usr/lib/x86_64-linux-gnu"


def names(files):
    return [f.name for f in files]


def test_ubuntu_has_the_driver_in_the_multiarch_directory(tmp_path):
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


def test_debian_has_the_driver_behind_alternatives_with_absolute_links(tmp_path):
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


def test_an_alternative_leads_to_a_directory_that_is_not_in_the_table(tmp_path):
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


def test_fedora_has_the_driver_in_lib64_and_32_bit_libraries_in_lib(tmp_path):
    put_driver(tmp_path / "usr/lib64", V)
    link(tmp_path / "lib64", "usr/lib64")
    put(tmp_path / f"usr/lib/libnvidia-tls.so.{V}", elf(f"libnvidia-tls.so.{V}", bits=32))
    put(tmp_path / f"usr/lib/libcuda.so.{V}", elf("libcuda.so.1", bits=32))
    put(tmp_path / f"usr/lib64/libnvidia-cfg.so.{V}", elf("libnvidia-cfg.so.1"))
    driver = find_driver(tmp_path)
    assert driver.cuda.path == f"/usr/lib64/libcuda.so.{V}"
    assert names(driver.libraries) == [f"libnvidia-cfg.so.{V}"]
    assert [(f.path, f.library.machine) for f in driver.libraries32] == [
        (f"/usr/lib/libcuda.so.{V}", "i386"),
        (f"/usr/lib/libnvidia-tls.so.{V}", "i386"),
    ]
    assert driver.skipped == ()


def test_suse_once_had_the_driver_in_a_directory_of_x11(tmp_path):
    put_driver(tmp_path / "usr/X11R6/lib64", "390.157")
    assert find_driver(tmp_path).cuda.path == "/usr/X11R6/lib64/libcuda.so.390.157"


def test_nixos_has_a_tree_of_links_to_its_store(tmp_path):
    store = tmp_path / "nix/store/abc-nvidia-x11-580.159.04"
    put_driver(store / "lib", "580.159.04")
    for file in (store / "lib").iterdir():
        link(
            tmp_path / f"run/opengl-driver/lib/{file.name}",
            f"/nix/store/abc-nvidia-x11-580.159.04/lib/{file.name}",
        )
    put(store / "lib32/libnvidia-tls.so.580.159.04", elf("libnvidia-tls.so.580.159.04", bits=32))
    link(tmp_path / "run/opengl-driver-32/lib", "/nix/store/abc-nvidia-x11-580.159.04/lib32")
    here = "/nix/store/abc-nvidia-x11-580.159.04/lib/libGLX_nvidia.so.0"
    text = json.dumps({"ICD": {"library_path": here, "api_version": "1.4"}})
    put(tmp_path / "run/opengl-driver/share/vulkan/icd.d/nvidia_icd.x86_64.json", text.encode())
    smi = elf(program=True, interpreter="/nix/store/xyz-glibc-2.40/lib/ld-linux-x86-64.so.2")
    put(tmp_path / "run/current-system/sw/bin/nvidia-smi", smi, 0o755)
    driver = find_driver(tmp_path)
    assert driver.cuda.path == f"/{store.relative_to(tmp_path)}/lib/libcuda.so.580.159.04"
    assert names(driver.libraries32) == ["libnvidia-tls.so.580.159.04"]
    assert [json.loads(f.content) for f in driver.data] == [
        {"ICD": {"library_path": "libGLX_nvidia.so.0", "api_version": "1.4"}}
    ]
    assert driver.programs == ()
    assert [s.reason for s in driver.skipped] == [
        "its loader /nix/store/xyz-glibc-2.40/lib/ld-linux-x86-64.so.2 is this host's own"
    ]


def put_windows_driver(root, name, text):
    put(root / f"usr/lib/wsl/drivers/{name}/nv_dispi.inf", text)
    put(root / f"usr/lib/wsl/drivers/{name}/libcuda.so.1.1", elf("libcuda.so.1", tag=name))


def test_wsl_has_windows_driver_and_its_version_from_the_store(tmp_path):
    wsl = tmp_path / "usr/lib/wsl/lib"
    for stem in ("libcuda", "libnvidia-ml", "libnvidia-encode"):
        put(wsl / f"{stem}.so.1", elf(f"{stem}.so.1"))
    put(wsl / "libdxcore.so", elf())
    put(wsl / "libof.mesa.so", elf())
    put(wsl / "nvidia-smi", elf(program=True), 0o755)
    old = '[Version]\r\nSignature = "$CHICAGO$"\r\nDriverVer = 02/25/2025, 31.0.15.9999\r\n'
    new = "[Version]\r\nDriverVer   = 08/14/2024,32.0.15.6094\r\n"
    put_windows_driver(tmp_path, "nv_dispi.inf_amd64_1111", old.encode())
    put_windows_driver(tmp_path, "nv_dispi.inf_amd64_2222", new.encode("utf-16"))
    driver = find_driver(tmp_path)
    assert (driver.kind, driver.version, driver.kernel_version) == ("wsl", "599.99", None)
    assert driver.binds == (Bind("/usr/lib/wsl/drivers/nv_dispi.inf_amd64_1111", "compute"),)
    put_windows_driver(tmp_path, "nv_dispi.inf_amd64_1111", b"no version")
    driver = find_driver(tmp_path)
    assert driver.version == "560.94"
    assert names(driver.libraries) == ["libdxcore.so", "libnvidia-encode.so.1"]
    assert names(driver.programs) == ["nvidia-smi"]
    put_windows_driver(tmp_path, "nv_dispi.inf_amd64_2222", b"")
    with pytest.raises(DriverError, match=r"no driver store in .*wsl/drivers states its version"):
        find_driver(tmp_path)


@pytest.mark.parametrize(
    "marker",
    [
        "etc/nv_tegra_release",
        "usr/lib/aarch64-linux-gnu/tegra/libnvrm_gpu.so",
        "usr/lib/aarch64-linux-gnu/nvidia/libnvrm_gpu.so",
    ],
)
def test_a_jetson_is_refused_in_one_line(tmp_path, marker):
    put_driver(tmp_path / DEBIAN, V)
    put(tmp_path / marker, b"# R36 (release), REVISION: 4.3\n")
    with pytest.raises(DriverError) as caught:
        find_driver(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/{marker}: this is a Jetson board, which Tidegate does not support; its driver "
        "comes with the board's system image; use NVIDIA's own container runtime there"
    )


def test_the_soname_link_chooses_among_companions(tmp_path):
    lib = tmp_path / DEBIAN
    put_driver(lib, V)
    for version in ("1.1.3", "1.1.19"):
        put(
            lib / f"libnvidia-egl-wayland.so.{version}",
            elf("libnvidia-egl-wayland.so.1", tag=version),
        )
        put(lib / f"libnvidia-egl-gbm.so.{version}", elf("libnvidia-egl-gbm.so.1", tag=version))
    link(lib / "libnvidia-egl-wayland.so.1", "libnvidia-egl-wayland.so.1.1.3")
    put(lib / "libnvidia-nvvm.so.4.0.0", elf("libnvidia-nvvm.so.4", tag="old"))
    put(lib / f"libnvidia-nvvm.so.{V}", elf("libnvidia-nvvm.so.4"))
    driver = find_driver(tmp_path)
    assert names(driver.libraries) == [
        "libnvidia-egl-gbm.so.1.1.19",
        "libnvidia-egl-wayland.so.1.1.3",
        f"libnvidia-nvvm.so.{V}",
    ]
    assert [s.path for s in driver.skipped] == [
        f"/{DEBIAN}/libnvidia-egl-gbm.so.1.1.3",
        f"/{DEBIAN}/libnvidia-egl-wayland.so.1.1.19",
        f"/{DEBIAN}/libnvidia-nvvm.so.4.0.0",
    ]


def test_files_for_fixed_directories_are_found_by_place(tmp_path):
    current = tmp_path / DEBIAN / "nvidia/current"
    put_driver(current, V)
    put(current / f"libvdpau_nvidia.so.{V}", elf("libvdpau_nvidia.so.1"))
    link(current / "libvdpau_nvidia.so.1", f"libvdpau_nvidia.so.{V}")
    put(tmp_path / "usr/lib/nvidia/current/nvidia_drv.so", elf())
    put(tmp_path / "usr/share/vulkan/icd.d/nvidia_icd.json", b'{"ICD": {"library_path": "x.so"}}')
    put(tmp_path / "usr/share/vulkan/icd.d/intel_icd.json", b"{}")
    put(tmp_path / "etc/OpenCL/vendors/nvidia.icd", b"/opt/lib/libnvidia-opencl.so.1\n")
    put(tmp_path / f"lib/firmware/nvidia/{V}/gsp_ga10x.bin", b"firmware")
    put(tmp_path / "lib/firmware/nvidia/470.1/gsp.bin", b"another driver's")
    put(tmp_path / "usr/share/nvidia/nvoptix.bin", b"weights")
    put(tmp_path / f"usr/share/nvidia/nvidia-application-profiles-{V}-rc", b"{}")
    put(tmp_path / "usr/share/nvidia/nvidia-application-profiles-470.1-rc", b"{}")
    os.mkfifo(tmp_path / "usr/share/vulkan/icd.d/nvidia_icd.x86_64.json")
    driver = find_driver(tmp_path)
    assert [(f.place, f.path) for f in driver.data] == [
        ("firmware", f"/lib/firmware/nvidia/{V}/gsp_ga10x.bin"),
        ("nvidia", f"/usr/share/nvidia/nvidia-application-profiles-{V}-rc"),
        ("nvidia", "/usr/share/nvidia/nvoptix.bin"),
        ("opencl", "/etc/OpenCL/vendors/nvidia.icd"),
        ("vdpau", f"/{DEBIAN}/nvidia/current/libvdpau_nvidia.so.{V}"),
        ("vulkan-icd", "/usr/share/vulkan/icd.d/nvidia_icd.json"),
        ("xorg-driver", "/usr/lib/nvidia/current/nvidia_drv.so"),
    ]
    contents = {f.name: f.content for f in driver.data}
    assert contents["nvidia.icd"] == b"libnvidia-opencl.so.1\n"
    assert contents["nvidia_icd.json"] is None
    assert [(s.path, s.reason) for s in driver.skipped] == [
        ("/usr/share/vulkan/icd.d/nvidia_icd.x86_64.json", "not a regular file")
    ]


def test_a_missing_configuration_file_comes_from_the_table(tmp_path):
    lib = tmp_path / DEBIAN
    put_driver(lib, V)
    put(lib / f"libnvidia-opencl.so.{V}", elf("libnvidia-opencl.so.1"))
    put(lib / f"libEGL_nvidia.so.{V}", elf("libEGL_nvidia.so.0"))
    assert [(f.name, f.path, f.content) for f in find_driver(tmp_path).data] == [
        (
            "10_nvidia.json",
            None,
            b'{"file_format_version": "1.0.0", "ICD": {"library_path": "libEGL_nvidia.so.0"}}\n',
        ),
        ("nvidia.icd", None, b"libnvidia-opencl.so.1\n"),
    ]
    put(tmp_path / "etc/OpenCL/vendors/nvidia.icd", b"libnvidia-opencl.so.1")
    assert [f.path for f in find_driver(tmp_path).data][1] == "/etc/OpenCL/vendors/nvidia.icd"


def test_sockets_of_services_are_provided_only_on_request(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    assert find_driver(tmp_path).binds == ()
    assert find_driver(tmp_path, sockets=True).binds == (
        Bind("/run/nvidia-persistenced", "utility"),
        Bind("/run/nvidia-fabricmanager", "utility"),
    )


@pytest.mark.parametrize(
    "text", [b"", b"[" * 100_000, b"\xff\xfe", b'{"ICD": {"library_path": 3}}']
)
def test_an_invalid_configuration_file_is_mirrored_unchanged(text):
    assert portable("nvidia_icd.json", text) is None
    assert portable("nvidia.icd", text) is None


def test_a_driver_container_is_a_separate_root(tmp_path):
    inner = tmp_path / "run/nvidia/driver"
    put_driver(inner / DEBIAN, V, links=False)
    link(inner / "usr/lib64", f"/{DEBIAN}")
    put_kernel(tmp_path, V)
    driver = find_driver(tmp_path)
    assert driver.root == str(inner)
    assert driver.cuda.path == f"/{DEBIAN}/libcuda.so.{V}"


def test_the_loaders_cache_names_a_directory_that_is_not_in_the_table(tmp_path, require):
    require("ldconfig")
    put_driver(tmp_path / "opt/gpu/lib", V)
    conf = put(tmp_path / "ld.so.conf", f"{tmp_path}/opt/gpu/lib\n".encode())
    cache = tmp_path / "etc/ld.so.cache"
    cache.parent.mkdir()
    subprocess.run(
        ["ldconfig", "-f", conf, "-C", tmp_path / "made"], check=True, capture_output=True
    )
    # The cache has absolute paths of the host. Slashes of the same length replace the root's own
    # path.
    cache.write_bytes(
        (tmp_path / "made")
        .read_bytes()
        .replace(str(tmp_path).encode() + b"/opt", b"/" * len(str(tmp_path)) + b"/opt")
    )
    assert find_driver(tmp_path).cuda.path == f"/opt/gpu/lib/libcuda.so.{V}"


def test_a_damaged_cache_is_ignored(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put(tmp_path / "etc/ld.so.cache", b"glibc-ld.so.cache1.1\xff\xff\xff\xff")
    assert find_driver(tmp_path).version == V


def test_a_simulated_driver_is_recognised_and_ignores_the_kernel_module(tmp_path):
    put_driver(tmp_path / "sim", "999.10.1", simulated=True)
    put_kernel(tmp_path, V)
    driver = find_driver(tmp_path, ["/sim"])
    assert (driver.version, driver.kind, driver.kernel_version) == ("999.10.1", "simulated", None)


def test_only_the_given_directories_are_searched(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put_driver(tmp_path / "other", "550.54.14")
    assert find_driver(tmp_path, ["/other"]).version == "550.54.14"


def test_of_two_versions_that_of_the_kernel_module_is_used(tmp_path):
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


def test_a_driver_without_one_of_its_libraries_is_an_error_that_names_it(tmp_path):
    put(tmp_path / DEBIAN / f"libcuda.so.{V}", elf("libcuda.so.1"))
    with pytest.raises(
        DriverError,
        match=rf"has no counterpart: libnvidia-ml\.so\.{V} is in none of the directories",
    ):
        find_driver(tmp_path)


def test_no_driver_is_an_error_that_names_the_directories_searched(tmp_path):
    (tmp_path / "usr/lib64").mkdir(parents=True)
    with pytest.raises(DriverError, match=rf"no libcuda.*{tmp_path}/usr/lib64; install"):
        find_driver(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DriverError, match="any known directory"):
        find_driver(tmp_path / "empty")


def test_a_missing_root_or_directory_is_reported(tmp_path):
    with pytest.raises(DriverError, match=rf"{tmp_path}/nowhere: no such directory; .*--root"):
        find_driver(tmp_path / "nowhere")
    put(tmp_path / "file", b"")
    for name in ("/nope", "/file", str(tmp_path)):
        with pytest.raises(DriverError, match=rf"{name}: no such directory under {tmp_path}; "):
            find_driver(tmp_path, [name])


def test_packages_that_were_unpacked_but_not_installed_are_found(tmp_path):
    put_driver(tmp_path / DEBIAN / "nvidia/tesla-550", "550.54.15", links=False)
    put(tmp_path / DEBIAN / "libnvidia-glcore.so.550.54.15", elf("libnvidia-glcore.so.550.54.15"))
    put(tmp_path / "usr/lib/nvidia/tesla-550/nvidia-smi", elf(program=True), 0o755)
    driver = find_driver(tmp_path)
    assert driver.version == "550.54.15"
    assert names(driver.libraries) == ["libnvidia-glcore.so.550.54.15"]
    assert names(driver.programs) == ["nvidia-smi"]


def test_a_damaged_library_is_reported_even_if_the_other_class_is_intact(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put(tmp_path / DEBIAN / f"libnvcuvid.so.{V}", elf("libnvcuvid.so.1")[:1000])
    put(tmp_path / f"usr/lib/i386-linux-gnu/libnvcuvid.so.{V}", elf("libnvcuvid.so.1", bits=32))
    driver = find_driver(tmp_path)
    assert names(driver.libraries32) == [f"libnvcuvid.so.{V}"]
    assert [s.path for s in driver.skipped] == [f"/{DEBIAN}/libnvcuvid.so.{V}"]


def test_a_64_bit_driver_is_not_completed_by_32_bit_libraries(tmp_path):
    put(tmp_path / DEBIAN / f"libcuda.so.{V}", elf("libcuda.so.1"))
    put(tmp_path / f"usr/lib/i386-linux-gnu/libnvidia-ml.so.{V}", elf("libnvidia-ml.so.1", bits=32))
    with pytest.raises(DriverError, match=r"has no counterpart: 64-bit libnvidia-ml\.so"):
        find_driver(tmp_path)


def test_a_damaged_libcuda_is_an_error_and_another_damaged_library_is_skipped(tmp_path):
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


def test_leftovers_of_another_version_are_ignored(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    put_kernel(tmp_path, V)
    put(tmp_path / DEBIAN / "libcuda.so.470.1", b"")
    put(tmp_path / DEBIAN / "libnvidia-ml.so.470.1", b"")
    for stem in ("libcuda", "libnvidia-ml"):
        path = tmp_path / f"usr/lib/i386-linux-gnu/{stem}.so.535.247.01"
        put(path, elf(f"{stem}.so.1", bits=32))
    assert find_driver(tmp_path).version == V
    put(tmp_path / DEBIAN / f"libcuda.so.{V}", b"\x7fELF")
    with pytest.raises(DriverError, match=rf"libcuda\.so\.{V}"):
        find_driver(tmp_path)


def test_a_name_that_is_not_printable_is_ignored(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    for name in (f"libnvidia-\n.so.{V}", f"libnvidia-\x1b[2J.so.{V}"):
        put(tmp_path / DEBIAN / name, elf("libnvidia-x.so.1"))
    put(tmp_path / DEBIAN / f"libnvidia-\udcff.so.{V}", elf("libnvidia-x.so.1"))
    driver = find_driver(tmp_path)
    assert driver.libraries == driver.skipped == ()


def test_a_library_of_the_x32_abi_is_not_a_64_bit_library(tmp_path):
    put_driver(tmp_path / DEBIAN, V)
    content = bytearray(elf("libnvidia-cfg.so.1", bits=32))
    content[18:20] = (62).to_bytes(2, "little")  # e_machine: x86-64
    put(tmp_path / DEBIAN / f"libnvidia-cfg.so.{V}", bytes(content))
    driver = find_driver(tmp_path)
    assert driver.libraries == driver.libraries32 == ()
    assert [s.reason for s in driver.skipped] == ["32-bit x86_64"]


def test_pipes_and_loops_named_like_a_driver_do_not_block_the_search(tmp_path):
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
    assert [s.reason for s in driver.skipped] == ["not a regular file"]


def test_links_never_lead_out_of_the_root(tmp_path):
    root = tmp_path / "root"
    put_driver(tmp_path / "outside", V)
    link(root / "usr/lib64", "../../../outside")
    link(root / DEBIAN, str(tmp_path / "outside"))
    with pytest.raises(DriverError, match="no libcuda"):
        find_driver(root)
    # The same links are resolved below the root.
    put_driver(root / "outside", V)
    assert find_driver(root).cuda.path == f"/outside/libcuda.so.{V}"


def test_a_tree_resolves_paths_as_for_a_process_with_that_root(tmp_path):
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
    assert tree.resolve("/a/b/file/../file") is None
    assert tree.regular("/abs") is None
    assert tree.read("/abs/file", 10) == b"x"


def test_the_table_names_each_library_once():
    """To fix a failure, remove the second mention in vdriver/libraries.toml."""
    import tomllib
    from pathlib import Path

    data = tomllib.loads(Path("vdriver/libraries.toml").read_text())
    mentioned = [n for c in data["capability"].values() for n in c["libraries"]]
    assert len(mentioned) == len(set(mentioned)) == len(read_tables().libraries)
    tables = [*data["capability"].values(), *data["layout"], *data["place"], *data["socket"]]
    tables += [
        *data["refused"],
        data["capabilities"],
        data["companions"],
        data["search"],
        data["wsl"],
    ]
    assert all(t["source"] for t in tables)
    places = [p["name"] for p in data["place"]]
    assert len(places) == len(set(places))
    offered = {*data["capability"], *data["capabilities"]["base"]}
    assert {p["capability"] for p in data["place"]} <= offered == set(CAPABILITIES) - {"compat32"}
    assert read_tables().capability("libnvidia-of-tomorrow.so.700.1") == "compute"
