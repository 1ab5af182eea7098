"""What a campaign is: sizes, names, the jobs of each size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpurun.errors import BadInput, NeverFits
from gpurun.inventory.read import load_inventory
from gpurun.jobs.recipe import read_recipe
from gpurun.jobs.spec import JobSpec, Roles
from gpurun.scaling.model import LinkRates
from gpurun.studies.campaign_plan import CampaignPlan, RunRecord, check_name, given_for, parse_sizes
from gpurun.studies.campaigns import plan_of

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 1, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-4]": {}}}}
"""
RECIPE = """\
name: bench
image: i:1
launcher: tensorflow
gpus: 4
roles: {ps: 2}
min_gpus: 4
command: [python3, train.py]
"""


@pytest.fixture
def inventory(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return load_inventory(tmp_path / "inventory.yaml")


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return read_recipe(tmp_path / "recipe.yaml")


def asked(recipe, inventory, sizes, launchers=(), **changes):
    given = {"repeat": 2, "rate": None, "rates": LinkRates(), "name": None, **changes}
    return plan_of(recipe, inventory, {}, sizes=sizes, launchers=launchers, **given)


@pytest.mark.parametrize(
    "line", ["torchrun --nnodes=1:3 --nproc_per_node=1 t.py", "horovodrun -np 3 --min-np 1 --max-np 3 python3 t.py"]
)
def test_a_job_of_a_campaign_has_the_size_that_it_measures_whatever_its_command_says(tmp_path, inventory, line):
    (tmp_path / "recipe.yaml").write_text(f"image: i:1\ncommand: {line}\n")
    said = []
    plan = asked(read_recipe(tmp_path / "recipe.yaml"), inventory, (1, 2, 3, 4), told=said.append)
    assert all((job.min_gpus, job.reforms) == (None, False) for job in plan.jobs)
    assert plan.jobs[-1].gpus == 3 and [each.gpus for each in plan.refused][-1] == 4
    assert any("no job of the campaign is elastic" in text for text in said) and not any(
        "job is elastic:" in text for text in said
    )


def test_sizes_are_numbers_in_order():
    assert parse_sizes("4,1, 2") == (1, 2, 4)


@pytest.mark.parametrize(
    "text", ["", ",", "0", "-1", "1,,2", "a", "1.5", "1,1", "9999999999", "²", "1;2", "\x1b[2J", "1" * 99,
             ",".join(map(str, range(1, 66)))],
)  # fmt: skip
def test_what_is_no_size_is_refused(text):
    with pytest.raises(BadInput, match="--gpus"):
        parse_sizes(text)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a" * 65, "a\n", "-x", "é", "\0"])
def test_what_is_no_name_of_a_folder_is_refused(name):
    with pytest.raises(BadInput, match="--name"):
        check_name(name)


def test_launchers_and_sizes_take_turns(recipe, inventory):
    plan = asked(recipe, inventory, (1, 2), ("horovod", "tensorflow"))
    first = [
        RunRecord("horovod", 1, 1),
        RunRecord("horovod", 2, 1),
        RunRecord("tensorflow", 1, 1),
        RunRecord("tensorflow", 2, 1),
    ]
    assert list(plan.runs()) == [*first, *(replace(run, number=2) for run in first)]
    assert plan.job(first[3]).name == "bench-tensorflow-2-1"
    assert {plan.job(run).gpus for run in first} == {1, 2}


def test_how_gpurun_reads_the_command_is_told_once_for_each_launcher(recipe, inventory):
    said = []
    given = {**recipe.given, "command": ("torchrun", "--max-restarts=3", "train.py")}
    recipe = replace(recipe, given={key: value for key, value in given.items() if key not in ("launcher", "roles")})
    asked(recipe, inventory, (1, 2), ("torchrun", "tasks"), told=said.append)
    assert [text.partition(";")[0] for text in said if text.startswith("gpurun")] == [
        "gpurun starts the ranks (torchrun)", "gpurun starts the ranks (tasks)"
    ]  # fmt: skip
    assert sum("--max-restarts=3" in text for text in said) == 1


def test_servers_keep_their_share_of_the_workers_and_other_launchers_have_none(recipe, inventory):
    plan = asked(recipe, inventory, (1, 2, 4), ("horovod", "tensorflow"))
    found = {(spec.launcher, spec.gpus): spec for spec in plan.jobs}
    assert {gpus: found["tensorflow", gpus].roles.ps for gpus in (1, 2, 4)} == {1: 1, 2: 1, 4: 2}
    assert all(found["horovod", gpus].roles is None for gpus in (1, 2, 4))
    assert all(spec.min_gpus is None for spec in plan.jobs)


def test_settings_of_horovod_stay_with_horovod():
    given = {"gpus": 2, "horovod": 1, "controller": "mpi", "rehearse_s": 3.0}
    assert given_for(given, 4, has_roles=False, has_knobs=True) == {"gpus": 2, "horovod": 1, "controller": "mpi"}
    assert given_for(given, 4, has_roles=False, has_knobs=False) == {"gpus": 2}
    without = given_for({"roles": Roles(ps=3)}, 2, has_roles=True, has_knobs=False)
    assert without["roles"].ps == 3  # the recipe does not say for how many GPUs


def test_a_size_that_never_fits_is_kept_with_its_reason_and_others_run(recipe, inventory):
    plan = asked(recipe, inventory, (2, 8))
    assert [spec.gpus for spec in plan.jobs] == [2]
    (refused,) = plan.refused
    assert (refused.gpus, refused.code) == (8, 3) and "8" in refused.reason


def test_if_no_size_fits_nothing_begins(recipe, inventory):
    with pytest.raises(NeverFits):
        asked(recipe, inventory, (8, 16))
    with pytest.raises(BadInput, match="no launcher"):
        asked(recipe, inventory, (1,), ("nosuch",))
    with pytest.raises(BadInput, match="no image"):
        asked(None, inventory, (1,))


def test_the_same_question_is_known_again_whatever_the_code_is_now():
    one = JobSpec("n", "i:1", 1, ("train",), image_id="a", code="b")
    plan = CampaignPlan("n", (one,), "/i.yaml", 3, 1.0)
    again = replace(plan, created_s=2.0, jobs=(replace(one, image_id="", code=""),))
    assert plan.asks_the_same_as(again)
    assert not plan.asks_the_same_as(replace(plan, repeat=2))
    assert not plan.asks_the_same_as(replace(plan, jobs=(replace(one, command=("other",)),)))
    assert not plan.asks_the_same_as(replace(plan, rates=LinkRates(rack=1e9)))
