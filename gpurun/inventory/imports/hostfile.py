"""Import MPI and DeepSpeed hostfiles: ``host slots=4``, ``host:4``, one host per line; slots are GPUs.

Sources: Open MPI's mpirun(1), MPICH's Hydra hostfiles, DeepSpeed's "Resource Configuration (multi-node)".
"""

from __future__ import annotations

import re

from gpurun.inventory.imports.draft import Draft

_COLON = re.compile(r"([^\s:]+):(\d+)\Z")


def read(text: str, draft: Draft, file: str) -> None:
    """Fill a draft; the slots of a host on several lines are summed."""
    slots: dict[str, int] = {}
    places: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{file}:{number}"
        name, count = _slots(words, draft, where)
        user, at, bare = name.rpartition("@")
        if draft.host(bare, where):
            if at:
                draft.put(bare, "user", user, where)
            slots[bare] = slots.get(bare, 0) + count
            places.setdefault(bare, where)
    for host, count in slots.items():
        if count:
            draft.put(host, "gpus", str(count), places[host])
    draft.took.append(f"{len(slots)} hosts, their slots as gpus")


def _slots(words: list[str], draft: Draft, where: str) -> tuple[str, int]:
    name, count = words[0], 0
    colon = _COLON.match(name)
    if colon:
        name, count = colon.group(1), int(colon.group(2)[:6])
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key.lower() == "slots" and value.isascii() and value.isdigit():
            count = int(value[:6])
        else:
            draft.leave(word, where)
    return name, count
