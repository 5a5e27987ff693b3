"""Test that the C programs decide as the Python scripts of the same name do, or defer to them."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from oci_hook import quick, runtime
from tests.conftest import examples

ROOT = Path(__file__).parents[2]
PATH_MAX = 4096
PIECES = st.sampled_from(
    [
        b"tidegate.gpu/memory", b"tidegate.gpu", b"tidegate", b".gpu/", rb"\u0074", rb"\u002F", rb"\u0026",
        rb"\u006", rb"\u00", rb"\\u0067", rb"\u0000", b"\\", b'"', b"{", b"}", b":", b",", b" ", b"\n", b"\0", b"a",
        b'"bundle"', b'"bundle": "', b"/config.json", b"/tmp", b"\xc3\xa4",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map(b"".join)


class Text(ctypes.Structure):
    """`struct text` of front/requests.h."""

    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t))


class FrontSettings(ctypes.Structure):
    """`struct settings` of front/settings.h."""

    _fields_ = (
        ("root", ctypes.c_char_p),
        ("runtime", ctypes.c_char * PATH_MAX),
        ("runtime_for_root", ctypes.c_char * PATH_MAX),
        ("runtime_dir", ctypes.c_char * PATH_MAX),
        ("environment", ctypes.c_bool),
        ("timeout", ctypes.c_double),
    )


@pytest.fixture(scope="module")
def front(build_dir: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_dir / "oci_hook/front/libfront.so"))
    for name in ("text_may_request", "state_requests_nothing", "settings_read"):
        getattr(library, name).restype = ctypes.c_bool
    return library


def text(data: bytes) -> Any:
    return ctypes.byref(Text(data, len(data)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=TEXTS)
@example(data=rb'{"a\u0074b": 1}')
@example(data=rb'{"\u0026": 1}')
def test_c_and_python_find_the_same_requests(front: ctypes.CDLL, data: bytes) -> None:
    assert front.text_may_request(text(data)) == quick.may_mention_us(data)


def test_an_invalid_escape_is_left_to_the_script(front: ctypes.CDLL) -> None:
    assert front.text_may_request(text(rb"\U0074"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(before=TEXTS, between=TEXTS, after=TEXTS, config=st.none() | TEXTS)
@example(before=b"{", between=b": ", after=b"}", config=b"{}")
@example(before=b"{", between=b": ", after=b"}", config=b"tidegate.gpu")
@example(before=b"{", between=b":", after=b', "bundle": "/tmp"}', config=b"{}")
def test_c_and_python_find_the_same_states_without_a_request(  # noqa: PLR0917 - Hypothesis names them
    front: ctypes.CDLL,
    tmp_path_factory: pytest.TempPathFactory,
    before: bytes,
    between: bytes,
    after: bytes,
    config: bytes | None,
) -> None:
    bundle = tmp_path_factory.getbasetemp() / "bundle"
    bundle.mkdir(exist_ok=True)
    (bundle / "config.json").unlink(missing_ok=True)
    if config is not None:
        (bundle / "config.json").write_bytes(config)
    state = before + b'"bundle"' + between + b'"' + bytes(bundle) + b'"' + after
    assert front.state_requests_nothing(text(state)) == quick.asks_nothing(state)


def test_a_configuration_that_is_not_a_file_or_too_large_is_left_to_the_script(
    front: ctypes.CDLL, tmp_path: Path
) -> None:
    state = json.dumps({"bundle": str(tmp_path)}).encode()
    assert not front.state_requests_nothing(text(state))
    (tmp_path / "config.json").mkdir()
    assert not front.state_requests_nothing(text(state))
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_bytes(b" " * quick.CONFIG_LIMIT)
    assert front.state_requests_nothing(text(state))
    (tmp_path / "config.json").write_bytes(b" " * (quick.CONFIG_LIMIT + 1))
    assert not front.state_requests_nothing(text(state))


LINES = st.lists(
    st.sampled_from(
        [
            "runtime /usr/bin/true", "  runtime\t/x", "runtime  /a b ", "# runtime /c", "", "runtime-dir /r",
            "environment allow", "environment ignore", "environment often", "log /l", "log", "hook /h",
            "hook-arguments --log /x --timeout 3", "dev-dir /dev", "runtim /x", "runtime relative", "hook_arguments x",
            "log /ü", "environment  allow\r", "\x0bruntime /y", "runtime_dir /z",
            "runtime-for /run/crun /usr/bin/crun", "runtime-for /run/crun  /b", "runtime-for /run /c", "runtime-for x /y",
            "runtime-for /run/crun", "runtime-for /run/crun\t/d",
        ]
    ),
    max_size=5,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    lines=LINES, root=st.sampled_from(["", "/run/crun", "/run"]), ended=st.sampled_from(["", "\n"])
)
def test_c_reads_settings_as_python_does_or_leaves_them_to_the_script(
    front: ctypes.CDLL,
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    root: str,
    ended: str,
) -> None:
    path = tmp_path_factory.getbasetemp() / "settings"
    path.write_text("\n".join(lines) + ended)
    found = FrontSettings()
    if not front.settings_read(str(path).encode(), root.encode(), ctypes.byref(found)):
        return
    node = runtime.read_node(str(path), ["--root", root] if root else [])  # accepts it, too
    assert found.runtime.decode() == node.runtime
    assert found.runtime_dir.decode() == node.runtime_dir
    assert found.environment == (node.environment == "allow")


@pytest.mark.parametrize(
    "lines",
    [
        "", "# nothing\n", "runtime /usr/bin/true\n", "runtime /usr/bin/true\nlog /l\nhook /h\n",
        "environment allow\nruntime-dir /r\nruntime /usr/bin/true\n", "runtime-for /run/crun /usr/bin/crun\n",
    ],
)  # fmt: skip
def test_ordinary_settings_are_read_without_the_script(
    front: ctypes.CDLL, tmp_path: Path, require: Callable[..., None], lines: str
) -> None:
    require("runc")
    (tmp_path / "settings").write_text(lines)
    for name in ("settings", "none"):
        assert front.settings_read(
            bytes(tmp_path / name), b"/run/runc", ctypes.byref(FrontSettings())
        )


WORDS = st.sampled_from(
    [
        "create", "run", "restore", "delete", "start", "state", "kill", "exec", "one", "--", "-", "",
        "--bundle", "-bundle", "--bundle={asks}", "--bundle={plain}", "-b", "-b{asks}", "{asks}", "{plain}", "--bun",
        "--config", "--config={asks}/config.json", "-f", "--root", "/r", "--root=/r", "--log", "--debug",
        "--systemd-cgroup", "--systemd-cgroup=true", "--pid-file", "/p", "--force", "-f", "--no-pivot", "--detach", "-d",
        "--unknown", "--unknown=x", "--console-socket",
    ]
)  # fmt: skip
LINES_OF_WORDS = st.lists(WORDS, max_size=7)


@pytest.mark.parametrize("name", ["runc", "crun"])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=examples(20),
)
@given(words=LINES_OF_WORDS)
@example(words=["--root", "/r", "create", "--bundle", "{asks}", "--pid-file", "/p", "one"])
@example(words=["--root", "/r", "create", "--bundle", "{plain}", "--pid-file", "/p", "one"])
@example(words=["create", "--pid-file", "--bundle", "{asks}", "one"])
@example(words=["create", "--bundle", "{plain}", "--bundle", "{asks}", "one"])
@example(words=["--log", "create", "run", "--bundle={asks}", "one"])
@example(words=["one", "create", "--bundle", "{asks}", "two"])
def test_c_and_python_refuse_the_same_command_lines(
    build_dir: Path, tmp_path_factory: pytest.TempPathFactory, name: str, words: list[str]
) -> None:
    """Without a governor, requests are refused, so both programs have to find the same requests."""
    base = tmp_path_factory.getbasetemp() / f"lines-{name}"
    if not base.exists():
        for bundle, annotations in (("asks", {"tidegate.gpu/memory": "1Gi"}), ("plain", {})):
            (base / bundle).mkdir(parents=True)
            config = {"annotations": annotations, "root": {"path": "rootfs"}}
            (base / bundle / "config.json").write_text(json.dumps(config))
        real = base / name
        real.write_text('#!/bin/sh\nprintf "%s\\n" executed "$@"\n')
        real.chmod(0o755)
        # If the governor's directory existed, each program would wait 5 s for the governor.
        (base / "settings").write_text(f"runtime {real}\nruntime-dir {base}/none\n")
    line = [word.format(asks=base / "asks", plain=base / "plain") for word in words]
    outcomes = []
    for program in (
        build_dir / "oci_hook/front/tidegate-runtime",
        ROOT / "oci_hook/tidegate-runtime",
    ):
        done = subprocess.run(
            [program, "--tidegate-config", base / "settings", *line],
            capture_output=True, text=True, check=False, cwd=base / "asks",
        )  # fmt: skip
        outcomes.append((done.returncode, done.stdout, done.stderr))
    assert outcomes[0] == outcomes[1]
