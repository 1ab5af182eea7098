"""How a gang ends, whatever happens to it: random histories of one gang in virtual time.

A failing test prints its seed and a short history. `benchmarks/bench_gangs.py --replay SEED` prints it again.
"""

from __future__ import annotations

import gang_run
import pytest
from broken_gangs import BUILDS
from gang_plan import draw

HISTORIES = 400
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
