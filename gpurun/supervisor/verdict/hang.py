"""Which rank of a hanging gang the others wait for, from what its hosts found (`gpurun.node.job.hang`). Pure.

PyTorch's flight recorder and NCCL RAS count the collectives that each rank has called: who has called fewer is waited
for. Python's stacks show the line: of ranks that stand in a collective, and of those that stand elsewhere.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpurun.documents.plain import printable

NAMED = 4
"""So many ranks are named one by one."""
MOST_LINES = 24
MOST_LINE = 2000
FRAMES_SHOWN = 4
MOST_RANKS = 100_000
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/gpurun/", "<frozen ", "<__array_function__")
_COMMUNICATION = (
    "/torch/distributed/", "/horovod/", "/mpi4py/", "/deepspeed/comm/", "/deepspeed/utils/comms",
    "/tensorflow/python/distribute/", "/jax/experimental/multihost", "/accelerate/utils/operations",
)  # fmt: skip
_STORAGE = ("/torch/distributed/checkpoint/filesystem", "/torch/distributed/checkpoint/_fsspec")
"""Here a rank waits for a disk, not for others."""
_WRAPPERS = ("wrapper", "inner", "_fn", "__call__", "decorate_context", "<lambda>")
_RAS_COUNT = re.compile(r"Rank (\d{1,7}) has (?:not launched any operations|launched up to operation (\d{1,12}))")
_RAS_MANY = re.compile(r"\s*(\d{1,7}) ranks have (?:not launched any operations|launched up to operation (\d{1,12}))")
_RAS_MEMBER = re.compile(r"\s*Rank (\d{1,7}) -- ")
_RAS_ROW = re.compile(r"^(?:\s+\d+){5}\s+(\d{1,7})\s+[A-Z]", re.MULTILINE)
"""A row of the summary; its last number counts the ranks of all communicators of a kind."""
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
    def is_communication(self) -> bool:
        """Return whether it is in a library in which ranks wait for each other."""
        return any(part in self.file for part in _COMMUNICATION) and not any(part in self.file for part in _STORAGE)

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
        # TensorFlow's wrappers of operations are made at run time; an import of a library is no call.
        called = itertools.takewhile(lambda frame: frame.file == "<string>" or not frame.is_users, self.frames)
        inner = [frame for frame in called if frame.is_communication and frame.function != "<module>"]
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
        return found | {(rank, f"NCCL RAS {kind}"): (most, 0) for (kind, rank), most in _ras_counts(self.ras).items()}


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
    late = _late(seen)
    return Hang(
        reason=f"{silence}; {_sentence(late)}" if late else silence,
        rank=late.first.rank if late and late.first else None,
        host=late.host if late else None,
        lines=tuple(line[:MOST_LINE] for line in itertools.islice(_lines(seen), MOST_LINES)),
        evidence=_evidence(seen.ras),
    )


@dataclass(frozen=True)
class _Late:
    """The ranks that others wait for.

    Attributes:
        numbers: theirs.
        what: what the others wait in; "" if that is not known.
        first: where one of them stands, if that is known for sure.
        host: of that one.
    """

    numbers: frozenset[int]
    what: str
    first: Standing | None
    host: str | None


def _late(seen: HangSigns) -> _Late | None:
    """Return the ranks that the others wait for; None if nothing tells."""
    stuck = _stuck(seen.collectives)
    late, what = _by_recorder(seen.collectives, stuck)
    if not late and not stuck:
        late, what = _by_ras(seen)
    if not late:
        return _by_stacks(seen.standings, stuck)
    host = next((each.host for each in seen.collectives if each.number == min(late)), None)
    own = [each for each in seen.standings if each.number == min(late) and host in (None, each.host)]
    first = own[0] if len(own) == 1 else None
    return _Late(late, what, first, first.host if first else host)


def _by_group(collectives: Sequence[LastCollective]) -> Mapping[str, list[LastCollective]]:
    """Return process group → its ranks. Leaves out names that programs without a common gang have given twice."""
    found: dict[str, list[LastCollective]] = {}
    for each in collectives:
        found.setdefault(each.group, []).append(each)
    return {group: own for group, own in sorted(found.items()) if len(own) == len({each.number for each in own})}


def _stuck(collectives: Sequence[LastCollective]) -> Collection[int]:
    """Return the ranks of groups in which all have called a collective that none has finished: nobody is late there.

    GPUs work later than their programs, and programs run ahead of each other: who waits for its GPU first, such as the
    rank that prints the loss, has called fewer.
    """
    groups = [own for own in _by_group(collectives).values() if len(own) > 1]
    hanging = [own for own in groups if max(each.done for each in own) < min(each.entered for each in own)]
    return {each.number for own in hanging for each in own}


def _by_recorder(collectives: Sequence[LastCollective], stuck: Collection[int]) -> tuple[frozenset[int], str]:
    """Compare how far the ranks of each process group are. A rank that waits itself in another group is no cause."""
    waiting = {each.number for each in collectives if each.done < each.entered}
    found: list[tuple[frozenset[int], str]] = []
    for own in _by_group(collectives).values():
        least, last = min(each.entered for each in own), max(each.entered for each in own)
        late = frozenset(each.number for each in own if each.entered == least) - frozenset(stuck)
        if late and least < last:
            name = next((_plain(each.name) for each in own if each.entered == least + 1), "collective")
            found.append((late, f"{name} {least + 1}"))
    return min(found, key=lambda each: (bool(each[0] & waiting), len(each[0])), default=(frozenset(), ""))


def _plain(name: str) -> str:
    """Return ``all_reduce`` for PyTorch's ``nccl:all_reduce``."""
    return printable(name.partition(":")[2] or name) or "collective"


def _by_ras(seen: HangSigns) -> tuple[frozenset[int], str]:
    """Compare the counts of NCCL, which numbers ranks anew in each communicator: only that of all ranks tells."""
    whole = max([len({each.number for each in seen.standings}), *(int(row) for row in _RAS_ROW.findall(seen.ras))])
    for kind, told in _ras_parts(seen.ras):
        counts = [most for most, ranks in told for _ in ranks]
        least, last = min(counts, default=0), max(counts, default=0)
        late = frozenset(rank for most, ranks in told if most == least for rank in ranks if rank is not None)
        if least < last and len(counts) >= whole and len(late) == counts.count(least):
            return late, f"{kind} {least + 1}"
    return frozenset(), ""


def _ras_parts(text: str) -> Iterable[tuple[str, list[tuple[int, list[int | None]]]]]:
    """Yield, for each communicator and kind of operation whose ranks disagree, how many each rank has called.

    NCCL tells ranks with the same number in one line, and lists them below only if they are few: others are None.
    """
    for part in re.split(r"\n#(?=\d)|\n(?=.*\bdifferent \w+ operation counts)", text):
        kind = _RAS_KIND.search(part)
        told: list[tuple[int, list[int | None]]] = []
        listed = 0
        for line in part.splitlines():
            if (one := _RAS_COUNT.search(line)) is not None:
                told.append((int(one.group(2) or 0), [int(one.group(1))]))
            elif (many := _RAS_MANY.match(line)) is not None:
                told.append((int(many.group(2) or 0), [None] * min(int(many.group(1)), MOST_RANKS)))
                listed = 0
            elif (member := _RAS_MEMBER.match(line)) is not None and told and listed < len(told[-1][1]):
                told[-1][1][listed] = int(member.group(1))
                listed += 1
        if kind is not None and told:
            yield kind.group(1), told


def _ras_counts(text: str) -> dict[tuple[str, int], int]:
    """Return how many operations each rank has called, by kind and number in its communicator."""
    found: dict[tuple[str, int], int] = {}
    for at, (kind, told) in enumerate(_ras_parts(text)):
        found.update({(f"{at} {kind}", rank): most for most, ranks in told for rank in ranks if rank is not None})
    return found


def _by_stacks(standings: Sequence[Standing], stuck: Collection[int]) -> _Late | None:
    """Find who stands outside all collectives while others are in one; else who stands apart from most others."""
    known = [each for each in standings if each.frames or each.state == "D"]
    waiting = [each for each in known if each.call or each.number in stuck]
    if waiting and len(waiting) < len(known):
        callers = Counter((each.host, each.number) for each in waiting)
        # Another program beside the rank's own, such as a monitor, calls none.
        outside = [each for each in known if each not in waiting and callers[each.host, each.number] != 1]
        return _late_of(outside, next((each.call for each in waiting if each.call), "a collective"), waiting)
    places: dict[tuple[str, int] | None, list[Standing]] = {}
    for each in known:
        places.setdefault((each.frame.file, each.frame.line) if each.frame else None, []).append(each)
    most = max(places.values(), key=len, default=[])
    if not waiting and 2 * len(most) > len(known) > len(most):
        return _late_of([each for each in known if each not in most], "", most)
    return None


def _late_of(outside: Sequence[Standing], what: str, others: Sequence[Standing]) -> _Late | None:
    """Return the ranks that stand outside. Of several processes, one of the others' program tells the line."""
    if not outside:
        return None
    programs = {each.frames[-1].file for each in others if each.frames}
    first = min(outside, key=lambda each: (each.number, not each.frames or each.frames[-1].file not in programs))
    return _Late(frozenset(each.number for each in outside), what, first, first.host)


def _sentence(late: _Late) -> str:
    names, first, what = ranks_text(late.numbers), late.first, late.what
    names += f" on {late.host}" if late.host and len(late.numbers) == 1 else ""
    came = f"{names} did not come to {what}, in which the others wait" if what else f"{names} stands apart"
    if first is None:
        return came
    if first.state == "D":
        return f"{came}: it waits in the kernel, for a disk or a network file system as a rule"
    return (
        f"{came}: {'it' if len(late.numbers) == 1 else f'rank {first.number}'} is at {first.frame.at}"
        if first.frame
        else came
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
    yield from map(printable, seen.problems)
    if seen.silent:
        yield f"no answer from {', '.join(seen.silent)}"


_STATES = {"D": "waits in the kernel", "R": "runs"}


def _place(standing: Standing) -> tuple[str, ...]:
    if not standing.frames:
        return (_STATES.get(standing.state, "its stack is not known"),)
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
