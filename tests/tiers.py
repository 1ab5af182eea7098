"""Plugin: which lab tests a change needs. `make test-change` and `.ci/run` use it: `pytest --change BASE`.

- A lab test marked `story` runs in `make test`, so it is left out here.
- A lab test runs if the change touches a room that its file is about, its file, or a file that helps its file. A
  module of which only comments and docstrings change does not count.
- A lab test marked `alone` judges seconds, and nothing runs beside it: its rooms do not count, only its file does.
- Of the others a fifth runs: the fifth whose number is the count of first-parent commits modulo 5. So five changes
  run each lab test at least once.
"""

from __future__ import annotations

import ast
import subprocess
import zlib
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

TOP = Path(__file__).parents[1]
FIFTHS = 5
SESSION = timedelta(hours=3)
"""Without a base, a change is all commits that are at most so much older than the newest one."""

ROOMS = {
    "test_behind_one_jump": "remote",
    "test_bench": "doctor node",
    "test_broken_hosts": "head supervisor doctor leases",
    "test_caches": "node launch supervisor",
    "test_causes": "supervisor node facts doctor",
    "test_long_log": "supervisor node",
    "test_chosen": "launch head",
    "test_claims": "leases node supervisor",
    "test_crashes": "supervisor leases head state faults",
    "test_data": "content",
    "test_doctor": "doctor node facts",
    "test_drain": "scheduler supervisor inventory",
    "test_elastic": "supervisor launch node",
    "test_elastic_anew": "supervisor scheduler",
    "test_environments": "content",
    "test_faults": "supervisor node",
    "test_fresh": "ci",
    "test_hang": "supervisor node runtime",
    "test_hooks": "node supervisor doctor",
    "test_hostile_container": "node supervisor",
    "test_hostile_host": "remote node content",
    "test_image": "recipes",
    "test_inventory_under_a_gang": "supervisor inventory",
    "test_jobs": "supervisor launch jobs remote",
    "test_lab": "lab",
    "test_lab_killed": "lab",
    "test_launchers": "launch node",
    "test_neighbours": "launch node",
    "test_own_launchers": "launch",
    "test_pinned": "content jobs",
    "test_power_cuts": "supervisor node",
    "test_beside": "supervisor node",
    "test_python_api": "api",
    "test_rank_containers": "node launch",
    "test_rank_ends": "launch node",
    "test_real_hosts": "node remote inventory",
    "test_recipes": "recipes launch",
    "test_rehearsal": "supervisor",
    "test_remote": "remote",
    "test_renamed_hosts": "leases state cli",
    "test_rerun": "jobs",
    "test_meeting": "supervisor node launch",
    "test_second_launcher": "supervisor node",
    "test_retry": "supervisor jobs launch",
    "test_roles": "launch",
    "test_scale": "studies scaling",
    "test_several_users": "head state",
    "test_slow": "supervisor node runtime lab",
    "test_ship": "content node",
    "test_ship_engines": "content node",
    "test_ship_many": "content node",
    "test_ssh_transports": "remote",
    "test_sweep": "studies",
    "test_tensorboard": "views",
    "test_tensorflow": "launch recipes",
    "test_tutorial": "cli",
    "test_requeue": "head supervisor scheduler",
    "test_upgrade": "head supervisor studies remote",
    "test_users": "head state leases",
}
"""File of lab tests -> what it is about: packages of gpurun, `recipes`, or `ci` for the folder `.ci`."""


def room_of(path: str) -> str:
    """Return what a changed file belongs to: a package of gpurun, `recipes`, `ci`, or the stem of a file of tests."""
    first, *rest = Path(path).parts
    if first == "gpurun" and rest:
        return Path(rest[0]).stem
    if first == "tests":
        return Path(path).stem
    return {".ci": "ci", "recipes": "recipes"}.get(first, "")


def is_touched(file: str, text: str, touched: Iterable[str], *, alone: bool = False) -> bool:
    """Whether a change of these rooms and files of tests needs a test of the file with this stem and this text."""
    rooms = {file} if alone else {file, *ROOMS[file].split()}
    return any(each in rooms or f"\nfrom {each} import" in text for each in touched if each)


def fifth_of(test: str) -> int:
    """Return the fifth that a test belongs to: the same in each run, on each machine."""
    return zlib.crc32(test.encode()) % FIFTHS


def base_of(top: Path) -> str:
    """Return the newest commit of the first parents that is older than a session; else the oldest one."""
    newest = datetime.fromisoformat(_git(top, "show", "-s", "--format=%cI", "HEAD"))
    before = (newest - SESSION).isoformat()
    found = _git(top, "rev-list", "--first-parent", "-1", f"--before={before}", "HEAD")
    return found or _git(top, "rev-list", "--max-parents=0", "HEAD").splitlines()[0]


def rooms_changed(top: Path, base: str) -> set[str]:
    """Return what has changed since a commit: rooms, and files of tests."""
    paths = _git(top, "diff", "--name-only", "--no-renames", base, "HEAD").splitlines()
    before_after = ((path, _content(top, base, path), _content(top, "HEAD", path)) for path in paths)
    return {room_of(path) for path, before, after in before_after if not does_the_same(before, after)}


def _content(top: Path, commit: str, path: str) -> str | None:
    """Return a Python file as it is in a commit; None if it is another file, or is not there."""
    if not path.endswith(".py"):
        return None
    argv = ["git", "-C", str(top), "show", f"{commit}:{path}"]
    found = subprocess.run(argv, check=False, capture_output=True, text=True, errors="replace")
    return found.stdout if found.returncode == 0 else None


def does_the_same(one: str | None, other: str | None) -> bool:
    """Whether two texts of a module differ in nothing but comments, docstrings and layout."""
    try:
        return one is not None and other is not None and _statements(one) == _statements(other)
    except (SyntaxError, ValueError):  # one of them is no Python
        return False


def _statements(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not _is_docstring(each)]
    return ast.dump(tree)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _git(top: Path, *argv: str) -> str:
    return subprocess.run(["git", "-C", str(top), *argv], check=True, capture_output=True, text=True).stdout.strip()


def pytest_addoption(parser):
    parser.addoption(
        "--change", metavar="BASE", help="of the lab tests, run those that the change since this commit needs, and a"
        " fifth of the others; `session` is the newest commit that is three hours older than HEAD",
    )  # fmt: skip


def pytest_collection_modifyitems(config, items):
    base = config.getoption("--change")
    if base is None:
        return
    base = base_of(TOP) if base == "session" else base
    touched = rooms_changed(TOP, base)
    turn = int(_git(TOP, "rev-list", "--first-parent", "--count", "HEAD")) % FIFTHS
    texts = {path: path.read_text() for path in {item.path for item in items}}
    kept, left = [], []
    for item in items:
        is_lab, is_story, alone = (item.get_closest_marker(name) is not None for name in ("lab", "story", "alone"))
        needed = is_lab and (
            is_touched(item.path.stem, texts[item.path], touched, alone=alone)
            or fifth_of(item.nodeid.partition("@")[0]) == turn
        )
        (kept if needed and not is_story else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept
