"""A running elastic gang: failed hosts leave it, others join it, and Horovod's driver gets the new list of hosts.

The lease says which hosts are members (`gpurun.leases.allocate`). The launcher's host has the list that the driver's
discovery script prints. Only the watch's main loop removes hosts. One thread updates the list, one fences hosts that
left, one adds new hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from gpurun import faults
from gpurun.errors import OUTLIVED, GpurunError, StateError, words_of
from gpurun.head.looks import HostLooks
from gpurun.head.spawn import Head
from gpurun.jobs.record import FirstFailure
from gpurun.launch import jobssh
from gpurun.leases.allocate import Allocator, Held
from gpurun.leases.lease import Lease, remember
from gpurun.quantities import duration
from gpurun.state import durable
from gpurun.supervisor import start
from gpurun.supervisor.hosts import ask_accounts, claim, raise_first
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.links import freeze
from gpurun.supervisor.outputs.listing import Unbrought
from gpurun.supervisor.outputs.outputs import collect_leaving
from gpurun.supervisor.start import (
    KNOWN_HOSTS_FILE,
    SSH_CONFIG_FILE,
    bring,
    create_container,
    examine,
    go,
    known_hosts_of,
)
from gpurun.supervisor.stop import cordon_lost, cordon_suspect, end_output, epilog_failures, fence, found_again
from gpurun.supervisor.verdict.ends import GangEnd

TEND_S = 0.5
FENCE_AGAIN_FIRST_S = 1.0
FENCE_AGAIN_MOST_S = 60.0
GROW_FIRST_S = 5.0
"""After the gang has changed; then longer each time, as long as nothing is free, or what is free is of no use."""
NOTHING_FREE_MOST_S = 30.0
OF_NO_USE_MOST_S = 300.0
LEAVE_LEAST_S = 5.0
"""The ranks of a host that is drained have at least this long to leave: the driver reads its list once a second."""


class Members:
    """The hosts of an elastic gang. Does nothing for other gangs."""

    def __init__(self, job: SupervisedJob, stop: threading.Event, on_join: Callable[[Sequence[str]], None]) -> None:
        self._job = job
        self._stop = stop
        self._on_join = on_join
        self._addresses = _started(job).addresses
        self._lock = threading.Lock()
        self._joining: set[str] = set()
        self._listed: object = None  # the lease whose members the driver's list has
        self._released: dict[str, float] = {}  # host → until when its ranks may leave by themselves
        self._fence_again_s = FENCE_AGAIN_FIRST_S
        self._fence_next = 0.0
        self._told: set[str] = set()  # what was said of outputs
        self._grow_wait_s = GROW_FIRST_S
        self._grow_next = time.monotonic() + GROW_FIRST_S

    def threads(self) -> list[threading.Thread]:
        """Return the threads that work besides the main loop, not started; none for a gang that is not elastic."""
        if self._job.spec.min_gpus is None:
            return []
        return [
            threading.Thread(target=self._repeat, args=(self._tend,), name="members", daemon=True),
            threading.Thread(target=self._repeat, args=(self._fence_apart,), name="leaving", daemon=True),
            threading.Thread(target=self._grow, name="growth", daemon=True),
        ]

    def release(self, hosts: Collection[str]) -> None:
        """Continue without drained hosts, which are not to blame.

        Horovod's driver learns it from the list, and the ranks at their next commit. gpurun cuts connections only after
        the grace period. If it cut them immediately, ranks could meet again in the old gang before the driver has read
        the list, and wait for the ranks that are gone.
        """
        until_s = time.monotonic() + max(self._job.spec.grace_s, LEAVE_LEAST_S)
        self._released.update(dict.fromkeys(hosts, until_s))  # before they are apart, or they would be fenced at once
        self._change(Allocator.put_apart, hosts)
        for host in hosts:
            self._job.events.emit("host", host=host, state="left the gang", reason="the host is drained")
        self._fence_next, self._fence_again_s = 0.0, FENCE_AGAIN_FIRST_S
        self._grow_after(GROW_FIRST_S)
        self._say_size()

    def lose(self, failures: Mapping[str, FirstFailure]) -> None:
        """Continue without failed hosts."""
        self._change(Allocator.put_apart, failures, avoid=failures, cut=True)
        for host, failure in failures.items():
            cordon_suspect(self._job, failure)
            self._job.events.emit(
                "host", host=host, state="left the gang", reason=failure.reason, evidence=failure.evidence
            )
        self._fence_next, self._fence_again_s = 0.0, FENCE_AGAIN_FIRST_S
        self._grow_after(GROW_FIRST_S)
        self._say_size()

    def _change(
        self, step: Callable[[Allocator, Held, Collection[str]], Held], hosts: Collection[str], *,
        avoid: Collection[str] = (),
        cut: bool = False,
    ) -> None:  # fmt: skip
        job = self._job
        with self._lock:
            if cut:
                job.amend(uncut=tuple(host for host in job.members if host not in hosts))
            job.lease, job.lock = step(Allocator(job.home), (job.lease, job.lock), tuple(hosts))
            job.amend(granted=job.lease.members, avoid=job.record.avoiding(avoid))

    def _say_size(self) -> None:
        gpus = sum(len(grant.gpus) for grant in self._job.lease.members)
        self._job.note(f"the job has {gpus} of {self._job.spec.gpus} GPUs, on {', '.join(self._job.members)}")

    def _repeat(self, tend: Callable[[], None]) -> None:
        told = ""
        while not self._stop.wait(TEND_S):
            try:
                tend()
                told = ""
            except (GangEnd, *OUTLIVED) as error:  # it is tried again: said once
                if (why := words_of(error)) != told:
                    self._job.note(f"gpurun could not update the job's hosts and retries: {why}")
                told = why

    def _tend(self) -> None:
        """Update the driver's list, and make sure that the ranks follow it."""
        self._tell_driver()
        self._let_leave()
        self._cut_connections()

    def _tell_driver(self) -> None:
        """Write the list of hosts, after the ``ssh`` configuration of the hosts that have joined."""
        job, lease = self._job, self._job.lease
        if self._listed is lease or not job.links.is_open(job.hosts[0]):
            return
        agent = job.links.agent(job.hosts[0])
        if any(host not in job.accounts for host in job.members):
            ask_accounts(job, job.members)
        texts = {jobssh.HOSTS_FILE: jobssh.hosts_text(lease.members, lease.joins)}
        if lease.joins:
            plan = job.plan
            texts = {
                SSH_CONFIG_FILE: plan.first.files[SSH_CONFIG_FILE][0],
                KNOWN_HOSTS_FILE: known_hosts_of(job, plan),
                **texts,
            }
        for name, text in texts.items():
            agent.call("gang.put", job=lease.job, attempt=lease.attempt, name=name, mode=0o644, payload=text.encode())
        self._listed = lease

    def _let_leave(self) -> None:
        """Record released hosts whose ranks have all ended, and cut off ranks that stay too long."""
        job, now_s = self._job, time.monotonic()
        if not self._released:
            return
        counted = job.links.each(
            lambda agent: agent.call("ranks.count", job=job.lease.job).value, sorted(self._released)
        )
        for host, until_s in list(self._released.items()):
            if now_s >= until_s or not counted.ok.get(host, 0):
                del self._released[host]
                if counted.ok.get(host, 0):
                    job.amend(uncut=job.members)

    def _cut_connections(self) -> None:
        """Cut the ranks' connections, once on each host, so that all ranks look for the new gang at the same time.

        The record lists the hosts that remain to be done, for a supervisor that takes over.
        """
        job = self._job
        uncut = [host for host in job.record.uncut if host in job.members]
        if not uncut:
            return
        addresses = sorted({*self._addresses, *(account.address for account in job.accounts.values())})
        done = job.links.each(
            lambda agent: agent.call("ranks.cut", job=job.lease.job, addresses=addresses, timeout_s=10.0).value, uncut
        )
        with self._lock:
            job.amend(uncut=tuple(host for host in job.record.uncut if host not in done.ok))
        if refused := sorted(host for host, said in done.ok.items() if said["refused"]):
            wait = duration(job.spec.horovod.gloo_timeout_s or jobssh.GLOO_TIMEOUT_S)
            kernel = "the kernel there does not let gpurun close their connections"
            job.note(f"ranks on {', '.join(refused)} may wait {wait} for lost ranks: {kernel}")

    def _fence_apart(self) -> None:
        """Fence hosts that have left, then free their GPUs.

        Copies the ranks' output and the outputs first. That may take long, so no other host waits for it.
        """
        job = self._job
        with self._lock:
            lease, leaving = job.lease, sorted(set(job.lease.apart) - self._joining - self._released.keys())
        if not leaving or time.monotonic() < self._fence_next:
            return
        is_first = self._fence_again_s == FENCE_AGAIN_FIRST_S
        try:
            unproven = self._fence_hosts(lease, leaving)
        finally:
            self._fence_next = time.monotonic() + self._fence_again_s
            self._fence_again_s = min(2 * self._fence_again_s, FENCE_AGAIN_MOST_S)
        if unproven and is_first:
            cordon_lost(job, unproven)

    def _fence_hosts(self, lease: Lease, leaving: Sequence[str]) -> Mapping[str, GpurunError]:
        """Fence leaving hosts and release those that succeed; return the others, with the reasons.

        A host whose copy of outputs was interrupted is not fenced and not to blame: gpurun tries again.
        """
        job = self._job
        job.links.add(leaving, job.inventory)
        unproven: dict[str, GpurunError] = dict(job.links.open(leaving, timeout_s=5.0))
        answering = [host for host in leaving if host not in unproven]
        end_output(job, answering)
        unbrought = collect_leaving(job, answering, cancelled=self._stop.is_set)
        if self._stop.is_set():
            return {}  # STOPPING does it all
        self._say_unbrought(unbrought)
        durable.sync_file(job.folder.log)
        waiting = {each.host for each in unbrought if each.may_come}
        asked = [host for host in answering if host not in waiting]
        unproven.update(fence(job.links, lease, asked, state=job.state_id, said=epilog_failures(job.events)))
        fenced = [host for host in asked if host not in unproven]
        if fenced:
            self._change(Allocator.let_go, fenced)
            found_again(job.home, lease, fenced)
            job.log_copy.forget(fenced)
            job.links.drop(fenced)
            for host in fenced:
                job.hardware.pop(host, None)
                job.events.emit("host", host=host, state="fenced", reason="the job left nothing on the host")
            with suppress(GpurunError):  # for example a damaged lease: the next pass will report it
                Head(job.home).run_pass(now_s=job.clock(), patience_s=None)
        return unproven

    def _say_unbrought(self, unbrought: Sequence[Unbrought]) -> None:
        """Report once which outputs of leaving hosts the head does not have."""
        for each in unbrought:
            brings = f"`gpurun outputs {self._job.lease.job}` copies the missing outputs later"
            then = "the host's GPUs stay leased while gpurun retries the copy" if each.may_come else brings
            said = f"{each.host} leaves the job, but has outputs that the head does not have: {each.words}; {then}"
            if said not in self._told:
                self._told.add(said)
                self._job.note(said)

    def _grow(self) -> None:
        """Take free GPUs that no job waits for, until the gang has all that it wants."""
        while not self._stop.wait(TEND_S):
            if time.monotonic() < self._grow_next:
                continue
            try:
                grown = self._take_and_bring_in()
                self._grow_after(GROW_FIRST_S if grown else min(2 * self._grow_wait_s, NOTHING_FREE_MOST_S))
            except (GangEnd, *OUTLIVED) as error:
                self._job.note(f"the job cannot get more GPUs yet: {words_of(error)}")
                self._grow_after(min(2 * self._grow_wait_s, OF_NO_USE_MOST_S))

    def _grow_after(self, wait_s: float) -> None:
        self._grow_wait_s, self._grow_next = wait_s, time.monotonic() + wait_s

    def _take_and_bring_in(self) -> bool:
        """Grow if the gang has fewer GPUs than it wants and some are free; return whether it grew.

        Raises:
            GangEnd, GpurunError: hosts could not join; the next try begins with others.
        """
        job = self._job
        if sum(len(grant.gpus) for grant in job.lease.grants) >= job.spec.gpus or job.request() is not None:
            return False
        job.load_inventory_again()
        with self._lock:
            held, hosts = Allocator(job.home).grow((job.lease, job.lock), job.inventory, now_s=job.clock())
            job.lease, job.lock = held
            self._joining.update(hosts)
        if not hosts:
            HostLooks(job.home).look_while_growing(job.inventory)
            return False
        try:
            self._bring_in(hosts)
        except GangEnd as ended:
            refused = ended.end.refused
            self._change(Allocator.put_apart, hosts, avoid=() if refused or self._stop.is_set() else hosts)
            job.amend(refusals=remember(job.record.refusals, refused, now_s=job.clock()))
            if ended.end.by_host and not self._stop.is_set():  # one that is out is offered to nobody
                start.check_hosts(job, sorted(filter(None, ended.end.by_host)))
            raise
        except OUTLIVED:
            self._change(Allocator.put_apart, hosts, avoid=() if self._stop.is_set() else hosts)
            raise
        finally:  # who is still apart now is fenced
            self._joining.difference_update(hosts)
            self._fence_next, self._fence_again_s = 0.0, FENCE_AGAIN_FIRST_S
        return True

    def give_up_joining(self) -> None:
        """Stop waiting for hosts that are joining."""
        self._job.links.cut(self._joining.copy(), "the job has ended")

    def _bring_in(self, hosts: Sequence[str]) -> None:
        """Prepare hosts like the first hosts, and make them members.

        Raises:
            GangEnd, GpurunError: one of them failed; all stay apart.
        """
        job = self._job
        for host in hosts:
            job.events.emit("host", host=host, state="joining", reason="free, and no other job wants the host")
        job.links.add(hosts, job.inventory)
        freeze(job.folder, job.inventory, job.lease)
        raise_first(job.links.open(hosts), kind="connection")
        ask_accounts(job, (*job.members, *hosts))
        examine(job, hosts)
        raise_first(claim(job, hosts))
        bring(job, hosts, cancelled=lambda: self._stop.is_set() or job.request() is not None)
        plan = job.plan_with(hosts)
        raise_first(job.links.each(lambda agent: create_container(job, agent, plan), hosts).failed)
        raise_first(go(job, plan, hosts).failed)
        durable.write_record(job.folder.path / "plan.json", plan)
        faults.point()
        self._change(Allocator.take_in, hosts)
        self._on_join(hosts)
        for host in hosts:
            job.events.emit("host", host=host, state="joined the gang")
        self._say_size()


@dataclass(frozen=True)
class _StartedHost:
    run: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Started:
    """The parts of ``plan.json`` that a later supervisor cannot learn otherwise.

    For example, it cannot ask a host that is gone for its address.
    """

    hosts: tuple[_StartedHost, ...] = ()

    @property
    def addresses(self) -> frozenset[str]:
        """Return the addresses that ranks of different hosts use."""
        flags = [pair for host in self.hosts for pair in pairwise(host.run)]
        return frozenset(word.partition(":")[2] for flag, word in flags if flag == "--add-host")


def _started(job: SupervisedJob) -> _Started:
    """Return what is known of the attempt's start."""
    try:
        return durable.read_record(job.folder.path / "plan.json", _Started)
    except (FileNotFoundError, StateError):
        return _Started()
