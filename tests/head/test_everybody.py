"""What root's recovery of every user's jobs gives to them, and what it keeps to itself."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest

from gpurun.head import waiter


@pytest.fixture
def started(own_copy):
    """How the command was started, in the place of starting it."""
    found = SimpleNamespace()

    def run(argv, **options):
        found.argv, found.options = argv, options
        return SimpleNamespace(returncode=0, stdout='{"adopted": ["j-1"], "waiter": true}', stderr="")

    own_copy(waiter, "subprocess", run=run)
    return found


def test_every_user_is_told_where_the_heads_docker_is_and_nothing_that_is_roots_own(started, tmp_path):
    environ = {
        "DOCKER_HOST": "unix:///run/user/0/docker.sock", "PATH": "/bin", "HOME": "/root", "AWS_SECRET": "s",
        "LD_PRELOAD": "/root/x.so", "PYTHONPATH": str(tmp_path), "GPURUN_INVENTORY": "/root/i.yaml",
    }  # fmt: skip
    tmp_path.chmod(0o777)
    done = waiter.recover_as(os.getuid(), tmp_path, environ, ["--quiet"])
    assert (done.adopted, done.waiter, done.problem) == (("j-1",), True, "")
    given = started.options["env"]
    assert given["DOCKER_HOST"] == "unix:///run/user/0/docker.sock"
    assert set(given) == {"DOCKER_HOST", "PATH", "HOME", "USER", "LOGNAME", "GPURUN_HOME"}
    assert (started.options["user"], started.options["cwd"], started.argv[-1]) == (os.getuid(), "/", "--quiet")


def test_a_user_without_an_account_is_named(started, tmp_path):
    assert "has no account any more" in waiter.recover_as(3_999_999_999, tmp_path, {}).problem
    assert not hasattr(started, "argv")


@pytest.mark.parametrize("error", [OSError("no processes"), subprocess.TimeoutExpired("gpurun", 120)])
def test_one_who_cannot_be_served_does_not_keep_others_from_it(own_copy, tmp_path, error):
    def run(*_, **__):
        raise error

    own_copy(waiter, "subprocess", run=run)
    assert waiter.recover_as(os.getuid(), tmp_path, {}).problem


@pytest.mark.parametrize("printed", ["", "[]", '{"adopted": 3}', '{"adopted": [], "waiter": 1}', "[" * 100_000])
def test_what_a_user_s_command_prints_is_not_believed_blindly(own_copy, tmp_path, printed):
    own_copy(waiter, "subprocess", run=lambda *_, **__: SimpleNamespace(returncode=0, stdout=printed, stderr=""))
    done = waiter.recover_as(os.getuid(), tmp_path, {})
    assert (done.adopted, done.waiter) == ((), False)
