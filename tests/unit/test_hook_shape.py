"""Tests of the hook's structure: the modules that it loads, the calls that it makes, its error lines."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oci_hook import errors
from oci_hook.errors import HookError, show

HOOK = Path(__file__).parents[2] / "oci_hook"

# Each module beyond those of the interpreter delays the start of every container on the node. These
# are built into the interpreter, or are the hook's entry.
QUICK = {"oci_hook", "oci_hook.entry", "oci_hook.quick", "_signal", "_stat", "posix", "time"}
HEAVY = {
    "argparse",
    "collections",
    "contextlib",
    "ctypes",
    "dataclasses",
    "difflib",
    "elftools",
    "enum",
    "functools",
    "governor",
    "inspect",
    "json",
    "jsonschema",
    "libcontrol",
    "logging",
    "pathlib",
    "re",
    "signal",
    "socket",
    "struct",
    "subprocess",
    "structlog",
    "tempfile",
    "threading",
    "traceback",
    "typing",
    "urllib",
    "vdriver",
    "yaml",
}


def loaded_by(code: str, stdin: str = "") -> set[str]:
    """Return the modules that are loaded in a hook's process after `code`."""
    script = f"""
import sys
sys.path.insert(0, {str(HOOK.parent)!r})
{code}
print(" ".join(sys.modules))
"""
    done = subprocess.run(
        ["/usr/bin/python3", "-ISE", "-c", script],
        input=stdin,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_a_container_without_a_request_loads_only_built_in_modules(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"root": {"path": "rootfs"}}')
    state = json.dumps({"id": "c", "pid": 1, "bundle": str(tmp_path), "annotations": {"a": "b"}})
    code = "from oci_hook.entry import run\nassert run(['createRuntime']) == 0"
    assert loaded_by(code, state) - loaded_by("") <= QUICK


def test_a_container_with_a_request_loads_no_heavy_module(tmp_path: Path) -> None:
    """Reading and writing documents and logging load no heavy module either."""
    log = tmp_path / "log"
    code = f"""
import oci_hook.apply, oci_hook.client, oci_hook.edits, oci_hook.image, oci_hook.main
import oci_hook.manifest, oci_hook.plan, oci_hook.request
from oci_hook.log import RunEvent
from oci_hook.light_json import load_json
assert load_json(b'{{"a": [1.5, "b"]}}') == {{"a": [1.5, "b"]}}
RunEvent("createRuntime", {str(log)!r}).emit("prepared")
RunEvent("createRuntime", None).emit("prepared")
"""
    loaded = loaded_by(code)
    assert json.loads(log.read_text())["outcome"] == "prepared"
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()
    assert len(loaded) < 80


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("path", sorted(HOOK.glob("*.py")), ids=lambda p: p.name)
def test_the_hook_imports_only_the_standard_library_and_itself(path: Path) -> None:
    assert imports(path) <= set(sys.stdlib_module_names) | {"oci_hook"}
    if path.name not in ("kernel.py", "light_ctypes.py"):
        assert not imports(path) & {"ctypes", "_ctypes"}


def calls(path: Path) -> list[tuple[str, str]]:
    """Return each call of `os` in a module: the function, and its first argument as written."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.startswith("os."):
                found.append((name, ast.unparse(node.args[0]) if node.args else ""))
    return found


# The calls with a path: only the host's own paths, before anything of the container is opened. All
# others take a descriptor.
HOST_PATHS = {
    ("os.open", "'/proc'"),
    ("os.open", "f'/proc/{pid}/ns/mnt'"),
    ("os.open", "'/proc/self/ns/mnt'"),
    ("os.open", "root"),
    ("os.open", "c.root"),
    ("os.open", "'thread-self/mountinfo'"),  # dir_fd is the host's /proc
    ("os.stat", "'/'"),
    # The hook's notes about a container, on the host.
    ("os.open", "path"),
    ("os.open", "runtime_dir"),
    ("os.open", "f'{runtime_dir}/{DIRECTORY}'"),
    ("os.listdir", "f'{runtime_dir}/{DIRECTORY}'"),
    ("os.open", "f'{runtime_dir}/{LOCK}'"),
    ("os.open", "f'/proc/{pid}/stat'"),
    ("os.path.normpath", "path"),
    ("os.fsdecode", "path"),
    ("os.stat", "root"),
    ("os.open", "note.root"),
    ("os.path.isdir", "note.root"),
    ("os.fsdecode", "text.partition(b'\\x00')[0]"),
}
DESCRIPTORS = {
    "os.close": {
        "fd",
        "rootfd",
        "dirfd",
        "procfd",
        "above",
        "made",
        "readable",
        "entry",
        "other",
        "held",
    },
    "os.fdopen": {"fd"},
    "os.fstat": {"rootfd", "c.rootfd", "dirfd", "fd"},
    "os.fchown": {"fd"},
    "os.fchmod": {"fd"},
    "os.write": {"fd"},
    "os.utime": {"fd"},
    "os.scandir": {"fd"},
    "os.read": {"readable", "fd"},
    "os.pread": {"fd"},
    "os.pidfd_open": {"pid"},
    "os.path.sameopenfile": {"self.mntns", "other", "target"},
}


@pytest.mark.parametrize(
    "module", ["apply.py", "files.py", "image.py", "plan.py", "cleanup.py", "elf.py"]
)
def test_only_descriptors_are_used_below_the_root(module: str) -> None:
    """runc and NVIDIA's toolkit had a series of CVEs because they resolved a path in an image twice."""
    for function, argument in calls(HOOK / module):
        assert (function, argument) in HOST_PATHS or argument in DESCRIPTORS.get(function, set()), (
            function,
            argument,
        )


def test_calls_in_kernel_py_take_checked_names_and_directory_descriptors() -> None:
    """Each os call in kernel.py that takes a name gets a directory descriptor, after the name has
    been checked.
    """
    tree = ast.parse((HOOK / "kernel.py").read_text())
    for function in [n for n in tree.body if isinstance(n, ast.FunctionDef)]:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {
                "os.open",
                "os.mkdir",
                "os.rmdir",
                "os.unlink",
                "os.rename",
                "os.symlink",
                "os.chown",
                "os.utime",
            }:
                keywords = {k.arg for k in node.keywords}
                assert keywords & {"dir_fd", "src_dir_fd"}, ast.unparse(node)
                if function.name != "reopen":
                    assert "_require_name" in ast.unparse(function), function.name


def test_the_entry_script_trusts_no_environment() -> None:
    first = (HOOK / "tidegate-hook").read_text().splitlines()[0]
    assert first == "#!/usr/bin/python3 -ISE"
    assert (HOOK / "tidegate-hook").stat().st_mode & 0o111 == 0o111


@pytest.mark.parametrize("reader", ["python", "C"])
def test_the_environment_is_emptied_before_anything_else(reader: str) -> None:
    """Neither `os` nor any library of the process sees the runtime's environment."""
    code = """
import posix, sys
from oci_hook import entry
def python(_):
    import os
    return os.write(1, str(sorted(os.environ)).encode()) and 0
def C(_):
    posix.execv("/usr/bin/env", ["env"])  # of execve(2) with `environ`
entry.run = vars()[sys.argv[1]]
entry.main()
"""
    program = f"import sys; sys.path.insert(0, {str(HOOK.parent)!r})\n{code}"
    command = [b"/usr/bin/python3", b"-ISE", b"-c", program.encode(), reader.encode()]
    environment = [b"PATH=/image", b"TZ=/image", b"LD_LIBRARY_PATH=/image", b"=no name"]
    # execve(2) is called directly: newer versions of Python reject an entry without a name.
    starter = f"""
import ctypes
def words(them):
    return (ctypes.c_char_p * (len(them) + 1))(*them)
ctypes.CDLL(None).execve({command[0]!r}, words({command!r}), words({environment!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", starter],
        capture_output=True,
        text=True,
        check=True,
    )
    # An entry without a name cannot be unset, but no lookup finds it.
    assert done.stdout == {"python": "[]", "C": "=no name\n"}[reader]


def classes() -> list[type[HookError]]:
    return [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, HookError) and c is not HookError
    ]


def test_codes_and_statuses_are_stable_and_documented() -> None:
    expected = {
        "annotation": 64,
        "state": 65,
        "bundle": 66,
        "driver": 69,
        "internal": 70,
        "mount": 71,
        "mirror": 72,
        "device": 73,
        "governor": 75,
        "image": 76,
        "refused": 77,
    }
    assert {c.code: c.status for c in classes()} == expected
    page = (HOOK.parent / "docs" / "reference" / "errors.md").read_text()
    rows = re.findall(
        r"^\| `([a-z]+)` \| ([0-9]+) \|",
        page.partition("## The hook")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    assert {code: int(status) for code, status in rows} == expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("a\nb\r\x1b[31m", "a\\nb\\r\\x1b[31m"),
        ("\u202e\u2028ü", "\\u202e\\u2028\\xfc"),
        ("x" * 200, "x" * 77 + "..."),
        (None, "None"),
        ("it's", "it's"),
    ],
)
def test_untrusted_values_are_shown_safely(value: object, shown: str) -> None:
    assert show(value) == shown


def test_an_error_line_is_one_printable_line() -> None:
    line = HookError("a\nb\x00" + "c" * 5000, hint="d\x7f").line()
    assert line.isprintable()
    assert len(line) <= errors.LINE_LIMIT
