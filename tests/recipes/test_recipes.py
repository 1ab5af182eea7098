import re

import pytest

from gpurun.jobs.recipe import build as spec_of
from gpurun.jobs.recipe import read

NAMES = ("allreduce-check", "elastic", "fashion-mnist", "noop")


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_a_complete_job(recipes, name):
    spec = spec_of(read(recipes / name), {}, {})
    assert spec.name == name
    assert spec.gpus == 4
    assert spec.image == "gpurun/train:tf2.15"


@pytest.mark.parametrize("name", ("allreduce-check", "elastic", "fashion-mnist"))
def test_the_script_a_recipe_runs_is_in_its_workdir(recipes, name):
    spec = spec_of(read(recipes / name), {}, {})
    assert spec.command[0] == "python3"
    assert (recipes / name / spec.command[1]).is_file()
    assert spec.workdir == str(recipes / name / ".")


def test_the_training_recipe_keeps_checkpoints_across_restarts_and_leaves_time_to_write_one(recipes):
    spec = spec_of(read(recipes / "fashion-mnist"), {}, {})
    assert spec.outputs == "/checkpoints"
    assert spec.max_restarts > 0
    assert spec.grace_s >= 15


def test_no_recipe_is_forgotten_here(recipes):
    assert sorted(file.parent.name for file in recipes.glob("*/recipe.yaml")) == list(NAMES)


def test_requirements_are_pinned_with_a_hash_each(recipes):
    pinned = re.compile(r"[a-z0-9-]+==[0-9][a-z0-9.]* --hash=sha256:[0-9a-f]{64}")
    for file in (recipes / "images/tf2.15").glob("*.txt"):
        if not file.name.startswith("debian-"):
            lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
            assert lines and all(pinned.fullmatch(line) for line in lines), file.name


def test_what_the_extra_train_promises_is_what_the_image_has(recipes):
    promised = (recipes.parent / "pyproject.toml").read_text()
    files = ("tensorflow.txt", "horovod.txt", "horovod-source.txt")
    pinned = "".join((recipes / "images/tf2.15" / name).read_text() for name in files)
    for requirement in ("tensorflow-cpu==2.15.1", "horovod==0.28.1"):
        assert requirement in promised
        assert f"{requirement} " in pinned
    assert "mpi4py==" in pinned
