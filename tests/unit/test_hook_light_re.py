"""The hook's hand-written checks accept exactly what these regular expressions match."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oci_hook import cleanup, edits, light_re, manifest, request
from oci_hook.errors import AnnotationError
from tests.conftest import examples

HEX = "[0-9a-f]"
UUID = f"GPU-{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}"
NAME = r"(?!\.{0,2}(?:/|\Z))[^/\0\ud800-\udc7f\udd00-\udfff]+"


def is_request(name: str, text: str) -> bool:
    try:
        request.PARSERS[name][1](name, text)
    except AnnotationError:
        return False
    return True


ASKED = {
    "memory": (
        r"[1-9][0-9]{0,14}|[1-9][0-9]{0,11}Ki|[1-9][0-9]{0,8}Mi|[1-9][0-9]{0,5}Gi|[1-9][0-9]{0,2}Ti",
        lambda text: is_request("memory", text),
    ),
    "percent": (r"[1-9][0-9]?|100", lambda text: is_request("compute", text)),
    "count": (r"[1-9]|[1-5][0-9]|6[0-4]", lambda text: is_request("count", text)),
    "device": (
        rf"0|[1-9]|[1-5][0-9]|6[0-3]|{UUID}",
        lambda text: "," in text or is_request("devices", text),
    ),
    "relative": (f"{NAME}(?:/{NAME})*", light_re.is_below),
    "absolute": (r"/[^\0\ud800-\udc7f\udd00-\udfff]*", manifest._is_absolute),
    "path": (r"[^\0\ud800-\udc7f\udd00-\udfff]*", light_re.is_path),
    "generation": (r"[0-9A-Za-z.]+-[0-9a-f]{12}", manifest._is_generation),
    "version": (r"[0-9]+(?:\.[0-9]+){1,3}", light_re.is_version),
    "digest": (r"[0-9a-f]{64}", lambda text: manifest._is_digest(text, 64)),
    "id": (r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", cleanup.is_name),
    "node": (r"/dev/nvidia[0-9]+", edits.is_gpu_node),
}
ODD = (
    "", "0", "00", "01", "1", "9", "63", "64", "65", "99", "100", "101", "1000", "٣", "²", "1\n", " 1", "+1", "-1", "1_0", "1.0", "Ki", "0Ki", "1Ki", "1ki",
    "1K", "1KiKi", "1i", "999Ti", "1000Ti", "999999Gi", "1000000Gi", "9" * 15, "9" * 16, "9" * 12 + "Ki", "9" * 13 + "Ki", "9" * 5000, "GPU-",
    "GPU-01234567-89ab-cdef-0123-456789abcdef", "GPU-01234567-89ab-cdef-0123-456789abcdeF", "GPU-01234567-89ab-cdef-0123-456789abcdef-",
    "GPU-0123456-789ab-cdef-0123-456789abcdef", "gpu-01234567-89ab-cdef-0123-456789abcdef", "/", "//", ".", "..", "...", "a/..", "../a", "a/./b", "a//b",
    "/a", "a/", "a/b.c", "a\0", "a\ud800", "a\udc7f", "a\udc80", "a\udcff", "a\udd00", "a\udfff", "\ud83d\ude00", "😀", "é", "580.1-0123456789ab",
    "580.1-0123456789aB", "-0123456789ab", "580.1-0123456789abc", "a-b-0123456789ab", "1.2", "1.2.3.4", "1.2.3.4.5", "1..2", ".1.2", "1.2.", "a" * 200,
    "a" * 201, ".a", "+a", "-a", "_a", "a+b-c.d_e", "a:b", "0" * 64, "0" * 63, "g" * 64, "/dev/nvidia", "/dev/nvidia0", "/dev/nvidia12", "/dev/nvidia1x",
    "/dev/nvidiactl", "/dev//nvidia0", "/dev/nvidia٣", "/dev/nvidia0\n",
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(codec=None, exclude_categories=()), max_size=8),
    st.text("0123456789abfKMGTi.-/_+\0\n\udc80\ud800", max_size=24),
)


@pytest.mark.hypothesis
@pytest.mark.parametrize("what", ASKED)
def test_each_check_accepts_exactly_what_its_pattern_matches(what: str) -> None:
    pattern, fits = ASKED[what]
    compiled = re.compile(pattern)

    def same(text: str) -> None:
        if what == "device" and "," in text:
            return  # a list of devices
        assert fits(text) is (compiled.fullmatch(text) is not None), ascii(text)

    @settings(max_examples=examples(150))
    @given(TEXTS | st.from_regex(compiled, fullmatch=True))
    def holds(text: str) -> None:
        same(text)
        same(text + "\n")

    for text in ODD:
        same(text)
    holds()


@given(st.lists(TEXTS, max_size=3))
@example(["\ud83d", "\ude00"])
def test_a_list_of_names_is_valid_exactly_if_each_name_is(names: list[str]) -> None:
    pattern = re.compile(NAME)
    each = all(pattern.fullmatch(name) for name in names)
    try:
        manifest._names(names)
    except ValueError:
        assert not each
    else:
        assert each


KERNEL_VERSION = re.compile(rb"Kernel Module(?: +for \S+)? +([0-9]+(?:\.[0-9]+){1,3})\s")
WORDS = st.sampled_from(
    (b"Kernel Module", b"NVRM version: ", b"for", b"x86_64", b"580.159.04", b"535.261", b"1.2.3.4.5", b"1", b"1.2.3.4", b" ", b" ", b"  ",
     b"\n", b"\t", b"\x0b", b"\x1c", b"\x85", b"\xa0", b"\xff", b"Release", b"\xd9\xa3.1"),
)  # fmt: skip


@settings(max_examples=examples(500))
@given(st.lists(WORDS, max_size=14).map(b"".join), st.booleans())
@example(b"Kernel Module\n\n\n\n5.1 ", False)
@example(b"Kernel Module for Kernel Module 5.1 ", False)
def test_the_kernel_modules_version_is_found(text: bytes, begun: bool) -> None:  # noqa: FBT001
    said = b"Kernel Module " + text if begun else text
    match = KERNEL_VERSION.search(said)
    assert manifest.find_version(said) == (match[1].decode() if match else None)
