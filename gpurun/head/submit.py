"""From a wish to stored jobs: find the script, read what it says, pin image, code and data, run a pass."""

from __future__ import annotations

import difflib
import os
import platform
import re
import shlex
import stat
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypedDict

import gpurun
from gpurun import faults
from gpurun.content.build import Report, ensure, lookup
from gpurun.content.build import planned as planned_environment
from gpurun.content.images import Engine
from gpurun.content.tree import Walk, scan
from gpurun.documents.convert import did_you_mean
from gpurun.errors import OUTLIVED, BadInput, GpurunError, NeverFits, StateError, words_of
from gpurun.facts import DockerFacts
from gpurun.head.spawn import Head
from gpurun.inventory.model import Inventory, idle_rules
from gpurun.inventory.read import read_inventory_bytes
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.recipe import Recipe, build_spec, check_length, convert_flag, lines_of
from gpurun.jobs.recipe_keys import CONSTRAINTS
from gpurun.jobs.record import Origin, State
from gpurun.jobs.spec import Environment, Grant, JobSpec, Placement
from gpurun.jobs.store import AddCode, JobStore
from gpurun.launch.container import HostShare, shares
from gpurun.launch.launchers import settled
from gpurun.launch.launchers.choosing import (
    ASKED,
    Clue,
    LauncherChoice,
    ProgramClues,
    StartedProgram,
    choose_launcher,
    command_clue,
    name_clues,
    needs_choice,
    programs_in,
    programs_of,
    read_source,
    refuse_two_starters,
)
from gpurun.launch.launchers.line import ScriptLaunch, directives_of, launches_in, read_line
from gpurun.launch.launchers.words import about_operators, look_through, name_of, shell_text
from gpurun.launch.plan import Plan, make_plan
from gpurun.leases.allocate import SSH_PORTS, snapshot
from gpurun.leases.look import look, refuse_while_damaged
from gpurun.leases.store import AllocatorLock, LeaseStore
from gpurun.node.claim_rules import Claimant
from gpurun.quantities import count, duration
from gpurun.scheduler.explain import Explanation, explain
from gpurun.scheduler.model import Gang, Reason, Refusal, Snapshot, new_gang
from gpurun.scheduler.passes import schedule
from gpurun.state import clock
from gpurun.state.audit import AuditLog
from gpurun.state.hosts import Machines
from gpurun.state.paths import home, myself
from gpurun.state.sharing import StateDirectory

if TYPE_CHECKING:
    from typing_extensions import NotRequired

    from gpurun.launch.fabric import Setting

# Find the script of a job's command in the workdir, before a GPU is taken. Nothing of it is executed.


WORKSPACE = PurePosixPath("/workspace")
MOVES = ("-C", "--chdir", "--directory", "--cwd", "-wd", "--wd")
"""Flags of wrappers and of mpirun that start a program in another folder."""
SHEBANG = re.compile(rb"#![ \t]*/[^\r]*\Z")
"""A first line by which Linux finds an interpreter. One that ends as Windows' lines do finds none."""
EXPANDED = re.compile(r"[$`*]|\A~")
"""What a shell would have replaced."""
MOST_WRAPPERS, MOST_FILES, MOST_ALIKE, MOST_LETTERS = 20, 5000, 4, 200


def missing_script(spec: JobSpec) -> BadInput | None:
    """Return what is wrong with the script that a job starts; None if it is there, or only the container knows.

    A whole command in quotes is one word, which is no program.

    Paths of the image, addresses, paths of a shell's text and paths below a mount are not judged.
    """
    if _is_quoted(spec):
        (word,) = spec.command
        return BadInput(
            f"the command {word!r} is one word, and no program has this name",
            hint=f"write the command without quotes: {word}\n    or let a shell read it: bash -c {shlex.quote(word)}",
        )
    program = None if spec.workdir is None or _moves(spec.launcher_flags) else _program(spec.command)
    if program is None or spec.workdir is None:
        return None
    top = Path(spec.workdir)
    if program.kind == "module":
        return _missing_module(program.what, top)
    path = os.path.relpath(WORKSPACE / os.path.normpath(program.what), WORKSPACE)
    if path.split("/")[0] == ".." or "\0" in path or "://" in program.what or _is_below_mount(spec, path):
        return None
    return _missing_file(path, top, is_run=program.kind == "program")


def runs_itself(spec: JobSpec) -> bool:
    """Return whether the first word of a command is an executable file of the workdir that names its interpreter."""
    word = spec.command[0]
    path = os.path.relpath(WORKSPACE / os.path.normpath(word), WORKSPACE) if "/" in word else ".."
    if spec.workdir is None or path.split("/")[0] == ".." or "\0" in path:
        return False
    real, root = Path(os.path.realpath(Path(spec.workdir) / path)), Path(os.path.realpath(spec.workdir))
    try:
        mode = real.stat().st_mode
        if not real.is_relative_to(root) or not stat.S_ISREG(mode) or not mode & 0o111:
            return False
        with real.open("rb") as file:
            return SHEBANG.match(file.readline(MOST_LETTERS)) is not None
    except OSError:
        return False


def _is_quoted(spec: JobSpec) -> bool:
    word = spec.command[0]
    if len(spec.command) > 1 or len(word.split()) < 2 or "\0" in word or word.startswith("/"):
        return False
    return spec.workdir is None or not os.path.lexists(Path(spec.workdir) / word)


def _program(words: tuple[str, ...]) -> StartedProgram | None:
    """Return the file or module that a command starts in the working directory; None if words do not tell."""
    for _ in range(MOST_WRAPPERS):
        inner = look_through(words)
        if inner is None:
            break
        if _moves(inner.around):
            return None
        if name_of(words) == "uv" and inner.words and inner.words[0].endswith(".py"):
            return StartedProgram("python", inner.words[0])
        words = inner.words
    if (text := shell_text(words)) is not None and len(words) > 4 and words[1:3] == ("-c", text):
        if text.startswith('exec "$@"'):
            return _program(words[4:])
        return StartedProgram("python", words[4]) if 'script="$1"; shift; ' in text else None  # `with_local_rank`
    if words and "/" in words[0]:
        return StartedProgram("program", words[0])
    found = programs_of(words)[0]
    is_file = found.kind in ("python", "shell") and found.what not in words[:1]
    return found if (is_file or found.kind == "module") and not found.in_shell else None


def _moves(words: tuple[str, ...]) -> bool:
    return any(word.startswith(MOVES) or word == "-D" for word in words)


def _is_below_mount(spec: JobSpec, path: str) -> bool:
    targets = [target for _, target, _ in spec.mounts] + [spec.outputs or "/", spec.scratch or "/"]
    return any((WORKSPACE / path).is_relative_to(target) for target in targets if target != "/")


def _missing_file(path: str, top: Path, *, is_run: bool) -> BadInput | None:
    real, root = Path(os.path.realpath(top / path)), Path(os.path.realpath(top))
    try:
        mode = real.stat().st_mode
    except (OSError, ValueError):
        return BadInput(f"the workdir has no {path}", where=str(top), hint=_alike(path, top))
    if not real.is_relative_to(root):
        return None  # a link that leads out of the workdir
    inside, quoted = str(real.relative_to(root)), shlex.quote(path)
    if real != root and Walk(root).leaves_out(inside):
        return BadInput(
            f".gitignore excludes {path} in the workdir, so gpurun does not copy {path} to hosts", where=str(top),
            hint=f"change .gitignore, or run `git add -f {shlex.quote(inside)}`: gpurun sends files that git tracks",
        )  # fmt: skip
    if is_run and stat.S_ISREG(mode) and not mode & 0o111:
        starter = "python3" if path.endswith(".py") else "bash"
        hint = f"run `chmod +x {quoted}`, or write the command as: {starter} {quoted}"
        return BadInput(f"{path} is not executable", where=str(top), hint=hint)
    return None


def _missing_module(name: str, top: Path) -> BadInput | None:
    """Judge a module of a package of the workdir. Another one may be in the image."""
    first, *rest = name.split(".")
    if not rest or not all(part.isidentifier() for part in (first, *rest)):
        return None
    if not (top / first / "__init__.py").exists():
        return None
    base = top.joinpath(first, *rest)
    if base.with_name(f"{base.name}.py").exists() or base.is_dir() or list(base.parent.glob(f"{base.name}.*.so")):
        return None
    path = "/".join((first, *rest)) + ".py"
    return BadInput(f"the workdir has no module {name} ({path})", where=str(top), hint=_alike(path, top))


def _alike(path: str, top: Path) -> str:
    """Return what a person may have meant: a file of the workdir, or a shell that expands the name."""
    if EXPANDED.search(path):
        return "gpurun starts no shell to expand the name: write the command as sh -c '…'"
    wanted, found = PurePosixPath(path), islice(Walk(top.resolve()).entries(), MOST_FILES)
    try:
        files = [PurePosixPath(name) for name, entry in found if entry.is_file(follow_symlinks=False)]
    except OSError:
        files = []
    same = [file for file in files if file.name == wanted.name]
    near = difflib.get_close_matches(path[:MOST_LETTERS], map(str, files), n=MOST_ALIKE)
    others = sorted((file for file in files if file.suffix == wanted.suffix != ""), key=lambda file: len(file.parts))
    shown = list(dict.fromkeys([*map(str, same), *near, *map(str, others)]))[:MOST_ALIKE]
    if not shown:
        return "give the folder of the program with --workdir; write a file of the image with its absolute path"
    return f"the workdir has {', '.join(shown)}; write a file of the image with its absolute path"


# Read a job's program at submit, for what it says of its launcher. Nothing of it is executed.


MOST_READ, MOST_SOURCE_BYTES, MOST_BYTES_IN_ALL = 100, 1 << 20, 2 << 20
MOST_FOLDERS = 8
COMMAND = "the command"


def clues_of(spec: JobSpec) -> ProgramClues:
    """Return what the program of a job says: its command, its script, and the modules beside the script.

    Reads at most `MOST_FILES` regular files of the workdir.
    """
    return ProgramReading(None if spec.workdir is None else Path(spec.workdir)).of_command(spec.command)


def script_clues_of(spec: JobSpec) -> ProgramClues:
    """Return what the shell script says that each rank runs; nothing, without one. Reads no Python."""
    programs = [each for each in programs_of(spec.command) if each.kind == "shell" or "/" in each.what]
    reading = ProgramReading(None if spec.workdir is None else Path(spec.workdir), is_python_read=False)
    reading.take([each for each in programs if each.kind in ("shell", "program")], COMMAND)
    return reading.result()


def clues_in(text: str, shown: str, folder: Path | None, names: Iterable[str] = ()) -> ProgramClues:
    """Return what Python source says, with the modules in `folder`.

    Args:
        shown: the name of the source for people.
        names: dotted names of what the program has already imported.
    """
    reading = ProgramReading(folder)
    reading.note(name_clues(list(names)), shown)
    reading.python(text, shown, folder)
    return reading.result()


class ProgramReading:
    """The files of one program, read."""

    def __init__(self, workdir: Path | None, *, is_python_read: bool = True) -> None:
        self._workdir, self._is_python_read = workdir, is_python_read
        self._real = None if workdir is None else Path(os.path.realpath(workdir))
        self._clues: dict[Clue, str] = {}
        self._left, self._seen = MOST_BYTES_IN_ALL, set[Path]()
        self._launches: tuple[ScriptLaunch, ...] = ()
        self._starts = self._unread = self._unknown = ""
        self._looked: list[str] = []
        self._directives: tuple[tuple[tuple[str, str], ...], str] = ((), "")
        self._trains = self._by_srun = False

    def of_command(self, command: tuple[str, ...]) -> ProgramClues:
        """Return what a command says."""
        line = read_line(command)
        self._by_srun = line.by_srun
        self.take(programs_of(line.whole), COMMAND)
        if ("--launcher", "pytorch") in pairwise(command):
            self.note([ASKED], COMMAND)
        return self.result()

    def result(self) -> ProgramClues:
        """Return what was found so far."""
        is_harmless = not (self._trains or self._clues or self._launches)
        looked = ", ".join(self._looked[:3])
        return ProgramClues(
            self._clues, is_harmless, self._launches, self._starts, self._unread, looked, *self._directives,
            unknown=self._unknown,
        )  # fmt: skip

    def note(self, clues: Iterable[Clue], where: str) -> None:
        """Note clues of one place, unless they are known."""
        for clue in clues:
            self._clues.setdefault(clue, where)

    def python(self, data: bytes | str, shown: str, folder: Path | None, package: Path | None = None) -> None:
        """Note what Python source says, and the modules that it imports.

        Args:
            folder: where its absolute imports begin.
            package: where its relative imports begin, if it has some.
        """
        self._trains = True
        self._looked.append(shown)
        if not self._is_python_read:
            return
        source = read_source(data)
        if source.damage:
            self._cannot(f"gpurun cannot read {shown}: {source.damage}")
        waiting = deque([(source, shown, package or folder)])
        while waiting:
            source, shown, beside = waiting.popleft()
            for clue, line in source.clues.items():
                self.note([clue], shown if shown == COMMAND else f"{shown} line {line}")
            for level, name in source.imports:
                top = folder if level == 0 or beside is None else beside.joinpath(*[".."] * (level - 1))
                for module in self._modules(name, top):
                    if (found := self._data(module)) is not None:
                        waiting.append((read_source(found), self._shown(module), module.parent))

    def take(self, programs: Iterable[StartedProgram], shown: str) -> None:
        """Note what programs say that one text starts."""
        for each in programs:
            if each.kind == "launcher":
                self._cannot(f"gpurun cannot read how {shown} starts {each.what}")
            elif each.kind == "source":
                self.python(each.what, shown, self._workdir)
            elif each.kind == "module":
                self._module(each)
            elif each.kind == "unread":
                self._cannot(f"gpurun cannot read which program {each.what} runs")
            elif each.kind != "harmless":
                self._file(each, shown)

    def _module(self, program: StartedProgram) -> None:
        name, top = program.what, self._in_workdir(program.folder or ".")
        self.note(name_clues([name]), COMMAND)
        for path in self._modules(name, top or self._workdir, is_main=True):
            if self._is_read(path):
                return
            if (data := self._data(path)) is not None:
                self.python(data, self._shown(path), top or self._workdir, path.parent)
                return
        if not self._clues:
            self._cannot(f"gpurun does not find the module {name} {self._where}")

    def _file(self, program: StartedProgram, shown: str) -> None:
        if (found := self._found(program)) is None:
            return
        path, data = found
        kind, first = program.kind, b"" if data is None else data[:200].partition(b"\n")[0]
        if kind == "program" and first.startswith(b"#!"):
            kind = "python" if b"python" in first else "shell" if b"sh" in first else kind
        if path is None or data is None or kind == "program" or (kind == "shell" and b"\0" in data):
            if kind == "program" and data is None and (clue := command_clue(PurePosixPath(program.what).name)):
                self.note([clue], shown)
            elif kind == "program" and not program.in_shell:
                self._cannot(f"gpurun does not know what {program.what} does")
                self._unknown = self._unknown or program.what
            elif kind != "program":
                self._cannot(f"gpurun cannot read {program.what} {self._where}")
        elif kind == "python":
            self.python(data, self._shown(path), path.parent)
        else:
            shown, text = self._shown(path), data.decode(errors="replace")
            self._looked.append(shown)
            if not self._directives[0]:
                self._directives = (directives_of(text), shown)
            if launches := launches_in(text, program.arguments, by_srun=self._by_srun):
                self._launches, self._starts = (*self._launches, *launches), self._starts or shown
            self.take(programs_in(text, program.folder), shown)

    def _found(self, program: StartedProgram) -> tuple[Path | None, bytes | None] | None:
        """Return the file of a program, and its content if it can be read; None if it was read before.

        A ``cd`` in brackets ends with them, which words do not show: the folder's last parts may be the whole.
        """
        parts = PurePosixPath(program.folder).parts[-MOST_FOLDERS:]
        folders = [program.folder, *("/".join(parts[at:]) for at in range(1, len(parts) + 1))]
        for folder in folders:
            path = self._in_workdir(str(PurePosixPath(folder) / program.what))
            if path is not None and self._is_read(path):
                return None
            if path is not None and (data := self._data(path)) is not None:
                return path, data
        return self._in_workdir(program.what), None

    def _is_read(self, path: Path) -> bool:
        return Path(os.path.realpath(path)) in self._seen

    def _cannot(self, why: str) -> None:
        self._trains, self._unread = True, self._unread or why

    @property
    def _where(self) -> str:
        return "in the workdir" if self._workdir is not None else "(the job has no workdir)"

    def _modules(self, name: str, top: Path | None, *, is_main: bool = False) -> list[Path]:
        """Return the files that an import may mean, those of the packages around a module included."""
        parts, found = name.split(".") if name else [], list[Path]()
        if self._workdir is None or top is None or not all(part.isidentifier() for part in parts):
            return []
        for folder in dict.fromkeys((top, self._workdir)):
            for size in range(len(parts), 0, -1):
                base = folder.joinpath(*parts[:size])
                found += [base.with_name(f"{base.name}.py"), base / ("__main__.py" if is_main else "__init__.py")]
                if is_main:
                    break
        return found

    def _in_workdir(self, name: str) -> Path | None:
        """Return the file that a path of the container means; None if it is not of the workdir."""
        path = PurePosixPath(name)
        if self._workdir is None or "\0" in name or not name:
            return None
        if path.is_absolute() and not path.is_relative_to(WORKSPACE):
            return None
        return self._workdir / (path.relative_to(WORKSPACE) if path.is_absolute() else path)

    def _data(self, path: Path) -> bytes | None:
        """Return the content of a regular file of the workdir; None if it is not one, too large, or read before."""
        try:
            real = Path(os.path.realpath(path))
            is_there = self._real is not None and real.is_relative_to(self._real) and real.is_file()
        except (OSError, ValueError):
            return None
        most = min(MOST_SOURCE_BYTES, self._left)
        if not is_there or real in self._seen or len(self._seen) >= MOST_READ or most <= 0:
            return None
        self._seen.add(real)
        try:
            data = read_inventory_bytes(real, "the program", most_bytes=most)
        except BadInput:
            return None
        self._left -= min(len(data), most)
        return data if len(data) <= most else None

    def _shown(self, path: Path) -> str:
        return os.path.relpath(path, self._workdir) if self._workdir is not None else str(path)


# Turn a recipe and flags, or a call from Python, into a spec.


NO_JOB = "j-00000000"
"""The id of a job that is only thought of."""

Flags = Mapping[str, tuple[str, object]]
"""Flag → the key of a recipe or of its constraints with the same meaning, and what was given; None = it was not."""


def spec_of(
    recipe: Recipe | None, inventory: Inventory | None, flags: Flags, *,
    reads: Callable[[JobSpec], ProgramClues] = clues_of, is_plan: bool = False,
) -> tuple[JobSpec, tuple[str, ...]]:  # fmt: skip
    """Return a recipe and flags as one spec, and lines that tell the user how gpurun read the command.

    Args:
        inventory: None = do not ask whether its hosts could hold the job.
        reads: returns what the program of the job says of its launcher; called if nothing else names the launcher.
        is_plan: nothing runs, so a line says what submit would refuse because of the launcher.

    Raises:
        BadInput: something is missing or wrong, or nothing says how the processes of the program find each other. Names
            the line of the recipe, if the recipe decides it.
        NeverFits: the inventory can never hold it.
    """
    overrides, constraints = _converted(flags)
    given = {*overrides, *(recipe.given if recipe is not None else ())}
    lines = lines_of(recipe, dict(flags.values()))
    with lines.named():
        choice = LauncherChoice(build_spec(recipe, overrides, constraints))
    is_chosen = needs_choice(choice.spec, given)
    with lines.named("command"):
        if is_chosen:
            choice = choose_launcher(choice.spec, given, reads(choice.spec))
        spec, said = settled(choice.spec, is_named=is_chosen or "launcher" in given, runs_itself=runs_itself)
        if not is_chosen:
            refuse_two_starters(spec, script_clues_of(spec))
        check_length(spec)
    missing = missing_script(spec)
    if missing is not None and not is_plan:
        raise lines.at_line(missing, "command")
    if inventory is not None:
        _refuse_impossible(spec, inventory, choice, said)
        with lines.named("idle_timeout"):
            refuse_longer_idle(spec, inventory)
    if choice.doubt is not None and not is_plan:
        raise lines.at_line(choice.doubt, "command")
    refused = missing or choice.doubt
    would = () if refused is None else _refused(lines.at_line(refused, "command"))
    return spec, (*would, *choice.said, *said, *about_operators(choice.spec.command))


def _refuse_impossible(spec: JobSpec, inventory: Inventory, choice: LauncherChoice, said: tuple[str, ...]) -> None:
    try:
        refuse_impossible(spec, inventory)
    except NeverFits as error:
        if choice.stays:
            alone = f"{choice.stays}, so the job stays on one host; --one-per-host starts the command once on each host"
            error.hint = f"{alone}\n    {error.hint}"
        elif spec.constraints != choice.spec.constraints:  # the line's own text keeps the gang on few hosts
            error.hint = "\n    ".join(filter(None, (*said, error.hint)))
        raise


def _converted(flags: Flags) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a JobSpec and of its Constraints that flags give. Raises BadInput that names the flag."""
    found: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for flag, (key, value) in flags.items():
        if value is not None:
            field, converted = convert_flag(flag, key, value)
            fields = found[key in CONSTRAINTS]
            fields[field] = {**fields.get(field, {}), **converted} if field == "retry" else converted
    return found


def _refused(problem: BadInput) -> tuple[str, ...]:
    return (f"gpurun: submit would refuse this job: {problem.message}", *f"  → {problem.hint}".split("\n"))


def refuse_impossible(spec: JobSpec, inventory: Inventory) -> None:
    """Refuse a job that can never run, with exit code 3."""
    if spec.pool and not inventory.pools:
        raise NeverFits(f"there is no pool {spec.pool!r}: the inventory has no pools", hint="leave out --pool")
    gang = new_gang(spec, job=NO_JOB, submitted_s=0.0)
    refusal = _refusal(gang, inventory)
    if isinstance(refusal, Refusal):
        hint = _about_generations(inventory)
        if unknown := sorted(set(spec.constraints.generations) - set(inventory.generations)):
            meant = did_you_mean(unknown[0], inventory.generations)
            raise NeverFits(f"the inventory has no GPUs of generation {unknown[0]!r}{meant}", hint=hint)
        never = f"the job can never start: {refusal.message}"
        raise NeverFits(never, hint=_about_pools(gang, inventory) if refusal.reason is Reason.POOL else hint)


def refuse_longer_idle(spec: JobSpec, inventory: Inventory) -> None:
    """Raise BadInput if the job's own `idle_timeout` is longer than its pool allows."""
    rules, own_s = idle_rules(inventory.pools, spec.pool), spec.idle_timeout_s
    if rules.idle_timeout_s is None or own_s is None or rules.idle_longer or own_s <= rules.idle_timeout_s:
        return
    most = duration(rules.idle_timeout_s)
    raise BadInput(
        f"idle_timeout {duration(own_s)} is longer than idle_timeout {most} of pool {rules.name}",
        hint=f"use at most {most}; `idle_longer: true` of the pool in the inventory allows longer times",
    )


def _about_generations(inventory: Inventory) -> str:
    """Return how many GPUs of each generation the inventory has."""
    gpus = Counter({host.generation: 0 for host in inventory.hosts})
    for host in inventory.hosts:
        gpus[host.generation] += host.gpus
    alone = "; all GPUs of a job must be of one generation" if len(gpus) > 1 else ""
    return f"the inventory has {', '.join(count(number, f'{name} GPU') for name, number in gpus.items())}{alone}"


def _about_pools(gang: Gang, inventory: Inventory) -> str:
    """Return the pools, and what would let the gang run some time."""
    names = sorted(pool.name for pool in inventory.pools)
    others = [gang.wanting(pool=name) for name in names if name != gang.wants.pool]
    ways = [
        "choose a pool with --pool" if any(_refusal(other, inventory) is None for other in others) else "",
        "borrow with --preemptible" if _refusal(gang.wanting(preemptible=True), inventory) is None else "",
        "leave out --pool" if gang.wants.pool and _refusal(gang.wanting(pool=None), inventory) is None else "",
    ]
    return f"the inventory's pools are: {'; '.join(filter(None, (', '.join(names), ', or '.join(filter(None, ways)))))}"


def _refusal(gang: Gang, inventory: Inventory) -> Refusal | None:
    return schedule(Snapshot(inventory, queue=(gang,))).never.get(gang.id)


# Find where a job comes from: the workdir's Git repository, the versions on this machine.


GIT_TIMEOUT_S = 10.0
MOST_DIFF_BYTES = 1 << 20


def origin_of(workdir: Path | None) -> Origin:
    """Return the origin of a job with this workdir. Ignores a repository that cannot be read."""
    found = Origin(gpurun.__version__, platform.python_version(), platform.node())
    commit = b"" if workdir is None else _git(workdir, "rev-parse", "--verify", "HEAD")
    if workdir is None or not commit.strip():
        return found
    diff = _git(workdir, "diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD", "--", ".")
    names = _git(workdir, "ls-files", "-z", "--others", "--exclude-standard")
    text = diff.decode("utf-8", "replace") if len(diff) <= MOST_DIFF_BYTES else f"{len(diff)} bytes, not kept\n"
    return Origin(
        found.gpurun, found.python, found.head, commit.decode("ascii", "replace").strip(), text, names.count(b"\0")
    )


def _git(top: Path, *words: str) -> bytes:
    """Return Git's output; nothing if Git fails. Git starts no program that the repository's settings name."""
    argv = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *words]
    try:
        done = subprocess.run(
            argv, cwd=top, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""


# What a submit would do now, without doing it: for ``--dry-run`` and ``gpurun.submit(…, dry_run=True)``.


class PlacedHostShape(TypedDict):
    """One host of a plan, in rank order."""

    host: str
    rack: str
    gpus: tuple[int, ...]


class PlacedShape(TypedDict):
    """Where a job would run."""

    generation: str
    racks: tuple[str, ...]
    hosts: list[PlacedHostShape]


class EnvironmentShape(TypedDict):
    """The packages on top of the image.

    Attributes:
        built: whether the image with the packages exists already.
        index: where `uv` finds packages, by setting; without passwords.
    """

    image: str
    base: str
    base_id: str
    key: str
    built: bool
    requirements: tuple[str, ...]
    index: Mapping[str, Sequence[str]]


class PlanShape(TypedDict):
    """What a job would do now.

    Attributes:
        job: the frozen job: every setting, defaults included.
        placement: where the job would run; null: the job would wait.
        containers: the argv of `docker run` for each host.
        launch: the argv of the launcher, or of each rank.
        ranks: for each host, the environment of each rank, if gpurun itself starts the ranks.
        said: how gpurun read the command: which flags gpurun replaces, keeps and leaves out.
        settings: for each host, fabric settings with their reasons; only with a placement.
        shares: for each host, the memory and cores that the job may use; only with a placement.
        wait: why the job would wait; only without a placement.
        environment: only if the recipe has `python`.
        image_problem: why `submit` would refuse the job: the head does not have the image, or has no Docker.
    """

    job: JobSpec
    placement: PlacedShape | None
    containers: dict[str, tuple[str, ...]]
    launch: tuple[str, ...]
    ranks: dict[str, tuple[Mapping[str, str], ...]]
    said: tuple[str, ...]
    settings: NotRequired[dict[str, tuple[Setting, ...]]]
    shares: NotRequired[dict[str, HostShare]]
    wait: NotRequired[Explanation]
    environment: NotRequired[EnvironmentShape]
    image_problem: NotRequired[str]


@dataclass(frozen=True)
class Planned:
    """A job that is not submitted.

    Attributes:
        document: all of it, as ``--dry-run --json`` prints it.
        image_problem: why `submit` would refuse the job: the head does not have the image, or has no Docker.
        start: where the job would start now, and how.
        waits: why it would wait; None = it would start.
    """

    document: PlanShape
    image_problem: GpurunError | None
    start: tuple[Placement, Plan] | None
    waits: Explanation | None


def planned(spec: JobSpec, inventory: Inventory, said: Sequence[str], environ: Mapping[str, str]) -> Planned:
    """Plan a job with the leases as they are now.

    Args:
        said: how gpurun read the command, which a person has seen already.

    Raises:
        BadInput, HostNotReady: the environment of the recipe's `python` cannot be planned.
    """
    problem = None if spec.python else _image_problem(spec, inventory)
    document: PlanShape = {
        "job": spec, "placement": None, "containers": {}, "launch": (), "ranks": {}, "said": tuple(said),
    }  # fmt: skip
    if spec.python:
        document["environment"] = _environment(spec, spec.python, inventory, environ)
    if problem is not None:
        document["image_problem"] = str(problem)
    state, now_s = home(environ), clock.now_s()
    gang = new_gang(spec, job=NO_JOB, submitted_s=now_s)
    seen = snapshot(look(state, now_s=now_s), inventory, extra=(gang,))
    decisions = schedule(seen)
    placement = next((placement for started, placement in decisions.starts if started.id == gang.id), None)
    if placement is None:
        waits = explain(decisions, seen, gang.id)
        return Planned({**document, "wait": waits}, problem, None, waits)
    who = Claimant(NO_JOB, 1, StateDirectory(state).known_id() or "", myself(), os.getuid(), os.uname().nodename)
    plan = make_plan(
        claimant=who, spec=spec, grants=placement.grants, inventory=inventory, accounts={}, ssh_port=SSH_PORTS[0]
    )
    grants = placement.grants
    document |= {
        "placement": {
            "generation": placement.generation, "racks": placement.racks,
            "hosts": [
                {"host": each.host, "rack": inventory.by_name[each.host].rack, "gpus": each.gpus} for each in grants
            ],
        },
        "containers": {host.host: host.run for host in plan.hosts},
        "shares": expected(spec, grants, inventory, environ),
        "launch": plan.launch,
        "ranks": {host.host: host.ranks for host in plan.hosts},
        "settings": {host.host: host.settings for host in plan.hosts},
    }  # fmt: skip
    return Planned(document, problem, (placement, plan), None)


def expected(
    spec: JobSpec, grants: Sequence[Grant], inventory: Inventory, environ: Mapping[str, str]
) -> dict[str, HostShare]:
    """Return host → share of a gang that has not started yet, by what this user knows of the hosts."""
    machines = Machines(home(environ)).read(os.getuid())
    there = [grant for grant in grants if grant.host in inventory.by_name]
    known = {}
    for grant in there:
        machine = machines.get(inventory.by_name[grant.host].machine)
        if machine is not None and machine.memory_mib is not None:
            known[grant.host] = DockerFacts(memory_bytes=machine.memory_mib << 20, cores=machine.cores)
    return shares(spec, there, inventory, known=known)


def _image_problem(spec: JobSpec, inventory: Inventory) -> GpurunError | None:
    """Return why `submit` would refuse the job because of its image: a plan is made without it."""
    try:
        Engine(inventory.docker_host).image(spec.image)
    except GpurunError as problem:
        return problem
    return None


def _environment(
    spec: JobSpec, python: Environment, inventory: Inventory, environ: Mapping[str, str]
) -> EnvironmentShape:
    """Return what gpurun would build on top of the image, for a recipe with `python`."""
    engine = Engine(inventory.docker_host)
    plan = planned_environment(python, spec.image, engine, environ)
    found = lookup(engine, plan)
    return {
        "image": plan.reference, "base": spec.image, "base_id": plan.base.id, "key": plan.key,
        "built": found is not None, "requirements": plan.requirements.lines, "index": plan.settings.named,
    }  # fmt: skip


@dataclass(frozen=True)
class Submission:
    """Stored jobs. They will run, even if `problem` names an error.

    Attributes:
        folders: in the order of the specs.
        problem: what failed after the jobs were stored: the pass, or the start of a supervisor or waiter.
    """

    folders: tuple[JobFolder, ...]
    problem: GpurunError | None = None


def submit_jobs(
    specs: Sequence[JobSpec],
    inventory: Inventory,
    home: Path,
    environ: Mapping[str, str],
    *,
    on_stored: Callable[[Sequence[JobFolder]], object] = lambda _: None,
    on_build: Report = lambda *_: None,
) -> Submission:
    """Queue all of these jobs or none, and start those that fit.

    After an exception the caller may submit again. After a Submission it must not, because the jobs are stored.

    Args:
        on_stored: called when the jobs are stored. A pass follows, which may wait for the allocator lock.
        on_build: receives the progress of an environment's build, before the jobs are stored.

    Raises:
        BadInput: an image is not on this machine, or a workdir or data cannot be read. Checked before GPUs become free.
        HostNotReady: an environment cannot be built.
        StateError: a lease is damaged, so the pass granted nothing; or the jobs cannot be stored.
        UnsafeState: the state directory does not protect its users from each other.
    """
    StateDirectory(home).enter()
    pinned, codes = pin(specs, inventory, home, environ, on_build)
    origins = {top: origin_of(None if top is None else Path(top)) for top in {spec.workdir for spec in pinned}}
    return queue_jobs(
        pinned, Path(inventory.source), home, environ, codes=codes, on_stored=on_stored,
        origins=[origins[spec.workdir] for spec in pinned],
    )  # fmt: skip


def pin(
    specs: Sequence[JobSpec],
    inventory: Inventory,
    home: Path,
    environ: Mapping[str, str],
    on_build: Report = lambda *_: None,
) -> tuple[list[JobSpec], Mapping[str, AddCode]]:
    """Return specs with the current image of each name, and the current code and data of each folder.

    Returns:
        The specs; and for each digest of code, a function that gives a new job the code.

    Builds environments that the head does not have.

    Raises:
        BadInput: an image is not on this machine; a workdir, data or what an environment is made of cannot be used.
        HostNotReady: an environment cannot be built.
    """
    from gpurun.content.data import Pins  # noqa: PLC0415  a dry run pins nothing
    from gpurun.content.workdir import CodeStore  # noqa: PLC0415

    engine = Engine(inventory.docker_host)
    specs = _with_environments(specs, engine, environ, on_build)
    ids = {image: engine.image(image).id for image in dict.fromkeys(spec.image for spec in specs)}
    trees = {top: scan(Path(top)) for top in dict.fromkeys(spec.workdir for spec in specs) if top is not None}
    code = {top: tree.digest for top, tree in trees.items()}
    data = Pins(home).pin(source for spec in specs for source in spec.data.values())
    pinned = [
        replace(
            spec, image_id=ids[spec.image], code=code.get(spec.workdir or "", ""),
            left_out=trees[spec.workdir].left_out if spec.workdir is not None else (),
            outputs_limit_mib=_lower(spec.outputs_limit_mib, inventory.outputs_limit_mib),
            data={name: data[source] for name, source in spec.data.items()},
        )
        for spec in specs
    ]  # fmt: skip
    return pinned, {code[top]: partial(CodeStore(home).add, tree=tree) for top, tree in trees.items()}


def _with_environments(
    specs: Sequence[JobSpec], engine: Engine, environ: Mapping[str, str], on_build: Report
) -> list[JobSpec]:
    wanted = {(spec.image, spec.python): spec.python for spec in specs}
    built = {key: ensure(python, key[0], engine, environ, on_build) for key, python in wanted.items() if python}
    return [
        replace(spec, image=built[spec.image, spec.python][0].reference, python=built[spec.image, spec.python][1])
        if spec.python
        else spec
        for spec in specs
    ]


def queue_jobs(
    specs: Sequence[JobSpec],
    inventory: Path,
    home: Path,
    environ: Mapping[str, str],
    *,
    codes: Mapping[str, AddCode],
    ids: Sequence[str] = (),
    origins: Sequence[Origin] = (),
    on_stored: Callable[[Sequence[JobFolder]], object] = lambda _: None,
) -> Submission:
    """Queue jobs of pinned specs, as `submit_jobs` does.

    Args:
        inventory: the file that they are submitted against.
        codes, ids, origins: as for `JobStore.create_many`.

    Raises:
        StateError: as `submit_jobs`.
    """
    refuse_while_damaged(LeaseStore(home).read_all())
    store = JobStore(home)
    store.sweep(now_s=time.time())
    alone = AllocatorLock(home).held if len(specs) > 1 else None
    folders = store.create_many(
        specs, inventory=inventory, now_s=clock.now_s(), alone=alone, codes=codes, ids=ids, origins=origins
    )
    for folder, spec in zip(folders, specs, strict=True):
        AuditLog(home).note("submit", job=folder.id, name=spec.name, gpus=spec.gpus)
    on_stored(folders)
    faults.point()
    return Submission(folders, _start(home, folders, environ))


def _lower(*limits: int | None) -> int | None:
    """Return the lower limit: a recipe cannot raise the inventory's limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def _start(home: Path, folders: Sequence[JobFolder], environ: Mapping[str, str]) -> GpurunError | None:
    """Run a pass, and start a waiter for jobs that must wait. Returns the error, if any; the jobs are stored anyway."""
    problem: GpurunError | None = None
    try:
        Head(home, environ).run_pass(now_s=clock.now_s())
    except OUTLIVED as error:
        problem = _told(error)
    try:
        if any(folder.record().state is State.QUEUED for folder in folders):
            Head(home, environ).ensure_waiter()
    except OUTLIVED as error:
        problem = problem or _told(error)
    return problem


def _told(error: Exception) -> GpurunError:
    if isinstance(error, GpurunError):
        return error
    why = getattr(error, "strerror", None) or words_of(error)
    return StateError(f"gpurun could not start a process: {why}", hint="run `gpurun recover` to try again")
