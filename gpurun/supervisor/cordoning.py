"""Cordon hosts whose hardware failed, and hosts that could not be fenced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpurun.errors import GpurunError, StateDiskError, StateError, StateUnavailable
from gpurun.facts.hardware import Hardware
from gpurun.head.looking import ID
from gpurun.jobs.record import FirstFailure
from gpurun.leases.known import lease_hosts
from gpurun.state.cordons import Cordon, changing_cordons, cordons_on, put_cordon
from gpurun.state.known_as import KnownAs
from gpurun.supervisor.job import SupervisedJob


def cordon_suspect(job: SupervisedJob, failure: FirstFailure | None) -> StateError | None:
    """Cordon the host whose hardware failed the gang, until a person has looked at it.

    Returns:
        The damage of the cordons file if it prevents this. The gang ends anyway.
    """
    if failure is None or failure.host is None or not failure.cordon:
        return None
    why = f"{failure.reason}, in {job.lease.job}"
    try:
        new = _cordon(job, {failure.host: Cordon("cordoned", "gpurun", job.clock(), why, evidence=failure.evidence)})
    except StateUnavailable:
        raise
    except StateError as error:
        return error
    if new:
        job.events.emit("host", host=failure.host, state="cordoned", reason=failure.reason, evidence=failure.evidence)
    return None


def cordon_lost(job: SupervisedJob, unproven: Mapping[str, GpurunError]) -> None:
    """Cordon hosts that could not be fenced."""
    why = f"gpurun could not check that {job.lease.job} left nothing on the host (the fence)"
    _cordon(
        job,
        {host: Cordon("lost", "gpurun", job.clock(), why, evidence=error.message) for host, error in unproven.items()},
    )
    job.note(
        f"{', '.join(sorted(unproven))}: lost; the GPUs stay leased until a fence, the check that the "
        "job left nothing on the host, succeeds"
    )


def _with_id(known: KnownAs, hardware: Mapping[str, Hardware]) -> KnownAs:
    """Return by what a machine is known, with the id that it gave to pre-flight if the lease has none.

    An id that several hosts of the gang gave says nothing.
    """
    said = [each.machine_id for each in hardware.values()]
    found = hardware[known.host].machine_id if known.host in hardware else ""
    is_its = ID.fullmatch(found) is not None and said.count(found) == 1
    return replace(known, id=found) if is_its and not known.id else known


def _cordon(job: SupervisedJob, wanted: Mapping[str, Cordon]) -> bool:
    """Cordon hosts that have no cordon yet; return False if all have one.

    If another user keeps the lock of the cordons, the hosts stay in use and the job says so, because a gang's other
    GPUs must not wait for a cordon.
    """
    try:
        with changing_cordons(job.home) as cordons:
            known = {each.host: _with_id(each, job.hardware) for each in lease_hosts(job.lease)}
            new = wanted.keys() - cordons_on(cordons, known.values()).keys()
            for host in sorted(new):
                put_cordon(cordons, known.get(host, KnownAs(host)), wanted[host])
            return bool(new)
    except StateDiskError:
        raise
    except StateUnavailable as error:
        hosts = sorted(wanted)
        job.note(
            f"gpurun could not cordon {', '.join(hosts)}: {error}; run `gpurun inventory cordon {','.join(hosts)}`"
        )
        return False
