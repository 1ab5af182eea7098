"""Horovod with ``horovodrun``: its Gloo and its MPI controller. Pure."""

from __future__ import annotations

from gpurun.jobs.spec import JobSpec
from gpurun.launch import horovodrun
from gpurun.launch.launchers.launcher import Launcher, PlacedGang

NEEDS = "/bin/sh, Horovod and OpenSSH's client; see recipes/images"
ONE_PER_GPU = "Horovod's programs use the GPU of their local rank"


def argv(spec: JobSpec, gang: PlacedGang) -> tuple[str, ...]:
    """Return the argv of ``horovodrun``."""
    return horovodrun.argv(spec, gang.grants, gang.interfaces[gang.first])


GLOO = Launcher(
    "horovod", NEEDS, rank_variable="HOROVOD_RANK", tells="script", argv=argv, elastic="live", all_read_outputs=False,
    program="horovodrun", one_per_gpu=ONE_PER_GPU, joins="horovod's init()",
)  # fmt: skip
MPI = Launcher(
    "horovod", NEEDS, rank_variable="OMPI_COMM_WORLD_RANK", tells="group", argv=argv, all_read_outputs=False,
    program="horovodrun", one_per_gpu=ONE_PER_GPU,
)  # fmt: skip
