"""Which process is a job's supervisor, while it forks and beside others that look like it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from faulting import supervisor_of

FORKS = "import os, sys; child = os.fork(); print(os.getpid(), flush=True) if child else None; sys.stdin.read()"


def process(*argv: str):
    return subprocess.Popen(
        [sys.executable, "-c", FORKS, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_child_that_was_just_forked_is_not_the_supervisor():
    with process("gpurun.supervisor", "j-forks", "end") as one, process("gpurun.supervisor", "j-forks2", "end") as two:
        pids = [int(each.stdout.readline()) for each in (one, two)]
        assert [supervisor_of("j-forks").pid, supervisor_of("j-forks2").pid] == pids


@pytest.mark.parametrize("job", ["j-nobody", "", "'; echo *", "j-\n"])
def test_a_job_without_a_supervisor_has_none(job):
    with pytest.raises(ValueError, match="unpack"):
        supervisor_of(job)
