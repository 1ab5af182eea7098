"""TensorFlow's own strategies: parameter servers, or workers that average their gradients. Pure.

gpurun starts each task and describes the cluster in ``TF_CONFIG``
(`tf.distribute.cluster_resolver.TFConfigClusterResolver`). Facts: TensorFlow 2.15. Servers, and workers that a chief
coordinates, never return from `Server.join`. gpurun ends them once the chief, or without a chief every worker, has
returned 0.
"""

from __future__ import annotations

import json
from dataclasses import replace

from gpurun.jobs.spec import Disagreement, JobSpec, Roles
from gpurun.launch.launchers.launcher import EVALUATOR, SERVER, WORKER, Launcher, PlacedGang, RankSeat
from gpurun.launch.launchers.line import PYTHON
from gpurun.quantities import count

WITH_FLAGS = (
    "sh", "-c",
    'exec "$@" --ps_hosts="$GPURUN_PS_HOSTS" --worker_hosts="$GPURUN_WORKER_HOSTS" '
    '--job_name="$GPURUN_ROLE" --task_index="$GPURUN_ROLE_INDEX"',
    "gpurun",
)  # fmt: skip
"""What hands a program of TensorFlow 1 its flags, after its own."""


def environment(gang: PlacedGang, place: RankSeat) -> dict[str, str]:
    """Return the variables of a task. The evaluator is only in its own cluster.

    A rank without a GPU sees none, because TensorFlow would allocate the memory of all GPUs. With GRPC_FAIL_FAST, a
    call to a task that has ended fails instead of waiting for ever.
    """
    peers = gang.peers()
    cluster = {role: where for role, where in peers.items() if role != EVALUATOR or place.role == EVALUATOR}
    task = {"type": place.role, "index": place.index}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        "CUDA_VISIBLE_DEVICES": str(place.local_rank) if place.has_gpu else "",
        "GRPC_FAIL_FAST": "use_caller",
        "GPURUN_PS_HOSTS": ",".join(peers.get(SERVER, ())),
        "GPURUN_WORKER_HOSTS": ",".join(peers[WORKER]),
    }


def with_roles(spec: JobSpec) -> JobSpec:
    """Return the spec with complete roles, and with the classic flags after its command if the recipe wants them.

    Raises:
        BadInput: such a gang is impossible.
    """
    roles = spec.roles or Roles()
    if roles.workers not in (None, spec.gpus):
        workers, gpus = count(roles.workers, "worker needs", "workers need"), count(spec.gpus, "GPU")
        what = f"roles: {workers} one GPU each, but the job has {gpus}"
        raise Disagreement(
            what, "roles", "workers", hint="remove 'workers', or set 'gpus' to the same number as 'workers'"
        )
    if roles.chief and not roles.ps:
        what = "roles: a chief coordinates parameter servers, but the job has no parameter servers"
        hint = "write the number of parameter servers under 'ps', or remove 'chief': worker 0 is then the chief"
        raise Disagreement(what, "roles", "chief", hint=hint)
    if roles.flags and not roles.ps:
        what = "roles: 'flags' name parameter servers, but the job has no parameter servers"
        hint = "write the number of parameter servers under 'ps', or remove 'flags'"
        raise Disagreement(what, "roles", "flags", hint=hint)
    if roles.ps_hosts and not roles.ps:
        what = "roles: 'ps_hosts' are for parameter servers, but the job has no parameter servers"
        hint = "write the number of parameter servers under 'ps', or remove 'ps_hosts'"
        raise Disagreement(what, "roles", "ps_hosts", hint=hint)
    if roles.ps > spec.gpus and not roles.ps_hosts:
        raise Disagreement(
            f"roles: the job has {roles.ps} parameter servers, but only {count(spec.gpus, 'worker')}", "roles", "ps",
            hint="write a smaller number under 'ps', or name hosts without GPUs for the servers under 'ps_hosts'",
        )  # fmt: skip
    chief = roles.ps > 0 and not roles.flags if roles.chief is None else roles.chief
    command = (*WITH_FLAGS, *spec.command) if roles.flags else spec.command
    return replace(spec, command=command, roles=replace(roles, workers=spec.gpus, chief=chief))


TENSORFLOW = Launcher(
    "tensorflow", "/bin/sh, Python and TensorFlow", environment=environment, with_roles=with_roles, interpreter=PYTHON,
    one_per_gpu="each worker has one GPU",
)  # fmt: skip
