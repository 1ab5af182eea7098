"""The cluster's state and history for Prometheus."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpurun import __version__
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, GpurunError, StateUnavailable
from gpurun.history.row import OUTCOMES
from gpurun.history.store import HistorySource, JobHistory
from gpurun.inventory.model import Host, Inventory
from gpurun.jobs.folder import JobFolder, read_use
from gpurun.jobs.record import GpuUse, JobRecord, State
from gpurun.jobs.store import JobStore
from gpurun.leases.look import Cluster, HostRow, look
from gpurun.state.hosts import Machine, Machines, Out, outs_of
from gpurun.state.paths import user_name

# Metrics as the text that Prometheus reads: its exposition format 0.0.4. Pure.


MOST_LABEL_CHARS = 300


class Family(NamedTuple):
    """What all samples of a metric mean, and the names of their labels."""

    help: str
    labels: tuple[str, ...] = ()


FAMILIES = {
    "gpurun_build_info": Family("Version of gpurun; the value is 1.", ("version",)),
    "gpurun_hosts": Family("Hosts of the inventory by state.", ("state",)),
    "gpurun_gpus": Family(
        "GPUs of the inventory. Unavailable: not leased, on a host that gets no new jobs. Unknown: a lease is damaged.",
        ("generation", "state"),
    ),
    "gpurun_host_out": Family(
        "A host that a check of the user found broken; the value is 1.", ("host", "user", "check")
    ),
    "gpurun_host_look_age_seconds": Family(
        "Time since the user's processes last looked at the host.", ("host", "user")
    ),
    "gpurun_pool_leased_gpus": Family("GPUs that jobs of a pool hold.", ("pool",)),
    "gpurun_queue_jobs": Family("Jobs that wait for GPUs, by pool.", ("pool",)),
    "gpurun_queue_gpus": Family("GPUs that waiting jobs ask for, by pool.", ("pool",)),
    "gpurun_queue_oldest_wait_seconds": Family("How long the oldest waiting job has waited."),
    "gpurun_jobs": Family("Jobs that have not ended, by state.", ("state",)),
    "gpurun_job_info": Family("A job that has not ended; the value is 1.", ("job_id", "name", "user", "pool", "state")),
    "gpurun_gpu_info": Family(
        "Which job holds a GPU; the value is 1. UUID is the same as in dcgm-exporter.",
        ("gpu", "UUID", "host", "job_id"),
    ),
    "gpurun_gpu_utilization_ratio": Family(
        "Share of the last half minute in which a kernel ran on the GPU.", ("gpu", "UUID", "host")
    ),
    "gpurun_attempts_total": Family("Attempts of jobs that have ended, by outcome.", ("outcome",)),
    "gpurun_gpu_seconds_total": Family("GPU time of attempts that have ended.", ("generation", "pool")),
    "gpurun_gpu_idle_seconds_total": Family(
        "GPU time of ended attempts in which no kernel ran.", ("generation", "pool")
    ),
    "gpurun_wait_seconds_total": Family("Time that ended attempts waited for GPUs.", ("pool",)),
    "gpurun_failures_total": Family("Attempts with a first failure, by its kind.", ("cause",)),
    "gpurun_problems": Family("Files of the state directory that cannot be read."),
}
"""Names have units. Those that end in ``_total`` are counters, all others gauges."""


class Metrics:
    """Samples of `FAMILIES`."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in FAMILIES}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to the sample with these label values, in the order of the family's labels."""
        assert len(labels) == len(FAMILIES[name].labels)
        shown = _shown(labels)
        self._samples[name][shown] = self._samples[name].get(shown, 0.0) + value

    def put(self, name: str, value: float, *labels: str) -> None:
        """Replace the sample with these label values."""
        self._samples[name][_shown(labels)] = value

    def text(self) -> str:
        """Return the whole text. A family without samples is left out."""
        lines: list[str] = []
        for name, samples in self._samples.items():
            if samples:
                family, kind = FAMILIES[name], "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {kind}"]
                lines += [
                    f"{name}{_labels(family.labels, labels)} {_number(samples[labels])}" for labels in sorted(samples)
                ]
        return "".join(f"{line}\n" for line in lines)


def _shown(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values as readers see them: two samples that look the same would make the text invalid."""
    return tuple(printable(value[:MOST_LABEL_CHARS]) for value in labels)


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    """Return labels, with what the format escapes."""
    texts = [value.replace("\\", "\\\\").replace('"', '\\"') for value in values]
    return "{" + ",".join(f'{name}="{text}"' for name, text in zip(names, texts, strict=True)) + "}" if names else ""


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


# Metrics for Prometheus: hosts, GPUs, the queue and jobs now; totals of attempts, GPU time and failures.


HOST_STATES = ("ok", "cordoned", "draining", "drained", "lost", "out", "unknown")
GPU_STATES = ("leased", "free", "unavailable", "unknown")
STALE_S = 120.0
"""A GPU whose host has said nothing for this long has no use."""


def measure_all(cluster: Cluster, *, now_s: float, wall_s: float | None = None) -> Metrics:
    """Return everything.

    Args:
        now_s: the head's clock, seconds since the epoch.
        wall_s: the wall clock, which looks at hosts are stamped with; None = as the head's clock.

    Raises:
        StateError: the cordons cannot be read.
    """
    metrics, problems = Metrics(), list[GpurunError]()
    view = look(cluster.home, now_s=now_s, on_problem=problems.append, despite_damage=True)
    known = {user_name(uid): Machines(cluster.home).read(uid) for uid in Machines(cluster.home).users()}
    looks = {user: (machines, outs_of(machines)) for user, machines in known.items()}
    records = [job.record for job in view.jobs.values()]
    metrics.add("gpurun_build_info", 1, __version__)
    _add_hosts(metrics, cluster.rows(view), looks, are_known=not view.damaged)
    _add_looks(metrics, cluster.inventory, looks, now_s if wall_s is None else wall_s)
    _add_queue(metrics, [record for record in records if record.state is State.QUEUED], now_s)
    _add_jobs(metrics, cluster.home, records, now_s)
    with JobHistory(cluster.home).sources(problems.append) as history:
        _add_history(metrics, history)
    metrics.add("gpurun_problems", len({str(problem) for problem in problems}))
    return metrics


Looks = Mapping[str, tuple[Mapping[str, Machine], Mapping[str, Out]]]
"""User → what the user knows of machines, and which of them are out."""


def _add_hosts(metrics: Metrics, rows: Sequence[HostRow], looks: Looks, *, are_known: bool) -> None:
    for state in HOST_STATES:
        metrics.add("gpurun_hosts", 0, state)
    for row in rows:
        state = "out" if row.state == "ok" and _is_out_for_all(row.host, looks) else row.state
        metrics.add("gpurun_hosts", 1, state)
        if row.host.gpus:
            generation, held = row.host.generation, row.held if are_known else row.host.gpus
            for gpu_state in GPU_STATES:
                metrics.add("gpurun_gpus", 0, generation, gpu_state)
            metrics.add("gpurun_gpus", held, generation, "leased" if are_known else "unknown")
            metrics.add("gpurun_gpus", row.host.gpus - held, generation, "free" if state == "ok" else "unavailable")


def _is_out_for_all(host: Host, looks: Looks) -> bool:
    """Return whether everybody who has looked at a host found it broken; the user who measures may have looked at none.

    A host that only some users cannot use is out for them alone, for example because a key of theirs is missing.
    """
    found = [host.machine in outs for machines, outs in looks.values() if host.machine in machines]
    return bool(found) and all(found)


def _add_looks(metrics: Metrics, inventory: Inventory, looks: Looks, wall_s: float) -> None:
    """Add what each user's looks at hosts found."""
    for user, (machines, outs) in looks.items():
        for host in inventory.hosts:
            if (found := outs.get(host.machine)) is not None:
                metrics.add("gpurun_host_out", 1, host.name, user, found.check)
            if (seen := machines.get(host.machine)) is not None:
                metrics.add("gpurun_host_look_age_seconds", max(0.0, wall_s - seen.seen_s), host.name, user)


def _add_queue(metrics: Metrics, waiting: Sequence[JobRecord], now_s: float) -> None:
    for record in waiting:
        metrics.add("gpurun_queue_jobs", 1, record.pool or "")
        metrics.add("gpurun_queue_gpus", record.gpus, record.pool or "")
    if not waiting:
        metrics.add("gpurun_queue_jobs", 0, "")
        metrics.add("gpurun_queue_gpus", 0, "")
    oldest_s = max((max(0.0, now_s - record.queued_s) for record in waiting), default=0.0)
    metrics.add("gpurun_queue_oldest_wait_seconds", oldest_s)


def _add_jobs(metrics: Metrics, home: Path, records: Iterable[JobRecord], now_s: float) -> None:
    for state in State:
        if not state.ended:
            metrics.add("gpurun_jobs", 0, state.value)
    store = JobStore(home)
    for record in records:
        state, pool = record.state, record.pool or ""
        if state.holds_gpus:
            metrics.add("gpurun_pool_leased_gpus", sum(len(grant.gpus) for grant in record.granted), pool)
        if state.ended:
            continue
        metrics.add("gpurun_jobs", 1, state.value)
        metrics.add("gpurun_job_info", 1, record.id, record.name, record.owner, pool, state.value)
        if state.holds_gpus:
            _add_gpus(metrics, record, _use_of(store.get(record.id), record.attempt), now_s)


def _use_of(folder: JobFolder, attempt: int) -> GpuUse:
    """Return what is known now: one file that cannot be read hides nothing else."""
    try:
        return read_use(folder, attempt) or GpuUse()
    except StateUnavailable:
        return GpuUse()


def _add_gpus(metrics: Metrics, record: JobRecord, told: GpuUse, now_s: float) -> None:
    known = {(rank.host, rank.gpu): rank for rank in told.ranks}
    for grant in record.granted:
        for index in grant.gpus:
            rank = known.get((grant.host, index))
            place = (str(index), rank.uuid if rank else "", grant.host)
            metrics.put("gpurun_gpu_info", 1, *place, record.id)
            if rank is not None and now_s - told.told_s < STALE_S:
                metrics.put("gpurun_gpu_utilization_ratio", rank.last / 100, *place)


def _add_history(metrics: Metrics, history: Iterable[HistorySource]) -> None:
    for outcome in OUTCOMES:
        metrics.add("gpurun_attempts_total", 0, outcome)
    sums = (
        "total(max(0.0, min(gpu_s, 1e12))), total(max(0.0, min(waited_s, 1e12))), "
        "total(max(0.0, min(gpu_s, 1e12) * (100.0 - use_percent) / 100.0))"
    )
    for source in history:
        ask = source.rows.execute
        for outcome, count in ask("SELECT outcome, count(*) FROM attempts GROUP BY 1"):
            if outcome in OUTCOMES:
                metrics.add("gpurun_attempts_total", count, outcome)
        for cause, count in ask("SELECT cause, count(*) FROM attempts WHERE cause != '' GROUP BY 1"):
            metrics.add("gpurun_failures_total", count, _label(cause))
        for generation, pool, spent_s, waited_s, idle_s in ask(
            f"SELECT generation, pool, {sums} FROM attempts GROUP BY 1, 2"  # noqa: S608 - constants
        ):
            metrics.add("gpurun_gpu_seconds_total", spent_s, _label(generation), _label(pool))
            metrics.add("gpurun_gpu_idle_seconds_total", idle_s, _label(generation), _label(pool))
            metrics.add("gpurun_wait_seconds_total", waited_s, _label(pool))


def _label(value: object) -> str:
    """A column of another user's file may hold anything."""
    return value if isinstance(value, str) else ""


# A file for node_exporter's textfile collector; `gpurun.views.loopback` answers scrapes.


def write_textfile(path: Path, text: str) -> None:
    """Replace a file, whole: node_exporter reads the old one or the new one.

    Raises:
        BadInput: the name does not end in ``.prom``, or the file cannot be written.
    """
    if path.suffix != ".prom":
        raise BadInput(
            "the textfile's name must end in .prom", where=str(path), hint="node_exporter reads only .prom files"
        )
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o644)  # node_exporter runs as another user
                file.write(text)
            draft.replace(path)
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
    except OSError as error:
        raise BadInput(f"the metrics cannot be written: {error.strerror}", where=str(path)) from error
