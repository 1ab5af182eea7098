"""What ``gpurun sweep`` says of sweeps that are stored, damaged ones and strange ones included."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.cli import serve
from gpurun.errors import BadInput
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.studies.store import Journal, SweepStore
from gpurun.studies.sweep_plan import Wish
from gpurun.studies.trials import JournalEntry

TEMPLATE = JobSpec(name="n\x1b[2J", image="i:1", gpus=1, command=("train",))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("gpurun.studies.runner.Conductors.ensure", lambda *_: None)
    return SweepStore(tmp_path / "home")


def begin(store, *entries, template=TEMPLATE):
    plan = Wish(grid={"lr": ("1", "2", "3")}, metric="loss:min").plan(template, "/i.yaml", 1.0)
    folder = store.create(plan, None)
    journal = Journal(folder)
    journal.add(*entries)
    journal.close()
    return folder


ENTRIES = [
    JournalEntry("asked", 1.0, 0, job="j-00000001", parameters={"lr": 1}),
    JournalEntry("asked", 1.0, 1, job="j-00000002", parameters={"lr": 2}),
    JournalEntry("reported", 2.0, 0, step=3, value=0.5),
    JournalEntry("reported", 2.0, 1, step=3, value=0.25),
    JournalEntry("ended", 3.0, 0, outcome="complete"),
    JournalEntry("ended", 3.0, 1, outcome="failed", reason="rank 0 \x1b[31mfailed"),
]


def test_the_best_is_first_and_what_failed_is_not_the_best(gpurun, store):
    folder = begin(store, *ENTRIES)
    code, out, _ = gpurun("sweep", "status", folder.id, "--json")
    told = json.loads(out)
    assert code == 0 and [trial["trial"] for trial in told["trials"]] == [1, 0]
    assert told["best"]["trial"] == 0 and told["counts"]["failed"] == 1
    assert "loss 0.5 with --lr=1 (trial 0, j-00000001)" in gpurun("sweep", "best", folder.id)[1]
    assert gpurun("sweep", "table", folder.id, "--csv")[1].splitlines()[1].startswith("1,failed,0.25,3,j-00000002")
    for words in (("status",), ("status", folder.id), ("table", folder.id)):
        code, out, _ = gpurun("sweep", *words)
        assert code == 0 and "\x1b" not in out


def test_one_that_is_damaged_hides_no_other(gpurun, store):
    sound, broken = begin(store, *ENTRIES), begin(store)
    Path(str(broken.path), "plan.json").write_text("[]")
    code, out, err = gpurun("sweep", "status")
    assert code == 5 and sound.id in out and broken.id not in out and "plan.json" in err


def test_nothing_there_is_no_error(gpurun, store):
    del store
    assert gpurun("sweep", "status")[0] == 0
    assert gpurun("sweep", "best", "x")[0] == 2


def test_the_table_has_the_best_in_front_and_the_state_of_jobs(gpurun, store):
    folder = begin(store, *ENTRIES, JournalEntry("asked", 4.0, 2, job="j-00000003", parameters={"lr": 3}))
    spec = JobSpec("n-2", "i", 1, ("train",))
    JobStore(store.home).create_many([spec], inventory=store.home / "i.yaml", now_s=4.0, ids=["j-00000003"])
    rows = [line.split() for line in gpurun("sweep", "status", folder.id)[1].splitlines()]
    assert [row[-3] for row in rows[2:4]] == ["best", "queued"], rows
    assert "1 queued or running, 1 complete, 1 failed of 3" in gpurun("sweep", "status")[1]


def test_a_piped_table_has_each_trial_on_a_line_word_for_word(gpurun, store, monkeypatch):
    """Not wrapped at 80 columns; brackets and colons are no markup."""
    reason = f"[red] [/nosuch] :bomb: {'word ' * 40}end"
    point = {"lr": "[bold]1"}
    folder = begin(
        store,
        *ENTRIES,
        JournalEntry("asked", 4.0, 2, job="j-00000003", parameters=point),
        JournalEntry("ended", 5.0, 2, outcome="failed", reason=reason),
    )
    monkeypatch.setitem(sys.modules, "rich.table", None)  # its import and its drawing took 0.1 s
    for words in (("status", folder.id), ("table", folder.id)):
        code, out, err = gpurun("sweep", *words)
        assert code == 0, err
        assert out.splitlines()[0] == "trial  loss  step  lr       state" + " " * (len(reason) + 5) + "time  job"
        assert f"[bold]1  failed: {reason}  1s    j-00000003\n" in out


def test_sweeps_are_listed_in_their_order(gpurun, store):
    made = []
    for created_s in (5.0, 3.0, 9.0, 1.0):
        plan = Wish(grid={"lr": ("1",)}).plan(TEMPLATE, "/i.yaml", created_s)
        made.append((created_s, store.create(plan, None).id))
    assert [line.split()[0] for line in gpurun("sweep", "status")[1].splitlines()] == [name for _, name in sorted(made)]


def test_no_parameter_takes_the_place_of_a_column_and_no_reason_steers_a_terminal(gpurun, store):
    plan = Wish(grid={"state": ("a\x1b[2J", "b"), "job": ("x,y'\"", "c"), "lr": ("1",)}, metric="loss:min")
    folder = store.create(plan.plan(TEMPLATE, "/i.yaml", 1.0), None)
    journal = Journal(folder)
    point = {"state": "a\x1b[2J", "job": "x,y'\"", "lr": 1}
    journal.add(JournalEntry("asked", 1.0, 0, job="j-00000001", parameters=point))
    journal.add(JournalEntry("ended", 3.0, 0, outcome="failed", reason="rank 0\x1b[31m\nfailed"))
    journal.close()
    out = gpurun("sweep", "table", folder.id, "--csv")[1]
    (row,) = csv.DictReader(io.StringIO(out))
    assert "\x1b" not in out and (row["state"], row["job"], row["lr"]) == ("failed", "j-00000001", "1")
    assert row["parameter.job"] == "x,y'\"" and row["reason"] == "rank 0\\x1b[31m\\nfailed"


@pytest.mark.parametrize("before", ["", "\t", "\r", "  "])
def test_no_cell_of_the_csv_is_a_formula_and_numbers_stay_numbers(gpurun, store, before):
    wish = Wish(grid={"a": ("-1.5", "-2"), "b": ("=1", "x")}, metric="loss:min")
    folder = store.create(wish.plan(TEMPLATE, "/i.yaml", 1.0), None)
    journal = Journal(folder)
    reason, point = f"{before}=cmd|'/C calc'!A0", {"a": -1.5, "b": f"{before}@SUM(A1)"}
    journal.add(JournalEntry("asked", 1.0, 0, job="j-00000001", parameters=point))
    journal.add(JournalEntry("reported", 2.0, 0, step=1, value=-0.25))
    journal.add(JournalEntry("ended", 3.0, 0, outcome="failed", reason=reason))
    journal.close()
    (row,) = csv.DictReader(io.StringIO(gpurun("sweep", "table", folder.id, "--csv")[1]))
    assert (row["a"], row["value"]) == ("-1.5", "-0.25")
    assert row["b"].startswith("'") and row["reason"].startswith("'")


def test_a_plot_is_written_where_it_is_asked_for(gpurun, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = begin(store, *ENTRIES)
    assert gpurun("sweep", "plot", folder.id)[:2] == (0, f"{folder.id}.svg\n")
    code, out, _ = gpurun("sweep", "plot", folder.id, "--to", "a'; x.svg")
    assert code == 0 and out == "a'; x.svg\n"
    assert (tmp_path / "a'; x.svg").read_text().startswith("<svg") and "\x1b" not in (
        tmp_path / "a'; x.svg"
    ).read_text()
    code, out, err = gpurun("sweep", "plot", folder.id, "--to", str(tmp_path / "no" / "such.svg"))
    assert code == 2 and "cannot write the plot: No such file or directory" in err
    plan = Wish(grid={"lr": ("1", "2")}).plan(TEMPLATE, "/i.yaml", 1.0)
    code, _, err = gpurun("sweep", "plot", store.create(plan, None).id)
    assert code == 2 and "has no metric, so no trial is the best" in err


def test_a_sweep_that_has_ended_is_stopped_already_and_one_without_a_result_has_no_best(gpurun, store):
    folder = begin(store, *ENTRIES[:2])
    code, _, err = gpurun("sweep", "best", folder.id)
    assert code == 2 and f"`gpurun sweep status {folder.id}` shows all trials" in err
    folder.done.touch()
    assert gpurun("sweep", "stop", folder.id) == (0, "", f"{folder.id} has ended already\n")


def test_what_shows_or_changes_a_sweep_prints_it_as_json(gpurun, store):
    """What is said of it goes to stderr."""
    folder = begin(store, *ENTRIES)
    status = json.loads(gpurun("sweep", "status", folder.id, "--json")[1])
    assert json.loads(gpurun("sweep", "table", folder.id, "--json")[1]) == status
    code, out, err = gpurun("sweep", "table", folder.id, "--json", "--csv")
    assert (code, out) == (2, "") and "give either --csv or --json, not both" in err
    code, out, err = gpurun("sweep", "stop", folder.id, "--json")
    assert (code, json.loads(out)["stopped"], json.loads(out)["done"]) == (0, True, False) and "will stop" in err
    folder.done.touch()
    code, out, err = gpurun("sweep", "stop", folder.id, "--json")
    assert (code, json.loads(out)["done"]) == (0, True) and "has ended already" in err
    code, out, err = gpurun("sweep", "resume", folder.id, "--json", "--failed")
    told = json.loads(out)
    assert (code, told["stopped"], told["done"], told["sweep"]) == (0, False, False, folder.id) and "continues" in err


def test_a_name_means_the_sweep_that_lives_else_the_newest_as_of_jobs(store):
    """`sweep stop NAME` said that the newest sweep of the name had ended, and left the running one alone."""

    def made(created_s, name="net", *, is_done=False):
        template = replace(TEMPLATE, name=name)
        folder = store.create(Wish(grid={"lr": ("1",)}).plan(template, "/i.yaml", created_s), None)
        if is_done:
            folder.done.touch()
        return folder

    lives, newest = made(1.0), made(2.0, is_done=True)
    made(1.5, is_done=True)
    assert store.find("net").id == lives.id
    lives.done.touch()
    assert store.find("net").id == newest.id
    both = [made(1.0, "m';\n"), made(2.0, "m';\n")]
    both[0].stop.touch()
    with pytest.raises(BadInput, match="is the name of 2 sweeps that have not ended: s-") as refused:
        store.find("m';\n")
    assert f"{both[1].id} (runs), {both[0].id} (stops)" in str(refused.value)
    with pytest.raises(BadInput, match="2 sweeps that have not ended"):
        serve._runs(["m';\n"])
    assert store.find(both[0].id).id == store.find(both[0].id[2:]).id == both[0].id
    if os.getuid() == 0:  # only root can give files to others
        os.chown(both[0].path.plain, 4711, -1)
        assert store.find("m';\n").id == both[1].id, "a person's own"
        both[1].done.touch()
        assert store.find("m';\n").id == both[1].id, "no other user chooses what it means"


@pytest.mark.parametrize("command", ["status", "best", "table", "plot", "stop", "resume"])
@pytest.mark.parametrize("name", ["nope", "", "../../etc", "a'; touch /tmp/x #", "s-"])
def test_a_sweep_that_does_not_exist(gpurun, store, command, name):
    begin(store)
    begin(store)
    code, _, err = gpurun("sweep", command, name)
    assert code == 2 and "gpurun: " in err


def test_tensorboard_shows_each_trial_that_has_a_job_by_its_number_and_parameters(store):
    folder = begin(store, *ENTRIES, JournalEntry("asked", 4.0, 2, job="", parameters={"lr": 3}))
    runs = serve._runs([folder.id])
    assert [run.name for run in runs] == [f"{folder.id}-0000-lr=1", f"{folder.id}-0001-lr=2"]
    assert [run.outputs.parent.name for run in runs] == ["j-00000001", "j-00000002"], "also of jobs that were pruned"
    with pytest.raises(BadInput, match="no trial of the sweep has started yet"):
        serve._runs([begin(store).id])
    with pytest.raises(BadInput, match="there is no job 'neither'"):
        serve._runs([folder.id, "neither"])
