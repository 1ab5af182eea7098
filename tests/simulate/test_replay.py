"""Replay: the published simulator's figures, what the default gains, preemption in virtual time, the command."""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gpurun.cli.lab import simulate
from gpurun.errors import BadInput, NeverFits
from gpurun.inventory.model import Host, Inventory, Pool, Rack
from gpurun.scheduler import passes
from gpurun.scheduler.model import DEFAULT
from gpurun.scheduler.pools import Book
from gpurun.simulate.replay import FIFO, GRACE_S, SJF, Stuck, TraceJob, read_trace, replay
from gpurun.simulate.report import mean_wait, report_replay, svg, write_plot

ITP = Path(__file__).parents[2] / ".." / "shared" / "traces" / "itp-cluster06.csv"


def cluster(racks, hosts, gpus, pools=()):
    found = tuple(Host(f"r{r}h{h}", f"r{r}", "pascal", gpus, "tcp") for r in range(racks) for h in range(hosts))
    names = {f"r{r}": tuple(host.name for host in found if host.rack == f"r{r}") for r in range(racks)}
    return Inventory(found, tuple(Rack(name, hosts) for name, hosts in names.items()), {}, pools)


def job(name, at, lasts, gpus, **more):
    return TraceJob(name, float(at), float(lasts), gpus, line=2, **more)


# a real workload, beside HeliosArtifact's figures for it


@cache
def itp(policy, limits=False, racks=1):
    if not ITP.exists():
        pytest.skip(f"needs a public trace that is not in this repository: put it at {ITP.resolve()}")
    jobs = read_trace(ITP)
    if limits:
        jobs = tuple(replace(job, time_limit_s=job.duration_s) for job in jobs)
    done = replay(jobs, cluster(racks, 16 // racks, 8), policy)
    return report_replay(done, 0.0), mean_wait(done.outcomes, more_than_gpus=8)


@pytest.mark.parametrize("racks", [1, 4])
@pytest.mark.parametrize(
    ("policy", "jct_s", "wait_s", "p99_s", "idle"),
    [(FIFO, 82204, 57771, 393155, 0.015), (SJF, 36470, 12036, 149325, 0.019)],
)
def test_the_yardsticks_agree_with_the_published_simulator(policy, jct_s, wait_s, p99_s, idle, racks):
    figures, _ = itp(policy, racks=racks)
    assert figures.avg_jct_s == pytest.approx(jct_s, abs=1)
    assert figures.avg_wait_s == pytest.approx(wait_s, abs=1)
    assert figures.p99_wait_s == pytest.approx(p99_s, abs=1)
    assert figures.idle_while_pending == pytest.approx(idle, abs=0.0005)


def test_the_default_halves_the_average_wait_and_spares_large_gangs():
    (fifo, fifo_large), (found, large) = itp(FIFO), itp(DEFAULT)
    assert found.avg_wait_s <= 0.5 * fifo.avg_wait_s
    assert large <= 1.2 * fifo_large


def test_backfill_by_time_limits():
    (fifo, fifo_large), (found, large) = itp(FIFO), itp(DEFAULT, limits=True)
    assert found.avg_wait_s <= 0.8 * fifo.avg_wait_s
    assert large <= fifo_large


# small worlds


def test_figures_of_a_trace_that_can_be_worked_out_by_hand():
    jobs = (job("a", 0, 10, 4), job("b", 0, 10, 8), job("c", 5, 5, 4))
    figures = report_replay(replay(jobs, cluster(1, 1, 8), FIFO), 1.5)
    assert (figures.jobs, figures.avg_wait_s, figures.avg_jct_s) == (3, (0 + 10 + 15) / 3, (10 + 20 + 20) / 3)
    assert (figures.makespan_s, figures.p50_wait_s, figures.elapsed_s) == (25.0, 10.0, 1.5)
    assert figures.gpu_utilization == pytest.approx((40 + 80 + 20) / (8 * 25))
    assert figures.idle_while_pending == pytest.approx(4 * 10 / (8 * 25))


def test_a_time_limit_ends_a_job():
    done = replay((job("a", 0, 100, 8, time_limit_s=10.0), job("b", 0, 1, 8)), cluster(1, 1, 8), FIFO)
    assert [outcome.ended_s for outcome in done.outcomes] == [10.0, 11.0]


def test_borrowed_gpus_go_back_and_the_victim_finishes_later():
    pools = (Pool("a", 4), Pool("b", 4))
    jobs = (
        job("borrower", 0, 5000, 8, pool="a", preemptible=True),
        job("owner", 2000, 1000, 4, pool="b"),
    )
    done = replay(jobs, cluster(1, 1, 8, pools), DEFAULT)
    borrower, owner = done.outcomes
    assert done.preemptions == 1
    assert owner.wait_s == GRACE_S
    assert len(borrower.spans) == 2
    assert borrower.spans[1].start_s == owner.ended_s
    assert sum(span.end_s - span.start_s for span in borrower.spans) == 5000 + GRACE_S


DAY = 86400.0
BORROWER = job("old", 0, 20 * DAY, 8, pool="p", preemptible=True)
OWNER = job("owner'; --", 11 * DAY, 3600, 4, pool="p")


def test_a_victim_that_has_waited_longest_does_not_bar_its_preemptor():
    """The pool has room for one of them, and the patience of the victim, which is older, is over at once."""
    old, owner = replay((BORROWER, OWNER), cluster(1, 4, 4, (Pool("p", 4, 8),)), DEFAULT).outcomes
    assert owner.wait_s == GRACE_S
    assert old.spans[1].start_s == owner.ended_s


def test_a_replay_that_is_stuck_says_since_when_and_why(monkeypatch):
    keep = Book.keep
    monkeypatch.setattr(Book, "keep", lambda self, gang, **_: keep(self, gang, is_owed=False))
    monkeypatch.setattr(passes, "_still_helps", lambda *_: True)
    with pytest.raises(Stuck) as caught:
        replay((BORROWER, OWNER), cluster(1, 4, 4, (Pool("p", 4, 8),)), DEFAULT)
    said = str(caught.value)
    assert f"stuck at {20 * DAY:.0f} s: no job runs" in said and "2 jobs wait" in said
    assert "owner'; --: gpurun keeps the rest of pool p for 000000000" in said
    assert "old: pool p uses 0 of at most 8 GPUs; 4 are kept for 000000001" in said


def test_jobs_that_last_no_time_at_all():
    done = replay(tuple(job(f"{n}", 0, 0, 8) for n in range(5)), cluster(1, 1, 8), DEFAULT)
    assert [outcome.wait_s for outcome in done.outcomes] == [0.0] * 5


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gpus": 99}, "the job needs 99 GPUs"),
        ({"gpus": 3, "gpus_per_host": 2}, "per host"),
        ({"gpus": 1, "pool": "x"}, "pool"),
    ],
)
def test_a_job_that_could_never_run_is_named_by_its_line(more, said):
    inventory = cluster(1, 1, 8, (Pool("a", 4),))
    with pytest.raises(NeverFits) as caught:
        replay((TraceJob("j", 0.0, 1.0, line=7, **more),), inventory, DEFAULT, source="t.csv")
    assert "t.csv:7" in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.exit_code == 3


@examples("traces")
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 40), st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.booleans()),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([DEFAULT, FIFO, SJF, replace(DEFAULT, patience_s=5.0)]),
)
def test_every_job_runs_once_in_full_on_gpus_of_its_own(rows, policy):
    rows.sort()
    jobs = tuple(
        job(f"{n}", at, lasts, gpus, time_limit_s=float(lasts) if limit else None)
        for n, (at, lasts, gpus, limit) in enumerate(rows)
    )
    done = replay(jobs, cluster(2, 2, 4), policy)
    busy = []
    for outcome in done.outcomes:
        (span,) = outcome.spans
        assert span.placement.gpus == outcome.job.gpus
        assert span.start_s >= outcome.job.submitted_s
        assert span.end_s - span.start_s == pytest.approx(outcome.job.duration_s)
        busy += [(grant.host, gpu, span.start_s, span.end_s) for grant in span.placement.grants for gpu in grant.gpus]
    busy.sort()
    for one, other in pairwise(busy):
        assert one[:2] != other[:2] or one[3] <= other[2]


# pictures and the command


def test_the_picture_names_what_it_shows(tmp_path):
    done = replay((job("a", 0, 100000, 4), job("b", 0, 10, 8)), cluster(1, 1, 8), DEFAULT)
    assert all(word in svg(done) for word in ("GPUs in use, of 8", "jobs that wait", "fragmentation"))
    write_plot(done, tmp_path / "a'; touch x.svg")
    for name in ("plot.pdf", "no/such/folder.svg"):
        with pytest.raises(BadInput):
            write_plot(done, tmp_path / name)


INVENTORY = """version: 1
defaults: {user: train, generation: pascal, gpus: 8, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks:
  r1: {hosts: {"gpu-[01-02]": {}}}
"""
KEYS = [
    *("jobs", "avg_jct_s", "avg_wait_s", "p50_wait_s", "p99_wait_s", "makespan_s", "gpu_utilization"),
    *("idle_while_pending", "multi_host_jobs", "multi_rack_jobs", "preemptions", "elapsed_s"),
]


def run(tmp_path, *arguments, trace="job_id,submit_time_s,duration_s,gpus\na,0,5,12\n"):
    (tmp_path / "t.csv").write_text(trace)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    app = typer.Typer()
    app.command()(simulate)
    files = [str(tmp_path / "t.csv"), "--inventory", str(tmp_path / "inventory.yaml")]
    return CliRunner().invoke(app, [*files, *arguments])


def test_the_json_is_the_designs(tmp_path):
    result = run(tmp_path, "--json", "--plot", str(tmp_path / "p.svg"))
    found = json.loads(result.stdout)
    assert list(found) == KEYS
    assert found["multi_host_jobs"] == 1
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_people_get_a_table(tmp_path):
    assert "average wait" in run(tmp_path, "--policy", "sjf", "--patience", "1h").stdout


def test_an_unknown_policy_and_a_bad_line(tmp_path):
    assert "fifo" in str(run(tmp_path, "--policy", "lifo'").exception)
    assert "t.csv:2" in str(run(tmp_path, trace="job_id,submit_time_s,duration_s,gpus\na,0,5,x\n").exception)
