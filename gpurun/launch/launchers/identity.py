"""Variables that tell a process which rank it is, and where the others are. Pure.

One value of such a variable for all ranks of a gang hangs it: each rank believes that it is the same one. So a person
may not set what the launcher sets for each rank. This table names these variables; which ones a launcher sets, the
launcher itself says, if gpurun starts its ranks.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from gpurun.jobs.disagreement import Disagreement
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.launch.launchers.launcher import Launcher, PlacedGang
from gpurun.launch.launchers.lines.flags import CHOSEN


class RankIdentity(NamedTuple):
    """Variables that belong together.

    Attributes:
        names: the variables.
        launchers: gpurun's launchers that set them, the one to recommend first.
        prefix: more variables of this kind begin so; "" = none.
        settings: begins the names of settings that begin with `prefix`, too; "" = none.
        is_always_refused: no program on one GPU needs them from a person, and `gpurun_runtime` reads them.
    """

    names: tuple[str, ...]
    launchers: tuple[str, ...]
    prefix: str = ""
    settings: str = ""
    is_always_refused: bool = False

    def has(self, name: str) -> bool:
        """Return whether a variable is one of these."""
        is_setting = bool(self.settings) and name.startswith(self.settings)
        return name in self.names or (bool(self.prefix) and name.startswith(self.prefix) and not is_setting)


def _named(prefix: str, text: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in text.split())


_OF_TORCH = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE"
)
IDENTITIES = (
    RankIdentity(_named("", _OF_TORCH), ("torchrun", "deepspeed", "srun")),
    RankIdentity(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_GPUS_ON_NODE"), ("srun",)),
    RankIdentity(("TF_CONFIG",), ("tensorflow",)),
    RankIdentity(_named("JAX_", "COORDINATOR_ADDRESS NUM_PROCESSES PROCESS_ID"), ("jax",)),
    RankIdentity(
        _named("HOROVOD_", "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME GLOO_RENDEZVOUS_ADDR "
               "GLOO_RENDEZVOUS_PORT ELASTIC"),
        ("horovod",), is_always_refused=True,
    ),
    RankIdentity(
        _named("OMPI_COMM_WORLD_", "RANK SIZE LOCAL_RANK LOCAL_SIZE NODE_RANK"), ("mpirun", "horovod"),
        prefix="OMPI_COMM_WORLD_", is_always_refused=True,
    ),
    RankIdentity(
        _named("PMIX_", "RANK NAMESPACE ID SERVER_URI SERVER_URI2 SERVER_URI21 SERVER_URI3 SERVER_URI4 SERVER_TMPDIR"),
        ("mpirun", "horovod"), prefix="PMIX_", settings="PMIX_MCA_", is_always_refused=True,
    ),
    RankIdentity(_named("PMI_", "RANK SIZE FD PORT ID"), ("mpirun", "horovod"), prefix="PMI_", is_always_refused=True),
)  # fmt: skip
"""Settings such as ``OMPI_MCA_*``, ``HOROVOD_FUSION_THRESHOLD``, ``NCCL_*`` and ``OMP_NUM_THREADS`` are a person's."""

PLACES = RankIdentity(
    ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES", "NPROC_PER_NODE"), ("torchrun", "deepspeed"), prefix="PET_"
)
"""Where the first rank listens, and on how many hosts ranks are: a typed launcher's settings, as its flags are."""


def is_told(name: str) -> bool:
    """Return whether a variable says which rank a process is, or where the others are."""
    return PLACES.has(name) or any(each.has(name) for each in IDENTITIES)


def with_own_variables(spec: JobSpec, launcher: Launcher) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the spec without the variables in whose place gpurun sets others, and lines that tell the person so.

    Raises:
        BadInput: a variable would give each rank the same identity.
    """
    sets = _sets(spec, launcher)
    for each in IDENTITIES:
        if names := [name for name in sorted(spec.env) if each.has(name)]:
            _refuse(spec, each, names, launcher, sets)
    places, is_replaced = [name for name in spec.env if PLACES.has(name)], any(map(PLACES.has, sets))
    if places and not is_replaced and spec.gpus > 1:
        raise Disagreement(
            f"env sets {', '.join(sorted(places))}, but the right {'values depend' if places[1:] else 'value depends'} "
            "on the hosts that gpurun chooses for the job",
            "env", min(places),
            hint="for PyTorch, choose --launcher torchrun, which sets these variables for each rank. "
            f"Otherwise remove {', '.join(sorted(places))} from env",
        )  # fmt: skip
    left = [f"{name}={spec.env[name]}" for name in places if is_replaced]
    kept = [name for name in spec.env if is_told(name) and not (is_replaced and name in places)]
    env = {name: value for name, value in spec.env.items() if name not in places or not is_replaced}
    return replace(spec, env=env), (
        *(f"  set for each rank: {' '.join(kept)}" for _ in kept[:1]),
        *(f"  left out: {shlex.join(left)} ({CHOSEN})" for _ in left[:1]),
    )


def unset_names(ranks: int, given: Collection[str]) -> tuple[str, ...]:
    """Return the variables that an image must not set for a gang of so many ranks.

    Args:
        given: the variables that the job itself sets.
    """
    found = (each for each in (*IDENTITIES, PLACES) if each.is_always_refused or ranks > 1)
    return tuple(name for each in found for name in each.names if name not in given)


def _refuse(spec: JobSpec, each: RankIdentity, names: list[str], launcher: Launcher, sets: Collection[str]) -> None:
    shown, them = ", ".join(names), "it" if len(names) == 1 else "them"
    if launcher.name in each.launchers or {*names} & {*sets}:
        raise Disagreement(
            f"{launcher.name} itself sets {shown} for each rank", "env", names[0],
            hint=f"remove {shown} from env, -e and the command",
        )  # fmt: skip
    if each.is_always_refused:
        raise Disagreement(
            f"each rank needs its own value of {shown}, so only a launcher may set {shown}", "env", names[0],
            hint=f"remove {shown}, or choose --launcher {each.launchers[0]}, which sets {them}",
        )  # fmt: skip
    if spec.one_per_host:
        raise Disagreement(
            f"the ranks of all hosts would have the same value of {shown}", "env", names[0],
            hint=f"remove {shown}; gpurun sets NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT for each host",
        )  # fmt: skip
    if spec.gpus > 1:
        raise Disagreement(
            f"all {spec.gpus} ranks would have the same value of {shown}", "env", names[0],
            hint=f"remove {shown}, or choose --launcher {each.launchers[0]}, which sets {them} for each rank",
        )  # fmt: skip


def _sets(spec: JobSpec, launcher: Launcher) -> frozenset[str]:
    """Return the variables that a launcher sets for a rank that gpurun starts."""
    gang = PlacedGang(
        "j", (Grant("h", (0,)),), {"h": "lo"}, {"h": "127.0.0.1"}, 1, is_tcp=True, roles=spec.roles,
        one_per_host=spec.one_per_host,
    )  # fmt: skip
    return frozenset(launcher.environment(gang, gang.places[0]))
