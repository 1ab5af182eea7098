"""The documentation as a site: every page is reached, every link leads somewhere, and no other server is asked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "use": "href"}


class Loaded(HTMLParser):
    """What a page asks for when it is opened, and the text of its article."""

    def __init__(self, page):
        super().__init__()
        self.urls = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag in LOADS and found.get("rel") != "canonical":
            self.urls.append(found.get(LOADS[tag]) or "")


def build(top, folder):
    """Build a site as `make site` does: a warning is an error. With ``--quiet``, MkDocs itself would not see it."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=top,
        capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of the documentation."""
    folder = tmp_path_factory.mktemp("site")
    done = build(TOP, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_links_that_lead_nowhere_are_errors(tmp_path):
    rules = re.search(r"^validation:\n(?:  .*\n)+", (TOP / "mkdocs.yml").read_text(), re.MULTILINE)[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\n{rules}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# x\n\n[x](index.md#nowhere) [y](nothing.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1 and "#nowhere" in done.stderr and "nothing.md" in done.stderr


def test_every_page_of_the_documentation_is_in_the_site(site):
    pages = [page.relative_to(TOP / "docs").with_suffix(".html") for page in TOP.glob("docs/**/*.md")]
    assert len(pages) > 50
    assert [page for page in pages if not (site / str(page).replace("README", "index")).is_file()] == []


def test_a_page_loads_nothing_from_another_server(site):
    urls = {url for page in site.rglob("*.html") for url in Loaded(page).urls}
    assert len(urls) > 10
    assert [url for url in urls if re.match(r"(\w+:)?//", url)] == []
    styles = [sheet for kind in ("*.css", "*.svg") for sheet in site.rglob(kind)]
    assert [sheet for sheet in styles if re.search(r"""url\(["']?(https?:)?//""", sheet.read_text())] == []


def test_no_markdown_is_left_in_the_text(site):
    """Python-Markdown wants a blank line before a list or a table, and four spaces below a list's item."""
    left = {}
    for page in site.rglob("*.html"):
        article = re.search(r"<article.*?</article>", page.read_text(), re.DOTALL)
        text = re.sub(r"<(pre|code)\b.*?</\1>|<!--.*?-->", "", article[0] if article else "", flags=re.DOTALL)
        found = re.findall(r"^(?:```.*|\|[ -]*-{3}.*|[-*] \w.*|\d+\. .*)$|\*\*\w+", text, re.MULTILINE)
        if found:
            left[page.name] = found
    assert left == {}
