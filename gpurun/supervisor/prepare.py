"""PREPARING: send the image, data, code and secrets to every host of the gang, to all hosts at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gpurun.errors import GpurunError, StateError
from gpurun.images.code import Code
from gpurun.images.events import ShipEvent
from gpurun.images.ship import ship
from gpurun.images.tree import scan, unreadable
from gpurun.images.workdir import sync_workdir
from gpurun.jobs.states import State
from gpurun.node.job.layer_rules import CODE
from gpurun.supervisor.data import send_data
from gpurun.supervisor.ends import failed
from gpurun.supervisor.hooks import run_prologs
from gpurun.supervisor.host_claims import claim
from gpurun.supervisor.job import SupervisedJob, raise_first
from gpurun.supervisor.outputs import send_outputs
from gpurun.supervisor.preflight import examine

PREPARE_LIMIT_S = 6 * 3600.0


def prepare(job: SupervisedJob, is_asked: Callable[[], bool]) -> State:
    """Prepare everything that the containers will need. Idempotent: does not send again what is there.

    Args:
        is_asked: returns whether the gang must stop.

    Raises:
        GangEnd: a host failed or refused its GPUs, or the image is not on the head.
    """
    job.connect()
    job.reach("files")
    job.ask_accounts()
    examine(job, job.hosts)
    raise_first(claim(job, job.hosts))
    bring(job, job.hosts, cancelled=is_asked)
    send_outputs(job)
    return job.move(State.STARTING)


def bring(job: SupervisedJob, hosts: Sequence[str], *, cancelled: Callable[[], bool]) -> None:
    """Run the prolog of connected hosts that have reported about themselves; send them image, data, code and secrets.

    Raises:
        GangEnd: a host failed, the image is not on the head, or it was cancelled.
    """
    raise_first(run_prologs(job.links, job.inventory, job.lease, hosts))
    ship_image(job, hosts, cancelled=cancelled)
    send_data(job, hosts, cancelled=cancelled)
    _send_workdir(job, hosts)
    _send_secrets(job, hosts)


def ship_image(job: SupervisedJob, hosts: Sequence[str], *, cancelled: Callable[[], bool]) -> None:
    """Ship the submitted image to hosts, even if its name now means another, and record its ID on each.

    Raises:
        GangEnd: a host failed, the image is not on the head, or it was cancelled.
    """

    def told(event: ShipEvent) -> None:
        job.sending.told("ship", event)

    try:
        report = ship(
            job.spec.image, job.links.fleet, inventory=job.inventory, hosts=hosts,
            docker_host=job.inventory.docker_host, ident=job.spec.image_id, progress=told,
            cancelled=cancelled, deadline_s=PREPARE_LIMIT_S,
        )  # fmt: skip
    except GpurunError as error:
        raise failed(error) from error
    raise_first(report.failed)
    job.image_ids.update({host.host: host.local for host in report.hosts})


def _send_workdir(job: SupervisedJob, hosts: Sequence[str]) -> None:
    if job.spec.workdir is None:
        return
    folders = {host: f"{job.accounts[host].job_folder(job.lease.job)}/{CODE}" for host in hosts}

    def told(host: str, done: int, total: int) -> None:
        state = "done" if done == total else "receiving"
        job.sending.told("workdir", ShipEvent(host, state, done, total))

    try:
        code = Code(job.folder.code) if job.spec.code else scan(Path(job.spec.workdir))
        results = sync_workdir(job.links.fleet, folders, code, inventory=job.inventory, told=told)
    except FileNotFoundError:
        raise failed(
            StateError("the job's copy of its code is missing", where=str(job.folder.code), hint="submit the job again")
        ) from None
    except GpurunError as error:
        raise failed(error) from error
    raise_first(results.failed)


def _send_secrets(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Send secrets through the agent's channel into files of mode 0400: never into an argv, a log or the plan."""
    for name, file in job.spec.secret_files.items():
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            raise failed(unreadable(error, Path(file), f"the secret {name!r} cannot be read")) from error
        raise_first(
            job.links.each(
                lambda agent, name=name, content=content: agent.call(  # type: ignore[misc]
                    "gang.put",
                    job=job.lease.job,
                    attempt=job.lease.attempt,
                    name=f"secrets/{name}",
                    mode=0o400,
                    payload=content,
                ),
                hosts,
            ).failed
        )
