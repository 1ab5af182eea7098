"""An idle gang: counted by what hosts report, whatever they report; told, and ended as its pool says."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from decide_examples import GANG, T, container, end_of, rank
from hypothesis import given
from hypothesis import strategies as st

from gpurun.history.row import outcome_of
from gpurun.inventory.model import Pool, idle_rules
from gpurun.jobs.events import warnings_of
from gpurun.jobs.folder import read_use, write_use
from gpurun.jobs.record import Activity, GpuUse, JobRecord, Restart, Setback, State
from gpurun.jobs.spec import NotifyWish
from gpurun.state.boot import ClockReading
from gpurun.state.clock import HeadClock
from gpurun.supervisor import health
from gpurun.supervisor.health import GpuUseMeter, HealthWatch, IdleWatch
from gpurun.supervisor.verdict import ends
from gpurun.supervisor.verdict.decide import RETURN_S, decide
from gpurun.supervisor.verdict.idle import (
    FRESH_S,
    GAP_S,
    ActivityCount,
    IdlePolicy,
    IdleRow,
    RankTold,
    rank_told,
)

ONE, TWO = ("a", 0), ("b", 0)
OVER = ends.End(State.TIMED_OUT, "the job ran longer than its time limit of 1h", 1)
BOTH = {ONE, TWO}


def reported(count, times, *, gpus=(ONE, TWO), percent=0.0, sampled_s=30.0):
    for at_s in times:
        count.add_use(dict.fromkeys(gpus, (percent, sampled_s)), BOTH, float(at_s))
    return count


# -- the row ------------------------------------------------------------------------------------------------


def test_a_row_is_the_time_in_which_all_gpus_were_idle():
    row = IdleRow()
    row.add(ONE, 0.0, 5.0, 100.0)
    assert row.seconds(BOTH) == 0.0, "the other GPU may be busy"
    row.add(TWO, 4.9, 5.0, 103.0)
    row.add(ONE, 0.0, 30.0, 130.0)
    row.add(TWO, 0.0, 30.0, 133.0)
    assert row.seconds(BOTH) == 130.0 - 98.0
    row.add(TWO, 5.0, 30.0, 163.0)
    assert row.seconds(BOTH) == 0.0
    row.add(ONE, 0.0, 30.0, 160.0)
    row.add(TWO, 0.0, 30.0, 193.0)
    row.add(ONE, 0.0, 30.0, 190.0)
    assert row.seconds(BOTH) == 190.0 - 163.0


def test_time_without_a_report_is_no_idle_time():
    row = IdleRow()
    for at_s in (30.0, 60.0, 200.0, 230.0):
        row.add(ONE, 0.0, 30.0, at_s)
    assert row.seconds({ONE}) == 30 + 30 + 45 + 30, "a sample may take one and a half seconds"
    row.add(ONE, 0.0, 30.0, 230.0 + GAP_S + 60)
    assert row.seconds({ONE}) == 30.0, "nobody knows what it did meanwhile"


def test_only_fresh_reports_of_all_gpus_prove_anything():
    row = IdleRow(before_s=1e6)
    assert not row.is_fresh(BOTH, 0.0)
    row.add(ONE, 0.0, 30.0, 100.0)
    assert row.seconds(BOTH) == 1e6
    assert not row.is_fresh(BOTH, 100.0)
    row.add(TWO, 0.0, 30.0, 110.0)
    assert row.is_fresh(BOTH, 100.0 + FRESH_S)
    assert not row.is_fresh(BOTH, 100.1 + FRESH_S)
    assert not row.is_fresh(set(), 100.0)


WEIRD = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 1e9, -1.0, 0.0, 30.0])
REPORTS = st.lists(st.tuples(st.sampled_from([ONE, TWO]), st.none() | st.floats(0, 100), WEIRD, st.floats(0, 1e4)))


@given(reports=REPORTS)
def test_a_row_is_never_longer_than_the_time_that_passed(reports):
    """Also with samples without end, and moments that go backwards."""
    row, count = IdleRow(), ActivityCount(Activity())
    for gpu, percent, sampled_s, at_s in reports:
        row.add(gpu, percent, sampled_s, at_s)
        count.add_use({gpu: (percent, sampled_s)}, BOTH, at_s)
    times = [at_s for *_, at_s in reports]
    most_s = max(times) - min(times) + 60.0 if times else 0.0
    assert 0.0 <= row.seconds(BOTH) <= most_s
    assert 0.0 <= count.did.row_s <= most_s
    assert 0.0 <= count.did.idle_s <= most_s


@given(reports=REPORTS.filter(bool))
def test_a_busy_gpu_ends_each_row(reports):
    row = IdleRow(before_s=500.0)
    for gpu, percent, sampled_s, at_s in reports:
        row.add(gpu, percent, sampled_s, at_s)
    row.add(ONE, 100.0, 30.0, 2e4)
    assert row.seconds(BOTH) == 0.0


# -- what ranks report --------------------------------------------------------------------------------------


def test_hosts_that_are_heard_again_one_after_the_other_neither_repeat_nor_begin_a_row():
    count = ActivityCount(Activity())
    for at_s in range(30, 3600, 30):
        reported(count, [at_s], gpus=[ONE])
        reported(count, [at_s + 1], gpus=[TWO])
    count.add_ranks([RankTold(5)], 3570.0)
    before = count.did
    count.tell()
    reported(count, [3780], gpus=[ONE])  # the head could hear no host for three minutes
    assert (count.did.row_s, count.did.moved_s, count.did.told_s) == (before.row_s, before.moved_s, before.row_s)
    reported(count, [3781], gpus=[TWO])
    assert count.did.row_s == before.row_s + 44, "only what the reports are about"
    assert count.did.idle_s == count.did.row_s - before.row_s, "each second counts once"
    assert count.did.moved_s == before.moved_s, "the step is no older than it was"


def test_hosts_that_report_in_turn_prove_nothing_about_the_gang():
    count = ActivityCount(Activity())
    for number, at_s in enumerate(range(30, 7200, 30)):
        reported(count, [at_s], gpus=[TWO if number // 8 % 2 else ONE])
    assert count.did.row_s <= 1800.0, "at most half a minute around each change is covered by both"


def test_a_gang_that_shrinks_was_not_idle_while_its_lost_gpus_were_busy():
    count = ActivityCount(Activity(first_step_s=1.0))
    for at_s in range(30, 7200, 30):
        reported(count, [at_s], gpus=[ONE])
        reported(count, [at_s + 1], gpus=[TWO], percent=90.0)
    for at_s, row_s in ((7200, 30.0), (7230, 60.0)):
        count.add_use({ONE: (0.0, 30.0)}, {ONE}, float(at_s))
        assert (count.did.row_s, count.did.idle_s) == (row_s, row_s)


def test_an_idle_gang_that_shrinks_stays_idle_and_one_that_grows_begins_anew():
    count = reported(ActivityCount(Activity()), range(30, 3601, 30))
    assert count.did.row_s == 3600.0
    count.add_use({ONE: (0.0, 30.0)}, {ONE}, 3630.0)
    assert count.did.row_s == 3630.0
    count.tell()
    reported(count, [3660, 3690])
    assert (count.did.row_s, count.did.told_s) == (60.0, None), "the new GPU has just come"


@pytest.mark.parametrize(
    "odd",
    [{}, [], None, "7", 7, {"step": None}, {"step": "7"}, {"step": True}, {"step": 1.5}, {"step": 1 << 70},
     {"saved_s": math.nan}, {"saved_s": -1.0}, {"saved_s": "9"}, {"saved_s": math.inf}, {"saved_s": []}],
)  # fmt: skip
def test_odd_files_of_a_rank_say_nothing(odd):
    assert rank_told({"progress": odd, "checkpoint": odd}) == RankTold()


def test_the_first_step_begins_goodput_and_idle_time_before_it_is_start():
    count = reported(ActivityCount(Activity()), range(30, 301, 30))
    assert count.did.idle_s == 300.0
    count.add_ranks([RankTold(), RankTold(step=1)], 301.0)
    assert (count.did.first_step_s, count.did.idle_s, count.did.moved_s) == (301.0, 0.0, 300.0)
    reported(count, (330, 360))
    assert (count.did.idle_s, count.did.row_s) == (60.0, 360.0)


def test_a_host_that_does_not_answer_is_no_progress():
    """The rank with the furthest step is on it; it is back later, at the same step."""
    count = ActivityCount(Activity())
    both, one = [RankTold(step=9), RankTold(step=10, saved=5)], [RankTold(step=9)]
    count.add_ranks(both, 1.0)
    reported(count, (30, 60, 90))
    for ranks, is_whole in ((one, False), (both, True), ([], False), ([], True), (both, True)):
        count.add_ranks(ranks, 100.0, is_whole=is_whole)
        assert (count.did.moved_s, count.did.last_step, count.did.last_saved) == (0.0, 10, 5)
    count.add_ranks([RankTold(step=11)], 110.0, is_whole=False)
    assert count.did.moved_s == 90.0
    count.add_ranks([RankTold(step=0)], 120.0)
    assert (count.did.last_step, count.did.step) == (0, 11), "a new epoch may count from 0"


def test_steps_of_an_earlier_attempt_are_repeated():
    count = ActivityCount(Activity(before=100, before_end="xid"))
    count.add_ranks([RankTold()], 10.0)
    count.add_ranks([RankTold(step=50)], 20.0)
    count.add_ranks([RankTold(step=90, saved=60, saved_s=4.0)], 60.0)
    reported(count, (30, 60))
    assert (count.did.first_step_s, count.did.repeated_s, count.did.idle_s, count.did.saved_s) == (20.0, 40.0, 0.0, 0.0)
    count.add_ranks([RankTold(step=101, saved=60, saved_s=4.0)], 70.0)
    count.add_ranks([RankTold(step=120, saved=110, saved_s=9.5)], 90.0)
    assert (count.did.repeated_s, count.did.saved_s, count.did.step) == (40.0, 5.5, 120)
    resumed = ActivityCount(Activity(before=100))
    resumed.add_ranks([RankTold(step=101)], 20.0)
    assert resumed.did.repeated_s == 0.0


def test_a_host_that_does_not_answer_once_does_not_save_again():
    count = ActivityCount(Activity())
    count.add_ranks([RankTold(1, 1, 300.0), RankTold(1)], 1000.0)
    assert count.did.saved_s == 300.0
    count.add_ranks([RankTold(1)], 1020.0, is_whole=False)
    count.add_ranks([RankTold(2, 1, 300.0), RankTold(2)], 1040.0)
    assert count.did.saved_s == 300.0
    count.add_ranks([RankTold(2), RankTold(2)], 1060.0)  # the rank of an elastic gang has started again
    count.add_ranks([RankTold(3, 3, 10.0), RankTold(3)], 1080.0)
    assert count.did.saved_s == 310.0


def test_a_long_save_is_no_idle_time():
    count = ActivityCount(Activity())
    count.add_ranks([RankTold(step=1)], 5.0)
    reported(count, (30, 60, 90))
    count.add_ranks([RankTold(step=1, saved=1, saved_s=70.0)], 95.0)
    assert (count.did.idle_s, count.did.saved_s) == (20.0, 70.0)
    count.add_ranks([RankTold(step=2, saved=1, saved_s=1e9)], 100.0)
    assert count.did.saved_s == 170.0, "a rank cannot have saved for longer than it ran"


# -- the policy ---------------------------------------------------------------------------------------------

POOL = Pool("lab", idle_timeout_s=3600.0, idle_grace_s=600.0)


@pytest.mark.parametrize(
    ("rules", "own_s", "found"),
    [
        (Pool(""), None, None),
        (Pool(""), 60.0, IdlePolicy(60.0, 600.0, "end", "")),
        (POOL, None, IdlePolicy(3600.0, 600.0, "end", "lab")),
        (POOL, 60.0, IdlePolicy(60.0, 600.0, "end", "lab")),
        (POOL, 7200.0, IdlePolicy(3600.0, 600.0, "end", "lab")),
        (replace(POOL, idle_longer=True), 7200.0, IdlePolicy(7200.0, 600.0, "end", "lab")),
    ],
)
def test_a_jobs_own_time_is_shorter_unless_the_pool_allows_more(rules, own_s, found):
    assert IdlePolicy.of(rules, own_s) == found


def test_a_pool_has_the_rules_of_the_next_pool_above_that_has_some():
    pools = (POOL, Pool("team", parent="lab"), Pool("x", parent="y"), Pool("y", parent="x"), Pool("lone"))
    assert [idle_rules(pools, name).name for name in ("lab", "team", "x", "lone", "gone", None)] == [
        "lab", "lab", "", "", "", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("action", "did", "due"),
    [
        ("end", Activity(row_s=3599.0), None),
        ("end", Activity(row_s=3600.0), "tell"),
        ("end", Activity(row_s=3600.0, moved_s=1.0), None),
        ("end", Activity(row_s=4199.0, told_s=3600.0), None),
        ("end", Activity(row_s=4200.0, told_s=3600.0), "act"),
        ("end", Activity(row_s=4200.0, told_s=3600.0, moved_s=3000.0), None),
        ("preempt", Activity(row_s=4200.0, told_s=3600.0), "act"),
        ("tell", Activity(row_s=1e9, told_s=3600.0), None),
        ("tell", Activity(row_s=3600.0), "tell"),
    ],
)
def test_the_owner_is_told_and_the_grace_passes_before_the_action(action, did, due):
    assert IdlePolicy.of(replace(POOL, idle_action=action), None).step(did) == due


# -- the meter of a supervisor ------------------------------------------------------------------------------


class Clock:
    """The head's kernel: time since the boot, and a wall clock that anybody may set."""

    def __init__(self):
        self.up_s, self.ahead_s = 1000.0, 0.0

    def read(self):
        return ClockReading("boot@machine", self.up_s, self.up_s + 1e6 + self.ahead_s)


@pytest.fixture
def gang(carry):
    """A job on two GPUs of one host, and a function that begins a supervisor at the clock's time."""

    def make(**wants):
        clock, job = Clock(), carry(**{"idle_timeout_s": 60.0, **wants})
        job.record = job.record.but(started_s=None)

        def begin():
            job.clock = HeadClock(clock.read)
            job.__dict__.pop("inventory", None)
            meter = GpuUseMeter(job)
            return meter, IdleWatch(job, meter)

        return SimpleNamespace(job=job, clock=clock, begin=begin)

    return make


def half_minutes(gang, meter, count, *, mean=0.0, most=0.0, samples=30, gpus=(0, 1)):
    for _ in range(count):
        gang.clock.up_s += 30.0
        lines = [
            {"index": gpu, "uuid": "", "samples": samples, "mean": mean, "most": most, "memory_mib": 1} for gpu in gpus
        ]
        meter.add(gang.job.hosts[0], {"gpus": lines})


def test_an_idle_job_is_told_and_then_ended_with_its_own_cause(gang, monkeypatch):
    sent = []
    monkeypatch.setattr(health, "tell", lambda job, *events, reason: sent.append((events, reason)))
    one = gang()
    meter, watch = one.begin()
    half_minutes(one, meter, 1)
    assert watch.end() is None and sent == []
    half_minutes(one, meter, 1)
    assert watch.end() is None
    ((events, reason),) = sent
    assert events == ("idle",)
    assert reason == (
        "all GPUs have been less than 5 % busy for 1m00s, and no rank has reported a step or a checkpoint "
        "(`idle_timeout` of the job: 1m00s); gpurun ends the job in 10m00s unless a GPU or a rank works"
    )
    assert list(warnings_of(one.job.folder.events, 1)) == [reason]
    half_minutes(one, meter, 19)
    assert watch.end() is None
    half_minutes(one, meter, 1)
    end = watch.end()
    assert (end.outcome, end.code, end.failure.kind, end.ladder, end.suspects) == (State.FAILED, 1, "idle", True, ())
    assert end.reason.startswith("the job was idle: all GPUs have been less than 5 % busy for 11m00s")
    assert len(sent) == 1


def test_work_ends_the_row_and_the_owner_learns_it(gang, monkeypatch):
    sent = []
    monkeypatch.setattr(health, "tell", lambda *_, **__: sent.append(1))
    one = gang()
    meter, watch = one.begin()
    half_minutes(one, meter, 2)
    watch.end()
    half_minutes(one, meter, 1, mean=1.0, most=40.0)
    assert watch.end() is None
    assert "not idle any more" in one.job.folder.events.read_text()
    assert warnings_of(one.job.folder.events, 1) == {}
    half_minutes(one, meter, 2)
    watch.end()
    assert len(sent) == 2, "a new row, a new message"
    meter.heard({one.job.hosts[0]: {"ranks": {"0": {"progress": {"step": 3}}}}})
    half_minutes(one, meter, 100)
    assert watch.end() is None
    assert len(sent) == 3, "a step begins the time anew; it does not prove GPU use"


def test_a_job_that_works_without_its_gpus_is_warned_but_not_ended(gang):
    one = gang()
    meter, watch = one.begin()
    for step in range(100):
        half_minutes(one, meter, 1)
        meter.heard({one.job.hosts[0]: {"ranks": {"0": {"progress": {"step": step}}}}})
        assert watch.end() is None
    (warning,) = warnings_of(one.job.folder.events, 1)
    assert warning.startswith("ranks report steps, but all GPUs have been less than 5 % busy for 1m00s: check that")


@pytest.mark.parametrize(
    "said",
    [
        {"mean": math.nan}, {"most": math.nan}, {"mean": -5.0}, {"most": 1e300}, {"mean": math.inf},
        {"samples": 10**9}, {"samples": 0}, {"samples": -3}, {"gpus": (0,)}, {"gpus": (0, 99)}, {"gpus": ()},
    ],
)  # fmt: skip
def test_what_is_no_report_of_all_gpus_ends_no_job(gang, said):
    one = gang()
    meter, watch = one.begin()
    half_minutes(one, meter, 500, **said)
    assert watch.end() is None
    assert warnings_of(one.job.folder.events, 1) == {}


def test_gpus_of_others_do_not_count(gang):
    one = gang()
    meter, watch = one.begin()
    for _ in range(3):
        half_minutes(one, meter, 1)
        other = {"index": 99, "uuid": "", "samples": 30, "mean": 99.0, "most": 99.0, "memory_mib": 1}
        meter.add(one.job.hosts[0], {"gpus": [other]})
        meter.add("elsewhere", {"gpus": [{**other, "index": 0}]})
    assert meter.due(watch._policy)[1].row_s == 90.0
    assert len(meter._count._row._rows) == 2


def test_a_host_that_falls_silent_ends_no_job(gang):
    one = gang()
    meter, watch = one.begin()
    half_minutes(one, meter, 3)
    watch.end()
    one.clock.up_s += 1e6
    assert watch.end() is None
    half_minutes(one, meter, 1)
    assert watch.end() is None
    assert meter.due(watch._policy)[1].row_s == 30.0


def test_a_new_supervisor_acts_only_when_all_gpus_were_reported_to_it(gang):
    one = gang()
    meter, _ = one.begin()
    half_minutes(one, meter, 50)
    meter.told_owner()
    half_minutes(one, meter, 50)
    meter.write()
    meter, watch = one.begin()
    half_minutes(one, meter, 1, gpus=(0,))
    assert watch.end() is None
    half_minutes(one, meter, 1)
    assert watch.end().failure.kind == "idle"
    one.clock.up_s += FRESH_S + 1
    assert watch.end() is None, "the host has fallen silent"


@pytest.mark.parametrize("step_s", [0.0, 86400.0, -86400.0])
@pytest.mark.parametrize(("away_s", "row_s"), [(20.0, 630.0), (GAP_S - 60, 630.0), (GAP_S + 60, 30.0)])
def test_a_new_supervisor_continues_the_row_whatever_was_done_to_the_clock(gang, monkeypatch, step_s, away_s, row_s):
    sent = []
    monkeypatch.setattr(health, "tell", lambda *_, **__: sent.append(1))
    one = gang()
    meter, watch = one.begin()
    half_minutes(one, meter, 20)
    watch.end()
    meter.write()
    one.clock.up_s += away_s
    one.clock.ahead_s += step_s
    meter, watch = one.begin()
    assert watch.end() is None, "nobody has reported to this supervisor"
    half_minutes(one, meter, 1)
    assert meter.due(watch._policy)[1].row_s == row_s
    assert watch.end() is None
    assert sent == [1], "told by the supervisor before"


def test_a_reboot_of_the_head_does_not_count_as_idle_time(gang):
    one = gang()
    meter, _ = one.begin()
    half_minutes(one, meter, 1)
    meter.write()
    one.clock.up_s = 40.0
    one.clock.read = lambda: ClockReading("another@machine", one.clock.up_s, one.clock.up_s + 1e6 + 2000.0)
    meter, watch = one.begin()
    half_minutes(one, meter, 1)
    assert watch.end() is None
    assert meter.due(watch._policy)[1].row_s in (30.0, 60.0)


def test_the_pools_rules_are_those_of_the_inventory(gang):
    one = gang(idle_timeout_s=None, pool=None)
    _, watch = one.begin()
    assert watch._policy is None
    rules = replace(POOL, idle_timeout_s=60.0, idle_grace_s=30.0, idle_action="preempt")
    meter, watch = one.begin()
    one.job.inventory = replace(one.job.inventory, pools=(rules,))
    one.job.spec = replace(one.job.spec, pool="lab")
    half_minutes(one, meter, 2)
    assert watch.end() is None
    half_minutes(one, meter, 1)
    end = watch.end()
    assert (end.outcome, end.failure, end.restart.attempt) == (State.QUEUED, None, 0)
    assert end.reason.startswith("preempted: the job was idle: ")
    record = one.job.record.but(state=State.QUEUED, restart=end.restart, reason=end.reason)
    assert outcome_of(record) == "PREEMPTED"


def test_a_rehearsal_has_no_idle_rules(gang):
    one = gang()
    one.job.record = one.job.record.but(rehearsal="due")
    meter, watch = one.begin()
    half_minutes(one, meter, 100)
    meter.heard({one.job.hosts[0]: {"ranks": {"0": {"progress": {"step": 3}}}}})
    assert watch.end() is None
    assert meter.due(IdlePolicy.of(POOL, None))[1].step is None, "its steps are done again"


@pytest.mark.parametrize(
    ("setback", "end"),
    [
        (Setback(1, "xid", "", None, None, 9, 1.0), "xid"),
        (Setback(2, "host-lost", "", None, None, None, 1.0), "host-lost"),  # attempt 2 came to no step
        (ends.setback_of(ends.failure_of(OVER), attempt=1, step=9, ran_s=1.0), "time-limit"),
        (None, "preemption"),
    ],
)
def test_an_attempt_knows_how_far_the_attempts_before_it_came(gang, setback, end):
    one = gang()
    write_use(one.job.folder, 1, GpuUse(activity=Activity(step=40, before=90)))
    one.job.lease = replace(one.job.lease, attempt=3)
    one.job.record = one.job.record.but(attempt=3, setback=setback)
    meter, _ = one.begin()
    assert meter.due(IdlePolicy.of(POOL, None))[1] == Activity(before=90, before_end=end)


def test_steps_are_kept_without_any_gpu_report(gang):
    one = gang()
    meter, _ = one.begin()
    meter.write()
    assert read_use(one.job.folder, 1) is None
    host = one.job.hosts[0]
    meter.heard({host: {"ranks": {"0": {"progress": {"step": 3}}, "9": {"progress": {"step": 10**6}}, "1": {}}}})
    assert read_use(one.job.folder, 1).activity.step == 3
    meter.heard({host: {"ranks": {"0": {"progress": {"step": 4}}}}})
    assert read_use(one.job.folder, 1).activity.step == 3, "a write each minute is enough"
    one.clock.up_s += 61.0
    meter.heard({host: {"ranks": {"0": {"progress": {"step": 5}}}}})
    assert read_use(one.job.folder, 1).activity.step == 5


def test_the_last_look_is_kept_when_hosts_are_gone(gang, monkeypatch):
    one = gang()
    watch = HealthWatch(one.job, SimpleNamespace(), SimpleNamespace(every_s=30.0))
    monkeypatch.setattr(health, "steps_told", lambda *_: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
    watch.close()


# -- the decision -------------------------------------------------------------------------------------------


IDLE = IdlePolicy.of(POOL, None).end(Activity(row_s=4200.0, told_s=3600.0), T)


def test_an_idle_gang_ends_as_its_pool_says():
    assert end_of(decide(replace(GANG, idle=IDLE))) == IDLE


@pytest.mark.parametrize(
    "more",
    [
        {"down_since": {"b": T - 5}}, {"exits": {"b": container(137)}}, {"heard_since_s": T - RETURN_S + 1},
        {"ranks": [rank(0, "a"), rank(1, "b", 3, T - 0.2)]},
    ],
    ids=["a host is silent", "a container ended", "the head was cut off", "a rank failed"],
)  # fmt: skip
def test_a_gang_that_is_ending_or_not_heard_is_not_idle(more):
    step = decide(replace(GANG, idle=IDLE, **more))
    assert step is None or end_of(step) != IDLE


def test_a_restart_of_a_failed_job_stays_a_retry():
    record = JobRecord(id="j-00000001", name="n", owner="o", owner_uid=0, inventory="/i", gpus=1, state=State.QUEUED,
                       submitted_s=0.0, queued_s=0.0, attempt=1)  # fmt: skip
    restart = Restart(9.0, 2, 3)
    assert outcome_of(record.but(restart=restart, reason="rank 0 failed")) == "RETRIED"
    failed = Setback(1, "xid", "", None, None, None, 1.0)
    assert outcome_of(record.but(restart=restart, setback=failed, reason="preempted: x")) == "RETRIED"


def test_the_wish_of_all_events_has_idle():
    assert "idle" in NotifyWish("mail", "me@example.com").on
