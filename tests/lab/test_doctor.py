"""Real hosts, many faults at once: doctor names each on its host, and nothing else."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_labs import own_lab
from waiting import LIMIT_S, until

from gpurun.doctor.survey import Watch, preflight, probe
from gpurun.inventory.read import load_inventory
from gpurun.lab import gpus
from gpurun.remote.fleet import Fleet
from gpurun.remote.route import target_of

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("doctor")]

WRONG_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(clock, now);
    if (answer == 0 && clock == CLOCK_REALTIME) now->tv_sec += 90;
    return answer;
}
"""


@pytest.fixture(scope="module")
def doctor_lab():
    with own_lab("doctor", racks=1, hosts=4, gpus=2, fabric="roce") as lab:
        yield lab


@pytest.fixture
def healthy(doctor_lab):
    """Four hosts. Those whose state a test has changed are rebooted."""
    doctor_lab.touched = set()
    yield doctor_lab
    for host in doctor_lab.touched:
        doctor_lab.heal(host)
        doctor_lab.crash(host)
        doctor_lab.boot(host)


@pytest.fixture
def sixteen():
    """Sixteen hosts in two racks."""
    with own_lab("doctors", racks=2, hosts=8, gpus=2, fabric="roce") as lab:
        lab.touched = set()
        yield lab


class Host:
    """A lab host with what faults are planted with."""

    def __init__(self, lab, name):
        lab.touched.add(name)
        self.lab, self.name = lab, name
        self.hardware = lab.folder / "hosts" / name / "hardware"
        self.port = self.hardware / "sys/class/infiniband/mlx5_0/ports/1"

    def run(self, *argv):
        done = self.lab.run(self.name, argv, timeout_s=30)
        assert done.code == 0, done.stderr
        return done.stdout.decode().strip()

    def gpu(self, number, **facts):
        gpus.change(self.hardware / gpus.FILE, number, {key: str(value) for key, value in facts.items()})

    def driver(self, **facts):
        ini = gpus.load_gpus(self.hardware / gpus.FILE)
        ini["driver"].update({key: str(value) for key, value in facts.items()})
        gpus.save(ini, self.hardware / gpus.FILE)


def gpurun(lab, *args, home):
    argv = [sys.executable, "-m", "gpurun", *args, "--inventory", str(lab.inventory)]
    environ = {**os.environ, "GPURUN_HOME": str(home)}
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def doctor(lab, tmp_path, *args):
    done = gpurun(lab, "doctor", "--json", *args, home=tmp_path)
    assert done.returncode in (0, 4), done.stderr
    return done.returncode, json.loads(done.stdout)


def faults(document):
    return {(one["check"], *one["hosts"]) for one in document["findings"]}


def fleet_of(lab, hosts):
    inventory = load_inventory(lab.inventory)
    return inventory, Fleet.open([target_of(inventory.by_name[name], inventory) for name in hosts])


def plant_mtu(host, _):
    host.run("ip", "link", "set", "eth0", "mtu", "1400")


def plant_dead_port(host, _):
    (host.port / "state").write_text("1: DOWN\n")
    (host.port / "phys_state").write_text("3: Disabled\n")


def plant_firewall(host, _):
    host.run("iptables", "-A", "INPUT", "-p", "tcp", "--syn", "--dport", "1024:65535", "-j", "DROP")


def plant_clock(host, tmp_path):
    library = tmp_path / "wrong_clock.so"
    (tmp_path / "wrong_clock.c").write_text(WRONG_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "wrong_clock.c", "-ldl"], check=True)
    inside = host.hardware / "wrong_clock.so"
    inside.write_bytes(library.read_bytes())
    inside.chmod(0o755)
    host.run("sh", "-c", "echo LD_PRELOAD=/run/gpurun-lab/wrong_clock.so >> /etc/environment")


def plant_lost_gpu(host, _):
    host.gpu(1, error=15)


def plant_stranger(host, _):
    pid = host.run("sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo $!")
    host.gpu(0, processes=f"{pid}:512")


def plant_hung_driver(host, _):
    host.driver(hang_s=120)


def plant_slow_link(host, _):
    (host.port / "rate").write_text("10 Gb/sec (4X SDR)\n")


def plant_no_gid(host, _):
    for index in (1, 3):
        (host.port / "gid_attrs/types" / str(index)).write_text("IB/RoCE v1\n")


def plant_cut(host, _):
    host.lab.cut(host.name)


def plant_no_docker(host, _):
    host.run("chmod", "600", "/run/docker.sock")
    host.run("chown", "root:root", "/run/docker.sock")


def plant_no_peermem(host, _):
    (host.hardware / "sys/module/nvidia_peermem/version").unlink()
    (host.hardware / "sys/module/nvidia_peermem").rmdir()


def plant_own_name(host, _):
    host.run("sh", "-c", f"printf '127.0.0.1 localhost\\n127.0.1.1 {host.name}\\n' > /etc/hosts")


def plant_old_driver(host, _):
    host.driver(version="470.256.02")


def plant_memory_errors(host, _):
    host.gpu(0, ecc_uncorrected=2)


PLANTS = {
    "gpu-r1-02": (plant_mtu, {"mtu"}),
    "gpu-r1-03": (plant_dead_port, {"hca-port"}),
    "gpu-r1-04": (plant_firewall, {"firewall"}),
    "gpu-r1-05": (plant_clock, {"clock"}),
    "gpu-r1-06": (plant_lost_gpu, {"gpu-lost"}),
    "gpu-r1-07": (plant_stranger, {"gpu-stranger"}),
    "gpu-r1-08": (plant_hung_driver, {"gpu-driver"}),
    "gpu-r2-01": (plant_slow_link, {"link-rate"}),
    "gpu-r2-02": (plant_no_gid, {"roce-gid"}),
    "gpu-r2-03": (plant_cut, {"ssh"}),
    "gpu-r2-04": (plant_no_docker, {"docker"}),
    "gpu-r2-05": (plant_no_peermem, {"gpudirect"}),
    # The names of the others are gone from its /etc/hosts as well.
    "gpu-r2-06": (plant_own_name, {"own-name", "names"}),
    "gpu-r2-07": (plant_old_driver, {"driver"}),
    "gpu-r2-08": (plant_memory_errors, {"gpu-ecc"}),
}


@pytest.mark.story
def test_a_healthy_lab_has_nothing_and_planted_faults_are_found_on_their_hosts(healthy, tmp_path):
    code, document = doctor(healthy, tmp_path)
    assert (code, faults(document)) == (0, set())
    assert len(document["healthy"]) == 4
    plant_lost_gpu(Host(healthy, "gpu-r1-02"), tmp_path)
    plant_dead_port(Host(healthy, "gpu-r1-03"), tmp_path)
    plant_old_driver(Host(healthy, "gpu-r1-04"), tmp_path)
    code, document = doctor(healthy, tmp_path, "--cordon")
    assert code == 4
    assert faults(document) == {("gpu-lost", "gpu-r1-02"), ("hca-port", "gpu-r1-03"), ("driver", "gpu-r1-04")}
    assert document["healthy"] == ["gpu-r1-01"]
    assert document["cordoned"] == ["gpu-r1-02", "gpu-r1-03"], "a warning is no reason to lose a host"
    cordons = json.loads((tmp_path / "cordons.json").read_text())
    assert "hca-port" in json.dumps(cordons)
    assert doctor(healthy, tmp_path, "--cordon")[1]["cordoned"] == []


@pytest.mark.alone
def test_many_faults_at_once_all_found_none_invented(sixteen, tmp_path):
    for name, (plant, _) in PLANTS.items():
        plant(Host(sixteen, name), tmp_path)
    code, document = doctor(sixteen, tmp_path, "--timeout", "5s")
    assert code == 4
    assert faults(document) == {(check, name) for name, (_, checks) in PLANTS.items() for check in checks}
    assert document["healthy"] == ["gpu-r1-01"]
    assert all(one["evidence"] and one["remedy"] for one in document["findings"])
    (stranger,) = (one for one in document["findings"] if one["check"] == "gpu-stranger")
    assert "sleep" in stranger["evidence"]
    assert "root" in stranger["evidence"]
    # A hung driver and a dead host each cost their time-out once, and at the same time.
    assert document["elapsed_s"] < 30


def test_probe_writes_what_it_found(healthy, tmp_path):
    inventory = tmp_path / "inventory.yaml"
    text = healthy.inventory.read_text().replace("ssh_config: ssh_config", f"ssh_config: {healthy.ssh_config}")
    text = text.replace("gpu-r1-01: {generation: pascal", "gpu-r1-01: {generation: volta", 1)
    text = text.replace("}\n      gpu-r1-02", "}  # the first\n      gpu-r1-02", 1)
    inventory.write_text(text)
    argv = [sys.executable, "-m", "gpurun", "inventory", "probe", "gpu-r1-[01-02]", "--inventory", str(inventory)]
    refused = subprocess.run(
        [*argv, "--write"], capture_output=True, text=True, input="n\n", timeout=LIMIT_S, check=False
    )
    assert inventory.read_text() == text, refused.stderr
    done = subprocess.run([*argv, "--write", "--yes"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "pascal" in done.stderr
    assert load_inventory(inventory).by_name["gpu-r1-01"].generation == "pascal"
    assert "  # the first" in inventory.read_text()


def test_probe_of_a_dead_host(healthy, tmp_path):
    plant_cut(Host(healthy, "gpu-r1-02"), tmp_path)
    done = gpurun(healthy, "inventory", "probe", "gpu-r1-[01-04]", "--json", "--timeout", "10s", home=tmp_path)
    assert done.returncode == 4
    document = json.loads(done.stdout)
    assert [one["host"] for one in document["hosts"]] == ["gpu-r1-01", "gpu-r1-03", "gpu-r1-04"]
    assert [one["host"] for one in document["failed"]] == ["gpu-r1-02"]


def test_preflight_blocks_on_what_would_hang_a_gang(healthy, tmp_path):
    plant_stranger(Host(healthy, "gpu-r1-01"), tmp_path)
    plant_firewall(Host(healthy, "gpu-r1-03"), tmp_path)
    plant_old_driver(Host(healthy, "gpu-r1-04"), tmp_path)
    hosts = ("gpu-r1-01", "gpu-r1-02", "gpu-r1-03", "gpu-r1-04")
    inventory, fleet = fleet_of(healthy, hosts)
    with fleet:
        found = preflight(fleet, inventory, dict.fromkeys(hosts, (1,)))
        assert list(found.bad_hosts) == ["gpu-r1-03"]  # the stranger has another GPU than the gang
        assert "driver" in {one.check for one in found.other}
        found = preflight(fleet, inventory, {"gpu-r1-01": (0,), "gpu-r1-02": (0,)})
        assert list(found.bad_hosts) == ["gpu-r1-01"]
        assert set(found.hardware) == {"gpu-r1-01", "gpu-r1-02"}


@pytest.mark.alone
def test_watching_costs_the_host_next_to_nothing(healthy):
    host = Host(healthy, "gpu-r1-01")
    host.gpu(0, utilisation=87, temperature_c=71)
    _, fleet = fleet_of(healthy, ["gpu-r1-01", "gpu-r1-02"])
    with fleet, Watch(fleet, ["gpu-r1-01", "gpu-r1-02", "gone"], interval_s=1.0) as watch:
        until(lambda: len(watch.latest()) == 3, every_s=0.1)
        sample = watch.latest()["gpu-r1-01"].gpus[0]
        assert (sample.utilization_percent, sample.temperature_c) == (87, 71)
        assert watch.latest()["gone"].problem
        pid = fleet.agents["gpu-r1-01"].hello["pid"]
        before = cpu_s(host, pid)
        time.sleep(10)
        assert cpu_s(host, pid) - before <= 0.1  # 1 % of a core


def cpu_s(host, agent):
    """CPU time of the agent and its children, seconds."""
    text = host.run("sh", "-c", f"cat /proc/{agent}/stat; cat /proc/[0-9]*/stat 2>/dev/null")
    total = 0
    for line in text.splitlines():
        pid, _, rest = line.partition(" ")
        fields = rest.rpartition(")")[2].split()
        if int(pid) == agent or int(fields[1]) == agent:
            total += int(fields[11]) + int(fields[12])
    own = next(line for line in text.splitlines() if line.startswith(f"{agent} ")).rpartition(")")[2].split()
    return (total - int(own[11]) - int(own[12])) / os.sysconf("SC_CLK_TCK")


def test_the_probe_alone_says_the_same(healthy, tmp_path):
    pyz = tmp_path / "probe.pyz"
    done = gpurun(healthy, "inventory", "probe", "--zipapp", str(pyz), home=tmp_path)
    assert done.returncode == 0, done.stderr
    ssh = ["ssh", "-F", str(healthy.ssh_config), "gpu-r1-01"]
    subprocess.run([*ssh, "cat > probe.pyz"], input=pyz.read_bytes(), check=True)
    alone = json.loads(
        subprocess.run([*ssh, "python3 probe.pyz; rm probe.pyz"], capture_output=True, check=True).stdout
    )
    inventory, fleet = fleet_of(healthy, ["gpu-r1-01"])
    with fleet:
        found = probe(fleet, inventory).hardware["gpu-r1-01"]
    assert [gpu["uuid"] for gpu in alone["gpus"]] == [gpu.uuid for gpu in found.gpus]
    assert alone["hcas"][0]["ports"][0]["gids"][3]["address"] == found.hcas[0].ports[0].gids[3].address
    assert Path(pyz).stat().st_size < 1 << 20
