"""What the probe asks a Docker engine over its socket, answered by one that says what a test wants."""

import json
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingMixIn, UnixStreamServer

import pytest

from gpurun.node import probe_docker

CONTAINER = "0123456789abcdef" * 4


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def docker(tmp_path):
    answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.get(self.path.split("?")[0], (404, b"{}"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

        def address_string(self):
            return "unix"

    path = str(tmp_path / "docker.sock")
    with Server(path, Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield path, answers
        server.shutdown()


def info(**fields):
    return 200, json.dumps({"ServerVersion": "26.1.5", "Driver": "overlay2", "DockerRootDir": "/", **fields}).encode()


def test_docker_facts(docker):
    path, answers = docker
    answers["/info"] = info(Runtimes={"runc": {}, "nvidia": {}})
    found = probe_docker.facts(path)
    assert (found["version"], found["storage_driver"], found["gpu_support"]) == ("26.1.5", "overlay2", "runtime")
    assert 0 < found["free_bytes"] <= found["total_bytes"]


def test_docker_cdi(docker, tmp_path):
    path, answers = docker
    (tmp_path / "cdi").mkdir()
    answers["/info"] = info(Runtimes={}, CDISpecDirs=[str(tmp_path / "cdi"), "/nowhere"])
    (tmp_path / "cdi/nvidia.yaml").write_text("")
    assert probe_docker.facts(path)["gpu_support"] == "cdi"


@pytest.mark.parametrize("answer", [(500, b"{}"), (200, b"not json"), (200, b"[]"), (200, b"{}")])
def test_docker_that_answers_nonsense(docker, answer):
    path, answers = docker
    answers["/info"] = answer
    assert probe_docker.facts(path)["problem"]


def test_no_docker(tmp_path):
    assert "no Docker engine" in probe_docker.facts(str(tmp_path / "none"))["problem"]
    assert probe_docker.job_containers(str(tmp_path / "none")) == {}


def test_job_containers(docker):
    path, answers = docker
    answers["/containers/json"] = 200, json.dumps([{"Id": CONTAINER, "Labels": {"gpurun.job": "j'1"}}]).encode()
    assert probe_docker.job_containers(path) == {CONTAINER: "j'1"}


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 524288               files
Max locked memory         8388608              8388608              bytes
Max stack size            8388608              unlimited            bytes
"""


@pytest.mark.parametrize(
    ("effective", "may_raise"), [("000001fffeffffff", False), ("000001ffffffffff", True), ("00000000a80425fb", False)]
)
def test_limits_of_the_engine(tmp_path, effective, may_raise):
    for pid, name in (("7", "containerd"), ("77", "dockerd")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text(name + "\n")
    (tmp_path / "77/limits").write_text(LIMITS)
    (tmp_path / "77/status").write_text(f"Name:\tdockerd\nCapEff:\t{effective}\n")
    found = probe_docker.engine_limits(str(tmp_path))
    assert found == {"memlock_bytes": 8 << 20, "nofile": 524288, "may_raise_limits": may_raise}
    assert probe_docker.hard_limit(LIMITS, "Max stack size") == -1


def test_an_engine_that_cannot_be_seen(tmp_path):
    assert probe_docker.engine_limits(str(tmp_path)) == {}
    assert probe_docker.hard_limit("", "Max open files") is None
    assert probe_docker.has_capability("", "CapEff") is None
