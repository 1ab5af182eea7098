"""Import MPI and DeepSpeed hostfiles: ``host slots=4``, ``host:4``; PBS's lists of nodes: a line for each slot.

A slot is a GPU. Sources: Open MPI's mpirun(1), MPICH's Hydra hostfiles, DeepSpeed's "Resource Configuration
(multi-node)", PBS's ``$PBS_NODEFILE`` and ``$PBS_GPUFILE``, Torque's ``server_priv/nodes``, Grid Engine's
``$PE_HOSTFILE``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpurun.inventory.folding import fold
from gpurun.inventory.imports.draft import Draft
from gpurun.quantities.counts import count

_COLON = re.compile(r"([^\s:]+):(\d+)\Z")
_GPU_OF_HOST = re.compile(r"(.+)-gpu(\d+)\Z", re.ASCII)
_COUNTS = ("slots", "gpus")


@dataclass
class _HostLines:
    """What the lines of one host say.

    Attributes:
        slots: their sum; None if no line has any.
        lines: how many lines name the host.
    """

    where: str
    slots: int | None = None
    lines: int = 0


def read(text: str, draft: Draft, file: str) -> None:
    """Fill a draft; the slots of a host on several lines are summed."""
    found: dict[str, _HostLines] = {}
    lines = [(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    named = [(f"{file}:{number}", words) for number, words in lines if words]
    is_gpu_file = all(len(words) == 1 and _GPU_OF_HOST.match(words[0]) for _, words in named)
    for where, words in named:
        name, count = _slots(words, draft, where)
        if is_gpu_file and (one := _GPU_OF_HOST.match(name)):
            name = one.group(1)
        user, at, bare = name.rpartition("@")
        if draft.host(bare, where):
            if at:
                draft.put(bare, "user", user, where)
            host = found.setdefault(bare, _HostLines(where))
            host.lines += 1
            if count is not None:
                host.slots = (host.slots or 0) + count
    if any(word.startswith("gpus=") for _, words in named for word in words[1:]):  # Torque: the others have none
        for host in found.values():
            host.slots = host.slots or 0
    _count(found, draft, file)


def _count(found: dict[str, _HostLines], draft: Draft, file: str) -> None:
    """Give each host its slots, or else its lines. A file without any of both says no numbers."""
    has_slots = any(host.slots is not None for host in found.values())
    has_lines = any(host.lines > 1 for host in found.values())
    if has_slots or has_lines:
        by_line = [name for name, host in found.items() if host.slots is None]
        for name, host in found.items():
            if host.slots != 0:
                draft.put(name, "gpus", str(host.lines if host.slots is None else host.slots), host.where)
        if by_line:
            draft.guess(f"{fold(by_line)}: the lines have no slots, so each line counts as one GPU")
        draft.leave_out(
            [name for name, host in found.items() if host.slots == 0],
            "left out, because the file gives 0 slots or GPUs",
            file,
        )
    draft.took.append(count(len(draft.values), "host") + (", with slots as gpus" if has_slots or has_lines else ""))


def _slots(words: list[str], draft: Draft, where: str) -> tuple[str, int | None]:
    name, count = words[0], None
    colon = _COLON.match(name)
    if colon:
        name, count = colon.group(1), int(colon.group(2)[:6])
    if len(words) > 2 and words[1].isdecimal() and "@" in words[2]:  # Grid Engine: host, slots, queue, processors
        return name, int(words[1][:6])
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key.lower() in _COUNTS and value.isascii() and value.isdigit():
            count = int(value[:6])
        else:
            draft.leave(word, where)
    return name, count
