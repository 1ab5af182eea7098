"""A replay whose durations scale with where a job is placed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gpurun.cli.lab import simulate
from gpurun.errors import BadInput
from gpurun.inventory.model import Host, Inventory, Rack
from gpurun.jobs.spec import Grant, Placement
from gpurun.scaling.model import (
    COMPUTE,
    PARAMETERS,
    CannotPredict,
    LinkClass,
    LinkRates,
    Sample,
    Shape,
    encode,
    fit,
    inverse_at,
    latency_at,
    step_seconds,
    traffic_of,
)
from gpurun.scheduler.model import DEFAULT
from gpurun.simulate.pace import PlacementPace
from gpurun.simulate.replay import FIFO, TraceJob, replay

RATES = LinkRates(host=80e9, rack=25e9, racks=2e9)
SHAPES = [((1,), "a"), ((4,), "a"), ((4, 4), "aa"), ((4, 4), "ab"), ((4, 4, 4, 4), "aabb")]


def samples():
    values = [1.0] * PARAMETERS
    values[COMPUTE], values[1], values[3] = 0.2, 0.01, 1e-11
    for link in LinkClass:
        values[latency_at(link)], values[inverse_at(link)] = 1e-5, 1.1
    for ranks, racks in SHAPES:
        shape = Shape(ranks, tuple(racks), rates=RATES)
        step_s = step_seconds(values, traffic_of(shape, 40e6, "ring", frozenset(LinkClass)))
        yield Sample(ranks, tuple(racks), 32, 40_000_000, step_s, 32 * sum(ranks) / step_s, rates=RATES)


@pytest.fixture(scope="module")
def model():
    return fit(samples())


def cluster(racks=2, hosts=2):
    found = tuple(Host(f"r{r}h{h}", f"r{r}", "pascal", 4, "tcp") for r in range(racks) for h in range(hosts))
    names = {f"r{r}": tuple(host.name for host in found if host.rack == f"r{r}") for r in range(racks)}
    return Inventory(found, tuple(Rack(name, hosts) for name, hosts in names.items()), {})


def placed(*hosts, gpus=4):
    racks = tuple(dict.fromkeys(host[:2] for host in hosts))
    return Placement("pascal", racks, tuple(Grant(host, tuple(range(gpus))) for host in hosts))


def job(name, at, gpus, lasts=100.0, **more):
    return TraceJob(name, float(at), lasts, gpus, line=2, **more)


def test_a_job_takes_its_traced_time_in_one_rack_and_longer_across_slow_links(model):
    pace = PlacementPace(model, cluster())
    assert pace.factor(placed("r0h0")) == pace.factor(placed("r0h0", "r0h1")) == 1.0
    apart = pace.factor(placed("r0h0", "r1h0"))
    assert apart > 1.2
    assert apart > PlacementPace(model, cluster(), 4e9).factor(placed("r0h0", "r1h0")) > 1.0
    assert apart < PlacementPace(model, cluster(), 1e9).factor(placed("r0h0", "r1h0"))
    assert pace.factor(placed("r0h0", "r1h0")) == apart


def test_a_gang_on_more_hosts_than_it_needs_takes_longer(model):
    assert PlacementPace(model, cluster()).factor(placed("r0h0", "r0h1", gpus=2)) > 1.0


def test_durations_limits_and_preemption_count_the_time_where_the_job_is(model):
    def factor(placement):
        return 2.0 if len(placement.racks) > 1 else 1.0

    jobs = (job("wide", 0, 16), job("near", 0, 4))
    done = replay(jobs, cluster(), FIFO, factor=factor)
    assert [outcome.ended_s for outcome in done.outcomes] == [200.0, 300.0]
    limited = replay((job("wide", 0, 16, time_limit_s=150.0),), cluster(), FIFO, factor=factor)
    assert limited.outcomes[0].ended_s == 150.0


def test_gangs_are_kept_in_racks_where_a_rack_can_hold_them():
    jobs = (job("a", 0, 4, lasts=1000.0), job("b", 0, 4, lasts=1000.0), job("c", 1, 8), job("all", 2, 16))
    free, kept = (replay(jobs, cluster(2, 2), DEFAULT, is_kept_in_rack=keep) for keep in (False, True))
    assert [len(outcome.spans[-1].placement.racks) for outcome in kept.outcomes] == [1, 1, 1, 2]
    assert len(free.outcomes) == 4


def test_a_class_of_links_that_nobody_measured_ends_the_replay():
    near = [sample for sample in samples() if len(set(sample.racks)) == 1]
    with pytest.raises(CannotPredict, match="between racks"):
        replay((job("wide", 0, 16),), cluster(), FIFO, factor=PlacementPace(fit(near), cluster()).factor)


INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"a[1-2]": {}}}, r2: {hosts: {"b[1-2]": {}}}}
"""


@pytest.fixture
def run(tmp_path):
    import typer

    (tmp_path / "i.yaml").write_text(INVENTORY)
    (tmp_path / "t.csv").write_text("job_id,submit_time_s,duration_s,gpus\na,0,100,16\nb,0,100,4\n")
    (tmp_path / "samples.jsonl").write_bytes(b"".join(map(encode, samples())))
    app = typer.Typer()
    app.command()(simulate)

    def invoke(*flags):
        names = [str(tmp_path / flag) if flag.endswith(".jsonl") else flag for flag in flags]
        return CliRunner().invoke(app, [str(tmp_path / "t.csv"), "-i", str(tmp_path / "i.yaml"), *names, "--json"])

    return invoke


def test_the_command(run):
    plain, slow, fast = (
        run(),
        run("--scaling", "samples.jsonl"),
        run("--scaling", "samples.jsonl", "--between-racks", "25gbit", "--in-rack"),
    )
    spans = [json.loads(result.stdout)["makespan_s"] for result in (plain, slow, fast)]
    assert spans[0] == 200.0
    assert spans[1] > spans[2] >= 200.0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--between-racks", "25gbit"), "needs --scaling"),
        (("--patience", "nan"), "'nan' is not a time"),
        (("--scaling", "nosuch.jsonl"), "cannot read"),
        (("--scaling", "samples.jsonl", "--between-racks", "fast"), "is not a rate"),
        (("--scaling", "samples.jsonl", "--between-racks", "-1gbit"), "is not a rate"),
        (("--scaling", "samples.jsonl", "--between-racks", "9" * 400 + "gbit"), "is too long"),
    ],
)
def test_wrong_flags_are_refused(run, flags, says):
    result = run(*flags)
    assert isinstance(result.exception, BadInput) or result.exit_code == 2
    assert says in f"{result.exception} {result.output}"
