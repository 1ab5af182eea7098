"""What a room's docstring lists is in the room."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gpurun

ROOMS = sorted(Path(gpurun.__file__).parent.glob("**/__init__.py"))
NAMES = re.compile(r"([a-z_0-9]+…?)((?:, [a-z_0-9]+…?)*)(?:$|  )")


def listed(text):
    """The names at the beginning of the lines of a docstring's list."""
    lines = text.split("\n")[2:]
    if not any(re.match(r"\S+(, \S+)*  +\S|  +\S", line) for line in lines):
        return []
    return [name for line in lines if (found := NAMES.match(line)) for name in (found[1] + found[2]).split(", ")]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.parent.name))
def test_a_docstring_lists_modules_that_exist(room):
    text = ast.get_docstring(ast.parse(room.read_text())) or ""
    modules = {each.stem for each in room.parent.iterdir() if each.suffix == ".py" or each.is_dir()}
    for name in listed(text):
        assert any(each.startswith(name.rstrip("…")) if name.endswith("…") else each == name for each in modules), name


def test_the_lists_are_read():
    text = ast.get_docstring(ast.parse((Path(gpurun.__file__).parent / "supervisor" / "__init__.py").read_text()))
    assert {"life", "outputs", "log_copy"} <= set(listed(text))
