"""What an agent says of ranks that gpurun's own script started: real scripts, real signals, folders full of lies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_scripts import JOB, WAIT, call, ends, follow, following, host_at, kinds, printed, text
from waiting import LIMIT_S, until

from gpurun.node.agent import processes
from gpurun.node.agent.frames import OpError
from gpurun.node.job import parts, rank_processes, ranks
from gpurun.node.job import rank_processes as rank_folders
from gpurun.runtime import gpurun_runtime


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with host_at(tmp_path) as host:
        yield host


def test_a_rank_is_followed_from_its_start_to_its_end(host):
    with following() as stream:
        time.sleep(0.2)  # the folder is not there yet
        host.start(3, "sh", "-c", "echo one; sleep 0.5; printf 'tw\\377o' >&2; exit 37")
        stream.until(lambda came: len(came) == 4)
        came = list(stream.came)
    # On a busy machine the words may come behind the end: the script waits a fifth of a second for them.
    assert kinds(came)[0] == ("start", 3)
    assert sorted(kinds(came)[1:]) == [("end", 3), ("output", 3), ("output", 3)]
    assert (text(came, 3), text(came, 3, "e")) == (b"one\n", b"tw\377o")
    assert ends(came) == [(3, 37, False)]
    assert all(0 <= reply.value["age_s"] < LIMIT_S for reply in came if reply.value["kind"] != "output")
    assert [reply.value["end"] for reply in came if reply.value["kind"] == "output"] == [4, 4]


def test_starts_and_ends_are_told_again_but_output_only_from_where_the_head_is(host):
    host.start(0, "sh", "-c", "echo 0123456789; echo x >&2").wait(LIMIT_S)
    first = follow()
    ident = first[0].value["id"]
    again = follow({ident: [4, 2], "9.9.9": [7, 7]})
    assert kinds(again) == [("start", 0), ("output", 0), ("end", 0)]
    assert text(again, 0) == b"456789\n"
    assert kinds(follow({ident: [11, 2]})) == [("start", 0), ("end", 0)]


def test_output_of_any_size_comes_in_small_pieces_and_before_the_end(host):
    size = 3 << 20
    host.start(0, sys.executable, "-c", f"print('x' * {size}, end='')").wait(LIMIT_S)
    host.start(1, "echo", "short").wait(LIMIT_S)
    came = follow()
    assert text(came, 0) == b"x" * size
    assert max(len(reply.payload) for reply in came) <= 1 << 16
    assert kinds(came)[-1] == ("end", 0)
    assert kinds(came).index(("end", 1)) < len(came) - 10  # it did not wait for the long one


def test_the_rest_of_a_long_output_begins_at_a_line_of_its_last_bytes(host):
    """All ranks together: each of two has half of the bytes, and each of its outputs."""
    program = "import sys\nfor n in range(9000): print('line', n); print('e', n, file=sys.stderr)"
    for rank in (0, 1):
        host.start(rank, sys.executable, "-c", program).wait(LIMIT_S)
    came = follow(once=True, rest_bytes=8000)
    for rank in (0, 1):
        for stream, begin in (("o", b"line "), ("e", b"e ")):
            words = text(came, rank, stream)
            assert words.startswith(begin) and words.endswith(b" 8999\n") and 3900 < len(words) <= 4000
            assert [int(line.split()[1]) for line in words.splitlines()] == [*range(9000 - words.count(b"\n"), 9000)]
    assert ends(came) == [(0, 0, False), (1, 0, False)]
    ident = next(reply.value["id"] for reply in came if reply.value["rank"] == 0)
    size = max(reply.value["end"] for reply in came if reply.value.get("stream") == "o")
    again = follow({ident: [size - 5, 0]}, once=True, rest_bytes=8000)
    assert text(again, 0) == b"8999\n"


def test_a_long_output_without_a_line_is_cut_anywhere(host):
    host.start(0, sys.executable, "-c", "print('x' * 300_000, end='')").wait(LIMIT_S)
    assert text(follow(once=True, rest_bytes=100_000), 0) == b"x" * 100_000
    assert text(follow(once=True, rest_bytes=0), 0) == b""


def test_what_survives_a_rank_is_still_heard(host):
    with following() as stream:
        go = host.run / "go"
        survivor = f"echo up; until [ -e {go} ]; do sleep 0.05; done; echo late"
        host.start(0, "sh", "-c", f"env -i PATH=\"$PATH\" setsid sh -c '{survivor}' & exit 2")
        stream.until(lambda came: ends(came) and text(came, 0))
        go.touch()
        stream.until(lambda came: b"late" in text(came, 0))
        assert kinds(stream.came)[-2:] == [("end", 0), ("output", 0)]


def test_a_rank_whose_script_is_killed_has_ended_too(host):
    with following() as stream:
        process = host.start(5, "sh", "-c", WAIT)
        stream.until(lambda came: text(came, 5))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)
        stream.until(ends)
        assert ends(stream.came) == [(5, 137, True)]
        name = stream.came[0].value["id"]
        (host.run / "ranks" / "1" / name / "end.9").touch()
        stream.until(lambda came: len(ends(came)) == 2)
        assert ends(stream.came)[1] == (5, 9, False)


def test_after_the_container_is_gone_its_ranks_have_ended_if_the_agent_could_have_seen_them(host):
    host.fake("4.77.1")
    assert ends(follow()) == []
    assert ranks.list_ranks(call(), JOB, 1)[0]["code"] is None
    processes.note_process(str(host.folder / "main.json"), processes.read_process(os.getpid()))
    assert ends(follow()) == [(4, 137, True)]
    assert ranks.list_ranks(call(), JOB, 1)[0]["code"] == 137


def test_a_rank_that_was_killed_says_whether_it_was_seen_to_fall_with_its_container(host):
    host.fake("4.77.1")
    container = subprocess.Popen(["sleep", "1000"])
    host.started.append(container)
    processes.note_process(str(host.folder / "main.json"), processes.read_process(container.pid))
    with following() as stream:
        for rank in (5, 6):
            host.start(rank, "sh", "-c", WAIT)
            stream.until(lambda came, rank=rank: text(came, rank))
        os.killpg(host.started[-2].pid, signal.SIGKILL)
        stream.until(lambda came: len(ends(came)) == 2)
        os.killpg(host.started[-1].pid, signal.SIGKILL)
        container.kill()
        container.wait(LIMIT_S)
        stream.until(lambda came: len(ends(came)) == 3)
        fell = {r.value["rank"]: r.value.get("container", False) for r in stream.came if r.value["kind"] == "end"}
        assert fell == {4: False, 5: False, 6: True}
    assert not any("container" in reply.value for reply in follow()), "another agent has not seen it"


def test_two_jobs_that_start_at_the_same_moment_are_told_apart(host):
    """Their scripts may have the same numbers: the start counts hundredths of a second, the pid from the container."""
    mine, others = (
        subprocess.Popen(["sleep", "1000"], env={**os.environ, "GPURUN_JOB": job}, start_new_session=True)
        for job in (JOB, "j-00000001")
    )
    host.started += [mine, others]
    until(lambda: processes.environment_of(others.pid))
    found = processes.read_process(others.pid)
    name = rank_folders.parse_rank_folder(f"0.{others.pid}.{found.started}")
    assert rank_processes.script_of("j-00000001", name, [found]) == found
    assert rank_processes.script_of(JOB, name, [found]) is None, "another job's"
    name = name._replace(pid=others.pid + 1)
    assert rank_processes.script_of("j-00000001", name, [found]) is None, "another one's of the same hundredth"
    host.fake(f"3.{others.pid}.{found.started}")
    processes.note_process(str(host.folder / "main.json"), processes.read_process(mine.pid))
    assert ends(follow()) == [(3, 137, True)]


def test_a_process_in_the_middle_of_an_exec_has_made_no_folder(host, monkeypatch):
    found = processes.read_process(os.getpid())
    name = rank_folders.parse_rank_folder(f"0.{found.pid}.{found.started}")
    assert rank_processes.script_of(JOB, name, [found]) == found
    monkeypatch.setattr(rank_processes, "environment_of", lambda _: None)
    assert rank_processes.script_of(JOB, name, [found]) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a PID namespace")
def test_a_container_that_the_kernel_is_still_ending_has_fallen_too(host):
    """A busy host takes seconds for all its processes. Here one of them stays, for its parent reaps no child."""
    container = subprocess.Popen(["unshare", "--fork", "--pid", "sleep", "1000"], start_new_session=True)
    host.started.append(container)
    (main,) = until(lambda: children_of(container.pid))
    until(lambda: processes.command_line(main)[0] == "sleep")
    entered = subprocess.Popen(["nsenter", "--target", str(main), "--pid", "sleep", "1000"], start_new_session=True)
    host.started.append(entered)
    until(lambda: children_of(entered.pid))
    entered.send_signal(signal.SIGSTOP)
    processes.note_process(str(host.folder / "main.json"), processes.read_process(main))
    with following() as stream:
        rank = host.start(5, "sh", "-c", WAIT)
        stream.until(lambda came: text(came, 5))
        os.kill(main, signal.SIGKILL)
        os.killpg(rank.pid, signal.SIGKILL)
        stream.until(ends)
        (end,) = (reply.value for reply in stream.came if reply.value["kind"] == "end")
    assert end["container"] is True
    assert not parts.has_job_ended(JOB), "the kernel is still at it"


def children_of(pid: int) -> list[int]:
    return [each.pid for each in processes.list_processes() if each.parent == pid]


def test_another_attempt_is_another_story(host):
    host.start(0, "true", attempt=1).wait(LIMIT_S)
    assert (len(follow(attempt=1)), follow(attempt=2)) == (2, [])
    assert follow({"0.1.1": [0, 0]}, attempt=7) == []


def test_a_job_that_is_none_is_refused(host):
    for job in ("../..", "", "j-0A1B2C3D"):
        with pytest.raises(OpError):
            list(ranks.follow(call(), job, 1, {}, once=True))
    with pytest.raises((OpError, ValueError)):
        list(ranks.follow(call(), JOB, "../..", {}, once=True))


def test_the_list_says_which_ranks_live(host):
    host.start(0, "false").wait(LIMIT_S)
    host.start(1, "sh", "-c", WAIT)
    until(lambda: printed(host) == 1)
    found = ranks.list_ranks(call(), JOB, 1)
    assert [(one["rank"], one["code"]) for one in found] == [(0, 1), (1, None)]
    assert all(one["age_s"] >= 0 for one in found)


RENUMBERED = """
import sys, time, types
horovod = types.ModuleType("horovod.torch")
horovod.is_initialized, horovod.rank = (lambda: True), (lambda: 0)
sys.modules["horovod.torch"] = horovod
import gpurun_runtime
gpurun_runtime.progress(1)
print("up", flush=True)
time.sleep(60)
"""


def test_a_rank_that_its_launcher_has_renumbered_is_listed_by_its_present_number(host):
    runtime = str(Path(gpurun_runtime.__file__).parent)
    host.start(3, sys.executable, "-c", RENUMBERED, PYTHONPATH=runtime)
    host.start(1, sys.executable, "-c", RENUMBERED.replace("lambda: True", "lambda: 1 / 0"), PYTHONPATH=runtime)
    until(lambda: printed(host) == 2)
    assert sorted(one["rank"] for one in ranks.list_ranks(call(), JOB, 1)) == [0, 1]
    assert {reply.value["rank"] for reply in follow()} == {1, 3}  # whose output it is does not change


REPORTS = """\
import gpurun_runtime
for step in range(3):
    gpurun_runtime.report(step, accuracy=step / 2, of=7)
gpurun_runtime.report(3, loss=float("nan"))
print("done", flush=True)
"""


def test_every_report_of_a_rank_is_told_once_and_apart_from_what_it_prints(host):
    host.start(2, sys.executable, "-c", REPORTS, PYTHONPATH=str(Path(gpurun_runtime.__file__).parent)).wait()
    told = [reply for reply in follow() if reply.value["kind"] == "output"]
    said = b"".join(reply.payload for reply in told if reply.value["stream"] == "m")
    reports = [json.loads(line) for line in said.splitlines()]
    assert [(one["step"], one["metrics"]) for one in reports[:3]] == [
        (n, {"accuracy": n / 2, "of": 7}) for n in range(3)
    ]
    assert reports[3]["metrics"]["loss"] != reports[3]["metrics"]["loss"] and all(one["time"] > 1e9 for one in reports)
    assert b"".join(reply.payload for reply in told if reply.value["stream"] == "o") == b"done\n"
    (name,) = (reply.value["id"] for reply in told if reply.value["stream"] == "o")
    assert [r for r in follow({name: [5, 0, len(said)]}) if r.value["kind"] == "output"] == []


def test_outside_gpurun_a_report_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(gpurun_runtime, "_FOLDER", str(tmp_path / "nothing"))
    monkeypatch.setenv("GPURUN_RANK_ID", "1/2/3.4.5")
    gpurun_runtime.report(1, accuracy=0.5)
    monkeypatch.setattr(gpurun_runtime, "_FOLDER", None)
    gpurun_runtime.report(1, accuracy=0.5)


@pytest.mark.parametrize("number", ["", "x", "-1", "9" * 50, "1\n", "\0"])
def test_a_number_that_no_rank_has_is_not_believed(host, number):
    (host.fake("4.1.1") / "now").write_text(number)
    (host.fake("5.1.1") / "now").symlink_to(host.run)
    assert [one["rank"] for one in ranks.list_ranks(call(), JOB, 1)] == [4, 5]


# -- hostile folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../x", "..", "x", "1", "1.2", "01.2.3", "1.2.3.4", "-1.2.3", "1.0.3", "1.2.3\n", "٣.2.3", "9999999.1.1",
     "1.99999999999.1", " 1.2.3", "1.2." + "9" * 40],
)  # fmt: skip
def test_folders_with_other_names_are_no_ranks(host, name):
    if "/" not in name and name != "..":
        host.fake(name, end_0="")
    assert rank_folders.parse_rank_folder(name) is None
    assert follow() == []


def test_links_pipes_and_folders_in_the_place_of_files_are_not_read(host, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    linked = host.fake("0.1.1")
    (linked / "o").symlink_to(secret)
    os.mkfifo(linked / "e")
    (linked / "end.0").symlink_to(secret)
    (linked / "end.1").mkdir()
    os.mkfifo(linked / "end.2")
    other = host.fake("1.1.1", o="mine", end_3="")
    (host.run / "ranks" / "1" / "2.1.1").symlink_to(other)
    no_start = host.fake("3.1.1", end_0="")
    (no_start / "start").unlink()
    (no_start / "start").symlink_to(secret)
    came = follow()
    assert kinds(came) == [("start", 0), ("start", 1), ("output", 1), ("end", 1)]
    assert b"secret" not in text(came, 0) + text(came, 1)


@pytest.mark.parametrize("place", ["ranks", "ranks/1", "."])
def test_a_link_above_the_ranks_leads_nowhere(host, tmp_path, place):
    host.fake("0.1.1", end_0="", o="mine")
    path = host.run / place
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert follow() == []
    assert ranks.list_ranks(call(), JOB, 1) == []


@pytest.mark.parametrize(
    "ends_with", ["end", "end.", "end.x", "end.1000", "end.256", "end.-1", "end.1\n", "end.٣", "end.00"]
)
def test_only_codes_that_a_rank_can_have_are_ends(host, ends_with):
    (host.fake("0.1.1") / ends_with).write_text("garbage " * 1000)
    assert kinds(follow()) == [("start", 0)]


def test_an_end_of_any_content_costs_nothing_and_the_oldest_of_several_counts(host):
    folder = host.fake("0.1.1")
    for name in ("end.5", "end.7"):
        with (folder / name).open("wb") as stream:
            stream.truncate(1 << 40)
    os.utime(folder / "end.7", (1, 1))
    assert ends(follow()) == [(0, 7, False)]


def test_a_hole_of_any_size_is_passed_over(host):
    folder = host.fake("0.1.1", end_0="")
    with (folder / "o").open("wb") as stream:
        stream.write(b"begin")
        stream.truncate(1 << 42)
        stream.seek(1 << 42)
        stream.write(b"the end")
    came = follow()
    assert text(came, 0).startswith(b"begin")
    assert text(came, 0).endswith(b"the end")
    assert sum(len(reply.payload) for reply in came) < 1 << 20
    assert kinds(came)[-1] == ("end", 0)


def test_output_that_is_cut_short_is_read_from_its_beginning_and_the_end_still_comes(host):
    folder = host.fake("0.1.1", o="0123456789")
    with following() as stream:
        stream.until(lambda came: text(came, 0) == b"0123456789")
        os.truncate(folder / "o", 0)
        with (folder / "o").open("ab") as out:
            out.write(b"new")
        stream.until(lambda came: text(came, 0) == b"0123456789new")
        os.truncate(folder / "o", 1)
        (folder / "end.0").touch()
        stream.until(ends)
    assert kinds(follow({"0.1.1": [10**12, 0]}))[-1] == ("end", 0)


def test_folders_without_number_cost_a_bounded_look(host, monkeypatch):
    monkeypatch.setattr(rank_folders, "MOST_RANKS", 5)
    monkeypatch.setattr(rank_folders, "_MOST_NAMES", 20)
    for number in range(40):
        host.fake(f"{number}.1.1")
    assert len(follow()) == 5
    folder = host.fake("0.1.1", attempt=2)
    for number in range(200):
        (folder / f"x{number}").touch()
    (folder / "end.0").touch()
    assert kinds(follow(attempt=2))[0] == ("start", 0)


def test_a_folder_that_goes_while_it_is_followed_is_no_error(host):
    folder = host.fake("0.1.1", o="x")
    with following() as stream:
        stream.until(lambda came: text(came, 0) == b"x")
        for path in (folder / "o", folder / "start", folder):
            path.rmdir() if path.is_dir() else path.unlink()
        host.fake("1.1.1", end_0="")
        stream.until(ends)
        assert ends(stream.came) == [(1, 0, False)]


def test_files_that_may_not_be_read_are_no_error(host):
    folder = host.fake("0.1.1", o="x", end_0="")
    (folder / "o").chmod(0)
    assert kinds(follow())[0] == ("start", 0)
