#!/usr/bin/env python3
"""Change the code in random places, and count the changes that the quick tests notice.

    pip install coverage
    .ci/mutants.py map build/map.json  # which quick test runs which line; takes longer than the tests
    .ci/mutants.py choose build/mutants.json --seed 1 --count 60
    .ci/mutants.py run build/mutants.json --map build/map.json --to build/results.json [--tried-first EARLIER.json]

A mutant is one small change of one place. The same seed and the same code give the same mutants. A mutant is stored
with the lines that it changes, so a later commit can be judged by it while these lines are the same. It is caught if
a quick test that runs its line fails, or hangs. Mutants that change nothing a user sees are not sorted out: compare
shares, do not aim at 100 %.

Each run has a box: processes, network and mounts of its own, and what it writes, the mutant included, is gone when it
ends. A mutant of code that kills processes and removes folders harms nothing outside. This needs root and Linux.

Libraries, as of November 2026: mutmut (3.8) and Cosmic Ray (8.7) try every mutant, with no sample by a seed; Cosmic Ray
runs the same tests for each; mutmut changes functions within one process, but gpurun sends its code to other processes.
mutatest draws a sample, but needs coverage below 6 and knows no tests by line. None has a box.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutants_tests import failing, make_map

TOP = Path(__file__).resolve().parents[1]
FOLDERS = ("gpurun/supervisor", "gpurun/leases", "gpurun/launch", "gpurun/node/job")
FLIPPED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
MOVED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SWAPPED = {ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add}
KINDS = ("and/or", "boundary", "comparison", "condition", "constant", "deleted", "plus/minus", "return")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a file: the lines `before`, which the file has `of` times, become `after` at their `nth` place."""

    file: str
    line: int
    column: int
    kind: str
    in_function: bool
    before: str
    after: str
    nth: int
    of: int

    def applied(self, text: str) -> str | None:
        """The changed file; None if these lines of it are others by now."""
        parts = f"\n{text}".split(f"\n{self.before}\n")
        if len(parts) != self.of + 1:
            return None
        old = f"\n{self.before}\n"
        head, tail = old.join(parts[: self.nth + 1]), old.join(parts[self.nth + 1 :])
        return f"{head}\n{self.after}\n{tail}"[1:]


def changes(node: ast.AST, in_function: bool) -> Iterator[tuple[str, ast.AST, str]]:
    """Each change of a node: its kind, the part that is replaced, and by which text."""
    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", node, _but(node, ops=[FLIPPED[type(op)]()])
            if type(op) in MOVED:
                yield "boundary", node, _but(node, ops=[MOVED[type(op)]()])
        case ast.BoolOp(op=op):
            yield "and/or", node, _but(node, op=SWAPPED[type(op)]())
        case ast.BinOp(op=ast.Add() | ast.Sub() as op):
            yield "plus/minus", node, _but(node, op=SWAPPED[type(op)]())
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
            yield "condition", test, f"({ast.unparse(test.operand if is_not else ast.UnaryOp(ast.Not(), test))})"
        case ast.Constant(value=bool() | int() | float() | str() as value):
            new = not value if isinstance(value, bool) else f"mutant{value}" if isinstance(value, str) else value + 1
            yield "constant", node, f"({new!r})"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", node, "return None"
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise() if in_function:
            yield "deleted", node, "pass"


def _but(node: ast.AST, **fields: Any) -> str:
    new = copy.copy(node)
    vars(new).update(fields)
    return f"({ast.unparse(new)})"


def nodes(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes, and whether each is in a function; without docstrings, annotations, and parts of f-strings."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node, in_function
    if isinstance(node, ast.JoinedStr):
        return
    for name, value in ast.iter_fields(node):
        inner = in_function or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in {"annotation", "returns"}:
                yield from nodes(child, inner)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of one file that compile."""
    text = path.read_text()
    lines = text.split("\n")
    for node, in_function in nodes(ast.parse(text)):
        for kind, old, new in changes(node, in_function):
            first, last = old.lineno - 1, old.end_lineno
            head, tail = lines[first].encode()[: old.col_offset], lines[last - 1].encode()[old.end_col_offset :]
            before, after = "\n".join(lines[first:last]), f"{head.decode()}{new}{tail.decode()}"
            nth = "\n".join(["", *lines[:first], ""]).count(f"\n{before}\n")
            place = (str(path.relative_to(TOP)), old.lineno, old.col_offset, kind, in_function)
            mutant = Mutant(*place, before, after, nth, of=f"\n{text}".count(f"\n{before}\n"))
            changed = "\n".join([*lines[:first], after, *lines[last:]])
            if mutant.applied(text) == changed and _compiles(changed):
                yield mutant


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def choose(seed: int, count: int) -> list[Mutant]:
    """Draw mutants: first a kind, so that the many constants do not crowd out the rest, then one of this kind."""
    of_kind = defaultdict(list)
    for path in sorted(path for folder in FOLDERS for path in (TOP / folder).glob("*.py")):
        for mutant in mutants_of(path):
            of_kind[mutant.kind].append(mutant)
    drawn, chance = [], random.Random(seed)
    while len(drawn) < count:
        left = of_kind[chance.choice(KINDS)]
        drawn.append(left.pop(chance.randrange(len(left))))
    return drawn


class Judge:
    """Runs mutants against the tests that a map names."""

    def __init__(self, known: Mapping[str, Any], also: Sequence[str], limit_s: float) -> None:
        self.seconds, self.lines, self.also, self.limit_s = known["seconds"], known["lines"], also, limit_s
        self.fails_anyway: dict[str, bool] = {}

    def tests(self, mutant: Mutant, first: str) -> list[str]:
        """The tests that run its lines; for a line that runs at import, the tests that run anything of its file.

        So it is for lines of the agent that no test runs: coverage does not see an agent that is a process of its own.
        The tests of its room come first, and short ones before long ones, as many as fit the limit.
        """
        lines = self.lines.get(mutant.file, {})
        own = [str(mutant.line + number) for number in range(mutant.before.count("\n") + 1)]
        running = [lines[line] for line in own if lines.get(line)]
        if not mutant.in_function or (not running and mutant.file.startswith("gpurun/node/")):
            running = list(lines.values())
        room = f"tests/{mutant.file.split('/')[1]}/"
        found = sorted(
            {test for tests in running for test in tests} | ({first} if "::" in first else set()),
            key=lambda test: (test != first, not test.startswith(room), self.seconds.get(test, 0.0), test),
        )
        left_s = self.limit_s * 0.8
        for count, test in enumerate(found):
            left_s -= self.seconds.get(test, 0.0)
            if left_s < 0 and count:
                return found[:count]
        return found

    def judged(self, mutant: Mutant, first: str = "") -> dict[str, Any]:
        """Whether a test notices the mutant, and which. A test that fails without the mutant, too, does not count."""
        plain = (TOP / mutant.file).read_text()
        result = {**dataclasses.asdict(mutant), "caught": False, "by": "", "tests": 0}
        if (changed := mutant.applied(plain)) is None:
            return {**result, "by": "the code is different by now"}
        tests = self.tests(mutant, first)
        result["tests"] = len(tests)
        while tests and (by := failing(mutant.file, changed, tests, self.also, self.limit_s)):
            suspect = by if by in tests else tests[0]
            if suspect not in self.fails_anyway:
                self.fails_anyway[suspect] = bool(failing(mutant.file, plain, [suspect], (), self.limit_s))
            if not self.fails_anyway[suspect]:
                return {**result, "caught": True, "by": by}
            tests.remove(suspect)
        return result


def main() -> int:
    """Make a map, choose mutants, or run them."""
    parser = argparse.ArgumentParser(description="Change the code in random places; count what the tests notice.")
    parser.add_argument("what", choices=("map", "choose", "run"))
    parser.add_argument("file", type=Path, help="the map, or the mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--map", type=Path, help="run: the tests of each line")
    parser.add_argument("--to", type=Path, help="run: write results here, after each mutant")
    parser.add_argument("--tried-first", type=Path, help="run: earlier results; start with what caught a mutant")
    parser.add_argument("--also", nargs="*", default=[], help="run: test files that the map does not know")
    parser.add_argument("--limit-s", type=float, default=180.0, help="run: a longer run is a catch")
    parser.add_argument("--jobs", type=int, default=2, help="run: mutants at the same time")
    args = parser.parse_args()
    if args.what == "map":
        make_map(args.file, FOLDERS, ["tests"])
    elif args.what == "choose":
        args.file.write_text(json.dumps([dataclasses.asdict(each) for each in choose(args.seed, args.count)], indent=1))
    else:
        run(args)
    return 0


def run(args: argparse.Namespace) -> None:
    """Run all mutants, write the results, and print the share that was caught."""
    names = {field.name for field in dataclasses.fields(Mutant)}
    read = [json.loads(path.read_text()) if path else [] for path in (args.file, args.tried_first)]
    mutants, earlier = ([{name: one[name] for name in names} for one in part] for part in read)
    caught_by = {Mutant(**one): result["by"] for one, result in zip(earlier, read[1], strict=True) if result["caught"]}
    judge, results = Judge(json.loads(args.map.read_text()), args.also, args.limit_s), []
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(
            lambda one: judge.judged(one, caught_by.get(one, "")), [Mutant(**one) for one in mutants]
        ):
            results.append(result)
            args.to.write_text(json.dumps(results, indent=1))
            said = "caught by" if result["caught"] else "not caught"
            print(f"{result['file']}:{result['line']}: {result['kind']}: {said} {result['by']}", flush=True)
    caught = sum(result["caught"] for result in results)
    print(f"{caught} of {len(results)} mutants caught: {caught / len(results):.0%}")


if __name__ == "__main__":
    sys.exit(main())
