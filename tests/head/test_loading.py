"""A process that outlives commands loads all of its code at its start: pip may replace the files afterwards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

import gpurun
from gpurun.head import children, loading, looking, waiter
from gpurun.studies import sweep_main as conductor
from gpurun.supervisor import __main__ as supervisor

TOP = Path(gpurun.__file__).parent
ELSEWHERE = {"gpurun.failing", "gpurun.head.loading", "gpurun.studies.study", "optuna", "paramiko"}
"""For tests alone; in what each process runs first; imported by the conductor as it begins; an extra; in a `with` of
`paramiko_quietly`.
"""


def file_of(name):
    """The file of a module of gpurun; None = it is none."""
    place = TOP.parent.joinpath(*name.split("."))
    found = [path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()]
    return found[0] if found and name.split(".")[0] == "gpurun" else None


IMPORT = re.compile(r"^( *)(?:from (\S+) import (\([^)]*\)|.*)|import (.*))$", re.MULTILINE)
FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:(?: .*)?\n)+", re.MULTILINE)


@cache
def named(path, late):
    """Names that a module's imports mention: some are modules, some are what is in these.

    Args:
        late: also the imports in functions.
    """
    found = set()
    for indent, module, parts, modules in IMPORT.findall(FOR_TYPES.sub("", path.read_text())):
        if late or not indent:
            words = re.sub(r"#.*| as \w+|[()]", "", parts or modules).replace(",", " ").split()
            found |= {module, *(f"{module}.{word}" for word in words)} if module else set(words)
    return found


def reached(starts, late):
    """Modules that these imports reach: gpurun's, and others by their packages."""
    found, waiting = set(), list(starts)
    while waiting:
        name = waiting.pop()
        path = file_of(name)
        if name in found or name in ELSEWHERE or name.split(".")[0] in {*sys.stdlib_module_names, *ELSEWHERE}:
            continue
        if path is None:
            found |= {name.split(".")[0]} - {"gpurun"}
            continue
        found.add(name)
        waiting += [*named(path, late), *(name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1))]
    return found


def test_what_a_process_can_need_later_it_loads_at_its_start():
    late = {}
    for process in (supervisor, waiter, looking, conductor):
        needs, loads = reached([process.__name__], late=True), reached([process.__name__, *process.LATE], late=False)
        late[process.__name__] = needs - loads
        assert needs - reached([process.__name__], late=False) >= {*process.LATE} & needs > set()
    assert not any(late.values()), late


@pytest.mark.parametrize(
    ("changed_s", "is_fresh"),
    [(0.0, False), (98.0, False), (98.1, True), (100.0, True), (102.0, True), (102.1, False), (1e9, False)],
)
def test_files_that_changed_just_before_or_during_the_imports_are_fresh(changed_s, is_fresh):
    """One from the future says nothing: the clock was set back."""
    assert loading.is_fresh(changed_s, begun_s=100.0, now_s=102.0) is is_fresh


def test_the_newest_file_of_all_modules_counts_and_one_that_is_gone_is_an_error(monkeypatch, tmp_path):
    file = tmp_path / "it's; mine.py"
    file.touch()
    added = type(sys)("added")
    monkeypatch.setitem(sys.modules, "added", added)
    for place, expected in ((None, False), ("built-in", False), (str(file), True)):
        added.__file__ = place
        assert (loading.newest_change_s() == file.stat().st_ctime) is expected
    with pytest.raises(ImportError, match="files of two versions") as caught:
        loading.load("gpurun.head.looking")
    assert caught.value.name == "gpurun.head.looking"
    file.unlink()
    with pytest.raises(FileNotFoundError):
        loading.newest_change_s()


HALVES = [None, {}, {"__init__.py": ""}, *(
    {"__init__.py": "", "head/__init__.py": "", "head/loading.py": text}
    for text in ("", "SyntaxError(", "import gpurun.missing", "def load(name):\n    gpurun.missing", "raise OSError")
)]  # fmt: skip
WHOLE = {**HALVES[-1], "head/loading.py": "def load(name):\n    return lambda words: print(name, *words) or 7\n"}


@pytest.mark.parametrize("half", HALVES)
def test_a_process_that_starts_while_gpurun_is_replaced_waits_for_the_new_one(half, tmp_path, real_starts):
    """In the place of the pause, pip makes the installation whole."""
    for folder, files in (("gpurun", half), ("new", WHOLE)):
        if files is not None:
            (tmp_path / folder / "head").mkdir(parents=True)
            for name, text in files.items():
                (tmp_path / folder / name).write_text(text)
    swap = "os.path.exists('gpurun') and os.rename('gpurun', 'old'); os.rename('new', 'gpurun')"
    code = children.START.format(until=time.monotonic() + 60).replace("time.sleep(1)", swap)
    words = ["it's", "$HOME", "", "*", "ü"]
    done = subprocess.run(
        [sys.executable, "-Sc" + code, "a.module", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ".", "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (7, f"a.module {' '.join(words)}\n", "")


def test_after_a_minute_it_says_what_is_missing(tmp_path, real_starts):
    code = children.START.format(until=time.monotonic())
    done = subprocess.run(
        [sys.executable, "-Sc" + code, "gpurun.supervisor"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.endswith("No module named 'gpurun'\n")
