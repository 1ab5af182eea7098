"""The ``#SBATCH`` lines of a script, and gpurun's flags that do the same. Pure.

gpurun does not obey them: a script says them for another cluster. What differs from the job is said.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import islice

from gpurun.jobs.spec import JobSpec

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
    wanted, gpus, nodes = list[str](), _gpus(asked), _number(asked.get("--nodes", ""))
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
    cores = _number(asked.get("--cpus-per-task", ""))
    if cores is not None:
        cores *= _number(asked.get("--ntasks-per-node", "")) or 1
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
    each = _number(asked.get("--gpus-per-node", "")) or (_number(gres) if gres.startswith("gpu:") else None)
    per_task = _number(asked.get("--gpus-per-task", ""))
    nodes = _number(asked.get("--nodes", "")) or 1
    tasks = _number(asked.get("--ntasks", "")) or nodes * (_number(asked.get("--ntasks-per-node", "")) or 1)
    if (total := _number(asked.get("--gpus", ""))) is not None:
        return total
    return nodes * each if each is not None else tasks * per_task if per_task is not None else None


def _number(text: str) -> int | None:
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
