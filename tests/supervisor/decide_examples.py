"""A gang of which something has been seen: what the tests of `decide` change one thing of."""

from __future__ import annotations

from dataclasses import replace

from gpurun.jobs.spec import Grant, JobSpec
from gpurun.supervisor.verdict.decide import ContainerEnd, Finish, GangSeen
from gpurun.supervisor.verdict.ends import Rank

T = 1000.0
TWO, THREE = (tuple(Grant(host, (0,)) for host in hosts) for hosts in ("ab", "abc"))
GANG = GangSeen(now_s=T, members=TWO, launcher_line_s=T)
SPEC = JobSpec("n", "plain:1", 2, ("true",))
ELASTIC = replace(GANG, members=THREE, least=2)


def rank(number, host, code=None, ended_s=None, *, is_cut_off=False):
    ended_s = T - 60 if code is not None and ended_s is None else ended_s
    return Rank(host, f"{number}.7", number, T - 100, ended_s, code, is_cut_off)


def container(code=0, seen_s=T - 30, **what):
    return ContainerEnd(seen_s, code, **what)


def end_of(step):
    assert isinstance(step, Finish)
    return step.end
