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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make site` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)], cwd=TOP,
        capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


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
