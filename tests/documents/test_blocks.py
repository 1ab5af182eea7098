"""The YAML and Python blocks of the documents: whole lines were once lost in them, and nobody noticed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from gpurun.inventory.load import parse

TOP = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(yaml|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted([TOP / "README.md", *TOP.glob("docs/**/*.md"), *TOP.glob("recipes/**/*.md")])


def blocks() -> list[tuple[str, str, str]]:
    return [
        (f"{page.relative_to(TOP)}: {text.splitlines()[0]}", kind, text)
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text())
    ]


def test_blocks_can_be_read():
    found = blocks()
    assert {kind for _, kind, _ in found} == {"yaml", "python"}
    for place, kind, text in found:
        try:
            if kind == "python":
                ast.parse(text)
            else:
                list(yaml.compose_all(text, Loader=yaml.CSafeLoader))
        except (SyntaxError, yaml.YAMLError) as error:
            pytest.fail(f"{place}: {error}")


def test_whole_inventories_in_blocks_are_valid():
    whole = [text for _, kind, text in blocks() if kind == "yaml" and text.startswith("version: 1\n")]
    assert whole
    for text in whole:
        assert parse(text.encode(), Path("/inventory.yaml")).hosts
