"""Tests of `tidegate verify`: every fault of a generation is reported, and an intact one loads."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from governor import cli
from tests.unit.vdriver_generation import (
    put_control_with_origin,
    put_generation,
    small_driver,
    write_manifest,
)
from tests.unit.vdriver_trees import elf, put
from vdriver import verify
from vdriver.errors import MirrorError
from vdriver.manifest import read_manifest

V = "550.163.01"
NVML = ("libnvidia-ml.so.1", "libnvidia-ml.so", f"libnvidia-ml.so.{V}")


@pytest.fixture(autouse=True)
def no_32_bit_loader(monkeypatch):
    """Most hosts have no 32-bit loader. A test below uses this machine's own loader instead."""
    monkeypatch.setattr(verify, "LOADER32", Path("/nowhere/ld-linux.so.2"))


@pytest.fixture
def control(tmp_path):
    return put_control_with_origin(tmp_path / "control")


@pytest.fixture
def generation(tmp_path, control):
    return put_generation(
        tmp_path / "driver",
        V,
        small_driver(V),
        control,
        libraries32={f"libnvidia-encode.so.{V}": elf("libnvidia-encode.so.1", bits=32)},
        sets={("utility",): NVML},
        programs={"nvidia-smi": b"#!/bin/sh\n"},
        places={"vulkan": {"nvidia_icd.json": b"{}"}},
    )


def run(generation, *more):
    return cli.main(["verify", "--driver-dir", str(generation.parent), *more])


def faults(generation):
    report = verify.verify(generation, load=False)
    return {f"{f.path}: {f.reason}" for f in report.faults}


def outcomes(generation):
    report = verify.verify(generation)
    assert report.content == ()
    return {x.path: (x.outcome, x.detail) for x in report.libraries}


def compiled(tmp_path, source, *flags):
    """Compile a library from C, linked with the C library."""
    made = tmp_path / "compiled.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", made, *flags],
        input=source.encode(),
        check=True,
    )
    return made.read_bytes()


def test_an_intact_generation_has_no_faults_and_loads(generation, capsys):
    assert run(generation) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        f"generation  {generation.name} (nvidia, x86_64)",
        "content     9 files, 10 links, 2 sets, 1 places: as in the manifest",
        "libraries   4 loaded, 1 not loaded here, 0 failed",
        f"  lib32/libnvidia-encode.so.{V} not loaded here: the host has no 32-bit loader (/nowhere/ld-linux.so.2)",
    ]


def test_json_lists_the_files_mapped_with_each_library(generation, capsys):
    assert run(generation, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["generation"], document["intact"], document["faults"]) == (
        generation.name,
        True,
        [],
    )
    assert {x["path"]: x["mapped"] for x in document["libraries"]} == {
        f"lib32/libnvidia-encode.so.{V}": [],
        "lib64/libcuda.so.1": ["lib64/libcuda.so.1", "lib64/origin/libcuda-origin.so.1"],
        f"lib64/libnvcuvid.so.{V}": [f"lib64/libnvcuvid.so.{V}"],
        f"lib64/libnvidia-encode.so.{V}": [
            f"lib64/libnvcuvid.so.{V}",
            f"lib64/libnvidia-encode.so.{V}",
        ],
        "lib64/libnvidia-ml.so.1": [
            "lib64/libnvidia-ml.so.1",
            "lib64/origin/libnvidia-ml-origin.so.1",
        ],
    }


def test_a_generation_is_named_or_is_the_one_in_force(generation, capsys):
    assert run(generation, generation.name, "--no-load") == 0
    assert run(generation, str(generation), "--no-load") == 0
    assert "libraries   not requested" in capsys.readouterr().out
    assert run(generation, "550.1-000000000000") == 72
    assert "no such generation; name one of those in" in capsys.readouterr().err
    (generation.parent / "current").unlink()
    assert run(generation) == 72
    assert "no generation is in force; run tidegate refresh" in capsys.readouterr().err


def replaced(path, content):
    """Replace a file's content under a new inode, so that no set shares it."""
    path.unlink()
    put(path, content)


LIBRARY = f"lib64/libnvcuvid.so.{V}"


@pytest.mark.parametrize(
    ("damage", "path", "reason"),
    [
        (lambda g: (g / LIBRARY).unlink(), LIBRARY, "is missing"),
        (
            lambda g: os.truncate(g / "data/vulkan/nvidia_icd.json", 1),
            "data/vulkan/nvidia_icd.json",
            "has 1 bytes, but 2 in the manifest",
        ),
        (
            lambda g: (g / "data/vulkan/nvidia_icd.json").write_bytes(b"[]"),
            "data/vulkan/nvidia_icd.json",
            "has the SHA-256 4f53cda18c2b..., but 44136fa355b3... in the manifest",
        ),
        (
            lambda g: (g / LIBRARY).chmod(0o664),
            LIBRARY,
            "has mode 0664, but must be readable by all and writable only by its owner",
        ),
        (
            lambda g: (g / LIBRARY).chmod(0o640),
            LIBRARY,
            "has mode 0640, but must be readable by all and writable only by its owner",
        ),
        (
            lambda g: (g / "bin/nvidia-smi").chmod(0o4755),
            "bin/nvidia-smi",
            "has mode 4755, but must be readable by all and writable only by its owner",
        ),
        (
            lambda g: (g / "bin/nvidia-smi").chmod(0o644),
            "bin/nvidia-smi",
            "has mode 0644, but must be executable by all",
        ),
        (
            lambda g: (g / "lib64").chmod(0o775),
            "lib64",
            "has mode 0775, but must be readable by all and writable only by its owner",
        ),
        (
            lambda g: g.chmod(0o700),
            ".",
            "has mode 0700, but must be readable by all and writable only by its owner",
        ),
        (lambda g: put(g / "bin/more", b""), "bin/more", "is not in the manifest"),
        (
            lambda g: (g / "bin/pipe").mkdir(),
            "bin/pipe",
            "is a directory that the manifest does not name",
        ),
        (
            lambda g: put(g / "lib64/libmore.so", b""),
            "lib64/libmore.so",
            "is not among the manifest's names for lib64",
        ),
        (
            lambda g: put(g / "data/vulkan/more.json", b""),
            "data/vulkan/more.json",
            "is not among the manifest's names for data/vulkan",
        ),
        (
            lambda g: (g / "sets/utility/lib64/libnvidia-ml.so.1").unlink(),
            "sets/utility/lib64/libnvidia-ml.so.1",
            "is missing",
        ),
        (
            lambda g: (g / "sets/utility/lib64/origin/libnvidia-ml-origin.so.1").unlink(),
            "sets/utility/lib64/origin/libnvidia-ml-origin.so.1",
            "is missing, but libnvidia-ml.so.1 needs it",
        ),
        (
            lambda g: replaced(g / "sets/utility/lib64/libnvidia-ml.so.1", b"other"),
            "sets/utility/lib64/libnvidia-ml.so.1",
            "differs from lib64/libnvidia-ml.so.1 in content",
        ),
        (
            lambda g: shutil.rmtree(g / "sets/utility"),
            "sets/utility/lib64",
            "is missing",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_all_kinds_of_damage_are_reported(generation, damage, path, reason):
    damage(generation)
    assert f"{path}: {reason}" in faults(generation)


def test_a_wrong_kind_of_file_is_reported(generation):
    name = generation / LIBRARY
    name.unlink()
    name.symlink_to("libcuda.so.1")
    link = generation / "lib64/libnvcuvid.so.1"
    link.unlink()
    link.symlink_to("/etc/passwd")
    development = generation / "lib64/libnvcuvid.so"
    development.unlink()
    development.mkdir()
    pipe = generation / "bin/nvidia-smi"
    pipe.unlink()
    os.mkfifo(pipe)
    assert faults(generation) >= {
        f"{LIBRARY}: is a link, but the manifest has a file (library)",
        f"lib64/libnvcuvid.so.1: is a link to /etc/passwd, but the manifest has one to libnvcuvid.so.{V}",
        "lib64/libnvcuvid.so: is a directory, but the manifest has a link to libnvcuvid.so.1",
        "bin/nvidia-smi: is a special file, but the manifest has a file (program)",
    }


def test_a_copy_in_a_set_is_accepted_in_place_of_a_hard_link(generation):
    path = generation / "sets/utility/lib64/libnvidia-ml.so.1"
    replaced(path, path.read_bytes())
    assert path.stat().st_ino != (generation / "lib64/libnvidia-ml.so.1").stat().st_ino
    assert faults(generation) == set()


def test_without_reading_only_sizes_are_compared(generation):
    def unread():
        report = verify.verify(generation, load=False, read=False)
        return {f"{f.path}: {f.reason}" for f in report.faults}

    library = generation / f"lib64/libnvcuvid.so.{V}"
    size = library.stat().st_size
    replaced(library, b"\0" * size)
    in_set = generation / "sets/utility/lib64/libnvidia-ml.so.1"
    replaced(in_set, b"\0" * in_set.stat().st_size)
    assert unread() == set()
    replaced(library, b"\0" * (size - 1))
    replaced(in_set, b"other")
    whole = (generation / "lib64/libnvidia-ml.so.1").stat().st_size
    assert unread() == {
        f"lib64/libnvcuvid.so.{V}: has {size - 1} bytes, but {size} in the manifest",
        f"sets/utility/lib64/libnvidia-ml.so.1: has 5 bytes, but lib64/libnvidia-ml.so.1 has {whole}",
    }


def test_a_manifest_whose_entries_do_not_match_its_name_is_reported(generation):
    manifest = read_manifest(generation)
    (generation / "data/vulkan/nvidia_icd.json").write_bytes(b"[]")
    changed = tuple(
        replace(f, sha256="4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945")
        if f.role == "data"
        else f
        for f in manifest.files
    )
    write_manifest(generation, replace(manifest, files=changed), manifest.generation)
    (fault,) = faults(generation)
    assert fault.startswith(f"manifest.json: names {generation.name}, but its entries give {V}-")


def test_a_directory_of_another_name_is_reported(generation):
    other = generation.rename(generation.with_name(f"{V}-000000000000"))
    assert faults(other) == {f".: its manifest is that of {generation.name}"}


def test_a_dangling_link_in_a_set_is_reported(tmp_path, control):
    made = put_generation(
        tmp_path / "driver", V, small_driver(V), control, sets={("utility",): NVML[1:]}
    )
    assert faults(made) == {
        f"sets/utility/lib64/{name}: is a link to libnvidia-ml.so.1, which is not in the generation"
        for name in NVML[1:]
    }


def test_the_error_names_the_first_fault_and_the_number_of_others(generation, capsys):
    (generation / "bin/nvidia-smi").unlink()
    put(generation / "bin/more", b"")
    assert run(generation) == 72
    captured = capsys.readouterr()
    assert captured.out.splitlines()[2:] == [
        "libraries   not loaded: the content is at fault",
        "fault: bin/nvidia-smi: is missing",
        "fault: bin/more: is not in the manifest",
    ]
    assert captured.err == (
        f"tidegate: {generation}/bin/nvidia-smi: is missing (and 1 more fault); "
        "run tidegate refresh --repair\n"
    )


def test_a_generation_that_is_being_removed_is_not_verified(generation, capsys):
    fd = os.open(generation, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert run(generation) == 72
    assert "is locked by tidegate gc; wait for it to end" in capsys.readouterr().err
    os.close(fd)
    assert run(generation) == 0


def test_a_library_that_the_host_lacks_is_not_a_failure(tmp_path, control, capsys):
    libraries = small_driver(V)
    libraries[f"libnvidia-fbc.so.{V}"] = elf("libnvidia-fbc.so.1", ("libtidegate-absent.so.6",))
    made = put_generation(tmp_path / "driver", V, libraries, control)
    assert outcomes(made)[f"lib64/libnvidia-fbc.so.{V}"] == (
        "not loaded",
        "needs libtidegate-absent.so.6, which the host lacks",
    )
    assert run(made) == 0
    assert "libraries   4 loaded, 1 not loaded here, 0 failed" in capsys.readouterr().out


def test_a_missing_library_of_the_driver_is_a_failure(tmp_path, control, capsys):
    libraries = small_driver(V)
    del libraries[f"libnvcuvid.so.{V}"]
    # This one needs the absent library indirectly, after a library that the host lacks as well.
    needed = ("libtidegate-absent.so.6", "libnvidia-encode.so.1")
    libraries[f"libnvidia-fbc.so.{V}"] = elf("libnvidia-fbc.so.1", needed)
    made = put_generation(tmp_path / "driver", V, libraries, control)
    failed = ("failed", "needs libnvcuvid.so.1, which is not in the mirror")
    assert {k: v for k, v in outcomes(made).items() if v[0] == "failed"} == {
        f"lib64/libnvidia-encode.so.{V}": failed,
        f"lib64/libnvidia-fbc.so.{V}": failed,
    }
    assert run(made) == 72
    assert capsys.readouterr().err == (
        f"tidegate: {made}/lib64/libnvidia-encode.so.{V}: needs libnvcuvid.so.1, which is not in "
        "the mirror (and 1 more fault); reinstall the driver's packages, then run tidegate refresh\n"
    )


def test_an_undefined_symbol_is_a_failure_except_in_a_module_of_the_x_server(tmp_path, control):
    libraries = small_driver(V)
    libraries[f"libnvidia-fbc.so.{V}"] = libraries["nvidia_drv.so"] = compiled(
        tmp_path, "void serverClient(void); void call(void) { serverClient(); }"
    )
    made = put_generation(
        tmp_path / "driver", V, libraries, control, capabilities={"nvidia_drv.so": "display"}
    )
    found = outcomes(made)
    assert found[f"lib64/libnvidia-fbc.so.{V}"] == ("failed", "undefined symbol: serverClient")
    assert found["lib64/nvidia_drv.so"] == (
        "not loaded",
        "needs serverClient, which the X server defines",
    )


def test_a_need_for_a_newer_c_library_is_not_a_failure(tmp_path, control):
    """A package for a newer distribution has such a need. The library here is linked with a stub of
    a future libm.
    """
    versions, stub = tmp_path / "versions", tmp_path / "libm.so.6"
    versions.write_text("GLIBC_9.99 { tidegate_new; };")
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-x", "c", "-", "-o", stub]
    flags = ["-Wl,-soname,libm.so.6", f"-Wl,--version-script={versions}"]
    subprocess.run([*command, *flags], input=b"void tidegate_new(void) {}", check=True)
    libraries = small_driver(V)
    source = "void tidegate_new(void); void f(void) { tidegate_new(); }"
    libraries[f"libnvidia-fbc.so.{V}"] = compiled(tmp_path, source, "-xnone", str(stub))
    found = outcomes(put_generation(tmp_path / "driver", V, libraries, control))
    assert found[f"lib64/libnvidia-fbc.so.{V}"] == (
        "not loaded",
        "needs GLIBC_9.99, which the host's libm.so.6 lacks",
    )


def test_a_process_that_cannot_be_started_is_not_reported_as_a_locked_generation(
    generation, monkeypatch, capsys
):
    def run_out(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(verify.subprocess, "run", run_out)
    run(generation)
    printed = "".join(capsys.readouterr())
    assert "not loaded" in printed
    assert "no process can be started for it: Resource temporarily unavailable" in printed
    assert "locked" not in printed


def test_a_library_that_ends_its_process_is_a_failure(tmp_path, control):
    libraries = small_driver(V)
    crash = "__attribute__((constructor)) void f(void) { __builtin_trap(); }"
    libraries[f"libnvidia-fbc.so.{V}"] = compiled(tmp_path, crash)
    leave = "#include <unistd.h>\n__attribute__((constructor)) void f(void) { _exit(3); }"
    libraries[f"libnvidia-cfg.so.{V}"] = compiled(tmp_path, leave)
    found = outcomes(put_generation(tmp_path / "driver", V, libraries, control))
    assert found[f"lib64/libnvidia-fbc.so.{V}"] == (
        "failed",
        "its process was killed by signal 4 during loading",
    )
    assert found[f"lib64/libnvidia-cfg.so.{V}"] == (
        "failed",
        "its process exited with status 3 during loading",
    )


def test_another_drivers_library_is_a_failure_wherever_it_comes_from(tmp_path, control):
    """On a host with a second driver, a run path may lead to a library of that driver, which is
    recognised by its file name or its soname.
    """
    other = tmp_path / "other"
    put(other / "libnvcuvid.so.1", elf("libnvcuvid.so.1", tag="other"))
    put(other / "libharmless.so", elf("libnvidia-encode.so.1", tag="other"))
    libraries = small_driver(V)
    for name, needed in (("libnvidia-fbc", "libnvcuvid.so.1"), ("libnvidia-cfg", "libharmless.so")):
        content = elf(f"{name}.so.1", (needed,), runpath=str(other))
        # Unlike RUNPATH, RPATH is searched before LD_LIBRARY_PATH, so the tag is changed to RPATH.
        libraries[f"{name}.so.{V}"] = content.replace(
            (29).to_bytes(8, "little"), (15).to_bytes(8, "little"), 1
        )
    found = outcomes(put_generation(tmp_path / "driver", V, libraries, control))
    assert found[f"lib64/libnvidia-fbc.so.{V}"] == (
        "failed",
        f"maps {other}/libnvcuvid.so.1, which is not part of the mirror",
    )
    assert found[f"lib64/libnvidia-cfg.so.{V}"] == (
        "failed",
        f"maps {other}/libharmless.so, which is not part of the mirror",
    )


def test_a_control_library_without_the_drivers_own_is_a_failure(tmp_path):
    control = tmp_path / "control"
    for stem in ("libcuda", "libnvidia-ml"):
        put(control / f"{stem}.so.1", elf(f"{stem}.so.1", tag="alone"))
    found = outcomes(put_generation(tmp_path / "driver", V, small_driver(V), control))
    assert found["lib64/libcuda.so.1"] == (
        "failed",
        "does not load lib64/origin/libcuda-origin.so.1",
    )


def test_the_environment_of_the_caller_does_not_reach_the_libraries(
    generation, tmp_path, monkeypatch
):
    put(tmp_path / "libnvcuvid.so.1", elf("libnvcuvid.so.1", tag="environment"))
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "libnvcuvid.so.1"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    report = verify.verify(generation)
    assert [x.path for x in report.libraries if x.outcome == "failed"] == []


def test_a_driver_for_another_machine_is_not_loaded(tmp_path, control):
    made = put_generation(tmp_path / "driver", V, small_driver(V), control, machine="aarch64")
    assert f"{LIBRARY}: is 64-bit x86_64, which does not belong there" in faults(made)


def test_a_path_that_the_loader_would_split_is_refused(tmp_path, control):
    made = put_generation(tmp_path / "driver:s", V, small_driver(V), control)
    with pytest.raises(MirrorError, match="does not accept a path with ':'"):
        verify.verify(made)
    assert verify.verify(made, load=False).faults == ()


def test_a_missing_32_bit_library_of_the_driver_is_a_failure(tmp_path, control):
    lib32 = {
        f"libnvidia-encode.so.{V}": elf("libnvidia-encode.so.1", ("libnvcuvid.so.1",), bits=32)
    }
    made = put_generation(tmp_path / "driver", V, small_driver(V), control, libraries32=lib32)
    assert outcomes(made)[f"lib32/libnvidia-encode.so.{V}"] == (
        "failed",
        "needs libnvcuvid.so.1, which is not in the mirror",
    )


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        (("libnvcuvid.so.1", "libc.so.6"), ("loaded", "")),
        (
            ("libtidegate-absent.so.6",),
            ("not loaded", "needs libtidegate-absent.so.6, which the host lacks"),
        ),
    ],
)
def test_a_loader_lists_the_files_that_it_would_map(tmp_path, control, needed, expected):
    """The check of 32-bit libraries, run with this machine's own loader and libraries."""
    libraries = small_driver(V)
    libraries[f"libnvidia-fbc.so.{V}"] = elf("libnvidia-fbc.so.1", needed)
    made = put_generation(tmp_path / "driver", V, libraries, control)
    known = verify._read_libraries(made, read_manifest(made), "lib64")
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    found = verify.list_needed(loader, f"lib64/libnvidia-fbc.so.{V}", known)
    assert (found.outcome, found.detail) == expected


def test_a_loader_lists_an_undefined_symbol_as_a_failure(tmp_path, control):
    libraries = small_driver(V)
    libraries[f"libnvidia-fbc.so.{V}"] = compiled(
        tmp_path, "void absent(void); void call(void) { absent(); }"
    )
    made = put_generation(tmp_path / "driver", V, libraries, control)
    known = verify._read_libraries(made, read_manifest(made), "lib64")
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    found = verify.list_needed(loader, f"lib64/libnvidia-fbc.so.{V}", known)
    assert (found.outcome, found.detail) == ("failed", "undefined symbol: absent")
