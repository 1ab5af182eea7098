"""The ``horovodrun`` argv. Pure.

Facts measured with Horovod 0.28.1: Gloo mode starts every slot, whatever ``-np`` says. ``--disable-cache`` avoids one
host-check cache for all jobs of a user. It needs exactly one network interface, and none if all ranks are on one host.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpurun.jobs.spec import Grant, JobSpec
from gpurun.launch import elastic
from gpurun.launch.docker import AUTOTUNE_FILE, RUN
from gpurun.launch.horovod_knobs import GLOO_TIMEOUT_S, TIMELINE, TIMELINE_FILE, flags
from gpurun.launch.jobssh import MOUNT
from gpurun.launch.rank import RANK_SCRIPT

AUTOTUNE_LOG = f"{RUN}/{AUTOTUNE_FILE}"
"""Where rank 0 writes what autotune tried; kept with the job, so that a restart begins with the best it found."""


def slots(grants: Sequence[Grant]) -> str:
    """Return ``host:slots,…`` in rank order; the sum of slots is the world size."""
    return ",".join(f"{grant.host}:{len(grant.gpus)}" for grant in grants)


def argv(spec: JobSpec, grants: Sequence[Grant], interface: str) -> tuple[str, ...]:
    """Return the launcher's argv for a placed gang.

    It ends with the script that sets each host's own settings and contains the user's command.
    """
    world = sum(len(grant.gpus) for grant in grants)
    command = ["horovodrun", "-np", str(world)]
    command += elastic.flags(spec, f"{MOUNT}/bin/hosts") if spec.min_gpus else ["-H", slots(grants)]
    command += ["--disable-cache", "--mpi" if spec.controller == "mpi" else "--gloo"]
    if len(grants) > 1 or spec.min_gpus:
        command += ["--network-interfaces", interface]
    timeout_s = elastic.GLOO_TIMEOUT_S if spec.min_gpus else GLOO_TIMEOUT_S
    timeline = f"{spec.outputs}/{TIMELINE_FILE}" if spec.outputs else TIMELINE
    knobs = flags(spec.horovod, autotune_log=AUTOTUNE_LOG, gloo_timeout_s=timeout_s, timeline=timeline)
    return (*command, *knobs, *spec.launcher_flags, RANK_SCRIPT)
