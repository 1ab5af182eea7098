"""Rates and curves, from reports and runs alone."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from gpurun.errors import BadInput
from gpurun.jobs.spec import Grant, JobSpec, Roles
from gpurun.scaling.model import LinkRates
from gpurun.state.durable import PIECE_BYTES
from gpurun.studies.campaign_pictures import curve_of
from gpurun.studies.campaign_plan import MOST_SAID, MeasuredRate, RunRecord, last_values, rate_of, sample_of, spread


def told(rank, *values, name="images_per_s", attempt=1, **more):
    return [SimpleNamespace(rank=rank, attempt=attempt, metrics={name: value, **more}) for value in values]


def test_each_ranks_own_rate_counts_and_the_warm_up_does_not():
    reports = [*told(0, 1, 50, 60, 70, 80), *told(1, 1, 5, 6, 7, 8)]
    rate = rate_of(reports, None)
    assert (rate.name, rate.value) == ("images_per_s", 65 + 6.5)
    assert rate.windows == (55, 66, 77, 88)


def test_a_rank_that_reports_for_all_is_taken_at_its_word():
    assert rate_of(told(4, 10.0), None).value == 10


def test_a_run_of_many_reports_fits_into_a_line_of_the_journal():
    """A reader takes a longer line for a hole, and the run would be measured again and again."""
    rate = rate_of(told(0, *(1 / each for each in range(1, 300_000))), None)
    assert 1000 < len(rate.windows) <= MOST_SAID and rate.windows[0] == 1 / 60_000
    assert len(msgspec.json.encode(rate)) < PIECE_BYTES


def test_only_the_last_attempt_counts():
    assert rate_of([*told(0, 10.0), *told(0, 99.0, attempt=2)], None).value == 99


@pytest.mark.parametrize(
    ("reports", "match"),
    [
        ([], "the ranks reported nothing"),
        (told(0, 1.0, name="loss"), "reported: loss"),
        (told(0, 1.0, tokens_per_s=2.0), "several rates"),
        (told(0, float("nan"), float("inf"), 0.0, -1.0), "above 0"),
    ],
)
def test_no_clear_rate_is_an_error_that_says_what_to_do(reports, match):
    with pytest.raises(BadInput, match=match) as caught:
        rate_of(reports, None)
    assert "--rate" in caught.value.hint


def test_a_named_metric_counts_whatever_it_is_called():
    assert rate_of(told(0, 3.0, name="speed", images_per_s=9.0), "speed").value == 3
    with pytest.raises(BadInput, match="no rank reported speed"):
        rate_of(told(0, 3.0), "speed")


def test_last_values_by_rank_without_what_is_no_number():
    reports = [*told(0, 1.0, batch=8.0), *told(1, 2.0, batch=float("nan"))]
    assert last_values(reports) == {"images_per_s": {0: 1.0, 1: 2.0}, "batch": {0: 8.0}}


def test_spread_of_few():
    assert spread(()) == (0.0, 0.0)
    assert spread((3.0,)) == (3.0, 3.0)


def run(gpus, value, *, number=1, launcher="horovod", hosts=None, outcome="measured"):
    grants = tuple(Grant(f"h{at}", tuple(range(gpus // (hosts or gpus)))) for at in range(hosts or gpus))
    rate = MeasuredRate("images_per_s", value, (value,), value, value)
    return RunRecord(launcher, gpus, number, "j-00000001", outcome, rate=rate, grants=grants, held_s=36.0)


def test_efficiency_is_against_the_smallest_size_and_against_one_host():
    found = curve_of([run(4, 380, hosts=1), run(1, 100, hosts=1), run(8, 600, hosts=2), run(8, 640, hosts=2, number=2),
                      run(8, 1, hosts=2, number=3, outcome="failed")], {"h0": "r1", "h1": "r2"})  # fmt: skip
    assert [point.gpus for point in found] == [1, 4, 8]
    last = found[-1]
    assert (last.rate, last.low, last.high, last.runs) == (620, 600, 640, 2)
    assert last.efficiency == pytest.approx(620 / 800)
    assert last.host_efficiency == pytest.approx(620 / 8 / (380 / 4))
    assert (last.hosts, last.racks, last.gpu_hours) == (2, 2, pytest.approx(8 * 36 / 3600))


def test_without_a_run_on_one_host_there_is_no_such_efficiency():
    (point,) = curve_of([run(2, 100)])
    assert point.host_efficiency is None and point.efficiency == 1


GRANTS = (Grant("h1", (0,)), Grant("h2", (0,)))
VALUES = {"batch": {0: 64.0}, "gradient_bytes": {0: 1e7}, "compute_s": {0: 0.5, 1: 0.7}, "exchange_s": {0: 0.1}}


def sampled(values, spec=None, value=100.0):
    spec = spec or JobSpec("n", "i:1", 2, ("train",))
    rate = MeasuredRate("images_per_s", value, (100.0, 128.0), 100.0, 128.0)
    return sample_of(spec, "j-00000001", GRANTS, {"h1": "r1"}, LinkRates(rack=1e9), rate, values)


def test_a_run_is_a_sample_for_a_cost_model():
    sample = sampled(VALUES)
    assert sample.step_s == pytest.approx(1.28) and sample.windows_s == (1.28, 1.0)
    assert (sample.exchange, sample.racks, sample.ranks_per_host) == ("ring", ("r1", ""), (1, 1))
    assert sample.compute_s == pytest.approx(0.6) and sample.compute_spread == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("told", "precision", "is_compiled"),
    [
        ({}, "", None),
        ({"precision_bf16": {0: 1.0, 1: 1.0}, "compiled": {0: 1.0, 1: 1.0}}, "bf16", True),
        ({"precision_fp32": {0: 1.0}, "compiled": {0: 0.0}}, "fp32", False),
        ({"precision_bf16": {0: 1.0}, "precision_fp16": {1: 1.0}}, "bf16+fp16", None),  # ranks on different GPUs
        ({"precision_bf16": {0: 0.0}, "precision_": {0: 1.0}, "precision_\x1b[2J": {0: 1.0}}, "", None),
    ],
)
def test_a_sample_names_precision_and_compiling(told, precision, is_compiled):
    sample = sampled(VALUES | told)
    assert (sample.precision, sample.is_compiled) == (precision, is_compiled)


def test_servers_are_where_gpurun_puts_them():
    spec = JobSpec("n", "i:1", 2, ("train",), launcher="tensorflow", roles=Roles(ps=1, workers=2, chief=True))
    sample = sampled(VALUES, spec)
    assert (sample.exchange, sample.servers_per_host) == ("servers", (0, 1))


def test_a_batch_in_another_unit_than_the_rate_makes_no_sample():
    """With `--rate tokens_per_s`, a batch of sequences gives the seconds of a small part of a step."""
    assert sampled(VALUES, value=100.0 * 512) is None  # compute_s is longer than such a step
    without = {name: ranks for name, ranks in VALUES.items() if name != "compute_s"}
    assert sampled(without | {"step_s": {0: 1.3, 1: 1.3}}) is not None
    for value in (100.0 * 512, 100.0 / 512):
        assert sampled(without | {"step_s": {0: 1.3, 1: 1.3}}, value=value) is None


def test_a_run_with_very_many_reports_is_a_sample_too():
    rate = MeasuredRate("images_per_s", 100.0, (100.0,) * 20_001, 100.0, 100.0)
    sample = sample_of(
        JobSpec("n", "i:1", 2, ("train",)), "j-00000001", GRANTS, {"h1": "r1"}, LinkRates(), rate, VALUES
    )
    assert 100 <= len(sample.windows_s) <= 200


@pytest.mark.parametrize(
    "values", [{}, {"batch": {0: 64.0}}, {**VALUES, "batch": {0: -1.0}}, {**VALUES, "gradient_bytes": {0: 1e300}}]
)
def test_what_a_program_does_not_say_or_says_wrongly_makes_no_sample(values):
    assert sampled(values) is None


@pytest.mark.parametrize("values", [(1.7e308,), (1.7e308, 1.7e308), (1e101,), (5e-324,)])
def test_a_rate_that_no_gang_has_is_none(values):
    with pytest.raises(BadInput, match="above 0"):
        rate_of([*told(0, *values), *told(1, *values)], None)
