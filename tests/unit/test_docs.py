"""Test that the documents are consistent: links, anchors, and lists of what the code contains.

docs/README.md lists all documents.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path

import pytest

import governor.errors
import vdriver.errors
from governor.doctor.checks import CHECKS
from tools import docs_site as site
from tools import markdown

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [page.relative_to(ROOT).as_posix() for page in markdown.pages()]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    text = (ROOT / page).read_text()
    for link in markdown.links(text):
        if link.outside:
            continue
        target = (
            Path(os.path.normpath(ROOT / page / ".." / link.path)) if link.path else ROOT / page
        )
        assert target.exists(), f"{page}:{link.line}: {link.target}"
        assert target.is_relative_to(ROOT), f"{page}:{link.line}: {link.target}"
        if link.anchor and target.suffix == ".md":
            assert link.anchor in markdown.anchors(target.read_text()), (
                f"{page}:{link.line}: {link.target}"
            )
    site.carried(page, text, set(PAGES))  # fails for a directory without a README.md


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_title_and_skips_no_level(page):
    depths = [depth for depth, _ in markdown.headings((ROOT / page).read_text())]
    assert depths[0] == 1
    assert depths.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(depths))


def test_the_figures_in_the_readme_are_those_of_a_result():
    text = (ROOT / "README.md").read_text()
    results = ROOT / "bench/results"
    arm = json.loads((results / "2026-11-24-quota-h200-hardware-and-gate-1.json").read_text())[
        "summary"
    ]["crowd"]
    assert f"{arm['1s']['mean']:.2f} points off over a second" in text
    assert f"{arm['100ms']['mean']:.2f} over 100 ms" in text
    for line, told in (("without", arm["native"]), ("with", arm)):
        row = next(r for r in text.splitlines() if r.startswith(f"| {line} Tidegate |"))
        shown = [float(cell) for cell in row.split("|")[2:-1]]
        assert shown == pytest.approx([*told["delivered"], told["sum"]], abs=0.0501)
    requests = json.loads((results / "2026-11-24-latency-h200-resnet18.json").read_text())[
        "summary"
    ]
    for way in ("gate-50", "hardware-50"):
        assert f"{requests[f'every-20000us-1-jobs-{way}']['mean_ms']:.1f} ms" in text
    assert f"takes {requests['every-20000us-0-jobs-alone']['mean_ms']:.1f} ms alone" in text
    assert f"takes {requests['every-20000us-1-jobs-native']['mean_ms']:.1f} ms on average" in text


def test_the_index_lists_every_page():
    """To fix a failure, add a line to docs/README.md, from which the site takes its contents."""
    listed = site.contents((ROOT / site.INDEX).read_text(), set(PAGES))
    names = re.findall(r"^([\w/.-]+)$", listed, re.MULTILINE)
    assert len(names) == len(set(names))
    assert set(names) == {site.placed(page).removesuffix(".md") for page in PAGES} - {"index"}


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("docs/README.md", "index.md"),
        ("docs/howto/engines.md", "howto/engines.md"),
        ("README.md", "readme.md"),
        ("examples/gangs/README.md", "examples/gangs.md"),
        ("docs/figures/demo.svg", "figures/demo.svg"),
        ("governor/config.schema.json", "files/governor/config.schema.json"),
    ],
)
def test_a_file_of_the_repository_has_a_place_in_the_site(path, place):
    assert site.placed(path) == place


def test_no_two_pages_have_the_same_place_in_the_site():
    assert len({site.placed(page) for page in PAGES}) == len(PAGES)


def test_each_finding_of_doctor_has_a_paragraph():
    """To fix a failure, add a paragraph below "What tidegate doctor finds", in the order of
    governor/doctor/checks.py.
    """
    text = (DOCS / "troubleshooting.md").read_text()
    _, _, findings = text.partition("## What `tidegate doctor` finds")
    parts = re.split(r"^### (.*)$", findings, flags=re.MULTILINE)[1:]
    assert parts[::2] == list(CHECKS)
    assert all(len(paragraph.split()) > 5 for paragraph in parts[1::2])


def test_lines_that_troubleshooting_quotes_are_in_the_code():
    """The fixed part of a message is quoted so that a reader can search for it, so it must match exactly."""
    text = (DOCS / "troubleshooting.md").read_text()
    table = text.partition("| the line says |")[2].partition("\n\n")[0]
    quoted = [
        code
        for row in table.splitlines()[2:]
        for code in re.findall("`([^`]+)`", row.split("|")[1])
    ]
    assert len(quoted) > 10
    sources = "\n".join(
        path.read_text()
        for package in ("oci_hook", "governor", "vdriver")
        for path in (ROOT / package).rglob("*.py")
    )
    # Join literals that span several lines. A placeholder stands for any text.
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    said = {
        "exit code: 75",
        "device node /dev/nvidia0",
    }  # a runtime's own message; a filled-in placeholder
    assert "device node {" in sources
    assert [words for words in quoted if words not in said and words not in sources] == []


@pytest.mark.parametrize(
    ("module", "heading"),
    [
        (vdriver.errors, "## The driver and its mirror"),
        (governor.errors, "## The governor and the command"),
    ],
)
def test_errors_and_their_statuses_are_in_the_reference(module, heading):
    """The hook's errors are checked by test_hook_shape.py."""
    page = (DOCS / "reference/errors.md").read_text().partition(heading)[2].partition("\n## ")[0]
    rows = {
        code: int(status)
        for code, status in re.findall(r"^\| `([a-z]+)` \| ([0-9]+) \|", page, re.MULTILINE)
    }
    declared = {
        kind.code: kind.status
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    if module is vdriver.errors:  # the module's base classes are never raised
        del declared["vdriver"], declared["internal"]
    assert rows == declared


def test_a_page_is_carried_into_the_site_with_its_links():
    text = (
        "See [it](../reference/errors.md#the-hook), [that](../../SECURITY.md), `[no](link.md)`,\n"
        "[a\nlicense](../../LICENSE), [out](https://example.org/x.md), [no\n\nlink](none.md).\n"
        "```text\n[not](this.md)\n```\n"
    )
    known = {"docs/reference/errors.md", "SECURITY.md"}
    page, wanted = site.carried("docs/howto/doctor.md", text, known)
    assert page.splitlines()[:3] == [
        "See [it](../reference/errors.md#the-hook), [that](../security.md), `[no](link.md)`,",
        "[a",
        "license](../files/LICENSE), [out](https://example.org/x.md), [no",
    ]
    assert "[not](this.md)" in page
    assert wanted == {"LICENSE"}
    with pytest.raises(ValueError, match=r"docs/howto/doctor\.md:1: gone\.md points to no file"):
        site.carried("docs/howto/doctor.md", "[x](gone.md)", known)


def test_assets_from_elsewhere_are_found_in_a_site(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="https://example.org/">fine</a><link rel="stylesheet" href="_static/x.css">'
        '<script src="//cdn.example.org/a.js"></script><img srcset="b.png 1x, HTTPS://example.org/c.png 2x">'
        "<style>\np{background:url('http://example.org/d.png')}\n</style>"
    )
    (tmp_path / "x.css").write_text(
        '/* url(http://fine) */ @import "https://fonts.example.org/e.css";\na{src:url(f.woff)}'
    )
    (tmp_path / "y.svg").write_text('<svg><image href="https://example.org/g.png"/></svg>')
    assert site.outside_assets(tmp_path) == [
        "a.html: //cdn.example.org/a.js",
        "a.html: HTTPS://example.org/c.png",
        "a.html: http://example.org/d.png",
        "x.css: https://fonts.example.org/e.css",
        "y.svg: https://example.org/g.png",
    ]


@pytest.mark.parametrize(
    ("text", "anchors"),
    [
        (
            "# A `code` heading\n## A: (b), c_d-e\n## A: (b), c_d-e\n",
            {"a-code-heading", "a-b-c_d-e", "a-b-c_d-e-1"},
        ),
        ("# [linked](x.md) words\n```sh\n# no heading\n```\n", {"linked-words"}),
        ("### mirror.in-force\n", {"mirrorin-force"}),
    ],
)
def test_anchors_are_those_of_a_forge(text, anchors):
    assert markdown.anchors(text) == anchors
