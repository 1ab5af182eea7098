"""Flags of a launcher's command line, and what gpurun does with each of them. Pure.

A flag is *taken* (gpurun decides, and says so), *kept* (it reaches the launcher), *read* (it changes the job or the
command of each rank) or *refused*, with what to write instead. No flag is dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gpurun.errors import BadInput

Does = Literal["taken", "kept", "read", "refused"]
CHOSEN = "gpurun chooses hosts, GPUs, addresses and ports"


class Flag(NamedTuple):
    """A flag that gpurun knows: how many words follow it, and why gpurun does what it does with it.

    `may_have`: it may have a value, only behind an ``=``.
    """

    values: int
    does: Does
    why: str = ""
    may_have: bool = False


class FoundFlag(NamedTuple):
    """A flag as somebody typed it. `name` is the spelling of the table."""

    name: str
    flag: Flag
    words: tuple[str, ...]
    values: tuple[str, ...]


class Counts(NamedTuple):
    """The processes that a line wants, as far as it says: all, or for each host and the hosts (least, most)."""

    ranks: int | None = None
    least: int | None = None
    per_host: int | None = None
    hosts: tuple[int, int] | None = None


NO_COUNTS = Counts()


class Reading(NamedTuple):
    """What a launcher's flags mean for the job.

    Attributes:
        command: the command of each rank.
        kept: the flags that reach the launcher.
        taken: reason → flags that gpurun leaves out.
        env: variables of each rank.
        counts: the processes that the line wants.
        controller: how horovodrun starts ranks; None = as the job says.
    """

    command: tuple[str, ...]
    kept: tuple[str, ...] = ()
    taken: Mapping[str, tuple[str, ...]] = {}
    env: Mapping[str, str] = {}
    counts: Counts = NO_COUNTS
    controller: Literal["gloo", "mpi"] | None = None


def flags(does: Does, text: str, why: str = "") -> dict[str, Flag]:
    """Return flags that gpurun treats alike.

    Behind a name, ``=`` stands for a value, ``==`` for two, ``?`` for one that may be missing.
    """
    return {word.rstrip("=?"): Flag(word.count("="), does, why, word.endswith("?")) for word in text.split()}


def as_gnu(flag: str) -> str:
    """Return the table's spelling of a flag such as ``--nproc_per_node``; argparse and click take both."""
    return flag.replace("_", "-")


def as_mpi(flag: str) -> str:
    """Return the table's spelling of a flag of Open MPI, which takes ``-mca`` for ``--mca``."""
    return f"--{flag.lstrip('-')}" if len(flag) > 2 else flag


@dataclass(frozen=True)
class Typed:
    """A launcher's own command line.

    Attributes:
        name: its name for people.
        launcher: gpurun's launcher that starts the same ranks; "" if none does.
        programs: its commands, such as ``colossalai run``.
        modules: the modules that ``python -m`` runs instead of it.
        flags: what gpurun does with each of its flags.
        spelled: the table's spelling of a flag.
        read: what its flags mean: (flags, words behind them, interpreter) → reading.
        instead: for a launcher that gpurun cannot start: (words behind it, GPUs) → the line that does the same.
        is_it: whether words behind the name belong to this program; another program may have the same name.
    """

    name: str
    launcher: str
    programs: tuple[str, ...]
    modules: tuple[str, ...] = ()
    flags: Mapping[str, Flag] = field(default_factory=dict)
    spelled: Callable[[str], str] = as_gnu
    read: Callable[[list[FoundFlag], tuple[str, ...], tuple[str, ...]], Reading] | None = None
    instead: Callable[[tuple[str, ...], int], str] | None = None
    is_it: Callable[[tuple[str, ...]], bool] = lambda _words: True


def read_flags(typed: Typed, words: tuple[str, ...]) -> tuple[list[FoundFlag], tuple[str, ...]]:
    """Return the flags at the beginning of `words`, and the words behind them.

    Raises:
        BadInput: gpurun does not know a flag, or a flag lacks its value; names the flag.
    """
    found, rest = list[FoundFlag](), list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, flag, value = _known(typed, word)
        if value is not None:
            found.append(FoundFlag(name, flag, (word,), (value,)))
            continue
        if len(rest) < flag.values:
            raise BadInput(f"{typed.name}: {word} needs a value", hint=f"write the value behind {word}")
        values = tuple(rest[: flag.values])
        del rest[: flag.values]
        found.append(FoundFlag(name, flag, (word, *values), values))
    return found, tuple(rest)


def _known(typed: Typed, word: str) -> tuple[str, Flag, str | None]:
    """Return the flag in `word`, and its value if the word has it, as in ``--nodes=2`` and ``-N2``."""
    head, equals, value = word.partition("=")
    name = typed.spelled(head)
    flag = typed.flags.get(name)
    if flag is None and typed.spelled is as_gnu and len(word) > 2 and word[1] != "-":
        name, equals, value = word[:2], "=", word[2:].removeprefix("=")
        flag = typed.flags.get(name)
        flag = flag if flag is not None and flag.values == 1 else None
    if flag is None or (equals and flag.values != 1 and not flag.may_have):
        raise BadInput(
            f"{typed.name}: gpurun does not know what to do with {word}",
            hint=f"leave it out, or write what each rank runs, without {typed.name}, behind --launcher",
        )
    if flag.does == "refused":
        raise BadInput(f"{typed.name}: gpurun cannot do what {word} says", hint=flag.why)
    return name, flag, value if equals else None


def taken_of(found: Iterable[FoundFlag]) -> dict[str, tuple[str, ...]]:
    """Return the flags that gpurun leaves out, by reason."""
    taken = dict[str, tuple[str, ...]]()
    for each in found:
        if each.flag.does == "taken":
            taken[each.flag.why] = (*taken.get(each.flag.why, ()), *each.words)
    return taken


def kept_of(found: Iterable[FoundFlag]) -> tuple[str, ...]:
    """Return the words of the flags that reach the launcher."""
    return tuple(word for each in found if each.flag.does == "kept" for word in each.words)


def value_of(found: Iterable[FoundFlag], *names: str) -> str | None:
    """Return the last value of a flag that has several names; None if it is not there."""
    values = [each.values[0] for each in found if each.name in names]
    return values[-1] if values else None


def number_of(typed: str, found: Iterable[FoundFlag], *names: str, words: tuple[str, ...] = ()) -> int | None:
    """Return the last number of a flag; None if it is not there, or one of `words`.

    Raises:
        BadInput: it is no number.
    """
    value = value_of(found, *names)
    if value is None or value in words:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise BadInput(
            f"{typed}: {names[0]} is {value!r}, which is no number", hint="write how many processes to start"
        )
    return int(value)
