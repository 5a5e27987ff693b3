"""Builds build/docs, a web site, from the Markdown pages of the repository.

`python tools/docs_site.py` needs Sphinx (`make docs` installs it) and no network. Pages are copied
to their places in the site (`placed`), and their links are adjusted; the list in docs/README.md
becomes the site's table of contents. Every Sphinx warning is an error, and so is a page that is
not listed, or an asset from another site.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import markdown  # noqa: E402

INDEX = "docs/README.md"
STAGE = ROOT / "build/docs-pages"
OUTPUT = ROOT / "build/docs"

CONF = """\
project = "Tidegate"
version = release = {version!r}
extensions = ["myst_parser"]
root_doc = "index"
html_theme = "furo"
html_title = "Tidegate"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {{"navigation_with_keys": True}}
myst_heading_anchors = 4
# A block of JSON with "..." in it is not JSON, and is shown without highlighting.
suppress_warnings = ["misc.highlighting_failure"]
"""


def placed(path: str) -> str:
    """Return the path of a repository file in the site."""
    if path == INDEX:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not path.endswith(".md"):
        return f"files/{path}"
    directory, _, name = path.rpartition("/")
    return f"{directory}.md" if directory and name == "README.md" else path.lower()


def carried(path: str, text: str, known: set[str]) -> tuple[str, set[str]]:
    """Return a page with its links adjusted to the site, and the files that they point to."""
    rewritten, wanted = {}, set()
    here = PurePosixPath(placed(path)).parent
    for link in markdown.links(text):
        if link.outside or not link.path:
            continue
        target = os.path.normpath(PurePosixPath(path).parent / link.path)
        if (ROOT / target).is_dir():
            target = os.path.normpath(f"{target}/README.md")
        if not (ROOT / target).is_file():
            raise ValueError(f"{path}:{link.line}: {link.target} points to no file")
        if target not in known:
            wanted.add(target)
        anchor = f"#{link.anchor}" if link.anchor else ""
        rewritten[link.target] = os.path.relpath(placed(target), here) + anchor
    return markdown.with_links(text, rewritten), wanted


def contents(text: str, pages: set[str]) -> str:
    """Return Sphinx's tables of contents: a caption for each heading, a line for each page.

    A page is listed where it is first linked. A README.md below a listed directory needs no line in
    the index, so that the index need not change when an example is added.
    """
    tables: list[tuple[str, list[str]]] = []
    seen = {INDEX}
    lines = text.splitlines()
    listed: dict[int, list[markdown.Link]] = {}
    for link in markdown.links(text):
        listed.setdefault(link.line, []).append(link)
    for line in markdown.prose(text):
        heading = markdown.HEADING.match(lines[line.number - 1])
        if heading and len(heading[1]) == 2:
            tables.append((heading[2], []))
        for link in listed.get(line.number, ()):
            if link.outside or not link.path or not tables:
                continue
            target = os.path.normpath(PurePosixPath(INDEX).parent / link.path)
            below = sorted(page for page in pages if page.startswith(f"{target}/"))
            for page in below if (ROOT / target).is_dir() else [target]:
                if page in pages and page not in seen:
                    seen.add(page)
                    tables[-1][1].append(placed(page).removesuffix(".md"))
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(names) + "\n```\n"
        for caption, names in tables
        if names
    )


def stage(directory: Path) -> None:
    """Copy the pages to their places in the site, with the files to which they link."""
    shutil.rmtree(directory, ignore_errors=True)
    texts = {
        page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
        for page in markdown.pages()
    }
    for path, text in texts.items():
        page, wanted = carried(path, text, set(texts))
        if path == INDEX:
            page += contents(text, set(texts))
        target = directory / placed(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
        for name in wanted:
            copy = directory / placed(name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (directory / "conf.py").write_text(
        CONF.format(version=project.get("version", "")), encoding="utf-8"
    )


class _Assets(HTMLParser):
    """Collects the URLs that a browser would fetch on its own to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            followed = tag == "a" or (tag == "link" and ("rel", "canonical") in attrs)
            if value and name in {"src", "href", "data", "poster"} and not followed:
                self.found.append(value)
            elif value and name == "srcset":
                self.found += [part.split()[0] for part in value.split(",") if part.strip()]
            elif value and name == "style":
                self.found += styled(value)


def styled(sheet: str) -> list[str]:
    """Return the URLs that a style sheet makes a browser fetch."""
    sheet = re.sub(r"/\*.*?\*/", "", sheet, flags=re.DOTALL)
    urls = re.findall(r"""url\(\s*["']?([^"')]+)""", sheet)
    return urls + re.findall(r"""@import\s+["']([^"']+)""", sheet)


def outside_assets(site: Path) -> list[str]:
    """Return the URLs that pages, style sheets and drawings would fetch from other sites."""
    faults = []
    for file in sorted(site.rglob("*")):
        if file.suffix not in {".html", ".css", ".svg"}:
            continue
        text = file.read_text(encoding="utf-8")
        reader = _Assets()
        if file.suffix != ".css":
            reader.feed(text)
        styles = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
        sheets = [text] if file.suffix == ".css" else styles
        fetched = reader.found + [url for sheet in sheets for url in styled(sheet)]
        faults += [
            f"{file.relative_to(site)}: {url}"
            for url in fetched
            if re.match(r"([a-z+.-]+:)?//", url, re.IGNORECASE)
        ]
    return faults


def main() -> int:
    """Build the site from scratch; return the exit status."""
    try:
        stage(STAGE)
    except ValueError as e:
        print(f"docs_site: {e}")
        return 1
    shutil.rmtree(OUTPUT, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-b", "html"]
    doctrees = ROOT / "build/docs-trees"
    done = subprocess.run([*command, "-d", doctrees, STAGE, OUTPUT], check=False, cwd=ROOT)
    if done.returncode:
        return 1
    faults = outside_assets(OUTPUT)
    if faults:
        print("docs_site: assets from elsewhere:", *faults, sep="\n  ")
        return 1
    count = len(list(OUTPUT.rglob("*.html")))
    print(f"{OUTPUT.relative_to(ROOT)}/index.html and {count - 1} more pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
