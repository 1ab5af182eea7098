"""Find programs below ranks that start processes of their own, such as ``torchrun``, by their command lines."""

import re
from typing import Any, Dict, List, Sequence

from gpurun.node.job import rank_processes

MOST_WORDS = 20
"""A program's name is among so many first words of a command line."""
_TAKES = re.compile(r"-[A-Za-z]*?[XWQ]\Z")


def find(job: str, attempt: int, names: Sequence[Sequence[str]]) -> List[Dict[str, Any]]:
    """Return the ranks that have started one of these programs.

    Args:
        names: of each program, the first words of its command line, such as ``["accelerate", "launch"]``, or
            ``["-m", "torch.distributed.run"]`` for a module of Python.

    Returns:
        ``{"rank", "which"}`` for each rank, in order: `which` is the program's place in `names`.
    """
    found: Dict[int, int] = {}
    for each in rank_processes.of_job(job, attempt):
        which = named(each.process.command, names)
        if which is not None:
            found[each.rank] = min(which, found.get(each.rank, which))
    return [{"rank": rank, "which": which} for rank, which in sorted(found.items())]


def named(command: str, names: Sequence[Sequence[str]]) -> "int | None":
    """Return which program a command line starts; None if it starts none of them."""
    words = command[: 1 << 12].split()[:MOST_WORDS]
    if words and re.match(r"(python|pypy)[0-9.]*\Z", _file(words[0])):
        del words[0]
        while words and words[0].startswith("-") and words[0] != "-m":
            del words[: 2 if _TAKES.match(words[0]) else 1]
    if words and words[0] != "-m":
        words[0] = _file(words[0])
    for which, name in enumerate(names):
        if name and words[: len(name)] == list(name):
            return which
    return None


def _file(path: str) -> str:
    return path.rpartition("/")[2]
