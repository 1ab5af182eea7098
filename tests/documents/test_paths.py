"""Files that the documents name exist: programs, tests, recipes, and what links lead to."""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).parents[2]
PAGES = [*TOP.glob("*.md"), *sorted(TOP.glob("docs/**/*.md")), *sorted(TOP.glob("recipes/**/*.md"))]
NAMED = re.compile(r"(?<![\w./@-])((?:gpurun|tests|benchmarks|recipes|docs|\.ci)/[\w.*/-]*\w)(?!\w|:\w)")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")
OTHERS = {"docs/benchmarks.rst", "docs/benchmarks.md", "gpurun/inventory.yaml", "recipes/NAME"}
"""A file of Horovod, one of users, and a placeholder. Images have a colon behind their name."""


def missing(text: str, page: Path) -> list[str]:
    """The files that a page names or links to, and that are not there."""
    named = [path for path in NAMED.findall(text) if path not in OTHERS and not [*TOP.glob(path)]]
    return named + [link for link in LINK.findall(text) if not (page.parent / link).exists()]


def test_every_file_that_a_page_names_is_there():
    found = {str(page.relative_to(TOP)): missing(page.read_text(), page) for page in PAGES}
    assert {page: files for page, files in found.items() if files} == {}


def test_a_missing_file_is_seen():
    text = (
        "`tests/test_nothing.py`, `gpurun submit recipes/no-such`, [x](no.md#y), `gpurun/tiny:1`, `tests/lab/test_*.py`"
    )
    assert missing(text, TOP / "README.md") == ["tests/test_nothing.py", "recipes/no-such", "no.md"]
