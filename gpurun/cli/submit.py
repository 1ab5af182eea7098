"""``gpurun submit``: make a job from a recipe and flags."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.job_options import DryRunOption, Given, RecipeArgument, flags_of, job_options
from gpurun.cli.options import InventoryOption, JsonOption
from gpurun.cli.printing import print_json, say, say_problem
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, GpurunError

if TYPE_CHECKING:
    from gpurun.head.submit import Flags
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.recipe import Recipe
    from gpurun.jobs.record import JobRecord
    from gpurun.jobs.spec import JobSpec


@job_options("submit")
def submit(
    context: typer.Context,
    recipe: RecipeArgument = None,
    inventory: InventoryOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show the job until the job ends; Ctrl-C cancels the job.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    *,
    given: Given,
) -> None:
    """Run a recipe, or a command in a Docker image, on GPUs that all start together.

    gpurun submit recipes/fashion-mnist --follow

    gpurun submit -n 8 --image me/train:1 -- torchrun train.py --epochs 3
    """
    from gpurun.inventory.read import find_inventory, load_inventory
    from gpurun.jobs.recipe import WITHOUT_RECIPE, read_recipe

    read = read_recipe(Path(recipe)) if recipe is not None else None
    if read is None and context.obj is None:
        raise BadInput("gpurun submit needs a recipe or a command", hint=f"name a recipe, or: {WITHOUT_RECIPE}")
    found = load_inventory(find_inventory(inventory, os.environ))
    spec, said = spec_of(read, found, flags_of(given, context.obj, read, found), is_plan=dry_run)
    if dry_run:
        from gpurun.cli.dry_run import show_plan

        show_plan(spec, found, said, as_json=as_json)
        return
    _submit(spec, found, follow=follow, as_json=as_json)


def spec_of(
    recipe: Recipe | None, inventory: Inventory, flags: Flags, *, is_plan: bool = False
) -> tuple[JobSpec, tuple[str, ...]]:
    """Like `gpurun.head.submit.spec_of`; also prints how gpurun read the command, and warns of secrets in `env`."""
    from gpurun.head import submit

    spec, said = submit.spec_of(recipe, inventory, flags, is_plan=is_plan)
    said = (*said, *_of_workdir(spec))
    for text in said:
        say(printable(text))
    _warn_of_secrets(spec)
    return spec, said


def _of_workdir(spec: JobSpec) -> tuple[str, ...]:
    from gpurun.cli.dry_run import words
    from gpurun.content.tree import look_at_folder

    if spec.workdir is None:
        return ()
    try:
        return words(spec.workdir, *look_at_folder(Path(spec.workdir)))
    except OSError:  # what cannot be read is an error of the submission
        return ()


def _submit(spec: JobSpec, inventory: Inventory, *, follow: bool, as_json: bool) -> None:
    from gpurun.cli.printing import SubmittedShape, job_json

    folder, problem = _store(spec, inventory, follow=follow, print_id=not follow and not as_json)
    if follow:
        from gpurun.cli.follow import follow_new

        if problem is not None:
            say_problem(problem)
        follow_new(folder, as_json=as_json)
    record = folder.record()
    if as_json:
        print_json(SubmittedShape(job=job_json(record)))
    else:
        say_what_happens(record, spec, inventory, is_decided=problem is None)
    if problem is not None:
        raise problem


def say_what_happens(record: JobRecord, spec: JobSpec, inventory: Inventory, *, is_decided: bool) -> None:
    """Say where a job starts that was submitted, or what it waits for."""
    from gpurun.cli.shares import lines
    from gpurun.cli.why import waits_for
    from gpurun.head.submit import expected

    if record.granted:
        say(f"{record.id} starts on {', '.join(grant.host for grant in record.granted)}")
        for line in lines(expected(spec, record.granted, inventory, os.environ)):
            say(f"  {line}")
    elif record.state.ended:
        say(f"{record.id} is {record.state.value}: {printable(record.reason)}")
    else:
        what = waits_for(record) if is_decided else ""
        say(f"{record.id} waits{': ' if what else ''}{printable(what)}; `gpurun why {record.id}` explains why")


def _store(
    spec: JobSpec, inventory: Inventory, *, follow: bool, print_id: bool
) -> tuple[JobFolder, GpurunError | None]:
    """Submit the job. Returns the job, and the error if something failed after it was stored.

    After any such failure, a message says that the job is stored.

    Args:
        follow: Ctrl-C cancels the job.
    """
    from gpurun.content.build import BuildLines
    from gpurun.head.submit import submit_jobs
    from gpurun.state.paths import home

    stored: list[JobFolder] = []

    def note(folders: Sequence[JobFolder]) -> None:
        stored.extend(folders)
        if print_id:
            typer.echo(folders[0].id)

    try:
        submission = submit_jobs([spec], inventory, home(os.environ), os.environ, on_stored=note, on_build=BuildLines())
    except KeyboardInterrupt:
        for folder in stored:
            say(f"{folder.id} is stored; {'gpurun cancels the job' if follow else 'the job stays in the queue'}")
            if follow:
                from gpurun.cli.follow import cancel_job

                cancel_job(folder, reason="Ctrl-C")
        raise
    (folder,), problem = submission.folders, submission.problem
    if problem is not None:
        advice = f"{folder.id} is in the queue and will start later: do not submit the job again"
        problem.hint = f"{advice}; {problem.hint}" if problem.hint else advice
    return folder, problem


def _warn_of_secrets(spec: JobSpec) -> None:
    from gpurun.jobs.spec import visible_secrets

    if names := visible_secrets(spec.env):
        are = "looks like a secret" if len(names) == 1 else "look like secrets"
        say(
            f"gpurun: {', '.join(names)} in env {are}: `docker inspect` shows env to every Docker user of a host\n"
            "  → give the secret as a file: with `secrets: {NAME: FILE}` in the recipe, ranks read /run/secrets/NAME"
        )
