"""Compare the cost model with Horovod's published figures, without fitting to them; replay a month with other links.

python benchmarks/bench_scaling.py                 # the published figures
python benchmarks/bench_scaling.py TRACE.csv       # and a trace, replayed with several links between racks

Published: rates of one GPU and of 16 (batch 64, 4 Pascal GPUs a host, 25 Gbit/s RoCE, NCCL): horovod/horovod pull
request 44. Efficiencies of 128 GPUs: README of Horovod 0.9 to 0.12, of 512: docs/benchmarks.rst. Parameters: Keras
Applications' documentation. The model is given the rate of one GPU, the parameters, and the links by their nominal
rates: 25 Gbit/s and 5 µs between hosts, 80 Gbit/s (PCIe 3.0 x16 without a switch's losses) and 5 µs inside a host.
"""

import sys
import time
from pathlib import Path

from gpurun.inventory.model import Host, Inventory, Rack
from gpurun.scaling.model import (
    AHEAD,
    BYTE,
    COMPUTE,
    PARAMETERS,
    SPREAD,
    LinkClass,
    LinkRates,
    PairFigure,
    Sample,
    Shape,
    fit,
    inverse_at,
    latency_at,
    step_seconds,
    traffic_of,
)
from gpurun.scheduler.model import DEFAULT
from gpurun.simulate.pace import PlacementPace
from gpurun.simulate.replay import read_trace, replay
from gpurun.simulate.report import report_replay

LINKS = (PairFigure(LinkClass.HOST, 80e9, 5e-6), PairFigure(LinkClass.RACK, 25e9, 5e-6))
NETWORKS = {"Inception V3": (134.4, 23.9e6), "ResNet-101": (119.4, 44.7e6), "VGG-16": (130.9, 138.4e6)}
"""Images/s of one GPU; number of parameters, 4 bytes each."""

PUBLISHED = {
    "Inception V3": {16: 2022.6 / 16 / 134.4, 128: 0.90, 512: 0.90},
    "ResNet-101": {16: 1746.2 / 16 / 119.4, 128: 0.90, 512: 0.90},
    "VGG-16": {16: 1787.4 / 16 / 130.9, 128: 0.79, 512: 0.68},
}


def published():
    print(f"{'':14}{'GPUs':>5}{'published':>11}{'predicted':>11}{'range':>14}{'error, points':>15}{'relative':>10}")
    for name, (rate, parameters) in NETWORKS.items():
        alone = Sample((1,), ("r",), 64, int(4 * parameters), 64 / rate, rate)
        model = fit([alone], LINKS)
        for gpus, known in PUBLISHED[name].items():
            found = model.predict(Shape((4,) * (gpus // 4), ("r",) * (gpus // 4))).efficiency
            bounds = f"{found.low:.0%} to {found.high:.0%}"
            error, relative = 100 * (found.median - known), found.median / known - 1
            print(f"{name:14}{gpus:5}{known:11.0%}{found.median:11.0%}{bounds:>14}{error:+15.1f}{relative:+10.1%}")


def assumed(name):
    """Return computed, not measured, runs of a network on hosts with 8 GPUs: a third of the computation ahead of
    the first gradient, links at 85 % of their rates."""
    rate, parameters = NETWORKS[name]
    values = [1.0] * PARAMETERS
    values[COMPUTE], values[SPREAD], values[AHEAD], values[BYTE] = 64 / rate, 0.03, 0.5, 1e-11
    for link in LinkClass:
        values[latency_at(link)], values[inverse_at(link)] = 5e-6, 1 / 0.85
    rates = LinkRates(80e9, 25e9, 10e9)
    for ranks, racks in (((1,), "a"), ((8,), "a"), ((8, 8), "aa"), ((8, 8), "ab"), ((8, 8, 8, 8), "aabb")):
        shape = Shape(ranks, tuple(racks), rates=rates)
        traffic = traffic_of(shape, 4 * parameters, "ring", frozenset(LinkClass))
        step_s = step_seconds(values, traffic)
        yield Sample(ranks, shape.racks, 64, int(4 * parameters), step_s, 64 * sum(ranks) / step_s, rates=rates)


def cluster(racks=4, hosts=4, gpus=8):
    found = tuple(Host(f"r{r}h{h}", f"r{r}", "pascal", gpus, "roce") for r in range(racks) for h in range(hosts))
    names = {f"r{r}": tuple(host.name for host in found if host.rack == f"r{r}") for r in range(racks)}
    return Inventory(found, tuple(Rack(name, names[name]) for name in names), {})


def study(trace):
    jobs, inventory = read_trace(trace), cluster()
    print(f"\n{len(jobs)} jobs, {len(inventory.hosts)} hosts with 8 GPUs in 4 racks, hours")
    print(f"{'':42}{'completion':>11}{'wait':>8}{'p99 wait':>10}{'GPU hours':>11}{'over racks':>12}{'took s':>8}")
    for name in NETWORKS:
        model = fit(assumed(name))
        rows = [("durations of the trace", None, False)] if name == "Inception V3" else []
        rows += [(f"{name}, {rate:g} Gbit/s{kept}", rate * 1e9, bool(kept))
                 for rate in (10, 25) for kept in ("", ", kept in racks")]  # fmt: skip
        for title, rate, kept in rows:
            began = time.perf_counter()
            factor = (lambda _: 1.0) if rate is None else PlacementPace(model, inventory, rate).factor
            done = replay(jobs, inventory, DEFAULT, factor=factor, is_kept_in_rack=kept)
            took_s = time.perf_counter() - began
            found = report_replay(done, took_s)
            hours = found.gpu_utilization * inventory.total_gpus * found.makespan_s / 3600
            print(
                f"{title:42}{found.avg_jct_s / 3600:11.2f}{found.avg_wait_s / 3600:8.2f}{found.p99_wait_s / 3600:10.1f}"
                f"{hours:11.0f}{found.multi_rack_jobs:12}{took_s:8.1f}"
            )


if __name__ == "__main__":
    published()
    if len(sys.argv) > 1:
        study(Path(sys.argv[1]))
