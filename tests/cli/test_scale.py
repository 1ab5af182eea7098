"""What ``gpurun scale`` says before anything runs, and of campaigns that are stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpurun.jobs.spec import Grant, JobSpec
from gpurun.studies.campaign_plan import CampaignPlan, MeasuredRate, RunEntry, RunRecord, end_of_run
from gpurun.studies.campaigns import CampaignStore
from gpurun.studies.store import Journal

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 1, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-4]": {}}}}
"""


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return CampaignStore(tmp_path / "home")


def begin(store, *, image="i:1\x1b[2J"):
    jobs = tuple(JobSpec("n", image, gpus, ("train",)) for gpus in (1, 2))
    folder = store.create(CampaignPlan("curve", jobs, "/i.yaml", 1, 1.0), None)
    rate = MeasuredRate("images_per_s", 50.0, (50.0,), 50.0, 50.0)
    record = RunRecord("horovod", 1, 1, "j-00000001", "measured", rate=rate, grants=(Grant("h1", (0,)),))
    journal = Journal(folder)
    journal.add(RunEntry("asked", 1.0, 0, job=record.job), end_of_run(0, record))
    journal.close()
    return folder


SCALE = ("scale", "-i", "inventory.yaml", "--image", "i:1")


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--gpus", "0"), 2, "'0' is not a number of GPUs"),
        (("--gpus", "1,one"), 2, "'one' is not a number"),
        (("--gpus", "2,2"), 2, "has the size 2 twice"),
        (("--gpus", "8,16"), 3, "GPUs"),
        (("--gpus", "1", "--launcher", "nosuch"), 2, "there is no launcher"),
        (("--gpus", "1", "--link", "fast"), 2, "is not a rate"),
        (("--gpus", "1", "--name", "../x"), 2, "not a valid name of a campaign"),
        (("--gpus", "1", "--repeat", "0"), 2, "--repeat"),
        ((), 2, "--gpus"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_nothing_is_left(gpurun, store, flags, code, said):
    found, out, err = gpurun(*SCALE, *flags, "--", "train")
    assert found == code and said in err and out == ""
    assert store.ids() == []


def test_another_question_under_a_known_name_is_refused(gpurun, store):
    begin(store)
    code, _, err = gpurun(*SCALE, "--gpus", "1,4", "--name", "curve", "--", "train")
    assert code == 2 and "choose another name" in err


def test_a_stored_campaign_is_listed_shown_and_reported(gpurun, store, tmp_path):
    begin(store)
    assert "curve: 1 of 2 runs measured" in gpurun("scale", "list")[1]
    code, out, _ = gpurun("scale", "show", "curve", "--json")
    assert code == 0 and json.loads(out)["curve"][0]["rate"] == 50
    assert "images/s" in gpurun("scale", "show", "curve")[1]
    code, out, _ = gpurun("scale", "report", "curve", "--to", str(tmp_path / "to"))
    assert code == 0 and sorted(file.name for file in (tmp_path / "to").iterdir()) == [
        "curve.csv", "curve.html", "curve.json",
    ]  # fmt: skip
    assert "\x1b" not in (tmp_path / "to" / "curve.html").read_text()
    code, out, _ = gpurun("scale", "report", "curve", "--to", str(tmp_path / "a b"), "--json")
    told = json.loads(out)
    assert (code, told.pop("campaign")) == (0, "curve") and json.loads(Path(told["json"]).read_text())["curve"]
    assert told == {suffix: str(tmp_path / "a b" / f"curve.{suffix}") for suffix in ("html", "json", "csv")}


def test_what_is_not_there_or_damaged_is_said(gpurun, store, tmp_path):
    assert gpurun("scale", "show", "nosuch")[0] == 2
    assert "there is no campaign" in gpurun("scale", "list")[2]
    folder = begin(store)
    (tmp_path / "home" / "scaling" / "curve" / "plan.json").write_text("{")
    assert gpurun("scale", "show", folder.id)[0] == 5
    assert gpurun("scale", "list", "--json")[0] == 5


def test_a_report_into_what_is_no_folder_is_refused(gpurun, store, tmp_path):
    begin(store)
    (tmp_path / "file").write_text("")
    assert gpurun("scale", "report", "curve", "--to", str(tmp_path / "file"))[0] == 2
