"""Which points come, and which trials are stopped early."""

from __future__ import annotations

import builtins
import sys

import pytest

from gpurun.errors import BadInput
from gpurun.jobs.spec import JobSpec
from gpurun.studies.search import Searcher
from gpurun.studies.sweep_plan import Wish
from gpurun.studies.trials import JournalEntry

TEMPLATE = JobSpec(name="n", image="i:1", gpus=1, command=("train",))
LR = {"lr": ("log:1e-5..1e-1",), "layers": ("2..8",)}


def plan(**wish):
    return Wish(**wish).plan(TEMPLATE, "/i.yaml", 1.0)


def ask(searcher, number):
    point = searcher.next_point(number)
    asked = JournalEntry("asked", 1.0, number, parameters=point)
    searcher.take(asked)
    return asked


def test_points_stay_the_same_whoever_goes_on():
    wish = plan(random=6, space=LR, seed=3)
    whole = Searcher(wish)
    entries = [ask(whole, number) for number in range(6)]
    later = Searcher(wish)
    for entry in entries[:3]:
        later.take(entry)
    assert [ask(later, number).parameters for number in range(3, 6)] == [e.parameters for e in entries[3:]]
    assert len({e.parameters["lr"] for e in entries}) == 6
    assert all(1e-5 <= e.parameters["lr"] <= 0.1 and e.parameters["layers"] in range(2, 9) for e in entries)
    other = Searcher(plan(random=6, space=LR, seed=4))
    assert ask(other, 0).parameters != entries[0].parameters


def test_a_grid_goes_on_where_it_was():
    wish = plan(grid={"a": ("1", "2", "3")})
    later = Searcher(wish)
    assert [later.next_point(n)["a"] for n in (1, 2)] == [2, 3]


def run_asha(searcher, values, *, steps=9):
    """Trials one after the other; the steps that each has come to."""
    came = {}
    for number, value in enumerate(values):
        ask(searcher, number)
        for step in range(1, steps + 1):
            came[number] = step
            if searcher.take(JournalEntry("reported", 1.0, number, step=step, value=value)):
                searcher.take(JournalEntry("ended", 1.0, number, outcome="pruned"))
                break
        else:
            searcher.take(JournalEntry("ended", 1.0, number, outcome="complete", value=value))
    return came


def test_asha_ends_the_worse_at_its_rungs_and_lets_the_best_go_on():
    wish = plan(grid={"a": tuple("123456789")}, metric="accuracy:max", stop="asha:min=1,factor=3")
    came = run_asha(Searcher(wish), [0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.95])
    assert came[0] == came[8] == 9
    assert sum(came.values()) < 9 * 9 / 2 and set(came.values()) <= {1, 3, 9}


def test_less_is_better_where_the_metric_says_so_and_no_number_is_worst():
    wish = plan(grid={"a": tuple("1234")}, metric="loss:min", stop="asha:min=1,factor=2")
    came = run_asha(Searcher(wish), [0.1, 0.9, None, 0.05])
    assert (came[0], came[1], came[2], came[3]) == (9, 1, 1, 9)


def test_a_study_that_is_told_again_decides_as_before():
    """The next conductor reads the journal, also of trials that ran a second time."""
    wish = plan(grid={"a": tuple("1234")}, metric="accuracy:max", stop="asha:min=1,factor=2")
    first, second = Searcher(wish), Searcher(wish)
    entries = [
        ask(first, 0),
        JournalEntry("reported", 1.0, 0, step=1, value=0.9),
        JournalEntry("ended", 1.0, 0, outcome="failed"),
    ]
    entries += [JournalEntry("again", 1.0, 0), JournalEntry("asked", 1.0, 0, parameters=entries[0].parameters)]
    entries += [
        JournalEntry("reported", 1.0, 0, step=1, value=0.9),
        JournalEntry("reported", 1.0, 77, step=1, value=1.0),
    ]
    for entry in entries[1:]:
        first.take(entry)
    for entry in entries:
        second.take(entry)
    for searcher in (first, second):
        ask(searcher, 1)
        assert searcher.take(JournalEntry("reported", 1.0, 1, step=1, value=0.1))


def test_tpe_draws_near_the_best():
    searcher = Searcher(plan(tpe=60, space={"x": ("0.0..1.0",)}, metric="loss:min"))
    drawn = []
    for number in range(60):
        x = ask(searcher, number).parameters["x"]
        drawn.append(x)
        searcher.take(JournalEntry("reported", 1.0, number, step=1, value=(x - 0.3) ** 2))
        searcher.take(JournalEntry("ended", 1.0, number, outcome="complete", value=(x - 0.3) ** 2))
    late = sum(abs(x - 0.3) for x in drawn[40:]) / 20
    assert late < sum(abs(x - 0.3) for x in drawn[:10]) / 10 and late < 0.15


def test_without_optuna_a_grid_works_and_the_rest_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "optuna" or name == "gpurun.studies.study"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.partition(".")[0] == "optuna":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    Searcher(plan(grid={"a": ("1",)}))
    with pytest.raises(BadInput) as caught:
        Searcher(plan(random=3, space=LR))
    assert caught.value.hint == "run: pip install 'gpurun[sweep]'"
