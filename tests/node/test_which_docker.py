"""Which engine gpurun uses on a host: the one that the user's `docker` would."""

import hashlib
import json

import pytest

from gpurun.node import docker
from gpurun.node.agent.frames import OpError


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(docker, "DEFAULT_SOCKET", str(tmp_path / "system.sock"))
    (tmp_path / ".docker").mkdir()
    return tmp_path


def context(home, name, document):
    folder = home / ".docker/contexts/meta" / hashlib.sha256(name.encode()).hexdigest()
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(document if isinstance(document, str) else json.dumps(document))


def endpoint(host):
    return {"Name": "x", "Endpoints": {"docker": {"Host": host, "SkipTLSVerify": False}}}


def test_the_system_s_engine_unless_somebody_says_otherwise(home, monkeypatch):
    assert docker.socket_path() == str(home / "system.sock")
    monkeypatch.setenv("DOCKER_HOST", "unix:///mine.sock")
    assert docker.socket_path() == "/mine.sock"
    assert docker.socket_path("unix:///given.sock") == "/given.sock"


def test_the_context_that_the_user_chose(home, monkeypatch):
    context(home, "own", endpoint("unix:///run/user/1000/docker.sock"))
    context(home, "other", endpoint("unix:///other.sock"))
    (home / ".docker/config.json").write_text(json.dumps({"currentContext": "own"}))
    assert docker.socket_path() == "/run/user/1000/docker.sock"
    monkeypatch.setenv("DOCKER_CONTEXT", "other")
    assert docker.socket_path() == "/other.sock"
    monkeypatch.setenv("DOCKER_HOST", "unix:///first.sock")
    assert docker.socket_path() == "/first.sock"


def test_a_context_on_another_machine_is_refused(home):
    context(home, "far", endpoint("ssh://build.example"))
    (home / ".docker/config.json").write_text(json.dumps({"currentContext": "far"}))
    with pytest.raises(OpError, match="ssh://build"):
        docker.socket_path()


@pytest.mark.parametrize(
    "config", ["", "{", "[]", "null", '{"currentContext": 7}', '{"currentContext": "none"}', "[" * 5000, "\\xff"]
)
@pytest.mark.parametrize("meta", ["", "[]", '{"Endpoints": []}', '{"Endpoints": {"docker": {"Host": 7}}}'])
def test_a_damaged_context_is_no_context(home, config, meta):
    context(home, "none", meta)
    (home / ".docker/config.json").write_text(config)
    assert docker.socket_path() == str(home / "system.sock")


def test_a_rootless_engine_where_there_is_no_other(home, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "run"))
    (home / "run").mkdir()
    assert docker.socket_path() == str(home / "system.sock"), "neither is there: Docker's usual place is named"
    (home / "run/docker.sock").touch()
    assert docker.socket_path() == str(home / "run/docker.sock")
    (home / "system.sock").touch()
    assert docker.socket_path() == str(home / "system.sock")
