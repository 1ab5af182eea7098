"""The job's own sshd admits the account that gpurun uses, whatever its name and password are. Needs root."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from own_sshd import own_sshd

from gpurun.launch import jobssh

PASSWD = "root:x:0:0:root:/root:/bin/sh\n{user}:x:0:0::/tmp:/bin/sh\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"


@pytest.mark.parametrize(
    ("user", "uid", "password"),
    [
        ("root", "0", "*"), ("root", "0", "!"), ("root", "0", "!!"), ("toor", "0", "!"), ("admin@corp", "0", "!!"),
        ("bob", "1000", "*"), ("alice@corp.example.com", "1000", "*"), ("CORP\\carol", "1000", "*"),
    ],
)  # fmt: skip
def test_the_jobs_sshd_admits_the_user_of_the_host(tmp_path: Path, user: str, uid: str, password: str) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("replaces /etc/passwd and /etc/shadow in a mount namespace of its own")
    for name in ("sshd", "bin"):
        (tmp_path / name).mkdir()
    docker = tmp_path / "bin/docker"
    docker.write_text('#!/bin/sh\necho "$@"\n')
    docker.chmod(0o755)
    for key in (tmp_path / "id", tmp_path / "sshd/host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (tmp_path / "sshd/authorized_keys").write_text(jobssh.authorized_keys((tmp_path / "id.pub").read_text()))
    config = jobssh.sshd_config(
        folder=str(tmp_path), address="127.0.0.1", port=1, user=user, uid=uid, docker_host="unix:///x", container="box"
    )
    (tmp_path / "sshd/config").write_text(config)
    (tmp_path / "passwd").write_text(PASSWD.format(user=user))
    (tmp_path / "shadow").write_text(f"{user}:{password}:20000:0:99999:7:::\n")
    log = tmp_path / "sshd/log"
    serve = [own_sshd(), "-i", "-f", tmp_path / "sshd/config", "-E", log, "-o", f"SetEnv=PATH={docker.parent}:/bin"]
    mounts = "".join(f"mount --bind {shlex.quote(f'{tmp_path}/{name}')} /etc/{name}; " for name in ("passwd", "shadow"))
    inside = shlex.join(["unshare", "-m", "sh", "-ec", f"{mounts} exec {shlex.join(map(str, serve))}"])
    options = ["IdentitiesOnly=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes"]
    done = subprocess.run(
        ["ssh", "-F", "none", "-i", tmp_path / "id", "-o", f"ProxyCommand={inside}", "-l", user]
        + [word for option in options for word in ("-o", option)]
        + ["host", "rank 3"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "--host unix:///x exec -i -e GPURUN_STDIN=launcher box sh -c rank 3\n", log.read_text()
