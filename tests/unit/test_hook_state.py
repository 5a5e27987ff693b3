"""Tests of oci_hook.state: parsing of the OCI state and config.json, and their error lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oci_hook import state
from oci_hook.errors import AnnotationError, BundleError, HookError, OciStateError
from oci_hook.quick import CONFIG_LIMIT, PREFIX, arm, asks_nothing, disarm, may_mention_us
from oci_hook.state import (
    Bundle,
    OciState,
    our_annotations,
    parse_config,
    parse_state,
)

GOOD = {
    "ociVersion": "1.0.2",
    "id": "c1",
    "pid": 42,
    "bundle": "/b",
    "status": "creating",
    "annotations": {"a": "b"},
}


def test_a_state_of_runc_is_parsed() -> None:
    parsed = parse_state(json.dumps(GOOD).encode())
    assert (parsed.id, parsed.pid, parsed.bundle, parsed.annotations) == (
        "c1",
        42,
        "/b",
        {"a": "b"},
    )


def test_unknown_keys_and_missing_annotations_are_fine() -> None:
    document = {**GOOD, "root": "/r", "newer": [1]}
    del document["annotations"]
    assert parse_state(json.dumps(document).encode()).annotations == {}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100000, b'{"id": NaN', b"1" * 10000]
)
def test_a_state_that_is_not_an_object_is_refused(data: bytes) -> None:
    with pytest.raises(OciStateError):
        parse_state(data)


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"id": 7},
        {"id": None},
        {"id": "x" * 2000},
        {"pid": 0},
        {"pid": 1.5},
        {"pid": True},
        {"pid": "42"},
        {"pid": -1},
        {"pid": 1 << 40},
        {"bundle": "b"},
        {"bundle": ""},
        {"bundle": ["/b"]},
        {"bundle": "/b\0c"},
        {"annotations": []},
    ],
)
def test_fields_have_strict_types(change: dict[str, object]) -> None:
    with pytest.raises(OciStateError) as caught:
        parse_state(json.dumps({**GOOD, **change}).encode())
    assert caught.value.line().isprintable()


def test_a_state_that_is_too_large_is_refused() -> None:
    with pytest.raises(OciStateError, match="larger than"):
        parse_state(None)


def test_poststop_needs_only_an_id() -> None:
    assert parse_state(b'{"id": "c1"}', needs_pid=False).id == "c1"


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("rootfs", "/b/rootfs"),
        ("./rootfs/", "/b/rootfs"),
        ("/r", "/r"),
        ("../c/rootfs", "/c/rootfs"),
        ("./.././c//rootfs", "/c/rootfs"),
    ],
)
def test_the_root_is_resolved_against_the_bundle(path: str, root: str) -> None:
    assert parse_config(json.dumps({"root": {"path": path}}).encode(), "/b").root == root


@pytest.mark.parametrize(
    "config",
    [{}, {"root": None}, {"root": "x"}, {"root": {}}]
    + [
        {"root": {"path": p}}
        for p in ("", "/", "//", "/.", "/b/..", "..", "../../../..", 7, None, "a\0b", "///")
    ],
)
def test_a_root_that_is_missing_or_the_hosts_is_refused(config: object) -> None:
    with pytest.raises(BundleError, match=r"root.path in /b/config.json is"):
        parse_config(json.dumps(config).encode(), "/b")


def test_the_identity_is_read_from_the_engines_annotations() -> None:
    annotations = {
        "io.kubernetes.cri.sandbox-namespace": "team",
        "io.kubernetes.cri.sandbox-name": "pod-1",
        "io.kubernetes.cri.sandbox-uid": "0f",
        "io.kubernetes.cri.container-name": "train",
    }
    config = json.dumps({"root": {"path": "r"}, "annotations": annotations}).encode()
    assert parse_config(config, "/b").identity == {
        "namespace": "team",
        "pod": "pod-1",
        "pod_uid": "0f",
        "container": "train",
    }


CRI_O = {
    "io.kubernetes.cri-o.Namespace": "mallory",
    "io.kubernetes.pod.namespace": "mallory",
    "io.kubernetes.pod.name": "evil",
    "io.kubernetes.pod.uid": "0e",
    "io.kubernetes.container.name": "main",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("io.kubernetes.cri.sandbox-namespace", "kube-system"),
        ("io.kubernetes.cri.sandbox-name", "victim-0"),
        ("io.kubernetes.cri.sandbox-uid", "0f"),
        ("io.kubernetes.cri.container-name", "trainer"),
        ("nerdctl/namespace", "kube-system"),
    ],
)
def test_a_pod_in_cri_o_cannot_pose_as_another_tenants(name: str, value: str) -> None:
    """CRI-O passes on all annotations of a pod, including those that containerd writes."""

    def config(**annotations: str) -> bytes:
        return json.dumps({"root": {"path": "/r"}, "annotations": annotations}).encode()

    asks = {**CRI_O, "tidegate.gpu/memory": "1Gi"}
    with pytest.raises(AnnotationError, match=f"{name}.*{value}") as caught:
        parse_config(config(**asks, **{name: value}), "/b")
    assert "remove the annotation that the engine does not write" in caught.value.hint
    expected = {"namespace": "mallory", "pod": "evil", "pod_uid": "0e", "container": "main"}
    assert parse_config(config(**asks), "/b").identity == expected
    # A container without a GPU is not Tidegate's concern.
    parse_config(config(**CRI_O, **{name: value}), "/b")


def test_a_duplicate_annotation_is_refused_and_another_duplicate_is_not() -> None:
    text = '{"root": {"path": "r"}, "x": 1, "x": 2, "annotations": {"tidegate.gpu/memory": "1Gi", "tidegate.gpu/memory": "2Gi"}}'
    with pytest.raises(AnnotationError, match=r"tidegate.gpu/memory is given twice"):
        parse_config(text.encode(), "/b")
    parse_config(
        b'{"root": {"path": "r"}, "x": 1, "x": 2, "annotations": {"a": "1", "a": "2"}}', "/b"
    )


@pytest.mark.parametrize(
    "text",
    [
        '"linux": {"devices": []}, "linux": {"devices": [{"major": 195, "minor": 0}]}, "annotations": {%s}',
        '"linux": {"devices": [{"major": 1, "major": 195, "minor": 0}]}, "annotations": {%s}',
        '"annotations": {%s}, "annotations": {%s}',
    ],
)
@pytest.mark.parametrize(
    "ours", ['"tidegate.gpu/memory": "1Gi"', '"tidegate\\u002egpu/memory": "1Gi"']
)
def test_any_duplicate_name_is_refused_in_a_container_with_a_request(text: str, ours: str) -> None:
    """runc uses the last occurrence, crun the first: a program that checks one misses the other."""
    text = '{"root": {"path": "r"}, ' + text.replace("%s", ours) + "}"
    with pytest.raises(BundleError, match=r"is given twice in /b/config.json"):
        parse_config(text.encode(), "/b")


@pytest.mark.parametrize("path", ["a/../r", "/a/../r", "../a/../r", "a/./../r"])
def test_a_root_path_that_runtimes_resolve_differently_is_refused(path: str) -> None:
    """If `a` is a link, runc resolves `..` in the text of the path, and crun follows the link."""
    with pytest.raises(BundleError, match=r"'..' after a name"):
        parse_config(json.dumps({"root": {"path": path}}).encode(), "/b")


def test_a_bundle_behind_links_has_its_root_where_the_kernel_finds_it(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/inner")
    bundle = parse_config(b'{"root": {"path": "r"}}', f"{tmp_path}/link/..")
    assert bundle.root == f"{tmp_path}/real/r"


def test_an_annotation_that_is_not_a_string_is_refused() -> None:
    config = {"root": {"path": "r"}, "annotations": {"tidegate.gpu/compute": 50}}
    with pytest.raises(AnnotationError, match=r"is int, not a string"):
        parse_config(json.dumps(config).encode(), "/b")


def both(config: dict[str, str], seen: dict[str, str]) -> dict[str, str]:
    return our_annotations(
        OciState(ident="c", pid=1, bundle="/b", annotations=seen),
        Bundle(root="/r", annotations=config, identity={}, document={}),
    )


def test_annotations_are_joined_and_have_to_agree() -> None:
    assert both({"tidegate.gpu/memory": "1Gi", "x": "y"}, {}) == {"tidegate.gpu/memory": "1Gi"}
    assert both({}, {"tidegate.gpu/memory": "1Gi"}) == {"tidegate.gpu/memory": "1Gi"}
    with pytest.raises(AnnotationError, match=r"is 1Gi in config.json and 2Gi in the OCI state"):
        both({"tidegate.gpu/memory": "1Gi"}, {"tidegate.gpu/memory": "2Gi"})


@pytest.mark.parametrize(
    ("kinds", "wants"),
    [
        ({"io.kubernetes.cri.container-type": "sandbox"}, False),
        ({"io.kubernetes.cri-o.ContainerType": "sandbox"}, False),
        ({"io.kubernetes.cri.container-type": "container"}, True),
        ({"io.kubernetes.cri-o.ContainerType": "container"}, True),
        # The other annotation, of the engine that the node does not run, comes from the pod itself.
        (
            {
                "io.kubernetes.cri.container-type": "sandbox",
                "io.kubernetes.cri-o.ContainerType": "container",
            },
            True,
        ),
        (
            {
                "io.kubernetes.cri.container-type": "container",
                "io.kubernetes.cri-o.ContainerType": "sandbox",
            },
            True,
        ),
    ],
)
def test_the_sandbox_of_a_pod_requests_nothing(kinds: dict[str, str], *, wants: bool) -> None:
    """A sandbox has the pod's annotations, which are meant for the pod's containers."""
    asked = {"tidegate.gpu/memory": "8Gi"}
    state = OciState(ident="a", pid=1, bundle="/b", annotations={**asked, **kinds})
    bundle = Bundle(root="/b/rootfs", annotations={**asked, **kinds}, identity={}, document={})
    assert our_annotations(state, bundle) == (asked if wants else {})


@pytest.mark.parametrize(
    "text",
    [
        '{"annotations": {"tidegate.gpu/memory": "1Gi"}}',
        '{"annotations": {"tidegate.gpu\\/memory": "1Gi"}}',
        '{"annotations": {"\\u0074idegate.gpu/memory": "1Gi"}}',
        '{"annotations": {"tidegate\\u002egpu/memory": "1Gi"}}',
        *(
            '{"annotations": {"' + PREFIX.replace(c, form % ord(c), 1) + 'memory": "1Gi"}}'
            for c in PREFIX
            for form in ("\\u%04x", "\\u%04X")
        ),
    ],
)
def test_no_spelling_of_an_annotation_is_overlooked(text: str) -> None:
    """The fast path for containers without a request must never apply to a container with one."""
    assert any(name.startswith("tidegate.gpu/") for name in json.loads(text)["annotations"])
    assert may_mention_us(text.encode())


def test_other_containers_are_not_parsed() -> None:
    assert not may_mention_us(b'{"annotations": {"org.example/tidegate": "x", "y": "\\n"}}')
    # Go writes "&&" and ">", as in a shell's command line, in JSON like this.
    assert not may_mention_us(rb'{"process": {"args": ["sh", "-c", "a \u0026\u0026 b \u003e c"]}}')


def test_an_oversized_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "CONFIG_LIMIT", 100)
    (tmp_path / "config.json").write_bytes(b" " * 101)
    with pytest.raises(BundleError, match="larger than 100 bytes"):
        state.read_config(str(tmp_path))


def test_a_config_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    arm(5)  # otherwise it would wait for a writer
    try:
        with pytest.raises(BundleError, match="not a regular file"):
            state.read_config(str(tmp_path))
    finally:
        disarm()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    line = "x"
    try:
        parse_state(data)
    except HookError as e:
        line = e.line()
    assert line.isascii()
    assert line.isprintable()


TEXTS = st.text(max_size=6) | st.sampled_from(
    ["bundle", '"bundle":"/other"', "tidegate.gpu/memory", "tidegate.gpu/", "/other", "\\"]
)


@given(
    st.dictionaries(TEXTS, TEXTS, max_size=4),
    st.dictionaries(TEXTS, TEXTS, max_size=4),
    st.booleans(),
    st.sampled_from([None, (",", ":"), (" , ", " : ")]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_asks_nothing_agrees_with_the_parser(
    tmp_path: Path,
    config: dict[str, str],
    annotations: dict[str, str],
    ascii_only: bool,  # noqa: FBT001
    separators: tuple[str, str] | None,
) -> None:
    """A decision that is made without parsing must agree with the parser's."""
    bundle = tmp_path / "b"
    bundle.mkdir(exist_ok=True)
    document = {"root": {"path": "r"}, "annotations": config}
    (bundle / "config.json").write_text(json.dumps(document, ensure_ascii=ascii_only))
    said = {
        "id": "x",
        "pid": 1,
        "annotations": annotations,
        "bundle": str(bundle),
        "status": "creating",
    }
    data = json.dumps(said, ensure_ascii=ascii_only, separators=separators).encode(
        errors="surrogatepass"
    )
    if asks_nothing(data):
        assert [name for name in (*config, *annotations) if name.startswith(PREFIX)] == []


def test_a_state_with_an_escaped_bundle_key_is_parsed(tmp_path: Path) -> None:
    """An annotation of the state is named `bundle` and names a bundle without a request."""
    (tmp_path / "config.json").write_text("{}")
    said = {**GOOD, "annotations": {"bundle": str(tmp_path)}}
    assert said["bundle"] != str(tmp_path)
    data = json.dumps(said).replace('"bundle"', '"\\u0062undle"', 1).encode()
    assert json.loads(data) == said
    assert not asks_nothing(data)


def test_an_ordinary_container_is_recognised_without_parsing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"annotations": {"a": "b"}}')
    assert asks_nothing(json.dumps({**GOOD, "bundle": str(tmp_path)}).encode())
    # These are parsed, and the parser reports the error.
    assert not asks_nothing(None)
    assert not asks_nothing(json.dumps({**GOOD, "bundle": str(tmp_path / "none")}).encode())
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/config.json")
    assert not asks_nothing(json.dumps({**GOOD, "bundle": str(tmp_path / "pipe")}).encode())
    (tmp_path / "config.json").write_bytes(b"{}" + b" " * CONFIG_LIMIT)
    assert not asks_nothing(json.dumps({**GOOD, "bundle": str(tmp_path)}).encode())
    assert not asks_nothing(b'{"id": "x"}')
    assert not asks_nothing(b'{"bundle": 3}')
