"""What a refused claim means for the next passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from gpurun.jobs.record import GpuHolder, HostRefusal, JobRecord, State
from gpurun.leases.lease import FIRST_PAUSE_S, FORGET_S, LONGEST_PAUSE_S, active, next_try_s, remember
from gpurun.msgspec_types import ready

BOB = GpuHolder((2, 3), "j-0000000b", 1, "bob", 1002, "head-2")


def record(uid: int = 1000, refusals: tuple[HostRefusal, ...] = ()) -> JobRecord:
    return JobRecord(
        id="j-0000000a", name="a", owner="alice", owner_uid=uid, inventory="/i.yaml", gpus=2, state=State.QUEUED,
        submitted_s=0.0, queued_s=0.0, refusals=refusals,
    )  # fmt: skip


def refused_gpus(records: Iterable[JobRecord], uid: int, now_s: float) -> Mapping[str, tuple[int, ...]]:
    """Host → GPUs that this user's gangs must not use now."""
    found: dict[str, set[int]] = {}
    for refusal in active(records, uid, now_s):
        found.setdefault(refusal.host, set()).update(refusal.holder.gpus)
    return {host: tuple(sorted(gpus)) for host, gpus in sorted(found.items())}


def test_a_refused_gpu_counts_as_taken_for_a_few_seconds():
    refusals = remember((), {"gpu-1": [BOB]}, now_s=100.0)
    assert refused_gpus([record(refusals=refusals)], 1000, 101.0) == {"gpu-1": (2, 3)}
    assert next_try_s([record(refusals=refusals)], 1000, 101.0) == 100.0 + FIRST_PAUSE_S
    assert refused_gpus([record(refusals=refusals)], 1000, 100.0 + FIRST_PAUSE_S) == {}
    assert next_try_s([record(refusals=refusals)], 1000, 100.0 + FIRST_PAUSE_S) is None


def test_each_refusal_of_a_host_counts_twice_as_long_up_to_a_minute():
    refusals, now_s, pauses = (), 0.0, []
    for _ in range(7):
        refusals = remember(refusals, {"gpu-1": [BOB]}, now_s=now_s)
        pauses.append(refusals[0].pause_s)
        now_s = refusals[0].until_s + 0.5
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    assert len(refusals) == 1


def test_an_old_refusal_is_forgotten():
    old = remember((), {"gpu-1": [BOB]}, now_s=0.0)
    later = old[0].until_s + FORGET_S
    assert remember(old, {"gpu-2": [BOB]}, now_s=later)[0].host == "gpu-2"
    assert remember(old, {"gpu-1": [BOB]}, now_s=later)[0].pause_s == FIRST_PAUSE_S


def test_refusals_of_one_user_keep_nobody_else_from_a_gpu():
    mallory = record(uid=666, refusals=remember((), {"gpu-1": [BOB]}, now_s=100.0))
    assert refused_gpus([mallory], 1000, 101.0) == {}
    assert next_try_s([mallory], 1000, 101.0) is None


def test_neither_a_clock_that_was_set_back_nor_a_false_time_keeps_a_gpu_taken():
    far = replace(remember((), {"gpu-1": [BOB]}, now_s=0.0)[0], until_s=1e18)
    assert refused_gpus([record(refusals=(far,))], 1000, 100.0) == {}
    assert refused_gpus([record(refusals=(replace(far, until_s=float("nan")),))], 1000, 100.0) == {}
    soon = replace(far, until_s=100.0 + LONGEST_PAUSE_S)
    assert refused_gpus([record(refusals=(soon,))], 1000, 100.0) == {"gpu-1": (2, 3)}


def test_several_holders_on_one_host_and_several_jobs_add_up():
    carol = GpuHolder((0,), head="head-3")
    refusals = remember((), {"gpu-1": [BOB, carol], "gpu-2": [BOB]}, now_s=100.0)
    other = remember((), {"gpu-1": [GpuHolder((1,), "j-0000000c", 1, "carol")]}, now_s=100.0)
    found = refused_gpus([record(refusals=refusals), record(refusals=other)], 1000, 101.0)
    assert found == {"gpu-1": (0, 1, 2, 3), "gpu-2": (2, 3)}


def test_a_holder_in_words():
    assert BOB.words == "job j-0000000b of bob on head-2"
    assert GpuHolder((0,)).words == "an unknown job"
    assert GpuHolder((0,), user="eve", process="python3 of eve (pid 7)").words == "python3 of eve (pid 7)"


def test_a_refusal_that_an_older_version_wrote_is_read():
    older = msgspec.json.decode(msgspec.json.encode(HostRefusal("gpu-1", BOB, until_s=7.0, pause_s=5.0)))
    del older["holder"]["process"]
    assert msgspec.convert(older, ready(HostRefusal)).holder == BOB


def test_what_a_host_said_of_other_gpus_holds_on():
    """Two jobs of another head hold one GPU each: the gang went from one to the other, 29 times in 42 s."""
    first, second = replace(BOB, gpus=(0,)), replace(BOB, gpus=(1,), job="j-0000000c")
    refusals = remember((), {"gpu-1": [first]}, now_s=100.0)
    refusals = remember(refusals, {"gpu-1": [second]}, now_s=101.0)
    assert refused_gpus([record(refusals=refusals)], 1000, 102.0) == {"gpu-1": (0, 1)}
    again = remember(refusals, {"gpu-1": [replace(first, job="j-0000000d")]}, now_s=105.5)
    assert {(each.holder.job, each.holder.gpus) for each in again} == {("j-0000000d", (0,)), (second.job, (1,))}
    assert len(remember(again, {"gpu-1": [second]}, now_s=200.0)) == 1
