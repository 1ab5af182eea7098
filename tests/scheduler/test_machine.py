"""A cluster that lives: random submissions, ends, cordons and passes, and what must hold whatever happens."""

from collections import Counter
from dataclasses import replace

from how_many import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpurun.inventory.model import Host, Inventory, Pool, Rack
from gpurun.jobs.spec import Constraints, Wants
from gpurun.scheduler.model import DEFAULT, Gang, Reason, Running, Snapshot
from gpurun.scheduler.passes import schedule
from gpurun.scheduler.pools import Book

POOLS = (Pool("a", 6, 12), Pool("b", 4), Pool("b1", 2, parent="b"), Pool("b2", 2, 6, parent="b"))
MIN_RUN_S = 50.0
POLICY = replace(DEFAULT, min_run_s=MIN_RUN_S, patience_s=200.0)


def inventory(pools):
    hosts = tuple(Host(f"h{n}", f"r{n // 2}", "pascal", 4, "tcp") for n in range(5))
    racks = tuple(Rack(f"r{n}", tuple(h.name for h in hosts if h.rack == f"r{n}")) for n in range(3))
    return Inventory(hosts, racks, {}, pools)


class Cluster(RuleBasedStateMachine):
    @initialize(pools=st.booleans())
    def build(self, pools):
        self.inventory = inventory(POOLS if pools else ())
        self.names = [pool.name for pool in self.inventory.pools]
        self.now, self.made = 0.0, 0
        self.queue, self.running, self.unusable = {}, {}, {}
        self.takers, self.preempted = {}, Counter()  # taker → victims; how often each gang was stopped

    @rule(
        gpus=st.sampled_from([1, 1, 2, 3, 4, 6, 8, 20]),
        pool=st.integers(0, 4),
        preemptible=st.booleans(),
        priority=st.integers(0, 2),
        limit=st.sampled_from([None, 10.0, 100.0, 500.0]),
        asked=st.sampled_from([Constraints(), Constraints(locality="rack"), Constraints(gpus_per_host=2)]),
    )
    def submit(self, gpus, pool, preemptible, priority, limit, asked):
        self.made += 1
        name = self.names[pool] if pool < len(self.names) else None
        wants = Wants(
            constraints=asked, pool=name, preemptible=preemptible, priority=priority, time_limit_s=limit
        )  # fmt: skip
        gang = Gang(f"g{self.made:03d}", gpus, self.now, wants)
        self.queue[gang.id] = gang

    @rule(seconds=st.sampled_from([1.0, 20.0, 60.0, 300.0]))
    def wait(self, seconds):
        self.now += seconds
        for run in list(self.running.values()):
            if run.free_s(self.now) <= self.now:
                self.end(run)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def one_ends(self, data):
        self.end(self.running[data.draw(st.sampled_from(sorted(self.running)))])

    @rule(host=st.integers(0, 4))
    def cordon_or_not(self, host):
        if self.unusable.pop(f"h{host}", None) is None:
            self.unusable[f"h{host}"] = "cordoned"

    def end(self, run):
        del self.running[run.gang.id]
        if run.stopping:
            self.queue[run.gang.id] = run.gang.but(requeued=True, kept=None)

    @rule()
    def run_a_pass(self):
        before = Snapshot(
            self.inventory, tuple(self.running.values()), tuple(self.queue.values()), self.unusable, now_s=self.now
        )
        decisions = schedule(before, POLICY)
        backwards = replace(before, running=before.running[::-1], queue=before.queue[::-1])
        assert schedule(backwards, POLICY) == decisions
        self.every_gang_is_answered_once(decisions)
        self.preemptions_are_just(before, decisions)
        for gang, placement in decisions.starts:
            del self.queue[gang.id]
            self.running[gang.id] = Running(gang.but(kept=None), placement, self.now, self.now)
            assert gang.gpus == placement.gpus
            assert not set(placement.hosts) & set(self.unusable)
            self.takers.pop(gang.id, None)
        for preemption in decisions.preempts:
            self.running[preemption.victim] = replace(self.running[preemption.victim], stopping=True)
            self.takers.setdefault(preemption.taker, []).append(preemption.victim)
            self.preempted[preemption.victim] += 1
        for job in decisions.never:
            del self.queue[job]
        for job, gang in self.queue.items():
            self.queue[job] = gang.but(kept=decisions.kept.get(job))
        self.a_taker_gets_what_was_emptied_for_it(decisions)

    def every_gang_is_answered_once(self, decisions):
        answered = [gang.id for gang, _ in decisions.starts] + list(decisions.waits) + list(decisions.never)
        assert sorted(answered) == sorted(self.queue) == sorted(decisions.order)

    def preemptions_are_just(self, before, decisions):
        running = {run.gang.id: run for run in before.running}
        victims = [preemption.victim for preemption in decisions.preempts]
        assert len(victims) == len(set(victims))
        for preemption in decisions.preempts:
            victim = running[preemption.victim]
            assert victim.gang.wants.preemptible
            assert not victim.stopping
            assert self.now - victim.granted_s >= MIN_RUN_S
            assert preemption.taker in decisions.kept
            assert decisions.waits[preemption.taker].reason is Reason.KEPT

    def a_taker_gets_what_was_emptied_for_it(self, decisions):
        for taker in list(self.takers):
            if taker not in self.queue:
                del self.takers[taker]
            elif taker not in decisions.kept:
                del self.takers[taker]  # only if one of its hosts is out
                assert self.unusable

    @invariant()
    def no_gpu_twice(self):
        used = Counter(
            (grant.host, gpu) for run in getattr(self, "running", {}).values() for grant in run.placement.grants
            for gpu in grant.gpus
        )  # fmt: skip
        assert all(count == 1 for count in used.values())

    @invariant()
    def limits_and_reservations_hold(self):
        if not getattr(self, "names", None):
            return
        book = Book(Snapshot(self.inventory, tuple(self.running.values())), 20)
        for name, node in book.tree.nodes.items():
            assert book.held.get(name, 0) <= node.limit
            if not node.children:
                assert book.firm.get(name, 0) <= node.reservation

    def teardown(self):
        """Progress: with every host back and nothing new, a queue of feasible gangs empties."""
        if not hasattr(self, "queue"):
            return
        self.unusable = {}
        for _ in range(40 + 6 * len(self.queue) + 3 * len(self.running)):
            self.run_a_pass()
            if not self.queue and not self.running:
                break
            stopping = [run for run in self.running.values() if run.stopping]
            for run in stopping or sorted(self.running.values(), key=lambda run: run.granted_s)[:1]:
                self.end(run)
            self.now += 10.0
        assert not self.queue
        assert max(self.preempted.values(), default=0) <= 2 + self.made


Cluster.TestCase.settings = settings(examples("histories of a cluster"), stateful_step_count=30)
TestCluster = Cluster.TestCase
