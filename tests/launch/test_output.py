from __future__ import annotations

import pytest

from gpurun.launch.output import Failure, Line, excerpt_of, first_failure, parse_line

GLOO = """\
[2]<stderr>:Traceback (most recent call last):
[2]<stderr>:ValueError: boom
Process 2 exit with status code 3.
Terminating remaining workers after failure of Process 2.
Traceback (most recent call last):
RuntimeError: Horovod detected that one or more processes exited with non-zero status, the first to do so was:
Process name: 2
Exit code: 3
"""
MPI = """\
[1,1]<stderr>:boom
--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[19221,1],1]
  Exit code:    3
"""
SIGNALLED = "mpirun noticed that process rank 3 with PID 0 on node gpu-r1-02 exited on signal 9 (Killed).\n"


def lines(text):
    return [parse_line(line, "stderr") for line in text.splitlines()]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[0]<stdout>:hello", Line(0, "stdout", "hello")),
        ("[1,12]<stderr>:x: y", Line(12, "stderr", "x: y")),
        ("[3]<stdout>:", Line(3, "stdout", "")),
        ("[1,2]<stdout>:in [1,2]<stdout>:two pieces", Line(2, "stdout", "in two pieces")),
        ("[0]<stdout>:  two", Line(0, "stdout", "  two")),
        ("[0]<stdout>:\t", Line(0, "stdout", "\t")),
        ("[1,0]<stdout>:   File", Line(0, "stdout", "  File")),
        ("[2]<stdout>:says [2]<stdout>: itself", Line(2, "stdout", "says [2]<stdout>: itself")),
        ("plain", Line(None, "stdout", "plain")),
        ("[x]<stdout>:no", Line(None, "stdout", "[x]<stdout>:no")),
        (" [0]<stdout>:no", Line(None, "stdout", " [0]<stdout>:no")),
        ("", Line(None, "stdout", "")),
    ],
)
def test_whose_line_it_is(text, line):
    assert parse_line(text, "stdout") == line


def test_the_first_rank_to_fail():
    assert first_failure(lines(GLOO)) == Failure(2, 3)
    assert first_failure(lines(MPI)) == Failure(1, 3)
    assert first_failure(lines(SIGNALLED)) == Failure(3, 137)
    assert first_failure(lines(GLOO.replace("Exit code: 3", "Exit code: -11"))) == Failure(2, 139)
    assert first_failure([]) is None


def test_a_rank_cannot_pretend_to_be_the_launcher():
    forged = "[0]<stdout>:Process name: 7\n[0]<stdout>:Exit code: 1\n"
    assert first_failure(lines(forged + GLOO)) == Failure(2, 3)
    assert first_failure(lines(forged)) is None


def test_excerpt_is_of_one_rank_and_short():
    many = [Line(2, "stderr", f"line {i}") for i in range(100)] + [Line(1, "stderr", "other"), Line(2, "stderr", " ")]
    assert excerpt_of(many, 2) == tuple(f"line {i}" for i in range(88, 100))
