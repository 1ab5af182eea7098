"""Turn a recipe and flags, or a call from Python, into a spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from gpurun.documents.convert import did_you_mean
from gpurun.errors import BadInput, NeverFits
from gpurun.head.reading import clues_of, script_clues_of
from gpurun.head.script import missing_script, runs_itself
from gpurun.inventory.model import Inventory
from gpurun.jobs.recipe import Recipe, build, check_length, convert_flag, lines_of
from gpurun.jobs.recipe_keys import CONSTRAINTS
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers import settled
from gpurun.launch.launchers.choosing.choice import (
    LauncherChoice,
    ProgramClues,
    choose_launcher,
    needs_choice,
    refuse_two_starters,
)
from gpurun.launch.launchers.lines.shell import about_operators
from gpurun.quantities.counts import count
from gpurun.scheduler.gangs import new_gang
from gpurun.scheduler.model import Gang, Reason, Refusal, Snapshot
from gpurun.scheduler.schedule import schedule

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
        choice = LauncherChoice(build(recipe, overrides, constraints))
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
            found[key in CONSTRAINTS][field] = converted
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
