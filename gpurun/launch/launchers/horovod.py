"""Horovod with ``horovodrun``: its Gloo and its MPI controller. Pure."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace

from gpurun.jobs.spec import Grant, HorovodKnobs, JobSpec
from gpurun.launch import jobssh
from gpurun.launch.container import AUTOTUNE_FILE, RUN
from gpurun.launch.jobssh import MOUNT
from gpurun.launch.launchers.launcher import Launcher, PlacedGang
from gpurun.launch.rank import RANK_SCRIPT

# Turn a recipe's ``horovod:`` section into flags and environment of horovodrun. Pure.


TIMELINE_FILE = "horovod-timeline.json"
"""In the outputs, so that gpurun copies it to the head."""
TIMELINE = "/tmp/horovod-timeline.json"  # noqa: S108  inside the job's own container


GLOO_TIMEOUT_S = 300


def flags(
    knobs: HorovodKnobs,
    *,
    timeline: str = TIMELINE,
    autotune_log: str | None = None,
    gloo_timeout_s: int = GLOO_TIMEOUT_S,
) -> tuple[str, ...]:
    """Return the flags, in a stable order. A setting that is None adds no flag, except the two time-outs.

    Args:
        timeline: path in the container for Horovod's timeline, if it is on.
        autotune_log: path in the container for autotune's trials, if autotune is on. Rank 0 writes it.
        gloo_timeout_s: default for the Gloo time-out.

    ``--thread-affinity`` takes a single number: see `environment` for a list.
    """
    return (
        *_value("--fusion-threshold-mb", knobs.fusion_threshold_mb),
        *_value("--cycle-time-ms", knobs.cycle_time_ms),
        *_value("--cache-capacity", knobs.cache_capacity),
        *_switch("hierarchical-allreduce", knobs.hierarchical_allreduce),
        *_switch("hierarchical-allgather", knobs.hierarchical_allgather),
        *_switch("torus-allreduce", knobs.torus_allreduce),
        *_switch("autotune", knobs.autotune),
        *_value("--autotune-log-file", autotune_log if knobs.autotune else None),
        *_value("--timeline-filename", timeline if knobs.timeline else None),
        *_value("--stall-check-warning-time-seconds", knobs.stall_check_warning_s),
        *_value("--stall-check-shutdown-time-seconds", knobs.stall_check_shutdown_s),
        *_value("--num-nccl-streams", knobs.num_nccl_streams),
        *_value("--gloo-timeout-seconds", gloo_timeout_s if knobs.gloo_timeout_s is None else knobs.gloo_timeout_s),
        *_value("--start-timeout", knobs.start_timeout_s),
    )


def knob_variables(knobs: HorovodKnobs) -> dict[str, str]:
    """Return settings without a usable flag: HOROVOD_THREAD_AFFINITY, one core per local rank (`common.cc`)."""
    if not knobs.thread_affinity:
        return {}
    return {"HOROVOD_THREAD_AFFINITY": ",".join(map(str, knobs.thread_affinity))}


def reuse(knobs: HorovodKnobs, log: str) -> HorovodKnobs:
    """Return settings with the values that an earlier autotune of the same job found, and autotune off.

    Its log is comma separated with a header; "the last row will always contain the best value found"
    (``--autotune-log-file``). Settings of the recipe stay. A log without a complete row changes nothing.
    """
    try:
        rows = [row for row in csv.DictReader(log.splitlines()) if row.get("score")]
        if not rows:
            return knobs
        best = {name: float(value) for name, value in rows[-1].items() if name and value}
        if not all(map(math.isfinite, best.values())):
            return knobs
        found = _tuned(best)
    except (KeyError, TypeError, ValueError, csv.Error):
        return knobs
    kept = {name: value for name, value in found.items() if getattr(knobs, name) is None}
    return replace(knobs, autotune=False, **kept)  # type: ignore[arg-type]


def _tuned(best: dict[str, float]) -> dict[str, object]:
    """Return the settings in the log's columns (`parameter_manager.cc`). A disabled cache is a capacity of 0."""
    found: dict[str, object] = {
        "hierarchical_allreduce": best["hierarchical_allreduce"] > 0,
        "hierarchical_allgather": best["hierarchical_allgather"] > 0,
        "cycle_time_ms": best["cycle_time_ms"],
        "fusion_threshold_mb": round(best["tensor_fusion_threshold"]),
    }
    if "torus_allreduce" in best:
        found["torus_allreduce"] = best["torus_allreduce"] > 0
    if best.get("cache_enabled") == 0:
        found["cache_capacity"] = 0
    return found


def _value(flag: str, value: float | str | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return flag, f"{value:g}" if isinstance(value, float) else str(value)


def _switch(name: str, value: bool | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (f"--{name}" if value else f"--no-{name}",)


# The ``horovodrun`` argv. Pure.


AUTOTUNE_LOG = f"{RUN}/{AUTOTUNE_FILE}"
"""Where rank 0 writes what autotune tried; kept with the job, so that a restart begins with the best it found."""


def slots(grants: Sequence[Grant]) -> str:
    """Return ``host:slots,…`` in rank order; the sum of slots is the world size."""
    return ",".join(f"{grant.host}:{len(grant.gpus)}" for grant in grants)


def horovodrun_argv(spec: JobSpec, grants: Sequence[Grant], interface: str) -> tuple[str, ...]:
    """Return the launcher's argv for a placed gang.

    It ends with the script that sets each host's own settings and contains the user's command.
    """
    world = sum(len(grant.gpus) for grant in grants)
    command = ["horovodrun", "-np", str(world)]
    command += jobssh.flags(spec, f"{MOUNT}/bin/hosts") if spec.min_gpus else ["-H", slots(grants)]
    command += ["--disable-cache", "--mpi" if spec.controller == "mpi" else "--gloo"]
    if len(grants) > 1 or spec.min_gpus:
        command += ["--network-interfaces", interface]
    timeout_s = jobssh.GLOO_TIMEOUT_S if spec.min_gpus else GLOO_TIMEOUT_S
    timeline = f"{spec.outputs}/{TIMELINE_FILE}" if spec.outputs else TIMELINE
    knobs = flags(spec.horovod, autotune_log=AUTOTUNE_LOG, gloo_timeout_s=timeout_s, timeline=timeline)
    return (*command, *knobs, *spec.launcher_flags, RANK_SCRIPT)


NEEDS = "/bin/sh, Horovod and OpenSSH's client; see recipes/images"
ONE_PER_GPU = "Horovod's programs use the GPU of their local rank"


def argv_of_gang(spec: JobSpec, gang: PlacedGang) -> tuple[str, ...]:
    """Return the argv of ``horovodrun``."""
    return horovodrun_argv(spec, gang.grants, gang.interfaces[gang.first])


GLOO = Launcher(
    "horovod", NEEDS, rank_variable="HOROVOD_RANK", tells="script", argv=argv_of_gang, elastic="live",
    all_read_outputs=False,
    program="horovodrun", one_per_gpu=ONE_PER_GPU, joins="horovod's init()",
)  # fmt: skip
MPI = Launcher(
    "horovod", NEEDS, rank_variable="OMPI_COMM_WORLD_RANK", tells="group", argv=argv_of_gang, all_read_outputs=False,
    program="horovodrun", one_per_gpu=ONE_PER_GPU,
)  # fmt: skip
