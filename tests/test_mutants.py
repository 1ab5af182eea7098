"""`.ci/mutants.py` changes one place of a file, and finds it again in a later version."""

from __future__ import annotations

import ast

import mutants
import pytest

FILE = mutants.TOP / "gpurun/supervisor/verdict/ends.py"
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="gpurun is the wheel's, and mutants change a clone's")


@pytest.fixture(scope="module")
def of_file():
    return list(mutants.mutants_of(FILE))


def test_each_mutant_is_another_program(of_file):
    sound = ast.dump(ast.parse(FILE.read_text()))
    changed = [ast.dump(ast.parse(mutant.applied(FILE.read_text()))) for mutant in of_file]
    assert sound not in changed and len(changed) > 20
    assert {"boundary", "comparison", "condition", "return"} <= {mutant.kind for mutant in of_file}


def test_a_mutant_is_found_again_while_its_lines_are_the_same(of_file):
    text, mutant = FILE.read_text(), of_file[-1]
    assert mutant.applied(f"import os\n\n{text}") == f"import os\n\n{mutant.applied(text)}"
    assert mutant.applied(text.replace(mutant.before, "")) is None


def test_each_kind_of_change_names_what_it_replaces():
    text = "def f(a, b):\n    if not a:\n        b = a + 1\n    return a <= b and a\n"
    found = [
        (kind, new) for node, inside in mutants.nodes(ast.parse(text)) for kind, _, new in mutants.changes(node, inside)
    ]
    assert sorted(found) == [
        ("and/or", "(a <= b or a)"), ("boundary", "(a < b)"), ("comparison", "(a > b)"), ("condition", "(a)"),
        ("constant", "(2)"), ("deleted", "pass"), ("plus/minus", "(a - 1)"), ("return", "return None"),
    ]  # fmt: skip
