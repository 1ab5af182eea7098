"""Read a command line or a batch script: what stands in front, the launcher, and the words behind it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from gpurun.errors import BadInput
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers.table import LAUNCHERS, SRUN
from gpurun.launch.launchers.torch import ACCELERATE, FABRIC, LAUNCH, LLAMAFACTORY, SWIFT, TORCHRUN
from gpurun.launch.launchers.words import (
    ASSIGNMENT,
    CHOSEN,
    NO_COUNTS,
    SAY,
    SHELLS,
    Counts,
    FoundFlag,
    Typed,
    in_background,
    look_through,
    name_of,
    number_of,
    read_flags,
    shell_text,
    simple_commands,
    taken_of,
    value_of,
)

PYTHON = ("python3", "-u")
DEPTH, MOST_WRAPPERS = 20, 100
"""More wrappers than this are none of a person's."""
FIRST = frozenset(name.split()[0] for typed in LAUNCHERS for name in typed.programs) - {"ds"}
"""What a word among others is taken for a launcher by; `ds` may be anything."""


class Start(NamedTuple):
    """A launcher at the beginning of a command.

    Attributes:
        typed: the launcher.
        words: the words behind its name.
        interpreter: what it runs Python scripts with.
        taken: reason → words that gpurun leaves out.
    """

    typed: Typed
    words: tuple[str, ...]
    interpreter: tuple[str, ...] = PYTHON
    taken: Mapping[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class CommandLine:
    """A command line, read.

    Attributes:
        words: the words behind the launcher; without a launcher, the command itself.
        whole: `words` with the launcher's name.
        typed: the launcher; None if there is none.
        interpreter: what the launcher runs Python scripts with.
        around: wrappers that stay in front of the command of each rank.
        env: the variables that the line sets for each rank.
        taken: reason → words that gpurun leaves out.
        counts: the processes that ``srun`` wants.
        is_read: whether something in front must not stay: an assignment, or ``srun``.
        by_srun: whether ``srun`` stands in front.
        by_mpi: whether its flag ``--mpi`` says that the program uses MPI.
        hidden: the launcher in a part that gpurun cannot read, such as a shell's text; None if there is none.
    """

    words: tuple[str, ...]
    whole: tuple[str, ...] = ()
    typed: Typed | None = None
    interpreter: tuple[str, ...] = PYTHON
    around: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    taken: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counts: Counts = NO_COUNTS
    is_read: bool = False
    by_srun: bool = False
    by_mpi: bool = False
    hidden: Typed | None = None


def read_line(command: tuple[str, ...]) -> CommandLine:
    """Read a command.

    Raises:
        BadInput: ``srun`` has a flag that gpurun does not know, or cannot obey.
    """
    line = CommandLine(command)
    for _ in range(DEPTH):
        if (start := _start(line.words)) is not None:
            return replace(line, words=start.words, whole=line.words, typed=start.typed, interpreter=start.interpreter,
                           taken={**line.taken, **start.taken})  # fmt: skip
        if name_of(line.words) == "srun":
            line = _behind_srun(line)
        elif (inner := look_through(line.words)) is not None:
            assigned = ASSIGNMENT.fullmatch(line.words[0]) is not None
            line = replace(
                line, words=inner.words, around=(*line.around, *inner.around), env={**line.env, **inner.env},
                is_read=line.is_read or (assigned and line.words == command),
            )  # fmt: skip
        else:
            break
    return replace(line, whole=line.words, hidden=_hidden(line.words))


def _start(words: tuple[str, ...]) -> Start | None:
    """Return the launcher that a command begins with, by its name or as a Python module; None if it does not."""
    program = name_of(words)
    if program.startswith("python"):
        return _by_python(words)
    for typed in LAUNCHERS:
        for name in typed.programs:
            size = len(name.split())
            if (program, *words[1:size]) == tuple(name.split()) and typed.is_it(words[size:]):
                return Start(typed, words[size:])
    return None


def _by_python(words: tuple[str, ...]) -> Start | None:
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m" and not words[at].startswith("-c"):
        at += 2 if words[at] in ("-X", "-W") else 1
    own, rest = tuple(word for word in words[1:at] if word != "-u"), words[at:]
    taken = {"flags of the launcher's own Python": own} if own else {}
    interpreter = (words[0], "-u")
    if rest[:1] == ("-m",):
        for typed in LAUNCHERS:
            for name in typed.modules:
                size = 1 + len(name.split())
                if rest[1:size] == tuple(name.split()):
                    return Start(typed, rest[size:], interpreter, taken)
        return None
    start = _start(rest) if rest and "/" in rest[0] and not rest[0].endswith(".py") else None
    return start._replace(interpreter=interpreter, taken=taken) if start is not None else None


def _behind_srun(line: CommandLine) -> CommandLine:
    found, words = read_flags(SRUN, line.words[1:])
    env, export = dict[str, str](), value_of(found, "--export")
    for word in (export or "").split(","):
        name, equals, value = word.partition("=")
        if equals:
            env[name] = value
    taken = taken_of([*found, *(_named(each) for each in found if each.name == "--export")])
    said = taken or {"gpurun starts the ranks": ("srun",)}
    ranks = number_of("srun", found, "--ntasks", "-n")
    hosts = number_of("srun", found, "--nodes", "-N")
    each = number_of("srun", found, "--ntasks-per-node", "--tasks-per-node")
    total = ranks if ranks is not None else hosts * each if hosts is not None and each is not None else None
    return replace(
        line, words=words, env={**line.env, **env}, taken={**line.taken, **said}, is_read=True, by_srun=True,
        counts=Counts(total), by_mpi=(value_of(found, "--mpi") or "none") not in ("none", "list"),
    )  # fmt: skip


def _named(each: FoundFlag) -> FoundFlag:
    """Return srun's ``--export`` as a flag that gpurun replaces: its values are set, the rest is the image's."""
    return each._replace(
        flag=each.flag._replace(
            does="taken", why="gpurun sets the named values for each rank; other variables come from the image"
        )
    )


def _hidden(words: tuple[str, ...]) -> Typed | None:
    """Return the launcher that a command seems to start where gpurun cannot see its flags."""
    if name_of(words) in SAY:
        return None
    text = shell_text(words)
    if text is not None:
        inner = (read_start(command) for command in simple_commands(text))
        return next((typed for typed in inner if typed is not None), None)
    names = [word.rpartition("/")[2] for word in words]
    first = 1 if not name_of(words).startswith("python") else len(words)
    for at in range(first, len(words) - 1):
        is_value = words[at - 1].startswith("--") and words[at - 1] != "--"
        typed = None
        if names[at] in SHELLS and words[at + 1].startswith("-"):
            typed = _hidden(words[at:]) if shell_text(words[at:]) is not None else None
        elif names[at].startswith("python") or (names[at] in FIRST and not is_value):
            start = _start(words[at:])
            typed = start.typed if start is not None else None
        if typed is not None:
            return typed
    return _run_by_python(words) or (_in_a_text(words) if first == 1 else None)


def _in_a_text(words: tuple[str, ...]) -> Typed | None:
    """Return the launcher that another program's text starts, as in ``script -c 'torchrun t.py'``."""
    for word, before in zip(words[1:], words, strict=False):
        if any(name in word for name in FIRST) and len(word.split()) > 1 and not before.startswith("--"):
            for command in islice(simple_commands(word), MOST_WRAPPERS):
                if (start := _start(command)) is not None:
                    return start.typed
    return None


def _run_by_python(words: tuple[str, ...]) -> Typed | None:
    """Return the launcher that another module runs, as in ``python -m debugpy -m torch.distributed.run``."""
    for at in range(1, len(words)):
        if (match := re.fullmatch(r"-[A-Za-z]*?m([a-z_.]*)", words[at])) is None:
            continue
        behind = " ".join(word for word in (match[1], *words[at + 1 : at + 3]) if word)
        for typed in LAUNCHERS:
            if any(f"{behind} ".startswith(f"{name} ") for name in typed.modules):
                return typed
    return None


def read_start(words: tuple[str, ...]) -> Typed | None:
    """Return the launcher of one command of a shell's text."""
    start = begun(words)
    return start.typed if start is not None else None


def begun(words: tuple[str, ...]) -> Start | None:
    """Return the launcher that one command of a shell's text starts; without words, if its flags cannot be read."""
    for _ in range(DEPTH):
        if not words:
            return None
        if (start := _start(words)) is not None:
            return start
        if name_of(words) == "srun":
            return Start(SRUN, words[1:])
        inner = look_through(words)
        if inner is None:
            hidden = _hidden(words)
            return Start(hidden, ()) if hidden is not None else None
        words = inner.words
    return None


# What the launchers in a shell's text would start: on how many hosts, how many processes. Pure; nothing is run.


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
SCRIPT_DEPTH, MOST_SHOWN, MOST_VERSIONS = 20, 300, 5
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
        if name not in self._known and name in self._typed and self._depth < SCRIPT_DEPTH:
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


# The ``#SBATCH`` lines of a script, and gpurun's flags that do the same. Pure.


_LINE = re.compile(r"#SBATCH[ \t]+(-.{1,1000})")
_SHORT = {
    "-N": "--nodes", "-n": "--ntasks", "-t": "--time", "-c": "--cpus-per-task", "-J": "--job-name", "-G": "--gpus",
    "-a": "--array",
}  # fmt: skip
_GPUS = ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gres", "--nodes", "--ntasks", "--ntasks-per-node")
_TIME = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,6})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
_MEMORY = re.compile(r"([0-9]{1,9})([KMGT]?)B?", re.IGNORECASE)
_UNITS = {"K": 1 << 10, "": 1 << 20, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
MOST_LINES = 100


def directives_of(text: str) -> tuple[tuple[str, str], ...]:
    """Return flag and value of each ``#SBATCH`` line; "" for a flag without a value."""
    found = list[tuple[str, str]]()
    for line in islice(text.splitlines(), 1000):
        if (match := _LINE.match(line)) is None:
            continue
        try:
            words = shlex.split(match[1], comments=True)
        except ValueError:
            continue
        while words and len(found) < MOST_LINES:
            name, equals, value = words.pop(0).partition("=")
            if name[:2] in _SHORT and name[1:2] != "-" and len(name) > 2:
                name, equals, value = name[:2], "=", name[2:]
            if not equals and words and not words[0].startswith("-"):
                value = words.pop(0)
            found.append((_SHORT.get(name, name), value))
    return tuple(found)


def about_directives(directives: tuple[tuple[str, str], ...], where: str, spec: JobSpec) -> tuple[str, ...]:
    """Return lines that tell a person which ``#SBATCH`` lines differ from a job, and what to write.

    Args:
        where: the script, for people.
    """
    asked = dict(directives)
    wanted = _wanted(asked, spec)
    read = {*_GPUS, "--time", "--mem", "--cpus-per-task", "--job-name"}
    others = [f"{name}={value}" if value else name for name, value in asked.items() if name not in read]
    if not wanted and not others:
        return ()
    return (
        f"gpurun does not read the #SBATCH lines of {where}",
        *(f"  → to ask for the same, add: {' '.join(wanted)}" for _ in wanted[:1]),
        *(f"  left out: {shlex.join(others)} (only Slurm uses these)" for _ in others[:1]),
    )


def _wanted(asked: Mapping[str, str], spec: JobSpec) -> list[str]:
    """Return gpurun's flags for what a script asks for and the job does not have."""
    wanted, gpus, nodes = list[str](), _gpus(asked), _number_of_batch(asked.get("--nodes", ""))
    if gpus is not None and gpus != spec.gpus:
        wanted.append(f"-n {gpus}")
    if gpus is not None and nodes is not None and nodes > 1 and gpus % nodes == 0:
        each = gpus // nodes
        wanted += [f"--gpus-per-host {each}"] if spec.constraints.gpus_per_host != each else []
    seconds = _seconds(asked.get("--time", ""))
    if seconds is not None and seconds != spec.time_limit_s:
        wanted.append(f"--time-limit {_written(seconds)}")
    if (match := _MEMORY.fullmatch(asked.get("--mem", ""))) and int(match[1]):
        mib = int(match[1]) * _UNITS[match[2].upper()] >> 20
        size = f"{mib >> 10}GiB" if mib % 1024 == 0 else f"{mib}MiB"
        wanted += [f"--memory {size}"] if mib and mib != spec.memory_mib else []
    cores = _number_of_batch(asked.get("--cpus-per-task", ""))
    if cores is not None:
        cores *= _number_of_batch(asked.get("--ntasks-per-node", "")) or 1
        wanted += [f"--cpus {cores}"] if cores != spec.cpus else []
    if (name := asked.get("--job-name", "")) and name != spec.name:
        wanted.append(f"--name {shlex.quote(name)}")
    return wanted


def _written(seconds: int) -> str:
    """Return a time as gpurun reads it, without rounding: ``36h``, ``90m``, ``61s``."""
    unit, size = next((unit, size) for unit, size in (("h", 3600), ("m", 60), ("s", 1)) if seconds % size == 0)
    return f"{seconds // size}{unit}"


def _gpus(asked: Mapping[str, str]) -> int | None:
    """Return the GPUs that a script asks for; None if it does not say."""
    gres = asked.get("--gres", "")
    each = _number_of_batch(asked.get("--gpus-per-node", "")) or (
        _number_of_batch(gres) if gres.startswith("gpu:") else None
    )
    per_task = _number_of_batch(asked.get("--gpus-per-task", ""))
    nodes = _number_of_batch(asked.get("--nodes", "")) or 1
    tasks = _number_of_batch(asked.get("--ntasks", "")) or nodes * (
        _number_of_batch(asked.get("--ntasks-per-node", "")) or 1
    )
    if (total := _number_of_batch(asked.get("--gpus", ""))) is not None:
        return total
    return nodes * each if each is not None else tasks * per_task if per_task is not None else None


def _number_of_batch(text: str) -> int | None:
    """Return a number such as ``8``, ``a100:8`` or ``gpu:a100:8``; None if there is none."""
    match = re.fullmatch(r"(?:[\w.]{1,40}:){0,2}([0-9]{1,5})", text)
    return int(match[1]) if match is not None and int(match[1]) else None


def _seconds(text: str) -> int | None:
    """Return the seconds of a time of Slurm: minutes, minutes:seconds, or hours:minutes:seconds; days in front."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, one, two, three = (None if part is None else int(part) for part in match.groups())
    if days is not None:
        return ((days * 24 + (one or 0)) * 60 + (two or 0)) * 60 + (three or 0) or None
    if three is not None:
        return ((one or 0) * 60 + (two or 0)) * 60 + three or None
    return (one or 0) * 60 + (two or 0) or None
