"""``gpurun submit``: make a job from a recipe and flags."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.printing import print_json, printable, say, say_problem
from gpurun.errors import BadInput, GpurunError

if TYPE_CHECKING:
    from gpurun.head.wish import Flags
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.recipe import Recipe
    from gpurun.jobs.spec import JobSpec


def _option(*names: str, metavar: str | None = None, text: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


def submit(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Recipe file, or a folder with a recipe.yaml.")
    ] = None,
    gpus: Annotated[
        str | None,
        _option(
            "-n",
            "--gpus",
            metavar="GPUS",
            text="World size: one rank per GPU. auto:80%: the most that `gpurun scale`'s runs predict to use at 80 %.",
        ),
    ] = None,
    min_gpus: Annotated[
        str | None, _option("--min-gpus", metavar="GPUS", text="Elastic: continue with at least this many GPUs.")
    ] = None,
    image: Annotated[str | None, _option("--image", metavar="IMAGE", text="Docker image on this machine.")] = None,
    generation: Annotated[
        list[str] | None, _option("--generation", metavar="G", text="GPU generation; may be repeated.")
    ] = None,
    gpus_per_host: Annotated[
        str | None, _option("--gpus-per-host", metavar="K", text="Exactly K GPUs on each host.")
    ] = None,
    locality: Annotated[
        str | None, _option("--locality", metavar="host|rack|any", text="Keep the gang on one host or in one rack.")
    ] = None,
    pool: Annotated[str | None, _option("--pool", metavar="P", text="Charge the job to this pool.")] = None,
    project: Annotated[
        str | None, _option("--project", metavar="P", text="Count the job under this project in `gpurun report`.")
    ] = None,
    priority: Annotated[
        str | None, _option("--priority", metavar="N", text="Jobs with a higher number start earlier.")
    ] = None,
    preemptible: Annotated[
        bool | None,
        typer.Option(
            "--preemptible/--not-preemptible",
            help="Let the job borrow GPUs of other pools; gpurun stops it when they need them.",
        ),
    ] = None,
    time_limit: Annotated[
        str | None, _option("--time-limit", metavar="12h", text="Stop the job after this long.")
    ] = None,
    rehearse: Annotated[
        str | None, _option("--rehearse", metavar="60s", text="First try one rank on one GPU for this long.")
    ] = None,
    max_restarts: Annotated[
        str | None, _option("--max-restarts", metavar="N", text="Restart up to N times after a host's fault.")
    ] = None,
    memory: Annotated[
        str | None, _option("--memory", metavar="64GiB", text="Memory on each host. Default: the share of its GPUs.")
    ] = None,
    cpus: Annotated[
        str | None, _option("--cpus", metavar="N", text="Cores on each host. Default: the share of its GPUs.")
    ] = None,
    shm_size: Annotated[
        str | None, _option("--shm-size", metavar="8GiB", text="Shared memory on each host. Default: half of --memory.")
    ] = None,
    grace: Annotated[
        str | None, _option("--grace", metavar="15s", text="Time to save between SIGTERM and SIGKILL.")
    ] = None,
    hang_timeout: Annotated[
        str | None, _option("--hang-timeout", metavar="30m", text="Stop the job after this long without any progress.")
    ] = None,
    env: Annotated[
        list[str] | None, _option("-e", "--env", metavar="K=V", text="Environment of every rank. Not for secrets.")
    ] = None,
    name: Annotated[str | None, _option("--name", metavar="N", text="Name of the job.")] = None,
    workdir: Annotated[
        str | None, _option("--workdir", metavar="DIR", text="Folder that gpurun copies to every host.")
    ] = None,
    workdir_read_only: Annotated[
        bool | None, typer.Option("--workdir-read-only", help="No rank can write into the folder of its code.")
    ] = None,
    workdir_limit: Annotated[
        str | None, _option("--workdir-limit", metavar="10GiB", text="How much of what ranks write there is kept.")
    ] = None,
    outputs: Annotated[
        str | None, _option("--outputs", metavar="PATH", text="Folder in the container that gpurun copies to the head.")
    ] = None,
    outputs_every: Annotated[
        str | None, _option("--outputs-every", metavar="60s", text="How often gpurun copies new outputs to the head.")
    ] = None,
    requirements: Annotated[
        str | None, _option("--requirements", metavar="FILE", text="Install these packages on top of the image.")
    ] = None,
    mount: Annotated[
        list[str] | None,
        _option("--mount", metavar="A:B[:rw]", text="Mount the hosts' folder A as B; may be repeated."),
    ] = None,
    data: Annotated[
        list[str] | None,
        _option("--data", metavar="N=SOURCE", text="A folder, host:/path or JOB:outputs/path as /data/N."),
    ] = None,
    secret: Annotated[
        list[str] | None, _option("--secret", metavar="N=FILE", text="Give FILE as /run/secrets/N; may be repeated.")
    ] = None,
    host: Annotated[
        str | None, _option("--host", metavar="HOSTS", text="Use only these hosts, such as 'gpu-[01-04]'.")
    ] = None,
    avoid: Annotated[str | None, _option("--avoid", metavar="HOSTS", text="Do not use these hosts.")] = None,
    launcher: Annotated[
        str | None, _option("--launcher", metavar="L", text="What starts the ranks, such as torchrun or mpirun.")
    ] = None,
    one_per_host: Annotated[
        bool | None, typer.Option("--one-per-host", help="One process for each host, which sees all its GPUs.")
    ] = None,
    controller: Annotated[
        str | None, _option("--controller", metavar="gloo|mpi", text="How horovodrun starts ranks: gloo or mpi.")
    ] = None,
    notify: Annotated[
        list[str] | None,
        _option("--notify", metavar="TARGET", text="Notify mail:ADDRESS, slack:FILE, …; may be repeated."),
    ] = None,
    inventory: Annotated[str | None, _option("-i", "--inventory", metavar="FILE", text="Inventory file.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show the job until it ends; Ctrl-C cancels it.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what gpurun would do; do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Run a recipe, or a command in an image, on a gang of GPUs.

    gpurun submit recipes/fashion-mnist --follow

    gpurun submit -n 8 --image me/train:1 -- torchrun train.py --epochs 3
    """
    from gpurun.inventory.load import load
    from gpurun.inventory.locate import find
    from gpurun.jobs.recipe import read as read_recipe

    found = load(find(inventory, os.environ))
    flags = {
        "--gpus": ("gpus", gpus), "--min-gpus": ("min_gpus", min_gpus), "--image": ("image", image),
        "--pool": ("pool", pool), "--project": ("project", project), "--priority": ("priority", priority),
        "--preemptible": ("preemptible", preemptible),
        "--time-limit": ("time_limit", time_limit), "--max-restarts": ("max_restarts", max_restarts),
        "--memory": ("memory", memory), "--cpus": ("cpus", cpus),
        "--shm-size": ("shm_size", shm_size), "--grace": ("grace", grace),
        "--hang-timeout": ("hang_timeout", hang_timeout), "--outputs-every": ("outputs_every", outputs_every),
        "--workdir": ("workdir", str(Path(workdir).absolute()) if workdir is not None else None),
        "--workdir-read-only": ("workdir_read_only", workdir_read_only),
        "--workdir-limit": ("workdir_limit", workdir_limit),
        "--name": ("name", name), "--launcher": ("launcher", launcher),
        "--one-per-host": ("one_per_host", one_per_host), "--controller": ("controller", controller),
        "the command": ("command", list(context.obj) if context.obj is not None else None),
        "--env": ("env", pairs_of("--env", env) if env else None),
        "--rehearse": ("rehearse", rehearse), "--outputs": ("outputs", outputs), "--mount": ("mounts", mount),
        "--requirements": ("python", {"requirements": requirements} if requirements is not None else None),
        "--data": ("data", pairs_of("--data", data, "SOURCE") if data else None),
        "--notify": ("notify", notify or None),
        "--secret": ("secrets", _files(pairs_of("--secret", secret, "FILE")) if secret else None),
    }  # fmt: skip
    places = {
        "--generation": ("generation", generation or None), "--gpus-per-host": ("gpus_per_host", gpus_per_host),
        "--locality": ("locality", locality),
        "--host": ("hosts", _hosts(host, found)), "--avoid": ("avoid", _hosts(avoid, found)),
    }  # fmt: skip
    read = read_recipe(Path(recipe)) if recipe is not None else None
    if gpus is not None and gpus.startswith("auto"):
        from gpurun.cli.auto_gpus import chosen_gpus

        flags["--gpus"] = ("gpus", chosen_gpus(gpus, read, found, flags, places))
    spec, said = spec_of(read, found, flags, places, is_plan=dry_run)
    if dry_run:
        from gpurun.cli.dry_run import show_plan

        show_plan(spec, found, said, as_json=as_json)
        return
    _submit(spec, found, follow=follow, as_json=as_json)


def spec_of(
    recipe: Recipe | None, inventory: Inventory, flags: Flags, places: Flags, *, is_plan: bool = False
) -> tuple[JobSpec, tuple[str, ...]]:
    """Like `gpurun.head.wish.spec_of`; also prints how gpurun read the command, and warns of secrets in `env`."""
    from gpurun.head import wish

    spec, said = wish.spec_of(recipe, inventory, flags, places, is_plan=is_plan)
    said = (*said, *_of_workdir(spec))
    for text in said:
        say(printable(text))
    _warn_of_secrets(spec)
    return spec, said


def _of_workdir(spec: JobSpec) -> tuple[str, ...]:
    from gpurun.cli.workdir_words import words
    from gpurun.images.noticed import look

    if spec.workdir is None:
        return ()
    try:
        return words(spec.workdir, *look(Path(spec.workdir)))
    except OSError:  # what cannot be read is an error of the submission
        return ()


def _submit(spec: JobSpec, inventory: Inventory, *, follow: bool, as_json: bool) -> None:
    from gpurun.cli.printing import job_json
    from gpurun.cli.shares import expected, lines
    from gpurun.cli.why import waits_for

    folder, problem = _store(spec, inventory, follow=follow, print_id=not follow and not as_json)
    if follow:
        from gpurun.cli.follow import follow_job

        if problem is not None:
            say_problem(problem)
        code = follow_job(folder, print_id=not as_json, lines_to_stderr=as_json, cancel_on_interrupt=True)
        if as_json:
            print_json({"job": job_json(folder.record())})
        raise typer.Exit(code)
    record = folder.record()
    if as_json:
        print_json({"job": job_json(record)})
    elif record.granted:
        say(f"{folder.id} starts on {', '.join(grant.host for grant in record.granted)}")
        for line in lines(expected(spec, record.granted, inventory)):
            say(f"  {line}")
    elif record.state.ended:
        say(f"{folder.id} is {record.state.value}: {printable(record.reason)}")
    else:
        what = "" if problem is not None else waits_for(record)
        say(f"{folder.id} waits{': ' if what else ''}{printable(what)}; `gpurun why {folder.id}` says more")
    if problem is not None:
        raise problem


def _store(
    spec: JobSpec, inventory: Inventory, *, follow: bool, print_id: bool
) -> tuple[JobFolder, GpurunError | None]:
    """Submit the job. Returns the job, and the error if something failed after it was stored.

    After any such failure, a message says that the job is stored.

    Args:
        follow: Ctrl-C cancels the job.
    """
    from gpurun.environments.log import BuildLines
    from gpurun.head.submission import submit_jobs
    from gpurun.state.home import home

    stored: list[JobFolder] = []

    def note(folders: Sequence[JobFolder]) -> None:
        stored.extend(folders)
        if print_id:
            typer.echo(folders[0].id)

    try:
        submission = submit_jobs([spec], inventory, home(os.environ), os.environ, on_stored=note, on_build=BuildLines())
    except KeyboardInterrupt:
        for folder in stored:
            say(f"{folder.id} is stored; {'it is cancelled now' if follow else 'it stays in the queue'}")
            if follow:
                from gpurun.cli.follow import cancel_job

                cancel_job(folder, reason="Ctrl-C")
        raise
    (folder,), problem = submission.folders, submission.problem
    if problem is not None:
        advice = f"{folder.id} is queued and starts in its turn: do not submit it again"
        problem.hint = f"{advice}; {problem.hint}" if problem.hint else advice
    return folder, problem


def _warn_of_secrets(spec: JobSpec) -> None:
    from gpurun.jobs.secret_names import visible_secrets

    if names := visible_secrets(spec.env):
        are = "looks like a secret" if len(names) == 1 else "look like secrets"
        say(
            f"gpurun: {', '.join(names)} in env {are}: `docker inspect` shows env to all who may use Docker on a host\n"
            "  → give it as a file: `secrets: {NAME: FILE}` in the recipe, /run/secrets/NAME in the container"
        )


def pairs_of(flag: str, texts: Sequence[str], value: str = "VALUE") -> dict[str, str]:
    """Split texts such as ``NAME=VALUE``. Raises BadInput with the flag's name."""
    pairs = {}
    for text in texts:
        key, equals, given = text.partition("=")
        if not equals:
            raise BadInput(f"{flag} must look like NAME={value}, not {text!r}")
        pairs[key] = given
    return pairs


def _files(named: Mapping[str, str]) -> dict[str, str]:
    return {name: str(Path(file).absolute()) for name, file in named.items()}


def _hosts(chosen: str | None, inventory: Inventory) -> list[str] | None:
    from gpurun.inventory.hostset import select

    return None if chosen is None else list(select(inventory, chosen))
