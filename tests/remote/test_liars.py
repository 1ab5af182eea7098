"""A host may answer anything: the head names it, stays whole, and believes only what can be an answer."""

import importlib
import json
import threading
from contextlib import closing, suppress

import pytest
from lying_host import LyingHost, agent_of, done, said, stream
from waiting import LIMIT_S, until

from gpurun.errors import HostFailure, HostUnreachable
from gpurun.node.agent import frames
from gpurun.node.agent import serve as node_agent
from gpurun.node.agent.serve import MODULES
from gpurun.node.gpus import UseTally
from gpurun.remote import Agent, RemoteOpFailed, answers

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "b" * 43
ACCOUNT = {
    "uid": "1000", "gid": "1000", "user": "train", "folder": "/home/train/.gpurun", "hostname": "gpu-r1-01",
    "address": "10.0.0.1", "sshd": "/usr/sbin/sshd",
    "docker_host": "unix:///var/run/docker.sock", "public_key": KEY, "groups": [("2001", "domain users")],
    "names": [("minio.site", "10.9.0.1"), ("v6", "fd00::1")],
}  # fmt: skip
NOT_JSON = object()


@pytest.fixture(autouse=True)
def no_thread_ends_by_an_error(monkeypatch):
    broken = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    yield
    assert not broken, broken


def test_every_operation_of_the_agent_has_types():
    there = {
        f"{name}.{operation}"
        for name, module in MODULES.items()
        for operation in importlib.import_module(f"gpurun.node.{module}").OPS
    }
    assert there == set(answers.ANSWERS)
    assert node_agent.find_op("gang.prepare")


def test_a_true_account_is_taken_as_it_is():
    with agent_of(done({**ACCOUNT, "of_a_newer_gpurun": 1})) as agent:
        assert agent.call("gang.prepare").value == ACCOUNT


@pytest.mark.parametrize(
    "lie",
    [
        {"user": "train\n  ProxyCommand touch /tmp/x"},
        {"user": "train ProxyCommand"},
        {"user": ""},
        {"user": "-oProxyCommand=x"},
        {"user": "a:0:0"},
        {"user": 'x"y'},
        {"public_key": KEY + "\n* " + KEY},
        {"public_key": KEY + " comment"},
        {"public_key": "command=x " + KEY},
        {"public_key": "ssh-rsa " + "A" * 68},
        {"public_key": None},
        {"hostname": "h 10.0.0.9"},
        {"hostname": "h:1"},
        {"hostname": "h\nother"},
        {"hostname": "-h"},
        {"hostname": ["h"]},
        {"address": "10.0.0.1\nPermitRootLogin yes"},
        {"address": "evil.example.com"},
        {"address": "::1%eth0 x"},
        {"address": 7},
        {"folder": "relative"},
        {"folder": "/home/x\nForceCommand id"},
        {"sshd": "sshd"},
        {"docker_host": "tcp://evil:2375"},
        {"docker_host": "unix:///run/a\nPermitRootLogin yes"},
        {"uid": "0:0 --privileged"},
        {"uid": 0},
        {"gid": "-1"},
        {"groups": [["-1", "ml"]]},
        {"groups": [["2001", "ml:x:0:"]]},
        {"groups": [["2001", "ml\nroot"]]},
        {"groups": [["2001"]]},
        {"groups": None},
        {"names": [["minio", "10.0.0.1 evil"]]},
        {"names": [["minio", "host-gateway"]]},
        {"names": [["a:10.0.0.9", "10.0.0.1"]]},
        {"names": [["-a", "10.0.0.1"]]},
        {"names": [["a", "10.0.0.1"]] * 257},
        {"names": None},
        {"uid": "9" * 4000},
    ],
    ids=repr,
)
def test_an_account_that_would_be_more_than_a_word_is_refused_and_its_host_named(lie):
    with agent_of(done({**ACCOUNT, **lie})) as agent:
        with pytest.raises(RemoteOpFailed) as caught:
            agent.call("gang.prepare")
        assert caught.value.host == "liar" and caught.value.kind == "bad-answer"
        assert next(iter(lie)) in caught.value.message
        assert agent.alive


RUBBISH = [
    None, 0, float("nan"), float("inf"), -1, 1 << 70, True, "x", "\udc00", [], [[]], [None], {}, {"": {}},
    {"kind": "start"}, {"kind": ["output"]}, {"state": {}}, {"gpus": 3}, {"ranks": {"x": 1}},
]  # fmt: skip


@pytest.mark.parametrize("op", sorted(answers.ANSWERS))
def test_no_operation_breaks_on_rubbish(op):
    for value in RUBBISH:
        for ask in (lambda agent: agent.call(op, timeout_s=LIMIT_S), lambda agent: list(agent.stream(op))):
            for lie in (done(value), stream(value, value, end=value)):
                try:
                    with agent_of(lie) as agent:
                        ask(agent)
                except HostFailure as error:
                    assert error.host == "liar"


@pytest.mark.parametrize(
    ("op", "lie"),
    [
        ("gang.progress", {"age_s": float("nan"), "checkpoint_age_s": None, "ranks": {}}),
        ("gang.progress", {"age_s": 1.0, "checkpoint_age_s": None, "ranks": {"one": {}}}),
        ("gang.inspect", [{"id": "x"}]),
        ("gang.engine", {"state": "restarted", "up_s": None, "why": ""}),
        ("gang.fence", {}),
        ("gang.fence", {"containers": "", "processes": [], "folder": False, "users": [], "gpu_problem": "",
                        "claims": []}),
        ("ranks.list", [{"id": "0.1.1", "rank": "0", "code": None, "age_s": 0.0}]),
        ("ranks.count", "0"),
        ("blobs.open", {"address": "10.0.0.1 ", "port": 1, "head": "10.0.0.2"}),
        ("blobs.open", {"address": "10.0.0.1", "port": 70000, "head": "10.0.0.2"}),
        ("blobs.missing", [["sha256:" + "0" * 64, [[0, -1]]]]),
        ("blobs.missing", [["../../etc/passwd", [[0, 1]]]]),
        ("data.begin", ["/etc/passwd"]),
        ("data.put", {"bytes": -1}),
        ("images.ask", {"local": "--privileged", "named": True, "store": "graph", "have": [], "root": None,
                        "free_bytes": None, "spool_free_bytes": None, "one_disk": True}),
        ("probe.connect", [{"ok": "no"}]),
        ("docker.wait", {"code": "0"}),
        ("no.such.operation", {"x": 1}),
    ],
)  # fmt: skip
def test_what_cannot_be_an_answer_is_refused(op, lie):
    with agent_of(done(lie)) as agent, pytest.raises(RemoteOpFailed) as caught:
        agent.call(op)
    assert caught.value.kind == "bad-answer" and caught.value.host == "liar"


def test_a_stream_whose_end_never_ends_is_silent():
    """Each piece of the end comes in time."""
    stopped = threading.Event()

    def lie(request):
        while not stopped.wait(0.05):
            yield said({"t": "part", "id": request["id"]})

    class Host(LyingHost):
        def sendall(self, data):
            threading.Thread(target=super().sendall, args=(data,), daemon=True).start()

    with closing(Agent("liar", Host(lie), frames.Frame({"t": "hello"}, b""), frames.Decoder())) as agent:
        asking = threading.Thread(target=_ended, args=(agent,), daemon=True)
        asking.start()
        asking.join(20.0)
        is_alive = asking.is_alive()
        stopped.set()
    assert not is_alive


def _ended(agent):
    with suppress(HostUnreachable):
        list(agent.stream("data.verify", silence_s=0.3))


@pytest.mark.parametrize(
    "lie",
    [
        {"kind": "start", "id": "0.1.1", "rank": -1, "age_s": 0.0},
        {"kind": "end", "id": "0.1.1", "rank": 0, "age_s": 0.0, "code": 256},
        {"kind": "output", "id": "0.1.1\n[1]", "rank": 0, "stream": "o", "end": 1},
        {"kind": "confession"},
    ],
)
def test_an_item_of_a_stream_is_checked_too(lie):
    with agent_of(stream(lie)) as agent, pytest.raises(RemoteOpFailed) as caught:
        list(agent.stream("ranks.follow"))
    assert caught.value.kind == "bad-answer"


@pytest.mark.parametrize(
    "frame",
    [
        said({"id": 1}),
        said({"t": "confess", "id": 1}),
        said({"t": ["done"], "id": 1}),
        said({"t": "credit", "id": 1, "n": "many"}),
        said({"t": "credit", "id": 1, "n": -1}),
        said({"t": "credit", "id": 1}),
        said([1]),
        said("hello"),
        frames.PREFIX.pack(200_000, 0) + b"[" * 200_000,
        frames.PREFIX.pack(5000, 0) + b'{"t":"done","id":1,"v":' + b"9" * 4976 + b"}",
        frames.PREFIX.pack(4, 0) + b"\xff\xfe\xfd\xfc",
        frames.PREFIX.pack(1 << 31, 1 << 31),
    ],
)
def test_what_is_no_frame_ends_the_session_and_nothing_else(frame):
    with agent_of(lambda _request: [frame]) as agent:
        with pytest.raises(HostUnreachable) as caught:
            agent.call("ranks.count", timeout_s=LIMIT_S)
        assert caught.value.host == "liar" and "malformed answer" in caught.value.message
        assert not agent.alive


@pytest.mark.parametrize("detail", [[], "x", 3, None, {"index": "none"}])
def test_an_error_says_what_it_likes_and_steers_no_terminal(detail):
    error = {"t": "err", "kind": ["x"] if detail == [] else "docker", "message": "\x1b]0;x\x07a\r\n" + "b" * 100_000}
    lie = lambda request: [said({**error, "id": request["id"], "detail": detail})]  # noqa: E731
    with agent_of(lie) as agent, pytest.raises(RemoteOpFailed) as caught:
        agent.call("ranks.count")
    assert isinstance(caught.value.detail, dict) and isinstance(caught.value.kind, str)
    assert "\x1b" not in str(caught.value) and "\r" not in str(caught.value) and len(str(caught.value)) < 10_000


@pytest.mark.parametrize("size", [frames.PIECE, 0])
def test_a_host_that_sends_more_than_anybody_takes_is_cut_off(size):
    """The head would hold it all in memory."""
    sent = threading.Event()
    piece = bytes(size)
    item = {"stream": "stdout"} if size else {"stream": "stdout", "more": "x" * 1000}

    def flood(request):
        for _ in range(40_000 if not size else 2_000):
            yield said({"t": "out", "id": request["id"], "v": item}, piece)
        sent.set()

    host = LyingHost(flood)
    agent = Agent("liar", host, frames.Frame({}, b""), frames.Decoder(), ping_after_s=60.0)
    stream_ = agent.stream("docker.logs")
    until(lambda: not agent.alive or sent.is_set())
    assert not agent.alive
    assert host.taken_bytes < 100 << 20
    with pytest.raises(HostUnreachable, match="more than"):
        for _ in stream_:
            pass


def test_a_reply_without_end_is_cut_off():
    def endless(request):
        for _ in range(2_000):
            yield said({"t": "part", "id": request["id"]}, bytes(frames.PIECE))

    with agent_of(endless) as agent, pytest.raises(HostFailure, match="more than"):
        agent.call("docker.request", timeout_s=LIMIT_S)


def test_who_takes_what_comes_is_sent_as_much_as_there_is():
    total = 0

    def honest(request):
        for _ in range(3_000):
            yield said({"t": "out", "id": request["id"], "v": {"stream": "stdout"}}, bytes(frames.PIECE // 8))
        yield said({"t": "done", "id": request["id"], "v": None})

    with agent_of(honest) as agent:
        for reply in agent.stream("docker.logs"):
            total += len(reply.payload)
    assert total == 3_000 * (frames.PIECE // 8)


def test_json_of_any_depth_is_an_answer_or_none():
    deep = json.loads("[" * 900 + "]" * 900)
    with agent_of(done(deep)) as agent, pytest.raises(HostFailure):
        agent.call("gang.progress")


def test_what_a_host_says_of_the_use_of_its_gpus_is_an_answer():
    clock = iter([0.0, 10.0, 10.0])
    tally = UseTally([(0, "GPU-1")], clock=lambda: next(clock))
    said = tally.add({"gpus": [{"index": 0, "use": 40, "memory_mib": 7}, {"index": 1, "use": None}]})
    assert said and answers.checked_answer("health.watch", said, item=True) == said
    with pytest.raises(answers.NotAnAnswer, match="mean"):
        answers.checked_answer(
            "health.watch", [{"kind": "use", "gpus": [{**said[0]["gpus"][0], "mean": 101}]}], item=True
        )
