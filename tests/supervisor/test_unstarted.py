"""What follows an attempt whose gang could not start: another placement, or the job's end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import (
    AuthenticationFailed,
    HostFailure,
    HostKeyMismatch,
    HostNotReady,
    HostUnreachable,
    NoRoom,
)
from gpurun.inventory.model import Host
from gpurun.jobs.record import AVOID_MOST_S, JobRecord, StartFailure, State
from gpurun.jobs.spec import Constraints, JobSpec
from gpurun.remote.agent import RemoteOpFailed
from gpurun.state.boot import HeadBoot
from gpurun.state.hosts import Out
from gpurun.supervisor.verdict import causes
from gpurun.supervisor.verdict.ends import End

RECORD = JobRecord("j-00000001", "n", "o", 0, "/i", 4, State.PREPARING, 0.0, 0.0)
OUT = Out("ssh", "no route to host", 1000.0)
SIX = frozenset(f"h{number}" for number in range(1, 7))


def mount(host):
    """The data set's folder is missing: a failure that a job can bring about."""
    return HostNotReady(f"the data set 'x' cannot be mounted: /data/{host}: no such folder", kind="no-mount", host=host)


def no_shell(host):
    return HostFailure(f"the image i cannot start sh: {host}: it is not there", kind="no-command", host=host)


def docker(host, words="no such device /dev/infiniband"):
    return RemoteOpFailed(words, kind="docker", host=host)


def gone(host):
    return HostUnreachable("no route to host", host=host)


def end_of(errors, **changes):
    return End(**{
        "outcome": State.FAILED, "reason": "why", "code": 4, "by_host": {error.host or "": error for error in errors},
        **changes,
    })  # fmt: skip


class Job:
    """A job whose attempts fail one after the other."""

    def __init__(self, able=SIX, step_s=1.0):
        self.record, self.able, self.now_s, self.step_s = RECORD, able, 1000.0, step_s

    def fails(self, *errors, looks=None):
        self.record = self.record.but(attempt=self.record.attempt + 1)
        sound = {error.host: None for error in errors if error.host}
        found = causes.after(
            self.record, end_of(errors), sound if looks is None else looks, self.able, hosts=SIX, now_s=self.now_s
        )
        self.record = self.record.but(start_failures=found.failures, placements=found.placements)
        self.now_s += self.step_s
        return found.end


def fails_on(*steps, able=SIX, step_s=1.0):
    """Return the outcomes of attempts that fail one after the other, up to the job's end."""
    job, outcomes = Job(able, step_s), []
    for step in steps:
        errors, looks = step if isinstance(step, tuple) else (step, None)
        outcomes.append(job.fails(*errors, looks=looks).outcome.value)
    return " ".join(outcomes)


Q, F = "QUEUED", "FAILED"
TABLE = {
    "a mount that three hosts lack": ([[mount("h1")], [mount("h2")], [mount("h3")]], SIX, f"{Q} {Q} {F}"),
    "a mount that a whole gang lacks": ([[mount("h1"), mount("h2"), mount("h3")]], SIX, F),
    "a mount that the only host lacks": ([[mount("h1")], [mount("h1")]], {"h1"}, f"{Q} {F}"),
    "a mount that both hosts lack": ([[mount("h1")], [mount("h2")]], {"h1", "h2"}, f"{Q} {F}"),
    "a mount that one host of many lacks": ([[mount("h1")]] * 9, SIX, " ".join([Q] * 9)),
    "a refused docker create": ([[docker("h1")], [docker("h2")], [docker("h3")]], SIX, f"{Q} {Q} {Q}"),
    "a whole gang is refused": ([[docker(h) for h in sorted(SIX)]] * 3, SIX, f"{Q} {Q} {Q}"),
    "the only host refuses": ([[docker("h1")]] * 9, {"h1"}, " ".join([Q] * 9)),
    "an image without a shell": ([[no_shell("h1")], [no_shell("h2")], [no_shell("h3")]], SIX, f"{Q} {Q} {F}"),
    "the only host cannot start the image": ([[no_shell("h1")]] * 2, {"h1"}, f"{Q} {F}"),
    "a gang whose first host never starts": ([[no_shell("h2")]] * 3, {"h1", "h2"}, f"{Q} {Q} {F}"),
    "one runtime of many is broken": ([[no_shell("h1")]] * 2, SIX, f"{Q} {Q}"),
    "three causes on three hosts": ([[docker("h1")], [mount("h2")], [docker("h3", "oom")]], SIX, f"{Q} {Q} {Q}"),
    "hosts that are out do not count": ([([mount(h)], {h: OUT}) for h in sorted(SIX)], SIX, " ".join([Q] * 6)),
    "hosts that were not checked do not count": ([([mount(h)], {}) for h in sorted(SIX)], SIX, " ".join([Q] * 6)),
    "two sound hosts and one that is out": (
        [[mount("h1")], [mount("h2")], ([mount("h3")], {"h3": OUT})], SIX, f"{Q} {Q} {Q}",
    ),
    "the head is cut off": ([[gone(h) for h in sorted(SIX)]] * 3, SIX, f"{Q} {Q} {Q}"),
    "the head is cut off from its only host": ([[gone("h1")]] * 5, {"h1"}, " ".join([Q] * 5)),
    "nothing is known of who could hold it": ([[mount("h1")]] * 5, (), " ".join([Q] * 5)),
    "the head's Docker does not answer": ([[HostNotReady("the head's Docker broke off")]] * 5, SIX, " ".join([Q] * 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_ends_a_job_that_could_not_start(name):
    steps, able, outcomes = TABLE[name]
    assert fails_on(*steps, able=able) == outcomes


LASTING = {
    "a refused docker create": ([[docker("h1")], [docker("h2")], [docker("h3")]], SIX, f"{Q} {Q} {F}"),
    "a whole gang is refused": ([[docker(h) for h in sorted(SIX)]] * 2, SIX, f"{Q} {F}"),
    "the only host refuses": ([[docker("h1")]] * 2, {"h1"}, f"{Q} {F}"),
    "both hosts refuse": ([[docker("h1")], [docker("h2")]], {"h1", "h2"}, f"{Q} {F}"),
    "it was out at first": ([([docker("h1")], {"h1": OUT}), [docker("h1")], [docker("h1")]], {"h1"}, f"{Q} {Q} {F}"),
}  # fmt: skip


@pytest.mark.parametrize("name", LASTING)
def test_a_cause_that_may_pass_ends_a_job_only_if_it_lasts(name):
    steps, able, outcomes = LASTING[name]
    assert fails_on(*steps, able=able, step_s=60.0) == outcomes
    assert F not in fails_on(*steps, able=able, step_s=19.0)


@pytest.mark.parametrize("is_kept_off", [True, False], ids=["it waits", "it takes one that it avoids"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 40])
def test_an_outage_of_fifty_seconds_ends_no_job_and_a_bad_job_ends_within_ninety(count, is_kept_off):
    """Each attempt fails after a second. A pass chooses a host that the job does not avoid, if there is one."""
    for is_bad in (True, False):
        hosts = [f"h{number}" for number in range(count)]
        job, began_s = Job(hosts), 1000.0
        while is_bad or job.now_s < began_s + 50.0:
            free = [host for host in hosts if host not in job.record.avoided(job.now_s)]
            if not free and is_kept_off:
                job.now_s += 0.5
                continue
            end = job.fails(docker((free or hosts)[0]))
            if end.outcome is State.FAILED:
                break
            job.now_s = max(job.now_s, end.restart.at_s if end.restart else 0.0)
        assert (end.outcome is State.FAILED) is is_bad
        assert job.now_s - began_s < 90.0


def test_a_clock_that_is_set_makes_no_cause_last():
    """The times of a record move with the head's clock."""
    at_s, later_s = 1000.0, 1000.0 + 7200.0
    before = HeadBoot("b", 0.0)
    record = RECORD.but(boot=before.id, boot_s=before.began_s, start_failures=(
        StartFailure("h1", 1, "docker", "w", "r", at_s + 9.0, at_s, True, first_s=at_s),
    ))  # fmt: skip
    (moved,) = record.on(HeadBoot("b", 7200.0)).start_failures
    assert (moved.first_s, moved.at_s) == (later_s, later_s + 9.0)
    assert StartFailure("h1", 1, "docker", "w", "r", at_s, at_s, first_s=at_s + 9.0).since_s == at_s


NOT_THE_JOBS = [
    HostUnreachable("no answer within 15 s", host="h1"), HostKeyMismatch("its key has changed", host="h1"),
    AuthenticationFailed("it refused every key", host="h1"), NoRoom("its disk is too full", host="h1"),
    HostFailure("line 62: Bad configuration option", kind="connection", host="h1"),
    HostFailure("clock: 40 s ahead", kind="preflight", host="h1"),
    HostFailure("it calls itself 'h2'", kind="contradiction", host="h1"),
    HostNotReady("the data set 'x' cannot be mounted: /data: Stale file handle", host="h1"),
    *(
        RemoteOpFailed("x", kind=kind, host="h1")
        for kind in ("no-space", "read-only", "no-docker", "timeout", "no-route", "link-lost", "os-error", "internal",
                     "exists", "engine", "denied", "no-tool", "sshd", "not-found", "bad-request", "conflict", "prolog",
                     "a kind of tomorrow")
    ),
]  # fmt: skip


@pytest.mark.parametrize("error", NOT_THE_JOBS, ids=lambda error: error.kind)
def test_what_no_job_brings_about_never_ends_it(error):
    job = Job(able={"h1"})
    for host in (*sorted(SIX), *["h1"] * 20):
        error.host = host
        assert job.fails(error).outcome is State.QUEUED


def test_the_end_names_the_cause_and_the_hosts_and_no_host_is_at_fault():
    job = Job(step_s=30.0)
    end = [job.fails(RemoteOpFailed(f"no such device on {host}", kind="docker", host=host)) for host in sorted(SIX)][2]
    assert end.reason == "h1, h2, h3: no such device on h3; a check finds no fault on these hosts"
    assert (end.suspects, end.code, end.failure.reason) == ((), 4, "no such device on h3")
    assert end.restart is None


def test_the_first_placements_follow_at_once_and_later_ones_after_growing_pauses():
    job, pauses = Job(), []
    for number in range(1, 13):
        restart = job.fails(docker(f"h{number}", f"trouble {chr(96 + number) * 3}")).restart
        pauses.append(restart and restart.at_s - job.now_s + 1.0)
    assert pauses == [None, None, None, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0, 300.0, 300.0]


def test_a_host_that_failed_before_is_not_tried_again_at_once():
    job = Job()
    assert job.fails(gone("h1")).restart is None
    assert job.fails(gone("h1")).restart.at_s == 1001.0 + 5.0


def test_a_job_waits_for_nothing_if_all_hosts_that_failed_are_out():
    """The scheduler keeps it off them; when one returns, the job starts there at once."""
    job = Job()
    for number in range(50):
        job.now_s += 120.0
        end = job.fails(gone("h1"), gone("h2"), looks={"h1": OUT, "h2": OUT})
        assert (end.outcome, end.restart) == (State.QUEUED, None), number
        assert end.reason == "why; gpurun looks for other hosts"
        assert job.record.avoided(job.now_s) == ()


def test_a_host_that_comes_and_goes_is_tried_less_and_less_often():
    """A look finds it sound, each attempt finds it broken."""
    job, pauses = Job(), []
    for _ in range(7):
        restart = job.fails(gone("h1"), looks={"h1": OUT}).restart
        pauses.append(restart.at_s - job.now_s + 1.0 if restart else 0.0)
        job.now_s += pauses[-1] + 10.0
    assert pauses == [0.0, 10.0, 20.0, 40.0, 60.0, 60.0, 60.0]


def test_a_job_avoids_a_sound_host_for_a_while_and_longer_each_time():
    job, avoided_s = Job(), []
    for _ in range(6):
        job.fails(mount("h1"))
        (failure,) = job.record.start_failures
        avoided_s.append(failure.until_s - failure.at_s)
        assert job.record.avoided(failure.at_s + 1.0) == ("h1",)
        assert job.record.avoided(failure.until_s) == ()
        assert job.record.avoided(failure.at_s - 10 * AVOID_MOST_S) == (), "the clock was set back"
        job.now_s = failure.until_s
    assert avoided_s == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert job.record.start_failures[0].times == 6


def test_a_job_s_record_says_how_much_room_each_host_lacks():
    job = Job()
    for host, lacks in (("h1", 1307), ("h2", 12)):
        error = NoRoom(f"its disk is too full: {lacks} MiB", host=host)
        error.lacks_mib = lacks
        assert job.fails(error).outcome is State.QUEUED
    assert {each.host: each.lacks_mib for each in job.record.start_failures} == {"h1": 1307, "h2": 12}


def test_the_record_stays_small_however_many_hosts_fail():
    job = Job()
    for _ in range(3):
        job.fails(*(HostUnreachable("x\n" * 20_000, host=f"host-{number:04}") for number in range(300)))
    assert len(job.record.start_failures) == causes.MOST_FAILURES
    assert len(repr(job.record.start_failures)) < 64 * 1000
    assert all(each.reason.isprintable() and each.words.isprintable() for each in job.record.start_failures)


def test_failures_of_long_ago_count_no_more():
    job = Job()
    for host in ("h1", "h2"):
        job.fails(mount(host))
    job.now_s += causes.FORGET_S + 1.0
    assert job.fails(mount("h3")).outcome is State.QUEUED
    assert [each.host for each in job.record.start_failures] == ["h3"]


@pytest.mark.parametrize(
    ("state", "end", "is_unstarted"),
    [
        (State.PREPARING, end_of([gone("h1")]), True),
        (State.STARTING, end_of([docker("h1")]), True),
        (State.RUNNING, end_of([gone("h1")]), False),  # max_restarts decides
        (State.PREPARING, end_of([]), False),  # the job's image, secret or workdir
        (State.PREPARING, end_of([gone("h1")], outcome=State.QUEUED), False),
        (State.PREPARING, end_of([gone("h1")], outcome=State.CANCELLED), False),
    ],
)
def test_what_counts_as_an_attempt_that_did_not_start(state, end, is_unstarted):
    assert causes.is_unstarted(state, end) is is_unstarted


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("no space: /home/a/.gpurun/jobs/j-0000000a/x", "no space: /home/b/.gpurun/jobs/j-0000000b/x", True),
        ("h1 cannot reach h2 (10.0.0.1)", "H3 cannot reach h4 (10.0.0.250)", True),
        ("it has 1681 of 2988 MiB", "it has 3 of 2.9 GiB", True),
        ("bad address fd00:7::11", "bad address fe80::1", True),
        ("container 0123456789ab is dead", "container fedcba987654 is dead", True),
        ("h1.example.org: x", "h2.example.org: x", True),
        ("took 1m3.4s", "took 59.2s", True),
        ("took 12ms", "took 1.5h", True),
        ("open x: y at 2026-01-02T03:04:05Z", "open x: y at 2026-01-02T13:04:05.5+01:00", True),
        ("at 2026/01/02 03:04:05: no", "at 2026/11/12 13:44:05: no", True),
        ("x 1.5 GiB", "x 900B", True),
        ("3 bytes left", "512 kB left", True),
        ('mount "/data/my set/x": no', 'mount "/data/my other/x": no', True),
        ("the set 'a b' is bad", "the set 'c' is bad", True),
        ("the host's disk isn't there", "the host's folder isn't there", False),
        ("it has no disks", "it has no shm", False),
        ("no such device", "no such folder", False),
    ],
)
def test_two_messages_say_the_same(one, other, same):
    words = [causes.normalised(text, SIX) for text in (one, other)]
    assert (words[0] == words[1]) is same, words


def test_the_kind_comes_before_the_words():
    job = Job(step_s=30.0)
    ends = [job.fails(RemoteOpFailed(f"it runs {cpu}", kind="architecture", host=host)) for host, cpu in
            (("h1", "arm64"), ("h2", "amd64"), ("h3", "riscv64"))]  # fmt: skip
    assert [end.outcome for end in ends] == [State.QUEUED, State.QUEUED, State.FAILED]
    job = Job()
    kinds = [job.fails(RemoteOpFailed("x", kind=kind, host=host)).outcome for host, kind in
             (("h1", "docker"), ("h2", "internal"), ("h3", "denied"))]  # fmt: skip
    assert kinds == [State.QUEUED] * 3


STEPS = st.lists(
    st.dictionaries(
        st.sampled_from(sorted(SIX)),
        st.tuples(st.sampled_from(["docker", "no-mount", "prolog", "unreachable"]), st.sampled_from("ab"),
                  st.sampled_from(["sound", "out", "unknown"])),
        min_size=1, max_size=4,
    ),
    min_size=20, max_size=40,
)  # fmt: skip


@given(STEPS)
def test_whatever_fails_a_job_ends_only_by_sound_hosts_and_is_never_placed_at_full_speed(steps):
    job, began_s, sound = Job(), 1000.0, set()
    for step in steps:
        errors = [RemoteOpFailed(words, kind=kind, host=host) for host, (kind, words, _) in step.items()]
        looks = {host: OUT if look == "out" else None for host, (_, _, look) in step.items() if look != "unknown"}
        end = job.fails(*errors, looks=looks)
        sound |= {(host, kind) for host, (kind, _, look) in step.items() if look == "sound"}
        if end.outcome is State.FAILED:
            kinds = [kind for _, kind in sound]
            assert any(kinds.count(kind) >= 3 for kind in ("docker", "no-mount"))
            return
        assert end.outcome is State.QUEUED and end.suspects == ()
        job.now_s += end.restart.at_s - job.now_s if end.restart else 0.0
    assert job.now_s - began_s > 200.0, "twenty placements take minutes"


@given(st.text(max_size=400), st.sets(st.text(min_size=1, max_size=5), max_size=3))
def test_whatever_a_host_says_has_a_short_form_that_stays_the_same(text, hosts):
    words = causes.normalised(text, hosts)
    assert len(words) <= causes.MOST_WORDS and words == causes.normalised(text, hosts)


HOSTS = tuple(
    Host(name, rack="r", generation=generation, gpus=gpus, fabric="tcp")
    for name, generation, gpus in (("a", "pascal", 4), ("b", "pascal", 2), ("c", "volta", 4))
)


@pytest.mark.parametrize(
    ("gpus", "wants", "unusable", "able"),
    [
        (2, {}, (), "abc"),
        (2, {}, ("a",), "bc"),
        (2, {"constraints": Constraints(generations=("pascal",))}, (), "ab"),
        (4, {"constraints": Constraints(locality="host")}, (), "ac"),
        (4, {"min_gpus": 2, "constraints": Constraints(locality="host")}, (), "abc"),
        (4, {"constraints": Constraints(gpus_per_host=4)}, (), "ac"),
        (2, {"constraints": Constraints(hosts=("a", "z"))}, (), "a"),
        (2, {"constraints": Constraints(avoid=("a",))}, ("c",), "b"),
    ],
)
def test_which_hosts_could_hold_a_gang(gpus, wants, unusable, able):
    spec = JobSpec("n", "i", gpus, ("true",), **wants)
    assert "".join(sorted(causes.able_hosts(SimpleNamespace(hosts=HOSTS), spec, unusable))) == able
