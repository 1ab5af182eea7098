"""The YAML and Python blocks of the documents: whole lines were once lost in them, and nobody noticed."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
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


SWEEP = re.compile(r"gpurun sweep (?:run )?recipes/([\w-]+) ([^#`\n]*)")


def unknown_to(program: str, words: list[str]) -> list[str]:
    """The parameters that a sweep sets and its metric, unless the program reads and reports them."""
    tree = ast.parse(program)
    names = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    reports = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("report")
    ]
    metrics = {keyword.arg for call in reports for keyword in call.keywords}
    calls_parameters = any(isinstance(node, ast.Attribute) and node.attr == "parameters" for node in ast.walk(tree))
    flags = list(itertools.pairwise(words))
    set_here = [value.partition("=")[0] for flag, value in flags if flag == "--grid"]
    metric = [value.partition(":")[0] for flag, value in flags if flag == "--metric"]
    return [each for each in set_here if not (calls_parameters and each in names)] + [
        each for each in metric if each not in metrics
    ]


def test_sweeps_of_recipes_set_what_the_program_reads_and_compare_what_it_reports():
    """A sweep once stood in README whose trials all trained the same network, and failed."""
    shown = {found for page in PAGES for found in SWEEP.findall(page.read_text())}
    assert any("--grid" in words for _, words in shown)
    for recipe, words in shown:
        program = (TOP / "recipes" / recipe / "train.py").read_text()
        assert unknown_to(program, shlex.split(words)) == [], (recipe, words)


def test_a_sweep_that_the_program_does_not_know_is_seen():
    words = ["--grid", "lr=1,2", "--metric", "accuracy:max"]
    assert unknown_to("gpurun.progress(1, accuracy=1)", words) == ["lr", "accuracy"]
    assert unknown_to("gpurun.parameters()['lr']; gpurun.report(1, accuracy=1)", words) == []
