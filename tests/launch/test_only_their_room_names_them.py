"""No room but the launchers' own asks which launcher a job has: it asks the value what it needs to know."""

from __future__ import annotations

import ast
from pathlib import Path

import gpurun
from gpurun.launch.launchers import NAMES

HERE = Path(gpurun.__file__).parent
ROOM = HERE / "launch/launchers"
NOT_THE_LAUNCHER = {
    "jobs/spec.py": "what a job is started by that says nothing",
    "jobs/recipe_keys.py": "an example of the documents",
    "jobs/recipe.py": "the recipe's section of Horovod's knobs",
    "studies/campaign_plan.py": "the recipe's section of Horovod's knobs",
    "cli/completion.py": "the program that `gpurun bench` has the gang run",
    "cli/inventory_edit.py": "a file format",
    "inventory/exports.py": "a file format",
    "cli/foreign.py": "words that people type in the place of a command",
    "doctor/bench_job/bench.py": "runs in the container: modules of Python",
}


def named(source: str) -> set[str]:
    """The launchers whose names are values in a text of Python."""
    if not any(name in source for name in NAMES):
        return set()
    return {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)} & {*NAMES}


def test_no_other_room_knows_a_launchers_name():
    found = {
        str(path.relative_to(HERE)): names
        for path in HERE.rglob("*.py")
        if not path.is_relative_to(ROOM) and (names := named(path.read_text()))
    }
    assert found.keys() <= NOT_THE_LAUNCHER.keys(), found


def test_it_would_be_seen():
    assert named('if spec.launcher == "torchrun": pass') == {"torchrun"}
    assert named("# torchrun\nx = 'torchruns'") == set()
