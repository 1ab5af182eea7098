"""The texts a lab writes: for people, for gpurun, for OpenSSH, for the hosts themselves."""

from __future__ import annotations

import subprocess
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from gpurun.errors import BadInput
from gpurun.inventory.read import load_inventory
from gpurun.lab import process
from gpurun.lab.host import _services, cgroup, write_sysfs
from gpurun.lab.inside.init import Boot, Copy, File, Service
from gpurun.lab.spec import (
    INVENTORY,
    LabSpec,
    cache,
    group_file,
    hosts_file,
    hosts_of,
    lab_inventory,
    lab_known_hosts,
    lab_ssh_config,
    passwd_file,
    shadow,
    sshd_config,
)
from gpurun.node.probe import facts

NET = IPv4Network("10.200.3.0/24")


@pytest.mark.parametrize("fabric", ["tcp", "roce"])
def test_the_inventory_is_one_that_gpurun_reads(tmp_path, fabric):
    spec = LabSpec(racks=2, hosts=3, gpus=8, generation=("pascal", "hopper"), fabric=fabric)
    path = tmp_path / INVENTORY
    path.write_text(lab_inventory(spec, hosts_of(spec, NET), "unix:///run/docker.sock"))
    found = load_inventory(path)
    assert found.total_gpus == 48 and found.generations == ("hopper", "pascal")
    assert [rack.name for rack in found.racks] == ["r1", "r2"]
    assert found.ssh_config == str(tmp_path / "ssh_config") and found.docker_host == "unix:///run/docker.sock"
    assert found.by_name["gpu-r1-01"].nvlink == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.by_name["gpu-r2-03"].nvlink == (tuple(range(8)),)
    assert found.fabric_of(found.hosts[0]).kind.value == fabric


@pytest.mark.parametrize("name", ["plain", "with space", "per%cent %d", "quote's", "ü"])
def test_openssh_reads_the_ssh_config_wherever_the_folder_is(tmp_path, name):
    place = tmp_path / name
    place.mkdir()
    spec = LabSpec(racks=1, hosts=1)
    (place / "ssh_config").write_text(lab_ssh_config(place, hosts_of(spec, NET)))
    argv = ["ssh", "-G", "-F", str(place / "ssh_config"), "gpu-r1-01"]
    options = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "hostname 10.200.3.11" in options and "user train" in options
    assert "stricthostkeychecking true" in options and "identitiesonly yes" in options
    (known,) = [line for line in options if line.startswith("userknownhostsfile")]
    assert known.replace("%%", "%").replace('"', "").endswith(f"{place}/known_hosts")


def test_known_hosts_lists_each_key_under_name_and_address():
    hosts = hosts_of(LabSpec(racks=1, hosts=2), NET)
    keys = {host.name: f"ssh-ed25519 KEY{host.number} comment" for host in hosts}
    assert lab_known_hosts(hosts, keys).splitlines()[1] == "gpu-r1-02,10.200.3.12 ssh-ed25519 KEY1"


def test_hosts_have_the_machines_system_accounts_and_their_own_people():
    machine = "root:x:0:0:root:/root:/bin/bash\nsshd:x:105:65534::/run/sshd:/x\n"
    machine += "ada:x:1000:1000::/home/ada:/bin/sh\n\nbroken\n"
    passwd = passwd_file(machine)
    assert "sshd:" in passwd and "train:x:1500:" in passwd and "ada" not in passwd and "broken" not in passwd
    assert shadow(machine).splitlines()[0].startswith("root:*:")
    group = group_file("root:x:0:\ndocker:x:103:ada\nada:x:1000:\n")
    assert "docker:x:1490:train,alice,bob" in group and "103" not in group and "ada" not in group


def test_names_resolve_or_do_not():
    addresses = {"head": IPv4Address("10.0.0.1"), "a": IPv4Address("10.0.0.2")}
    assert "10.0.0.2 a\n" in hosts_file("a", addresses, resolve_names=True)
    assert hosts_file("a", addresses, resolve_names=False) == "127.0.0.1 localhost\n127.0.1.1 a\n"


@pytest.mark.parametrize("penalties", [True, False])
def test_sshd_takes_its_configuration(tmp_path, penalties):
    text = sshd_config("internal-sftp", has_penalties=penalties)
    assert ("PerSourcePenalties no" in text) is penalties
    assert "PasswordAuthentication no" in text and "PermitRootLogin no" in text


def test_what_a_host_is_told_survives_its_json_and_is_for_root_only(tmp_path):
    boot = Boot(
        name="h",
        disk="/d",
        image=None,
        hardware="/w",
        files=(File("/etc/x", "a\n\"'é", mode=0o600, keep=True),),
        copies=(Copy("/s", "/t"),),
        devices=("nvidia0",),
        homes={"train": 1500},
        authorized_key="ssh-ed25519 A",
        services=(Service("s", ("/bin/true", "a b"), "/log", {"A": "1"}, ("/pid",)),),
    )
    boot.save(tmp_path / "boot.json")
    assert Boot.load(tmp_path / "boot.json") == boot
    assert (tmp_path / "boot.json").stat().st_mode & 0o777 == 0o600


def test_the_probe_reads_the_sysfs_stand_in(tmp_path):
    (host,) = hosts_of(LabSpec(racks=1, hosts=1), NET)
    write_sysfs(tmp_path, host)
    (hca,) = facts.hcas(str(tmp_path))
    (port,) = hca["ports"]
    assert (hca["name"], hca["uverbs"], hca["numa_node"]) == ("mlx5_0", "uverbs0", 0)
    assert hca["interfaces"] == ["eth0"] and hca["pci_path"][-1] == "0000:0f:00.0"
    assert (port["state"], port["link_layer"], port["rate_gbit"]) == ("ACTIVE", "Ethernet", 25.0)
    assert {"index": 3, "address": "::ffff:10.200.3.11", "kind": "RoCE v2", "interface": "eth0"} in port["gids"]
    assert len(port["gids"]) == 4


@pytest.mark.parametrize(("value", "expected"), [("/c", "/c/gpurun"), ("", "~"), ("relative", "~")])
def test_the_cache_is_where_xdg_says_if_it_says_so_well(value, expected):
    wanted = Path.home() / ".cache/gpurun" if expected == "~" else Path(expected)
    assert cache({"XDG_CACHE_HOME": value}) == wanted


@pytest.mark.parametrize("value", ["/a,b", '/a"b', "/a\nb"])
def test_folders_that_docker_or_openssh_cannot_name_are_refused(value):
    with pytest.raises(BadInput):
        cache({"XDG_CACHE_HOME": value})


def test_the_two_services_of_a_host_are_programs_of_this_machine():
    if not all(process.find_program(name) for name in ("sshd", "dockerd")):
        pytest.skip("needs sshd and dockerd: apt-get install openssh-server docker.io")
    services = _services(cgroup("lab", "host"))
    assert [service.name for service in services] == ["sshd", "dockerd"]
    assert "--cgroup-parent=/gpurun-lab/lab/host" in services[1].argv
