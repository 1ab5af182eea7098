"""One name for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import gpurun

ROOT = Path(gpurun.__file__).parent


def test_no_two_classes_have_one_name():
    where = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(path.relative_to(ROOT)))
    assert len(where) > 300
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}
