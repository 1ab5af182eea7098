"""What the launchers in a shell's text would start: on how many hosts, how many processes. Pure; nothing is run.

gpurun runs such a text once on each host, and tells it of the others by variables. A text that names hosts itself, or
says that there is one, does not follow them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from gpurun.errors import BadInput
from gpurun.launch.launchers.lines.each_host import ACCELERATE, FABRIC, LLAMAFACTORY, SWIFT
from gpurun.launch.launchers.lines.flags import CHOSEN, NO_COUNTS, FoundFlag, Typed, read_flags, value_of
from gpurun.launch.launchers.lines.line import Start, begun
from gpurun.launch.launchers.lines.shell import in_background, simple_commands
from gpurun.launch.launchers.lines.table import SRUN
from gpurun.launch.launchers.lines.torch import LAUNCH, TORCHRUN

GIVEN = frozenset({
    "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR",
    "PET_MASTER_PORT", "GPURUN_NODE", "GPURUN_NODES", "GPURUN_PORT",
})  # fmt: skip
"""What the only process of a host reads of its gang in the environment. A text's own default for it does not count."""
BEHIND_SRUN = frozenset({
    "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LAUNCH_NODE_IPADDR",
})  # fmt: skip
"""What it also reads, if ``srun`` stands in front."""
PLACED_BY: Mapping[str, tuple[str, str, str, str]] = {
    ACCELERATE.name: ("--num-machines", "--machine-rank", "--main-process-ip", "--num-processes"),
    FABRIC.name: ("--num-nodes", "--node-rank", "--main-address", ""),
}
"""Launchers whose flags say the hosts, which one this is, and where the first one is; and all processes."""
SETS = ("export", "local", "declare", "typeset", "readonly")
DEPTH, MOST_SHOWN, MOST_VERSIONS = 20, 300, 5
MOST_COMMANDS, MOST_WORDS, MOST_LAUNCHES, MOST_CHARACTERS = 5000, 500, 100, 10_000
TOLD, UNKNOWN = "\1", "\0"
"""What stands for a variable that gpurun sets, and for one whose value words cannot tell."""
_SET_UNLESS = re.compile(r"\$\{([A-Za-z_]\w*):?=([^{}]*)\}")
_PRODUCT = re.compile(r"\$\(\(\s*\$?\{?(\w{1,100})\}?\s*\*\s*\$?\{?(\w{1,100})\}?\s*\)\)")
_SETS = re.compile(r"[A-Za-z_]\w*\+?=")
_EXPANSION = re.compile(
    r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`"
    r"|\$(?:(?P<bare>[A-Za-z_]\w*|[0-9@*])"
    r"|\{(?P<name>[A-Za-z_]\w*|[0-9]+|[@*])(?:\[[@*0]\])?(?::?[-=](?P<default>[^{}]*))?\}|(?:\{[^{}]*\}|.?))",
    re.DOTALL,
)


class ScriptLaunch(NamedTuple):
    """A launcher that a shell's text starts.

    Attributes:
        typed: the launcher.
        per_host: the processes that it starts on each host; None = the text does not say.
        hosts: the hosts on which it is right; None = as many as gpurun says.
        names_hosts: it says itself where the other hosts are, or which one this is.
        line: its command line for people, with ``…`` for what words cannot tell.
        besides: what to write for flags that this line leaves out.
        is_left: the text ends without it: it stands in front of ``&``.
        at_once: it stands in front of ``&``, so it runs beside others.
    """

    typed: Typed
    per_host: int | None = None
    hosts: int | None = None
    names_hosts: bool = False
    line: str = ""
    besides: tuple[str, ...] = ()
    is_left: bool = False
    at_once: bool = False


def launches_in(text: str, arguments: tuple[str, ...] = (), *, by_srun: bool = False) -> tuple[ScriptLaunch, ...]:
    """Return the launchers that a text starts. Its variables have their values, as far as words can tell.

    Args:
        arguments: the script's own, ``$1`` and so on.
        by_srun: ``srun`` stands in front, so the text may read Slurm's variables.
    """
    commands = [words[:MOST_WORDS] for words in islice(simple_commands(text), MOST_COMMANDS)]
    values = _Values(commands, arguments, GIVEN | BEHIND_SRUN if by_srun else GIVEN)
    behind = {words[:MOST_WORDS]: is_left for words, is_left in islice(in_background(text), MOST_COMMANDS)}
    found = [(version, behind.get(words)) for words in commands for version in values.versions(words)]
    evaluated = " ; ".join(" ".join(words[1:]) for words, _ in found if words[:1] == ("eval",))[:MOST_CHARACTERS]
    found += [(values.of(words), None) for words in simple_commands(evaluated)]
    starts = ((begun(words), is_left) for words, is_left in found if words[:1] != ("eval",))
    launches = (
        _launch(start, values)._replace(line=line, besides=besides, is_left=bool(is_left), at_once=is_left is not None)
        for start, is_left in starts
        if start is not None
        for line, besides in [_shown(start)]
    )
    return tuple(islice(launches, MOST_LAUNCHES))


def _shown(start: Start) -> tuple[str, tuple[str, ...]]:
    """Return the command line of a launcher for people, and what to write for the flags that it leaves out.

    Flags that gpurun replaces have no unknown values here, and Slurm's flags that it refuses are left out, so that
    gpurun reads the line.
    """
    words, besides = _readable(start.typed, start.words)
    return " ".join([*_program(start), *map(_word, words)])[:MOST_SHOWN], besides


def _program(start: Start) -> tuple[str, ...]:
    typed = start.typed
    return tuple(typed.programs[0].split()) if typed.programs else ("python3", "-m", *typed.modules[0].split())


def _readable(typed: Typed, words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    known = {name: flag._replace(does="taken") for name, flag in typed.flags.items()}
    try:
        found, rest = read_flags(replace(typed, flags=known), words)
    except BadInput:
        return words, ()
    kept, besides = list[str](), list[str]()
    for each in found:
        if typed.flags[each.name].does == "refused":
            besides.append(f"{' '.join(map(_word, each.words))}: {each.flag.why}")
        elif each.flag.why != CHOSEN or not any(mark in "".join(each.values) for mark in (TOLD, UNKNOWN)):
            kept += each.words
    inner = begun(rest) if typed is SRUN and rest else None
    if inner is not None and inner.words and inner.typed is not SRUN:
        behind, more = _readable(inner.typed, inner.words)
        front = rest[: len(rest) - len(inner.words)] if rest[-len(inner.words) :] == inner.words else _program(inner)
        rest, besides = (*front, *behind), [*besides, *more]
    return (*kept, *rest), tuple(besides)


def _word(word: str) -> str:
    """Return a word as a person types it, with ``…`` for what words cannot tell."""
    shown = re.sub(f"[{TOLD}{UNKNOWN}]+", "…", word)
    return shown if shlex.quote(shown.replace("…", "x")) == shown.replace("…", "x") else shlex.quote(shown)


class _Values:
    """The variables of a text. One that it sets to several values is unknown."""

    def __init__(self, commands: Iterable[tuple[str, ...]], arguments: tuple[str, ...], told: frozenset[str]) -> None:
        self._told = told
        self._typed = {str(at): argument for at, argument in enumerate(arguments, start=1)}
        self._typed |= dict.fromkeys("@*", " ".join(arguments))
        self._known, self._depth = dict[str, str](), 0
        self._several = dict[str, list[str]]()
        for words in commands:
            for word in _assigned(words):
                name, _, value = word.partition("=")
                if name.endswith("+"):
                    name = name[:-1]
                    value = f"{self._typed.get(name, '')} {value}"
                elif (before := self._typed.get(name, value)) != value:
                    self._several.setdefault(name, [before]).append(value)
                    value = UNKNOWN
                self._typed[name] = value[:MOST_CHARACTERS]

    def versions(self, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return what a command may be: more than one if its program is a variable that has several values."""
        match = _EXPANSION.fullmatch(words[0])
        programs = self._several.get(match["bare"] or match["name"] or "", []) if match is not None else []
        versions = [(*self.of((each,))[0].split(), *self.of(words[1:])) for each in programs[:MOST_VERSIONS]]
        return [each for each in versions if each] or [self.of(words)]

    def of(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Return words as a shell makes them: with the values of variables, and split where one stands alone."""
        found = list[str]()
        for word in words:
            text = self.text(word)
            found += text.split() if text != word and _EXPANSION.fullmatch(word) else [text]
        return tuple(found[:MOST_WORDS])

    def text(self, word: str) -> str:
        """Return a word with the values of its variables."""
        pieces, end, size = list[str](), 0, 0
        for match in _EXPANSION.finditer(word):
            pieces += [word[end : match.start()], self._value(match)]
            end = match.end()
            size += len(pieces[-1])
            if size > MOST_CHARACTERS:
                return UNKNOWN
        return "".join([*pieces, word[end:]])

    def _value(self, match: re.Match[str]) -> str:
        name = match["bare"] or match["name"]
        if name is None:
            return self._product(match[0])
        if name not in self._known and name in self._typed and self._depth < DEPTH:
            self._known[name] = ""  # of itself, as in `A=${A:-x}`, it has the value of the environment
            self._depth += 1
            self._known[name] = self.text(self._typed[name])
            self._depth -= 1
        if self._known.get(name):
            return self._known[name]
        if name in self._told:
            return TOLD
        return UNKNOWN if match["default"] is None else self.text(match["default"].strip("\"'"))

    def _product(self, text: str) -> str:
        """Return the value of ``$((A * B))``: a number, `TOLD`, or `TOLD` and a number, such as eight for each host."""
        match = _PRODUCT.fullmatch(text)
        if match is None:
            return UNKNOWN
        factors = sorted(self.text(f"${{{name}}}" if not name.isdecimal() else name) for name in match.groups())
        if all(_number(each) is not None for each in factors):
            return str(int(factors[0]) * int(factors[1]))
        if factors[0] != TOLD or (factors[1] != TOLD and _number(factors[1]) is None):
            return UNKNOWN
        return TOLD if factors[1] == TOLD else f"{TOLD}{factors[1]}"


def _assigned(words: tuple[str, ...]) -> Iterator[str]:
    if words[0] == ":":  # `: ${A:=x}` sets what the environment does not
        yield from (f"{match[1]}=${{{match[1]}:-{match[2]}}}" for match in map(_SET_UNLESS.fullmatch, words) if match)
        return
    declares = words[0] in SETS
    for word in words[1:] if declares else words:
        if _SETS.match(word):
            yield word
        elif not declares:
            return


def _launch(start: Start, values: _Values) -> ScriptLaunch:
    typed, is_torch = start.typed, start.typed in (TORCHRUN, LAUNCH)
    if typed in (LLAMAFACTORY, SWIFT):
        return _by_variables(typed, values)
    try:
        if typed.read is None and typed.each_host is not None and typed.name not in PLACED_BY:
            counts = typed.each_host((typed.name,), start.words).counts
            return ScriptLaunch(typed, counts.ranks or counts.per_host, hosts=1)
        found, rest = read_flags(typed, start.words)
        counts = NO_COUNTS if is_torch or typed.read is None else typed.read(found, rest, start.interpreter).counts
    except BadInput:
        return ScriptLaunch(typed, hosts=1)
    if typed.name in PLACED_BY:
        return _by_flags(typed, found, rest)
    return _by_torch(typed, found, rest) if is_torch else ScriptLaunch(typed, counts.ranks or counts.per_host, hosts=1)


def _by_flags(typed: Typed, found: list[FoundFlag], rest: tuple[str, ...]) -> ScriptLaunch:
    """Read a launcher with flags for the hosts. A number of all processes is right for one number of hosts."""
    hosts, rank, address, ranks = (value_of(found, name) or "" for name in PLACED_BY[typed.name])
    each, total = _number(ranks.removeprefix(TOLD)) if ranks.startswith(TOLD) else None, _number(ranks)
    number, is_told = _number(hosts), TOLD in rank and TOLD in address and rest[:1] not in ((), (UNKNOWN,))
    if number is not None and number > 1 and total is not None and total % number == 0:
        each = total // number
    is_told = is_told and (typed is not ACCELERATE or _joins(found, each))
    if number is not None and number > 1:
        return ScriptLaunch(typed, each, number, names_hosts=not is_told)
    follows = hosts == TOLD and is_told and total is None
    return ScriptLaunch(typed, each or total, None if follows else 1)


def _joins(found: list[FoundFlag], each: int | None) -> bool:
    """Return whether the processes of Accelerate join those of other hosts: on hosts with one GPU, only if a flag or a
    configuration file says so. DeepSpeed's own way to other hosts is SSH.
    """
    names = {each.name for each in found}
    if "--use-deepspeed" in names:
        return value_of(found, "--deepspeed-multinode-launcher") == "standard"
    return (each or 1) > 1 or bool(names & {"--multi-gpu", "--use-fsdp", "--use-megatron-lm", "--config-file"})


def _by_variables(typed: Typed, values: _Values) -> ScriptLaunch:
    """Read a launcher whose hosts are variables. LLaMA-Factory reads them on a host with one GPU only if forced."""
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "NPROC_PER_NODE", "FORCE_TORCHRUN")
    hosts, rank, address, each, forced = (values.text(f"${name}") for name in names)
    number, is_told = _number(hosts), TOLD in rank and TOLD in address
    if number is not None and number > 1:
        return ScriptLaunch(typed, _number(each), number, names_hosts=not is_told)
    follows = hosts == TOLD and is_told and (typed is SWIFT or forced.lower() in ("1", "true"))
    return ScriptLaunch(typed, _number(each), None if follows else 1)


def _by_torch(typed: Typed, found: list[FoundFlag], rest: tuple[str, ...]) -> ScriptLaunch:
    nodes, per_host = value_of(found, "--nnodes"), _number(value_of(found, "--nproc-per-node"))
    hosts = _number((nodes or "").rpartition(":")[2])
    names_hosts = not all(value is None or TOLD in value for value in _places(found))
    if hosts is not None and hosts > 1:
        return ScriptLaunch(typed, per_host, hosts, names_hosts)
    is_told = rest[:1] not in ((), (UNKNOWN,)) and (nodes is None or TOLD in nodes) and not names_hosts
    is_alone = any(each.name == "--standalone" for each in found)
    if typed is LAUNCH:  # before PyTorch 1.9, it read no variables
        is_alone = nodes is None or any(value_of(found, name) is None for name in ("--node-rank", "--master-addr"))
    return ScriptLaunch(typed, per_host, None if is_told and not is_alone else 1)


def _places(found: list[FoundFlag]) -> Iterator[str | None]:
    """Yield what says where the first host is, and which one this is. A rendezvous of c10d needs its address."""
    endpoint = value_of(found, "--rdzv-endpoint")
    yield value_of(found, "--master-addr")
    yield value_of(found, "--node-rank")
    yield "" if endpoint is None and value_of(found, "--rdzv-backend") not in (None, "static") else endpoint


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and re.fullmatch(r"[0-9]{1,6}", value) else None
