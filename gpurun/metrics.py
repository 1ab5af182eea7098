"""The cluster's state and history for Prometheus."""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

from gpurun import __version__
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, GpurunError, StateError, StateUnavailable
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


@dataclass
class MetricFamily:
    """One metric with all its samples.

    Attributes:
        name: with the unit, and ``_total`` for a counter.
        samples: label values, in the order of `labels` → value.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    samples: dict[tuple[str, ...], float] = field(default_factory=dict)

    def add(self, value: float, *labels: str) -> None:
        """Add to the sample with these label values."""
        assert len(labels) == len(self.labels)
        self.samples[labels] = self.samples.get(labels, 0.0) + value


def exposition(families: Iterable[MetricFamily]) -> str:
    """The whole text. A family without samples is left out."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines += [f"# HELP {family.name} {_help(family.help)}", f"# TYPE {family.name} {family.kind}"]
            for values, value in sorted(family.samples.items()):
                lines.append(f"{family.name}{_labels(dict(zip(family.labels, values, strict=True)))} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_value(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _value(text: str) -> str:
    """A label's value: what could steer a terminal made visible, then what the format escapes."""
    return printable(text[:MOST_LABEL_CHARS]).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


# Metrics for Prometheus: hosts, GPUs, the queue and jobs now; totals of attempts, GPU time and failures.


HOST_STATES = ("ok", "cordoned", "draining", "drained", "lost", "out", "unknown")
GPU_STATES = ("leased", "free", "unavailable", "unknown")
STALE_S = 120.0
"""A GPU whose host has said nothing for this long has no use."""
_GPU = ("gpu", "UUID", "host", "job_id")


def measure_all(cluster: Cluster, *, now_s: float, wall_s: float | None = None) -> list[MetricFamily]:
    """Everything.

    Args:
        now_s: the head's clock, seconds since the epoch.
        wall_s: the wall clock, which looks at hosts are stamped with; None = as the head's clock.

    Raises:
        StateError: the cordons cannot be read.
    """
    problems: list[GpurunError] = []
    view = look(cluster.home, now_s=now_s, on_problem=problems.append, despite_damage=True)
    known = {user_name(uid): Machines(cluster.home).read(uid) for uid in Machines(cluster.home).users()}
    looks = {user: (machines, outs_of(machines)) for user, machines in known.items()}
    records = [job.record for job in view.jobs.values()]
    waiting = [record for record in records if record.state is State.QUEUED]
    found = [
        *_hosts(cluster.rows(view), looks, are_known=not view.damaged),
        *_looks(cluster.inventory, looks, now_s if wall_s is None else wall_s),
        *_pools(records),
        *_queue(waiting, now_s),
        *_jobs(cluster.home, records, now_s),
    ]
    history_problems: list[StateError] = []
    with JobHistory(cluster.home).sources(history_problems.append) as history:
        found += _history(history)
    build = MetricFamily("gpurun_build_info", "gauge", "Version of gpurun; the value is 1.", ("version",))
    build.add(1, __version__)
    damage = MetricFamily("gpurun_problems", "gauge", "Files of the state directory that cannot be read.")
    damage.add(len({str(problem) for problem in [*problems, *history_problems]}))
    return [build, *found, damage]


Looks = Mapping[str, tuple[Mapping[str, Machine], Mapping[str, Out]]]
"""User → what the user knows of machines, and which of them are out."""


def _hosts(rows: Sequence[HostRow], looks: Looks, *, are_known: bool) -> Iterable[MetricFamily]:
    hosts = MetricFamily("gpurun_hosts", "gauge", "Hosts of the inventory by state.", ("state",))
    gpus = MetricFamily(
        "gpurun_gpus", "gauge",
        "GPUs of the inventory. Unavailable: not leased, on a host that gets no new jobs. Unknown: a lease is damaged.",
        ("generation", "state"),
    )  # fmt: skip
    for state in HOST_STATES:
        hosts.add(0, state)
    for row in rows:
        state = "out" if row.state == "ok" and _is_out_for_all(row.host, looks) else row.state
        hosts.add(1, state)
        if row.host.gpus:
            for gpu_state in GPU_STATES:
                gpus.add(0, row.host.generation, gpu_state)
            held = row.held if are_known else row.host.gpus
            gpus.add(held, row.host.generation, "leased" if are_known else "unknown")
            gpus.add(row.host.gpus - held, row.host.generation, "free" if state == "ok" else "unavailable")
    return hosts, gpus


def _is_out_for_all(host: Host, looks: Looks) -> bool:
    """Return whether everybody who has looked at a host found it broken; the user who measures may have looked at none.

    A host that only some users cannot use is out for them alone, for example because a key of theirs is missing.
    """
    found = [host.machine in outs for machines, outs in looks.values() if host.machine in machines]
    return bool(found) and all(found)


def _looks(inventory: Inventory, looks: Looks, wall_s: float) -> Iterable[MetricFamily]:
    """What each user's looks at hosts found."""
    out = MetricFamily(
        "gpurun_host_out", "gauge", "A host that a check of the user found broken; the value is 1.",
        ("host", "user", "check"),
    )  # fmt: skip
    age = MetricFamily(
        "gpurun_host_look_age_seconds", "gauge", "Time since the user's processes last looked at the host.",
        ("host", "user"),
    )  # fmt: skip
    for user, (machines, outs) in looks.items():
        for host in inventory.hosts:
            if (found := outs.get(host.machine)) is not None:
                out.add(1, host.name, user, found.check)
            if (seen := machines.get(host.machine)) is not None:
                age.add(max(0.0, wall_s - seen.seen_s), host.name, user)
    return out, age


def _pools(records: Iterable[JobRecord]) -> Iterable[MetricFamily]:
    leased = MetricFamily("gpurun_pool_leased_gpus", "gauge", "GPUs that jobs of a pool hold.", ("pool",))
    for record in records:
        if record.state.holds_gpus:
            leased.add(sum(len(grant.gpus) for grant in record.granted), record.pool or "")
    return (leased,)


def _queue(waiting: Sequence[JobRecord], now_s: float) -> Iterable[MetricFamily]:
    jobs = MetricFamily("gpurun_queue_jobs", "gauge", "Jobs that wait for GPUs, by pool.", ("pool",))
    gpus = MetricFamily("gpurun_queue_gpus", "gauge", "GPUs that waiting jobs ask for, by pool.", ("pool",))
    age = MetricFamily("gpurun_queue_oldest_wait_seconds", "gauge", "How long the oldest waiting job has waited.")
    for record in waiting:
        jobs.add(1, record.pool or "")
        gpus.add(record.gpus, record.pool or "")
    if not waiting:
        jobs.add(0, "")
        gpus.add(0, "")
    age.add(max((max(0.0, now_s - record.queued_s) for record in waiting), default=0.0))
    return jobs, gpus, age


def _jobs(home: Path, records: Iterable[JobRecord], now_s: float) -> Iterable[MetricFamily]:
    jobs = MetricFamily("gpurun_jobs", "gauge", "Jobs that have not ended, by state.", ("state",))
    info = MetricFamily(
        "gpurun_job_info", "gauge", "A job that has not ended; the value is 1.",
        ("job_id", "name", "user", "pool", "state"),
    )  # fmt: skip
    gpu = MetricFamily(
        "gpurun_gpu_info", "gauge", "Which job holds a GPU; the value is 1. UUID is the same as in dcgm-exporter.", _GPU
    )
    use = MetricFamily(
        "gpurun_gpu_utilization_ratio", "gauge", "Share of the last half minute in which a kernel ran on the GPU.",
        ("gpu", "UUID", "host"),
    )  # fmt: skip
    for state in State:
        if not state.ended:
            jobs.add(0, state.value)
    store = JobStore(home)
    for record in records:
        if record.state.ended:
            continue
        jobs.add(1, record.state.value)
        info.add(1, record.id, record.name, record.owner, record.pool or "", record.state.value)
        if record.state.holds_gpus:
            _gpus_of(record, _use_of(store.get(record.id), record.attempt), now_s, gpu, use)
    return jobs, info, gpu, use


def _use_of(folder: JobFolder, attempt: int) -> GpuUse:
    """Return what is known now: one file that cannot be read hides nothing else."""
    try:
        return read_use(folder, attempt) or GpuUse()
    except StateUnavailable:
        return GpuUse()


def _gpus_of(record: JobRecord, told: GpuUse, now_s: float, gpu: MetricFamily, use: MetricFamily) -> None:
    known = {(rank.host, rank.gpu): rank for rank in told.ranks}
    for grant in record.granted:
        for index in grant.gpus:
            rank = known.get((grant.host, index))
            place = (str(index), rank.uuid if rank else "", grant.host)
            gpu.samples[(*place, record.id)] = 1.0
            if rank is not None and now_s - told.told_s < STALE_S:
                use.samples[place] = rank.last / 100


def _history(history: Iterable[HistorySource]) -> Iterable[MetricFamily]:
    ended = MetricFamily(
        "gpurun_attempts_total", "counter", "Attempts of jobs that have ended, by outcome.", ("outcome",)
    )
    gpu_s = MetricFamily(
        "gpurun_gpu_seconds_total", "counter", "GPU time of attempts that have ended.", ("generation", "pool")
    )
    idle_s = MetricFamily(
        "gpurun_gpu_idle_seconds_total",
        "counter",
        "GPU time of ended attempts in which no kernel ran.",
        ("generation", "pool"),
    )
    wait_s = MetricFamily(
        "gpurun_wait_seconds_total", "counter", "Time that ended attempts waited for GPUs.", ("pool",)
    )
    failed = MetricFamily("gpurun_failures_total", "counter", "Attempts with a first failure, by its kind.", ("cause",))
    for outcome in OUTCOMES:
        ended.add(0, outcome)
    for source in history:
        for outcome, count in source.rows.execute("SELECT outcome, count(*) FROM attempts GROUP BY 1"):
            if outcome in OUTCOMES:
                ended.add(count, outcome)
        for cause, count in source.rows.execute("SELECT cause, count(*) FROM attempts WHERE cause != '' GROUP BY 1"):
            failed.add(count, _label(cause))
        sums = (
            "total(max(0.0, min(gpu_s, 1e12))), total(max(0.0, min(waited_s, 1e12))), "
            "total(max(0.0, min(gpu_s, 1e12) * (100.0 - use_percent) / 100.0))"
        )
        for generation, pool, spent, waited, idle in source.rows.execute(
            f"SELECT generation, pool, {sums} FROM attempts GROUP BY 1, 2"  # noqa: S608 - constants
        ):
            gpu_s.add(spent, _label(generation), _label(pool))
            idle_s.add(idle, _label(generation), _label(pool))
            wait_s.add(waited, _label(pool))
    return ended, gpu_s, idle_s, wait_s, failed


def _label(value: object) -> str:
    """A column of another user's file may hold anything."""
    return value if isinstance(value, str) else ""


# Gives metrics to Prometheus: a file for node_exporter's textfile collector, or an HTTP server.


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH_S = 5.0
"""Scrapes within this time get the same text: several of them cost no more than one."""
CLIENT_S = 10.0


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


class Scraped:
    """The text for scrapes, made again when it is old. One thread makes it; the others wait for that."""

    def __init__(self, make: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock, self._lock = make, clock, threading.Lock()
        self._text, self._made_s = "", -FRESH_S

    def text(self) -> str:
        """The metrics. Raises GpurunError."""
        with self._lock:
            if self._clock() - self._made_s >= FRESH_S:
                self._text = self._make()
                self._made_s = self._clock()
            return self._text


def address_of(text: str) -> tuple[str, int]:
    """``9836``, ``:9836`` or ``HOST:9836``; loopback unless a host is named. Raises BadInput."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise BadInput(f"--serve: {text!r} is not an address", hint="give a port, or HOST:PORT such as 10.0.0.1:9836")
    return host.strip("[]") or "127.0.0.1", int(port)


def server(address: tuple[str, int], scraped: Scraped) -> ThreadingHTTPServer:
    """Return a server that answers only ``GET /metrics``.

    Raises:
        BadInput: gpurun cannot listen on this address.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_S
        server_version, sys_version = "gpurun", ""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self._answer(404, "gpurun: the metrics are at /metrics\n")
                return
            try:
                self._answer(200, scraped.text())
            except GpurunError as error:
                self._answer(500, f"gpurun: {error.message}\n")

        def _answer(self, code: int, text: str) -> None:
            data = text.encode("utf-8", "replace")
            self.send_response(code)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Scrapes are not worth a line."""

    class MetricsServer(ThreadingHTTPServer):
        address_family = 10 if ":" in address[0] else 2  # AF_INET6, AF_INET

        def handle_error(self, *_: object) -> None:
            """A client that went away is not worth a traceback."""

    try:
        return MetricsServer(address, Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            f"cannot listen at {address[0]}:{address[1]}: {why}", hint="choose another address or port"
        ) from error
