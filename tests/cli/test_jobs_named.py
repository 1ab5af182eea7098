"""Jobs as people name them, and what commands print of their logs."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from gpurun.cli import completion, follow
from gpurun.cli.follow import cancel_job
from gpurun.errors import BadInput, StateError
from gpurun.jobs.events import EventLog
from gpurun.jobs.folder import keep_attempt
from gpurun.jobs.record import CancelRequest, FirstFailure, Restart, State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.lease import Lease
from gpurun.leases.occupancy import Occupancy
from gpurun.leases.store import LeaseStore
from gpurun.views.waiting import why_it_waits

INVENTORY = """\
version: 1
defaults: {generation: pascal, gpus: 4}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
pools: {vision: {reservation: 4}}
"""


@pytest.fixture
def store(tmp_path, monkeypatch, nothing_resumes):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.chdir(tmp_path)
    return JobStore(tmp_path / "home")


def made(store, name="train", *, at_s=None, gpus=2):
    spec = JobSpec(name=name, image="i", gpus=gpus, command=("true",))
    return store.create(spec, inventory=store.home.parent / "inventory.yaml", now_s=at_s or time.time())


def logged(folder, *lines):
    with Path(str(folder.log)).open("ab") as log:
        for second, text in lines:
            log.write(f"2026-11-25T08:00:{second:02d}.000000000Z o {text}\n".encode())


def test_last_is_the_job_that_one_submitted_last(store, gpurun):
    first = made(store, at_s=time.time() - 100)
    newest = made(store, at_s=time.time())
    os.utime(str(first.path), (time.time() + 100,) * 2)  # the older job changed after the newer was submitted
    assert store.find("@last").id == newest.id
    assert json.loads(gpurun("status", "@last", "--json")[1])["jobs"][0]["id"] == newest.id


def test_an_ended_job_names_who_keeps_its_gpus_lost(store, gpurun):
    job = made(store)
    lease = Lease(
        job.id, 1, "o", os.getuid(), "pascal", ("r1",), (Grant("h1", (0,)), Grant("h2", (1,))), 23022, 0.0,
        str(store.home.parent / "inventory.yaml"), lost=True,
    )  # fmt: skip
    job.write(job.record().but(state=State.CANCELLED, reason="cancelled by o", attempt=1, ended_s=time.time()))
    held = "GPU 0 is held by pid 2502 of 1234 (python3 hold.py)"
    EventLog(job.events, clock=time.time).emit("host", host="h1", state="not fenced", reason=held)
    assert "lost" not in gpurun("status", job.id)[1]
    LeaseStore(store.home).grant(lease, Occupancy()).close()
    shown = re.findall(r"lost  (.*)", gpurun("status", job.id)[1])
    assert shown == [f"h1: {held}", "h2: the host gave no proof that its GPUs are free"]


def test_last_is_nobody_elses(store, gpurun, monkeypatch):
    made(store)
    monkeypatch.setattr("gpurun.jobs.store.os", type("Os", (), {**vars(os), "getuid": staticmethod(lambda: 4711)}))
    code, _, err = gpurun("status", "@last")
    assert code == 2 and "you have submitted no job" in err


def ended(folder, state=State.SUCCEEDED):
    folder.write(folder.record().but(state=state, ended_s=time.time()))
    JobStore(folder.path.home).retire(folder.id)
    return folder


def of_another(folder):
    folder.write(folder.record().but(owner_uid=4711, owner="eve"))
    os.chown(folder.path.plain, 4711, -1)
    return folder


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")
def test_a_name_means_the_job_that_lives_else_the_newest_and_a_person_s_own(store):
    """`cancel NAME` said that the newest job of the name had ended, and left the running one alone."""
    lives = made(store, "net", at_s=10.0)
    ended(made(store, "net", at_s=20.0))
    of_another(made(store, "net", at_s=30.0))
    assert store.find("net").id == lives.id
    ended(lives)
    newest = ended(made(store, "net", at_s=25.0))
    assert store.find("net").id == newest.id, "the person's own, though another user's lives"
    theirs = of_another(made(store, "theirs", at_s=10.0))
    ended(of_another(made(store, "theirs", at_s=20.0)))
    assert store.find("theirs").id == theirs.id
    both = [made(store, "twice"), made(store, "twice")]
    with pytest.raises(BadInput, match="'twice' is the name of 2 jobs that have not ended: j-") as refused:
        store.find("twice")
    assert (
        all(f"{job.id} (QUEUED)" in str(refused.value) for job in both)
        and refused.value.hint == "give the id instead of the name"
    )
    many = [of_another(made(store, "m';\n")) for _ in range(9)]
    with pytest.raises(BadInput, match=r"9 jobs that have not ended: .* and 4 more$"):
        store.find("m';\n")
    assert store.find(many[0].id).id == many[0].id


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to others")
def test_a_name_of_a_living_job_is_not_taken_for_the_beginning_of_another_s_id(store):
    """A job named `a` meant whatever job's id began with a."""
    other = ended(made(store, "other"))
    name = other.id[2]
    assert store.find(name).id == other.id
    mine = made(store, name)
    assert store.find(name).id == mine.id
    if mine.id[2] != other.id[2]:
        of_another(mine)
        assert store.find(name).id == other.id, "no other user chooses what it means"


@pytest.mark.parametrize(
    "command", ["cancel", "status", "logs", "why", "outputs", "show", "wait", "rerun", "exec", "du"]
)
def test_every_command_refuses_a_name_of_two_living_jobs(store, gpurun, command):
    both = [made(store), made(store)]
    code, out, err = gpurun(command, "train", *(("--", "true") if command == "exec" else ()))
    assert (code, out) == (2, "") and all(job.id in err for job in both), err
    assert all(job.record().state is State.QUEUED for job in both)


def test_cancel_says_what_it_has_cancelled(store, gpurun):
    old, lives = ended(made(store, at_s=time.time() + 9)), made(store, at_s=time.time() - 9)
    assert gpurun("cancel", "train")[::2] == (0, f"{lives.id} (train): CANCELLED\n")
    assert lives.record().state is State.CANCELLED
    assert gpurun("cancel", old.id)[::2] == (0, f"{old.id} has ended already: SUCCEEDED\n")
    odd = made(store, "a\x1b[2J")
    code, out, err = gpurun("cancel", odd.id, odd.id, "--json")
    assert (code, [job["state"] for job in json.loads(out)["jobs"]]) == (0, ["CANCELLED"])
    assert err == f"{odd.id} (a\\x1b[2J): CANCELLED\n"


def test_cancel_without_waiting_says_that_the_job_still_stops(store, gpurun):
    job = made(store)
    ((_, lock),) = Allocator(store.home).run_pass(now_s=time.time()).granted
    with lock:
        assert gpurun("cancel", "--no-wait", "train")[2] == f"{job.id} (train): GRANTED, is being cancelled\n"


@pytest.mark.parametrize("text", ["tarin", "trian", "j-zzzz", "@latest", "a'; echo", "\x1b[31m", "../x", "ü" * 300])
def test_a_name_that_is_nobodys_is_an_error_with_a_suggestion(store, gpurun, text):
    made(store)
    code, out, err = gpurun("status", text)
    assert (code, out) == (2, "")
    assert "there is no job" in err and "\x1b" not in err
    assert ("did you mean train?" in err) == (text in ("tarin", "trian"))


def test_logs_show_the_last_lines_of_one_rank(store, gpurun):
    folder = made(store)
    logged(folder, (1, "[0]<stdout>:a"), (2, "[1]<stdout>:b"), (3, "[0]<stdout>:c"), (4, "[0]<stdout>:d"))
    assert gpurun("logs", "train", "--rank", "0", "--tail", "2")[1] == "c\nd\n"
    assert gpurun("logs", "train", "--tail", "0")[1] == ""
    assert gpurun("logs", "train", "-n", "99")[1] == "[0] a\n[1] b\n[0] c\n[0] d\n"
    assert gpurun("logs", "train", "--grep", "^[bc]$")[1] == "[1] b\n[0] c\n"
    assert gpurun("logs", "train", "--since", "2026-11-25T08:00:03Z")[1] == "[0] c\n[0] d\n"
    assert json.loads(gpurun("logs", "train", "--tail", "1", "--json")[1]) == {
        "time": "2026-11-25T08:00:04.000000000Z", "rank": 0, "stream": "stdout", "text": "d",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "attempt", "most"),
    [({}, 1, 1), ({}, 0, 3), ({}, 2, 3), ({"min_gpus": 2}, 1, 3), ({"one_per_host": False}, 1, 3)],
)
def test_logs_know_how_many_ranks_a_gang_of_one_for_each_host_has(store, gpurun, changes, attempt, most):
    """After other attempts, and before the first, its hosts were or may be others."""
    spec = JobSpec(**{"name": "n", "image": "i", "gpus": 4, "command": ("true",), "one_per_host": True, **changes})
    job = store.create(spec, inventory=store.home.parent / "inventory.yaml", now_s=time.time())
    granted = (Grant("h1", (0, 1)), Grant("h2", (0, 1))) if attempt else ()
    job.write(job.record().but(attempt=attempt, granted=granted))
    assert gpurun("logs", "n", "--rank", str(most))[0] == 0
    code, _, err = gpurun("logs", "n", "--rank", str(most + 1))
    assert code == 2 and f"the job's ranks are 0 to {most}" in err


@pytest.mark.parametrize(
    "argv",
    [
        ("--rank", "2"),
        ("--rank", "99"),
        ("--since", "2026-11-25 08:00 +99:00"),
        ("--grep", "("),
        ("--grep", "*"),
    ],
)
def test_logs_refuse_what_can_never_be(store, gpurun, argv):
    made(store)
    code, out, err = gpurun("logs", "train", *argv)
    assert (code, out) == (2, "")
    assert argv[0] in err or "has no rank" in err


def test_logs_of_a_failed_job_end_with_the_rank_that_failed_first(store, gpurun):
    folder = made(store)
    logged(folder, (1, "[0]<stdout>:a"))
    assert gpurun("logs", "train")[2] == ""
    failure = FirstFailure(
        "exit code 3", kind="rank", rank=1, host="h2", exit_code=3, excerpt=("NaN\x1b[2J in step 7",)
    )
    ended = {"state": State.FAILED, "ended_s": time.time(), "reason": "rank 1 on h2: exit code 3"}
    folder.write(folder.record().but(first_failure=failure, **ended))
    said = gpurun("logs", "train")[2].splitlines()
    assert said == [f"{folder.id} FAILED: rank 1 on h2: exit code 3", "        | NaN\\x1b[2J in step 7"]


def test_logs_print_no_control_character_of_a_rank_and_follow_prints_the_same_lines(store, gpurun):
    """`follow` had `rank 0 |` in front of a line, and `logs` `[0]`."""
    folder = made(store)
    logged(folder, (1, "[0]<stdout>:a\x1b]0;title\x07\x1b[2Jb"), (1, "launched"))
    lines = "[0] a\\x1b]0;title\\x07\\x1b[2Jb\n[launcher] launched\n"
    assert gpurun("logs", "train")[1] == lines
    ended(folder)
    assert gpurun("follow", "train")[1] == lines


def test_status_of_a_job_says_what_runs_when_and_for_how_long_at_most(store, gpurun):
    spec = JobSpec(name="n", image="me/i:1\x1b[2J", gpus=2, command=("sh", "-c", "a 'b'\n"), time_limit_s=5400.0)
    folder = store.create(spec, inventory=store.home.parent / "inventory.yaml", now_s=time.time())
    folder.write(folder.record().but(started_s=1e9, ended_s=1e300, state=State.FAILED))
    rows = dict(line.strip().split("  ", 1) for line in gpurun("status", folder.id)[1].splitlines())
    assert (rows["image"], rows["limit"]) == ("me/i:1\\x1b[2J", "1h30m")
    assert rows["command"].startswith("sh -c 'a '") and "\\n" in rows["command"]
    assert rows["submitted"].startswith(time.strftime("%Y-")) and rows["started"].startswith("2001-09-0")
    assert rows["ended"] == "?"
    Path(str(folder.path / "spec.json")).write_bytes(b"{")
    code, out, err = gpurun("status", folder.id)
    assert (code, "FAILED" in out, "spec.json" in err) == (0, True, True)


def test_every_command_says_when_a_job_restarts(store, gpurun):
    folder = made(store)
    restart = Restart(at_s=time.time() + 100, attempt=2, of=5)
    folder.write(folder.record().but(restart=restart, reason="h1 is gone"))
    for command in ("why", "status"):
        assert re.search(r"restarts in 1m\d\ds \(attempt 2 of 5\)", gpurun(command, folder.id)[1])
    (row,) = json.loads(gpurun("queue", "--json")[1])["queue"]
    assert (row["job"], row["position"]) == (folder.id, None)


def test_who_follows_a_job_that_waits_sees_why(store, gpurun, monkeypatch):
    folder = made(store, gpus=64)
    reasons = iter(["", "all GPUs are busy", "all GPUs are busy"])

    def why(_home, job):
        assert job == folder.id
        if (reason := next(reasons, None)) is not None:
            return reason
        cancel_job(folder, reason="seen enough")
        return "1 GPU is free"

    monkeypatch.setattr("gpurun.views.waiting.why_it_waits", why)
    monkeypatch.setattr("gpurun.cli.follow.WHY_AFTER_S", 0.0)
    monkeypatch.setattr("gpurun.cli.follow.WHY_EVERY_S", 0.0)
    _, _, err = gpurun("follow", folder.id)
    assert err.count("waits: all GPUs are busy") == 1 and err.count("waits:") == 2, err


def test_why_a_job_waits_in_one_sentence(store, gpurun):
    first, second = made(store, at_s=time.time() - 9), made(store, "big", gpus=64)
    assert why_it_waits(store.home, first.id) == "starts now"
    assert "64 GPUs" in why_it_waits(store.home, second.id)
    assert why_it_waits(store.home, "j-nobody") == ""


def damage_spec(folder, monkeypatch):
    Path(str(folder.path / "spec.json")).write_bytes(b"{")
    return "the job's files are damaged"


def break_inventory(folder, monkeypatch):
    Path(folder.record().inventory).write_text("racks: [")
    return "the job's inventory cannot be used: "


def leave_a_cancel(folder, monkeypatch):
    folder.ask_to_cancel(CancelRequest("cancel", by="ada", asked_s=time.time()))
    monkeypatch.setattr("gpurun.head.spawn.Head.adopt_orphans", lambda *_: ())
    return "the job is about to end: cancelled by ada"


def be_somebody_else(folder, monkeypatch):
    """Another user asks, and no waiter of the owner's lives."""
    monkeypatch.setattr("gpurun.leases.look.os", type("Os", (), {**vars(os), "getuid": staticmethod(lambda: 4711)}))
    return "no process starts the jobs of "


@pytest.mark.parametrize("what", [damage_spec, break_inventory, leave_a_cancel, be_somebody_else])
def test_a_job_that_no_pass_looks_at_says_why(store, gpurun, monkeypatch, what):
    """It was said to be neither queued nor running, or nothing was said."""
    folder = made(store)
    why = what(folder, monkeypatch)
    said = gpurun("why", folder.id)[1]
    assert why in said and f"{folder.id} is QUEUED: " in said
    assert why in json.loads(gpurun("why", folder.id, "--json")[1])["message"]
    assert why in gpurun("status", folder.id)[1]
    assert why in why_it_waits(store.home, folder.id)
    (row,) = json.loads(gpurun("queue", "--json")[1])["queue"]
    assert (row["job"], row["position"]) == (folder.id, None) and why in row["message"]
    (store.home.parent / "other.yaml").write_text(INVENTORY)
    assert why in gpurun("status", "-i", str(store.home.parent / "other.yaml"))[1]


def test_why_names_the_trouble_of_a_supervisor(store, gpurun, monkeypatch):
    folder = made(store)
    ((_, lock),) = Allocator(store.home).run_pass(now_s=time.time()).granted
    lock.close()
    assert (
        f"{folder.id} is GRANTED: the job has no supervisor; the next gpurun command of" in gpurun("why", folder.id)[1]
    )


def test_why_says_what_gpurun_does_for_a_job_that_does_not_run_yet(store, gpurun):
    folder = made(store)
    ((_, lock),) = Allocator(store.home).run_pass(now_s=time.time()).granted
    with lock:
        folder.move(State.PREPARING)
        assert "is PREPARING: gpurun connects to the job's hosts and copies image" in gpurun("why", folder.id)[1]
        folder.move(State.STARTING)
        assert "is STARTING: gpurun creates the job's containers and checks the GPUs" in gpurun("why", folder.id)[1]
        folder.move(State.STOPPING, reason="cancelled by me")
        assert gpurun("why", folder.id)[1] == f"{folder.id} is STOPPING: cancelled by me\n"


def test_wait_ends_like_timeout_of_coreutils(store, gpurun):
    made(store)
    code, _, err = gpurun("wait", "train", "--timeout", "0.1s")
    assert code == 124
    assert re.search(r"--timeout is over: j-\w+ is [A-Z]+", err), err


@pytest.mark.parametrize(
    ("changes", "ran", "hosts"),
    [
        ({}, "not yet", "none"),
        ({"state": State.CANCELLED, "ended_s": 9.0}, "never", "none"),
        ({"state": State.PREPARING, "attempt": 1, "granted": (Grant("h1", (0,)),)}, "not yet", "h1:0"),
        ({"attempt": 1}, "not yet", "none"),
        ({"attempt": 16}, "not yet, in 16 attempts", "none"),
        ({"state": State.CANCELLED, "attempt": 1, "ended_s": 9.0}, "never", "none"),
        (
            {"state": State.FAILED, "attempt": 2, "ended_s": 9.0, "granted": (Grant("h1", (0,)),)},
            "never, in 2 attempts", "h1:0",
        ),
        ({"state": State.FAILED, "attempt": 1, "started_s": 2.0, "ended_s": 9.0}, "7s", "none"),
    ],
)  # fmt: skip
def test_how_long_a_job_has_run_is_true_in_every_state(store, gpurun, monkeypatch, changes, ran, hosts):
    """A job that was cancelled in the queue ran "not yet", on hosts "none yet"; one that never ran, "not since attempt
    16".
    """
    folder = made(store)
    folder.write(folder.record().but(**changes))
    rows = dict(line.strip().split("  ", 1) for line in gpurun("status", folder.id)[1].splitlines())
    assert (rows["ran"].strip(), rows["hosts"].strip()) == (ran, hosts)
    assert f"ran  {ran}\n" in gpurun("show", folder.id)[1]
    if changes.get("attempt", 0) > 1:  # its first attempt ran
        keep_attempt(folder, folder.record().but(attempt=1, started_s=2.0, ended_s=3.0))
        assert "ran  not since attempt 1\n" in gpurun("status", folder.id)[1]


@pytest.mark.parametrize("cancels", [True, False])
def test_ctrl_c_says_whether_the_job_continues(store, monkeypatch, capsys, cancels):
    """The second Ctrl-C said that a job continues which the first had cancelled."""
    folder, asked = made(store), []

    def interrupt(_view):
        raise KeyboardInterrupt

    monkeypatch.setattr(follow._JobView, "show_until_ended", interrupt)
    monkeypatch.setattr(follow, "cancel_job", lambda *_, **__: asked.append(1))
    assert follow.follow_job(folder, cancel_on_interrupt=cancels) == 130
    said = capsys.readouterr().err
    assert asked == [1] * cancels
    assert (f"{folder.id} continues" in said) is not cancels
    assert (f"{folder.id} is being cancelled" in said) is cancels


def test_cancel_needs_to_know_which_jobs_and_asks_before_it_takes_all(store, gpurun, monkeypatch):
    jobs = [made(store, at_s=time.time() - second) for second in (2, 1)]
    assert gpurun("cancel")[0] == 2
    assert gpurun("cancel", jobs[0].id, "--mine")[0] == 2
    assert "stdin is not a terminal, so gpurun cannot ask you" in gpurun("cancel", "--mine")[2]
    assert all(not job.record().state.ended for job in jobs)
    assert gpurun("cancel", "--mine", "--yes")[0] == 0
    assert {job.record().state for job in jobs} == {State.CANCELLED}
    assert "there is no job to cancel" in gpurun("cancel", "--mine", "--yes")[2]


def test_cancel_takes_no_job_that_is_just_ending_for_one_that_is_left(store, gpurun):
    """Its record says that it has ended, and its mark among the live jobs is not removed yet."""
    job = made(store)
    job.write(job.record().but(state=State.CANCELLED, reason="cancelled by o", ended_s=time.time()))
    assert job.id in store.live_ids()
    code, _, said = gpurun("cancel", "--mine", "--yes")
    assert code == 0 and "there is no job to cancel" in said and job.id not in said


def test_a_job_that_cannot_be_cancelled_keeps_no_other_from_it(store, gpurun, monkeypatch):
    """As root's `cancel --all`, when no supervisor can be started as one of the users."""
    jobs = [made(store, at_s=time.time() - second) for second in (3, 2, 1)]

    def refuse(folder):
        if folder.id == jobs[0].id:
            raise StateError("no SSH key", job=folder.id, hint="give one")

    monkeypatch.setattr("gpurun.cli.cancel._have_it_carried", refuse)
    code, _, err = gpurun("cancel", "--mine", "--yes")
    assert (code, f"{jobs[0].id}: no SSH key" in err, "give one" in err) == (5, True, True)
    assert [job.record().state for job in jobs[1:]] == [State.CANCELLED] * 2


def test_quiet_prints_results_and_errors_only(store, gpurun):
    made(store)
    assert gpurun("--quiet", "cancel", "--mine", "--yes") == (0, "", "")
    assert "there is no job" in gpurun("--quiet", "status", "x")[2]
    assert gpurun("cancel", "--mine", "--yes")[2] != ""


def test_the_shell_completes_jobs_and_hosts_and_pools(store, tmp_path, monkeypatch):
    job = made(store, "train")
    made(store, "evil\nname")
    assert completion.jobs("@") == ["@last"]
    assert completion.jobs("j-") == sorted(completion.jobs("j-"), key=completion.jobs("j-").index)
    assert job.id in completion.jobs("j-") and completion.jobs("tr") == ["train"]
    assert not any("\n" in word for word in completion.jobs(""))
    assert completion.hosts("h1,h") == ["h1,h1", "h1,h2"]
    assert "@rack:r1" in completion.hosts("@") and completion.pools("v") == ["vision"]
    (tmp_path / "inventory.yaml").write_text("{")
    assert completion.hosts("") == completion.pools("") == []
    monkeypatch.setenv("GPURUN_HOME", "/proc/self/mem")
    assert completion.jobs("j") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_goes_through_the_shell_script(store, shell, tmp_path):
    import subprocess
    import sys

    job = made(store)
    words = f"gpurun logs {job.id[:4]}"
    env = {
        **os.environ, "_GPURUN_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": "2",
        "_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "gpurun"], env=env, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert job.id in done.stdout, done


def test_config_and_version_say_what_is_used(store, gpurun):
    settings = {one["name"]: one for one in json.loads(gpurun("config", "view", "--json")[1])["settings"]}
    assert settings["state directory"]["value"] == str(store.home)
    assert settings["inventory"]["why"] == "$GPURUN_INVENTORY"
    assert json.loads(gpurun("version", "--json")[1])["packages"]["paramiko"]
    assert "gpurun 0." in gpurun("version")[1]
