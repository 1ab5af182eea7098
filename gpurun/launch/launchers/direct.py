"""Ranks that gpurun itself starts, in the container of each host: no launcher, no sshd. Pure.

Every rank is a child of the container's main process. Its environment has all it must know about the gang.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from gpurun.launch.jobssh import unset_line
from gpurun.launch.launchers.launcher import RANK_VARIABLE, Launcher, PlacedGang, RankSeat, unset_names
from gpurun.launch.launchers.line import PYTHON
from gpurun.launch.launchers.torch import with_local_rank
from gpurun.launch.rank import RANK_SCRIPT

START_SCRIPT = "/gpurun/bin/start"
"""Where `start_script` lies in the container."""
UNTOLD = 70
_STAY = f"""\
for gpurun_each in $gpurun_ranks; do
  gpurun_pid=${{gpurun_each%:*}} gpurun_rank=${{gpurun_each#*:}}
  wait $gpurun_pid
  while kill -0 $gpurun_pid 2>/dev/null; do sleep 1 & wait $!; wait $gpurun_pid; done  # a signal interrupts `wait`
  set -- "$GPURUN_RUN/ranks/$GPURUN_ATTEMPT/$gpurun_rank".*/end.*
  if [ ! -e "$1" ]; then
    echo "rank $gpurun_rank has ended, but gpurun could not write its exit code to $GPURUN_RUN" >&2
    exit {UNTOLD}
  fi
done
while :; do sleep 86400 & wait $!; done
"""


def environment(launcher: Launcher, gang: PlacedGang, place: RankSeat) -> dict[str, str]:
    """Return the variables of a rank: its place, the others' addresses, and what its launcher adds to the recipe's."""
    added = launcher.environment(gang, place)
    return {
        RANK_VARIABLE: str(place.rank),
        "GPURUN_SIZE": str(gang.size),
        "GPURUN_LOCAL_RANK": str(place.local_rank),
        "GPURUN_LOCAL_SIZE": str(place.local_size),
        "GPURUN_NODE": str(place.node),
        "GPURUN_NODES": str(len(gang.grants)),
        "GPURUN_ADDRESSES": ",".join(gang.addresses[grant.host] for grant in gang.grants),
        "GPURUN_PORT": str(gang.port),
        **({"GPURUN_ROLE": place.role, "GPURUN_ROLE_INDEX": str(place.index)} if place.role else {}),
        **{name: value for name, value in added.items() if name not in gang.given},
    }


def rank_variables(launcher: Launcher, gang: PlacedGang, host: str) -> tuple[dict[str, str], ...]:
    """Return the variables of each rank of a host, in rank order."""
    return tuple(environment(launcher, gang, place) for place in gang.places if place.host == host)


def start_script(launcher: Launcher, gang: PlacedGang, host: str) -> str:
    """Return the main process of a host's container, ``/gpurun/bin/start``, which starts the ranks of the host.

    It stays after they have ended, and after SIGTERM, so that ranks can finish a checkpoint. If a rank's script cannot
    record the rank's end, because the disk is full or the image has no ``mkfifo``, the main process exits with
    `UNTOLD`, so that gpurun notices.
    """
    starts = "".join(_start(each) for each in rank_variables(launcher, gang, host))
    return f"""#!/bin/sh
{unset_line(unset_names(gang.size, gang.given))}trap : TERM
PYTHONPATH=${{PYTHONPATH:+$PYTHONPATH:}}/gpurun/python
export PYTHONPATH
gpurun_ranks=
{starts}{_STAY}"""


def _start(environ: Mapping[str, str]) -> str:
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in environ.items())
    rank = environ[RANK_VARIABLE]
    return f'(export {exports}; exec {RANK_SCRIPT}) </dev/null &\ngpurun_ranks="$gpurun_ranks $!:{rank}"\n'


def one_gpu(gang: PlacedGang, place: RankSeat) -> dict[str, str]:
    """Return the variables that let a program without knowledge of ranks see only its own GPU, or all of its host."""
    return {} if gang.one_per_host else {"CUDA_VISIBLE_DEVICES": str(place.local_rank)}


def tasks_environment(gang: PlacedGang, place: RankSeat) -> dict[str, str]:
    """Return what a copy of a program sees: its GPU, or, if each host has one copy, all GPUs and the other hosts.

    A launcher that such a copy starts finds the hosts by variables: ``torchrun`` has its flags in ``PET_*``, and
    scripts read the names without it. Open MPI 4 and 5 start as many processes as the copy says: their own limit is
    the host's cores.
    """
    if not gang.one_per_host:
        return one_gpu(gang, place)
    flags = {
        "NNODES": str(len(gang.grants)), "NODE_RANK": str(place.node),
        "NPROC_PER_NODE": str(len(gang.grants[place.node].gpus)),
        "MASTER_ADDR": gang.addresses[gang.first], "MASTER_PORT": str(gang.port),
    }  # fmt: skip
    gpus = [len(grant.gpus) for grant in gang.grants]
    return {
        **flags, **{f"PET_{name}": value for name, value in flags.items()},
        "GPURUN_GPUS": str(sum(gpus)), "GPURUN_GPUS_BEFORE": str(sum(gpus[: place.node])),
        "GLOO_SOCKET_IFNAME": gang.interfaces[place.host],
        "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }  # fmt: skip


TASKS = Launcher("tasks", "/bin/sh", environment=tasks_environment, elastic="anew")


def torch_environment(gang: PlacedGang, place: RankSeat) -> dict[str, str]:
    """Return the variables that ``torchrun`` sets for a rank (`torch.distributed.run`, "Environment Variables").

    Rank 0 itself listens on MASTER_PORT, as the rendezvous ``env://`` requires, so ranks use no store of an agent. With
    TORCH_NCCL_ASYNC_ERROR_HANDLING, a collective that fails or times out ends its rank. Gloo reads GLOO_SOCKET_IFNAME.
    The plan sets OMP_NUM_THREADS.
    """
    nodes, size = str(len(gang.grants)), str(gang.size)
    return {
        "RANK": str(place.rank), "WORLD_SIZE": size, "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size), "GROUP_RANK": str(place.node), "GROUP_WORLD_SIZE": nodes,
        "NODE_RANK": str(place.node), "ROLE_RANK": str(place.rank), "ROLE_WORLD_SIZE": size, "ROLE_NAME": "default",
        "MASTER_ADDR": gang.addresses[gang.first], "MASTER_PORT": str(gang.port),
        "TORCHELASTIC_RUN_ID": gang.ident, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "GLOO_SOCKET_IFNAME": gang.interfaces[place.host],
    }  # fmt: skip


TORCHRUN = Launcher(
    "torchrun", "/bin/sh, Python and PyTorch", environment=torch_environment, interpreter=PYTHON, elastic="anew",
    joins="torch.distributed.init_process_group()",
)  # fmt: skip
DEEPSPEED = Launcher(
    "deepspeed", "/bin/sh, Python, PyTorch and DeepSpeed", environment=torch_environment,
    interpreter=with_local_rank(PYTHON), by_itself=with_local_rank(()), elastic="anew",
    one_per_gpu="each process of DeepSpeed uses one GPU",
    joins="deepspeed.initialize()",
)  # fmt: skip
"""DeepSpeed's own launcher gives the number to a script as its first flag, too (`deepspeed.launcher.launch`)."""


def slurm_environment(gang: PlacedGang, place: RankSeat) -> dict[str, str]:
    """Return the variables that Slurm's ``srun`` sets for a task (srun(1), "Output environment variables").

    Those of PyTorch are there, too: a batch script would set them itself. SLURM_NTASKS_PER_NODE is there if the hosts
    have equally many ranks. A job's number is its id's. The only process of a host may start a launcher, so it is told
    what `tasks` tells it, and no rank of PyTorch's.
    """
    ranks, names = gang.ranks_of_hosts, ",".join(grant.host for grant in gang.grants)
    size, nodes = str(gang.size), str(len(gang.grants))
    number = str(int(gang.ident.partition(".")[0].partition("-")[2] or "1", 16))
    each = {"SLURM_NTASKS_PER_NODE": str(ranks[0])} if len({*ranks}) == 1 else {}
    return {
        **(tasks_environment(gang, place) if gang.one_per_host else torch_environment(gang, place)), **each,
        "SLURM_PROCID": str(place.rank), "SLURM_LOCALID": str(place.local_rank), "SLURM_NODEID": str(place.node),
        "SLURM_NTASKS": size, "SLURM_NPROCS": size, "SLURM_STEP_NUM_TASKS": size,
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_TASKS_PER_NODE": ",".join(map(str, ranks)), "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, ranks)),
        "SLURM_NODELIST": names, "SLURM_JOB_NODELIST": names, "SLURM_STEP_NODELIST": names,
        "SLURMD_NODENAME": place.host, "SLURM_LAUNCH_NODE_IPADDR": gang.addresses[gang.first],
        "SLURM_JOB_ID": number, "SLURM_JOBID": number, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0",
        "SLURM_GPUS_ON_NODE": str(len(gang.grants[place.node].gpus)),
    }  # fmt: skip


SRUN = Launcher("srun", "/bin/sh", environment=slurm_environment, elastic="anew")


def jax_environment(gang: PlacedGang, place: RankSeat) -> dict[str, str]:
    """Return the values for ``jax.distributed.initialize``. JAX reads only the first from the environment everywhere.

    One process for each GPU, or for each host. Rank 0 listens.
    """
    return {
        "JAX_COORDINATOR_ADDRESS": f"{gang.addresses[gang.first]}:{gang.port}",
        "JAX_NUM_PROCESSES": str(gang.size), "JAX_PROCESS_ID": str(place.rank),
        **one_gpu(gang, place),
    }  # fmt: skip


JAX = Launcher(
    "jax", "/bin/sh, Python and JAX", environment=jax_environment, interpreter=PYTHON, elastic="anew",
    joins="jax.distributed.initialize()",
)  # fmt: skip
