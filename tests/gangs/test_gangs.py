"""How a gang ends, whatever happens to it: random histories of one gang in virtual time.

A failing test prints its seed and a short history. `benchmarks/bench_gangs.py --replay SEED` prints it again.
"""

from __future__ import annotations

import random

import gang_run
import pytest
from broken_gangs import BUILDS
from gang_plan import STEPS_S, Event, draw, with_steps
from how_many import count

from gpurun.jobs.record import State

HISTORIES = count("histories of a gang")
MOST = 1000


def test_gangs_end_once_in_time_and_for_the_right_reason():
    with gang_run.simulated():
        for seed in range(HISTORIES):
            if gang_run.run(draw(seed)).violations:
                pytest.fail(gang_run.told(gang_run.shrunk(draw(seed))), pytrace=False)


@pytest.mark.parametrize("name", BUILDS)
def test_a_broken_build_is_caught_within_a_thousand_histories(name):
    assert gang_run.caught_after(BUILDS[name], first=0, most=MOST) is not None


def test_a_seed_replays_the_same_history():
    with gang_run.simulated():
        assert gang_run.run(draw(7)) == gang_run.run(draw(7))


def test_a_shorter_history_of_a_broken_build_is_found():
    with gang_run.simulated(), BUILDS["a cancel is not seen"]():
        plan = next(plan for plan in map(draw, range(MOST)) if gang_run.run(plan).violations and len(plan.events) > 1)
        found = gang_run.shrunk(plan)
        assert len(found.events) < len(plan.events)
        assert "!!!" in gang_run.told(found)


@pytest.mark.parametrize("at_s", [0.05, 0.11, 0.4, 0.9])
def test_a_host_that_was_away_for_8_s_is_not_lost_for_a_question_that_came_late(at_s):
    """A new supervisor has never heard it. Another host's connections keep the supervisor looking."""
    again = [Event(1, at_s + 10.0 + count / 4, "again", 2) for count in range(6)]
    plan = draw(0)._replace(
        hosts=3, gpus=1, least=None, launcher="follows", length_s=30.0, spread_s=0.1, limit_s=None, hang_s=None,
        has_others=True, tells=True, events=(Event(1, at_s, "link", 1, 8.0), *again),
    )  # fmt: skip
    with gang_run.simulated():
        assert gang_run.run(plan).ends == ((1, State.SUCCEEDED),)


@pytest.mark.parametrize("step_s", [sign * step_s for step_s in STEPS_S for sign in (-1, 1)])
@pytest.mark.parametrize("kill", [(), (Event(1, 19.0, "kill", 0, 0.5),), (Event(1, 21.0, "kill", 0, 0.5),)])
@pytest.mark.parametrize("limit_s", [None, 90.0, 40.0])
def test_a_step_of_the_heads_clock_ends_no_gang_and_lengthens_no_time_limit(limit_s, kill, step_s):
    """Its supervisor lives on; or another adopts the gang, before or after the step."""
    plan = draw(0)._replace(
        hosts=2, gpus=1, least=None, launcher="follows", length_s=60.0, spread_s=0.1, limit_s=limit_s, hang_s=None,
        has_others=True, tells=True, events=tuple(sorted((Event(1, 20.0, "clock", 0, step_s), *kill))),
    )  # fmt: skip
    with gang_run.simulated():
        found = gang_run.run(plan)
    is_over = limit_s == 40.0
    assert (found.violations, found.ends) == ((), ((1, State.TIMED_OUT if is_over else State.SUCCEEDED),))
    if is_over:
        stopped_s = next(float(line.split()[0]) for line in found.history if "longer than its time limit" in line)
        assert limit_s <= stopped_s - 1.0 <= limit_s + 2.0


def test_no_end_depends_on_the_heads_wall_clock():
    with gang_run.simulated():
        for seed in range(200):
            plan = draw(seed)
            plan = plan._replace(events=tuple(event for event in plan.events if event.kind != "clock"))
            stepped = with_steps(random.Random(seed), plan)
            assert gang_run.run(stepped).ends == gang_run.run(plan).ends, seed
