"""What people get wrong, once for each launcher: sizes, a program that the image lacks, ranks that never join."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decide_examples import GANG, SPEC, T, container, end_of, rank

from gpurun.errors import BadInput
from gpurun.jobs.recipe import build_spec, read_recipe
from gpurun.jobs.record import State
from gpurun.launch.launchers import NAMES, launcher_of, settled
from gpurun.launch.output import Line
from gpurun.supervisor.verdict.decide import by_launcher, decide, with_last_words
from gpurun.supervisor.verdict.hang import Hang

OVER_SSH = [name for name in NAMES if launcher_of(replace(SPEC, launcher=name)).argv is not None]
BY_GPURUN = [name for name in NAMES if name not in OVER_SSH]


def spec_of(launcher, command=("train.py",)):
    return settled(replace(SPEC, launcher=launcher, command=command), is_named=True)[0]


def gang_of(launcher, **seen):
    spec = spec_of(launcher)
    return spec, replace(GANG, has_launcher=launcher in OVER_SSH, roles=spec.roles, **seen)


@pytest.mark.parametrize("launcher", NAMES)
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("constraints: {gpus_per_host: 2}", "3 GPUs cannot be split over hosts with exactly 2 GPUs each"),
        ("min_gpus: 4", r"min_gpus \(4\) is more than gpus \(3\)"),
        ("gpus: 0", "gpus"),
        ("gpus: -1", "gpus"),
        ("gpus: 1000000000000", "gpus"),
        ("gpus: 'three; true'", "gpus"),
    ],
)
def test_a_size_that_cannot_be_is_refused(tmp_path, launcher, line, why):
    lines = [f"launcher: {launcher}", "image: i", "command: [x]", *([] if line.startswith("gpus") else ["gpus: 3"])]
    (tmp_path / "recipe.yaml").write_text("\n".join([*lines, line]) + "\n")
    with pytest.raises(BadInput, match=why) as refused:
        build_spec(read_recipe(tmp_path), {}, {})
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("launcher", [name for name in NAMES if name != "tensorflow"])
def test_unequal_numbers_of_ranks_are_a_size_like_any_other(tmp_path, launcher):
    (tmp_path / "recipe.yaml").write_text(f"launcher: {launcher}\nimage: i\ncommand: [x]\ngpus: 3\nmin_gpus: 2\n")
    assert settled(build_spec(read_recipe(tmp_path), {}, {}), is_named=True)[0].gpus == 3


@pytest.mark.parametrize("launcher", NAMES)
def test_a_program_that_the_image_lacks_is_named_whatever_started_the_rank(launcher):
    spec, seen = gang_of(launcher, ranks=[rank(0, "a"), rank(1, "b", 127)])
    lacks = spec.command[0]
    said = Line(1, "stderr", f"/gpurun/bin/rank: 144: exec: {lacks}: not found")
    end = with_last_words(end_of(decide(seen)), [said], spec)
    assert (end.outcome, end.code, end.failure.exit_code, end.failure.rank) == (State.FAILED, 2, 127, 1)
    assert end.reason.startswith(f"the image {spec.image} has no {lacks}: ") and not end.suspects


@pytest.mark.parametrize("launcher", OVER_SSH)
def test_a_launcher_that_the_image_lacks_is_named(launcher):
    spec, seen = gang_of(launcher, exits={"a": container(127)}, has_launchers_log=True)
    said = Line(None, "stderr", f"/gpurun/bin/launch: 7: exec: {launcher_of(spec).program}: not found")
    end = by_launcher(seen, [said], spec, ["a", "b"])
    assert (end.code, end.failure.exit_code, end.suspects) == (2, 127, ())
    lacks = f"the image {spec.image} has no {launcher_of(spec).program}"
    assert end.reason == f"{lacks}: choose another --launcher, or use an image of recipes/images"


@pytest.mark.parametrize("launcher", NAMES)
def test_a_rank_that_never_joins_the_others_ends_the_gang_when_it_hangs_and_is_named(launcher):
    """Such as a script that never calls `init_process_group`: it returns 0, and the others wait for it."""
    spec, seen = gang_of(launcher, ranks=[rank(0, "a"), rank(1, "b", 0, T - 60)])
    assert decide(seen) is None, "one rank may be done before another"
    end = end_of(decide(replace(seen, hung=Hang("no rank has printed for 60 s"))))
    assert (end.outcome, end.code, end.failure.kind, end.suspects) == (State.FAILED, 1, "hang", ())
    assert end.ladder, "those that wait are ended"
    assert end.reason.endswith("; 1 of 2 ranks have already returned 0, including rank 1")
    assert with_last_words(end, [], spec) == end


@pytest.mark.parametrize("launcher", BY_GPURUN)
def test_ranks_that_all_return_0_without_ever_joining_are_a_success(launcher):
    """Nobody can know what they were for."""
    _, seen = gang_of(launcher, ranks=[rank(0, "a", 0), rank(1, "b", 0)])
    assert end_of(decide(seen)).outcome is State.SUCCEEDED
