"""The plan of a generation, in words, from a driver made of values."""

import pytest

from vdriver.control import ControlLibraries
from vdriver.discover import Driver, DriverFile
from vdriver.elf import Library
from vdriver.errors import MirrorError
from vdriver.plan import plan_mirror

V = "535.261.03"


def library(path, soname=None, machine="x86_64"):
    return Library(
        path=path,
        bits=64,
        machine=machine,
        soname=soname,
        needed=(),
        runpath=None,
        build_id=None,
        notes=(),
        version=None,
        size=1,
        mtime_ns=2,
    )


def file(name, soname=None, capability="compute"):
    return DriverFile(name, f"/lib/{name}", capability, library(f"/lib/{name}", soname))


def driver(*libraries, programs=()):
    return Driver(
        root="/",
        version=V,
        kind="nvidia",
        machine="x86_64",
        kernel_version=None,
        cuda=file(f"libcuda.so.{V}", "libcuda.so.1"),
        nvml=file(f"libnvidia-ml.so.{V}", "libnvidia-ml.so.1", "utility"),
        libraries=libraries,
        programs=programs,
        skipped=(),
    )


CONTROL = ControlLibraries(library("/c/libcuda.so.1"), library("/c/libnvidia-ml.so.1"))
ANSWERED = [
    "copy /c/libcuda.so.1 -> lib64/libcuda.so.1 (control, compute)",
    "link lib64/libcuda.so -> libcuda.so.1",
    "link lib64/libcuda.so.535.261.03 -> libcuda.so.1",
    "copy /lib/libcuda.so.535.261.03 -> lib64/origin/libcuda-origin.so.1 (origin, compute)",
    "copy /c/libnvidia-ml.so.1 -> lib64/libnvidia-ml.so.1 (control, utility)",
    "link lib64/libnvidia-ml.so -> libnvidia-ml.so.1",
    "link lib64/libnvidia-ml.so.535.261.03 -> libnvidia-ml.so.1",
    "copy /lib/libnvidia-ml.so.535.261.03 -> lib64/origin/libnvidia-ml-origin.so.1 (origin, utility)",
]


def test_every_name_of_libcuda_and_nvml_is_answered_and_the_originals_stand_aside():
    assert list(plan_mirror(driver(), CONTROL).describe()) == ANSWERED


def test_a_library_has_its_real_name_its_soname_and_where_customary_a_development_link():
    plan = plan_mirror(
        driver(
            file(f"libnvidia-nvvm.so.{V}", "libnvidia-nvvm.so.4"),
            file(f"libnvidia-pkcs11-openssl3.so.{V}", f"libnvidia-pkcs11-openssl3.so.{V}"),
            file(f"libnvidia-vulkan-producer.so.{V}"),
            programs=(file("nvidia-smi", capability="utility"),),
        ),
        CONTROL,
    )
    assert list(plan.describe())[len(ANSWERED) :] == [
        "copy /lib/libnvidia-nvvm.so.535.261.03 -> lib64/libnvidia-nvvm.so.535.261.03 (library, compute)",
        "link lib64/libnvidia-nvvm.so.4 -> libnvidia-nvvm.so.535.261.03",
        "link lib64/libnvidia-nvvm.so -> libnvidia-nvvm.so.4",
        "copy /lib/libnvidia-pkcs11-openssl3.so.535.261.03 -> lib64/libnvidia-pkcs11-openssl3.so.535.261.03 (library, compute)",
        "copy /lib/libnvidia-vulkan-producer.so.535.261.03 -> lib64/libnvidia-vulkan-producer.so.535.261.03 (library, compute)",
        "copy /lib/nvidia-smi -> bin/nvidia-smi (program, utility)",
    ]
    assert plan.programs == ("bin/nvidia-smi",)


def test_a_library_of_another_capability_stays_out():
    plan = plan_mirror(driver(file(f"libnvcuvid.so.{V}", "libnvcuvid.so.1", "video")), CONTROL)
    assert list(plan.describe()) == ANSWERED
    assert plan.left_out == (f"libnvcuvid.so.{V}: video",)


def test_nobody_takes_a_name_of_the_control_library():
    plan = plan_mirror(driver(file(f"libgreedy.so.{V}", "libcuda.so.1")), CONTROL)
    assert list(plan.describe())[len(ANSWERED) :] == [
        "copy /lib/libgreedy.so.535.261.03 -> lib64/libgreedy.so.535.261.03 (library, compute)"
    ]
    assert "taken by copy /c/libcuda.so.1" in plan.left_out[0]


def test_the_drivers_own_version_has_a_soname_before_a_companion():
    plan = plan_mirror(
        driver(
            file("libnvidia-nvvm.so.4.0.0", "libnvidia-nvvm.so.4"),
            file(f"libnvidia-nvvm.so.{V}", "libnvidia-nvvm.so.4"),
        ),
        CONTROL,
    )
    assert f"link lib64/libnvidia-nvvm.so.4 -> libnvidia-nvvm.so.{V}" in plan.describe()
    assert (
        "copy /lib/libnvidia-nvvm.so.4.0.0 -> lib64/libnvidia-nvvm.so.4.0.0 (library, compute)"
        in plan.describe()
    )


def test_a_control_library_for_another_machine_is_refused():
    control = ControlLibraries(library("/c/libcuda.so.1", machine="aarch64"), CONTROL.nvml)
    with pytest.raises(
        MirrorError, match=r"libcuda\.so\.1 is 64-bit aarch64, the driver is 64-bit x86_64"
    ):
        plan_mirror(driver(), control)
