"""Put gpurun in the place of the launcher that a person typed. Pure.

Whatever the line says is in the job, in the lines for the person, or in a refusal.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from gpurun.errors import BadInput
from gpurun.jobs.spec import MOST_RETRIES, JobSpec, Retry
from gpurun.launch.launchers.choosing import once_on_hosts, refuse_left
from gpurun.launch.launchers.direct import SRUN, TASKS
from gpurun.launch.launchers.launcher import is_told
from gpurun.launch.launchers.line import PYTHON, CommandLine, ScriptLaunch, launches_in, read_line
from gpurun.launch.launchers.table import MPIRUN as MPI
from gpurun.launch.launchers.table import SRUN as BY_SLURM
from gpurun.launch.launchers.table import in_the_image
from gpurun.launch.launchers.torch import python
from gpurun.launch.launchers.words import (
    CHOSEN,
    NO_COUNTS,
    SHELLS,
    Counts,
    Meaning,
    Typed,
    as_gnu,
    name_of,
    read_flags,
    refuse_names,
    shell_text,
)
from gpurun.quantities import count

VISIBLE = frozenset({"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"})
ALONE = TASKS.name
COUNTED = ("--num-processes", "--num-machines", "--nproc-per-node", "--nnodes")
"""What launchers that gpurun cannot replace call their number of processes or hosts."""


def typed_line(spec: JobSpec, *, is_named: bool) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the spec with the command of a rank, and lines that tell the person how gpurun read the command.

    Args:
        is_named: a recipe or a flag names the launcher.

    Raises:
        BadInput: gpurun cannot run the line as it is meant; says what to write instead.
    """
    line = read_line(spec.command)
    if (not line.whole and line.is_read) or (line.typed is not None and not line.words):
        name = line.typed.name if line.typed is not None else spec.command[0]
        raise BadInput(
            f"the command has no program after {name}",
            hint=f"write the command of each rank after {name} and its flags",
        )
    copies = is_named and spec.launcher == ALONE and not spec.one_per_host
    is_own = line.typed is not None and (spec.one_per_host or not line.typed.launcher) and not copies
    if is_own and line.typed is not None and line.typed.each_host is not None and spec.gpus > 1:
        return _on_each_host(spec, line, line.typed, is_named=is_named)
    if line.typed is not None and line.typed.launcher != "":
        return _started(spec, line, line.typed, is_named=is_named)
    other = line.typed or line.hidden
    if other is not None:
        return _by_itself(spec, line, other, is_named=is_named)
    return _plain(spec, line, is_named=is_named)


def _started(spec: JobSpec, line: CommandLine, typed: Typed, *, is_named: bool) -> tuple[JobSpec, tuple[str, ...]]:
    """Start the ranks in the place of a launcher."""
    found, words = read_flags(typed, line.words)
    if not words:
        hint = f"write the command of each rank after {typed.name} and its flags"
        raise BadInput(f"the command has no program after {typed.name}", hint=hint)
    assert typed.read is not None
    reading = typed.read(found, words, line.interpreter)
    name = spec.launcher if is_named else typed.launcher
    _refuse_two(spec, replace(line, env={**line.env, **reading.env}), typed, reading.command, words)
    taken = _joined(line.taken, reading.taken)
    kept, controller = reading.kept, reading.controller
    if name != typed.launcher:
        taken = _joined(taken, {f"{name} starts the ranks": kept} if kept else {})
        kept, controller = (), None
    spec = _retried(_sized(spec, typed.name, reading.counts), typed.name, reading.retries)
    spec, lines = _with_env(replace(spec, launcher=name), {**line.env, **reading.env})
    spec = replace(
        spec, command=(*line.around, *reading.command), launcher_flags=kept,
        controller=controller or spec.controller,
    )  # fmt: skip
    how = f"{name}, by MPI" if controller == "mpi" else name
    return spec, (
        f"gpurun starts the ranks ({how}); each runs: {shlex.join(spec.command)}",
        *(f"  kept for {typed.name}: {shlex.join(kept)}" for _ in kept[:1]),
        *left_out(taken), *lines, *_elastic(spec, reading),
        *(f"  gpurun starts the whole job again after its program fails: {spec.retry.words}"
          for _ in range(bool(reading.retries)) if spec.retry is not None),
    )  # fmt: skip


def _retried(spec: JobSpec, name: str, retries: int) -> JobSpec:
    """Return the spec with the restarts that the launcher's line asks for: gpurun starts the whole gang again.

    Raises:
        BadInput: the job asks for another number of retries.
    """
    if not retries or (spec.retry is not None and spec.retry.times == retries):
        return spec
    if spec.retry is not None:
        raise BadInput(
            f"{name}: the command asks for {count(retries, 'restart')}, but `retry` asks for {spec.retry.times}",
            hint=f"remove --max-restarts from the command, or write --retry {retries}",
        )
    if retries > MOST_RETRIES:
        raise BadInput(f"{name}: --max-restarts is {retries}; at most {MOST_RETRIES} are allowed")
    return replace(spec, retry=Retry(retries))


def _refuse_two(
    spec: JobSpec, line: CommandLine, typed: Typed, command: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Refuse a launcher that starts a launcher, as in ``mpirun -npernode 1 torchrun …``.

    Args:
        command: what each of its processes runs.
        words: the same, without an interpreter.
    """
    inner = read_line(command)
    if (other := inner.typed or inner.hidden) is None or spec.gpus == 1:
        return
    alone = words if (by_name := read_line(words)).typed or by_name.hidden else command
    write = f"write only the inner command: {_front(line)}{shlex.join(alone)}"
    if inner.typed is not None and other.instead is in_the_image:
        own = line.whole[: len(line.whole) - len(words)]
        instead = other.instead(inner.words, spec.gpus).replace(" -- ", f" -- {shlex.join(own)} ", 1)
        write = f"gpurun starts the container, so write: {instead}"
    elif inner.typed is not None and other.instead is not None:
        write = f"write: {other.instead(inner.words, spec.gpus)}"
    raise BadInput(
        f"{typed.name} starts a rank for each GPU, so {other.name} would run {spec.gpus} times",
        hint=f"{write}\n    for {spec.gpus} copies of {other.name}, remove {typed.name} and choose --launcher {ALONE}",
    )


def _on_each_host(spec: JobSpec, line: CommandLine, typed: Typed, *, is_named: bool) -> tuple[JobSpec, tuple[str, ...]]:
    """Run a launcher once on each host, with the gang's hosts, ranks, addresses and ports in place of typed ones."""
    if is_named and spec.launcher != ALONE:
        raise BadInput(
            f"with the launcher {spec.launcher}, each of {spec.gpus} ranks would start {typed.name}, "
            "which itself starts all processes of a host",
            hint=f"remove the launcher {spec.launcher}, or write the program that {spec.launcher} starts in place of "
            f"{typed.name}",
        )
    assert typed.each_host is not None
    reading = typed.each_host(line.whole[: len(line.whole) - len(line.words)], line.words)
    if typed.flags:
        found, words = read_flags(typed, line.words)
        _refuse_two(spec, line, typed, python(found, words, PYTHON), words)
    spec = replace(_sized(spec, typed.name, reading.counts), launcher=ALONE, one_per_host=True)
    spec, lines = _with_env(spec, {**reading.env, **line.env})
    spec = replace(spec, command=(*line.around, *reading.command))
    return spec, (
        f"{typed.name} runs once on each host, with gpurun's hosts, ranks and ports: {shlex.join(spec.command)}",
        *left_out(_joined(line.taken, reading.taken)), *lines, *_elastic(spec, reading),
    )  # fmt: skip


def _by_itself(spec: JobSpec, line: CommandLine, other: Typed, *, is_named: bool) -> tuple[JobSpec, tuple[str, ...]]:
    """Run a launcher that gpurun cannot replace as it is typed, if a person wants it so or there is one GPU.

    A shell's text that starts launchers runs once on each host.
    """
    if other.is_queue and other.instead is not None:
        raise BadInput(
            f"{other.name} asks another queue for machines, but gpurun itself queues this job",
            hint=f"write only the command, and give the settings of {other.name} as flags of gpurun: "
            f"{_proposed(line, other.instead(line.words, spec.gpus))}",
        )
    if spec.gpus == 1 and (several := _several(line)):
        raise BadInput(
            f"{other.name}: {several} asks for several processes, but the job has 1 GPU",
            hint="use gpurun submit -n N to say how many GPUs the job needs",
        )
    told, launches = "", _launches(line)
    refuse_left(launches, "the command")
    if spec.gpus > 1 and not (is_named and spec.launcher == ALONE):
        if not is_named and launches:
            spec, told = once_on_hosts(spec, launches, "the command", by_srun=line.by_srun)
            is_named = True
        elif line.typed is None or other.instead is None:
            raise BadInput(
                f"gpurun cannot read the flags of {other.name} in this command, so "
                f"each of {spec.gpus} ranks would start {other.name}",
                hint=f"write {other.name} and its flags as the command itself\n    "
                "or run the whole command once on each host: --one-per-host\n    "
                f"or run the whole command once for each GPU: --launcher {ALONE}",
            )
        else:
            _refuse_own_starter(spec, line, other)
    launcher = spec.launcher if is_named else ALONE
    spec, lines = _with_env(replace(spec, launcher=launcher), line.env if line.is_read else {})
    command = (*line.around, *line.whole) if line.is_read else spec.command
    ranks = "the rank starts" if spec.gpus == 1 else f"each of {spec.gpus} ranks starts"
    if spec.one_per_host:
        ranks = "the process of each host starts"
    first = f"{told}: {shlex.join(command)}" if told else ""
    return replace(spec, command=command), (
        first or f"{ranks} {other.name} itself ({launcher}): {shlex.join(command)}", *left_out(line.taken), *lines,
    )  # fmt: skip


def _launches(line: CommandLine) -> tuple[ScriptLaunch, ...]:
    """Return the launchers that the shell's text starts that a command is; empty if it is none."""
    text = shell_text(line.whole) if line.typed is None and name_of(line.whole) in SHELLS else None
    return () if text is None else launches_in(text, line.whole[line.whole.index(text) + 2 :], by_srun=line.by_srun)


def _proposed(line: CommandLine, instead: str) -> str:
    return instead.replace(" -- ", f" -- {_front(line)}", 1)


def _refuse_own_starter(spec: JobSpec, line: CommandLine, other: Typed) -> None:
    assert other.instead is not None
    why = (
        f"{other.name} starts a container, and gpurun itself starts the container of each host"
        if other.instead is in_the_image
        else f"{other.name} starts processes of its own on each host, but gpurun would run {other.name} for each of "
        f"{spec.gpus} GPUs"
    )
    raise BadInput(
        why,
        hint=f"write instead: {_proposed(line, other.instead(line.words, spec.gpus))}\n    "
        f"or choose --launcher {ALONE}, which runs {other.name} once for each GPU",
    )


def _front(line: CommandLine) -> str:
    """Return what a line that gpurun proposes begins with: the variables and wrappers of the one that was typed."""
    env = [f"{name}={value}" for name, value in line.env.items() if name not in VISIBLE and not is_told(name)]
    return "".join(f"{shlex.quote(word)} " for word in (*env, *line.around))


def _several(line: CommandLine) -> str:
    """Return what of a line wants more than one process; "" if nothing does."""
    for word, following in zip(line.words, (*line.words[1:], ""), strict=True):
        flag, equals, value = word.partition("=")
        number = value if equals else following
        if as_gnu(flag) in COUNTED and number.isascii() and number.isdigit() and number.lstrip("0") not in ("", "1"):
            return f"{flag} {number}"
    counts = _own_counts(line)
    return "the line" if max(counts.ranks or 1, counts.per_host or 1) > 1 else ""


def _own_counts(line: CommandLine) -> Counts:
    if line.typed is None or line.typed.each_host is None:
        return NO_COUNTS
    try:
        return line.typed.each_host(line.whole, line.words).counts
    except BadInput:  # on one GPU, the launcher itself reads its flags
        return NO_COUNTS


def _plain(spec: JobSpec, line: CommandLine, *, is_named: bool) -> tuple[JobSpec, tuple[str, ...]]:
    """Run a command without a launcher. Only assignments and ``srun`` must go from its front, as no program has their
    names in a container, and variables that say where ranks are (`launcher`).
    """
    if not line.is_read and not any(map(is_told, line.env)):
        return spec, ()
    spec = _sized(spec, "srun", line.counts)
    launcher = SRUN.name if line.by_srun and not is_named else spec.launcher
    spec, lines = _with_env(replace(spec, launcher=launcher), line.env)
    spec = replace(spec, command=(*line.around, *line.whole))
    how = f" ({launcher}: with the variables of Slurm and PyTorch)" if line.by_srun and launcher == SRUN.name else ""
    return spec, (f"each rank{how} runs: {shlex.join(spec.command)}", *left_out(line.taken), *lines)


def _with_env(spec: JobSpec, env: Mapping[str, str]) -> tuple[JobSpec, tuple[str, ...]]:
    """Give the ranks the variables of the line, except which GPUs they see. `launcher` removes others later.

    Raises:
        BadInput: a variable is gpurun's own.
    """
    refuse_names(env)
    told = {name: value for name, value in env.items() if name in VISIBLE and value}
    given = {name: value for name, value in env.items() if name not in told}
    shown = [name for name in given if not is_told(name)]
    return replace(spec, env={**spec.env, **given}), (
        *(f"  set for each rank: {' '.join(shown)}" for _ in shown[:1]),
        *left_out({CHOSEN: tuple(f"{name}={value}" for name, value in told.items())} if told else {}),
    )  # fmt: skip


def _sized(spec: JobSpec, name: str, counts: Counts) -> JobSpec:
    """Return the spec with the least number of GPUs that the line says.

    Raises:
        BadInput: the command asks for another number of processes than the job has GPUs.
    """
    if spec.one_per_host or (wanted := _wanted(spec, name, counts)) is None:
        return spec
    least, most = wanted
    if not (1 <= least <= spec.gpus <= most):
        elastic = f" --min-gpus {least}" if least < most else ""
        some = count(most, "process", "processes") if least == most else f"{least} to {most} processes"
        raise BadInput(
            f"{name}: the command asks for {some}, but the job has {count(spec.gpus, 'GPU')} and starts one process "
            "for each GPU",
            hint=f"use gpurun submit -n {most}{elastic}, or remove the number of processes from the command"
            + (
                ", or choose --one-per-host if each process uses all GPUs of its host"
                if name in (MPI.name, BY_SLURM.name) and most < spec.gpus
                else ""
            ),
        )
    if least in (most, spec.gpus):
        return spec
    if spec.min_gpus not in (None, least):
        raise BadInput(
            f"{name}: the command allows {count(least, 'process', 'processes')} or more, "
            f"but min_gpus is {spec.min_gpus}",
            hint="remove min_gpus, or write the same number in the command",
        )
    return replace(spec, min_gpus=least)


def _wanted(spec: JobSpec, name: str, counts: Counts) -> tuple[int, int] | None:
    """Return the least and the most processes that the command asks for; None if it does not say."""
    if counts.ranks is not None:
        return min(counts.least or counts.ranks, counts.ranks), counts.ranks
    if counts.least is not None:
        return counts.least, max(counts.least, spec.gpus)
    if counts.hosts is None:
        return None
    least, most = counts.hosts
    if counts.per_host is not None:
        return least * counts.per_host, most * counts.per_host
    if least == most:
        return None
    if not 1 <= least <= most or spec.gpus % most:
        raise BadInput(
            f"{name}: the command asks for {least} to {most} hosts, but gives no number of processes for each host",
            hint="use gpurun submit --min-gpus N, or add the number of processes on each host to the command",
        )
    return least * (spec.gpus // most), spec.gpus


def _elastic(spec: JobSpec, reading: Meaning) -> tuple[str, ...]:
    ranged = reading.counts.hosts is not None and reading.counts.hosts[0] != reading.counts.hosts[1]
    if spec.min_gpus is None or not (ranged or reading.counts.least is not None):
        return ()
    return (f"  the job is elastic: {spec.min_gpus} to {spec.gpus} GPUs",)


def _joined(one: Mapping[str, tuple[str, ...]], two: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {why: (*one.get(why, ()), *two.get(why, ())) for why in (*one, *(key for key in two if key not in one))}


def left_out(taken: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return lines that tell a person what gpurun leaves out, and why."""
    return tuple(f"  left out: {shlex.join(words)} ({why})" for why, words in taken.items())
