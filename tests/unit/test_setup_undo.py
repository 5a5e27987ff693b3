"""Whatever a configuration contains, setup adds only its entries, and undo restores every byte."""

from __future__ import annotations

import io
import json
import os
import tempfile
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from governor.setup import jsontext, tomltext
from tests.conftest import examples
from tests.unit.setup_tree import put, put_programs, setup, snapshot, text

DAEMON = "/etc/docker/daemon.json"
CONFIG = "/etc/containerd/config.toml"
V2, V3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"


@pytest.fixture(autouse=True, scope="module")
def _no_disk():
    """Hundreds of trees need not survive a power failure, so nothing is synced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        yield


blanks = st.text(" \t", max_size=3)
gaps = st.lists(st.sampled_from([" ", "\t", "\n", "\r\n", ""]), max_size=3).map("".join)
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)


@st.composite
def json_texts(draw, value):
    """Draw a JSON text of a value, with blanks wherever JSON allows them."""
    if isinstance(value, dict):
        members = [
            f"{draw(gaps)}{json.dumps(k, ensure_ascii=draw(st.booleans()))}{draw(gaps)}:{draw(gaps)}"
            f"{draw(json_texts(v))}{draw(gaps)}"
            for k, v in value.items()
        ]
        return "{" + (",".join(members) or draw(gaps)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(f"{draw(gaps)}{draw(json_texts(v))}{draw(gaps)}" for v in value) + "]"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
runtimes = st.dictionaries(
    words.filter(lambda w: w != "tidegate"), st.just({"path": "/usr/bin/kata"}), max_size=2
)


@st.composite
def daemons(draw):
    """Draw a daemon.json with everything that dockerd's parser accepts, even a byte order mark."""
    members = draw(st.dictionaries(words, json_values, max_size=4))
    members.pop("runtimes", None)
    members.pop("default-runtime", None)
    items = list(members.items())
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ("runtimes", draw(runtimes)))
    if draw(st.booleans()):
        items.append(("default-runtime", "runc"))
    bom = draw(st.sampled_from(["", "", "\ufeff"]))
    return bom + draw(gaps) + draw(json_texts(dict(items))) + draw(gaps)


@st.composite
def configs(draw):
    """Draw a config.toml of version 2 or 3, with comments, misleading strings, and maybe CRLF."""
    version = draw(st.sampled_from([2, 3]))
    plugin = V2 if version == 2 else V3
    comment = st.sampled_from(["", "# c", "# [x]", "#imports = []", "# \"'''"])
    lines = [draw(comment) for _ in range(draw(st.integers(0, 2)))]
    top = [f"version{draw(blanks)}={draw(blanks)}{version}{draw(blanks)}{draw(comment)}"]
    if draw(st.booleans()):
        inner = draw(
            st.lists(st.sampled_from(['"/a/*.toml"', "'b.toml'", '"#]"', '"""x"""']), max_size=3)
        )
        gap = draw(st.sampled_from(["", " ", "\n  ", "\n\t# c ]\n\t"]))
        end = draw(st.sampled_from(["", ","])) if inner else ""
        name = draw(st.sampled_from(["imports", '"imports"', "'imports'"]))
        top.append(f"{name} = [{','.join(gap + e for e in inner)}{end}{gap}] {draw(comment)}")
    if draw(st.booleans()):
        top.append('root = """\n[plugins]\nimports = [\n\\""" """')
    if draw(st.booleans()):
        top.append("oom_score = 0\ngrpc.uid = 0")
    lines += draw(st.permutations(top))
    if draw(st.booleans()):
        lines += [draw(blanks) + "[debug]" + draw(comment), "level = '\"['", draw(comment)]
    if draw(st.booleans()):
        lines += [
            f"[plugins.'{plugin}'.containerd]",
            'default_runtime_name = "runc"',
            f'{draw(blanks)}[ plugins . "{plugin}" . containerd.runtimes.runc ]',
            "runtime_type = 'io.containerd.runc.v2'",
            f"[plugins.'{plugin}'.containerd.runtimes.runc.options]",
            "SystemdCgroup = true",
        ]
    end = draw(st.sampled_from(["\n", "\r\n"]))
    return "\n".join(lines).replace("\n", end) + draw(st.sampled_from(["", end, end + end]))


def quietly(root, *words):
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        status = setup(root, *words)
    assert status == 0, out.getvalue()
    return out.getvalue()


def round_trip(engine, path, content, *words):
    """Set up twice and undo; return the file's text before the undo."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        put_programs(root)
        put(root, path, content, 0o640)
        before = snapshot(root)
        quietly(root, engine, *words)
        done, between = snapshot(root), text(root, path)
        assert "nothing to do" in quietly(root, engine, *words)
        assert snapshot(root) == done
        quietly(root, engine, "--undo")
        assert snapshot(root) == before
        return between


@settings(max_examples=examples(80), deadline=None)
@given(daemons(), st.booleans())
def test_setup_and_undo_of_any_daemon_json(content, default):
    between = round_trip("docker", DAEMON, content, *(["--default"] if default else []))
    before = jsontext.parse(content)
    expected = {
        **before,
        "runtimes": {
            **before.get("runtimes", {}),
            "tidegate": {"path": "/usr/bin/tidegate-runtime"},
        },
    }
    if default:
        expected["default-runtime"] = "tidegate"
    assert json.loads(between.removeprefix("\ufeff")) == expected
    # Nothing of the original is lost, except blanks in an empty object.
    rest = iter(between)
    if "default-runtime" not in before or not default:
        assert all(c in rest for c in content if c not in " \t\r\n")


@settings(max_examples=examples(80), deadline=None)
@given(configs())
@example("version=2")
@example("version = 3 # no newline")
@example('version = 3\n"imports" = [ # ]\n] # c')
def test_setup_and_undo_of_any_config_toml(content):
    between = round_trip("containerd", CONFIG, content)
    before, after = tomllib.loads(content), tomllib.loads(between)
    if before["version"] == 2:
        assert between.startswith(content)
        handlers = after["plugins"][V2]["containerd"]["runtimes"]
        assert set(handlers) == {"runc", "tidegate"}
        assert handlers["tidegate"]["options"].get("SystemdCgroup") == (
            handlers["runc"].get("options", {}).get("SystemdCgroup")
        )
    else:
        ours = "/etc/containerd/conf.d/tidegate*.toml"
        assert after == {**before, "imports": [*before.get("imports", []), ours]}
        rest = iter(between)
        assert all(c in rest for c in content)


@settings(max_examples=examples(80), deadline=None)
@given(daemons())
def test_a_member_that_is_removed_leaves_what_was_added_beside_it(content):
    added = jsontext.put(content, ("runtimes", "tidegate"), {"path": "/x"})
    more = jsontext.put(added, ("live-restore",), {"later": [True]})
    rest = jsontext.parse(jsontext.drop(more, ("runtimes", "tidegate")))
    expected = {"runtimes": {}, **jsontext.parse(content), "live-restore": {"later": [True]}}
    assert rest == expected


@settings(max_examples=examples(80), deadline=None)
@given(configs())
def test_tables_that_are_removed_leave_what_was_added_after_them(content):
    block = "# ours\n[plugins.x.containerd.runtimes.tidegate]\na = 1\n  [plugins.x.containerd.runtimes.tidegate.options]\n"
    later = "# theirs\n[plugins.y]\nb = '''\n[plugins.x.containerd.runtimes.tidegate]\n'''\n"
    text = tomltext.append(tomltext.append(content, block), later)
    rest = tomltext.drop_tables(
        text, ("plugins", "x", "containerd", "runtimes", "tidegate"), ["# ours"]
    )
    assert tomllib.loads(rest) == tomltext.merged(tomllib.loads(content), tomllib.loads(later))
    assert rest.replace("\r\n", "\n").endswith(later)
    assert rest.startswith(content.rstrip("\r\n"))


@settings(max_examples=examples(80), deadline=None)
@given(configs())
def test_an_element_that_is_removed_leaves_the_others(content):
    text = tomltext.add_element(tomltext.add_element(content, "imports", "a b"), "imports", "c")
    rest = tomltext.drop_element(text, "imports", "a b")
    before = tomllib.loads(content)
    assert tomllib.loads(rest) == {**before, "imports": [*before.get("imports", []), "c"]}
    assert tomllib.loads(tomltext.drop_element(rest, "imports", "c")).get("imports", []) == (
        before.get("imports", [])
    )


@settings(max_examples=examples(80), deadline=None)
@given(st.binary(max_size=60) | words.map(str.encode), st.sampled_from([DAEMON, CONFIG]))
def test_any_content_of_a_file_is_set_up_or_refused_in_one_line(content, path):
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        put_programs(root)
        put(root, path, content)
        before = snapshot(root)
        err = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            status = setup(root, "docker" if path == DAEMON else "containerd")
        assert status in (0, 73)
        if status:
            assert err.getvalue().count("\n") == 1
            assert snapshot(root) == before
        else:
            quietly(root, "docker" if path == DAEMON else "containerd", "--undo")
            assert snapshot(root) == before
