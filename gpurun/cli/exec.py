"""``gpurun exec``: run a command inside a running job's container."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.jobs import find_job
from gpurun.cli.options import JobArgument
from gpurun.errors import BadInput, StateError

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord
    from gpurun.leases.lease import Lease


def exec_(
    context: typer.Context,
    job: JobArgument,
    rank: Annotated[
        int, typer.Option("--rank", min=0, metavar="RANK", help="Run the command in the container of this rank.")
    ] = 0,
) -> None:
    """Run a command in the container of a job's rank. The command uses your terminal.

    gpurun exec @last --rank 1 -- nvidia-smi
    """
    from gpurun.cli.ssh import become
    from gpurun.head.requests import refuse_others
    from gpurun.launch.docker import container_name
    from gpurun.leases.store import LeaseStore
    from gpurun.remote import ssh_argv
    from gpurun.remote.masters import live
    from gpurun.remote.ssh_config import resolve
    from gpurun.state import audit
    from gpurun.supervisor.links import Links
    from gpurun.supervisor.rank_places import ask, host_of
    from gpurun.supervisor.seating import Seating

    command = context.obj or ("sh",)
    folder = find_job(job)
    refuse_others(folder, "exec", "run commands in its container")
    record = folder.record()
    if record.started_s is None or record.state.ended:
        raise BadInput(f"the job is {record.state.value}, so the job has no running container", job=record.id)
    lease = LeaseStore(folder.path.home).read(record.id)
    if lease is None:
        raise StateError(
            "the job's lease, the file that reserves its GPUs, does not exist",
            job=record.id,
            hint="run `gpurun recover` to restore the lease",
        )
    spec, links = folder.spec(), Links(_inventory(folder, record, lease), [grant.host for grant in lease.members])
    seating = Seating.of(lease.members, spec)
    try:
        places, silent = ask(links, record.id, record.attempt, seating)
    finally:
        links.close()
    target = links.targets[host_of(record.id, rank, places, silent, seating)]
    tty = sys.stdin.isatty()
    engine = ["--host", target.docker_host] if target.docker_host else []
    inside = [
        "docker",
        *engine,
        "exec",
        "-i",
        *(["-t"] if tty else []),
        container_name(record.id, record.attempt),
        *command,
    ]
    route = resolve(target)
    audit.note(folder.path.home, "exec", job=record.id, owner=record.owner, rank=rank, program=command[0])
    become(ssh_argv.terminal(route, live(route), shlex.join(inside), tty=tty))


def _inventory(folder: JobFolder, record: JobRecord, lease: Lease) -> Inventory:
    """Return the job's inventory, with the gang's hosts as they were when the job got its GPUs.

    Raises:
        BadInput: root runs this for another user's job, and users other than root can change the inventory.
        StateUnavailable: the inventory cannot be loaded, and no supervisor has stored a copy.
    """
    from gpurun.head.takeover import check_inventory
    from gpurun.inventory.load import load
    from gpurun.leases.lease import as_granted
    from gpurun.supervisor.frozen import cluster_of

    if os.getuid() == record.owner_uid:
        return cluster_of(folder, lease)[0]
    inventory = load(Path(record.inventory))
    check_inventory(inventory)
    return as_granted(inventory, lease)
