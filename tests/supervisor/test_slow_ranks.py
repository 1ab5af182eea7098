"""Which ranks are named slow: those that are, for long enough, and nobody in a quiet run. What NVML says about them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.supervisor.verdict.slow import Durations, GpuState, Slow, is_duration, reasons, slow_ranks, words_of_rank

ALL = [range(4)]
RECORDED = json.loads((Path(__file__).parent / "slow_recorded.json").read_text())
"""Durations, in seconds, of 300 steps of four processes with equal work that waited for each other after each step.
Other programs used the two cores at the same time: a tenth of the steps took three times the median, or more."""


def looks_of(durations, *, looks=24, every_s=30.0):
    """Looks at ranks whose durations a function of rank and look gives; None = it said nothing new."""
    found = []
    for at in range(looks):
        told = {rank: durations(rank, at) for rank in range(4)}
        found.append(Durations(at * every_s, {rank: each for rank, each in told.items() if each is not None}))
    return found


def slowed(rank, at, *, by=1.3, since=0):
    return 0.3 * (by if rank == 2 and at >= since else 1.0)


def names(looks, groups=ALL, **options):
    return [each.part for each in slow_ranks(looks, groups, **options)]


def test_a_rank_that_needs_a_third_more_is_named_after_ten_minutes_and_not_before():
    looks = looks_of(lambda rank, at: slowed(rank, at, since=3), looks=40)
    named = [look.at_s for at, look in enumerate(looks, 1) if names(looks[:at]) == [2]]
    assert 3 * 30 + 540 <= named[0] <= 3 * 30 + 660 and named[-1] == looks[-1].at_s
    (found,) = slow_ranks(looks, ALL)
    assert (found.percent, round(found.own, 3), round(found.equals, 3)) == (30, 0.39, 0.3)
    assert words_of_rank("rank 2", "h2", found, ["x"], 600.0).startswith(
        "rank 2 on h2 is slow: for 10m00s, its own work took 30 % longer than that of its equals (0.39 s instead of 0.3"
    )


@pytest.mark.parametrize("by", [1.0, 1.05, 1.14])
def test_less_than_the_limit_names_nobody(by):
    assert names(looks_of(lambda rank, at: slowed(rank, at, by=by))) == []


@pytest.mark.parametrize("seed", range(10))
def test_ten_quiet_runs_of_recorded_durations_name_nobody_and_a_slowed_one_always(seed):
    """A look has the median of 100 steps in a row, as the runtime writes it. Each run takes ranks and steps anew."""
    draw = random.Random(seed)
    ranks = draw.sample(range(4), 4)
    begins = [draw.randrange(len(RECORDED[0]) - 100) for _ in range(120)]

    def median(rank, at):
        return sorted(RECORDED[ranks[rank]][begins[at] : begins[at] + 100])[50]

    quiet = looks_of(median, looks=120)
    assert [names(quiet[:at]) for at in range(1, 121)] == [[]] * 120
    slow = looks_of(lambda rank, at: median(rank, at) * (1.3 if rank == 3 else 1.0))
    assert names(slow) == [3]


def test_noise_that_is_as_large_as_the_limit_names_nobody():
    draw = random.Random(1)
    looks = looks_of(lambda *_: draw.gauss(0.3, 0.05), looks=2000)
    assert not any(names(looks[max(0, at - 30) : at]) for at in range(1, 2001))


@pytest.mark.parametrize(
    "durations",
    [
        lambda rank, at: 60.0 if (rank, at) == (2, 7) else 0.3,
        lambda rank, at: 60.0 if rank == 2 and at < 5 else 0.3,
        lambda rank, at: None if 5 <= at < 15 else 0.3,
        lambda rank, at: (None if at >= 8 else 90.0) if rank == 2 else 0.3,
        lambda rank, at: 0.3 * (at + 1),
        lambda rank, at: 0.4 if rank == at % 4 else 0.3,
        lambda rank, at: 0.3 if rank != 2 or at % 5 == 0 else 0.39,
        lambda rank, at: 0.3 if rank == 0 else None,
        lambda rank, at: 0.39 if rank else 0.3,
    ],
    ids=["one outlier", "compiles at first", "checkpoint pause", "went silent", "all grow slower", "changing rank",
         "slow in four of five", "one rank tells", "most are slow"],
)  # fmt: skip
def test_nobody_is_named(durations):
    assert names(looks_of(durations)) == []


def test_a_slow_rank_is_named_in_spite_of_pauses_and_single_fast_looks():
    def durations(rank, at):
        return None if at in (4, 5, 11) else 0.3 if at == 17 else slowed(rank, at)

    assert names(looks_of(durations, looks=30)) == [2]


def test_only_equals_are_compared():
    def roles(rank, _):
        return 5.0 if rank == 3 else 0.3

    assert names(looks_of(roles), [range(3), [3]]) == [] and names(looks_of(roles)) == [3]
    two_kinds = looks_of(lambda rank, _: {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.7}[rank])
    assert names(two_kinds, [[0, 1], [2, 3]]) == [3]


def test_a_difference_that_nobody_can_measure_is_none():
    tiny = looks_of(lambda rank, at: slowed(rank, at) / 1000)
    assert names(tiny) == [2] and names(tiny, least=0.001) == []


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1.0, 0.0, -math.inf, 1e300, 10**400, True, "0.3", None, [], {}])
def test_what_is_no_duration_neither_names_nor_hides_a_rank(lie):
    assert not is_duration(lie)
    looks = looks_of(lambda rank, at: lie if rank == 0 else slowed(rank, at))
    assert names(looks) == [2]
    assert names(looks_of(lambda rank, at: lie if rank == 2 else 0.3)) == []


def test_a_host_that_says_that_its_own_ranks_are_slow_is_named_and_no_other():
    assert names(looks_of(lambda rank, _: 1e5 if rank == 1 else 0.3)) == [1]


@given(st.lists(st.dictionaries(st.integers(0, 3), st.floats() | st.integers() | st.text(), max_size=4), max_size=40))
def test_whatever_was_told_fails_nothing(told):
    found = slow_ranks([Durations(30.0 * at, each) for at, each in enumerate(told)], ALL)
    assert all(math.isfinite(each.ratio) and each.ratio >= 1.15 for each in found)


WELL = GpuState(100.0, 1400.0, (), 16, 16, 4, 4)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (WELL, ""),
        (GpuState(100.0, 980.0, ("hardware thermal slowdown",)), "hardware thermal slowdown; the GPU runs at 980 MHz"),
        (GpuState(pcie_width=8, pcie_max_width=16), "the GPU's PCIe link uses 8 of 16 lanes"),
        (GpuState(pcie_generation=1, pcie_max_generation=4), "the GPU's PCIe link runs at generation 1 of 4"),
        (GpuState(is_row_pending=True), "bad rows of the GPU's memory wait for a GPU reset"),
        (GpuState(3.0, 300.0, pcie_width=0, pcie_max_width=16), ""),
    ],
)
def test_what_nvml_says_about_a_slow_gpu(state, said):
    found = "; ".join(reasons(state, [WELL, WELL]))
    assert (said in found) if said else not found


def test_without_a_reason_it_says_what_to_look_at():
    assert "NVML reports no reason; check the host's CPUs" in words_of_rank("r", "h", Slow(1, 1.3, 1.3, 1.0), (), 600.0)
