"""Measure how well the scaling model predicts jobs with hidden random parameters.

    python benchmarks/bench_scaling_truths.py [TRUTHS]

Each truth is a job with random parameters, measured on 1, 2 and 4 hosts at 1 Gbit/s, three runs each. Half of the
truths follow the model's own equations, with 5 % noise. The others do not: gradients leave in 1 to 8 parts of
unequal size during the backward pass, ranks' times are log-normal, a run is the median
of 15 steps, and runs differ by 3 %.
"""

import sys
from math import exp, log
from random import Random

from gpurun.scaling.model import (
    AHEAD,
    BYTE,
    COMPUTE,
    PARAMETERS,
    SPREAD,
    LinkClass,
    LinkRates,
    Sample,
    Shape,
    fit,
    inverse_at,
    latency_at,
    step_seconds,
    traffic_of,
)

ASKED = {"8 hosts": (8, 1e9), "2 hosts, half the rate": (2, 5e8), "4 hosts, half the rate": (4, 5e8),
         "8 hosts, half the rate": (8, 5e8), "4 hosts, 2.5 times the rate": (4, 2.5e9)}  # fmt: skip


class OwnTruth:
    """Follows the model's equations."""

    noise = 0.05

    def __init__(self, seed):
        self.random = Random(seed)
        pick = self.random.uniform
        self.values = [1.0] * PARAMETERS
        self.values[COMPUTE] = exp(pick(log(0.05), log(1.0)))
        self.values[SPREAD] = pick(0.0, 0.06)
        self.values[AHEAD] = 0.5 * exp(self.random.gauss(0.0, 0.7))
        self.values[BYTE] = 10 ** pick(-10.5, -9)
        for link in LinkClass:
            self.values[latency_at(link)] = 10 ** pick(-5, -3.5)
            self.values[inverse_at(link)] = 1 / pick(0.6, 0.97)
        self.bytes = int(pick(0.3, 2.5) * self.values[COMPUTE] * 1e9 / 8 / 1.5)

    def step_s(self, shape):
        return step_seconds(self.values, traffic_of(shape, self.bytes, "ring", frozenset(LinkClass)))

    def run(self, hosts, bit_per_s=1e9):
        shape = Shape((1,) * hosts, ("a",) * hosts, rates=LinkRates(rack=bit_per_s))
        step_s = self.step_s(shape) * exp(self.random.gauss(0, self.noise))
        rate = 32 * hosts / step_s
        return Sample(shape.ranks_per_host, shape.racks, 32, self.bytes, step_s, rate, rates=shape.rates)


class OtherTruth(OwnTruth):
    """Sends parts of the gradients one after the other during the backward pass."""

    noise = 0.03

    def __init__(self, seed):
        super().__init__(seed)
        pick = self.random.uniform
        self.compute_s, self.spread = self.values[COMPUTE], pick(0.005, 0.05)
        self.latency_s, self.byte_s, self.reached = 10 ** pick(-4.5, -2.7), 10 ** pick(-10.3, -9), pick(0.75, 0.97)
        parts = [pick(0.2, 1) for _ in range(self.random.choice([1, 2, 4, 8]))]
        self.parts = [self.bytes * part / sum(parts) for part in parts]

    def step_s(self, shape):
        return sorted(self._step_s(shape) for _ in range(15))[7]

    def _step_s(self, shape):
        ranks = shape.ranks
        slowest_s = max(self.compute_s * exp(self.random.gauss(0, self.spread)) for _ in range(ranks))
        end_s = 0.0
        for number, size in enumerate(self.parts if ranks > 1 else []):
            ready_s = slowest_s * (1 + 2 * (number + 1) / len(self.parts)) / 3
            volume = 2 * (ranks - 1) / ranks * size
            took_s = 2 * (ranks - 1) * self.latency_s + volume * (8 / shape.rates.rack / self.reached + self.byte_s)
            end_s = max(end_s, ready_s) + took_s
        return max(slowest_s, end_s)


def table(kind, count):
    errors, held = {name: [] for name in ASKED}, dict.fromkeys(ASKED, 0)
    for seed in range(count):
        truth = kind(seed)
        model = fit([truth.run(hosts) for hosts in (1, 2, 4) for _ in range(3)])
        for name, (hosts, rate) in ASKED.items():
            run = truth.run(hosts, rate)
            found = model.predict(run.shape).step_s
            errors[name].append(abs(found.median / run.step_s - 1))
            held[name] += found.low <= run.step_s <= found.high
    print(f"\n{kind.__name__}, {count}: error of a new run's step{'median':>12}{'90th':>8}{'worst':>8}{'in range':>10}")
    for name, found in errors.items():
        found.sort()
        part = held[name] / count
        print(f"{name:46}{found[count // 2]:10.1%}{found[int(0.9 * count)]:8.1%}{found[-1]:8.1%}{part:10.0%}")


if __name__ == "__main__":
    for kind in (OwnTruth, OtherTruth):
        table(kind, int(sys.argv[1]) if len(sys.argv) > 1 else 60)
