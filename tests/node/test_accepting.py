"""A connection that cannot be accepted ends no transfer."""

from __future__ import annotations

import errno
import os
import socket
import threading

import pytest
from waiting import until

from gpurun.content.seats import make_certificate
from gpurun.node.transfer import blobs
from gpurun.node.transfer.blobs import Server
from gpurun.node.transfer.spool import Pace, Remembered

ERRORS = [OSError(number, os.strerror(number)) for number in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED)]


class Socket:
    """A listening socket whose first answers are errors."""

    def __init__(self, real, errors):
        self.real, self.errors = real, list(errors)

    def accept(self):
        if self.errors:
            raise self.errors.pop(0)
        return self.real.accept()

    def __getattr__(self, name):
        return getattr(self.real, name)


@pytest.fixture
def server(monkeypatch):
    """A server that accepts in a thread which the test starts."""
    monkeypatch.setattr(blobs, "ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(Server, "_accept", lambda self: None)
    certificate = make_certificate()
    made = Server("127.0.0.1", certificate.certificate, certificate.key, {}.get, Pace(None), Remembered())
    monkeypatch.undo()
    monkeypatch.setattr(blobs, "ACCEPT_AGAIN_S", 0.01)
    yield made
    made.close()


def accepting(server):
    thread = threading.Thread(target=server._accept, daemon=True)
    thread.start()
    return thread


def test_an_accept_that_fails_ends_no_transfer_and_a_closed_server_ends(server):
    server._socket = Socket(server._socket, ERRORS)
    thread = accepting(server)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as late:
        until(lambda: server._unproven == 1)
        assert thread.is_alive()
        late.close()
    server.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_thread_that_cannot_start_costs_one_connection(server, monkeypatch):
    served = []
    starts = iter([True, False])

    class Thread:
        def __init__(self, target, args, daemon):
            self.args = args

        def start(self):
            if next(starts):
                raise RuntimeError("can't start new thread")
            served.append(self.args[0])
            server._closed = True

    listening = accepting.__globals__["threading"].Thread(target=server._accept, daemon=True)
    monkeypatch.setattr(blobs.threading, "Thread", Thread)
    listening.start()
    with socket.create_connection(("127.0.0.1", server.port)), socket.create_connection(("127.0.0.1", server.port)):
        until(lambda: len(served) == 1)
    assert server._unproven == 1
    served[0].close()
    server._connections.remove(served[0])
