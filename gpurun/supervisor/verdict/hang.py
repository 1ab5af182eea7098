"""Which rank of a hanging gang the others wait for, from what its hosts found (`gpurun.node.job.hang`). Pure.

PyTorch's flight recorder and NCCL RAS count the collectives that each rank has called: who has called fewer is waited
for. Python's stacks show the line: of ranks that stand in a collective, and of those that stand elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpurun.documents.plain import printable

NAMED = 4
"""So many ranks are named one by one."""
MOST_LINES = 24
FRAMES_SHOWN = 4
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/gpurun/", "<frozen ", "<__array_function__")
_COMMUNICATION = (
    "/torch/distributed/", "/horovod/", "/mpi4py/", "/deepspeed/comm/", "/deepspeed/utils/comms",
    "/tensorflow/python/distribute/", "/jax/experimental/multihost", "/accelerate/utils/operations",
)  # fmt: skip
_WRAPPERS = ("wrapper", "inner", "_fn", "__call__", "decorate_context", "<lambda>")
_RAS_COUNT = re.compile(r"Rank (\d{1,7}) has launched up to operation (\d{1,12})")
_RAS_KIND = re.compile(r"different (\w{1,40}) operation counts")
_RAS_ERRORS = ("MISMATCH", "INCOMPLETE", "ERROR", "DEAD", "TIMEOUT", "ASYNC")


@dataclass(frozen=True)
class StackFrame:
    """One frame of a Python stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Return whether it is in the user's code, not in a library or in Python itself."""
        return not any(part in self.file for part in _LIBRARIES)

    @property
    def at(self) -> str:
        """Return its place for people."""
        name = self.file if self.is_users else self.file.rpartition("-packages/")[2]
        return f"{printable(name)}:{self.line} in {printable(self.function)}"


@dataclass(frozen=True)
class Standing:
    """Where a process of a rank stands.

    Attributes:
        rank: gpurun's number of the rank.
        number: the number that people know it by: that of the launcher inside the rank, if there is one.
        frames: those of its main thread, the innermost first; empty if unknown.
        state: the kernel's letter for it; D = it waits in the kernel and cannot be interrupted.
    """

    host: str
    rank: int
    number: int
    frames: tuple[StackFrame, ...] = ()
    state: str = ""

    @property
    def frame(self) -> StackFrame | None:
        """Return the innermost frame of the user's code; the innermost of all if there is none."""
        return next((frame for frame in self.frames if frame.is_users), self.frames[0] if self.frames else None)

    @property
    def call(self) -> str:
        """Return the function of a communication library that the user's code has called; "" if it is in none."""
        inner = [frame for frame in self.frames if any(part in frame.file for part in _COMMUNICATION)]
        named = [frame for frame in inner if frame.function not in _WRAPPERS]
        return printable((named or inner)[-1].function) if inner else ""


@dataclass(frozen=True)
class LastCollective:
    """The last collective of a rank in one process group of PyTorch.

    Attributes:
        number: the rank's, in `torch.distributed`.
        entered: how many collectives of the group the rank has called; `done`: how many have ended.
        name, state: of the last one, as PyTorch writes them.
    """

    host: str
    number: int
    group: str
    entered: int
    done: int
    name: str
    state: str


@dataclass(frozen=True)
class HangSigns:
    """What the hosts of a gang found. `ras` is what NCCL said, `silent` the hosts that did not answer."""

    standings: tuple[Standing, ...] = ()
    collectives: tuple[LastCollective, ...] = ()
    ras: str = ""
    problems: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def counts(self) -> Mapping[tuple[int, str], tuple[int, int]]:
        """Return how far each rank is with its collectives. A gang whose counts grow works."""
        found = {(each.number, each.group): (each.entered, each.done) for each in self.collectives}
        return found | {(rank, "NCCL RAS"): (most, 0) for rank, most in _ras_counts(self.ras).items()}


@dataclass(frozen=True)
class Hang:
    """Why a gang counts as hung.

    Attributes:
        reason: for people, in one line.
        rank: gpurun's number of the rank that the others wait for, if one is known; `host`: its host.
        lines: where all ranks stand.
        evidence: what NCCL said, word for word.
    """

    reason: str
    rank: int | None = None
    host: str | None = None
    lines: tuple[str, ...] = ()
    evidence: str = ""


def explain(seen: HangSigns, silence: str) -> Hang:
    """Return what is known about a gang that has been silent.

    Args:
        silence: the beginning of the reason.
    """
    late, what = _late(seen)
    standings = {each.number: each for each in seen.standings}
    first = standings.get(min(late)) if late else None
    reason = f"{silence}; {_sentence(late, what, seen, standings)}" if late or what else silence
    return Hang(
        reason=reason,
        rank=first.rank if first else None,
        host=first.host if first else _host_of(seen, late),
        lines=tuple(_lines(seen))[:MOST_LINES],
        evidence=_evidence(seen.ras),
    )


def _host_of(seen: HangSigns, late: Collection[int]) -> str | None:
    return next((each.host for each in seen.collectives if each.number in late), None)


def _late(seen: HangSigns) -> tuple[frozenset[int], str]:
    """Return the ranks that the others wait for, and for what; none if nothing tells."""
    found = _by_recorder(seen.collectives), _by_ras(seen.ras), _by_stacks(seen.standings)
    return next((each for each in found if each[0]), (frozenset(), ""))


def _by_recorder(collectives: Sequence[LastCollective]) -> tuple[frozenset[int], str]:
    """Compare how far the ranks of each process group are. A rank that waits itself in another group is no cause."""
    waiting = {each.number for each in collectives if each.done < each.entered}
    found: dict[str, tuple[frozenset[int], str]] = {}
    for group in sorted({each.group for each in collectives}):
        own = [each for each in collectives if each.group == group]
        last = max(each.entered for each in own)
        late = frozenset(each.number for each in own if each.entered < last)
        name = next(each.name for each in own if each.entered == last)
        if late:
            found[group] = late, f"{_plain(name)} {last}"
    return min(found.values(), key=lambda each: (bool(each[0] & waiting), len(each[0])), default=(frozenset(), ""))


def _plain(name: str) -> str:
    """Return ``all_reduce`` for PyTorch's ``nccl:all_reduce``."""
    return printable(name.partition(":")[2] or name) or "collective"


def _by_ras(text: str) -> tuple[frozenset[int], str]:
    counts = _ras_counts(text)
    last = max(counts.values(), default=0)
    late = frozenset(rank for rank, most in counts.items() if most < last)
    kind = _RAS_KIND.search(text)
    return late, f"{kind.group(1) if kind else 'operation'} {last}" if late else ""


def _ras_counts(text: str) -> dict[int, int]:
    """Return how many operations each rank has called, in the communicator with most ranks of those that disagree."""
    found = [{int(rank): int(most) for rank, most in _RAS_COUNT.findall(part)} for part in text.split("\n#")]
    return max(found, key=len)


def _by_stacks(standings: Sequence[Standing]) -> tuple[frozenset[int], str]:
    """Find who stands outside all collectives while others are in one; else who stands apart from most others."""
    known = [each for each in standings if each.frames or each.state == "D"]
    waiting = [each for each in known if each.call]
    if waiting and len(waiting) < len(known):
        return frozenset(each.number for each in known if not each.call), waiting[0].call
    places: dict[tuple[str, int] | None, set[int]] = {}
    for each in known:
        places.setdefault((each.frame.file, each.frame.line) if each.frame else None, set()).add(each.number)
    most = max(places.values(), key=len, default=set())
    if not waiting and 2 * len(most) > len(known) > len(most):
        return frozenset(each.number for each in known) - most, ""
    return frozenset(), ""


def _sentence(late: Collection[int], what: str, seen: HangSigns, standings: Mapping[int, Standing]) -> str:
    names = ranks_text(late)
    first = standings.get(min(late))
    on = f" on {first.host}" if first else f" on {host}" if (host := _host_of(seen, late)) else ""
    names += on if len(late) == 1 else ""
    came = f"{names} did not come to {what}, in which the others wait" if what else f"{names} stands apart"
    if first is None:
        return came
    if first.state == "D":
        return f"{came}: it waits in the kernel, for a disk or a network file system as a rule"
    return (
        f"{came}: {'it' if len(late) == 1 else f'rank {first.number}'} is at {first.frame.at}" if first.frame else came
    )


def ranks_text(numbers: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 4-6`` for people."""
    ordered = sorted(numbers)
    parts: list[str] = []
    begin = end = ordered[0]
    for number in [*ordered[1:], None]:
        if number is not None and number == end + 1:
            end = number
            continue
        parts.append(str(begin) if begin == end else f"{begin}-{end}")
        if number is not None:
            begin = end = number
    more = f" and {len(parts) - NAMED} more groups" if len(parts) > NAMED else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts[:NAMED])}{more}"


def _lines(seen: HangSigns) -> Iterable[str]:
    """Yield where the ranks stand: those that stand at the same place in one line, the fewest first."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for each in seen.standings:
        groups.setdefault(_place(each), []).append(each.number)
    for place, numbers in sorted(groups.items(), key=lambda item: (len(item[1]), item[1])):
        yield f"{ranks_text(numbers)}: {' < '.join(place)}"
    for group in sorted({each.group for each in seen.collectives}):
        states: dict[str, list[int]] = {}
        for one in seen.collectives:
            if one.group == group:
                states.setdefault(f"{_plain(one.name)} {one.entered}, {printable(one.state)}", []).append(one.number)
        told = "; ".join(f"{ranks_text(numbers)}: {state}" for state, numbers in sorted(states.items()))
        yield f"process group {printable(group) or '?'}: {told}"
    yield from seen.problems
    if seen.silent:
        yield f"no answer from {', '.join(seen.silent)}"


def _place(standing: Standing) -> tuple[str, ...]:
    if not standing.frames:
        return ("waits in the kernel" if standing.state == "D" else "its stack is not known",)
    at = next((index for index, frame in enumerate(standing.frames) if frame.is_users), 0)
    shown = standing.frames[at : at + FRAMES_SHOWN]
    call = f" (in {standing.call})" if standing.call else ""
    return (f"{shown[0].at}{call}", *(frame.at for frame in shown[1:] if frame.is_users))


def _evidence(text: str) -> str:
    """Return what NCCL RAS reports as wrong, with the lines below it."""
    lines = [printable(line.strip()) for line in text.splitlines()]
    begin = next((at for at, line in enumerate(lines) if any(word in line for word in _RAS_ERRORS)), None)
    if begin is None:
        return ""
    return "NCCL RAS: " + " / ".join(line for line in lines[begin : begin + 8] if line)
