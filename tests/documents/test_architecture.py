"""docs/architecture.md is true: its rooms are those that import-linter checks, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpurun

TOP = Path(__file__).parents[2]
PACKAGE = Path(gpurun.__file__).parent
PAGE = (TOP / "docs/architecture.md").read_text()
NAMED = re.compile(r"`([^`\n]+)`")


def section(head: str) -> str:
    return PAGE.split(f"\n## {head}\n")[1].split("\n## ")[0]


def rooms_of_the_page() -> list[set[str]]:
    """The rooms of each row of the table, from top to bottom."""
    return [set(NAMED.findall(row)) for row in re.findall(r"^\| (`.*?) \|", section("Rooms"), re.MULTILINE)]


def rooms_that_are_checked() -> list[set[str]]:
    contract = (TOP / "pyproject.toml").read_text().split('name = "Rooms: who may import whom"')[1].split("[[")[0]
    layers = re.findall(r'^  "(.+)",$', contract, re.MULTILINE)
    return [{room.removeprefix("gpurun.") for room in layer.split(" | ")} for layer in layers]


def without_a_file(text: str) -> list[str]:
    """The modules in a text that the package does not have."""
    named = [each.removeprefix("gpurun/") for each in NAMED.findall(text) if re.fullmatch(r"[\w/]+\.py", each)]
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    return [each for each in named if not any(f"/{path}".endswith(f"/{each}") for path in found)]


def names_of_files(text: str) -> list[str]:
    """The constant parts of at least three letters of the files' names in a text."""
    paths = [each for each in NAMED.findall(text) if re.fullmatch(r"[\w./*-]+", each) and not each.endswith(".py")]
    parts = [part for path in paths for part in re.split(r"[/*]|\b(?:ID|UID|NAME|N)\b", path)]
    return [part.strip(".") for part in parts if len(part.strip(".")) > 2]


@pytest.fixture(scope="module")
def code() -> str:
    return "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))


def test_rooms_are_those_that_import_linter_checks():
    assert rooms_of_the_page() == rooms_that_are_checked()


def test_every_room_is_in_the_table():
    tree = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert tree - set().union(*rooms_of_the_page()) == set()


def test_modules_exist():
    assert without_a_file(PAGE) == []
    assert without_a_file("`head/looks.py` and `head/nobody.py`") == ["head/nobody.py"]


def test_each_everyday_change_names_files_that_exist():
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section("Where do I change …"), re.MULTILINE)[1:]
    assert len(rows) > 20
    for change, files in rows[1:]:
        named = [each for each in NAMED.findall(files) if each.endswith(".py")]
        assert 0 < len(named) <= 4, change
        assert [each for each in named if not (PACKAGE / each).is_file()] == [], change


def test_the_code_has_the_names_of_files(code):
    names = names_of_files((TOP / "docs/reference/state-directory.md").read_text())
    assert len(set(names)) > 50
    assert [name for name in names if name not in code] == []
