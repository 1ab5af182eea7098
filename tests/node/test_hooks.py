"""The site's programs on a host: how they run, how they end, and when prolog and epilog run at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from engine_stand_in import EngineStandIn
from waiting import LIMIT_S, until

from gpurun.node.agent import processes
from gpurun.node.agent.frames import Call, Cancelled, OpError
from gpurun.node.claim_rules import Seen
from gpurun.node.job import claims, gang, hooks, parts
from gpurun.node.job import gang as fencing
from gpurun.node.job.gang import fence

JOB = f"j-{os.getpid():08x}"  # hosts know a job's processes by its name: tests run beside each other
NOTHING = Seen((), ())
WHOSE = {"job": JOB, "attempt": 1, "user": "alice", "gpus": [0, 2]}


def call():
    return Call(1, lambda *_: None, False, b"")


@pytest.fixture
def program(tmp_path):
    """Write a program of the site's; return its argv."""

    def write(body, *arguments, name="hook"):
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}\n")
        path.chmod(0o700)
        return [str(path), *arguments]

    return write


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with an engine, on which an attempt was prepared."""
    home = tmp_path / "home"
    home.mkdir()
    engine = EngineStandIn(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("GPURUN_FOLDER", raising=False)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.path}")
    monkeypatch.setattr(gang, "_make_key", lambda *_: "ssh-ed25519 AAAA")
    monkeypatch.setattr(gang, "_tool", lambda name: f"/usr/bin/{name}")
    gang.prepare(call(), JOB, 1, "", True, True)
    claimed()
    yield SimpleNamespace(folder=Path(parts.job_folder(JOB)), log=tmp_path / "log")
    engine.may_finish.set()
    engine.shutdown()
    engine.server_close()


def claimed(attempt=1, refused=()):
    """The attempt asks for its GPUs."""
    claimant = {"job": JOB, "attempt": attempt, "state": "0" * 8, "user": "alice", "uid": 0, "head": "h"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "DockerStore", lambda _: None)
        patch.setattr(claims, "show_life", lambda _: None)
        patch.setattr(claims, "hide_life", lambda _: None)
        patch.setattr(claims, "take", lambda *_: list(refused))
        claims.OPS["take"](call(), claimant=claimant, cards=[[0, ""], [2, ""]])


def noting(host, code=0, word="ran"):
    return f"open({str(host.log)!r}, 'a').write({word!r} + ' '); sys.exit({code})"


def runs(host):
    return host.log.read_text().split() if host.log.exists() else []


def fenced(program, attempt=1, **options):
    epilog = {"argv": program, "limit_s": LIMIT_S, **WHOSE, "attempt": attempt}
    return fence(call(), JOB, attempt, timeout_s=LIMIT_S, epilog=epilog, **options)


# -- health: how a hook runs -----------------------------------------------------------------------------------


def health(argv, limit_s=LIMIT_S):
    return hooks.health(call(), argv, limit_s)["said"]


def test_a_healthy_host_says_nothing(program):
    assert health(program("print('all is well')")) == ""


def test_an_unhealthy_one_says_the_last_lines(program):
    said = health(
        program("print('first'); [print('line', n) for n in range(9)]; sys.stderr.write('no ib0\\n'); sys.exit(3)")
    )
    assert said.endswith("hook exited with code 3: line 5; line 6; line 7; line 8; no ib0")


def test_its_words_are_printable_and_few(program):
    body = (
        "sys.stdout.buffer.write(b'\\x1b[2J\\xff\\0 red \\xe2\\x80\\xae\\n' + b'x' * (1 << 20) + b'\\n'); sys.exit(1)"
    )
    said = health(program(body))
    assert said.isprintable() and len(said) < 1000
    said = health(program("sys.stdout.buffer.write(b'\\x1b[2J\\xff red\\n'); sys.exit(1)"))
    assert said.isprintable() and "red" in said and "\x1b" not in said


def test_arguments_are_words_no_shell(program, tmp_path):
    words = ["$(touch x)", "a b", "", "; exit 0", "*"]
    assert health(program(f"sys.exit(0 if sys.argv[1:] == {words!r} else 1)", *words)) == ""


def test_it_starts_in_a_folder_that_always_exists_without_input_or_job(program):
    body = "sys.exit(0 if os.getcwd() == '/' and sys.stdin.read() == '' and 'GPURUN_JOB' not in os.environ else 1)"
    assert health(program(body)) == ""


@pytest.mark.parametrize("kind", ["missing", "not executable", "a folder", "no interpreter"])
def test_one_that_cannot_be_started(tmp_path, kind):
    path = tmp_path / "hook"
    if kind == "a folder":
        path.mkdir()
    elif kind != "missing":
        path.write_text("#!/none/such\n")
        path.chmod(0o700 if kind == "no interpreter" else 0o600)
    if kind == "not executable" and os.getuid() == 0:
        path.chmod(0)
    assert f"{path} cannot be started: " in health([str(path)])


def test_one_that_is_killed_names_the_signal(program):
    assert "was killed by SIGTERM: bye" in health(program("print('bye', flush=True); os.kill(os.getpid(), 15)"))


class Due:
    """A timer that is over when a test says so."""

    made: ClassVar[list[Due]] = []

    def __init__(self, seconds, function):
        self.function = function
        self.made.append(self)

    def start(self):
        pass

    cancel = start


def test_one_that_hangs_is_ended_with_its_children(program, tmp_path, monkeypatch):
    note = tmp_path / "pid"
    body = f"""
import subprocess
print("waiting for the file server", flush=True)
child = subprocess.Popen(["sleep", "600"])
open({str(note)!r} + ".new", "w").write(str(child.pid))
os.rename({str(note)!r} + ".new", {str(note)!r})
time.sleep(600)
"""
    monkeypatch.setattr(processes.threading, "Timer", Due)
    argv, said = program(body), []
    thread = threading.Thread(target=lambda: said.append(health(argv)))
    thread.start()
    until(lambda: note.exists() and Due.made)
    child = int(note.read_text())
    Due.made.pop().function()
    thread.join(LIMIT_S)
    assert said[0].endswith(f"did not end within {LIMIT_S:g} s and was ended: waiting for the file server")
    until(lambda: not _runs(child))


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_one_that_runs_as_another_user_and_hangs_is_left_behind_after_its_time(program, tmp_path, monkeypatch):
    """As sudo(8) starts it: this user may not end it, and must not wait for it for ever."""
    note = tmp_path / "pid"
    argv = program(f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)")

    def refuse(*_):
        raise PermissionError

    with monkeypatch.context() as other_user:
        other_user.setattr(processes.os, "killpg", refuse)
        other_user.setattr(processes.os, "kill", refuse)
        said = health(argv, limit_s=0.2)
    assert "did not end within 0.2 s and cannot be ended, because the program runs as another user" in said
    until(lambda: note.exists() and note.read_text())
    os.kill(int(note.read_text()), 9)


def test_one_that_leaves_a_child_behind_does_not_wait_for_it(program, tmp_path):
    note = tmp_path / "pid"
    body = f"import subprocess; open({str(note)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    assert health(program(body)) == ""
    until(lambda: not _runs(int(note.read_text())))


@pytest.mark.parametrize("code", [0, 3])
def test_one_that_leaves_a_process_group_behind_leaves_nothing(program, tmp_path, code):
    """timeout(1) puts itself and its program into a process group."""
    note = tmp_path / "pid"
    shell = f"timeout 600 sh -c 'echo $$ > {note}.new; mv {note}.new {note}; exec sleep 600' &"
    body = f"""
import subprocess
subprocess.run(["sh", "-c", {shell!r}], stdout=subprocess.DEVNULL)
while not os.path.exists({str(note)!r}):
    time.sleep(0.01)
sys.exit({code})
"""
    assert bool(health(program(body))) == bool(code)
    assert not _runs(int(note.read_text()))


def test_one_that_nobody_waits_for_is_ended(program, tmp_path):
    note, asked = tmp_path / "pid", call()
    argv = program(f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    ended = []

    def run():
        with pytest.raises(Cancelled):
            hooks.health(asked, argv, LIMIT_S)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: note.exists() and note.read_text())
    asked.cancel()
    thread.join(LIMIT_S)
    assert ended and not _runs(int(note.read_text()))


# -- prolog ----------------------------------------------------------------------------------------------------


def prolog(argv, attempt=1, limit_s=LIMIT_S):
    hooks.prolog(call(), argv, limit_s, **{**WHOSE, "attempt": attempt})


def test_a_prolog_knows_its_job_and_nothing_secret(host, program):
    known = {
        "GPURUN_HOOK": "prolog",
        "GPURUN_JOB": JOB,
        "GPURUN_ATTEMPT": "1",
        "GPURUN_USER": "alice",
        "GPURUN_GPUS": "0,2",
    }
    prolog(program(f"sys.exit(0 if {known!r}.items() <= os.environ.items() else 1)"))


def test_a_prolog_runs_once_for_an_attempt(host, program):
    argv = program(noting(host))
    prolog(argv)
    prolog(argv)
    assert runs(host) == ["ran"]
    gang.prepare(call(), JOB, 2, "", True, True)
    prolog(argv, attempt=2)
    assert runs(host) == ["ran", "ran"]


def test_a_prolog_that_fails_says_so_and_runs_again(host, program):
    for _ in range(2):
        with pytest.raises(OpError, match=r"exited with code 4: the quota of alice") as failure:
            prolog(program(f"print('the quota of alice'); {noting(host, 4)}"))
        assert failure.value.kind == "prolog"
    assert len(runs(host)) == 2


def test_a_prolog_that_hangs_is_the_prologs_failure(host, program):
    with pytest.raises(OpError, match=r"did not end within 0\.2 s") as failure:
        prolog(program("time.sleep(600)"), limit_s=0.2)
    assert failure.value.kind == "prolog"


def test_no_prolog_runs_after_the_fence(host, program):
    fence(call(), JOB, 1, timeout_s=LIMIT_S)
    with pytest.raises(OpError) as failure:
        prolog(program(noting(host)))
    assert failure.value.kind == "fenced" and runs(host) == []


@pytest.mark.parametrize("content", [b"", b"x", b"\xff\0", b"9" * 100])
def test_a_damaged_note_runs_the_prolog(host, program, content):
    (host.folder / hooks.PROLOG_FILE).write_bytes(content)
    prolog(program(noting(host)))
    assert runs(host) == ["ran"]


# -- epilog ----------------------------------------------------------------------------------------------------


def test_an_epilog_runs_once_before_the_folder_is_removed(host, program):
    argv = program(
        f"assert os.path.isdir({str(host.folder)!r}) and os.environ['GPURUN_HOOK'] == 'epilog'; {noting(host)}"
    )
    assert not any(fenced(argv).values()) and not host.folder.exists()
    assert not any(fenced(argv).values())
    assert runs(host) == ["ran"]


def test_an_epilog_that_fails_keeps_no_gpu(host, program):
    rest = fenced(program(f"print('cannot unmount'); {noting(host, 1)}"))
    assert rest.pop("epilog").endswith("exited with code 1: cannot unmount")
    assert not any(rest.values()) and not host.folder.exists()


def test_an_epilog_that_hangs_is_ended(host, program):
    epilog = {"argv": program("time.sleep(600)"), "limit_s": 0.2, **WHOSE}
    rest = fence(call(), JOB, 1, timeout_s=LIMIT_S, epilog=epilog)
    assert "did not end within 0.2 s" in rest.pop("epilog")
    assert not any(rest.values())


def test_an_attempt_that_never_came_to_the_host_has_no_epilog(host, program):
    fence(call(), JOB, 1, timeout_s=LIMIT_S)
    fenced(program(noting(host)), attempt=2)
    assert runs(host) == []


def test_an_attempt_that_was_refused_its_gpus_has_no_epilog(host, program):
    """They are another job's, and epilogs reset GPUs and end processes on them."""
    fence(call(), JOB, 1, timeout_s=LIMIT_S)
    gang.prepare(call(), JOB, 2, "", True, True)
    with pytest.raises(OpError, match="other jobs hold"):
        claimed(2, [claims.refusal((0, ""), claims.Claimant("j-ffffffff", 1, "1" * 8, "eve", 1, "h"), NOTHING, "runs")])
    assert not any(fenced(program(noting(host)), attempt=2).values())
    assert runs(host) == [] and not host.folder.exists()


def test_an_attempt_that_failed_before_it_asked_for_gpus_has_no_epilog(host, program):
    fence(call(), JOB, 1, timeout_s=LIMIT_S)
    gang.prepare(call(), JOB, 2, "", True, True)
    fenced(program(noting(host)), attempt=2)
    assert runs(host) == [] and not host.folder.exists()


def test_another_start_of_the_same_attempt_has_no_epilog(host, program):
    fenced(program(noting(host)), files=False)
    assert runs(host) == []


def test_a_later_attempt_keeps_its_host_from_an_earlier_ones_epilog(host, program):
    gang.prepare(call(), JOB, 2, "", True, True)
    fenced(program(noting(host)))
    assert runs(host) == [] and host.folder.exists()


def test_an_epilog_waits_for_the_containers(host, program, monkeypatch):
    left = ["c1", "c1"]
    monkeypatch.setattr("gpurun.node.job.gang._remove_containers", lambda *_: [left.pop()] if left else [])
    assert not any(fenced(program(f"assert not {left!r} or True; {noting(host)}")).values())
    assert runs(host) == ["ran"] and left == []


def test_a_folder_that_cannot_be_removed_repeats_no_epilog(host, program, monkeypatch):
    remove, tries = fencing._remove_files, []

    def remove_the_third_time(*args, **kwargs):
        tries.append(1)
        if len(tries) > 2:
            remove(*args, **kwargs)

    monkeypatch.setattr(fencing, "_remove_files", remove_the_third_time)
    epilog = {"argv": program(noting(host)), "limit_s": LIMIT_S, **WHOSE}
    rest = fence(call(), JOB, 1, timeout_s=LIMIT_S, epilog=epilog)
    assert not rest["folder"] and len(tries) == 3
    assert runs(host) == ["ran"]


def test_an_epilog_whose_fence_was_interrupted_runs_again(host, program):
    asked = call()
    argv = program(f"open({str(host.log)!r}, 'a').write('began '); time.sleep(600)")
    epilog = {"argv": argv, "limit_s": LIMIT_S, **WHOSE}
    ended = []

    def run():
        with pytest.raises(Cancelled):
            fence(asked, JOB, 1, timeout_s=LIMIT_S, epilog=epilog)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: runs(host) == ["began"])
    asked.cancel()
    thread.join(LIMIT_S)
    assert ended and host.folder.exists()
    fenced(program(noting(host)))
    assert runs(host) == ["began", "ran"]


def test_an_epilog_first_ends_what_a_killed_agent_left_of_the_prolog(host, program):
    """Its agent was killed and could not end it."""
    variables = hooks.ForJob(**WHOSE).environment("prolog")
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, **variables}, start_new_session=True)
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, **variables, "GPURUN_JOB": "j-ffffffff"})
    try:
        until(lambda: b"GPURUN_JOB" in Path(f"/proc/{other.pid}/environ").read_bytes())
        fenced(program(noting(host)))
        assert left.wait(LIMIT_S) < 0 and other.poll() is None
    finally:
        for each in (left, other):
            each.kill()
            each.wait()


DAEMON = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open({0!r}, "w").write(str(child.pid))
"""


@pytest.mark.parametrize("end", ["", "time.sleep(600)", "sys.exit(3)"], ids=["passes", "hangs", "fails"])
def test_a_health_that_leaves_its_session_leaves_nothing(program, tmp_path, end):
    """Looks run it every ten seconds: each would leave a process for ever."""
    note = tmp_path / "pid"
    said = health(program(DAEMON.format(str(note)) + end), 2.0 if "sleep" in end else LIMIT_S)
    assert bool(said) is bool(end)
    assert not _runs(int(note.read_text()))


def test_a_process_in_the_middle_of_an_exec_is_not_missed(program, monkeypatch, tmp_path):
    """The kernel shows no environment of it for a moment: a busy host kept such a daemon for ever."""
    note, looks, real = tmp_path / "pid", [], processes.environment_of

    def in_an_exec_twice(pid, *folder):
        if note.exists() and pid == int(note.read_text() or 0):
            looks.append(pid)
        return real(pid, *folder) if len(looks) > 2 or not looks else None

    monkeypatch.setattr(processes, "environment_of", in_an_exec_twice)
    health(program(DAEMON.format(str(note))))
    assert not _runs(int(note.read_text()))


def test_threads_of_the_kernel_and_what_has_ended_are_not_waited_for():
    kernel = processes.read_process(2)
    if not kernel or kernel.command:
        pytest.skip("needs to see the kernel's threads: process 2 is another one here")
    child = subprocess.Popen(["sleep", "600"])
    gone = processes.read_process(child.pid)
    child.kill()
    child.wait()
    began = time.monotonic()
    assert [processes.environment_once_begun(each, began + LIMIT_S) for each in (kernel, gone)] == [{}, {}]
    assert time.monotonic() < began + LIMIT_S


def test_a_fence_without_an_epilog_ends_what_the_prolog_left(host, program, tmp_path):
    note = tmp_path / "pid"
    prolog(program(DAEMON.format(str(note))))
    assert _runs(int(note.read_text())), "it left its session"
    assert not any(fence(call(), JOB, 1, timeout_s=LIMIT_S).values())
    assert not _runs(int(note.read_text()))


def test_an_epilog_leaves_nothing(host, program, tmp_path):
    note = tmp_path / "pid"
    assert not any(fenced(program(DAEMON.format(str(note)))).values())
    assert not _runs(int(note.read_text()))


def test_a_fence_of_an_earlier_attempt_keeps_the_later_ones_prolog(host, program, tmp_path):
    note = tmp_path / "pid"
    gang.prepare(call(), JOB, 2, "", True, True)
    prolog(program(DAEMON.format(str(note))), attempt=2)
    fence(call(), JOB, 1, timeout_s=LIMIT_S)
    assert _runs(int(note.read_text()))
    os.kill(int(note.read_text()), 9)


def test_a_full_disk_repeats_an_epilog_rather_than_keeping_gpus(host, program, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hooks, "_write_number", full)
    assert not any(fenced(program(noting(host))).values())
    assert runs(host) == ["ran"]


def test_notes_of_hooks_are_the_users_alone(host, program):
    previous = os.umask(0o077)
    try:
        prolog(program(noting(host)))
    finally:
        os.umask(previous)
    assert stat.S_IMODE((host.folder / hooks.PROLOG_FILE).stat().st_mode) == 0o600
