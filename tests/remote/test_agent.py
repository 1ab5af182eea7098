"""Calls and streams over a real SSH channel, with what a hostile or unlucky caller may send."""

import hashlib
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import LIMIT_S, until

from gpurun.errors import GpurunError, HostUnreachable
from gpurun.node.agent import frames
from gpurun.remote import Fleet, RemoteOpFailed

HOSTILE = ["plain", "a b", "it's", '"quoted"', "$(touch /tmp/x)", "`id`", "a\nb", "\t", "", "ünï—☃", "a\\b", "-rf", "*"]


@pytest.fixture
def fleet(net):
    with Fleet.open([net.host("gpu1", net.sshd())]) as opened:
        assert not opened.failures
        yield opened


@pytest.fixture
def agent(fleet):
    return fleet.agents["gpu1"]


def test_an_argv_arrives_byte_for_byte(agent):
    code = "import sys,os;os.write(1,b'\\0'.join(os.fsencode(a) for a in sys.argv[1:]))"
    out = agent.call("proc.run", argv=["python3", "-c", code, *HOSTILE]).value
    assert out["code"] == 0
    assert out["stdout"].split("\0") == HOSTILE


def test_what_the_operating_system_refuses_is_said_in_its_words(agent):
    for argv, said in ((["/no/such/\x1b[2J"], "No such file or directory: '/no/such/\\x1b[2J'"),
                       (["/etc/passwd"], "Permission denied: '/etc/passwd'")):  # fmt: skip
        with pytest.raises(RemoteOpFailed) as caught:
            agent.call("proc.run", argv=argv)
        assert caught.value.message == said


def test_bytes_that_are_no_utf8_survive(agent):
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert agent.call("proc.run", argv=["printf", "%s", name]).value["stdout"] == name


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"argv": ["echo", "a\0b"]}, "bad-request"),
        ({"argv": []}, "bad-request"),
        ({"argv": "echo hi"}, "bad-request"),
        ({"argv": [1]}, "bad-request"),
        ({"argv": ["/no/such/program"]}, "not-found"),
        ({"argv": ["/etc/passwd"]}, "denied"),
        ({"argv": ["true"], "cwd": "/no/such"}, "not-found"),
        ({"argv": ["true"], "env": {"A": "\0"}}, "bad-request"),
        ({"argv": ["true"], "unknown": 1}, "bad-request"),
        ({}, "bad-request"),
    ],
)
def test_what_cannot_be_run(agent, params, kind):
    with pytest.raises(RemoteOpFailed) as caught:
        agent.call("proc.run", **params)
    assert caught.value.kind == kind
    assert caught.value.host == "gpu1"


@pytest.mark.parametrize("op", ["nothing.here", "proc", "proc.nope", "", "..os.system", "agent._stop", "os.system"])
def test_operations_that_are_not_there(agent, op):
    with pytest.raises(RemoteOpFailed) as caught:
        agent.call(op)
    assert caught.value.kind == "unknown-op"
    assert agent.alive


def test_exit_codes_signals_env_and_stdin(agent):
    assert agent.call("proc.run", argv=["sh", "-c", "exit 3"]).value["code"] == 3
    assert agent.call("proc.run", argv=["sh", "-c", "kill -9 $$"]).value["code"] == -9
    assert agent.call("proc.run", argv=["printenv", "A"], env={"A": "b c\n"}).value["stdout"] == "b c\n\n"
    assert agent.call("proc.run", argv=["cat"], payload=b"in\0put").value["stdout"] == "in\0put"
    assert agent.call("proc.run", argv=["true"], payload=bytes(1 << 20)).value["code"] == 0  # reads none of it


def test_a_program_that_does_not_end_is_killed_with_its_children(agent):
    with pytest.raises(RemoteOpFailed, match="did not end within") as caught:
        agent.call("proc.run", argv=["sh", "-c", "sleep 77.7 & sleep 77.7"], time_limit_s=0.3)
    assert caught.value.kind == "timeout"
    until(lambda: not running("77.7"))


def test_a_call_that_times_out_is_cancelled_on_the_host(agent):
    with pytest.raises(HostUnreachable, match=r"did not answer proc\.run within 0\.5 s"):
        agent.call("proc.run", argv=["sleep", "77.3"], timeout_s=0.5)
    assert agent.alive
    until(lambda: not running("77.3"))


def running(word):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_background_process_does_not_hold_the_call(agent):
    out = agent.call("proc.run", argv=["sh", "-c", "sleep 3678.1 & echo out"], timeout_s=LIMIT_S).value
    assert out["stdout"] == "out\n"
    until(lambda: not running("3678.1"))


def test_the_last_output_is_kept(agent):
    out = agent.call("proc.run", argv=["seq", "100000"], max_output_bytes=1000).value
    assert len(out["stdout"]) == 1000 and out["stdout"].endswith("100000\n") and out["truncated"]


def test_many_calls_at_once_over_one_channel(agent):
    results = {}

    def ask(number):
        results[number] = agent.call("proc.run", argv=["echo", str(number)]).value["stdout"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"{number}\n" for number in range(40)}


def test_files_of_any_content_and_name(agent, tmp_path):
    content = os.urandom(3_000_000)
    for name in ("plain", "a b", "it's", "ünï\n"):
        path = f"{tmp_path}/deep/er/{name}"
        agent.call("files.write", path=path, mode=0o640, payload=content)
        assert Path(path).read_bytes() == content
        assert Path(path).stat().st_mode & 0o777 == 0o640
        reply = agent.call("files.read", path=path, max_bytes=len(content))
        assert reply.payload == content and reply.value["size"] == len(content)
    assert (tmp_path / "deep").stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in (tmp_path / "deep/er").iterdir()) == sorted(["plain", "a b", "it's", "ünï\n"])


@pytest.fixture
def many_bytes(agent):
    """A job whose outputs on the host are 30 MiB."""
    job = f"j-{os.urandom(4).hex()}"
    entry = {"p": "zeros", "k": "file", "m": 0o600, "t": 0, "s": 30 << 20}
    marks, piece, sha = [30 << 20, 0, 0, 0], bytes(1 << 20), hashlib.sha256(bytes(30 << 20)).hexdigest()
    pieces = [entry, {"n": 0, "marks": marks}, *[{"n": 0}] * 30, {"n": 0, "sha": sha, "after": marks}]
    payload = [frames.encode(header, piece if header == {"n": 0} else b"") for header in pieces]
    mine = Path.home() / ".gpurun/jobs" / job
    agent.call("files.write", path=f"{mine}/attempt", payload=b"1")
    list(agent.stream("outputs.write", job=job, attempt=1, payload_in=payload))
    yield job
    agent.call("outputs.remove", job=job, attempt=1)
    agent.call("files.rmtree", path=str(mine))


def test_a_stream_with_back_pressure(agent, many_bytes):
    stream = agent.stream("outputs.read", job=many_bytes, payload_in=[frames.encode({"p": "zeros"})])
    first = next(stream)
    time.sleep(0.5)  # a reader that dawdles: the host waits, other calls go on
    assert agent.call("files.stat", path="/").value["kind"] == "dir"
    total = len(first.payload) + sum(len(item.payload) for item in stream)
    assert total > 30 << 20


def test_closing_a_stream_cancels_the_operation(agent):
    stream = agent.stream("proc.run", argv=["sleep", "79.4"])
    until(lambda: running("79.4"))
    stream.close()
    assert list(stream) == []
    until(lambda: not running("79.4"))
    assert agent.alive


def test_a_payload_that_raises(agent, tmp_path):
    def pieces():
        yield b"a" * 100
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(agent.stream("files.write", payload_in=pieces(), path=f"{tmp_path}/new/f"))
    until(lambda: list((tmp_path / "new").glob("*")) == [])  # nothing half written stays
    assert agent.alive


def test_an_agent_that_is_killed_fails_every_waiting_call(agent):
    errors = []

    def wait():
        try:
            agent.call("proc.run", argv=["sleep", "80.2"], timeout_s=60)
        except GpurunError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(running("80.2")) == 3)
    os.kill(agent.hello["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(LIMIT_S)
    assert [type(error) for error in errors] == [HostUnreachable] * 3
    assert not agent.alive
    with pytest.raises(HostUnreachable):
        agent.call("files.stat", path="/")
    for pid in running("80.2"):
        os.kill(pid, signal.SIGKILL)


def test_closing_ends_the_agents_children(fleet, agent):
    threading.Thread(target=lambda: _ignore(agent), daemon=True).start()
    until(lambda: running("81.6"))
    fleet.close()
    until(lambda: not running("81.6") and not Path(f"/proc/{agent.hello['pid']}").exists())


def _ignore(agent):
    with suppress(HostUnreachable):
        agent.call("proc.run", argv=["sleep", "81.6"], timeout_s=60)


def test_sigterm_ends_the_agent_and_its_children(agent):
    threading.Thread(target=lambda: _ignore(agent), daemon=True).start()
    until(lambda: running("81.6"))
    os.kill(agent.hello["pid"], signal.SIGTERM)
    until(lambda: not running("81.6") and not agent.alive)


def test_a_host_that_falls_silent_is_noticed(net):
    with Fleet.open([net.host("gpu1", net.sshd())], dead_after_s=1.0) as fleet:
        agent = fleet.agents["gpu1"]
        os.kill(agent.hello["pid"], signal.SIGSTOP)
        try:
            with pytest.raises(HostUnreachable, match="the host sent nothing for"):
                agent.call("files.stat", path="/", timeout_s=LIMIT_S)
            assert not agent.alive
        finally:
            os.kill(agent.hello["pid"], signal.SIGCONT)


def test_a_silent_channel_stays_alive_while_the_host_answers_pings(net, monkeypatch):
    monkeypatch.setattr("gpurun.remote.fleet.PING_AFTER_S", 0.1)
    with Fleet.open([net.host("gpu1", net.sshd())]) as fleet:
        agent = fleet.agents["gpu1"]
        for _ in range(3):
            heard_s = agent.last_heard_s
            until(lambda: agent.last_heard_s > heard_s)  # noqa: B023
        assert agent.alive


def test_an_agent_whose_head_is_silent_ends(net, monkeypatch):
    monkeypatch.setattr("gpurun.remote.fleet.PING_AFTER_S", 100.0)
    monkeypatch.setattr("gpurun.remote.opening.AGENT_SILENCE_LIMIT_S", 1.0)
    with Fleet.open([net.host("gpu1", net.sshd())], dead_after_s=1000) as fleet:
        until(lambda: not fleet.agents["gpu1"].alive)


def test_garbage_from_the_agent_ends_the_channel(net):
    """sshd runs a shell that starts the real agent, and writes over its output once it runs."""
    go = net.folder / "go"
    garbage = f"until [ -e {go} ]; do sleep 0.05; done; echo not a frame at all, sorry"
    server = net.sshd(f"ForceCommand sh -c '({garbage}) & eval \"$SSH_ORIGINAL_COMMAND\"'")
    with Fleet.open([net.host("gpu1", server)]) as fleet, pytest.raises(HostUnreachable, match="frame"):
        go.touch()
        fleet.agents["gpu1"].call("proc.run", argv=["sleep", "600"], timeout_s=LIMIT_S)


def test_map_keeps_every_hosts_result(net):
    server = net.sshd()
    targets = [net.host(f"gpu{number}", server) for number in range(3)]
    down = net.host("down", net.sshd(start=False))

    def ask(agent):
        if agent.host == "gpu1":
            return agent.call("files.read", path="/no/such").payload
        return agent.host

    with Fleet.open([*targets, down]) as fleet:
        results = fleet.map(ask)
        assert results.ok == {"gpu0": "gpu0", "gpu2": "gpu2"}
        assert isinstance(results.failed["gpu1"], RemoteOpFailed)
        assert isinstance(results.failed["down"], HostUnreachable)
        with pytest.raises(GpurunError):
            results.raise_first()
        some = fleet.map(lambda agent: 1, ["gpu2", "gpu0"])
        assert list(some.ok) == ["gpu2", "gpu0"] and not some.failed
        assert isinstance(fleet.map(lambda agent: 1, ["who"]).failed["who"], HostUnreachable)
        with pytest.raises(ZeroDivisionError):
            fleet.map(lambda agent: 1 // 0)


def test_a_host_that_does_not_read_for_a_while_loses_no_transfer(net, monkeypatch, tmp_path):
    """Paramiko's time-out, with which the agent waits for answers, counts for what it sends, too."""
    monkeypatch.setattr("gpurun.remote.fleet.PING_AFTER_S", 0.1)
    with Fleet.open([net.host("gpu1", net.sshd())], dead_after_s=LIMIT_S) as fleet:
        agent, content = fleet.agents["gpu1"], os.urandom(1 << 20) * 4
        sent = [f"{tmp_path}/{number}" for number in range(4)]
        threads = [threading.Thread(target=agent.call, args=("files.write",), kwargs={
            "path": path, "payload": content, "timeout_s": LIMIT_S}) for path in sent]  # fmt: skip
        os.kill(agent.hello["pid"], signal.SIGSTOP)
        try:
            for thread in threads:
                thread.start()
            time.sleep(0.6)
        finally:
            os.kill(agent.hello["pid"], signal.SIGCONT)
        for thread in threads:
            thread.join(LIMIT_S)
        assert agent.alive
        assert [Path(path).read_bytes() == content for path in sent] == [True] * 4
