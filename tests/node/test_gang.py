"""A gang's part on a host: what Docker's own texts mean."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
from types import SimpleNamespace

import pytest

from gpurun.node.agent.frames import Call, OpError
from gpurun.node.docker import container_user, of_create, of_load, of_start
from gpurun.node.job import gang


@pytest.mark.parametrize(
    ("stamp", "since_epoch_s"),
    [
        ("1970-01-01T00:00:10.75Z", 10.75),
        ("1970-01-01T00:00:10.123456789Z", 10.123456789),
        ("1970-01-01T00:00:10Z", 10.0),
    ],
)
def test_the_end_of_a_container_is_known_to_the_fraction_of_a_second(monkeypatch, stamp, since_epoch_s):
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert gang._ago_s(stamp) == pytest.approx(100.0 - since_epoch_s)


@pytest.mark.parametrize("stamp", ["", "never", "1970-01-01T00:00:10.5+01:00", "1970-01-01T00:00:10.x", "0001"])
def test_another_text_is_no_time(stamp):
    assert gang._ago_s(stamp) is None


@pytest.mark.parametrize(
    ("status", "code", "said"), [("exited", 70, "read-only"), ("exited", 0, ""), ("running", 0, "")]
)
def test_of_a_container_that_failed_the_host_says_whether_it_could_write(monkeypatch, status, code, said):
    state = {"Status": status, "ExitCode": code, "OOMKilled": False, "Error": "", "StartedAt": "", "FinishedAt": ""}
    found = {"Id": "c", "Name": "/n", "Config": {"Labels": {}}, "HostConfig": {}, "State": state}
    monkeypatch.setattr(gang.docker, "exchange", lambda *_: (200, json.dumps(found).encode()))
    monkeypatch.setattr(gang, "why_unwritable", lambda folder: f"{folder} is read-only")
    unwritable = gang._inspected(None, "j-0a1b2c3d", "c")["unwritable"]
    assert said in unwritable and bool(unwritable) == bool(said)
    assert not unwritable or "/jobs/j-0a1b2c3d/run " in unwritable


SHIM = "failed to create task for container: failed to create shim task: OCI runtime create failed: "
RUNC = "starting the container: " + SHIM + "runc create failed: unable to start container process: "
LOG = "unable to retrieve OCI runtime error (open /run/containerd/x/log.json: no such file or directory): "


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (RUNC + 'exec: "sh": executable file not found in $PATH: unknown', "no-command"),
        (RUNC + 'exec: "/bin/no": stat /bin/no: no such file or directory: unknown', "no-command"),
        (RUNC + "error during container init: exec /bin/no: no such file or directory", "no-command"),
        ("crun: executable file `sh` not found in $PATH: No such file or directory", "no-command"),
        (SHIM + LOG + 'exec: "runc": executable file not found in $PATH: unknown', "engine"),
        ('exec: "runc": executable file not found in $PATH', "engine"),
        ('exec: "/usr/bin/runc": stat /usr/bin/runc: no such file or directory', "engine"),
        (SHIM + LOG + "fork/exec /usr/bin/runc: no such file or directory", "engine"),
        ('failed to start shim: exec: "containerd-shim-runc-v2": executable file not found in $PATH', "engine"),
        (RUNC + 'error running hook #0: exec: "nvidia-container-cli": executable file not found', "engine"),
        (SHIM + 'exec: "nvidia-container-runtime": executable file not found in $PATH', "engine"),
        ('error gathering device information: "/dev/infiniband": no such file or directory', "docker"),
        ("starting the container: context deadline exceeded", "no-docker"),
        ("", "docker"),
        ("exec: " + "x: " * 20_000, "docker"),
    ],
)
def test_only_a_program_that_the_image_lacks_is_no_command(message, kind):
    assert of_start(message) == kind


NVIDIA = (
    RUNC + "error during container init: error running hook #0: error running hook: exit status 1, stdout: , stderr: "
)
OF_HOSTS = [
    NVIDIA + "Auto-detected mode as 'legacy'\nnvidia-container-cli: initialization error: nvml error: driver/library "
    "version mismatch: unknown",
    NVIDIA + "nvidia-container-cli: initialization error: driver error: timed out: unknown",
    NVIDIA + "nvidia-container-cli.real: initialization error: driver error: failed to process request: unknown",
    NVIDIA + "nvidia-container-cli: detection error: nvml error: unknown error: unknown",
    NVIDIA + "nvidia-container-cli: device error: 3: unknown device: unknown",
    NVIDIA + "nvidia-container-cli: mount error: failed to add device rules: unable to find any existing device "
    "filters attached to the cgroup: bpf_prog_query(BPF_CGROUP_DEVICE) failed: operation not permitted: unknown",
    NVIDIA + "nvidia-container-cli: ldcache error: open failed: /sbin/ldconfig.real: no such file or directory",
    RUNC + "unable to apply cgroup configuration: mkdir /sys/fs/cgroup/memory/docker/1: no space left on device",
    RUNC + 'unable to start unit "docker-1.scope": Message recipient disconnected from message bus without replying',
    RUNC + "error during container init: write /proc/self/attr/keycreate: permission denied: unknown",
    "failed to create task for container: failed to start shim: start failed: io.containerd.runc.v2: create new shim "
    "socket: listen unix /run/containerd/s/1: bind: no such file or directory: unknown",
    "error creating overlay mount to /var/lib/docker/overlay2/1/merged: invalid argument",
    "layer does not exist", "open /var/lib/docker/overlay2/1/committed: structure needs cleaning",
    "mkdir /var/lib/docker/overlay2/1-init: no space left on device", "mkdir /x: disk quota exceeded",
    "mkdir /var/lib/docker/overlay2/1: read-only file system", "stat /data: stale NFS file handle",
    "error while creating mount source path '/data': stat /data: transport endpoint is not connected",
    "fork/exec /proc/self/exe: resource temporarily unavailable", "open /proc/1/ns/net: too many open files",
    'could not select device driver "" with capabilities: [[gpu]]', "unknown or invalid runtime name: nvidia",
    "unresolvable CDI devices nvidia.com/gpu=0", "failed to initialize logging driver: dial tcp: i/o timeout",
    "AppArmor enabled on system but the docker-default profile could not be loaded: apparmor_parser failed",
    'connection error: desc = "transport: Error while dialing: dial unix /run/containerd/containerd.sock: timeout"',
    "ttrpc: closed: unknown", "rpc error: code = Unavailable desc = transport is closing", "context canceled",
]  # fmt: skip
OF_JOBS = [
    NVIDIA + "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your driver to "
    "a newer version, or use an earlier cuda container: unknown",
    RUNC + 'error during container init: error mounting "/a" to rootfs at "/b": create mountpoint for /b mount: make '
    'mountpoint "/b": mkdirat /b: read-only file system: unknown',
    RUNC + 'error during container init: error mounting "/a" to rootfs at "/b": mount /a:/b (via /proc/self/fd/6), '
    "flags: 0x5000: not a directory: unknown: Are you trying to mount a directory onto a file (or vice-versa)?",
    RUNC + "container init was OOM-killed (memory limit too low?): unknown",
    RUNC + 'exec: "horovodrun": permission denied: unknown', RUNC + "exec /entry.sh: exec format error",
    'error gathering device information while adding custom device "/dev/infiniband": no such file or directory',
    "unable to find user bob: no matching entries in passwd file", "Minimum memory limit allowed is 6MB",
    "Range of CPUs is from 0.01 to 8.00, as there are only 8 CPUs available", "invalid tag format",
]  # fmt: skip


@pytest.mark.parametrize("message", OF_HOSTS)
def test_what_only_a_host_brings_about_is_its_engines(message):
    """Messages that people have met, from issues of moby, runc and nvidia-container-toolkit."""
    assert (of_create(message), of_start(message)) == ("engine", "engine")
    assert of_load(message) in ("engine", "no-space")


@pytest.mark.parametrize("message", OF_JOBS)
def test_what_a_job_brings_about_may_be_the_jobs(message):
    assert (of_create(message), of_start(message), of_load(message)) == (
        "docker", "docker", "load-failed",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?", "no-docker"),
        ('error during connect: Post "http://x": EOF', "no-docker"),
        ("Error response from daemon: context deadline exceeded", "no-docker"),
        ("Error response from daemon: No such image: x:1", "no-image"),
        ('invalid mount config for type "bind": bind source path does not exist: /nowhere/x', "no-mount"),
        ("docker: invalid reference format", "docker"),
    ],
)
def test_what_docker_create_said(message, kind):
    assert of_create(message) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (http.client.RemoteDisconnected("closed"), "no-docker"),
        (ConnectionResetError(104, "reset"), "no-docker"),
        (http.client.BadStatusLine("\x1b["), "no-docker"),
        (TimeoutError(), "timeout"),
    ],
)
def test_an_engine_that_breaks_off_a_start_is_no_failure_of_the_job(monkeypatch, error, kind):
    def exchange(*_):
        raise error

    monkeypatch.setattr(gang.docker, "exchange", exchange)
    monkeypatch.setattr(gang.docker, "open_engine", lambda *_, **__: http.client.HTTPConnection("x"))
    with pytest.raises(OpError) as caught:
        gang.start(Call(1, lambda *_: None, False, b""), "c")
    assert caught.value.kind == kind


def test_a_command_that_takes_too_long_is_a_timeout(monkeypatch):
    def run(argv, **_):
        raise subprocess.TimeoutExpired(argv, 120.0)

    monkeypatch.setattr(gang.subprocess, "run", run)
    with pytest.raises(OpError, match="docker create did not end within 120 s") as caught:
        gang._run(["docker", "create", "x"])
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize("setting", [None, "DOCKER_CONFIG"])
def test_docker_s_client_adds_nothing_of_the_user_s_configuration(tmp_path, monkeypatch, setting):
    """With `proxies` in config.json, it would set HTTP_PROXY in every container, and gRPC would call the proxy."""
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text('{"proxies": {"default": {"httpProxy": "http://proxy:3128"}}}')
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\ncat "${DOCKER_CONFIG:-$HOME/.docker}/config.json"\n')
    docker.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    if setting:
        monkeypatch.setenv(setting, str(tmp_path / ".docker"))
    done = gang._run([str(docker), "create", "x"])
    assert done.returncode and "proxy" not in done.stdout


@pytest.mark.parametrize("options", [[], ["name=seccomp"], None, ["name=rootless"]])
def test_a_container_gets_the_groups_of_the_user_unless_the_engine_numbers_them_otherwise(monkeypatch, options):
    info = {"value": {"json": None if options is None else {"SecurityOptions": options}}}
    monkeypatch.setattr("gpurun.node.docker.request", lambda *_: SimpleNamespace(**info))
    monkeypatch.setattr(os, "getgroups", lambda: [2001, os.getgid(), 4, 1 << 31])
    expected = (0, 0, []) if options == ["name=rootless"] else (os.getuid(), os.getgid(), [4, 2001])
    assert container_user(None) == expected


@pytest.mark.parametrize("name", ["a:b", "a,b", "a\nb", "", "x" * 257])
def test_a_group_with_a_strange_name_or_none_still_has_a_line(monkeypatch, name):
    monkeypatch.setattr(gang.grp, "getgrgid", lambda _: SimpleNamespace(gr_name=name))
    assert gang._group_name(2001) == "group-2001"
    monkeypatch.undo()
    assert (gang._group_name(0), gang._group_name(1_999_999_999)) == ("root", "group-1999999999")


def test_docker_s_advice_is_not_its_message():
    said = "docker: Error response from daemon: no\n\nRun 'docker create --help' for more information\n"
    assert gang._last_line(said) == "docker: Error response from daemon: no"
