"""What an agent says of ranks that gpurun's own script started: real scripts, real signals, folders full of lies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import LIMIT_S, until

from gpurun.launch.launchers.horovod import GLOO
from gpurun.launch.rank import rank_script
from gpurun.node.agent import processes
from gpurun.node.agent.call import Call, Cancelled, OpError
from gpurun.node.job import rank_folders, rank_processes, ranks
from gpurun.runtime import gpurun_runtime

JOB = f"j-1{os.getpid():07x}"  # processes of other test runs on this machine are other jobs'
WAIT = "trap 'echo told; exit 7' TERM; echo up; while :; do sleep 0.05; done"


def call():
    return Call(1, lambda *_: None, False, b"")


class Host:
    """A host with one job; ranks are started as its containers would start them."""

    def __init__(self, home: Path) -> None:
        self.folder = home / ".gpurun" / "jobs" / JOB
        self.run = self.folder / "run"
        self.run.mkdir(parents=True)
        self.script = self.folder / "rank"
        self.write()
        self.started: list[subprocess.Popen[bytes]] = []

    def write(self, grace_s: float = 1) -> None:
        self.script.write_text(rank_script([], GLOO, grace_s=grace_s, notice_s=0, copied_s=LIMIT_S))

    def start(self, rank: int, *command: str, attempt: int = 1, job: str = JOB, **environ: str):
        env = {**os.environ, "GPURUN_RUN": str(self.run), "GPURUN_ATTEMPT": str(attempt), "GPURUN_JOB": job}
        env |= {"HOROVOD_RANK": str(rank), **environ}
        argv = ["sh", str(self.script), *command]
        self.started.append(subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
        return self.started[-1]

    def fake(self, name: str, attempt: int = 1, **files: str) -> Path:
        """A rank's folder that no script made; file names have their dot as ``_``."""
        folder = self.run / "ranks" / str(attempt) / name
        folder.mkdir(parents=True)
        (folder / "start").write_text("started\n")
        for file, text in files.items():
            (folder / file.replace("_", ".")).write_text(text)
        return folder


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    host = Host(tmp_path)
    yield host
    for process in host.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


def follow(have=None, attempt=1, once=True):
    """What is there, as (kind, id, rank, rest) of each item; output of one stream in one piece."""
    return list(ranks.follow(call(), JOB, attempt, have or {}, once))


def kinds(replies):
    return [(reply.value["kind"], reply.value["rank"]) for reply in replies]


def text(replies, rank, stream="o"):
    return b"".join(
        bytes(reply.payload) for reply in replies
        if reply.value["kind"] == "output" and reply.value["rank"] == rank and reply.value["stream"] == stream
    )  # fmt: skip


def ends(replies):
    return [
        (reply.value["rank"], reply.value["code"], reply.value.get("killed", False)) for reply in replies
        if reply.value["kind"] == "end"
    ]  # fmt: skip


@contextlib.contextmanager
def following(have=None) -> Iterator[SimpleNamespace]:
    """Follow in a thread; `until` waits for a condition on all that came."""
    mine, came, changed = call(), [], threading.Condition()
    failed = []

    def read():
        try:
            for reply in ranks.follow(mine, JOB, 1, have or {}):
                with changed:
                    came.append(reply)
                    changed.notify_all()
        except Cancelled:
            pass
        except BaseException as error:
            failed.append(error)
            raise

    def until(condition):
        with changed:
            assert changed.wait_for(lambda: condition(came), LIMIT_S), came[-20:]

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield SimpleNamespace(came=came, until=until)
    finally:
        mine.cancel()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert not failed


def printed(host, what=b"up"):
    """Ranks that have printed it."""
    return sum(what in path.read_bytes() for path in host.run.glob("ranks/*/*/o"))


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
    processes.note(str(host.folder / "main.json"), processes.read_process(os.getpid()))
    assert ends(follow()) == [(4, 137, True)]
    assert ranks.list_ranks(call(), JOB, 1)[0]["code"] == 137


def test_a_rank_that_was_killed_says_whether_it_was_seen_to_fall_with_its_container(host):
    host.fake("4.77.1")
    container = subprocess.Popen(["sleep", "1000"])
    host.started.append(container)
    processes.note(str(host.folder / "main.json"), processes.read_process(container.pid))
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
    assert rank_folders.parse(name) is None
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


# -- notice ---------------------------------------------------------------------------------------------------


def test_a_notice_reaches_the_rank_and_not_its_children_nor_anybody_else(host, tmp_path):
    (tmp_path / "child").write_text("trap 'echo child >told; exit' TERM; while :; do sleep 0.05; done")
    command = f"cd {tmp_path}; sh child & {WAIT}"
    host.write(grace_s=5)
    first, second = host.start(0, "sh", "-c", command), host.start(1, "sh", "-c", WAIT)
    stranger = host.start(0, "sh", "-c", WAIT, job="j-ffffffff")
    later = host.start(0, "sh", "-c", WAIT, attempt=2)
    until(lambda: printed(host) == 4)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 2
    assert (second.wait(LIMIT_S), stranger.poll(), later.poll()) == (7, None, None)
    until(lambda: (0, 7, False) in ends(follow()))
    assert first.wait(LIMIT_S) == 7  # the script has ended the child by now, the notice had not
    until(lambda: printed(host, b"told") == 2)


def test_a_notice_before_the_rank_starts_is_kept_for_it_and_only_in_that_attempt(host, tmp_path):
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 0
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 0
    assert host.start(0, "touch", str(tmp_path / "ran")).wait(LIMIT_S) == 143
    assert not (tmp_path / "ran").exists()
    assert host.start(0, "touch", str(tmp_path / "ran"), attempt=2).wait(LIMIT_S) == 0


def test_no_rank_escapes_a_notice_that_comes_while_ranks_start(host):
    """A rank is told, or never starts: whichever step its script is at."""
    for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
        attempt = int(delay_s * 1000) + 10
        started = [host.start(rank, "sh", "-c", "sleep 20", attempt=attempt) for rank in range(3)]
        time.sleep(delay_s)
        rank_processes.signal(call(), JOB, "TERM", attempt=attempt)
        assert [abs(process.wait(LIMIT_S)) % 128 for process in started] == [15, 15, 15]


def test_a_rank_that_has_ended_is_counted_no_more_while_its_script_keeps_that_from_the_launcher(host):
    host.write(grace_s=600)
    started = [host.start(rank, "sh", "-c", WAIT) for rank in (0, 1)]
    until(lambda: printed(host) == 2)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 2
    started.append(host.start(2, "true"))
    until(lambda: sorted(ends(follow())) == [(0, 7, False), (1, 7, False), (2, 143, False)])
    until(lambda: ranks.count(call(), JOB) == 0)
    assert [process.poll() for process in started] == [None, None, None]
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 0
    assert [process.poll() for process in started] == [None, None, None]


@pytest.mark.parametrize(
    ("environ", "cmdline", "found"),
    [(b"A=1\0B\0", b"x\0", {"A": "1"}), (b"", b"", None), (b"", b"x\0", {}), (None, b"", None)],
    ids=["usual", "gone, or in the middle of an exec", "started without any", "no such process"],
)
def test_who_has_no_environment_for_a_moment_is_not_taken_for_somebody_without(tmp_path, environ, cmdline, found):
    """A tool of the script that is just ending, or starting, would pass for the rank, and the rank not be told."""
    (tmp_path / "7").mkdir()
    for name, content in (("environ", environ), ("cmdline", cmdline)):
        if content is not None:
            (tmp_path / "7" / name).write_bytes(content)
    assert processes.environment_of(7, str(tmp_path)) == found


def test_a_rank_that_hides_its_environment_is_told(host):
    """Programs that show their own name in ps write over it."""
    code = (
        "import ctypes, os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))\n"
        "stat = open('/proc/self/stat').read().rpartition(')')[2].split()\n"
        "begin, end = int(stat[47]), int(stat[48])\n"
        "ctypes.memset(begin, 0, end - begin)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    process = host.start(0, sys.executable, "-c", code)
    until(lambda: printed(host) == 1)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 1
    assert process.wait(LIMIT_S) == 7


def test_a_rank_that_could_not_report_is_told_too(host, tmp_path):
    out = tmp_path / "out"
    process = host.start(0, "sh", "-c", f"exec >{out}; {WAIT}", GPURUN_RUN="/proc/1/no such")
    until(lambda: out.exists() and "up" in out.read_text())
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 1
    assert process.wait(LIMIT_S) == 7


def test_without_reports_a_program_under_a_shell_is_told_too(host, tmp_path):
    out = tmp_path / "out"
    command = f'exec >{out}; sh -c "{WAIT}"; true'
    host.start(0, "sh", "-c", command, GPURUN_RUN="/proc/1/no such")
    until(lambda: out.exists() and "up" in out.read_text())
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 1
    until(lambda: "told" in out.read_text())


def test_what_a_rank_left_behind_is_no_rank(host):
    survivor = "setsid sh -c \"trap '' TERM; echo up; exec sleep 300\""
    process = host.start(0, "sh", "-c", f"{survivor} & sleep 0.5; kill -9 $PPID")
    process.wait(LIMIT_S)
    until(lambda: printed(host) == 1)
    until(lambda: len(rank_processes.of_job(JOB, 1)) == 1)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 0
    for one in rank_processes.of_job(JOB, 1):
        os.kill(one.process.pid, signal.SIGKILL)


def test_a_full_disk_or_a_trap_in_the_markers_place_keeps_no_notice_from_a_rank(host, tmp_path):
    (host.run / "stop.1").symlink_to(tmp_path / "secret")
    process = host.start(0, "sh", "-c", WAIT)
    until(lambda: printed(host) == 1)
    assert rank_processes.signal(call(), JOB, "TERM", attempt=1) == 1
    assert process.wait(LIMIT_S) == 7
    assert not (tmp_path / "secret").exists()


@pytest.mark.parametrize("name", ["", "KILL -9", "9", "SIGTERM", "_DFL", "nosuch"])
def test_a_signal_that_is_none_is_refused(host, name):
    with pytest.raises(ValueError, match="no signal"):
        rank_processes.signal(call(), JOB, name, attempt=1)
    assert not list(host.run.iterdir())


def test_a_rank_that_has_printed_more_than_the_head_can_copy_is_named_all_the_same(host, monkeypatch):
    """The head reads slowly. The end comes first, as old as it is, and nothing of the output is lost."""
    monkeypatch.setattr(ranks, "MOST_WAIT_S", 0.0)
    folder = host.fake("0.17.99", o="x" * (4 << 20), end_3="")
    ended_s = time.time() - 50
    os.utime(folder / "end.3", (ended_s, ended_s))
    found = follow()
    (place,) = [number for number, reply in enumerate(found) if reply.value["kind"] == "end"]
    assert found[place].value["code"] == 3
    assert found[place].value["more"] is True
    assert 50 <= found[place].value["age_s"] < time.time() - ended_s
    assert 0 < place < len(found) - 1
    assert len(text(found, 0)) == 4 << 20


def test_the_age_of_an_end_is_that_of_the_moment_it_is_told(host):
    """Others may have failed while the output of this one was copied."""
    host.fake("0.17.99", o="x" * (1 << 18), end_3="")
    replies = ranks.follow(call(), JOB, 1, {}, True)
    found = [next(replies), next(replies)]
    time.sleep(0.3)
    found += replies
    assert found[-1].value["kind"] == "end"
    assert found[-1].value["age_s"] >= 0.3


def test_a_rank_that_its_launcher_has_told_to_end_is_counted_and_not_told_again(host):
    """horovodrun ends the ranks beside a failed one; a second later the supervisor gives them their notice."""
    go = host.run / "go"
    script = host.start(0, "sh", "-c", f"trap 'echo told' TERM; echo up; until [ -e {go} ]; do sleep 0.05; done")
    other = host.start(1, "sh", "-c", WAIT)
    until(lambda: printed(host) == 2)
    script.terminate()
    until(lambda: printed(host, b"told") == 1)
    assert rank_processes.signal(call(), JOB, "TERM", 1) == 2
    assert other.wait(LIMIT_S) == 7
    go.touch()
    assert script.wait(LIMIT_S) == 0
    assert text(follow(), 0) == b"up\ntold\n"


@pytest.mark.parametrize("name", ["USR1", "KILL"])
def test_another_signal_reaches_also_those_that_their_launcher_has_told_to_end(host, name):
    script = host.start(0, "sh", "-c", "trap 'echo told' TERM; echo up; while :; do sleep 0.05; done")
    until(lambda: printed(host) == 1)
    script.terminate()
    until(lambda: printed(host, b"told") == 1)
    assert rank_processes.signal(call(), JOB, name, 1) == 1
    assert script.wait(LIMIT_S) == 128 + getattr(signal, f"SIG{name}")
