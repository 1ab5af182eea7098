"""When an engine that was restarted has ended a gang, and when the gang ended by itself."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from gpurun.errors import HostUnreachable
from gpurun.remote.fleet import Results
from gpurun.supervisor.health import stopped, stopped_engines

LAUNCHER, WORKER = True, False


def restarted(up_s):
    return {"state": "restarted", "up_s": up_s, "why": "dockerd was pid 1 and is pid 2"}


@pytest.mark.parametrize("is_first", [LAUNCHER, WORKER])
def test_the_same_engine_has_ended_nobody(is_first):
    for state in ("same", "unknown"):
        answer = {"state": state, "up_s": None, "why": ""}
        assert stopped(answer, 0.0, is_first=is_first, seen_out=True) is None
    assert stopped({}, 0.0, is_first=is_first, seen_out=True) is None


@pytest.mark.parametrize("is_first", [LAUNCHER, WORKER])
def test_an_engine_that_is_gone_has(is_first):
    assert stopped({"state": "gone", "up_s": None, "why": "x"}, 5.0, is_first=is_first, seen_out=False)


@pytest.mark.parametrize(
    ("up_s", "ended_ago_s", "is_first", "seen_out", "is_cause"),
    [
        (1.0, 12.0, LAUNCHER, False, True),  # ended, and then the next one came up
        (1.0, 12.0, WORKER, False, True),
        (1.0, 0.5, LAUNCHER, False, True),  # left by an engine that died, ended by the next one
        (30.0, 1.0, WORKER, False, True),  # its ranks were broken off, and the launcher took its time
        (30.0, 1.0, LAUNCHER, False, False),  # with live-restore it outlived the engine, and ended by itself later
        (3600.0, 1.0, WORKER, False, False),
        (3600.0, 1.0, LAUNCHER, True, False),
        (1.0, 3600.0, LAUNCHER, False, False),  # ended by itself while nobody watched; restarted an hour later
        (1.0, 300.0, LAUNCHER, True, True),  # an engine that was away for minutes, and watched
    ],
)
def test_a_restart_counts_only_if_the_gang_ended_by_it(up_s, ended_ago_s, is_first, seen_out, is_cause):
    assert bool(stopped(restarted(up_s), ended_ago_s, is_first=is_first, seen_out=seen_out)) is is_cause


class Gang:
    """A job on hosts a, b and c, each with its engine's answer; None = the host cannot be reached."""

    def __init__(self, **answers):
        self.hosts = self.members = tuple(answers)
        self.lease = SimpleNamespace(job="j-0")
        self.links = self
        self._answers = answers

    def open(self, _hosts, *, timeout_s):
        return {host: HostUnreachable("cut", host=host) for host, said in self._answers.items() if said is None}

    def each(self, _call, hosts):
        return Results({host: self._answers[host] for host in hosts}, {})


def test_every_host_that_did_is_named_in_rank_order():
    same = {"state": "same", "up_s": None, "why": ""}
    gone = {"state": "gone", "up_s": None, "why": "Docker does not answer"}
    causes = stopped_engines(Gang(b=same, a=restarted(1.0), d=None, c=gone), time.monotonic() - 2.0, {})
    assert [(cause.host, cause.kind, cause.blame) for cause in causes] == [
        ("a", "engine", "host"), ("d", "host-lost", "host"), ("c", "engine", "host"),
    ]  # fmt: skip
    assert [cause.evidence for cause in causes] == ["dockerd was pid 1 and is pid 2", "cut", "Docker does not answer"]


def test_what_was_seen_long_ago_is_no_sign():
    gang, now_s = Gang(a=restarted(1.0)), time.monotonic()
    assert stopped_engines(gang, now_s - 3600, {"a": now_s - 120}) == []
    assert [cause.host for cause in stopped_engines(gang, now_s - 3600, {"a": now_s})] == ["a"]


def test_a_host_that_has_just_gone_is_named_though_its_connection_was_thought_to_live():
    class JustGone(Gang):
        def open(self, _hosts, *, timeout_s):
            return {}

        def each(self, _call, hosts):
            lost = {host: HostUnreachable("lost", host=host) for host in hosts if self._answers[host] is None}
            return Results({host: self._answers[host] for host in hosts if host not in lost}, lost)

    causes = stopped_engines(JustGone(a={"state": "same", "up_s": None, "why": ""}, b=None), None, {})
    assert [(cause.host, cause.kind) for cause in causes] == [("b", "host-lost")]


def test_an_engine_is_compared_with_when_the_launcher_ended_and_not_with_when_that_was_seen():
    """The launcher ended 22 s ago, and its engine came up 21 s ago."""
    causes = stopped_engines(Gang(a=restarted(21.0)), time.monotonic() - 22.0, {})
    assert [cause.host for cause in causes] == ["a"]
