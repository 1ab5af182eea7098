"""The lab itself: real hosts, real sshd, real dockerd; and nothing left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest
from census import census
from waiting import until

from gpurun.errors import BadInput
from gpurun.lab import Lab, LabSpec, host
from gpurun.lab.gpus import FILE, change
from gpurun.lab.process import LabFailed, NoSuchLab

pytestmark = pytest.mark.lab

HOSTS = ["gpu-r1-01", "gpu-r1-02", "gpu-r2-01", "gpu-r2-02"]


def ssh(lab, host, *command, timeout_s=400, connect_s=60):
    return subprocess.run(
        ["ssh", "-F", str(lab.ssh_config), "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}", host, *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def cli(*args, **more):
    return subprocess.run([sys.executable, "-m", "gpurun.cli.lab", *args], capture_output=True, text=True, **more)


def start_up(name, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "gpurun.cli.lab", "up", "--name", name, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def test_a_host_is_reached_by_ssh_as_an_ordinary_user_who_may_use_docker(lab):
    for name in HOSTS:
        done = ssh(lab, name, "hostname; id -un; id -Gn; docker info --format '{{.Name}} {{.DockerRootDir}}'")
        assert done.stdout.splitlines() == [name, "train", "train docker", f"{name} /var/lib/docker"], done.stderr


def test_hosts_know_each_other_and_nobody_else(lab):
    addresses = {each.name: str(each.address) for each in lab.hosts}
    for name, address in addresses.items():
        assert ssh(lab, "gpu-r1-01", "getent", "hosts", name).stdout.split() == [address, name]
    assert ssh(lab, "gpu-r1-01", "getent", "hosts", "no-such-host").returncode != 0


def test_hosts_share_nothing_that_machines_do_not_share(lab):
    lab.run(
        "gpu-r1-01", ["sh", "-c", "for d in /tmp /var/tmp /root /run /dev/shm /etc /usr /home; do touch $d/mine; done"]
    )
    for place in ("/tmp", "/var/tmp", "/root", "/run", "/dev/shm", "/etc", "/usr", "/home"):
        assert lab.run("gpu-r1-01", ["test", "-e", f"{place}/mine"]).code == 0
        assert lab.run("gpu-r1-02", ["test", "-e", f"{place}/mine"]).code == 1
        assert not Path(place, "mine").exists()
    assert lab.run("gpu-r1-01", ["test", "-e", str(Path.cwd())]).code == 1
    processes = lab.run("gpu-r1-02", ["ps", "-e", "-o", "comm="]).stdout.decode().split()
    assert processes.count("dockerd") == 1 and len(processes) < 12
    assert lab.run("gpu-r1-01", ["ls", "/sys/class/net"]).stdout.split() == [b"eth0", b"lo"]


def test_only_keys_open_a_host_and_only_its_own_host_key_is_believed(lab, tmp_path):
    options = ["-F", "/dev/null", "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={lab.folder}/known_hosts"]
    address = str(lab.hosts[0].address)
    refused = subprocess.run(
        ["ssh", *options, "-o", "IdentityFile=/dev/null", "-o", "IdentitiesOnly=yes", f"train@{address}", "true"],
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 255 and "(publickey)" in refused.stderr
    swapped = tmp_path / "known_hosts"
    keys = (lab.folder / "known_hosts").read_text().splitlines()
    swapped.write_text(" ".join([keys[0].split()[0], *keys[1].split()[1:]]) + "\n")
    changed = subprocess.run(
        ["ssh", "-F", str(lab.ssh_config), "-o", f"UserKnownHostsFile={swapped}", "gpu-r1-01", "true"],
        capture_output=True,
        text=True,
    )
    assert changed.returncode == 255 and "IDENTIFICATION HAS CHANGED" in changed.stderr


def test_arguments_of_run_arrive_byte_for_byte(lab):
    arguments = ["x", "a b", "c'd", 'e"f', "--", "-n", "new\nline", "ü😀", "$HOME;`id`", ""]
    done = cli("run", "gpu-r1-01", "--name", lab.name, "--", "printf", "[%s]", *arguments)
    assert done.stdout == "".join(f"[{argument}]" for argument in arguments) and done.returncode == 0


def test_run_exits_as_the_command_does(lab):
    assert cli("run", "gpu-r1-01", "--name", lab.name, "--", "sh", "-c", "exit 7").returncode == 7
    assert cli("run", "--name", lab.name, "--user", "alice", "gpu-r1-01", "--", "id", "-un").stdout == "alice\n"
    missing = cli("run", "gpu-r9-99", "--name", lab.name, "--", "true")
    assert missing.returncode == 2 and "gpu-r1-01" in missing.stderr


@pytest.mark.story
def test_a_crash_is_silent_and_keeps_the_disk_and_a_cut_host_continues(lab):
    """One host loses its power, another one its cable. Then the head loses its cable."""
    ssh(lab, "gpu-r2-02", "echo kept > ~/file; sync")
    client = subprocess.Popen(["ssh", "-F", str(lab.ssh_config), "gpu-r2-02", "sleep 600"])
    until(lambda: b"sleep 600" in lab.run("gpu-r2-02", ["ps", "ax"]).stdout)
    try:
        lab.crash("gpu-r2-02")
        lab.cut("gpu-r1-02")
        assert [each.state for each in lab.status().hosts] == ["up", "cut", "up", "off"]
        for host in ("gpu-r2-02", "gpu-r1-02"):
            assert "timed out" in ssh(lab, host, "true", connect_s=2).stderr
        assert client.poll() is None, "no packet tells the client that the host has gone"
        with pytest.raises(NoSuchLab):
            lab.run("gpu-r2-02", ["true"])
        assert b"NO-CARRIER" in lab.run("gpu-r1-02", ["ip", "link", "show", "eth0"]).stdout
    finally:
        client.kill()
        client.wait()
    lab.boot("gpu-r2-02")
    lab.boot("gpu-r2-02")
    lab.heal("gpu-r1-02")
    assert ssh(lab, "gpu-r2-02", "cat ~/file").stdout == "kept\n"
    assert ssh(lab, "gpu-r1-02", "true").returncode == 0
    lab.cut("head")
    try:
        assert lab.status().head_state == "cut"
        assert "timed out" in ssh(lab, "gpu-r1-01", "true", connect_s=2).stderr
        reach = ["bash", "-c", "read -t 60 banner < /dev/tcp/gpu-r2-01/22 && echo $banner"]
        assert b"SSH-2.0" in lab.run("gpu-r1-01", reach).stdout, "hosts still reach each other"
    finally:
        lab.heal("head")
    assert ssh(lab, "gpu-r1-01", "true").returncode == 0


def test_a_killed_dockerd_comes_back_and_its_host_lives_on(lab):
    before = lab.init_of("gpu-r1-01")
    lab.run("gpu-r1-01", ["sh", "-c", "kill -9 $(cat /run/docker.pid)"])
    until(
        lambda: lab.status().hosts[0].state == "up" and not ssh(lab, "gpu-r1-01", "docker", "ps").returncode,
        every_s=0.2,
    )
    assert lab.init_of("gpu-r1-01") == before


def test_traffic_between_racks_is_counted_at_both_uplinks(lab):
    before = lab.status().uplinks
    sent = 20 << 20
    copy = f"head -c {sent} /dev/zero | ssh -o StrictHostKeyChecking=no -i /tmp/key train@gpu-r2-01 'cat >/dev/null'"
    lab.run("gpu-r1-01", ["tee", "/tmp/key"], user="train", stdin=(lab.folder / "id_ed25519").read_bytes())
    done = lab.run("gpu-r1-01", ["bash", "-c", f"chmod 600 /tmp/key; {copy}; rm /tmp/key"], user="train")
    assert done.code == 0, done.stderr
    after = lab.status().uplinks
    for grown in (after["r1"].from_bytes - before["r1"].from_bytes, after["r2"].to_bytes - before["r2"].to_bytes):
        assert sent < grown < sent * 1.1


def test_a_link_carries_the_rate_it_was_given(lab):
    sent, rate_bps = 4 << 20, 32_000_000
    lab.shape("gpu-r1-01", rate_bps)
    try:
        began = time.monotonic()
        done = ssh(lab, "gpu-r1-01", f"head -c {sent} /dev/zero")
        elapsed_s = time.monotonic() - began
    finally:
        lab.shape("gpu-r1-01", 10_000_000_000)
    assert done.returncode == 0
    assert elapsed_s > sent * 8 / rate_bps * 0.85


NVML = """
import json, sys
sys.path.insert(0, "/tmp")
from pynvml import *
nvmlInit()
def ask(function, *arguments):
    try:
        return function(*arguments)
    except NVMLError as error:
        return "error %d" % error.value
found = []
for index in range(nvmlDeviceGetCount()):
    gpu = ask(nvmlDeviceGetHandleByIndex, index)
    if isinstance(gpu, str):
        found.append(gpu)
        continue
    processes = [(each.pid, each.usedGpuMemory >> 20) for each in nvmlDeviceGetComputeRunningProcesses(gpu)]
    found.append({"name": nvmlDeviceGetName(gpu), "memory": nvmlDeviceGetMemoryInfo(gpu).used >> 20,
        "processes": processes, "ecc": nvmlDeviceGetTotalEccErrors(gpu, 1, 0)})
print(json.dumps(found))
"""


def test_the_real_pynvml_sees_gpus_and_the_faults_planted_in_them(lab):
    pid = lab.run("gpu-r2-01", ["sh", "-c", "sleep 300 > /dev/null 2>&1 & echo $!"]).stdout.decode().strip()
    lab.run("gpu-r2-01", ["tee", "/tmp/pynvml.py"], user="bob", stdin=Path(pynvml.__file__).read_bytes())
    gpus = lab.folder / "hosts/gpu-r2-01/hardware" / FILE
    change(gpus, 1, {"processes": f"{pid}:512 4194000:100"})
    change(gpus, 2, {"error": "15"})
    change(gpus, 3, {"ecc_uncorrected": "2"})
    seen = json.loads(lab.run("gpu-r2-01", ["python3", "-c", NVML], user="train").stdout)
    assert [each if isinstance(each, str) else each["name"] for each in seen] == [
        "Tesla P100-SXM2-16GB",
        "Tesla P100-SXM2-16GB",
        "error 15",
        "Tesla P100-SXM2-16GB",
    ]
    assert seen[1]["processes"] == [[int(pid), 512]] and seen[1]["memory"] == 512
    assert seen[3]["ecc"] == 2
    lab.crash("gpu-r2-01")
    lab.boot("gpu-r2-01")
    healthy = json.loads(lab.run("gpu-r2-01", ["python3", "-c", NVML], user="bob").stdout)
    assert all(each["processes"] == [] and each["ecc"] == 0 for each in healthy)


def test_sysfs_stand_in_is_where_the_session_says(lab):
    done = ssh(
        lab,
        "gpu-r1-01",
        "cd $GPURUN_SYSFS/class/infiniband/mlx5_0 && cat ports/1/state ports/1/gids/3 && ls device/net",
    )
    address = lab.hosts[0].address.packed.hex()
    assert done.stdout.splitlines() == [
        "4: ACTIVE",
        f"0000:0000:0000:0000:0000:ffff:{address[:4]}:{address[4:]}",
        "eth0",
    ], done


def test_up_again_changes_nothing_and_other_options_are_refused(lab):
    before = [lab.init_of(host) for host in HOSTS]
    lab.up(LabSpec(lab.name))
    assert [lab.init_of(host) for host in HOSTS] == before
    with pytest.raises(BadInput, match="other options"):
        lab.up(LabSpec(lab.name, gpus=2))
    assert [lab.init_of(host) for host in HOSTS] == before


def test_labs_stand_side_by_side_and_leave_nothing(named_lab, lab):
    one, other = named_lab("one"), named_lab("other")
    for each in (one, other):
        each.up(LabSpec(each.name, racks=1, hosts=1))
    assert len({each.status().subnet for each in (one, other, lab)}) == 3
    assert ssh(one, "gpu-r1-01", "hostname").returncode == ssh(other, "gpu-r1-01", "hostname").returncode == 0
    assert lab.status().state == "up"
    for each in (one, other):
        folder = each.folder
        each.down()
        each.down()
        assert census(each.name, folder) == set()
        assert each.status().state == "down"
    assert ssh(lab, "gpu-r1-01", "hostname").returncode == 0


def test_disks_outlive_down_and_have_the_size_that_was_asked_for(named_lab):
    lab = named_lab("disk")
    spec = LabSpec(lab.name, racks=1, hosts=1, disk_mib=200)
    lab.up(spec)
    full = ssh(lab, "gpu-r1-01", "echo kept > file; head -c 300M /dev/zero > big; df --output=size -m / | tail -1")
    assert "No space left" in full.stderr and 100 < int(full.stdout) < 200
    lab.down()
    assert census(lab.name, lab.folder) == set()
    lab.up(spec)
    assert ssh(lab, "gpu-r1-01", "cat file").stdout == "kept\n"
    lab.down(purge=True)
    assert not lab.folder.exists()


def test_a_start_that_is_not_on_record_yet_ends_with_its_host(tmp_path):
    """`up` was killed just after a fork: the process is not recorded, and is in no namespace yet."""
    record, other = tmp_path / "host.json", tmp_path / "other.json"
    mine, others = (
        subprocess.Popen(["sh", "-c", "read _", "sh", str(path)], stdin=subprocess.PIPE) for path in (record, other)
    )
    try:
        host.kill(record, "no-such-namespace")
        assert (mine.wait(60), others.poll()) == (-signal.SIGKILL, None)
    finally:
        for each in (mine, others):
            each.kill()
            each.wait()


@pytest.mark.parametrize("delay_s", [0.5, 0.9])
def test_up_that_is_interrupted_leaves_a_whole_lab_or_nothing(named_lab, delay_s):
    lab = named_lab("interrupted")
    folder = lab.folder
    up = start_up(lab.name, "--hosts", "2")
    time.sleep(delay_s)
    os.killpg(up.pid, signal.SIGINT)
    up.wait()  # its exit code tells nothing of this: the signal may come after the last host answered
    if lab.status().state == "up":
        assert [ssh(lab, host, "hostname").stdout.strip() for host in HOSTS] == HOSTS
    else:
        assert census(lab.name, folder) == set()


def test_a_host_that_does_not_come_up_takes_the_lab_down_again(named_lab):
    lab = named_lab("broken")
    place = lab.folder / "hosts/gpu-r1-01"
    place.mkdir(parents=True)
    (place / "disk.img").write_bytes(b"not a file system")
    with pytest.raises(LabFailed):
        lab.up(LabSpec(lab.name, racks=1, hosts=1, disk_mib=64))
    assert census(lab.name, lab.folder) == set()
    assert lab.status().state == "down"


def test_a_lab_that_is_not_up_says_so():
    lab = Lab("nobody-made-this")
    lab.down()
    assert lab.status().state == "down"
    with pytest.raises(NoSuchLab):
        lab.run("gpu-r1-01", ["true"])
    done = cli("status", "--name", "nobody-made-this", "--json")
    assert json.loads(done.stdout)["state"] == "down" and done.returncode == 0
