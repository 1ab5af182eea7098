"""Campaigns written down: hostile names stay names, and the page needs no network."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

from gpurun.documents.plain import json_text
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.scaling.model import LinkClass, LinkRates, PairFigure, Sample, Shape
from gpurun.studies.campaign_pictures import PredictedPoint, predictions, repeated, svg_of
from gpurun.studies.campaign_plan import CampaignPlan, MeasuredRate, RefusedSize, RunRecord
from gpurun.studies.campaign_report import CampaignReport

HOSTILE = "<script>alert(1)</script>\x1b[2J&\"'"


def record(gpus, value, **changes):
    rate = MeasuredRate("images_per_s", value, (value,), value * 0.9, value * 1.1)
    grants = tuple(Grant(f"h{at}", (0,)) for at in range(gpus))
    return RunRecord("horovod", gpus, 1, "j-00000001", **{"outcome": "measured", "rate": rate, "grants": grants,
                                                          "held_s": 36.0, **changes})  # fmt: skip


def report(*records, **changes):
    jobs = tuple(JobSpec("n", "i:1", gpus, ("train", HOSTILE), env={"A": "1"}) for gpus in (1, 2, 4))
    plan = CampaignPlan("curve", jobs, "/i.yaml", 1, 0.0, rates=LinkRates(rack=1e9), **changes)
    predicted = (PredictedPoint("horovod", 4, 150.0, 160.0, 170.0), PredictedPoint("horovod", 8, 250.0, 290.0, 330.0))
    return CampaignReport(plan, records, predicted)


def test_one_document_has_it_all():
    told = json.loads(json_text(report(record(1, 50.0), record(2, 90.0)).document()))
    assert [point["rate"] for point in told["curve"]] == [50.0, 90.0]
    assert told["done"] is False and told["unit"] == "images/s" and told["runs_in_all"] == 3
    assert told["runs"][1]["placement"] == {"h0": [0], "h1": [0]}
    assert told["settings"][0]["command"] == ["train", HOSTILE] and told["rates_bit_per_s"]["rack"] == 1e9


def test_the_page_needs_no_network_and_runs_no_script():
    shown = report(
        record(1, 50.0), record(2, 90.0, reason=HOSTILE), refused=(RefusedSize("horovod", 64, HOSTILE, 3),)
    ).html()
    assert "<script" not in shown and "\x1b" not in shown
    assert not re.search(r"\b(src|href)=", shown) and "@import" not in shown and "url(" not in shown
    assert "http" not in shown.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "Sizes that cannot run" in shown and "Predicted" in shown


def test_no_cell_is_a_formula():
    found = list(csv.DictReader(io.StringIO(report(record(1, 50.0, reason="=cmd|'/C calc'!A0")).csv())))
    assert found[0]["reason"] == "'=cmd|'/C calc'!A0" and found[0]["placement"] == "h0:0"
    for before in ("\t", "\r", " "):
        found = list(csv.DictReader(io.StringIO(report(record(1, 50.0, reason=f"{before}=cmd\x1b[2J")).csv())))
        assert found[0]["reason"].startswith("'") and "\x1b" not in found[0]["reason"]


def test_the_picture_is_sound_whatever_was_measured():
    points = report(record(1, 50.0), record(2, 90.0)).curve
    for drawn in (svg_of(HOSTILE, HOSTILE, points, report().predicted), svg_of("t", "u", []), svg_of("t", "u", points)):
        ElementTree.fromstring(drawn)
    drawn = svg_of("t", "images/s", points, report().predicted)
    assert drawn.count("<circle") == 4 and "horovod, 2 GPUs: 90" in drawn
    assert drawn.count("<polygon") == 0 or "fill-opacity" in drawn


def test_a_campaign_without_any_run_can_be_told():
    assert report().csv().count("\n") == 1
    assert "0 of 3 runs" in report().html()


def test_sizes_beyond_the_largest_are_predicted_with_a_range_that_grows():
    rates = LinkRates(rack=1e9)
    samples = [
        Sample((1,) * ranks, ("r1",) * ranks, 64, 10_000_000, step_s, ranks * 64 / step_s, launcher="horovod",
               compute_s=0.7, exchange_s=None if ranks == 1 else 0.1, rates=rates)
        for ranks, step_s in ((1, 0.7), (2, 0.75), (4, 0.78))
    ]  # fmt: skip
    points, unknown = predictions(samples)
    assert unknown == [] and [point.gpus for point in points] == [1, 2, 4, 8, 16]
    assert all(point.low <= point.rate <= point.high for point in points)
    assert points[-1].high / points[-1].low > points[0].high / points[0].low
    slower, _ = predictions(samples, [PairFigure(LinkClass.RACK, 1e8, 1e-4)])
    assert slower[-1].rate < points[-1].rate
    other = replace(samples[0], batch_per_rank=32)
    assert predictions([*samples, other])[1][0].startswith("horovod: no prediction: the measured runs differ")
    assert predictions([]) == ([], [])


def test_sizes_on_measured_links_are_predicted_even_if_larger_ones_are_not():
    (points, (reason,)) = predictions([Sample((1,), ("r1",), 64, 10_000_000, 0.7, 64 / 0.7, launcher="horovod")])
    assert [point.gpus for point in points] == [1]
    assert reason.startswith("horovod: no prediction for 2 GPUs and more: no measured run used links")


def test_a_larger_gang_repeats_the_placement():
    shape = Shape((2, 0), ("r1", "r2"), (0, 1))
    assert repeated(shape, 2) == Shape((2, 2, 0, 0), ("r1", "r1", "r2", "r2"), (0, 0, 1, 1))
