"""The state that the steps of one attempt share; its claims on hosts, and what it tells people."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from gpurun import facts
from gpurun.content.images import Engine
from gpurun.content.ship import ShipEvent
from gpurun.errors import OUTLIVED, GpurunError, HostFailure, HostNotReady, StateError, StateUnavailable
from gpurun.facts import Hardware
from gpurun.head.spawn import Head
from gpurun.inventory.model import Inventory
from gpurun.jobs.events import EventLog, Sent, write_sent
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import CancelRequest, GpuHolder, JobRecord, State, unknown_spec
from gpurun.jobs.spec import MOST_GPUS, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.launch.container import AUTOTUNE_FILE, HostAccount, container_name, contradictions
from gpurun.launch.launchers import Launcher, launcher_of
from gpurun.launch.launchers.horovod import reuse
from gpurun.launch.plan import Plan, cards, make_plan, owner_on
from gpurun.leases.allocate import Asked
from gpurun.leases.draining import DrainWatch
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.node.claim_rules import Claimant
from gpurun.quantities import plural
from gpurun.remote.agent import RemoteOpFailed
from gpurun.state.clock import HeadClock, head_clock
from gpurun.state.sharing import StateDirectory
from gpurun.supervisor.links import Links, cluster_now, cluster_of, freeze
from gpurun.supervisor.log import Seating
from gpurun.supervisor.log_copy import LogCopy
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.verdict.decide import asked_end
from gpurun.supervisor.verdict.ends import End, GangEnd, failed

# A gang's claims on its hosts. If a host refuses a claim, the gang waits, and no host is blamed.


TIMEOUT_S = 60.0


def claimant_of(lease: Lease, state: str) -> Claimant:
    """Return the claimant of a lease's GPUs.

    Args:
        state: the id of the lease's state directory.
    """
    return Claimant(lease.job, lease.attempt, state, lease.owner, lease.owner_uid, os.uname().nodename)


def claim_of(job: SupervisedJob, host: str) -> dict[str, Any]:
    """Return the arguments for `gpurun.node.job.claims.take_here` on a host."""
    (grant,) = (grant for grant in job.lease.grants if grant.host == host)
    return {"claimant": job.claimant._asdict(), "cards": cards(grant, job.hardware.get(host))}


def claim(job: SupervisedJob, hosts: Iterable[str]) -> Mapping[str, GpurunError]:
    """Claim the gang's GPUs on probed hosts, before gpurun sends anything large there. Idempotent.

    Returns:
        The hosts that failed or refused.
    """
    results = job.links.each(
        lambda agent: agent.call("claims.take", timeout_s=TIMEOUT_S, **claim_of(job, agent.host)), hosts
    )
    report_refusals(job, refusals_in(results.failed))
    return results.failed


def report_refusals(job: SupervisedJob, refused: Mapping[str, tuple[GpuHolder, ...]]) -> None:
    """Write an event for each holder of GPUs that a host refused."""
    for host, holders in refused.items():
        for holder in holders:
            job.events.emit("host", host=host, state="refused", reason=_held(holder))


def refusals_in(failures: Mapping[str, GpurunError]) -> Mapping[str, tuple[GpuHolder, ...]]:
    """Return host → who holds the GPUs there, for failures that are refused claims."""
    found = {host: _holders(host, error) for host, error in failures.items() if _is_refusal(error)}
    return {host: holders for host, holders in found.items() if holders}


def refused_end(refused: Mapping[str, tuple[GpuHolder, ...]]) -> End:
    """Return the end after a refusal: back to the queue immediately, no restart counted, no host at fault."""
    places = [f"{host}: {_held(holder)}" for host, holders in sorted(refused.items()) for holder in holders]
    return End(State.QUEUED, "; ".join(places), 1, refused=refused)


def _held(holder: GpuHolder) -> str:
    gpus = f"{plural(len(holder.gpus), 'GPU')} {', '.join(map(str, holder.gpus))}"
    return f"{holder.words} holds {gpus}: {holder.why}"


def _is_refusal(error: GpurunError) -> bool:
    return isinstance(error, RemoteOpFailed) and error.kind == "claimed"


def _holders(host: str, error: GpurunError) -> tuple[GpuHolder, ...]:
    """Return the holders that a host names; () if its answer is invalid, which counts as the host's failure."""
    assert isinstance(error, RemoteOpFailed)
    try:
        return tuple(holder_of(each) for each in facts.refused(host, error.detail.get("refused")))
    except HostNotReady:
        return ()


def holder_of(found: facts.HeldGpus) -> GpuHolder:
    """Convert a host's report about one holder for a job's record. Leaves out impossible GPU numbers."""
    who = found.claimant
    gpus = tuple(gpu for gpu in found.gpus if gpu < MOST_GPUS)
    return GpuHolder(gpus, who.job, who.attempt, who.user, who.uid, who.head, who.state, found.why)


# Tell people how far a job's image and data sets are on their way to its hosts.


EVERY_S = 1.0
"""The file is written at most so often."""


class SendingTold:
    """What an attempt tells of transfers: an event for each state of each host; the rest goes to `gpurun.jobs.events`.

    `told` is called by one thread at a time.
    """

    def __init__(self, folder: JobFolder, attempt: int, events: EventLog) -> None:
        self._folder, self._attempt, self._events = folder, attempt, events
        self._last: dict[tuple[str, str, str], Sent] = {}
        self._states: set[tuple[str, str, str, str]] = set()
        self._written_s = -EVERY_S

    def told(self, kind: str, event: ShipEvent, data: str = "") -> None:
        """Tell one event of a transfer, of the data set `data` if it is one. A full disk stops no transfer."""
        said = event.as_json()
        key = (kind, data, event.host)
        self._last[key] = Sent(kind=kind, data=data, **said)
        if (state := (*key, event.state)) not in self._states:
            self._states.add(state)
            self._events.emit(kind, **({"data": data} if data else {}), **said)
        if time.monotonic() - self._written_s >= EVERY_S:
            self._written_s = time.monotonic()
            with suppress(StateError, FileNotFoundError):
                write_sent(self._folder, self._attempt, tuple(self._last.values()))


CACHES_TIMEOUT_S = 60.0
"""Longer than a host lets a job wait while the user's caches become smaller."""


class SupervisedJob:
    """One job while its supervisor runs it. Only the process that holds `lock` creates this object."""

    def __init__(self, home: Path, lease: Lease, lock: LeaseLock, *, clock: HeadClock | None = None) -> None:
        self.home = home
        self.lease = lease
        self.lock = lock
        self.clock = clock or head_clock()
        self.store = JobStore(home)
        self.leases = LeaseStore(home)
        self.folder: JobFolder = self.store.get(lease.job)
        self.record: JobRecord = self.folder.record()
        self.spec, self.damage = _spec_of(self.folder, self.record, sum(len(grant.gpus) for grant in lease.grants))
        self.events = EventLog(self.folder.events, clock=time.time)
        self.sending = SendingTold(self.folder, lease.attempt, self.events)
        self.public_keys: dict[str, str] = {}
        self.accounts: dict[str, HostAccount] = {}
        self.hardware: dict[str, Hardware] = {}
        self.image_ids: dict[str, str] = {}  # what each host's engine calls the image
        self.state_id = StateDirectory(home).id()
        self.lost: tuple[Lease, LeaseLock] | None = None
        self.outputs = HeadCopy(
            self.folder, self.spec.outputs_limit, is_elastic=self.spec.min_gpus is not None,
            workdir_limit=self.spec.workdir_limit if self.spec.keeps_beside else None,
        )  # fmt: skip
        self.asked = Asked(home, lease.job)
        self.drains = DrainWatch(home, lambda: self.lease)
        self.gives_back = False  # its GPUs may be another gang's by now: nothing on its hosts is ended any more
        self._recording = threading.Lock()

    @property
    def ran_s(self) -> float | None:
        """Return the attempt's seconds in RUNNING so far; None before."""
        started_s = self.record.started_s
        return None if started_s is None else self.clock.elapsed_s(started_s)

    @property
    def launcher(self) -> Launcher:
        """Return the launcher that starts the job's ranks."""
        return launcher_of(self.spec)

    @cached_property
    def inventory(self) -> Inventory:
        """Return the inventory in which the gang was placed. The gang's hosts are the machines of the grant."""
        inventory, problem = cluster_of(self.folder, self.lease)
        if problem is None:
            freeze(self.folder, inventory, self.lease)
        else:
            self.note(f"the inventory cannot be loaded ({problem.message}); the job continues with its present hosts")
        return inventory

    def load_inventory_again(self) -> None:
        """Use the inventory as its file is now: a gang that grows must not take hosts that people have removed.

        Raises:
            BadInput: it cannot be loaded; the one before stays in use for the gang's own hosts.
        """
        self.inventory = cluster_now(self.lease)

    @cached_property
    def links(self) -> Links:
        """Return the agents on the gang's hosts."""
        return Links(self.inventory, self.hosts)

    @property
    def seating(self) -> Seating:
        """Return which ranks each host may report about."""
        return Seating.of(self.lease.members, self.spec)

    @cached_property
    def log_copy(self) -> LogCopy:
        """Return the copy of the attempt's log to the head. Does not start it."""
        job, attempt = self.lease.job, self.lease.attempt
        return LogCopy(
            self.links, self.hosts[0], job=job, attempt=attempt, container=container_name(job, attempt),
            path=self.folder.log, clock=time.time, seating=self.seating, limit=self.spec.log_limit,
        )  # fmt: skip

    def follow_log(self, hosts: Iterable[str]) -> None:
        """Start to copy the output of the launcher and of the ranks on `hosts` to the head. Idempotent.

        Raises:
            StateError: the log cannot be opened.
        """
        self.log_copy.start(self.note)
        self.log_copy.follow(hosts)

    @property
    def claimant(self) -> Claimant:
        """Return the claimant of the gang's GPUs, for the hosts."""
        return claimant_of(self.lease, self.state_id)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts whose GPUs the gang holds, in rank order, including hosts that are joining or leaving."""
        return tuple(grant.host for grant in self.lease.grants)

    @property
    def members(self) -> tuple[str, ...]:
        """Return the hosts on which its ranks should run, in rank order."""
        return tuple(grant.host for grant in self.lease.members)

    @property
    def plan(self) -> Plan:
        """Return the plan of the attempt, with what the hosts have reported about themselves so far."""
        return self.plan_with(())

    def plan_with(self, hosts: Collection[str]) -> Plan:
        """Return the plan after `hosts`, which are apart, have joined."""
        grants = [grant for grant in self.lease.grants if grant.host in hosts or grant.host in self.members]
        return make_plan(
            claimant=self.claimant, spec=self._tuned(), grants=grants,
            inventory=self.inventory, accounts=self.accounts, ssh_port=self.lease.ssh_port,
            hardware=self.hardware, image_sets=self.image_sets, images=self.image_ids,
            joins=(*self.lease.joins, *hosts),
        )  # fmt: skip

    def _tuned(self) -> JobSpec:
        """Return the spec with the best values of an earlier attempt's autotune."""
        try:
            log = (self.folder.path / AUTOTUNE_FILE).read_text()
        except (OSError, StateError):
            return self.spec
        return replace(self.spec, horovod=reuse(self.spec.horovod, log))

    @cached_property
    def image_sets(self) -> frozenset[str]:
        """Return the names of the variables that the image sets."""
        facts = Engine(self.inventory.docker_host).image(self.spec.image, self.spec.image_id).facts
        return frozenset(entry.partition("=")[0] for entry in facts.get("Env") or ())

    def move(self, state: State, **changes: object) -> State:
        """Change the job's state durably and visibly to `state`."""
        with self._recording:
            self.record = self.folder.move(state, **changes)
        self.told()
        return state

    def amend(self, **changes: object) -> None:
        """Change fields of the job's record; any thread may."""
        with self._recording:
            if "granted" in changes:
                now_s = self.clock()
                changes |= {"gpu_s": self.record.gpu_s_at(now_s), "gpu_s_until_s": now_s}
            self.record = self.folder.amend(self.record, **changes)

    def told(self) -> None:
        """Add an event with the job's state."""
        state, story = self.record.state.value, self.record.story(self.clock())
        self.events.emit("state", state=state, attempt=self.record.attempt, reason=story)

    def reach(self, what: Literal["files", "containers"]) -> None:
        """Record, before the change, how far this attempt changes its hosts."""
        if self.record.reached != what:
            self.amend(reached=what)

    def note(self, text: str, **fields: object) -> None:
        """Add a message to the job's events."""
        self.events.emit("note", text=text, **fields)

    def close(self) -> None:
        """Stop copying the log and cut the connections, if there are any. Processes on the hosts continue."""
        if (log_copy := self.__dict__.get("log_copy")) is not None:
            log_copy.close()
        if (links := self.__dict__.get("links")) is not None:
            links.close()

    def connect(self) -> None:
        """Start an agent on every host of the gang.

        Raises:
            GangEnd: a host cannot be reached, or is another machine than before.
        """
        raise_first(self.links.open(), kind="connection")

    @property
    def spans_hosts(self) -> bool:
        """Return whether ranks of different hosts communicate, or may do so later."""
        return len(self.hosts) > 1 or self.spec.min_gpus is not None

    def ask_accounts(self, hosts: Iterable[str] | None = None) -> None:
        """Let hosts (all if None) create the job's folder and keys and report facts about themselves. Idempotent.

        Raises:
            GangEnd: a host failed, or its report is impossible.
        """
        first = self.hosts[0]

        def ask(host: str) -> Mapping[str, Any]:
            interface = self.inventory.fabric_of(self.inventory.by_name[host]).interface
            reply = self.links.agent(host).call(
                "gang.prepare", job=self.lease.job, attempt=self.lease.attempt, first=host == first,
                interface=interface if self.spans_hosts else "", outputs=self.spec.keeps_outputs,
                beside=self.spec.keeps_beside, **self._caches(host),
            )  # fmt: skip
            return reply.value  # type: ignore[no-any-return]

        results = self.links.each(lambda agent: ask(agent.host), hosts)
        raise_first(results.failed)
        for host, said in results.ok.items():
            self.public_keys[host] = said["public_key"]
            self.accounts[host] = self._account(host, said)
        raise_first(self._untrue())

    def _caches(self, name: str) -> Mapping[str, Any]:
        """Return the argument for a host on which the ranks get their user's caches."""
        host = self.inventory.by_name[name]
        owner = owner_on(host, self.spec, self.claimant)
        if owner is None:
            return {}
        return {
            "caches": {"owner": owner, "most_bytes": (host.cache_quota_mib or 0) << 20}, "timeout_s": CACHES_TIMEOUT_S,
        }  # fmt: skip

    def _untrue(self) -> Mapping[str, GpurunError]:
        """Return the hosts whose reports about themselves would send ranks to the wrong place."""
        mine = {host: account for host, account in self.accounts.items() if host in self.hosts}
        found = contradictions(mine) if self.spans_hosts else {}
        hint = "give each host a hostname and a fabric address of its own; `hostnamectl set-hostname` sets the name"
        return {
            host: HostFailure(why, kind="contradiction", host=host, job=self.lease.job, hint=hint)
            for host, why in found.items()
        }

    def _account(self, host: str, said: Mapping[str, Any]) -> HostAccount:
        described = self.inventory.by_name[host]
        address = described.fabric_address or said["address"]
        if not address and self.spans_hosts:
            fabric = self.inventory.fabric_of(described)
            raise failed(
                HostFailure(
                    f"the host's interface {fabric.interface!r} has no IPv4 address", kind="address", host=host,
                    job=self.lease.job,
                    hint=f"correct the interface of fabric {fabric.name!r}, or give the host a fabric_address",
                )
            )  # fmt: skip
        return HostAccount(
            uid=said["uid"], gid=said["gid"], user=said["user"], folder=said["folder"], hostname=said["hostname"],
            address=address or "127.0.0.1", sshd=said["sshd"], docker_host=said["docker_host"],
            groups=tuple((gid, name) for gid, name in said["groups"]),
            names=tuple((name, at) for name, at in said["names"]),
        )  # fmt: skip

    def request(self) -> CancelRequest | None:
        """Return the request about this job. If another user asks for a preemption, runs a pass to check whether it is
        due. While the state directory cannot be used, there is none: callers ask again soon.
        """
        with suppress(StateUnavailable):
            self._look_after_files()
        if self._must_look(self.folder.cancel_request()):
            with suppress(*OUTLIVED):  # such as a damaged lease: not this job's fault, and tried again later
                Head(self.home).run_pass(now_s=self.clock(), patience_s=None)
        return self.folder.cancel_request()

    def _look_after_files(self) -> None:
        """Set damaged requests aside, and restore the lease if somebody removed it."""
        if damage := self.folder.mend_request():
            self.note(damage)
        if self.leases.restore(self.lease.job):
            self.note("somebody removed the job's lease, which reserves its GPUs; gpurun restored the lease")

    def _must_look(self, request: CancelRequest | None) -> bool:
        """Return whether a pass must decide if the gang has to stop, for another gang or for a drain."""
        if request is not None and not request.drain:
            return False
        is_drained = self.drains.is_due(self.hosts, self.clock(), asked=request is not None)
        return is_drained or (request is None and self.asked.is_due())

    def check_requests(self, *, ladder: bool) -> None:
        """Stop if there is a request.

        Raises:
            GangEnd: the job is cancelled or preempted.
        """
        request = self.request()
        if request is not None:
            raise GangEnd(asked_end(request, ladder=ladder))


def _spec_of(folder: JobFolder, record: JobRecord, gpus: int) -> tuple[JobSpec, StateError | None]:
    """Return the spec of the attempt: the job's, or its rehearsal's.

    For a damaged spec, returns a substitute that is enough to release the GPUs, and the damage.
    """
    try:
        spec = folder.spec()
        return (spec.rehearsal if record.rehearsal else spec).sized(gpus), None
    except StateError as error:
        return unknown_spec(record), error


def raise_first(failures: Mapping[str, GpurunError], *, kind: str = "") -> None:
    """End the attempt if there is a failure: the first by host name, with the number of others. A failure of the job
    comes before failures of hosts.

    A refused claim is not a failure. The gang then goes back to the queue, even if other hosts failed: the next attempt
    will find such hosts.

    Args:
        kind: for failures of hosts that have no kind.

    Raises:
        GangEnd: names the host.
    """
    if not failures:
        return
    if refused := refusals_in(failures):
        raise GangEnd(refused_end(refused))
    by_host = {host: error for host, error in failures.items() if isinstance(error, HostFailure)}
    for host_error in by_host.values():
        host_error.kind = host_error.kind or kind
    host = min(failures.keys() - by_host.keys() or failures)
    error = failures[host]
    error.host = error.host or host
    others = ", ".join(sorted(failures.keys() - {host})[:3])
    more = f" ({len(failures) - 1} more failed: {others})" if others else ""
    end = failed(error, more=more).end
    raise GangEnd(replace(end, suspects=tuple(sorted(failures)), by_host=by_host) if host in by_host else end)
