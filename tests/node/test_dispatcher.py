"""The agent on a host dispatches calls to threads, also on a host that has none left for a moment."""

from __future__ import annotations

import os
import threading

from waiting import LIMIT_S

from gpurun.node.agent import frames
from gpurun.node.agent.serve import Dispatcher


def test_a_host_that_can_start_no_thread_fails_one_call_and_serves_the_next(monkeypatch):
    """A job that has all processes of its user ended the agent, and so the session with its host."""
    calls, head = os.pipe()
    answers, agent = os.pipe()
    start, refusals = threading.Thread.start, [RuntimeError("can't start new thread")]

    def starts(thread):
        if refusals:
            raise refusals.pop()
        start(thread)

    serving = threading.Thread(target=Dispatcher(calls, agent).serve, daemon=True)
    start(serving)
    monkeypatch.setattr(threading.Thread, "start", starts)
    for ident in (1, 2):
        os.write(head, frames.encode({"t": "req", "id": ident, "op": "probe.clock"}))
    decoder, found = frames.Decoder(), []
    while len(found) < 2:
        found += [frame.header for frame in decoder.feed(os.read(answers, 1 << 16))]
    os.close(head)
    serving.join(LIMIT_S)
    refused, served = found
    assert (refused["t"], refused["id"], refused["kind"]) == ("err", 1, "os-error")
    assert "probe.clock: can't start new thread" in refused["message"]
    assert served["id"] == 2 and served["t"] != "err" and not serving.is_alive()
    for descriptor in (calls, answers, agent):
        os.close(descriptor)
