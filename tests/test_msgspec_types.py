"""msgspec crashes when threads make it work out one type at the same time: see docs/decisions/0015."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gpurun

ROOT = Path(gpurun.__file__).parent

RACE = """
import sys, threading, types
from dataclasses import dataclass, field
from gpurun.facts import convert

sys.setswitchinterval(1e-6)
SOURCE = '''
@dataclass(frozen=True)
class Gpu:
    index: int = 0
    name: "str | None" = None

@dataclass(frozen=True)
class Nic:
    gpus: "tuple[Gpu, ...]" = ()
    by_name: "dict[str, Gpu]" = field(default_factory=dict)

@dataclass(frozen=True)
class Host:
    nic: Nic = Nic()
    nics: "list[Nic]" = field(default_factory=list)
'''
ANSWER = {"nic": {"gpus": [{"index": 1}], "by_name": {"a": {"name": "b"}}}, "nics": [{"gpus": [{"index": 2}]}]}


def answers(kind, barrier, found):
    barrier.wait()
    found.append(convert("gpu-1", kind, ANSWER))


for number in range(300):
    module = types.ModuleType(f"made{number}")
    sys.modules[module.__name__] = module
    vars(module).update(dataclass=dataclass, field=field)
    exec(SOURCE, vars(module))
    barrier, found = threading.Barrier(6), []
    threads = [threading.Thread(target=answers, args=(module.Host, barrier, found)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and {each.nics[0].gpus[0].index for each in found} == {2}, found
"""


def test_hosts_that_answer_at_the_same_time_crash_nobody():
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_type_is_ready_before_msgspec_converts_to_it():
    found = [(call, kinds) for file in ROOT.rglob("*.py") for call, kinds in converting_calls(file)]
    assert len(found) >= 8
    assert [call for call, kinds in found if not all(kind.startswith("ready(") for kind in kinds)] == []


def converting_calls(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Each call of a file that names a type to msgspec, and the type."""
    text = file.read_text()
    for call in ast.walk(ast.parse(text)) if "msgspec." in text else ():
        named = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if named.startswith("msgspec.") and named.rpartition(".")[2] in ("convert", "decode", "Decoder"):
            kinds = [word.value for word in call.keywords if word.arg == "type"] or call.args[-1:]
            if file.name != "msgspec_types.py":
                yield ast.unparse(call), [ast.unparse(kind) for kind in kinds]
