"""The hang watch reads what ranks say of themselves, whatever they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpurun.supervisor import hang

ODD = [[], None, "7", 7, {}, {"step": None}, {"step": "7"}, {"step": True}, {"step": 1.5}, {"step": []}]


def job(told, hang_timeout_s=10.0):
    links = SimpleNamespace(each=lambda call, hosts=None: SimpleNamespace(ok=told), is_open=lambda host: True)
    return SimpleNamespace(
        spec=SimpleNamespace(hang_timeout_s=hang_timeout_s), links=links, hosts=list(told),
        lease=SimpleNamespace(job="j-00000001", grants=()),
    )  # fmt: skip


def said(*ranks, age_s=99.0):
    files = {str(number): {"progress": progress} for number, progress in enumerate(ranks)}
    return {"age_s": age_s, "checkpoint_age_s": None, "ranks": files}


@pytest.mark.parametrize("odd", ODD)
def test_odd_progress_neither_saves_nor_breaks_the_verdict(odd, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hang.time, "monotonic", lambda: now[0])
    watch = hang.HangWatch(job({"a": said({"step": 9}, odd), "b": said({"step": 8})}))
    now[0] += 60
    assert watch.hung(60.0) == (
        "no rank has printed, told of progress or used its GPU for 10 s; rank 0 on b is furthest behind, at step 8"
    )


@pytest.mark.parametrize("odd", ODD)
def test_the_furthest_step_is_that_of_a_rank_that_told_one(odd):
    assert hang.furthest_step(job({"a": said({"step": 9}, odd), "b": said({"step": 8}, odd)})) == 9
    assert (
        hang.furthest_step(job({"a": said(odd), "b": {"age_s": None, "checkpoint_age_s": None, "ranks": {}}})) is None
    )
