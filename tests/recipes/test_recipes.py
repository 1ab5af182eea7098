import re

import pytest

from gpurun.jobs.recipe import build_spec as spec_of
from gpurun.jobs.recipe import read_recipe
from gpurun.launch.launchers import settled

NAMES = (
    "allreduce-check", "elastic", "fashion-mnist", "fashion-mnist-horovod-torch", "fashion-mnist-jax",
    "fashion-mnist-keras", "fashion-mnist-mpi", "fashion-mnist-mwms", "fashion-mnist-ps", "fashion-mnist-torch",
    "gradient-compression", "noop", "sweep", "synthetic-benchmark",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_a_complete_job(recipes, build, name):
    spec, _ = settled(spec_of(read_recipe(recipes / name), {}, {}), is_named=True)
    assert spec.name == name
    assert spec.gpus == (1 if name == "sweep" else 4)
    assert spec.image in build.IMAGE.values()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "noop"])
def test_the_script_a_recipe_runs_is_in_its_workdir(recipes, name):
    spec, _ = settled(spec_of(read_recipe(recipes / name), {}, {}), is_named=True)
    assert spec.command[0] == "python3"
    (script,) = [word for word in spec.command if word.endswith(".py")]
    assert (recipes / name / script).is_file()
    assert spec.workdir == str(recipes / name / ".")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("fashion-mnist")])
def test_a_training_recipe_keeps_checkpoints_across_restarts_and_leaves_time_to_write_one(recipes, name):
    spec = spec_of(read_recipe(recipes / name), {}, {})
    assert spec.outputs == "/checkpoints"
    assert spec.max_restarts > 0
    assert spec.grace_s >= 15


def test_no_recipe_is_forgotten_here(recipes):
    assert sorted(file.parent.name for file in recipes.glob("*/recipe.yaml")) == list(NAMES)


def test_requirements_are_pinned_with_a_hash_each(recipes):
    pinned = re.compile(r"[a-z0-9-]+==[0-9][a-z0-9.]* --hash=sha256:[0-9a-f]{64}")
    lists = [file for file in (recipes / "images").glob("*/*.txt") if not file.name.startswith("debian")]
    assert {file.name for file in lists} >= {"tensorflow.txt", "torch.txt", "build.txt"}
    for file in lists:
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
