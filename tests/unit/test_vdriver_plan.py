"""Tests of vdriver.plan: the description of the plan for a driver that is given as objects."""

import pytest

from vdriver.control import ControlLibraries
from vdriver.driver import DataFile, Driver, DriverFile
from vdriver.elf import Library
from vdriver.errors import MirrorError
from vdriver.manifest import Place, Program
from vdriver.plan import plan_mirror

V = "535.261.03"


def library(path, soname=None, machine="x86_64", needed=()):
    fields = dict.fromkeys(Library.__dataclass_fields__)
    return Library(
        **fields
        | {
            "path": path,
            "bits": 32 if machine == "i386" else 64,
            "machine": machine,
            "soname": soname,
            "needed": needed,
            "notes": (),
            "size": 1,
            "mtime_ns": 2,
        }
    )


def file(name, soname=None, capability="compute", needed=()):
    return DriverFile(
        name, f"/lib/{name}", capability, library(f"/lib/{name}", soname, needed=needed)
    )


def file32(name, soname, capability):
    return DriverFile(name, f"/lib32/{name}", capability, library(f"/lib32/{name}", soname, "i386"))


def driver(*libraries, libraries32=(), programs=(), data=()):
    return Driver(
        root="/",
        version=V,
        kind="nvidia",
        machine="x86_64",
        kernel_version=None,
        cuda=file(f"libcuda.so.{V}", "libcuda.so.1"),
        nvml=file(f"libnvidia-ml.so.{V}", "libnvidia-ml.so.1", "utility"),
        libraries=libraries,
        libraries32=libraries32,
        programs=programs,
        data=data,
        binds=(),
        skipped=(),
    )


CONTROL = ControlLibraries(library("/c/libcuda.so.1"), library("/c/libnvidia-ml.so.1"))
CONTROL_OPERATIONS = [
    "mirror /c/libcuda.so.1 -> lib64/libcuda.so.1 (control, compute)",
    "link lib64/libcuda.so -> libcuda.so.1",
    "link lib64/libcuda.so.535.261.03 -> libcuda.so.1",
    "mirror /lib/libcuda.so.535.261.03 -> lib64/origin/libcuda-origin.so.1 (origin, compute)",
    "mirror /c/libnvidia-ml.so.1 -> lib64/libnvidia-ml.so.1 (control, utility)",
    "link lib64/libnvidia-ml.so -> libnvidia-ml.so.1",
    "link lib64/libnvidia-ml.so.535.261.03 -> libnvidia-ml.so.1",
    "mirror /lib/libnvidia-ml.so.535.261.03 -> lib64/origin/libnvidia-ml-origin.so.1 (origin, utility)",
]


def test_the_control_libraries_have_every_name_of_libcuda_and_nvml():
    assert list(plan_mirror(driver(), CONTROL).describe()) == CONTROL_OPERATIONS


def test_a_library_has_its_real_name_its_soname_and_its_development_link():
    plan = plan_mirror(
        driver(
            file(f"libnvidia-nvvm.so.{V}", "libnvidia-nvvm.so.4"),
            file(f"libnvidia-pkcs11-openssl3.so.{V}", f"libnvidia-pkcs11-openssl3.so.{V}"),
            file(f"libnvidia-vulkan-producer.so.{V}"),
            programs=(file("nvidia-smi", capability="utility"),),
        ),
        CONTROL,
    )
    assert list(plan.describe())[len(CONTROL_OPERATIONS) :] == [
        "mirror /lib/libnvidia-nvvm.so.535.261.03 -> lib64/libnvidia-nvvm.so.535.261.03 (library, compute)",
        "link lib64/libnvidia-nvvm.so.4 -> libnvidia-nvvm.so.535.261.03",
        "link lib64/libnvidia-nvvm.so -> libnvidia-nvvm.so.4",
        "mirror /lib/libnvidia-pkcs11-openssl3.so.535.261.03 -> lib64/libnvidia-pkcs11-openssl3.so.535.261.03 (library, compute)",
        "link lib64/libnvidia-pkcs11-openssl3.so -> libnvidia-pkcs11-openssl3.so.535.261.03",
        "mirror /lib/libnvidia-vulkan-producer.so.535.261.03 -> lib64/libnvidia-vulkan-producer.so.535.261.03 (library, compute)",
        "link lib64/libnvidia-vulkan-producer.so -> libnvidia-vulkan-producer.so.535.261.03",
        "mirror /lib/nvidia-smi -> bin/nvidia-smi (program, utility)",
    ]
    assert plan.programs == (Program("bin/nvidia-smi", "utility"),)


def test_a_set_has_the_libraries_of_its_capabilities_and_their_dependencies():
    plan = plan_mirror(
        driver(
            file(f"libnvcuvid.so.{V}", "libnvcuvid.so.1", "video"),
            file(f"libnvidia-eglcore.so.{V}", f"libnvidia-eglcore.so.{V}", "graphics"),
            # Under a different capability from that of the library that needs it.
            file(f"libnvidia-fbc.so.{V}", "libnvidia-fbc.so.1", "video", ("libc.so.6",)),
            file(
                f"libEGL_nvidia.so.{V}",
                "libEGL_nvidia.so.0",
                "graphics",
                ("libc.so.6", "libnvcuvid.so.1"),
            ),
        ),
        CONTROL,
    )
    compute, graphics, video, everything = plan.sets
    assert compute.capabilities == ("compute", "utility")
    assert compute.lib64 == "sets/compute+utility/lib64"
    assert compute.names64 == (
        "libcuda.so",
        "libcuda.so.1",
        f"libcuda.so.{V}",
        "libnvidia-ml.so",
        "libnvidia-ml.so.1",
        f"libnvidia-ml.so.{V}",
    )
    assert graphics.capabilities == ("compute", "graphics", "utility")
    assert "libnvcuvid.so.1" in graphics.names64
    assert "libEGL_nvidia.so.0" in graphics.names64
    assert video.capabilities == ("compute", "utility", "video")
    assert f"libnvidia-eglcore.so.{V}" not in video.names64
    assert everything.capabilities == ("compute", "graphics", "utility", "video")
    assert everything.lib64 == "lib64"
    assert set(everything.names64) == set(graphics.names64) | set(video.names64)
    assert {s.lib32 for s in plan.sets} == {None}


def test_a_capability_without_libraries_shares_a_directory():
    rules = DataFile("xorg-conf", "10-nvidia.conf", "/x", "/x", 3, 4)
    plan = plan_mirror(
        driver(file(f"libEGL_nvidia.so.{V}", "libEGL_nvidia.so.0", "graphics"), data=(rules,)),
        CONTROL,
    )
    assert [(s.capabilities, s.lib64) for s in plan.sets] == [
        (("compute", "utility"), "sets/compute+utility/lib64"),
        (("compute", "graphics", "utility"), "lib64"),
        (("compute", "display", "graphics", "utility"), "lib64"),
    ]


def test_32_bit_libraries_are_separate_and_libcuda_is_left_out():
    plan = plan_mirror(
        driver(
            libraries32=(
                file32(f"libcuda.so.{V}", "libcuda.so.1", "compute"),
                file32(f"libnvidia-ml.so.{V}", "libnvidia-ml.so.1", "utility"),
                file32(
                    f"libnvidia-ptxjitcompiler.so.{V}", "libnvidia-ptxjitcompiler.so.1", "compute"
                ),
                file32(f"libEGL_nvidia.so.{V}", "libEGL_nvidia.so.0", "graphics"),
            )
        ),
        CONTROL,
    )
    assert list(plan.describe())[len(CONTROL_OPERATIONS) :] == [
        f"mirror /lib32/libEGL_nvidia.so.{V} -> lib32/libEGL_nvidia.so.{V} (library, graphics)",
        f"link lib32/libEGL_nvidia.so.0 -> libEGL_nvidia.so.{V}",
        "link lib32/libEGL_nvidia.so -> libEGL_nvidia.so.0",
        f"mirror /lib32/libnvidia-ptxjitcompiler.so.{V} -> lib32/libnvidia-ptxjitcompiler.so.{V} (library, compute)",
        f"link lib32/libnvidia-ptxjitcompiler.so.1 -> libnvidia-ptxjitcompiler.so.{V}",
        "link lib32/libnvidia-ptxjitcompiler.so -> libnvidia-ptxjitcompiler.so.1",
    ]
    assert plan.left_out == (
        f"libcuda.so.{V} (32-bit): no control library would govern it",
        f"libnvidia-ml.so.{V} (32-bit): no control library would govern it",
    )
    assert [(s.lib64, s.lib32) for s in plan.sets] == [
        ("lib64", "sets/compute+utility/lib32"),
        ("lib64", "lib32"),
    ]


def test_the_files_and_targets_of_a_place():
    plan = plan_mirror(
        driver(
            data=(
                DataFile(
                    "firmware",
                    "gsp_tu10x.bin",
                    f"/lib/firmware/nvidia/{V}/gsp_tu10x.bin",
                    "/h",
                    9,
                    5,
                ),
                DataFile(
                    "opencl",
                    "nvidia.icd",
                    "/etc/OpenCL/vendors/nvidia.icd",
                    "/i",
                    30,
                    6,
                    content=b"lib\n",
                ),
            )
        ),
        CONTROL,
    )
    assert list(plan.describe())[len(CONTROL_OPERATIONS) :] == [
        "rewrite /i -> data/opencl/nvidia.icd (data, compute)",
        "mirror /h -> data/firmware/gsp_tu10x.bin (data, utility)",
    ]
    assert plan.places == (
        Place("opencl", "data/opencl", "compute", ("/etc/OpenCL/vendors",), "all", ("nvidia.icd",)),
        Place(
            "firmware",
            "data/firmware",
            "utility",
            (f"/lib/firmware/nvidia/{V}",),
            "one",
            ("gsp_tu10x.bin",),
        ),
    )
    assert [o.size for o in plan.operations[-2:]] == [4, 9]


def test_missing_and_unknown_libraries_are_reported():
    plan = plan_mirror(
        driver(
            file(
                f"libnvidia-glcore.so.{V}", None, "graphics", (f"libnvidia-tls.so.{V}", "libc.so.6")
            ),
            file(f"libnvidia-of-tomorrow.so.{V}"),
        ),
        CONTROL,
    )
    assert plan.notes == (
        f"/lib/libnvidia-glcore.so.{V} needs libnvidia-tls.so.{V}, which is not installed",
        f"libnvidia-of-tomorrow.so.{V} is not in libraries.toml and counts as compute",
    )


def test_no_library_takes_a_name_of_the_control_library():
    plan = plan_mirror(driver(file(f"libgreedy.so.{V}", "libcuda.so.1")), CONTROL)
    assert list(plan.describe())[len(CONTROL_OPERATIONS) :] == [
        "mirror /lib/libgreedy.so.535.261.03 -> lib64/libgreedy.so.535.261.03 (library, compute)"
    ]
    assert "taken by mirror /c/libcuda.so.1" in plan.left_out[0]


def test_the_drivers_version_takes_precedence_over_a_companion():
    plan = plan_mirror(
        driver(
            file("libnvidia-nvvm.so.4.0.0", "libnvidia-nvvm.so.4"),
            file(f"libnvidia-nvvm.so.{V}", "libnvidia-nvvm.so.4"),
        ),
        CONTROL,
    )
    assert f"link lib64/libnvidia-nvvm.so.4 -> libnvidia-nvvm.so.{V}" in plan.describe()
    assert (
        "mirror /lib/libnvidia-nvvm.so.4.0.0 -> lib64/libnvidia-nvvm.so.4.0.0 (library, compute)"
        in plan.describe()
    )


def test_a_control_library_for_another_machine_is_refused():
    control = ControlLibraries(library("/c/libcuda.so.1", machine="aarch64"), CONTROL.nvml)
    with pytest.raises(
        MirrorError, match=r"libcuda\.so\.1 is 64-bit aarch64, but the driver is 64-bit x86_64"
    ):
        plan_mirror(driver(), control)
