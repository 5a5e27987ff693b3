"""Tests of vdriver.control: the mirror's control libraries export no name that the driver lacks."""

import ctypes
import shutil
import subprocess
import sys

import pytest

from tests.unit.vdriver_trees import put
from vdriver.control import fit_control, hide_exports, read_control
from vdriver.discover import find_driver
from vdriver.elf import read_exports, read_library
from vdriver.errors import MirrorError
from vdriver.refresh import refresh
from vdriver.verify import verify

V = "470.256.02"
OLD = "cuInit cuLaunchKernel cuMemAlloc_v2 cuCtxCreate_v2 cuOldOnly"
OLD_NVML = "nvmlInit_v2 nvmlDeviceGetMemoryInfo"

LOOK_UP = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    print(name, hasattr(library, name))
"""


def compile_library(path, soname, names, *options, needed=()):
    """Compile a library with functions that return their own addresses, by which a test tells libraries apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = "".join(f"void *{name}(void) {{ return (void *)&{name}; }}\n" for name in names)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{soname}", *options]
    libraries = ["-x", "none", "-Wl,--no-as-needed", *map(str, needed)] if needed else []
    subprocess.run(
        [*command, *libraries, "-o", str(path)], input=source, text=True, check=True
    )  # fmt: skip
    return path


@pytest.fixture
def host(tmp_path):
    """A host with an old driver, which lacks newer functions."""
    libraries = tmp_path / "root/usr/lib64"
    for stem, names in (("libcuda", OLD), ("libnvidia-ml", OLD_NVML)):
        compile_library(libraries / f"{stem}.so.{V}", f"{stem}.so.1", names.split())
    return tmp_path


def found_by_dlsym(library, *names):
    """Return whether dlsym finds each name, in a separate process."""
    command = [sys.executable, "-c", LOOK_UP, str(library), *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {name: found == "True" for name, found in map(str.split, done.stdout.splitlines())}


def test_the_mirror_of_an_old_driver_has_the_names_of_the_old_driver(host, build_dir):
    result = refresh(host / "root", host / "out", build_dir / "libcontrol")
    lib64 = host / "out/current/lib64"
    ours = {
        name: read_exports(lib64.resolve() / name) for name in ("libcuda.so.1", "libnvidia-ml.so.1")
    }
    assert set(ours["libcuda.so.1"]) == {
        "cuInit",
        "cuLaunchKernel",
        "cuMemAlloc_v2",
        "cuCtxCreate_v2",
    }
    assert ours["libnvidia-ml.so.1"] == ("nvmlDeviceGetMemoryInfo",)
    assert found_by_dlsym(
        lib64 / "libcuda.so.1", "cuInit", "cuOldOnly", "cuCtxCreate_v4", "cuGetProcAddress"
    ) == {"cuInit": True, "cuOldOnly": True, "cuCtxCreate_v4": False, "cuGetProcAddress": False}
    assert found_by_dlsym(lib64 / "libnvidia-ml.so.1", "nvmlInit_v2", "nvmlDeviceGetMemoryInfo_v2") == {
        "nvmlInit_v2": True, "nvmlDeviceGetMemoryInfo_v2": False
    }  # fmt: skip
    generation = host / "out" / result.manifest.generation
    assert verify(generation).faults == ()
    assert f"write {build_dir}/libcontrol/libcuda.so.1 -> " in "\n".join(result.plan.describe())


def test_a_second_refresh_finds_nothing_to_do(host, build_dir):
    first = refresh(host / "root", host / "out", build_dir / "libcontrol")
    again = refresh(host / "root", host / "out", build_dir / "libcontrol")
    assert (first.changed, again.changed) == (True, False)
    assert again.manifest.generation == first.manifest.generation
    assert (
        refresh(host / "root", host / "out", build_dir / "libcontrol", repair=True).changed is False
    )


def test_a_driver_that_gains_a_function_makes_another_generation(host, build_dir):
    first = refresh(host / "root", host / "out", build_dir / "libcontrol")
    path = host / f"root/usr/lib64/libcuda.so.{V}"
    path.unlink()
    compile_library(path, "libcuda.so.1", [*OLD.split(), "cuCtxCreate_v4"])
    second = refresh(host / "root", host / "out", build_dir / "libcontrol")
    assert second.manifest.generation != first.manifest.generation
    assert found_by_dlsym(host / "out/current/lib64/libcuda.so.1", "cuCtxCreate_v4", "cuCtxCreate_v3") == {
        "cuCtxCreate_v4": True, "cuCtxCreate_v3": False
    }  # fmt: skip


def test_the_library_is_unchanged_for_a_driver_with_all_functions(host, build_dir):
    control = read_control(build_dir / "libcontrol")
    for library in (control.cuda, control.nvml):
        stem = library.soname.partition(".so")[0]
        path = host / f"root/usr/lib64/{stem}.so.{V}"
        path.unlink()
        compile_library(path, library.soname, read_exports(library.path))
    fitted = fit_control(control, find_driver(host / "root"))
    assert (fitted.cuda_content, fitted.nvml_content) == (None, None)
    refresh(host / "root", host / "out", build_dir / "libcontrol")
    mirrored = host / "out/current/lib64/libcuda.so.1"
    assert mirrored.read_bytes() == (build_dir / "libcontrol/libcuda.so.1").read_bytes()


def test_nothing_is_hidden_if_the_drivers_exports_cannot_be_read(host, build_dir):
    control = read_control(build_dir / "libcontrol")
    fitted = fit_control(
        control,
        find_driver(host / "root"),
        lambda path: () if str(path).endswith(V) else read_exports(path),
    )
    assert fitted == control


def test_hiding_names_changes_nothing_else_in_the_file(tmp_path):
    path = compile_library(tmp_path / "a.so", "a.so", ["alpha", "beta", "gamma"], "-Wl,-Bsymbolic")
    content = path.read_bytes()
    patched = hide_exports(content, {"beta", "delta"})
    other = put(tmp_path / "b.so", patched)
    assert read_exports(other) == ("alpha", "gamma")
    assert len(patched) == len(content)
    assert sum(a != b for a, b in zip(content, patched, strict=True)) <= 10
    assert read_library(other).build_id == read_library(path).build_id
    library = ctypes.CDLL(str(other))
    assert hasattr(library, "gamma")
    assert not hasattr(library, "beta")


def test_a_library_that_refers_to_a_hidden_name_is_refused(tmp_path):
    """The library would not load, because the loader binds every name at load time."""
    path = compile_library(tmp_path / "a.so", "a.so", ["alpha", "beta"])  # not -Bsymbolic
    with pytest.raises(ValueError, match="uses its own function alpha, which the driver lacks"):
        hide_exports(path.read_bytes(), {"alpha"})


def test_a_control_library_that_cannot_be_fitted_ends_the_refresh_with_a_one_line_error(
    host, build_dir
):
    control = host / "control"
    shutil.copytree(build_dir / "libcontrol", control, ignore=shutil.ignore_patterns("*.p"))
    (control / "libcuda.so.1").unlink()
    (host / "empty").mkdir()
    empty = compile_library(host / "empty/o.so", "libcuda-origin.so.1", [])
    compile_library(control / "libcuda.so.1", "libcuda.so.1", ["cuInit", "cuNew"], needed=[empty])
    with pytest.raises(
        MirrorError, match=r"libcuda\.so\.1: uses its own function cuNew.*--control-dir"
    ):
        refresh(host / "root", host / "out", control)
