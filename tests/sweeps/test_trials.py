"""The order of trials, and the best one."""

import pytest

from gpurun.studies.trials import JournalEntry, Metric, Trials

VALUES = {0: 0.5, 1: None, 2: 0.9, 3: 0.9, 4: 0.1, 5: 0.95}
COMPLETE = {0, 2, 3, 4}


@pytest.fixture
def trials():
    """Trials 1 and 6 have no value, and trial 5 was pruned."""
    asked = [JournalEntry("asked", 1.0, number, job=f"j-{number:08x}") for number in (6, 5, 4, 3, 2, 1, 0)]
    reports = [JournalEntry("reported", 2.0, number, step=1, value=value) for number, value in VALUES.items()]
    ends = [
        JournalEntry("ended", 3.0, number, outcome="complete" if number in COMPLETE else "pruned") for number in VALUES
    ]
    return Trials([*asked, *reports, *ends])


@pytest.mark.parametrize(("more_is_better", "order"), [(True, [5, 2, 3, 0, 4, 1, 6]), (False, [4, 0, 2, 3, 5, 1, 6])])
def test_the_best_value_comes_first_and_trials_without_a_value_last(trials, more_is_better, order):
    ranked = trials.ranked(Metric("accuracy", more_is_better=more_is_better))
    assert [trial.number for trial in ranked] == order


@pytest.mark.parametrize(("more_is_better", "number"), [(True, 2), (False, 4)])
def test_the_best_trial_is_a_complete_one(trials, more_is_better, number):
    best = trials.best(Metric("accuracy", more_is_better=more_is_better))
    assert best is not None
    assert best.number == number


def test_nothing_is_best_before_a_trial_is_complete():
    assert Trials([JournalEntry("asked", 1.0, 0, job="j-00000000")]).best(Metric("accuracy")) is None
