"""Three users on one head submit, wait, preempt, adopt and cancel, each with their own processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from faulting import kill_supervisor, supervisor_of
from own_labs import own_lab
from stand_in import TAKE_COMMAND
from users import (
    ALICE,
    BOB,
    GROUP,
    NEEDS_OPEN_PYTHON,
    TRAIN,
    Accounts,
    User,
    left_over,
    make_user,
    open_folder,
    open_python,
)
from waiting import until

from gpurun.lab import engine
from gpurun.leases.store import LeaseStore
from gpurun.state.paths import StatePath
from gpurun.state.sharing import StateDirectory, append_only

pytestmark = [
    pytest.mark.lab,
    pytest.mark.xdist_group("users"),
    pytest.mark.skipif(open_python() is None, reason=NEEDS_OPEN_PYTHON),
]

IMAGE = "gpurun/userstest:2"
LAUNCHER = f"""#!/bin/sh
trap 'exit 0' TERM
{TAKE_COMMAND}for last; do :; done
echo "[0]<stdout>:$last"
[ "$last" = short ] && exit 0
i=0; while [ $i -lt 1200 ]; do sleep 0.1; i=$((i+1)); done
"""
NAMES = {ALICE: "alice", BOB: "bob", TRAIN: "train"}
POOLS = "pools:\n  a: {reservation: 2}\n  b: {reservation: 2}\n"


class OpenEngine:
    """The head's Docker engine for everybody: a socket that passes bytes on."""

    def __init__(self, path: Path, target: str) -> None:
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        path.chmod(0o666)
        self.server.listen()
        self.target = target.removeprefix("unix://")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.server.accept()
                upstream = socket.socket(socket.AF_UNIX)
                upstream.connect(self.target)
                for pair in ((client, upstream), (upstream, client)):
                    threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


class Head:
    """A head with a shared state directory and three users, each with an account, an SSH key and a configuration."""

    def __init__(self, lab, folder: Path) -> None:
        self.lab = lab
        self.state = folder / "state"
        StateDirectory(self.state).make_shared(GROUP)
        docker = folder / "docker.sock"
        self.engine = OpenEngine(docker, engine.ensure())
        self.inventory = folder / "inventory.yaml"
        text = lab.inventory.read_text()
        lines = [line for line in text.splitlines() if not line.startswith(("ssh_config:", "head:"))]
        text = "\n".join(lines).replace("user: train, ", "") + f"\nhead: {{docker_host: unix://{docker}}}\n{POOLS}"
        self.inventory.write_text(text)
        self.accounts = Accounts(folder)
        self.users = {uid: self._make_user(uid, folder, GPURUN_INVENTORY=str(self.inventory)) for uid in NAMES}
        self.root = self._make_user(0, folder)

    def _make_user(self, uid: int, folder: Path, **environ: str) -> User:
        groups = (GROUP,) if uid else ()
        user = replace(make_user(uid, folder, self.state, groups=groups, **environ), accounts=self.accounts)
        self.accounts.add(user)
        self._give_keys(user)
        return user

    def _give_keys(self, user: User) -> None:
        """Copies of the lab's key and of what it knows of its hosts, and the user's own account there."""
        ssh = user.home / ".ssh"
        ssh.mkdir(mode=0o700)
        config = self.lab.ssh_config.read_text().replace("User train", f"User {NAMES.get(user.uid, 'train')}")
        (ssh / "config").write_text(config.replace(f'"{self.lab.folder}/', '"~/.ssh/'))
        for name in ("id_ed25519", "known_hosts"):
            shutil.copy(self.lab.folder / name, ssh / name)
            (ssh / name).chmod(0o600)
        for path in (ssh, *ssh.iterdir()):
            os.chown(path, user.uid, user.uid)

    def running(self, job: str) -> int:
        """How many containers of a job the hosts have."""
        listing = ["docker", "ps", "-q", "--filter", f"label=gpurun.job={job}"]
        return sum(len(self.lab.run(host.name, listing).stdout.split()) for host in self.lab.hosts)

    def submit(self, user: User, gpus: int, command: str, *flags: str) -> str:
        size = str(gpus // len(self.lab.hosts))
        done = user.gpurun(
            "submit", "-i", str(self.inventory), "-n", str(gpus), "--gpus-per-host", size, "--image", IMAGE,
            "--launcher", "horovod", *flags, "--", "sh", "-c", command,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def age(self, job: str, by_s: float) -> None:
        """Let a gang have run for longer than it has."""
        path = self.state / "jobs" / job / "state.json"
        found, aged = path.stat(), path.with_name("aged")
        aged.write_text(json.dumps({**(record := self.record(job)), "granted_s": record["granted_s"] - by_s}))
        os.chown(aged, found.st_uid, found.st_gid)
        aged.chmod(stat.S_IMODE(found.st_mode))
        aged.replace(path)

    def record(self, job: str) -> dict:
        return json.loads((self.state / "jobs" / job / "state.json").read_text())

    def wait_for(self, job: str, state: str, *, attempt: int = 1) -> None:
        def reached() -> bool:
            found = self.record(job)
            return found["state"] == state and found["attempt"] >= attempt

        until(reached, lambda: (job, state, self.record(job), self.logs(job)), every_s=0.05)

    def logs(self, job: str) -> str:
        found = [self.state / "jobs" / job / "supervisor.log", *(self.state / "waiters").glob("*.log")]
        return "\n".join(path.read_text() for path in found if path.exists())

    def audited(self, what: str, job: str) -> list[int]:
        lines = [json.loads(line) for line in (self.state / "audit.jsonl").read_text().splitlines()]
        return [entry["uid"] for entry in lines if entry["what"] == what and entry.get("job") == job]


@pytest.fixture(scope="module")
def users_lab(tmp_path_factory):
    with own_lab("users", racks=1, gpus=2) as lab:
        folder = tmp_path_factory.mktemp("image")
        (folder / "horovodrun").write_text(LAUNCHER)
        (folder / "horovodrun").chmod(0o755)
        (folder / "Dockerfile").write_text("FROM gpurun/shell:1\nCOPY horovodrun /bin/horovodrun\n")
        environ = {**os.environ, "DOCKER_HOST": engine.ensure(), "DOCKER_BUILDKIT": "0"}
        build = ["docker", "build", "-q", "-t", IMAGE, str(folder)]
        subprocess.run(build, env=environ, check=True, stdout=subprocess.DEVNULL)
        yield lab


@pytest.fixture
def folder():
    with open_folder() as made:
        yield made


@pytest.fixture
def head(users_lab, folder):
    made = Head(users_lab, folder)
    yield made
    for user in made.users.values():
        jobs = json.loads(user.gpurun("status", "-i", str(made.inventory), "--json").stdout)["jobs"]
        mine = [job["id"] for job in jobs if job["ended_s"] is None and made.record(job["id"])["owner_uid"] == user.uid]
        if mine:
            user.gpurun("cancel", *mine, timeout_s=300)
    for pid in left_over(made.state):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    append_only(StatePath(made.state) / "audit.jsonl", on=False)
    made.engine.server.close()
    made.accounts.close()


@pytest.mark.story
def test_three_users_share_a_head(head):
    alice, bob, train = head.users[ALICE], head.users[BOB], head.users[TRAIN]
    everything = 2 * len(head.lab.hosts)

    bobs = head.submit(bob, everything, "long", "--pool", "b", "--preemptible")
    head.wait_for(bobs, "RUNNING")
    assert Path(f"/proc/{supervisor_of(bobs).pid}").stat().st_uid == BOB

    head.age(bobs, 3600)
    # Alice's pool is entitled to half of the GPUs. Her pass asks to preempt bob's gang; his supervisor stops it.
    alices = head.submit(alice, everything // 2, "short", "--pool", "a")
    head.wait_for(alices, "SUCCEEDED")
    assert head.audited("preempt", bobs) == [BOB], "his own process decided"
    head.wait_for(bobs, "RUNNING", attempt=2)
    assert head.audited("grant", bobs) == [BOB, BOB]
    assert head.audited("grant", alices) == [ALICE]

    # A queued job needs no process except a waiter; users cannot stop each other's jobs.
    trains = head.submit(train, everything, "short", "--pool", "b", "--preemptible")
    assert head.record(trains)["state"] == "QUEUED"
    for job, user in ((trains, bob), (bobs, train)):
        refused = user.gpurun("cancel", job)
        assert refused.returncode == 2, refused.stderr
        assert f"belongs to user{head.record(job)['owner_uid']}" in refused.stderr

    # Bob's supervisor is killed: others see it and can do nothing, his own next command adopts the job.
    kill_supervisor(head, bobs)
    alice.gpurun("status", "-i", str(head.inventory))
    assert not LeaseStore(head.state).is_alive(bobs)
    bob.gpurun("status", "-i", str(head.inventory))
    assert LeaseStore(head.state).is_alive(bobs)
    assert head.audited("adopt", bobs) == [BOB]

    # Bob ends his; train's waiter grants train's.
    waiting = train.start("-m", "gpurun", "wait", trains, "--timeout", "5m")
    assert bob.gpurun("cancel", bobs).returncode == 0
    out, err = waiting.communicate(timeout=330)
    assert waiting.returncode == 0, out + err + head.logs(trains)
    assert head.audited("grant", trains) == [TRAIN]
    assert (head.audited("cancel", bobs), head.audited("end", trains)) == ([BOB], [TRAIN])

    for user in head.users.values():  # everybody sees all three jobs, and all GPUs free again
        seen = json.loads(user.gpurun("status", "-i", str(head.inventory), "--json").stdout)
        assert {job["id"] for job in seen["jobs"]} == {alices, bobs, trains}
        assert all(host["free"] == host["gpus"] for host in seen["hosts"])
    assert list((head.state / "leases").glob("[!.]*")) == []
    assert os.listdir(head.state / "requests") == []
    until(
        lambda: not left_over(head.state),
        lambda: "waiters and supervisors end when there is nothing left to do",
        every_s=0.1,
    )
    for path in head.state.rglob("*"):
        found = path.lstat()
        assert found.st_gid == GROUP, path
        assert not found.st_mode & 0o007, path
    for host in head.lab.hosts:
        left = head.lab.run(host.name, ["docker", "ps", "-aq", "--filter", "label=gpurun.job"])
        assert left.stdout == b""


def test_root_ends_the_job_of_a_user_who_has_no_account(head):
    """Alice's account is removed. Her supervisor dies, and no user can start a new one."""
    alice, root = head.users[ALICE], head.root
    job = head.submit(alice, 2 * len(head.lab.hosts), "long", "--pool", "a", "--preemptible")
    head.wait_for(job, "RUNNING")
    kill_supervisor(head, job)
    head.accounts.remove(alice)
    recovered = root.gpurun("recover", "-i", str(head.inventory))
    assert f"as root, run `gpurun cancel {job}`" in recovered.stderr
    assert head.running(job) == 2 * len(head.lab.hosts) // 2, "recover ends nothing by itself"
    ended = root.gpurun("cancel", job, "-i", str(head.inventory), timeout_s=300)
    assert ended.returncode == 0, ended.stderr + head.logs(job)
    assert head.record(job)["state"] == "CANCELLED"
    assert head.running(job) == 0
    assert list((head.state / "leases").glob("[!.]*")) == []
    seen = json.loads(alice.gpurun("status", "-i", str(head.inventory), "--json").stdout)
    assert all(host["free"] == host["gpus"] for host in seen["hosts"])
    assert head.audited("take over", job) == [0]


def test_a_user_without_an_account_is_told_so(head):
    """No `ssh` starts for such a user, so all hosts are out for bob: his job waits, and `why` says what is wrong."""
    bob = head.users[BOB]
    head.accounts.remove(bob)
    probed = bob.gpurun("inventory", "probe", "-i", str(head.inventory), timeout_s=300)
    assert probed.returncode != 0
    said = f"uid {BOB} has no account on this machine"
    assert said in probed.stdout + probed.stderr
    job = head.submit(bob, len(head.lab.hosts), "short", "--pool", "b")
    until(lambda: said in bob.gpurun("why", job).stdout, lambda: head.record(job), every_s=1.0)
    assert bob.gpurun("cancel", job).returncode == 0
