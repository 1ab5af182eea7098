"""Random small clusters, what is asked of them, and what happens to them. The seed decides all of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from cluster_life import NEVER, Event, History, Job
from never import Seen, check_pass, check_words

from gpurun.errors import BadInput
from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Pool, Rack
from gpurun.jobs.spec import Constraints, Roles, Wants
from gpurun.scheduler.model import DEFAULT, Gang, Policy, Running, Snapshot
from gpurun.scheduler.passes import schedule
from gpurun.scheduler.pools import tree_of
from gpurun.scheduler.state import carried_out

SERVER_HOSTS = ("c0", "c1")
FABRICS = {"tcp": Fabric("tcp", FabricKind.TCP, "eth0")}


def random_inventory(rng: Random) -> Inventory:
    """One to nine hosts with GPUs in racks, perhaps two without, and perhaps pools that fit them."""
    hosts, mixed = [], rng.random() < 0.2
    gpus = rng.choice([2, 4, 4, 4, 8])
    for rack in range(rng.randint(1, 3)):
        for number in range(rng.randint(1, 3)):
            generation = rng.choice(["pascal", "volta"]) if mixed else "pascal"
            size = rng.choice([2, 4, 8]) if mixed else gpus
            islands = ((0, 1),) if rng.random() < 0.1 else ()
            hosts.append(Host(f"r{rack}h{number}", f"r{rack}", generation, size, "tcp", nvlink=islands))
    if rng.random() < 0.4:
        hosts += [Host(name, "r0", "none", 0, "tcp") for name in SERVER_HOSTS[: rng.randint(1, 2)]]
    racks = tuple(
        Rack(name, tuple(host.name for host in hosts if host.rack == name)) for name in sorted({h.rack for h in hosts})
    )
    bare = Inventory(tuple(hosts), racks, FABRICS, ())
    while True:
        inventory = replace(bare, pools=_random_pools(rng, bare.total_gpus))
        try:
            tree_of(inventory.pools, inventory.total_gpus)
        except BadInput:
            continue
        return inventory


def _random_pools(rng: Random, total: int) -> tuple[Pool, ...]:
    if rng.random() < 0.25:
        return ()
    part = max(1, total // 4)
    pools = [
        Pool("a", rng.choice([0, part, 2 * part]), rng.choice([None, 2 * part, 3 * part]), rng.choice([1.0, 3.0])),
        Pool("b", rng.choice([0, part]), rng.choice([None, part, 2 * part])),
    ]
    if rng.random() < 0.4:
        pools.append(Pool("a1", rng.choice([0, part]), rng.choice([None, 2 * part]), parent="a"))
        pools.append(Pool("a2", 0, rng.choice([None, part]), parent="a"))
    return tuple(pools)


def random_policy(rng: Random) -> Policy:
    return replace(DEFAULT, patience_s=rng.choice([300.0, 3000.0, 30000.0]), min_run_s=rng.choice([0.0, 60.0, 900.0]))


def random_gang(rng: Random, name: str, at_s: float, inventory: Inventory) -> Gang:
    hosts = [host.name for host in inventory.hosts if host.gpus]
    servers = [host.name for host in inventory.hosts if not host.gpus]
    prefer = rng.choice(["any", "any", "any", "any", "rack", "host"])
    asked = Constraints(
        generations=("pascal",) if rng.random() < 0.1 else (),
        locality=rng.choice(["any", "any", "any", "any", "rack", "host"]),
        gpus_per_host=rng.choice([None, None, None, None, 2, 4]),
        hosts=tuple(rng.sample(hosts, rng.randint(1, min(3, len(hosts))))) if rng.random() < 0.15 else (),
        avoid=(rng.choice(hosts),) if rng.random() < 0.08 else (),
        prefer=prefer,
        locality_wait_s=0.0 if prefer == "any" else rng.choice([0.0, 100.0, 2000.0]),
        nvlink=rng.random() < 0.05,
    )
    total = inventory.total_gpus
    gpus = min(total, rng.choice([1, 1, 2, 2, 4, 4, 8, 8, max(1, total // 4), max(1, total // 2), total]))
    if asked.gpus_per_host:
        gpus = max(asked.gpus_per_host, gpus // asked.gpus_per_host * asked.gpus_per_host)
    wants = Wants(
        min_gpus=rng.choice([None, None, None, max(1, gpus // 2)]), constraints=asked,
        pool=rng.choice([*(pool.name for pool in inventory.pools), None]),
        priority=rng.choice([0, 0, 0, 1, 5]), preemptible=rng.random() < 0.5,
        time_limit_s=rng.choice([None, None, 50.0, 500.0, 5000.0]),
    )  # fmt: skip
    gang = Gang(
        name, gpus, at_s, wants, start_allowance_s=60.0, stop_allowance_s=rng.choice([15.0, 30.0]),
        avoid=tuple(rng.sample(hosts, rng.randint(1, min(3, len(hosts))))) if rng.random() < 0.1 else (),
    )  # fmt: skip
    ps = 1 if servers and rng.random() < 0.15 else 0
    return gang.wanting(roles=Roles(ps=ps, ps_hosts=(rng.choice(servers),) if servers else ()))


def random_history(seed: int, most_jobs: int = 60) -> History:
    """A cluster that lives for some time; then nothing new happens, and what waits must come to its end."""
    rng = Random(seed)
    inventory, policy = random_inventory(rng), random_policy(rng)
    gap_s, lasts_s = rng.choice([20.0, 200.0, 1000.0]), rng.choice([100.0, 600.0])
    jobs, at_s, number = [], 0.0, rng.randint(5, most_jobs)
    shared = [random_gang(rng, "", 0.0, inventory) for _ in range(3)]
    for n in range(number):
        at_s += rng.expovariate(1 / gap_s) if rng.random() < 0.8 else 0.0
        gang = random_gang(rng, f"g{n:03}", at_s, inventory)
        if rng.random() < 0.3:  # a sweep: gangs that are alike
            gang = rng.choice(shared).but(id=gang.id, submitted_s=at_s)
        jobs.append(_random_job(rng, gang, lasts_s))
    return History(
        inventory, policy, jobs, _random_events(rng, inventory, at_s), seed, grows=rng.choice([0.0, 0.0, 0.2])
    )  # fmt: skip


def _random_job(rng: Random, gang: Gang, lasts_s: float) -> Job:
    endless = gang.wants.time_limit_s is None and rng.random() < 0.03
    dead_s = gang.submitted_s + rng.uniform(0, 3000) if rng.random() < 0.06 else NEVER
    return Job(
        gang,
        lasts_s=NEVER if endless else rng.lognormvariate(0, 1) * lasts_s,
        stops_s=rng.uniform(0.1, gang.stop_allowance_s),
        prepares_s=rng.choice([0.0, rng.uniform(0, 60)]),
        out_s=(dead_s, rng.choice([dead_s + 2000, NEVER])),
        is_damaged=rng.random() < 0.5,
    )


def _random_events(rng: Random, inventory: Inventory, until_s: float) -> list[Event]:
    if rng.random() < 0.3:
        return []
    hosts, events = list(inventory.hosts), []
    for _ in range(rng.randint(1, 6)):
        host, at_s = rng.choice(hosts), rng.uniform(0, until_s)
        back_s = rng.choice([at_s + rng.uniform(10, 5000)] * 4 + [NEVER])
        what = rng.choice(["cordon", "cordon", "drain", "take", "fault", "fault", "clock"])
        gpus = tuple(sorted(rng.sample(range(host.gpus), rng.randint(1, host.gpus)))) if host.gpus else ()
        if what == "take" and not gpus:
            continue
        events.append(Event(at_s, what, host.name, back_s, rng.choice([-7200.0, -60.0, 60.0, 7200.0]), gpus))
    return events


def run_random_passes(seed: int) -> int:
    """Some passes over a random moment of a random cluster; returns how many. Raises Broken."""
    rng = Random(seed)
    inventory, policy = random_inventory(rng), random_policy(rng)
    now_s = rng.choice([1000.0, 10000.0, 100000.0])
    names = [host.name for host in inventory.hosts]
    unusable = {name: f"{'out' if name.endswith('0') else 'cordoned'}: fan" for name in names if rng.random() < 0.08}
    first = [random_gang(rng, f"r{n}", 0.0, inventory).wanting(roles=None) for n in range(rng.randint(0, 6))]
    filled = schedule(
        Snapshot(replace(inventory, pools=()), queue=tuple(gang.wanting(pool=None) for gang in first)), policy
    )
    pools = {gang.id: gang.wants.pool for gang in first}
    running = tuple(
        Running(gang.wanting(pool=pools[gang.id]), placement, granted_s := rng.uniform(0, now_s), granted_s)
        for gang, placement in filled.starts
    )
    queue = [random_gang(rng, f"q{n}", rng.uniform(0, now_s), inventory) for n in range(rng.randint(1, 8))]
    for n in range(1, len(queue)):
        if rng.random() < 0.4:
            other = queue[rng.randrange(n)]
            queue[n] = other.but(id=queue[n].id, submitted_s=queue[n].submitted_s, requeued=rng.random() < 0.5)
    snapshot = Snapshot(inventory, running, tuple(queue), unusable, {}, now_s)
    for number in range(passes := rng.randint(1, 4)):
        found = schedule(snapshot, policy)
        seen = Seen(snapshot, snapshot.taken, found, policy)
        check_pass(seen)
        if rng.random() < 0.15:
            check_words(seen, most=1)
        if number < passes - 1:
            snapshot = _later(rng, carried_out(snapshot, found))
    return passes


def _later(rng: Random, after: Snapshot) -> Snapshot:
    """Gangs that were told to stop have stopped and wait again, others end, hosts go and come."""
    now_s = after.now_s + rng.choice([1.0, 100.0, 10000.0])
    stopped = [run for run in after.running if run.stopping and rng.random() < 0.8]
    gone = [run for run in after.running if not run.stopping and rng.random() < 0.15]
    again = tuple(run.gang.but(requeued=True, attempts=run.gang.attempts + 1, kept=None) for run in stopped)
    left = tuple(run for run in after.running if run not in stopped and run not in gone)
    unusable = dict(after.unusable)
    if rng.random() < 0.2:
        host = rng.choice(after.inventory.hosts).name
        unusable = {name: why for name, why in unusable.items() if name != host} or {host: "cordoned"}
    return replace(after, running=left, queue=(*after.queue, *again), unusable=unusable, now_s=now_s)
