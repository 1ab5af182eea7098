"""PREPARING: copy the job's data sets to every host of the gang, host to host, and check that the hosts' own folders
exist.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gpurun.data.keeping import wanted_digests
from gpurun.data.pinning import as_pinned
from gpurun.data.staging import DataUser, Staging, stage
from gpurun.errors import BadInput, GpurunError, HostNotReady
from gpurun.images.events import ShipEvent
from gpurun.inventory.model import Inventory
from gpurun.jobs.spec import DataSource
from gpurun.remote import Agent, Fleet
from gpurun.remote.target import target_of
from gpurun.supervisor.ends import failed
from gpurun.supervisor.job import SupervisedJob, raise_first

NO_FOLDER = frozenset({os.strerror(errno.ENOENT), os.strerror(errno.ENOTDIR)})
"""What hosts say of a folder that they do not have. All else may be a file server that does not answer just now."""


class StagingCancelled(GpurunError):
    """The gang must stop, so the copy was cancelled."""


def send_data(job: SupervisedJob, hosts: Sequence[str], *, cancelled: Callable[[], bool]) -> None:
    """Copy the submitted data sets to connected hosts. Idempotent.

    Raises:
        GangEnd: a host failed or lacks a folder, the data changed since the submit and no host has them, or it was
            cancelled.
    """
    _look_for_folders(job, hosts)
    by_digest = {source.digest: (name, source) for name, source in job.spec.data.items() if source.digest is not None}
    for name, source in by_digest.values():
        try:
            _send(job, hosts, name, source, cancelled)
        except GpurunError as error:
            raise failed(error) from error


def _look_for_folders(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Check that hosts have the folders that containers will mount."""
    names = {source.path: name for name, source in job.spec.data.items() if source.kind == "host"}
    if not names:
        return

    def look(agent: Agent) -> None:
        for path, why in agent.call("data.folders", paths=list(names)).value.items():
            raise HostNotReady(
                f"the data set {names.get(path, '?')!r} cannot be mounted: {path}: {why}",
                kind="no-mount" if why in NO_FOLDER else None, host=agent.host,
                hint="put the data set's folder on each host that the job may get; --host limits the job to some hosts",
            )  # fmt: skip

    raise_first(job.links.each(look, hosts).failed)


def _send(
    job: SupervisedJob, hosts: Sequence[str], name: str, source: DataSource, cancelled: Callable[[], bool]
) -> None:
    def check() -> None:
        if cancelled():
            raise StagingCancelled("staging the data was cancelled")

    def told(event: ShipEvent) -> None:
        job.sending.told("stage", event, name)

    assert source.digest is not None
    how = Staging(
        job.links.fleet, job.inventory, DataUser(job.lease.job, job.lease.attempt), quotas_of(job.inventory),
        wanted_digests(job.home), lambda names: reach(job.inventory, names), told, check,
    )  # fmt: skip
    why = "the files have changed since the submit"
    try:
        tree = as_pinned(source, job.home)
    except HostNotReady as away:
        tree, why = None, str(away)
    if tree is None:
        job.note(f"the head cannot send the data set {name!r}: {why}; a host that has the data set sends it")
    try:
        report = stage(
            source.digest, tree, hosts, how, neighbours=[host for host in job.members if job.links.is_open(host)]
        )
    except BadInput as gone:
        raise _away(source, job.home) or gone from None
    for host, error in report.bad_copies.items():
        job.note(f"the copy of the data set {name!r} on {host} could not be used: {error.message}")
    raise_first(report.failed)


def _away(source: DataSource, home: Path) -> HostNotReady | None:
    """Return why the head cannot give a data set at the moment; None if the set has really changed, or is gone."""
    try:
        is_back = as_pinned(source, home) is not None
    except HostNotReady as error:
        return error
    return (
        HostNotReady("gpurun could not read the data on the head for a moment", where=source.path) if is_back else None
    )


def quotas_of(inventory: Inventory) -> dict[str, int]:
    """Return host → bytes that its data sets may take, if the inventory says."""
    return {host.name: host.data_quota_mib << 20 for host in inventory.hosts if host.data_quota_mib is not None}


def reach(inventory: Inventory, names: Sequence[str]) -> Fleet:
    """Connect to those of these hosts that the inventory knows."""
    return Fleet.open([target_of(inventory.by_name[name], inventory) for name in names if name in inventory.by_name])
