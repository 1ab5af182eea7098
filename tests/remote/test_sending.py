"""What a channel makes of a frame: all of it leaves, or nothing more does."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest
from waiting import until

from gpurun.errors import HostUnreachable
from gpurun.node.agent import frames
from gpurun.remote.agent import Agent
from gpurun.remote.session import ParamikoChannel


class Channel:
    """A channel whose `sendall` fails at the n-th call, after a part of it has left."""

    def __init__(self, fails_at, error):
        self.fails_at, self.error = fails_at, error
        self.left, self.calls = b"", 0
        self.inbox = queue.Queue()

    def sendall(self, data):
        self.calls += 1
        if self.calls == self.fails_at:
            self.left += data[: len(data) // 2]
            raise self.error
        self.left += data

    def recv(self, _size):
        try:
            return self.inbox.get(timeout=self.patience_s)
        except queue.Empty:
            raise TimeoutError from None

    def settimeout(self, timeout):
        self.patience_s = timeout

    def close(self):
        self.inbox.put(b"")


def agent_on(channel, ping_after_s=60.0):
    return Agent("h1", channel, frames.Frame({}, b""), frames.Decoder(), ping_after_s=ping_after_s)


@pytest.mark.parametrize("error", [TimeoutError(), OSError("gone"), EOFError(), KeyboardInterrupt(), MemoryError()])
def test_a_frame_that_was_sent_in_part_ends_its_channel(error):
    channel = Channel(2, error)
    agent = agent_on(channel)
    with pytest.raises((HostUnreachable, KeyboardInterrupt, MemoryError)):
        agent.call("files.stat", path="/", payload=b"x" * 50_000, timeout_s=0.1)  # in two parts
    assert not agent.alive
    sent = len(channel.left)
    agent.ping()
    with pytest.raises(HostUnreachable):
        agent.call("files.stat", path="/", timeout_s=0.1)
    assert len(channel.left) == sent, "nothing more leaves on it"


def test_a_payload_that_no_thread_can_send_is_cancelled_on_the_host(monkeypatch):
    """The host waited for it until the session ended."""
    channel = Channel(0, None)
    agent = agent_on(channel)

    def refuses(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        with pytest.raises(RuntimeError, match="new thread"):
            agent.stream("files.write", path="/x", payload_in=[b"x"])
    request, cancel = (frame.header for frame in frames.Decoder().feed(channel.left))
    assert (cancel["t"], cancel["id"]) == ("cancel", request["id"])
    assert agent.alive and not agent._operations
    agent.close()


@pytest.mark.parametrize("error", [TimeoutError(), OSError("gone")])
def test_so_does_a_ping(error):
    channel = Channel(1, error)
    agent = agent_on(channel, ping_after_s=0.01)
    until(lambda: not agent.alive)
    with pytest.raises(HostUnreachable, match="the SSH session was lost"):
        agent.call("files.stat", path="/")


def paramiko(sends):
    """A channel of Paramiko's whose `send` answers so: a number of bytes, or an error."""
    taken = bytearray()

    def send(data):
        answer = sends.pop(0) if sends else len(data)
        if isinstance(answer, Exception):
            raise answer
        taken.extend(data[:answer])
        return min(answer, len(data))

    channel = SimpleNamespace(send=send, recv=None, settimeout=None)
    return ParamikoChannel("h1", SimpleNamespace(), channel), taken


def test_a_host_that_does_not_read_is_waited_for():
    channel, taken = paramiko([3, TimeoutError(), TimeoutError(), 1, TimeoutError()])
    channel.sendall(b"0123456789")
    assert bytes(taken) == b"0123456789"


def test_a_channel_that_is_closed_meanwhile_ends_the_wait():
    channel, taken = paramiko([3, TimeoutError(), 0])
    with pytest.raises(BrokenPipeError):
        channel.sendall(b"0123456789")
    channel, _ = paramiko([OSError("Socket is closed")])
    with pytest.raises(OSError, match="closed"):
        channel.sendall(b"x")
    assert bytes(taken) == b"012"
