"""What a person asks for becomes a plan, and a plan jobs."""

from __future__ import annotations

import json

import pytest

from gpurun.errors import BadInput
from gpurun.jobs.recipe import read_recipe
from gpurun.jobs.spec import JobSpec
from gpurun.studies.sweep_plan import Asha, Wish, job_of, longest_point
from gpurun.studies.trials import Metric

TEMPLATE = JobSpec(name="n", image="i:1", gpus=1, command=("train",), env={"A": "b"})
LR = {"lr": ("0.1", "0.01")}


def plan(**wish):
    return Wish(**wish).plan(TEMPLATE, "/i.yaml", 1.0)


def test_a_grid_has_as_many_trials_as_points():
    found = plan(grid=LR, space={"d": ("1", "2", "3")}, metric="loss:min", stop="asha:min=2,factor=4")
    assert (found.search, found.trials, found.metric, found.stop) == ("grid", 6, Metric("loss", False), Asha(2, 4))
    assert plan(grid=LR, stop="none").stop is None


def test_points_are_drawn_from_ranges_and_from_lists():
    assert plan(random=7, space={"lr": ("log:1e-5..1",)}, grid={"o": ("a", "b")}).trials == 7
    assert plan(tpe=9, space={"lr": ("0..1",)}, metric="accuracy").metric == Metric("accuracy", True)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({}, "the sweep has no parameter"),
        ({"grid": {"lr": ("0..1",)}}, "a grid needs a list"),
        ({"tpe": 3, "grid": LR}, "by a metric"),
        ({"grid": LR, "stop": "asha"}, "by a metric"),
        ({"random": 3, "tpe": 3, "grid": LR, "metric": "a"}, "two ways"),
        ({"grid": LR, "space": LR}, "given twice"),
        ({"grid": LR, "metric": "a b"}, "not a metric"),
        ({"grid": LR, "metric": "a:most"}, "not a metric"),
        ({"grid": LR, "metric": "a", "stop": "median"}, "not a stop rule"),
        ({"grid": LR, "metric": "a", "stop": "asha:factor=1"}, "not a stop rule"),
        ({"grid": LR, "metric": "a", "stop": "asha:min=0"}, "not a stop rule"),
        ({"grid": LR, "metric": "a", "stop": "asha:min=1,min=2"}, "not a stop rule"),
        ({"grid": LR, "metric": "a", "stop": "asha:x=1"}, "not a stop rule"),
    ],
)
def test_what_contradicts_itself_is_refused(wish, said):
    with pytest.raises(BadInput, match=said):
        plan(**wish)


def test_a_trials_job_is_told_its_parameters_in_every_way():
    found = plan(grid={"lr": ("0.1",), "use-bias": ("true",)}, as_flags=True)
    job = job_of(found, "s-1", 3, {"lr": 0.1, "use-bias": True})
    assert job.command == ("train", "--lr=0.1", "--use-bias=true") and job.name == "n-3"
    assert json.loads(job.env["GPURUN_PARAMETERS"]) == {"lr": 0.1, "use-bias": True}
    assert (job.env["GPURUN_PARAMETER_LR"], job.env["GPURUN_PARAMETER_USE_BIAS"]) == ("0.1", "true")
    assert (job.env["GPURUN_TRIAL"], job.env["A"], job.max_restarts) == ("s-1/3", "b", 2)
    assert job_of(plan(grid=LR), "s-1", 0, {"lr": 0.1}).command == ("train",)


def test_the_longest_point():
    assert longest_point(plan(grid={"a": ("1", "x" * 50, "3")})) == {"a": "x" * 50}


def test_a_recipe_has_a_sweep_that_submit_does_not_see(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "image: i:1\ngpus: 1\ncommand: train\n"
        "sweep: {grid: {lr: [0.1, 0.01], no: [yes, no]}, metric: accuracy:max, max_parallel: 4}\n"
    )
    found = read_recipe(tmp_path)
    assert "sweep" not in found.given
    assert found.sweep == {
        "grid": {"lr": ("0.1", "0.01"), "no": ("yes", "no")}, "metric": "accuracy:max", "max_parallel": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    "sweep", ["[]", "7", "{gird: {}}", "{grid: 3}", "{random: 0}", "{max_parallel: x}", "{seed: -1}"]
)
def test_a_recipes_sweep_that_is_wrong_is_named(tmp_path, sweep):
    (tmp_path / "recipe.yaml").write_text(f"image: i:1\ngpus: 1\ncommand: train\nsweep: {sweep}\n")
    with pytest.raises(BadInput, match=r"recipe\.yaml"):
        read_recipe(tmp_path)
