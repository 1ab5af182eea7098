"""No GPU is held twice, whatever people, crashes and networks do: random steps on a simulated world of real files.

A failing test prints its seed and a short history. `benchmarks/bench_ownership.py --seed N --episodes 1` replays it.
"""

from __future__ import annotations

import ownership_run
import ownership_steps
import pytest
from broken_builds import BUILDS, NAMED_IN_THE_ISSUE, SEEN_AT_THE_END
from how_many import count

EPISODES = count("histories of ownership")
MOST_STEPS = 1000


@pytest.mark.parametrize("seed", range(EPISODES))
def test_no_gpu_is_held_twice_and_everything_ends(seed):
    plan = ownership_steps.draw(seed, ownership_run.STEPS)
    if ownership_run.run(plan).violations:
        pytest.fail(ownership_run.told(seed, ownership_run.shrunk(plan, runs=100)), pytrace=False)


@pytest.mark.parametrize("name", NAMED_IN_THE_ISSUE)
def test_a_broken_build_is_caught_within_a_thousand_steps(name):
    seeds = range(1, 5)  # a thousand steps of one seed may happen to hold no case of it
    assert any(ownership_run.steps_until_caught(BUILDS[name], seed=seed, most=MOST_STEPS) for seed in seeds)


def test_a_build_without_an_adopter_is_caught_at_the_end_of_an_episode():
    """Nothing is held twice without one. But jobs never end whose supervisors were killed."""
    plan = ownership_steps.draw(0, 100)
    assert ownership_run.run(plan, broken=SEEN_AT_THE_END["adopter missing"]).violations
    assert not ownership_run.run(plan).violations


def test_a_seed_replays_the_same_history():
    plan = ownership_steps.draw(3, 60)
    first, second = (ownership_run.run(plan, to_the_end=False).history for _ in range(2))
    assert [line.partition("/dev/")[0] for line in first] == [line.partition("/dev/")[0] for line in second]


def test_a_shorter_history_of_a_broken_build_is_found():
    broken = BUILDS["claim not checked"]
    number = 1_000_000
    while not ownership_run.run(plan := ownership_steps.draw(number, 150), broken=broken, to_the_end=False).violations:
        number += 1
    found = ownership_run.shrunk(plan, broken=broken, runs=12)
    assert len(found) < len(plan)
    assert "!!!" in ownership_run.told(number, found, broken=broken)
