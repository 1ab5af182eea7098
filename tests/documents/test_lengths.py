"""Documents stay short: words of README, CHANGELOG and the guides, and characters of a line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
EVIDENCE = {"evidence.md", "scheduler-evidence.md", "scaling-evidence.md"}
GUIDES = [page for page in sorted((TOP / "docs").glob("*.md")) if page.name not in EVIDENCE]
PAGES = [*(TOP / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
PAGES += [*sorted((TOP / "docs").glob("*.md")), *sorted((TOP / "docs/reference").glob("*.md"))]
PAGES += sorted((TOP / "recipes").glob("**/*.md"))
FENCED = re.compile(r"^( *)```.*?^ *```$", re.MULTILINE | re.DOTALL)
UNBREAKABLE = re.compile(r"\s*(?:[-*] )?\S+\Z")
LONGEST_LINE = 120


def long_lines(text: str) -> list[str]:
    """The lines of prose that are too long. Code, tables, headings and single words cannot be broken."""
    lines = FENCED.sub("", text).splitlines()
    prose = [line for line in lines if not line.lstrip().startswith(("|", "#")) and not UNBREAKABLE.match(line)]
    return [line for line in prose if len(line) > LONGEST_LINE]


@pytest.mark.parametrize(
    ("pages", "most"),
    [(["README.md"], 900), (["CHANGELOG.md"], 900), (GUIDES, 25_000)],
    ids=["README", "CHANGELOG", "guides"],
)
def test_words(pages, most):
    words = {str(page): len((TOP / page).read_text().split()) for page in pages}
    assert sum(words.values()) <= most, words


def test_lines():
    found = {str(page.relative_to(TOP)): long_lines(page.read_text()) for page in PAGES}
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_a_long_line_is_seen():
    word, line = "a" * 121, " ".join(["word"] * 30)
    assert long_lines(f"# {line}\n| {line} |\n- {word}\n```console\n$ {line}\n```\n  {line}\n") == [f"  {line}"]
