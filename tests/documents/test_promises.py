"""docs/promises.md names the tests that hold each promise: they exist, and `make test` runs one for each promise."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs/promises.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@cache
def found_in(path):
    """Test functions of a file -> whether they are stories of the lab, and whether they need a lab."""
    tree = ast.parse((TOP / path).read_text())
    module = " ".join(ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = module + " ".join(map(ast.unparse, node.decorator_list))
            found[node.name] = ("mark.story" in marks, "mark.lab" in marks)
    return found


def sections():
    """Promise -> its text."""
    parts = re.split(r"^### (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def promised():
    """What README.md and docs/reliability.md promise, and the heads of the reasons in docs/evidence.md."""
    readme = (TOP / "README.md").read_text().split("## What it promises\n")[1].split("\n## ")[0]
    relied = (TOP / "docs/reliability.md").read_text().split("## What you can rely on\n")[1].split("\n## ")[0]
    reasons = (TOP / "docs/evidence.md").read_text().split("## Why each promise holds\n")[1].split("\n## ")[0]
    heads = [re.findall(r"^(?:- )?\*\*(.+?)\*\*", text, re.MULTILINE) for text in (relied, reasons)]
    assert len(heads[0]) > 5 and set(heads[0]) <= set(heads[1])
    bullets = re.findall(r"^- (.+(?:\n  .+)*)$", readme, re.MULTILINE)
    return [*(each.replace("\n  ", " ") for each in bullets), *heads[1]]


@pytest.mark.parametrize("promise", promised())
def test_the_page_has_each_promise(promise):
    assert promise.replace("*", "") in [each.replace("*", "") for each in sections()]


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED.findall(PAGE))))
def test_each_test_that_the_page_names_exists(path, name):
    assert (TOP / path).is_file()
    assert not name or name in found_in(path)


@pytest.mark.parametrize("promise", sections())
def test_make_test_runs_a_test_of_each_promise(promise):
    named = NAMED.findall(sections()[promise])
    runs = [
        is_story or not needs_lab
        for path, name in named
        for each, (is_story, needs_lab) in found_in(path).items()
        if name in ("", each)
    ]
    assert any(runs), named


def test_each_story_holds_a_promise_of_the_page():
    stories = {
        (str(path.relative_to(TOP)), name)
        for path in [*TOP.glob("tests/lab/test_*.py"), *TOP.glob("tests/recipes/test_*.py")]
        for name, (is_story, _) in found_in(path.relative_to(TOP)).items()
        if is_story
    }
    assert stories - set(NAMED.findall(PAGE)) == set()
