"""Open MPI's ``mpirun``, for programs that use MPI themselves, for example through mpi4py. Pure.

Facts: Open MPI 4.1 (``mpirun(1)``, FAQ on TCP). The ``ssh`` that is first on the launcher's PATH connects to the job's
own sshd. ``-x`` sends a variable to the ranks; each rank's script exports the variables of its host's fabric.
"""

from __future__ import annotations

from gpurun.jobs.spec import JobSpec
from gpurun.launch.horovodrun import slots
from gpurun.launch.launchers.launcher import Launcher, PlacedGang, Typed
from gpurun.launch.rank import RANK_SCRIPT

RADIX = 64
"""``mpirun`` starts so many daemons itself, and these start the others (``plm_rsh_no_tree_spawn``)."""

TYPED = Typed(
    "mpirun",
    with_value=frozenset({"-np", "-n", "--np", "-c", "-H", "-host", "--host", "-hostfile", "--hostfile",
                          "-machinefile", "--machinefile", "-N", "--bind-to", "-bind-to", "--map-by", "-map-by", "-x"}),
    alone=frozenset({"--allow-run-as-root", "--oversubscribe", "-oversubscribe"}),
)  # fmt: skip


def argv(spec: JobSpec, gang: PlacedGang) -> tuple[str, ...]:
    """Return the argv of ``mpirun``: one rank for each GPU, in rank order, with the command of the ranks.

    The words ``slot`` keep that order, whatever ``OMPI_MCA_*`` says. Processes are not bound to cores, because ranks
    have data loaders. Only the first host has the key to the others, so it starts all daemons (as Horovod's
    `runner/mpi_run.py`).
    """
    command = ["mpirun", "--allow-run-as-root", "-np", str(gang.size), "-H", slots(gang.grants)]
    command += ["--map-by", "slot", "--rank-by", "slot", "--bind-to", "none"]
    if len(gang.grants) > 1:
        interface = gang.interfaces[gang.first]
        command += ["-mca", "btl_tcp_if_include", interface, "-mca", "oob_tcp_if_include", interface]
    if len(gang.grants) > RADIX:
        command += ["-mca", "plm_rsh_no_tree_spawn", "1"]
    if gang.is_tcp:
        command += ["-mca", "pml", "ob1", "-mca", "btl", "^openib"]
    return (*command, "-x", "PATH", "-x", "PYTHONPATH", RANK_SCRIPT, *spec.command)


MPIRUN = Launcher(
    "mpirun", "/bin/sh, Open MPI and OpenSSH's client", rank_variable="OMPI_COMM_WORLD_RANK", tells="group",
    argv=argv, typed=TYPED, elastic="anew",
)  # fmt: skip
