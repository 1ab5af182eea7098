"""Look through the profilers and debuggers that people put in front of a program. Pure.

They only lead to the program, whose imports choose a launcher. Each rank runs the whole line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpurun.launch.launchers.lines.shell import SHELLS
from gpurun.launch.launchers.lines.wrappers import name_of

PYTHON = re.compile(r"(python|pypy)[0-9.]*(-dbg)?\Z")

_COMMANDS = (
    "nsys ncu nv-nsight-cu-cli nvprof dlprof compute-sanitizer cuda-memcheck cuda-gdb gdb lldb rr valgrind perf strace "
    "ltrace heaptrack py-spy austin catchsegv rocprof rocprofv2 rocprofv3 rocgdb tini dumb-init"
)
COMMANDS = frozenset(_COMMANDS.split())
"""Programs that start a command line of their own, behind flags of any kind."""
MODULES: Mapping[str, str] = {
    "cProfile": "-o -s --outfile --sort",
    "pdb": "-c --command",
    "ipdb": "-c --command",
    "debugpy": "--listen --connect --log-to",
    "torch.utils.bottleneck": "",
    "coverage run": "--rcfile --source --source-dirs --include --omit --data-file --context --concurrency",
    "kernprof": "-o -s -u -p -i --outfile --setup --unit --prof-mod --output-interval",
    "scalene": "--outfile --profile-only --profile-exclude --program-path --profile-interval --cpu-percent-threshold",
    "memory_profiler": "-o --precision --backend",
    "mprof run": "-o -T --output --interval --backend",
    "memray run": "-o --output --live-port",
    "viztracer": "-o --output_file --tracer_entries --max_stack_depth --min_duration --include_files --exclude_files",
    "pyinstrument": "-o -r -i --outfile --renderer --interval",
}
"""Programs and modules that run a Python file, or a module behind ``-m``, and their flags that have a value."""


def behind_command(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return what a profiler or debugger runs, as in ``nsys profile -o x python t.py``; None if words do not tell."""
    name = name_of(words)
    if name not in COMMANDS:
        return behind_module((name, *words[1:]))
    for at in range(1, len(words)):
        before, program = words[at - 1], name_of(words[at:])
        is_value = before.startswith("-") and "=" not in before and before not in ("--", "--args")
        if PYTHON.match(program) or program in SHELLS or (program.endswith((".py", ".sh")) and not is_value):
            return words[at:]
    return None


def behind_module(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return what a profiler of Python runs, as a command: ``cProfile -o x t.py``; None if it is none."""
    for name, with_value in MODULES.items():
        at = len(name.split())
        if words[:at] != tuple(name.split()):
            continue
        while at < len(words) and words[at].startswith("-"):
            if words[at] in ("-m", "--module"):
                return ("python", "-m", *words[at + 1 :])
            if words[at] == "--":
                at += 1
                break
            at += 2 if words[at] in with_value.split() else 1
        if at >= len(words):
            return None
        return words[at:] if PYTHON.match(name_of(words[at:])) else ("python", *words[at:])
    return None
