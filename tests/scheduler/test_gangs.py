"""A gang says what its job's spec and record say."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.spec import FENCE_S, PREPARE_S, Constraints, JobSpec, Wants
from gpurun.scheduler.model import Gang, by_rank, gang_of, gangs_of, new_gang

SPEC = JobSpec(
    name="n", image="i", gpus=8, command=("true",), min_gpus=2, constraints=Constraints(("pascal",), avoid=("h9",)),
    pool="vision", priority=3, preemptible=True, time_limit_s=60.0, grace_s=7.0,
)  # fmt: skip
RECORD = JobRecord(
    id="j-00000001", name="n", owner="me", owner_uid=1, inventory="/i", gpus=8, state=State.QUEUED, submitted_s=5.0,
    queued_s=6.0, attempt=2, avoid=("h1",),
)  # fmt: skip
GANG = Gang(
    id="j-00000001", gpus=8, submitted_s=5.0, wants=SPEC.wants, start_allowance_s=PREPARE_S,
    stop_allowance_s=7.0 + FENCE_S, attempts=2, requeued=True, avoid=("h1",),
)  # fmt: skip


def test_a_gang_is_made_of_spec_and_record():
    assert gang_of(RECORD, SPEC.wants) == GANG
    first = GANG.but(submitted_s=1.0, attempts=0, requeued=False, avoid=())
    assert new_gang(SPEC, job=GANG.id, submitted_s=1.0) == first
    assert gang_of(RECORD.but(attempt=0, avoid=(), submitted_s=1.0), SPEC.wants) == first


def test_a_rehearsal_is_one_gpu_where_the_gang_may_run():
    spec = replace(SPEC, constraints=replace(SPEC.constraints, gpus_per_host=4))
    one = GANG.but(gpus=1).wanting(min_gpus=1)
    assert gang_of(RECORD.but(rehearsal="due"), spec.wants) == one
    assert gang_of(RECORD.but(rehearsal="passed"), spec.wants) == one, "its GPU is not free yet"
    assert gang_of(RECORD, spec.wants).gpus == 8
    assert spec.rehearsal.wants == replace(spec.wants.for_one, time_limit_s=None)


def test_many_gangs_are_as_if_made_one_by_one():
    """Also of equal wishes that are not the same object, and of wishes that nobody else keeps."""
    jobs = [
        (RECORD.but(id=f"j-{n:08x}", submitted_s=float(-n)), replace(SPEC, priority=n % 7)) for n in range(200)
    ]  # fmt: skip
    found = list(gangs_of((record, spec.wants) for record, spec in jobs))
    history = {"attempts": GANG.attempts, "requeued": GANG.requeued, "avoid": GANG.avoid, "kept": GANG.kept}
    assert found == [
        new_gang(spec, job=record.id, submitted_s=record.submitted_s).but(**history) for record, spec in jobs
    ]


@pytest.mark.parametrize("seed", range(20))
def test_sorted_by_rank_is_sorted_by_each_ones_rank(seed):
    dice = random.Random(seed)
    gangs = [
        Gang(
            f"j-{number:04}", 1, float(dice.randrange(5)), Wants(priority=dice.randrange(-2, 3)),
            requeued=dice.random() < 0.3,
        )
        for number in dice.sample(range(1000), 60)
    ]  # fmt: skip
    assert by_rank(gangs) == sorted(gangs, key=lambda gang: gang.rank)


@pytest.mark.parametrize("name", Gang.__struct_fields__)
def test_a_gang_has_all_fields_and_cannot_be_changed(name):
    gang = gang_of(RECORD, SPEC.wants)
    assert hash(gang) == hash(GANG)
    getattr(gang, name)
    with pytest.raises(AttributeError):
        setattr(gang, name, None)
