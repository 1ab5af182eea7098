"""``gpurun tensorboard`` as a process: the curve that a job writes, seen over HTTP while it is written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from boards import new_job, until, write


def test_a_curve_is_shown_while_it_grows_to_whoever_has_the_url(home, call):
    job = new_job(home)
    write(job.outputs / "train", 1, 4)
    board = call("cnn")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", board.url)
    assert board.get("/")[0] == 403 and board.get("/data/runs")[0] == 403
    token = board.url.rpartition("=")[2]
    assert token.encode() not in Path(f"/proc/{board.process.pid}/cmdline").read_bytes()
    assert board.get(board.url[board.url.index("/?") :])[0] == 303
    assert b"<title>" in board.get("/")[1]
    run = f"cnn-{job.id}/train"
    until(lambda: board.curve(run) == [1, 2, 3])
    write(job.outputs / "train", 4, 6)
    until(lambda: board.curve(run) == [1, 2, 3, 4, 5])
    board.process.send_signal(signal.SIGTERM)
    _, said = board.process.communicate(timeout=20)
    assert board.process.returncode == 0 and "Traceback" not in said
    assert f"ssh -L {board.port}:127.0.0.1:{board.port}" in said
    assert board.folders() == []


def test_it_ends_when_nobody_looks_and_what_a_killed_call_left_goes_with_the_next(home, call):
    new_job(home)
    killed = call("cnn")
    until(killed.folders)
    killed.process.kill()
    killed.process.wait()
    assert killed.folders()
    board = call("cnn", "--idle", "1s")
    _, said = board.process.communicate(timeout=60)
    assert board.process.returncode == 0
    assert "no request for 1s: TensorBoard ended" in said and "the head has no event file yet" in said
    assert killed.folders() == [] and board.folders() == []


def test_two_calls_at_once_have_a_port_each_and_a_taken_one_is_named(home, call):
    job = new_job(home)
    one, other = call(job.id), call(job.id)
    assert one.port != other.port
    taken = call(job.id, "--port", str(one.port))
    _, said = taken.process.communicate(timeout=60)
    assert taken.process.returncode == 2
    assert "in use" in said and "--port" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("name", "said"),
    [("nothing", "there is no job 'nothing'"), ("cnn", "the job keeps no outputs"), ("\x1b[2J", "there is no job")],
)
def test_what_cannot_be_shown_is_said(home, call, name, said):
    new_job(home, outputs=None)
    board = call(name)
    _, err = board.process.communicate(timeout=60)
    assert board.process.returncode == 2 and said in err
    assert "\x1b" not in err and "Traceback" not in err


def test_without_the_extra_it_says_what_to_install(home):
    new_job(home)
    program = "import sys; sys.modules['tensorboard'] = None; from gpurun.cli.main import main; main(sys.argv[1:])"
    argv = [sys.executable, "-c", program, "tensorboard", "cnn"]
    environ = {**os.environ, "GPURUN_HOME": str(home)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install 'gpurun[tensorboard]'" in done.stderr
