"""Leases under real processes that race, are killed anywhere, and find their files damaged: a stateful property test.

The machine knows what it asked of whom. After every step it reads the folder as anybody would and checks that no GPU
is in two leases, that none went away unless its holder was asked to let it go, that a lock is held exactly by those who
live, and that a damaged file is still there and stopped every grant. At the end everything is taken back, and the
cluster must fit one gang of all its GPUs: nothing was lost for good.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import actors
import hypothesis.strategies as st
import pytest
from actors import finish_interrupted
from how_many import count
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import Lease
from gpurun.leases.store import AllocatorLock, LeaseStore

HOSTS, GPUS = ("h1", "h2", "h3"), 2
INVENTORY = f"""\
version: 1
defaults: {{user: train, generation: pascal, gpus: {GPUS}, fabric: tcp}}
fabrics:
  tcp: {{kind: tcp, interface: eth0}}
racks:
  r1: {{hosts: {{"h[1-3]": {{}}}}}}
"""
MOST_ACTORS = 4
FAULTS = st.sampled_from([0, 0, 0, 0, 0, *range(1, 9)])
LETS_GO = ("release", "again", "lose")
WORK = st.sampled_from(["run_pass", "run_pass", "adopt", *LETS_GO])
DAMAGE = st.sampled_from([b"", b"{", b"\0" * 300, b'{"job": 1}', b"[" * 5000, b"\xff\xfe{}"])
FOREIGN = "notes of a person.txt"

SLOTS = st.integers(0, MOST_ACTORS - 1)
WHICH = st.integers(0, 59)
KILLED = st.sampled_from([None, None, None, None, None, 0.0, 0.0005, 0.002, 0.005])

Gpus = frozenset[tuple[str, int]]


def pick(things: Sequence[str], which: int) -> str:
    return things[which % len(things)]


def gpus_of(lease: Lease) -> Gpus:
    return frozenset((grant.host, gpu) for grant in lease.grants for gpu in grant.gpus)


class LeaseMachine(RuleBasedStateMachine):
    zygote: actors.Zygote

    @initialize()
    def begin(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="gpurun-machine-"))
        (self.home / "inventory.yaml").write_text(INVENTORY)
        self.jobs, self.leases = JobStore(self.home), LeaseStore(self.home)
        self.slots: dict[int, actors.Actor] = {}
        self.held: dict[actors.Actor, set[str]] = {}
        self.acknowledged: set[str] = set()
        self.damaged: dict[str, bytes] = {}
        self.discarded: set[str] = set()
        self.before: dict[str, Lease] = {}
        self.was_damaged = False
        self.letting_go: set[str] = set()
        self.clock_s = 1.0
        for gpus in (2, 1, 2, 3):
            self._submit(0, gpus, 0)
        self._work(0, "run_pass", 0, 0)

    # --- what people and processes do. How races end is not for hypothesis to know: every draw has a fixed shape.

    @rule(slot=SLOTS, gpus=st.sampled_from([1, 1, 2, 2, 3, 6]), fault=FAULTS)
    def submit(self, slot, gpus, fault) -> None:
        self._submit(slot, gpus, fault)

    @rule(slot=SLOTS, work=WORK, fault=FAULTS, which=WHICH)
    def one_works(self, slot, work, fault, which) -> None:
        self._work(slot, work, fault, which)

    @rule(works=st.tuples(*[st.tuples(WORK, FAULTS, WHICH, KILLED)] * MOST_ACTORS))
    def all_work_at_once(self, works) -> None:
        asked = {}
        for slot, (work, fault, which, _) in enumerate(works):
            actor = self._actor(slot)
            if (what := self._ask(actor, work, fault, which)) is not None:
                asked[actor] = what
        for slot, (_, _, _, after_s) in enumerate(works):
            if after_s is not None:
                time.sleep(after_s)
                self.slots[slot].kill()
        for actor in list(self.held):
            if actor in asked:
                self._settle(actor, asked[actor])
            elif not actor.alive:
                del self.held[actor]

    @rule(slot=SLOTS)
    def one_is_killed(self, slot) -> None:
        actor = self._actor(slot)
        actor.kill()
        del self.held[actor]

    @rule(which=WHICH, content=DAMAGE)
    def a_file_is_damaged(self, which, content) -> None:
        if self.damaged:
            return
        name = pick([*sorted(self.before), FOREIGN], which)
        self.leases.folder.plain.mkdir(exist_ok=True)
        (self.leases.folder.plain / name).write_bytes(content)
        self.damaged[name] = content

    @rule()
    def a_person_discards_what_is_damaged(self) -> None:
        self._discard()

    # --- what must hold

    @invariant()
    def no_gpu_is_in_two_leases_and_none_goes_away(self) -> None:
        if not hasattr(self, "home"):
            return
        found = self._read()
        held = [gpu for lease in found.values() for gpu in gpus_of(lease)]
        assert len(held) == len(set(held)), found
        assert len(held) <= len(HOSTS) * GPUS
        for name, lease in self.before.items():
            kept = frozenset().union(*(gpus_of(other) for other in found.values() if other.job == lease.job))
            let_go = lease.job in self.letting_go or name in self.damaged
            assert let_go or gpus_of(lease) <= kept, f"{name} went away"
        if self.was_damaged and self.damaged:
            assert {lease.job for lease in found.values()} <= {lease.job for lease in self.before.values()}
        self.before, self.was_damaged, self.letting_go = found, bool(self.damaged), set()

    @invariant()
    def who_lives_holds_a_lock_and_nobody_else(self) -> None:
        if not hasattr(self, "home"):
            return
        mine = {f"{name}.json" for names in self.held.values() for name in names}
        for name in self.before:
            assert self.leases.is_alive(name.removesuffix(".json")) == (name in mine), name

    @invariant()
    def what_is_damaged_stays(self) -> None:
        for name, content in getattr(self, "damaged", {}).items():
            assert (self.leases.folder.plain / name).read_bytes() == content

    @invariant()
    def no_acknowledged_job_is_lost(self) -> None:
        if hasattr(self, "home"):
            assert self.acknowledged <= set(self.jobs.ids())
            assert all(self.jobs.get(job).spec() for job in self.acknowledged)

    def teardown(self) -> None:
        """Take everything back: every job ends, and one gang of all GPUs fits."""
        if not hasattr(self, "home"):
            return
        try:
            self._drain()
        finally:
            for actor in self.held:
                actor.kill()
            shutil.rmtree(self.home)

    # --- how

    def _submit(self, slot, gpus, fault) -> None:
        actor = self._actor(slot)
        self.clock_s += 1
        actor.ask("submit", fault, spec_gpus=gpus, now_s=self.clock_s)
        self._settle(actor, "submit")

    def _work(self, slot, work, fault, which) -> None:
        holders = [slot for slot, actor in self.slots.items() if self.held.get(actor)]
        actor = self._actor(holders[slot % len(holders)] if holders and work in LETS_GO else slot)
        if (what := self._ask(actor, work, fault, which)) is not None:
            self._settle(actor, what)

    def _actor(self, slot) -> actors.Actor:
        """Who works there; a dead one is replaced."""
        if self.slots.get(slot) not in self.held:
            self.slots[slot] = self.zygote.actor(self.home)
            self.held[self.slots[slot]] = set()
        return self.slots[slot]

    def _ask(self, actor, work, fault, which) -> str | None:
        """Send a request; what was asked of it, None if it has nothing to do that with."""
        if work in ("run_pass", "adopt"):
            actor.ask(work, fault, **({"now_s": self.clock_s} if work == "run_pass" else {}))
            return work
        if not self.held[actor]:
            return None
        name = pick(sorted(self.held[actor]), which)
        self.letting_go.add(name.partition(".")[0])
        if work == "lose":
            actor.ask(work, fault, name=name, host=pick(self._hosts(name), which))
        else:
            actor.ask("release", fault, name=name, again=work == "again")
        return f"{work} {name}"

    def _hosts(self, name) -> Sequence[str]:
        lease = self.before.get(f"{name}.json")
        return [grant.host for grant in lease.grants] if lease else HOSTS

    def _settle(self, actor, what) -> None:
        """Take the answer, or the death, into the model."""
        answer = actor.reply() if actor.alive else None
        work, _, name = what.partition(" ")
        if answer is None:
            del self.held[actor]
        elif isinstance(answer, dict):
            assert self.was_damaged, answer
            assert work == "run_pass", answer
        elif work == "submit":
            self.acknowledged.update(answer)
        elif work in ("run_pass", "adopt"):
            self.held[actor].update(answer)
        elif answer:
            self.held[actor].remove(name)
            self.held[actor].update(answer if work == "lose" else [])
        if name and f"{name}.json" in self.damaged:  # its own holder knew what it was, and replaced or removed it
            self._forget_damage(f"{name}.json")

    def _forget_damage(self, name: str) -> None:
        path = self.leases.folder.plain / name
        if not path.exists() or path.read_bytes() != self.damaged[name]:
            del self.damaged[name]

    def _read(self) -> dict[str, Lease]:
        """The leases by file. What is damaged must be what the machine damaged, and stop every grant."""
        holdings = self.leases.read_all()
        assert {Path(error.where).name for error in holdings.damaged} == set(self.damaged)
        names = [name for name in self.leases.folder.names() if name[0] != "."] if self.leases.folder.exists() else []
        files = {name: self.leases.read(name.removesuffix(".json")) for name in names if name not in self.damaged}
        assert sorted(map(repr, files.values())) == sorted(map(repr, holdings.leases))
        return files

    def _discard(self) -> None:
        """As `gpurun recover --discard`: only what no living process holds, since a person looked first."""
        for name in list(self.damaged):
            if name.removesuffix(".json") in set().union(*self.held.values()):
                continue
            with AllocatorLock(self.home).held():
                (self.home / "discarded").mkdir(exist_ok=True)
                (self.leases.folder.plain / name).rename(self.home / "discarded" / f"{time.time_ns()}-{name}")
            self.letting_go.add(name.partition(".")[0])
            self.discarded.add(name.partition(".")[0])
            del self.damaged[name]
        if not self.damaged:
            finish_interrupted(self.home)

    def _drain(self) -> None:
        for actor in list(self.held):
            actor.kill()
        self.held = {(last := self.zygote.actor(self.home)): set()}
        self._discard()
        spec = JobSpec(name="all", image="i", gpus=len(HOSTS) * GPUS, command=("true",))
        whole = self.jobs.create(spec, inventory=self.home / "inventory.yaml", now_s=self.clock_s + 1).id
        for _ in range(len(self.jobs.ids()) + 2):
            for work in ("adopt", "run_pass"):
                last.ask(work, **({"now_s": self.clock_s} if work == "run_pass" else {}))
                self._settle(last, work)
            self.no_gpu_is_in_two_leases_and_none_goes_away()
            if any(lease.job == whole for lease in self.before.values()):
                assert len(gpus_of(self.before[f"{whole}.json"])) == len(HOSTS) * GPUS
            for name in sorted(self.held[last]):
                self.letting_go.add(name.partition(".")[0])
                last.ask("release", name=name, again=False)
                self._settle(last, f"release {name}")
            finish_interrupted(self.home)
        assert self._read() == {}
        for job in self.acknowledged | {whole}:
            state = self.jobs.get(job).record().state
            assert state is State.SUCCEEDED or (state is State.FAILED and job in self.discarded)


@pytest.mark.timeout(1800)
def test_leases_survive_processes_that_race_crash_and_damage(monkeypatch):
    zygote = actors.Zygote()
    monkeypatch.setattr(LeaseMachine, "zygote", zygote, raising=False)
    try:
        from hypothesis.stateful import run_state_machine_as_test

        run_state_machine_as_test(
            LeaseMachine,
            settings=settings(
                max_examples=count("histories of leases"),
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.explicit, Phase.generate],  # how processes race cannot be replayed, so nothing is shrunk
            ),
        )
    finally:
        zygote.close()
