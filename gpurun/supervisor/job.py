"""The state that the steps of one attempt share, and what it tells people about transfers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from gpurun.content.images import Engine
from gpurun.content.ship import ShipEvent
from gpurun.errors import OUTLIVED, StateError, StateUnavailable
from gpurun.facts import Hardware
from gpurun.head.spawn import Head
from gpurun.inventory.model import Inventory
from gpurun.jobs.events import EventLog, Sent, write_sent
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.record import CancelRequest, JobRecord, State, unknown_spec
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.launch.container import AUTOTUNE_FILE, HostAccount, container_name
from gpurun.launch.launchers import Launcher, launcher_of
from gpurun.launch.launchers.horovod import reuse
from gpurun.launch.plan import Plan, make_plan
from gpurun.leases.allocate import Asked
from gpurun.leases.draining import DrainWatch
from gpurun.leases.lease import Lease
from gpurun.leases.store import LeaseLock, LeaseStore
from gpurun.node.claim_rules import Claimant
from gpurun.state.clock import HeadClock, head_clock
from gpurun.state.sharing import StateDirectory
from gpurun.supervisor.links import Links, cluster_now, cluster_of, freeze
from gpurun.supervisor.log_copy import LogCopy
from gpurun.supervisor.outputs.copy import HeadCopy
from gpurun.supervisor.ranks import RankReports, Seating
from gpurun.supervisor.verdict.decide import asked_end
from gpurun.supervisor.verdict.ends import GangEnd


def claimant_of(lease: Lease, state: str) -> Claimant:
    """Return the claimant of a lease's GPUs.

    Args:
        state: the id of the lease's state directory.
    """
    return Claimant(lease.job, lease.attempt, state, lease.owner, lease.owner_uid, os.uname().nodename)


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
    def reports(self) -> RankReports:
        """Return what hosts have reported about the ranks."""
        return RankReports(self.seating)

    @cached_property
    def log_copy(self) -> LogCopy:
        """Return the copy of the attempt's log to the head. Does not start it."""
        job, attempt = self.lease.job, self.lease.attempt
        return LogCopy(
            self.links, self.hosts[0], job=job, attempt=attempt, container=container_name(job, attempt),
            path=self.folder.log, clock=time.time, reports=self.reports, limit=self.spec.log_limit,
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

    @property
    def spans_hosts(self) -> bool:
        """Return whether ranks of different hosts communicate, or may do so later."""
        return len(self.hosts) > 1 or self.spec.min_gpus is not None

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
