"""Whoever writes past a buffer sees how much was written: a disk that fills within a write writes a part, without an
error."""

from __future__ import annotations

import ast
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gpurun
from gpurun.errors import StateError
from gpurun.node.probe import probe
from gpurun.runtime import gpurun_runtime
from gpurun.state import durable
from gpurun.state.paths import StatePath

GPURUN = Path(gpurun.__file__).parent
WRITES = {"write", "pwrite", "writev", "pwritev", "sendfile", "copy_file_range", "splice"}
STDERR = 2


def is_small(call: ast.Call) -> bool:
    """One byte is written or not; of what goes to stderr, a part is better than nothing."""
    to, data = call.args[0], call.args[-1]
    is_byte = isinstance(data, ast.Constant) and isinstance(data.value, bytes) and len(data.value) == 1
    return is_byte or (isinstance(to, ast.Constant) and to.value == STDERR)


def is_raw(opened: ast.expr) -> bool:
    """Whether an expression opens a file or a pipe without a buffer."""
    if not isinstance(opened, ast.Call):
        return False
    name = ast.unparse(opened.func).rpartition(".")[2]
    sizes = [each.value for each in opened.keywords if each.arg in ("buffering", "bufsize")]
    sizes += opened.args[1:] if name in ("open", "fdopen") else []
    return name == "FileIO" or any(isinstance(size, ast.Constant) and size.value == 0 for size in sizes)


def raw_names(tree: ast.AST) -> set[str]:
    """The names that are given to such files."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and is_raw(node.context_expr) and node.optional_vars is not None:
            found.add(ast.unparse(node.optional_vars))
        elif isinstance(node, ast.Assign) and is_raw(node.value):
            found |= {ast.unparse(target) for target in node.targets}
    return found


def dropped(statement: ast.AST) -> list[ast.expr]:
    """The expressions of a statement whose values nobody takes."""
    if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["_"]:
        return [statement.value]
    if not isinstance(statement, ast.Expr):
        return []
    return statement.value.values if isinstance(statement.value, ast.BoolOp) else [statement.value]


def unseen(source: str) -> list[str]:
    """The calls that write past a buffer and whose result nobody takes."""
    tree = ast.parse(source)
    kept = {name for name in raw_names(tree) if "." in name}
    found = {}
    outside = [
        each for each in tree.body if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    scopes: list[ast.AST] = [ast.Module(outside, [])]
    scopes += [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for scope in scopes:
        raw = kept | raw_names(scope)
        for node in ast.walk(scope):
            if isinstance(node, ast.ImportFrom) and node.module == "os" and WRITES & {each.name for each in node.names}:
                found[node.lineno] = ast.unparse(node)  # under such a name, nobody finds the calls
            for call in dropped(node):
                if (
                    not isinstance(call, ast.Call)
                    or not isinstance(call.func, ast.Attribute)
                    or call.func.attr not in WRITES
                ):
                    continue
                whose = ast.unparse(call.func.value)
                if (whose == "os" and not is_small(call)) or whose.removesuffix(".stdin") in raw:
                    found[call.lineno] = ast.unparse(call)
    return [f"{line}: {text}" for line, text in found.items()]


def test_no_write_is_taken_for_whole_unseen() -> None:
    texts = {path: path.read_text() for path in sorted(GPURUN.rglob("*.py"))}
    writing = {path: text for path, text in texts.items() if any(f"{name}(" in text for name in WRITES)}
    assert len(writing) > 40
    found = [f"{path}:{line}" for path, text in writing.items() for line in unseen(text)]
    assert found == [], "write with durable.write_all, or contents.write_all on hosts"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("os.write(fd, data)", 1), ("os.pwrite(fd, data, 0)", 1), ("os.sendfile(a, b, 0, 9)", 1),
        ("n = os.write(fd, data)", 0), ("view = view[os.write(fd, view):]", 0), ("os.write(fd, b'!')", 0),
        ("os.write(2, text)", 0), ("os.write(fd, b'!!')", 1),
        ("with open(p, 'wb', buffering=0) as f:\n f.write(d)", 1), ("with open(p, 'wb') as f:\n f.write(d)", 0),
        ("self._f = os.fdopen(fd, 'wb', buffering=0)\nself._f.write(d)", 1),
        ("f = p.open('wb', buffering=0)\nn = f.write(d)", 0),
        ("with open(p, 'wb', 0) as f:\n f.write(d)", 1), ("f = os.fdopen(fd, 'ab', 0)\nf.write(d)", 1),
        ("f = p.open('wb', 0)\nf.write(d)", 1), ("f = io.FileIO(p, 'w')\nf.write(d)", 1),
        ("with os.fdopen(fd, 'w') as f:\n f.write(d)", 0), ("from os import write\nwrite(fd, data)", 1),
        ("def f():\n pass\nos.write(fd, data)", 1), ("async def f():\n os.write(fd, data)", 1),
        ("a or os.write(fd, data)", 1),
        ("_ = os.write(fd, data)", 1), ("f = open(p, 'wb', buffering=0)\n_ = f.write(d)", 1),
        ("p = Popen(a, stdin=PIPE, bufsize=0)\np.stdin.write(d)", 1), ("p = Popen(a, stdin=PIPE)\np.stdin.write(d)", 0),
    ],
)  # fmt: skip
def test_the_check_finds_them(source: str, count: int) -> None:
    assert len(unseen(source)) == count


@contextmanager
def disk(room: int) -> Iterator[None]:
    """Let no file become larger: a write beyond is cut there, as on a full disk, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_a_full_disk_cuts_is_an_error_and_the_next_one_is_whole(tmp_path: Path) -> None:
    lines = StatePath(tmp_path) / "lines"
    durable.append_line(lines, "first")
    for room in (7, 11, 12):
        with disk(room), pytest.raises(StateError, match="cannot be written"):
            durable.append_line(lines, "second")
    durable.append_line(lines, "third")
    assert (tmp_path / "lines").read_text().splitlines()[-1] == "third"


@pytest.mark.parametrize("room", [0, 1, 41])
def test_a_host_on_which_a_small_file_does_not_fit_cannot_be_written_to(tmp_path: Path, room: int) -> None:
    with disk(room):
        said = probe.why_unwritable(str(tmp_path))
    assert "File too large" in said and list(tmp_path.iterdir()) == []  # the error of this test's disk
    assert probe.why_unwritable(str(tmp_path)) == ""


def test_the_report_after_one_that_a_full_disk_cut_is_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpurun_runtime, "_rank_folder", lambda: str(tmp_path))
    gpurun_runtime.report(1, loss=1.0)
    with disk((tmp_path / "m").stat().st_size + 10):
        gpurun_runtime.report(2, loss=0.5)
    gpurun_runtime.report(3, loss=0.25)
    first, _, third = (tmp_path / "m").read_text().splitlines()
    assert (json.loads(first)["step"], json.loads(third)["step"]) == (1, 3)
