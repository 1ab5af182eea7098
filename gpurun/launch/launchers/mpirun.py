"""Open MPI's ``mpirun``, for programs that use MPI themselves, for example through mpi4py. Pure.

Facts: Open MPI 4.1 (``mpirun(1)``, FAQ on TCP). The ``ssh`` that is first on the launcher's PATH connects to the job's
own sshd. ``-x`` sends a variable to the ranks; each rank's script exports the variables of its host's fabric.
"""

from __future__ import annotations

from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers.launcher import Launcher, PlacedGang, RankSeat
from gpurun.launch.launchers.words import as_mpi
from gpurun.launch.rank import RANK_SCRIPT

RADIX = 64
"""``mpirun`` starts so many daemons itself, and these start the others (``plm_rsh_no_tree_spawn``)."""


def argv(spec: JobSpec, gang: PlacedGang) -> tuple[str, ...]:
    """Return the argv of ``mpirun``: one rank for each GPU (or host), in rank order.

    The words ``slot`` keep that order, whatever ``OMPI_MCA_*`` says. Processes are not bound to cores, because ranks
    have data loaders. Only the first host has the key to the others, so it starts all daemons (as Horovod's
    `runner/mpi_run.py`).
    """
    chosen = {as_mpi(word) for word in spec.launcher_flags}
    slots = ",".join(f"{each.host}:{ranks}" for each, ranks in zip(gang.grants, gang.ranks_of_hosts, strict=True))
    command = ["mpirun", "--allow-run-as-root", "-np", str(gang.size), "-H", slots]
    for flag, value in (("--map-by", "slot"), ("--rank-by", "slot"), ("--bind-to", "none")):
        if not any(each.startswith(flag) for each in chosen):
            command += [flag, value]
    if len(gang.grants) > 1:
        interface = gang.interfaces[gang.first]
        command += ["-mca", "btl_tcp_if_include", interface, "-mca", "oob_tcp_if_include", interface]
    if len(gang.grants) > RADIX:
        command += ["-mca", "plm_rsh_no_tree_spawn", "1"]
    if gang.is_tcp:
        for name, value in (("pml", "ob1"), ("btl", "^openib")):
            command += ["-mca", name, value] if name not in spec.launcher_flags else []
    told = environment(gang, gang.places[0])
    own = {name: told[name] for name in told if name not in gang.given and name not in spec.launcher_flags}
    sent = ("PATH", "PYTHONPATH", *(f"{name}={value}" for name, value in own.items()))
    return (*command, *spec.launcher_flags, *(word for each in sent for word in ("-x", each)), RANK_SCRIPT)


def environment(gang: PlacedGang, _: RankSeat) -> dict[str, str]:
    """Return what a program of PyTorch needs beside MPI's numbers to form a group: where rank 0 listens, by which way.

    The job's own sshd listens on the same port, and not on the first host.
    """
    return {
        "MASTER_ADDR": gang.addresses[gang.first], "MASTER_PORT": str(gang.port),
        "GLOO_SOCKET_IFNAME": gang.interfaces[gang.first],
    }  # fmt: skip


MPIRUN = Launcher(
    "mpirun", "/bin/sh, Open MPI and OpenSSH's client", rank_variable="OMPI_COMM_WORLD_RANK", tells="group",
    argv=argv, environment=environment, program="mpirun", elastic="anew",
)  # fmt: skip
