"""The published simulators' policies: a strict queue, and consolidated placement."""

import pytest

from gpurun.inventory.model import Host, Inventory, Rack
from gpurun.jobs.spec import Constraints, Grant, Placement, Wants
from gpurun.scheduler.model import Gang, Running, Snapshot
from gpurun.simulate.replay import FIFO, SJF, strict_pass, strictly_arranged


def cluster(hosts):
    found = tuple(Host(f"r0h{h}", "r0", "pascal", 8, "tcp") for h in range(hosts))
    return Inventory(found, (Rack("r0", tuple(host.name for host in found)),), {})


def decide(yardstick, *queue, hosts=1, durations=None, **seen):
    snapshot = Snapshot(cluster(hosts), queue=queue, **seen)
    return strict_pass(snapshot, yardstick, strictly_arranged(snapshot), durations or {})


def started(decisions):
    return [gang.id for gang, _ in decisions.starts]


@pytest.mark.parametrize("yardstick", [FIFO, SJF])
def test_strict_head_of_line(yardstick):
    running = (Running(Gang("r", 4), Placement("pascal", ("r0",), (Grant("r0h0", (0, 1, 2, 3)),)), 0.0, 0.0),)
    queue = (Gang("big", 8, 1.0), Gang("small'; --", 1, 2.0))
    decisions = decide(yardstick, *queue, running=running, durations={"big": 1.0, "small'; --": 2.0})
    assert started(decisions) == []
    assert decisions.waits["small'; --"].behind == "big"


def test_shortest_first_knows_durations():
    queue = (Gang("long", 8, 1.0), Gang("short", 8, 2.0))
    durations = {"long": 9.0, "short": 1.0}
    assert started(decide(SJF, *queue, durations=durations)) == ["short"]
    assert started(decide(FIFO, *queue, durations=durations)) == ["long"]


@pytest.mark.parametrize(
    ("free", "gpus", "expected"),
    [
        ([8, 3, 5], 3, {"r0h1": 3}),
        ([8, 8, 5], 16, {"r0h0": 8, "r0h1": 8}),
        ([7, 8, 5], 16, None),
        ([4, 4, 4], 8, None),
        ([8, 5, 6], 12, {"r0h0": 8, "r0h2": 4}),
        ([8, 3, 3], 12, None),
    ],
)
def test_consolidated_placement(free, gpus, expected):
    taken = {f"r0h{n}": tuple(range(f, 8)) for n, f in enumerate(free)}
    decisions = decide(FIFO, Gang("g", gpus), hosts=3, taken=taken)
    found = {g.host: len(g.gpus) for _, placement in decisions.starts for g in placement.grants}
    assert (found or None) == expected


def test_what_could_never_run_is_refused_and_blocks_nobody():
    queue = (
        Gang("huge", 99, 1.0),
        Gang("odd", 3, 2.0, wants=Wants(constraints=Constraints(gpus_per_host=2))),
        Gang("ok", 1, 3.0),
    )
    decisions = decide(FIFO, *queue)
    assert set(decisions.never) == {"huge", "odd"}
    assert started(decisions) == ["ok"]
