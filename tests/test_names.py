"""One name for one thing."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import gpurun

ROOT = Path(gpurun.__file__).parent


def test_no_two_classes_have_one_name():
    where = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        for name in re.findall(r"^ *class (\w+)", path.read_text(), re.MULTILINE):
            where[name].append(str(path.relative_to(ROOT)))
    assert len(where) > 300
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}
