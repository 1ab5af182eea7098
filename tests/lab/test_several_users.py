"""docs/several-users.md is run, block by block, with three users who have real accounts, on real hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from howto import OwnHead, blocks_of, has_account_here
from own_labs import own_lab
from test_users import OpenEngine
from users import NEEDS_OPEN_PYTHON, open_folder, open_python
from waiting import until

from gpurun.lab import engine
from gpurun.state.paths import StatePath
from gpurun.state.sharing import append_only

pytestmark = [
    pytest.mark.lab,
    pytest.mark.xdist_group("several_users"),
    pytest.mark.skipif(open_python() is None, reason=NEEDS_OPEN_PYTHON),
]

DOCUMENT = Path(__file__).parents[2] / "docs" / "several-users.md"
PEOPLE = {"alice": "alice", "bob": "bob", "carol": "train"}
"""Each user of the document, and the account on the lab's hosts."""
LONG = "submit -n 1 --image train:1 -- sh -c 'trap \"exit 0\" TERM; sleep 120 & wait'"


@pytest.fixture
def lab(tmp_path):
    with own_lab("users", racks=1, gpus=2) as lab:
        environ = {**os.environ, "DOCKER_HOST": engine.ensure()}
        name = ["docker", "tag", "gpurun/tiny:1", "train:1"]
        subprocess.run(name, env=environ, check=True)
        yield lab


@pytest.fixture
def head(lab):
    with open_folder() as folder:
        made = OwnHead(folder)
        made.lab = lab
        docker = OpenEngine(folder / "docker.sock", engine.ensure())
        (folder / "root").mkdir(mode=0o700)
        give_keys(lab, folder / "root", "train")
        write_inventory(lab, folder)
        for name, account in PEOPLE.items():
            made.do("root", f"useradd --create-home --user-group {name}")
            give_keys(lab, folder / "home" / name, account)
        yield made
        made.close()
        append_only(StatePath(folder / "lib" / "gpurun") / "audit.jsonl", on=False)
        docker.server.close()


def write_inventory(lab, folder: Path) -> None:
    lines = [line for line in lab.inventory.read_text().splitlines() if not line.startswith(("ssh_config:", "head:"))]
    text = "\n".join(lines).replace("user: train, ", "")
    docker = f"head: {{docker_host: unix://{folder / 'docker.sock'}}}"
    (folder / "root" / "inventory.yaml").write_text(f"{text}\n{docker}\n")


def give_keys(lab, home: Path, account: str) -> None:
    """What the document's fifth step asks for."""
    ssh = home / ".ssh"
    ssh.mkdir(mode=0o700)
    config = lab.ssh_config.read_text().replace("User train", f"User {account}")
    (ssh / "config").write_text(config.replace(f'"{lab.folder}/', '"~/.ssh/'))
    for name in ("id_ed25519", "known_hosts"):
        shutil.copy(lab.folder / name, ssh / name)
        (ssh / name).chmod(0o600)
    owner = home.stat()
    for path in (ssh, *ssh.iterdir()):
        os.chown(path, owner.st_uid, owner.st_gid)


def jobs(head) -> dict[str, dict]:
    shown = json.loads(head.do("root", "gpurun status --all --json -i /etc/gpurun/inventory.yaml 2>/dev/null"))
    return {job["id"]: job for job in shown["jobs"]}


def submit_long(head, user: str) -> str:
    job = head.do(user, f"gpurun {LONG}").split()[0]
    until(
        lambda: jobs(head)[job]["state"] == "RUNNING",
        lambda: (jobs(head)[job], head.run(user, f"gpurun status {job}").stdout),
        every_s=0.2,
    )
    return job


def kill_supervisor(head, job: str) -> None:
    (pid,) = (pid for pid in head.pids() if f"gpurun.supervisor\0{job}" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(pid, signal.SIGKILL)
    while pid in head.pids():
        time.sleep(0.02)


def test_the_document_from_top_to_bottom(head):
    install, group, state, inventory, recover, trial, leave, remove, gone = blocks_of(DOCUMENT)
    assert "pip install ." in install.script, "the fixture stands for this block: it installs this tree in /opt/gpurun"
    for block in (group, state, inventory):
        assert block.users == ("root",)
        head.do("root", block.script)
    said = head.do("root", recover.script, codes=(4,))  # the fixture hides systemd, so that nothing is installed
    assert "gpurun recover" in said
    assert "@reboot" in said

    assert trial.users == tuple(PEOPLE)
    for user in trial.users:
        assert "hello" in head.do(user, trial.script)
    assert [job["state"] for job in jobs(head).values()] == ["SUCCEEDED"] * 3

    # Bob's supervisor dies: what the timer runs brings it back, as bob.
    bobs = submit_long(head, "bob")
    kill_supervisor(head, bobs)
    head.do("root", "gpurun recover")
    adopted = [entry for entry in audited(head) if entry["what"] == "adopt" and entry["job"] == bobs]
    assert [entry["user"] for entry in adopted] == ["bob"]
    kill_supervisor(head, bobs)
    head.do("root", f"gpurun cancel {bobs}")  # also when root comes before the timer does
    assert jobs(head)[bobs]["state"] == "CANCELLED"

    # Alice leaves without jobs, carol with a job that has no supervisor.
    alices, carols = submit_long(head, "alice"), submit_long(head, "carol")
    head.do("root", leave.script.replace("JOB", alices))
    assert jobs(head)[alices]["state"] == "CANCELLED"
    kill_supervisor(head, carols)
    wait_for_processes_of(head, "alice")
    head.do("root", remove.script)
    head.do("root", "userdel --force carol", codes=(0, 12))
    said = head.do("root", gone.script.replace("JOB", carols))
    assert carols in said
    assert jobs(head)[carols]["state"] == "CANCELLED"
    assert os.listdir(head.folder / "lib" / "gpurun" / "leases") == []
    for host in head.lab.hosts:
        assert head.lab.run(host.name, ["docker", "ps", "-aq", "--filter", "label=gpurun.job"]).stdout == b""
    shown = json.loads(head.do("bob", "gpurun status --json 2>/dev/null"))
    assert all(host["free"] == host["gpus"] for host in shown["hosts"])
    assert not any(has_account_here(name) for name in ("carol",)), "the machine's own accounts were not touched"


def audited(head) -> list[dict]:
    return json.loads(head.do("root", "gpurun audit --json"))["entries"]


def wait_for_processes_of(head, user: str) -> None:
    """A waiter may look once more before it ends; `userdel` refuses users with processes."""
    uid = int(head.do("root", f"id -u {user}"))
    until(lambda: not any(Path(f"/proc/{pid}").stat().st_uid == uid for pid in head.pids()), every_s=0.2)
