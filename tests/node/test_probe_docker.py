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
