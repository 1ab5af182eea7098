"""What the probe asks a Docker engine over its socket, answered by one that says what a test wants."""

import json
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingMixIn, UnixStreamServer

import pytest

from gpurun.node import docker as engine
from gpurun.node.probe import probe

CONTAINER = "0123456789abcdef" * 4


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def docker(tmp_path, monkeypatch):
    answers = {"/version": (200, b"{}"), "/_ping": (200, b"OK")}

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
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        yield answers
        server.shutdown()


def info(**fields):
    return 200, json.dumps({"ServerVersion": "26.1.5", "Driver": "overlay2", "DockerRootDir": "/", **fields}).encode()


def test_docker_facts(docker):
    answers = docker
    answers["/info"] = info(Runtimes={"runc": {}, "nvidia": {}})
    found = probe.collect_docker_facts()
    assert (found["version"], found["storage_driver"], found["gpu_support"]) == ("26.1.5", "overlay2", "runtime")
    assert 0 < found["free_bytes"] <= found["total_bytes"]


@pytest.mark.parametrize(
    ("version", "has_dirs", "tools", "runtimes", "support"),
    [
        ("29.0.0", True, ["nvidia-cdi-hook"], {}, "cdi"),
        ("29.0.0", True, ["nvidia-cdi-hook", "nvidia-container-runtime-hook"], {"nvidia": {}}, "cdi"),  # it comes first
        ("29.0.0", True, [], {}, ""),  # only `--device nvidia.com/gpu=0` works there
        ("29.0.0", True, [], {"nvidia": {}}, "runtime"),
        ("29.0.0", False, ["nvidia-cdi-hook"], {}, ""),  # CDI is switched off
        ("26.1.5", True, ["nvidia-cdi-hook"], {}, ""),
        ("26.1.5", True, ["nvidia-cdi-hook", "nvidia-container-runtime-hook"], {}, "hook"),
        ("24.0.7", False, ["nvidia-cdi-hook"], {}, ""),
        ("a'", True, ["nvidia-cdi-hook"], {}, ""),
    ],
)
def test_cdi_counts_where_the_engine_serves_gpus_by_it(
    tmp_path, monkeypatch, version, has_dirs, tools, runtimes, support
):
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/nvidia.yaml").touch()
    monkeypatch.setattr(probe.shutil, "which", lambda name, path: name if name in tools else None)
    found = {"ServerVersion": version, "Runtimes": runtimes, "CDISpecDirs": [str(tmp_path / "cdi")] if has_dirs else []}
    assert probe.gpu_support({**found, "CDISpecDirs": ["/nowhere", *found["CDISpecDirs"]]}) == support
    assert probe.gpu_support(found) == support
    assert has_dirs or probe.gpu_support({"ServerVersion": version, "Runtimes": runtimes}) == support


@pytest.mark.parametrize("answer", [(500, b"{}"), (200, b"not json"), (200, b"[]"), (200, b"{}")])
def test_docker_that_answers_nonsense(docker, answer):
    answers = docker
    answers["/info"] = answer
    assert probe.collect_docker_facts()["problem"]


@pytest.mark.parametrize("host", ["unix:///none", "tcp://10.0.0.1:2375", "unix://"])
def test_no_docker(host, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", host)
    assert probe.collect_docker_facts()["problem"]
    assert probe.job_containers() == {}


def test_podman_is_refused_by_name(docker):
    docker["/info"] = info()
    docker["/version"] = 200, json.dumps({"Components": [{"Name": "Podman Engine", "Version": "4.9.4"}]}).encode()
    assert "Podman answers at" in probe.collect_docker_facts()["problem"]


def test_an_engine_says_whether_it_is_a_users_own_and_shares_the_hosts_network(docker):
    docker["/info"] = info(SecurityOptions=["name=seccomp,profile=builtin", "name=rootless"], Architecture="aarch64")
    found = probe.collect_docker_facts()
    assert (found["is_rootless"], found["has_own_network"], found["architecture"]) == (True, False, "aarch64")
    docker["/info"] = info(SecurityOptions=None)
    assert probe.collect_docker_facts()["is_rootless"] is False


def test_job_containers(docker):
    answers = docker
    answers["/containers/json"] = 200, json.dumps([{"Id": CONTAINER, "Labels": {"gpurun.job": "j'1"}}]).encode()
    assert probe.job_containers() == {CONTAINER: "j'1"}
    copied = {"Config": {"Labels": {"gpurun.job": "j'1"}}}
    docker["/images/None/json"] = (200, json.dumps(copied).encode())
    assert probe.job_containers() == {}, "somebody's container of an image that a job's container became"
    docker["/images/None/json"] = (200, b'{"Config": []}')
    assert probe.job_containers() == {CONTAINER: "j'1"}


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 524288               files
Max locked memory         8388608              8388608              bytes
Max stack size            8388608              unlimited            bytes
"""


@pytest.mark.parametrize(
    ("effective", "may_raise"), [("000001fffeffffff", False), ("000001ffffffffff", True), ("00000000a80425fb", False)]
)
def test_limits_of_the_engine(tmp_path, effective, may_raise):
    for name, network in (("77", "net:[1]"), ("self", "net:[2]")):
        (tmp_path / name / "ns").mkdir(parents=True)
        (tmp_path / name / "ns/net").symlink_to(network)
    (tmp_path / "77/limits").write_text(LIMITS)
    (tmp_path / "77/status").write_text(f"Name:\tdockerd\nCapEff:\t{effective}\n")
    found = probe.engine_limits(77, str(tmp_path))
    limits = {"memlock_bytes": 8 << 20, "nofile": 524288, "may_raise_limits": may_raise}
    assert found == {**limits, "has_own_network": True}
    assert probe.hard_limit(LIMITS, "Max stack size") == -1


def test_an_engine_that_cannot_be_seen(tmp_path):
    assert probe.engine_limits(None) == {}
    assert set(probe.engine_limits(77, str(tmp_path)).values()) == {None}
    assert probe.hard_limit("", "Max open files") is None
    assert probe.has_capability("", "CapEff") is None


SNAPSHOTS = [["driver-type", "io.containerd.snapshotter.v1"]]


@pytest.mark.parametrize(
    ("status", "address", "config", "root"),
    [
        ([], "/run/containerd/containerd.sock", "", "/data"),  # overlay2
        (SNAPSHOTS, "/run/containerd/containerd.sock", "", "/var/lib/containerd"),
        (SNAPSHOTS, "/run/containerd/containerd.sock", "version = 3\nroot = '/nvme/c d'\n", "/nvme/c d"),
        (SNAPSHOTS, "/run/containerd/containerd.sock", "[plugins.x]\n  root = '/other'\n", "/var/lib/containerd"),
        (SNAPSHOTS, "/run/containerd/containerd.sock", "root = 'relative'\n", "/var/lib/containerd"),
        (SNAPSHOTS, "/var/run/docker/containerd/containerd.sock", "root = '/nvme'", "/data"),  # dockerd's own
        (SNAPSHOTS, 7, "\0root = 3", "/data"),
    ],
)
def test_with_the_containerd_store_the_disk_of_images_is_containerd_s(tmp_path, status, address, config, root):
    (tmp_path / "config.toml").write_text(config)
    said = {"DockerRootDir": "/data", "DriverStatus": status, "Containerd": {"Address": address}}
    assert engine.image_root(said, str(tmp_path / "config.toml")) == root
    assert engine.image_root({**said, "Containerd": None}, str(tmp_path)) == "/data"  # an old engine does not say


def test_the_probe_asks_the_disk_of_the_images(docker, monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "CONTAINERD_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text(f'root = "{tmp_path}"\n')
    docker["/info"] = info(DriverStatus=SNAPSHOTS, Containerd={"Address": "/run/containerd/containerd.sock"})
    assert probe.collect_docker_facts()["root"] == str(tmp_path)
