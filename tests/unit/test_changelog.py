"""CHANGELOG.md is for operators: the current version, what to do first, and links that resolve."""

from __future__ import annotations

import re

from bench.provenance import ROOT
from governor import VERSION

TEXT = (ROOT / "CHANGELOG.md").read_text()
ORDER = ("To do", "Removed", "Deprecated", "Changed", "Fixed", "Added", "Security", "Known limits")


def test_the_newest_version_is_the_version_of_the_code() -> None:
    versions = re.findall(r"^## \[([^]]+)\]", TEXT, re.MULTILINE)
    assert next(v for v in versions if v != "Unreleased") == VERSION
    assert "Unreleased" not in versions[1:]


def test_no_other_file_repeats_the_version() -> None:
    for name in ("pyproject.toml", "meson.build", "packaging/rpm/tidegate.spec"):
        assert VERSION not in (ROOT / name).read_text(), name


def test_each_version_begins_with_the_section_to_do() -> None:
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        whole = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert len(set(whole)) == len(whole), section.splitlines()[0]
        heads = [head.split(":")[0] for head in whole]
        assert heads[0] == "To do", section.splitlines()[0]
        assert [ORDER.index(head) for head in heads] == sorted(ORDER.index(head) for head in heads)


def test_links_resolve() -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert "://" in link or (ROOT / link).exists(), link
