"""Why a host's shell ended without an agent, in words that say what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpurun.doctor.survey import unreachable
from gpurun.remote import Target
from gpurun.remote.opening import _no_agent
from gpurun.remote.program import CommandEnd

TRACE = 'Traceback (most recent call last):\n  File "<string>", line 1\n'


def ended(said, code=1):
    return _no_agent(Target("h1"), SimpleNamespace(ending=lambda within_s: CommandEnd(code, said)), bytearray())


@pytest.mark.parametrize(
    ("said", "message", "remedy"),
    [
        ("gpurun.node.agent.serve.NotOwn: /local/gpurun-7 is not a folder that only this user may enter",
         "/local/gpurun-7 is not a folder", "remove the other user's folder"),
        ("gpurun.node.agent.serve.NotUsable: /local/gpurun-7 is on a read-only file system (ext4 on /local: ro,ro)",
         "/local/gpurun-7 is on a read-only file system (ext4 on /local: ro,ro)", "let the SSH user create files"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_used(said, message, remedy):
    error = ended(TRACE + said)
    assert error.message.startswith(message) and error.host == "h1"
    assert error.kind == "folder" and unreachable("h1", error).check == "folder"
    assert remedy in error.hint and "gpurun inventory set h1 folder=DIR" in error.hint


@pytest.mark.parametrize(
    ("said", "code", "message"),
    [
        ("bash: python3: command not found", 127, "python3 cannot be started"),
        ("gpurun needs Python 3.8 or newer, this is 3.6.8", 1, "gpurun needs Python"),
        ("", None, "the agent did not start: the login shell ended"),
        ("\x1b[2J$(x)", 1, "the login shell ended with code 1"),
    ],
)
def test_another_reason(said, code, message):
    assert message in ended(said, code).message
