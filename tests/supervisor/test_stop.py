"""How often a host is asked for its proof, in virtual time."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from gpurun.errors import HostFailure, HostUnreachable
from gpurun.remote.fleet import Results
from gpurun.supervisor import stop
from gpurun.supervisor.verdict.ends import GIVE_UP_S

end_log = stop._end_log


@pytest.fixture
def gang(monkeypatch):
    """A gang on h1 and h2; what each step takes; which host gives its proof when."""
    found = SimpleNamespace(now_s=1000.0, asked=[], copy_s=0.0, fence_s=0.1, proof_after={"h1": 1, "h2": 1}, lost=None)
    found.steps, found.notes, found.copied_at = [], [], 1

    def fence(links, lease, hosts, **_):
        found.asked.append(found.now_s)
        found.steps.append("fence")
        found.now_s += found.fence_s
        unproven = [host for host in hosts if found.proof_after[host] > len(found.asked)]
        return {host: HostFailure("a process is still there", host=host) for host in unproven}

    def sleep(seconds):
        found.now_s += seconds

    def copy(_):
        sleep(found.copy_s)
        found.steps.append("copy")
        return {"h1"} if found.steps.count("copy") < found.copied_at else set()

    def end_of_log(*_):
        found.steps.append("log")
        return set()

    def finish(_, lost):
        found.lost = set(lost)

    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: found.now_s, sleep=sleep))
    for name, fake in {
        "fence": fence, "collect_outputs": copy, "_finish": finish, "_end_log": end_of_log,
        "collect_autotune": lambda _: None, "cordon_suspect": lambda *_: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(stop, name, fake)
    monkeypatch.setattr(stop.durable, "sync_file", found.steps.append)
    found.job = SimpleNamespace(
        folder=SimpleNamespace(log="sync"),
        record=SimpleNamespace(
            first_failure=None, avoid=(), failed_to_start=(), ladder=False, reached="containers", unjudged=None
        ),
        hosts=["h1", "h2"],
        links=SimpleNamespace(open=lambda *_, **__: {}, is_open=lambda _: True), lease=None, state_id="s",
        events=SimpleNamespace(emit=lambda *_, **__: None), note=found.notes.append,
    )  # fmt: skip
    return found


def test_the_log_is_safe_on_the_head_before_the_hosts_lose_it(gang):
    gang.proof_after["h2"] = 2
    stop.stop(gang.job)
    assert gang.steps == ["log", "copy", "sync", "fence", "log", "sync", "fence"]


def test_a_host_that_answers_late_is_asked_for_its_last_lines_before_its_fence(gang, monkeypatch):
    """The lines of h1, where the launcher ran, are all here by then."""
    gang.proof_after["h2"] = 3
    gang.job.links.is_open = lambda host: host == "h1" or len(gang.asked) > 0
    gang.job.log_copy = SimpleNamespace(wait_for_launcher=lambda _: True)
    monkeypatch.setattr(stop, "_end_log", end_log)
    monkeypatch.setattr(stop, "end_output", lambda _, hosts: gang.steps.append(f"lines of {' '.join(hosts)}"))
    stop.stop(gang.job)
    assert gang.steps == ["lines of h1", "copy", "sync", "fence", "lines of h2", "sync", "fence", "sync", "fence"]


def test_a_host_whose_last_lines_break_its_connection_is_connected_again_for_its_proof(gang, monkeypatch):
    """Its lines are asked for once more, too: the connection may have broken by accident."""
    up = {"h1", "h2"}
    gang.job.links.is_open = up.__contains__
    gang.job.links.open = lambda hosts, **_: gang.steps.append(f"open {' '.join(hosts)}") or up.update(hosts)
    gang.job.log_copy = SimpleNamespace(wait_for_launcher=lambda _: True)
    gang.proof_after["h2"] = 2
    monkeypatch.setattr(stop, "_end_log", end_log)
    monkeypatch.setattr(stop, "end_output", lambda _, hosts: up.discard("h2"))
    stop.stop(gang.job)
    once = ["open h2", "sync", "fence"]
    assert [step for step in gang.steps if step != "copy"] == ["open h1 h2", *once, "open h2", *once]


def test_a_copy_of_outputs_that_broke_off_is_tried_again_though_every_host_has_given_its_proof(gang):
    gang.copied_at = 3
    stop.stop(gang.job)
    assert (gang.steps.count("copy"), gang.lost, gang.notes) == (3, set(), [])
    assert len(gang.asked) == 1, "a host that was fenced is not fenced again"


def test_outputs_that_cannot_be_copied_do_not_keep_gpus_for_ever_and_the_job_says_where_they_are(gang):
    gang.copied_at, gang.copy_s = 10**9, 3.0
    stop.stop(gang.job)
    assert gang.lost == set()
    assert gang.notes == [
        "h1: the last outputs of this attempt are still on the host, because the head could not copy them"
    ]


def test_outputs_of_a_host_that_is_lost_are_not_waited_for(gang):
    gang.copied_at, gang.proof_after["h1"], gang.job.record.avoid = 10**9, 10**9, ("h1",)
    stop.stop(gang.job)
    assert (gang.steps.count("copy"), gang.lost) == (1, {"h1"})


@pytest.mark.parametrize("copy_s", [0.0, 11.0, 600.0])
def test_copying_outputs_takes_nothing_of_the_time_for_the_proof(gang, copy_s):
    gang.copy_s, gang.proof_after["h2"] = copy_s, 5
    stop.stop(gang.job)
    assert (len(gang.asked), gang.lost) == (5, set())


@pytest.mark.parametrize("fence_s", [0.1, 30.0, 120.0])
def test_a_host_that_gives_no_proof_is_asked_for_ten_seconds_and_twice(gang, fence_s):
    gang.fence_s, gang.proof_after["h2"] = fence_s, 10**9
    stop.stop(gang.job)
    assert gang.lost == {"h2"}
    assert len(gang.asked) >= 2
    assert gang.asked[-1] - gang.asked[0] >= GIVE_UP_S


class Ladder:
    """Hosts whose ranks heed no SIGTERM, asked at once, in virtual time. A silent one answers nothing."""

    def __init__(self, gang, silent, slow_s):
        self.gang, self.silent, self.slow_s, self.told_s = gang, silent, slow_s, {}

    def each(self, call, hosts):
        began_s, ends_s, ok, failed = self.gang.now_s, [], {}, {}
        for host in hosts:
            self.gang.now_s = began_s
            try:
                ok[host] = call(SimpleNamespace(call=partial(self.call, host)))
            except HostFailure as error:
                failed[host] = error
            ends_s.append(self.gang.now_s)
        self.gang.now_s = max(ends_s)
        return Results(ok, failed)

    def call(self, host, op, *, timeout_s, **_):
        if host == self.silent:
            self.gang.now_s += timeout_s
            raise HostUnreachable("no reply", host=host)
        if op == "gang.signal":
            self.gang.now_s += self.slow_s.get(host, 0.0)
            self.told_s[host] = self.gang.now_s
        return SimpleNamespace(value=1)


@pytest.mark.parametrize(("grace_s", "silent", "slow_s", "within_s"), [
    (3.0, "h2", {}, 5.0), (0.0, "h2", {}, 5.0), (30.0, "h2", {}, 31.0), (30.0, None, {"h2": 9.0}, 40.0),
])  # fmt: skip
def test_a_silent_host_takes_nobodys_grace_and_adds_little_to_it(gang, grace_s, silent, slow_s, within_s):
    ladder = Ladder(gang, silent, slow_s)
    gang.job.links.each, gang.job.record.ladder = ladder.each, True
    gang.job.members, gang.job.follow_log = gang.job.hosts, lambda _: None
    gang.job.spec, gang.job.lease = SimpleNamespace(grace_s=grace_s), SimpleNamespace(job="j", attempt=1)
    began_s = gang.now_s
    stop.stop(gang.job)
    killed_s = gang.asked[0] - gang.copy_s
    assert killed_s - began_s <= within_s
    assert all(killed_s >= at_s + grace_s for at_s in ladder.told_s.values())
