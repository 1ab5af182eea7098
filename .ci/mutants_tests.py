"""Which quick test runs which line of the code, and a box to run some of these tests in. Part of `.ci/mutants.py`.

pytest loads this file as a plugin, too: it then names the running test to coverage, or runs the tests of one mutant.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[1]
PYTEST = (f"{TOP}/.venv/bin/python", "-m", "pytest", "-p", "mutants_tests", "-p", "no:cacheprovider", "-m", "not lab")
NOTICED = "noticed by "
COVERAGE = """[run]
include = {include}
parallel = true
data_file = {folder}/data
context = ${{PYTEST_CURRENT_TEST-}}
concurrency = thread,greenlet
sigterm = true
"""
# What the tests see: all files of this machine, and the mutant. What they write is in memory, and gone afterwards.
BOX = """set -e
mount -t tmpfs tmpfs "$1"; mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cp "$2/code" "$1/root/$3"
for name in dev sys; do mount --rbind "/$name" "$1/root/$name"; done
mount -t proc proc "$1/root/proc"
for name in tmp run; do mount -t tmpfs -o mode=1777 tmpfs "$1/root/$name"; done
cp "$2/tests" "$1/root/tmp/tests"
ip link set lo up
root="$1/root"; shift 3; exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$@"
"""
UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "bash", "-c", BOX, "box")


def make_map(to: Path, folders: Iterable[str], arguments: Sequence[str]) -> None:
    """Run the quick tests under coverage. Write which test runs which line, and how long each test takes."""
    with tempfile.TemporaryDirectory() as folder:
        include = ",".join(f"*/{each}/*" for each in folders)
        (Path(folder) / "rc").write_text(COVERAGE.format(include=include, folder=folder))
        environ = {**os.environ, "PYTHONPATH": f"{TOP}/.ci", "MUTANTS_SECONDS": f"{folder}/seconds"}
        command = [*PYTEST, "-n", "3", "--dist", "worksteal", *arguments]
        subprocess.run(command, cwd=TOP, env={**environ, "COVERAGE_PROCESS_START": f"{folder}/rc"}, check=False)
        write_map(to, Path(folder).glob("data.*"), json.loads((Path(folder) / "seconds").read_text()))


def write_map(to: Path, files: Iterable[Path], seconds: Mapping[str, float]) -> None:
    """Combine what all processes wrote. A process that a test starts inherits the test's name in its environment."""
    import coverage  # noqa: PLC0415  # no other command needs it

    lines: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for each in files:
        data = coverage.CoverageData(str(each))
        try:
            data.read()
        except coverage.CoverageException:  # its process was killed while it wrote
            continue
        for name in data.measured_files():
            for line, contexts in data.contexts_by_lineno(name).items():
                tests = {re.sub(r" \((setup|call|teardown)\)\Z", "", context) for context in contexts}
                lines["gpurun/" + name.rpartition("/gpurun/")[2]][line] |= tests - {""}
    sets = {name: {line: sorted(tests) for line, tests in found.items()} for name, found in lines.items()}
    to.write_text(json.dumps({"seconds": seconds, "lines": sets}))


def failing(file: str, text: str, tests: Sequence[str], also: Sequence[str], limit_s: float) -> str:
    """Run tests one after the other in a box, where this file of the code has this text.

    Args:
        file: the changed file, from the top of the clone.
        text: its text.
        tests: names of tests, in their order. Names of tests that do not exist are ignored.
        also: files whose tests run after these.
        limit_s: a run that takes longer fails.

    Returns:
        The first test that fails; empty if none does.
    """
    with tempfile.TemporaryDirectory() as folder:
        box, given = Path(folder) / "box", Path(folder) / "given"
        box.mkdir()
        given.mkdir()
        (given / "code").write_text(text)
        (given / "tests").write_text(json.dumps([tests, also]))
        files = sorted({*(test.partition("::")[0] for test in tests), *also})
        argv = [*PYTEST, "-x", *(each for each in files if (TOP / each).exists())]
        environ = {**os.environ, "PYTHONPATH": f"{TOP}/.ci", "MUTANTS_TESTS": "/tmp/tests"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            done = subprocess.run(
                [*UNSHARE, box, given, TOP / file, TOP, *argv],
                env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end within {limit_s:.0f} s"
    named = [line.removeprefix(NOTICED) for line in done.stdout.split("\n") if line.startswith(NOTICED)]
    if done.returncode in {0, pytest.ExitCode.NO_TESTS_COLLECTED}:
        return ""
    return named[0] if named else f"pytest's exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}"


SECONDS: dict[str, float] = {}
FAILED: list[str] = []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Name the test to coverage."""
    if (coverage := sys.modules.get("coverage")) and (current := coverage.Coverage.current()):
        current.switch_context(item.nodeid)
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a mutant, in their order."""
    if (path := os.environ.get("MUTANTS_TESTS")) is None:
        return
    tests, also = json.loads(Path(path).read_text())
    order = {test: number for number, test in enumerate(tests)}
    kept = [item for item in items if item.nodeid in order or item.nodeid.partition("::")[0] in also]
    items[:] = sorted(kept, key=lambda item: order.get(item.nodeid, len(order)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up how long a test takes; keep those that fail."""
    SECONDS[report.nodeid] = round(SECONDS.get(report.nodeid, 0.0) + report.duration, 3)
    if report.failed:
        FAILED.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A test file that cannot even be imported notices the mutant, too."""
    if report.failed:
        FAILED.append(f"{report.nodeid}, which cannot be imported")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write what was seen."""
    for test in FAILED[:1]:
        terminalreporter.write_line(f"\n{NOTICED}{test}")
    if path := os.environ.get("MUTANTS_SECONDS"):
        Path(path).write_text(json.dumps(SECONDS))
