"""Choose the launcher of a job whose command and recipe name none. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gpurun.errors import BadInput
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers.choosing.sources import Clue
from gpurun.launch.launchers.direct import SRUN, TASKS, TORCHRUN
from gpurun.launch.launchers.horovod import GLOO
from gpurun.launch.launchers.lines.batch import about_directives
from gpurun.launch.launchers.lines.line import read_line
from gpurun.launch.launchers.lines.script import ScriptLaunch
from gpurun.launch.launchers.mpirun import MPIRUN
from gpurun.launch.launchers.texts import once_on_hosts
from gpurun.quantities.counts import count

MOST_SHOWN = 160
BY_ITSELF = ("starts", "one")


@dataclass(frozen=True)
class ProgramClues:
    """What a job's program says of how its processes find each other.

    Attributes:
        clues: each clue → where it is, such as ``train.py line 3``.
        is_harmless: the command visibly trains nothing.
        launches: the launchers that a shell script of it starts.
        starts: that script.
        unread: why gpurun cannot read the program; "" if it can.
        looked: what gpurun has read, for people.
        unknown: the program that the command starts, if it is no script and gpurun does not know it; "" otherwise.
        directives: the ``#SBATCH`` lines of the first shell script that has some: flags and values.
        batch: that script.
        function: the name of the function of Python that each rank calls; "": each runs a command.
    """

    clues: Mapping[Clue, str] = field(default_factory=dict)
    is_harmless: bool = False
    launches: tuple[ScriptLaunch, ...] = ()
    starts: str = ""
    unread: str = ""
    looked: str = ""
    directives: tuple[tuple[str, str], ...] = ()
    batch: str = ""
    function: str = ""
    unknown: str = ""


@dataclass(frozen=True)
class LauncherChoice:
    """A chosen launcher.

    Attributes:
        spec: the job with the launcher.
        said: what a person is told.
        doubt: nothing says how the processes find each other: submit must not run the job, and the launcher is a guess.
        stays: one process uses several GPUs, so the gang stays on one host.
    """

    spec: JobSpec
    said: tuple[str, ...] = ()
    doubt: BadInput | None = None
    stays: str = ""


def needs_choice(spec: JobSpec, given: Collection[str]) -> bool:
    """Return whether nobody names the launcher: neither a recipe or flag (`given`, fields of the spec) nor the command.

    Raises:
        BadInput: gpurun cannot read the command.
    """
    if "launcher" in given:
        return False
    line = read_line(spec.command)
    return line.typed is None and line.hidden is None and bool(line.whole)


def choose_launcher(spec: JobSpec, given: Collection[str], found: ProgramClues) -> LauncherChoice:
    """Choose the launcher of a job for which `needs_choice`.

    Args:
        given: the fields of the spec that a recipe or a flag has given.
        found: what the program says.

    Raises:
        BadInput: a shell script of the job starts processes on other hosts than gpurun can give it.
    """
    about = about_directives(found.directives, found.batch, spec)
    try:
        choice = _as_srun(_chosen(spec, given, found), found)
    except BadInput as error:
        error.hint = "\n    ".join(filter(None, (error.hint, *about)))
        raise
    return replace(choice, said=(*choice.said, *about))


def _chosen(spec: JobSpec, given: Collection[str], found: ProgramClues) -> LauncherChoice:
    told = next((name for name in ("horovod", "controller") if name in given), None)
    means, alone = agreed(found.clues), replace(spec, launcher=TASKS.name)
    if spec.one_per_host:
        choice = LauncherChoice(alone)
    elif told is not None:
        choice = _by(spec, GLOO.name, f"the job has `{told}`")
    elif found.launches:
        once, said = once_on_hosts(spec, found.launches, found.starts, by_srun=read_line(spec.command).by_srun)
        is_one = once.constraints != spec.constraints and once.constraints.gpus_per_host == spec.gpus
        stays = f"{found.starts} starts {found.launches[0].typed.name} for one host" if is_one else ""
        choice = LauncherChoice(once, (said,), stays=stays)
    elif means is not None and not (means in BY_ITSELF and _needs_hosts(spec)):
        choice = _by_clue(spec, means, found.clues)
    elif spec.gpus == 1:
        choice = LauncherChoice(alone)
    elif found.is_harmless:
        said = (
            f"gpurun runs a copy for each of the {spec.gpus} GPUs ({TASKS.name}), because the command starts no "
            "launcher and no Python"
        )
        choice = LauncherChoice(alone, (said,))
    else:
        choice = LauncherChoice(alone, doubt=_doubt(spec, found))
    return choice


def _as_srun(choice: LauncherChoice, found: ProgramClues) -> LauncherChoice:
    """Return the choice for a line with ``srun``: its processes are told what Slurm and PyTorch tell.

    Programs that need MPI or a launcher of their own keep it. A compiled program behind ``srun`` uses MPI as a rule,
    but a command of a Python package does not: without ``--mpi``, a gang of such a program is in doubt.
    """
    spec, line = choice.spec, read_line(choice.spec.command)
    is_told = spec.launcher in (TASKS.name, TORCHRUN.name) and not spec.one_per_host
    if not is_told or not line.by_srun:
        return choice
    slurm = replace(spec, launcher=SRUN.name)
    if spec.gpus == 1 or (choice.doubt is None and not line.by_mpi):
        return LauncherChoice(slurm)
    if found.unknown and line.by_mpi:
        said = f"{MPIRUN.name} starts the ranks: srun's --mpi says that {found.unknown} uses MPI"
        return LauncherChoice(replace(spec, launcher=MPIRUN.name), (said,))
    if found.unknown:
        return LauncherChoice(slurm, doubt=_doubt_of_srun(spec, found))
    said = "gpurun ignores srun's --mpi. A program that uses MPI needs --launcher mpirun"
    return LauncherChoice(slurm, (said,) if line.by_mpi and spec.launcher != TORCHRUN.name else ())


def _doubt_of_srun(spec: JobSpec, found: ProgramClues) -> BadInput:
    return BadInput(
        f"srun starts {found.unknown}, and gpurun does not know whether {found.unknown} uses MPI",
        hint=f"if the program uses MPI: {_way(spec, found, 'launcher', MPIRUN.name)}\n"
        f"    if the program reads variables of Slurm or PyTorch: {_way(spec, found, 'launcher', SRUN.name)}",
    )


def refuse_two_starters(spec: JobSpec, found: ProgramClues) -> None:
    """Refuse a launcher whose ranks run a script that starts a launcher, unless a person wants copies.

    Args:
        found: what the script of `spec.command` says.
    """
    if found.launches and spec.gpus > 1 and not spec.one_per_host and spec.launcher != TASKS.name:
        command = shlex.join(spec.command)
        raise BadInput(
            f"{spec.launcher} starts {found.starts} for each of {spec.gpus} ranks, and each copy would start "
            f"{found.launches[0].typed.name}",
            hint=f"to run {found.starts} once on each host, leave out the launcher: gpurun submit -n {spec.gpus} … -- "
            f"{command}\n    or choose --launcher {TASKS.name}, which runs {found.starts} once for each GPU",
        )


def _needs_hosts(spec: JobSpec) -> bool:
    """Return whether the gang needs several hosts: a program that knows one host would train once on each."""
    return spec.constraints.gpus_per_host not in (None, spec.gpus)


def _by_clue(spec: JobSpec, means: str, clues: Mapping[Clue, str]) -> LauncherChoice:
    clue, where = next((each, where) for each, where in clues.items() if each.means == means)
    if means not in BY_ITSELF:
        return _by(spec, means, f"{where} uses {clue.name}")
    how = "starts the processes of its host itself" if means == "starts" else "uses several GPUs in one process"
    why = f"{where} uses {clue.name}, and the program {how}"
    return _once(spec, why)


def _by(spec: JobSpec, launcher: str, why: str) -> LauncherChoice:
    return LauncherChoice(replace(spec, launcher=launcher), (f"{launcher} starts the ranks: {why}",))


def _once(spec: JobSpec, why: str) -> LauncherChoice:
    """Start one process, which sees all GPUs. On a second host it would be another program, which trains by itself."""
    alone = replace(spec, launcher=TASKS.name)
    if spec.gpus == 1:
        return LauncherChoice(alone)
    chosen = replace(alone, one_per_host=True, constraints=replace(spec.constraints, locality="host"))
    said = f"gpurun starts one process ({TASKS.name}), and the job stays on one host: {why}"
    return LauncherChoice(chosen, (said,), stays=why)


def agreed(clues: Collection[Clue]) -> str | None:
    """Return the launcher that all clues agree on, or "starts" or "one"; None if there is none.

    A program that can use several GPUs in one process, and also join a gang, joins it. A program that starts the
    processes of its host needs no launcher for PyTorch.
    """
    launchers = {clue.means for clue in clues if clue.means not in ("", *BY_ITSELF)}
    own = {clue.means for clue in clues if clue.means in BY_ITSELF}
    torch = {TORCHRUN.name, "deepspeed"}
    if "starts" in own and launchers <= torch:
        return "starts"
    is_soft = all(clue.is_soft for clue in clues if clue.means == TORCHRUN.name)
    if "one" in own and (not launchers or (launchers == {TORCHRUN.name} and is_soft and _has_device_map(clues))):
        return "one"
    if launchers == torch:
        return "deepspeed"
    return launchers.pop() if len(launchers) == 1 else None


def _has_device_map(clues: Collection[Clue]) -> bool:
    return any(clue.name == "device_map" for clue in clues)


def _doubt(spec: JobSpec, found: ProgramClues) -> BadInput:
    told: dict[str, str] = {
        clue.means: f"{where} uses {clue.name}" for clue, where in found.clues.items() if clue.means
    }
    names = [name for name in told if name not in ("", *BY_ITSELF)]
    own = ", and ".join(told[name] for name in BY_ITSELF if name in told)
    if found.unread:
        why = found.unread
    elif names:
        why = ", and ".join(told[name] for name in names)
    elif own:
        gives = count(spec.constraints.gpus_per_host or spec.gpus, "GPU")
        why = f"{own}, which runs on one host, but the job gets {gives} of each host"
    else:
        why = f"{found.looked or 'the command'} uses no library for distributed training that gpurun knows"
    first, *others = names or [TORCHRUN.name, GLOO.name]
    ors = "".join(f"   (or {_way(None, found, 'launcher', name)})" for name in others)
    return BadInput(
        f"gpurun does not know how {spec.gpus} processes of the program find each other: {why}",
        hint=f"if the processes train together: {_way(spec, found, 'launcher', first)}{ors}\n"
        f"    to run {spec.gpus} copies, one for each GPU: {_way(spec, found, 'launcher', TASKS.name)}\n"
        f"    to run one process on each host, with all GPUs of the host: {_way(spec, found, 'one_per_host', '')}",
    )


def _way(spec: JobSpec | None, found: ProgramClues, key: str, value: str) -> str:
    """Return what to write; `spec` None: the setting alone."""
    if found.function:
        setting = f"{key}={value!r}" if value else f"{key}=True"
        return setting if spec is None else f"gpurun.submit({found.function}, …, gpus={spec.gpus}, {setting})"
    flag = f"--{key.replace('_', '-')}{f' {value}' if value else ''}"
    if spec is None:
        return flag
    command = shlex.join(spec.command)
    shown = command if len(command) <= MOST_SHOWN else f"{command[:MOST_SHOWN]}…"
    return f"gpurun submit -n {spec.gpus} … {flag} -- {shown}"
