"""A sweep as a picture: every trial is in it, the best one is marked, and strange values break nothing."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from gpurun.drawing import Choices, Numbers
from gpurun.jobs.spec import JobSpec
from gpurun.studies.sweep_pictures import BEST, MOST_REPORTS, MOST_TRIALS, axis_of, best_so_far, curves, picture
from gpurun.studies.sweep_plan import Wish, dimension
from gpurun.studies.trials import JournalEntry, Trials

SPACE = {"lr": ("log:1e-5..1e-1",), "layers": ("2..8",), "optimizer": ("adam", "sgd", '"/><script>')}


def plan_of(space=None, metric="accuracy:max", name="n"):
    template = JobSpec(name=name, image="i", gpus=1, command=("x",))
    return Wish(space=space or SPACE, random=9, metric=metric).plan(template, "/i.yaml", 1.0)


def trial(number, *reports, outcome="complete", **parameters):
    given = {"lr": 1e-3, "layers": 3, "optimizer": "adam", **parameters}
    yield JournalEntry("asked", 10.0 + number, number, job=f"j-{number:08x}", parameters=given)
    for step, value in reports:
        yield JournalEntry("reported", 20.0 + number + min(step, 9), number, step=step, value=value)
    if outcome:
        yield JournalEntry("ended", 50.0 + number, number, outcome=outcome)


def drawn(*entries, plan=None):
    plan = plan or plan_of()
    text = picture("s-00000001", plan, plan.metric, Trials(entries), curves(entries))
    return ElementTree.fromstring(text)


def lines(root, colour=None):
    found = [each for each in root.iter("{http://www.w3.org/2000/svg}polyline") if len(each)]
    return [each for each in found if colour in (None, each.get("stroke"))]


def test_each_trial_has_three_lines_and_the_best_is_marked():
    entries = [*trial(0, (1, 0.5), (2, 0.7)), *trial(1, (1, 0.6), (2, 0.8)), *trial(2, (1, 0.9), outcome="pruned")]
    root = drawn(*entries)
    assert len([each for each in lines(root) if each[0].text.startswith("trial ")]) == 9
    best = [each for each in lines(root, BEST) if each[0].text.startswith("trial ")]
    assert {each[0].text.partition(",")[0] for each in best} == {"trial 1"}, "0.9 did not come to its end"
    dashed = {each[0].text.partition(",")[0] for each in lines(root) if each.get("stroke-dasharray")}
    assert dashed == {"trial 2", "the best complete trial so far"}
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("best: trial 1, complete: accuracy 0.8 at step 2; lr=0.001" in word for word in words)
    assert {"lr (log)", "layers", "optimizer", "accuracy (max)", "step", "1e-5", "adam"} <= set(words)


def test_less_is_better_where_the_sweep_says_so():
    entries = [*trial(0, (1, 0.5)), *trial(1, (1, 0.6))]
    assert "trial 0" in lines(drawn(*entries, plan=plan_of(metric="loss:min")), BEST)[0][0].text
    assert best_so_far(Trials(entries).by_number.values(), plan_of(metric="loss:min").metric) == [(40.0, 0.5)]
    assert best_so_far(Trials(entries).by_number.values(), plan_of().metric) == [(40.0, 0.5), (41.0, 0.6)]


def test_axes_are_those_that_points_are_drawn_from():
    assert axis_of(dimension("lr", ("log:1e-5..1e-1",))) == Numbers(1e-5, 0.1, is_log=True)
    assert [text for _, text in axis_of(dimension("n", ("10", "9", "1e-3"))).marks()] == ["0.001", "9", "10"]
    assert isinstance(axis_of(dimension("on", ("true", "false"))), Choices)


@pytest.mark.parametrize("value", [None, 0.0, -1e308, 1e308, 1e-320, float("inf"), float("nan")])
@pytest.mark.parametrize("step", [0, -5, 1 << 62, 10**400], ids=["zero", "negative", "large", "huge"])
def test_strange_values_are_drawn_or_left_out(value, step):
    root = drawn(*trial(0, (1, 0.5), (step, value), (3, 0.7)), *trial(1, (step, value)), *trial(2, outcome=None))
    assert not any(bad in each.get("points") for each in lines(root) for bad in ("nan", "inf"))


def test_parameters_that_the_plan_does_not_have_leave_a_gap():
    entries = [*trial(0, (1, 0.5), lr="<x>", layers=99, other="&\x00"), JournalEntry("asked", 1.0, 1, parameters={})]
    assert drawn(*entries) is not None
    assert drawn() is not None


def test_of_a_large_sweep_the_best_are_drawn_and_of_long_curves_some_reports():
    entries = [entry for number in range(MOST_TRIALS + 50) for entry in trial(number, (1, number / 9999))]
    root = drawn(*entries)
    assert len(lines(root)) == 3 * MOST_TRIALS + 1
    assert any("the best 2000 drawn" in (each.text or "") for each in root.iter())
    long = [*trial(0, *((step, 0.5) for step in range(3 * MOST_REPORTS)))]
    assert max(len(each.get("points").split()) for each in lines(drawn(*long))) <= MOST_REPORTS + 1


def test_a_trial_that_runs_again_begins_a_new_curve():
    entries = [*trial(0, (1, 0.5), (2, 0.6), outcome="failed"), JournalEntry("again", 60.0, 0), *trial(0, (1, 0.4))]
    assert [each.value for each in curves(entries)[0]] == [0.4]
