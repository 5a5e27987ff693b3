"""Tests of the commands `tidegate refresh` and `tidegate explain` with a driver of compiled files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from governor import cli
from tests.unit.vdriver_trees import elf, put, put_control, put_driver

V = "535.261.03"


@pytest.fixture
def host(tmp_path):
    put_driver(tmp_path / "root/usr/lib64", V)
    put(tmp_path / f"root/usr/lib64/libnvcuvid.so.{V}", elf("libnvcuvid.so.1"))
    put(tmp_path / "root/usr/bin/nvidia-smi", elf(program=True), 0o755)
    put(tmp_path / f"root/usr/lib64/libnvidia-cfg.so.{V}", b"broken")
    put_control(tmp_path / "control")
    return tmp_path


def refresh(host, *more):
    return cli.main(
        [
            "refresh",
            "--root",
            f"{host}/root",
            "--output",
            f"{host}/out",
            "--control-dir",
            f"{host}/control",
            *more,
        ]
    )


def put_image(root, *, loader=b"\x7fELF glibc-hwcaps"):
    put(root / "usr/lib/x86_64-linux-gnu/libc.so.6", b"libc")
    put(root / "lib64/ld-linux-x86-64.so.2", loader)
    return root


def explain(host, *more):
    options = ("--driver-dir", f"{host}/out", "--module-version", f"{host}/no-module")
    return cli.main(["explain", *options, *more])


def test_refresh_prints_the_generation_and_the_changes(host, capsys):
    assert refresh(host) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"driver {V} (nvidia, x86_64) below {host}/root"
    assert re.fullmatch(rf"generation {V}-[0-9a-f]{{12}} is in force \(before: none\)", lines[1])
    assert lines[2] == f"skipped /usr/lib64/libnvidia-cfg.so.{V}: not an ELF file"
    assert lines[3].startswith("files copied ")
    assert "+ lib64/libcuda.so.1" in lines[4:]
    assert refresh(host) == 0
    assert re.fullmatch(r"generation \S+: nothing to do", capsys.readouterr().out.splitlines()[1])
    put(host / f"root/usr/lib64/libnvidia-tls.so.{V}", elf(f"libnvidia-tls.so.{V}"))
    assert refresh(host) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "+ lib64/libnvidia-tls.so",
        f"+ lib64/libnvidia-tls.so.{V}",
    ]
    for n in range(5):
        put(host / f"root/usr/lib64/libnvidia-{n}.so.{V}", elf(f"libnvidia-{n}.so.1"))
    assert refresh(host) == 0
    assert (
        "15 names added, 0 removed, 0 with different content (--verbose lists them)"
        in capsys.readouterr().out
    )


def test_a_dry_run_prints_the_outcome_and_the_plan(host, capsys):
    assert refresh(host, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"a generation of 12 names, 0 MiB would be made; nothing was written", lines[1]
    )
    assert (
        f"mirror {host}/root/usr/lib64/libcuda.so.{V} -> lib64/origin/libcuda-origin.so.1 (origin, compute)"
        in lines
    )
    assert "set compute+utility: 6 names in sets/compute+utility/lib64" in lines
    assert "set compute+utility+video: 9 names in lib64" in lines
    assert not (host / "out").exists()


def test_refresh_prints_json(host, capsys):
    assert refresh(host, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["driver"] == {
        "version": V,
        "kind": "nvidia",
        "machine": "x86_64",
        "root": f"{host}/root",
        "kernel_version": None,
    }
    assert document["changed"] is True
    assert document["path"] == f"{host}/out/{document['generation']}"
    assert Path(document["path"], "manifest.json").exists()


def test_only_a_given_directory_is_searched(host, capsys):
    put_driver(host / "root/sim", "999.10.1", simulated=True)
    assert refresh(host, "--library-dir", "/sim") == 0
    assert capsys.readouterr().out.startswith("driver 999.10.1 (simulated, x86_64)")


def test_an_error_is_one_line_on_stderr_and_a_status(host, capsys):
    (host / "control/libcuda.so.1").unlink()
    assert refresh(host) == 72
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tidegate: no control library: ")
    assert captured.err.count("\n") == 1
    (host / "empty").mkdir()
    assert cli.main(["refresh", "--root", f"{host}/empty", "--output", f"{host}/drivers"]) == 69
    assert "install the NVIDIA driver" in capsys.readouterr().err
    assert not (host / "drivers").exists()


def test_explain_reads_a_bundle(host, capsys):
    refresh(host)
    put_image(host / "bundle/rootfs")
    config = {
        "root": {"path": "rootfs"},
        "annotations": {"tidegate.gpu/memory": "512Mi", "other": "x"},
    }
    put(host / "bundle/config.json", json.dumps(config).encode())
    capsys.readouterr()
    assert explain(host, "--bundle", str(host / "bundle")) == 0
    out = capsys.readouterr().out
    assert "memory        512Mi" in out
    assert "result, if the governor admits it" in out
    put(host / "bundle/config.json", json.dumps({"root": {"path": "rootfs"}}).encode())
    assert explain(host, "--bundle", str(host / "bundle")) == 0
    assert (
        capsys.readouterr().out
        == "no annotation under tidegate.gpu/: the container is left alone\n"
    )


def test_explain_fails_as_the_hook_would(host, capsys):
    assert explain(host, "--annotation", "tidegate.gpu/memry=8Gi") == 64
    assert "did you mean tidegate.gpu/memory?" in capsys.readouterr().err
    assert explain(host, "--annotation", "tidegate.gpu/memory=8Gi") == 69
    assert "run `tidegate refresh`" in capsys.readouterr().err
    refresh(host)
    (host / f"root/usr/lib64/libcuda.so.{V}").write_bytes(b"upgraded")
    capsys.readouterr()
    assert explain(host, "--annotation", "tidegate.gpu/memory=8Gi") == 72
    assert "is stale" in capsys.readouterr().err


def test_explain_of_an_optional_driver_reports_a_start_without_it(host, capsys):
    (host / "empty").mkdir()
    options = ("--annotation", "tidegate.gpu/driver=optional", "--rootfs", str(host / "empty"))
    assert explain(host, *options) == 0
    assert (
        "starts without a GPU, because tidegate.gpu/driver is optional: no driver mirror"
        in capsys.readouterr().out
    )
    refresh(host)
    capsys.readouterr()
    assert explain(host, *options) == 0
    assert "is optional: the image has no glibc" in capsys.readouterr().out


def test_explain_changes_nothing(host):
    refresh(host)
    image = put_image(host / "image")
    before = sorted((p, p.lstat().st_mtime_ns) for p in host.rglob("*"))
    explain(host, "--annotation", "tidegate.gpu/memory=8Gi", "--rootfs", str(image))
    assert sorted((p, p.lstat().st_mtime_ns) for p in host.rglob("*")) == before


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    ).stdout


def test_a_verb_imports_only_what_it_needs():
    code = "import sys; from governor import cli; cli.main(['explain']); print(*sys.modules)"
    loaded = set(python(code).splitlines()[-1].split())
    assert "governor.verbs.explain" in loaded
    packages = {m.partition(".")[0] for m in loaded}
    assert packages.isdisjoint({"elftools", "jsonschema", "pynvml", "yaml", "structlog"})
    assert {m for m in loaded if m.startswith("vdriver.")} == {"vdriver.errors"}
    assert "governor.verbs.refresh" not in loaded


def test_the_version_is_that_of_the_project(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"tidegate [0-9]+\.[0-9]+\.\S+\n", capsys.readouterr().out)
