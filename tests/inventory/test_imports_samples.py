"""Sample inventories as kubespray, DeepOps and Slurm have them, imported by the real command."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from gpurun.inventory.folding import fold
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import load_inventory, parse_inventory

CASES = Path(__file__).parent / "cases"


@pytest.fixture(name="imported")
def importing(gpurun, tmp_path, monkeypatch):
    """Import a file or folder; the inventory that was written, and what the command said."""
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "state"))
    target = tmp_path / "new.yaml"

    def run(source: Path, *flags: str) -> tuple[Inventory, list[str]]:
        code, out, err = gpurun("inventory", "import", str(source), "-i", str(target), *flags)
        assert (code, out) == (0, "")
        return load_inventory(target), err.splitlines()

    return run


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / next(iter(files))


def not_mapped(said: list[str]) -> str:
    return "\n".join(line for line in said if line.startswith("not mapped: "))


def racks(found: Inventory) -> dict[str, str]:
    return {rack.name: fold(rack.hosts) for rack in found.racks}


def test_kubesprays_ini_inventory_with_its_folders_of_group_variables(imported):
    found, said = imported(CASES / "kubespray" / "inventory.ini")
    assert racks(found) == {"r1": "node[2-5]"}
    assert {host.user for host in found.hosts} == {"kube"}  # group_vars/all/all.yml
    last = found.by_name["node5"]
    assert (last.address, last.port, last.labels) == ("95.54.0.16", 2222, {"kube_node": "yes", "k8s_cluster": "yes"})
    left = not_mapped(said)
    assert "node1: left out, because the names of the groups suggest no GPUs" in left
    assert "inventory.ini:4: variable ip" in left
    assert "bastion: left out, because SSH reaches other hosts through this jump host" in left
    assert "group_vars/all/all.yml:3: variable bin_dir" in left
    assert "group_vars/k8s_cluster/k8s-cluster.yml:5: kube_cert_dir: a template or a secret" in left
    assert "guessed: gpus 1 for every host: the source does not say" in said


def test_kubesprays_yaml_inventory(imported):
    found, said = imported(CASES / "kubespray" / "hosts.yaml")
    assert {host.name: host.address for host in found.hosts} == {
        "node2": "95.54.0.13", "node3": "95.54.0.14",
    }  # fmt: skip
    assert "hosts.yaml:8: variable node_labels" in not_mapped(said)
    assert found.by_name["node3"].labels == {"kube_node": "yes", "k8s_cluster": "yes"}


def test_deepops_inventory_by_its_folder_and_for_the_gpu_hosts_alone(imported):
    found, said = imported(CASES / "deepops", "--groups", "*-node")
    assert racks(found) == {"rack-a": "gpu01", "rack-b": "gpu[02-03]"}
    first, second = found.by_name["gpu01"], found.by_name["gpu02"]
    assert (first.gpus, first.gpu_model, first.generation) == (4, "Tesla P100-PCIE-16GB", "pascal")
    assert (second.gpus, second.gpu_model, second.generation) == (8, None, "volta")
    assert {(host.user, host.python) for host in found.hosts} == {("ubuntu", "/usr/bin/python3")}
    left = not_mapped(said)
    assert "login01: left out, because no group of the host matches *-node" in left
    assert "mgmt01: left out, because SSH reaches other hosts" in left
    assert "ansible_ssh_common_args: gpurun takes SSH settings from ~/.ssh/config" in left
    assert "variable hosts_add_ansible_managed_hosts" in left


def test_a_login_node_gets_no_gpus_because_others_have_some(imported):
    found, said = imported(CASES / "deepops")
    assert fold(found.by_name) == "gpu[01-03]"
    assert "login01: left out, because the source has no GPUs for the host" in not_mapped(said)
    assert "--groups GLOB imports all hosts of the groups that match GLOB" in not_mapped(said)


def test_a_group_pattern_that_means_no_host(gpurun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = gpurun("inventory", "import", str(CASES / "deepops"), "--groups", "nosuch")
    assert (code, "found no host" in err, "no group of the host matches nosuch" in err) == (2, True, True)


def test_slurm_with_spines_node_sets_and_gpus_that_gres_conf_knows(imported):
    found, said = imported(CASES / "slurm_fabric")
    assert racks(found) == {
        "leaf1": "dgx[01-02]", "leaf2": "dgx[03-04,06]", "leaf3": "pcie-[1-2]", "r1": "auto[1-2]",
    }  # fmt: skip
    sixth, auto, pcie = (found.by_name[name] for name in ("dgx06", "auto1", "pcie-1"))
    assert (sixth.gpus, sixth.generation, sixth.address, sixth.port) == (8, "volta", "10.4.1.6", None)
    assert sixth.labels == {"gpu_type": "v100", "nvlink": "yes", "ib": "yes", "sxm2": "yes", "partition.all": "yes"}
    assert (auto.generation, auto.address) == ("ampere", "auto-1.example")
    assert (pcie.gpus, pcie.generation) == (4, "pascal")
    trained = {host.name for host in found.hosts if "partition.train" in host.labels}
    assert trained == {"dgx01", "dgx02", "dgx03", "dgx04", "pcie-1"}  # NodeSet=big, and one node
    left = not_mapped(said)
    for told in (
        "slurm.conf:7: CPUs, RealMemory: only Slurm has these settings",
        "slurm.conf:9: Port: only Slurm has these settings",
        "slurm.conf:9: dgx[01-04,06]: Gres=nic:2",
        "slurm.conf:10: Weight: only Slurm has these settings",
        "slurm.conf:16: DownNodes=dgx06: the inventory records no state",
        "slurm.conf:17: cannot include 'gone/*.conf'",
        "gres.conf:3: AutoDetect=nvml",
        "topology.conf:5: switch spine1 is not used as a rack, because it has no nodes",
        "topology.conf:7: switch top is not used as a rack",
        "head01: left out, because the source has no GPUs",
    ):
        assert told in left, told
    assert "guessed: generation volta for auto2, as most others have" in said


def test_slurms_newer_ways_to_write_a_topology_are_not_passed_over(imported, tmp_path):
    source = written(tmp_path / "etc", {
        "slurm.conf":
            "NodeName=n[1-2] Gres=gpu:h100:8 Feature=big\nNodeSet=fast Feature=big\nPartitionName=p Nodes=fast,x\n",
        "topology.conf": "BlockName=b1 Nodes=n[1-2]\nBlockSizes=2\n", "topology.yaml": "- topology: default\n",
    })  # fmt: skip
    found, said = imported(source)
    assert {host.labels.get("partition.p") for host in found.hosts} == {"yes"}
    left = not_mapped(said)
    assert "topology.conf:1: BlockName=b1" in left
    assert "topology.yaml" in left
    assert "slurm.conf:3: partition p also has x" in left


PRECEDENCE = {  # from the weakest to the strongest, as "Understanding variable precedence" lists them
    "all, in the file": ({"hosts": "[all:vars]\ngpus=1\n[inner]\nn1\n"}, 1),
    "a group, in the file": ({"group_vars/unused": "gpus: 9\n"}, 2),
    "group_vars/all wins over groups of the file": ({"group_vars/all.yml": "gpus: 3\n"}, 3),
    "group_vars of the outer group win over both": (
        {"group_vars/all.yml": "gpus: 3\n", "group_vars/outer/a.yml": "gpus: 4\n"}, 4,
    ),
    "group_vars of the inner group win over the outer one's": (
        {"group_vars/outer.yml": "gpus: 4\n", "group_vars/inner.json": '{"gpus": 5}'}, 5,
    ),
    "the later file of a folder wins": (
        {"group_vars/inner/a.yml": "gpus: 5\n", "group_vars/inner/b.yml": "gpus: 6\n"}, 6,
    ),
    "hidden files and backups are none": (
        {f"group_vars/inner/{name}": f"gpus: {gpus}\n" for name, gpus in (("a.yml", 5), (".b.yml", 6), ("c.yml~", 7))},
        5,
    ),
    "the host, in the file": ({"group_vars/inner.yml": "gpus: 5\n", "hosts": "[inner]\nn1 gpus=6\n"}, 6),
    "host_vars win over all": ({"hosts": "[inner]\nn1 gpus=6\n", "host_vars/n1/x": "gpus: 7\n"}, 7),
}  # fmt: skip


@pytest.mark.parametrize(("files", "gpus"), PRECEDENCE.values(), ids=PRECEDENCE)
def test_variables_win_as_in_ansible(imported, tmp_path, files, gpus):
    usual = "[all:vars]\ngpus=1\n[outer:vars]\ngpus=1\n[inner:vars]\ngpus=2\n[outer:children]\ninner\n[inner]\nn1\n"
    source = written(tmp_path / "etc", {"hosts": usual, **files})
    assert imported(source, "--generation", "volta")[0].by_name["n1"].gpus == gpus


def test_of_groups_beside_each_other_the_last_by_name_wins_unless_one_has_priority(imported, tmp_path):
    text = "[zebra]\nn1\nn2\n[zebra:vars]\ngpus=8\n[apple]\nn1\nn2\n[apple:vars]\ngpus=4\n{}"
    source = written(tmp_path / "etc", {"hosts": text.format("")})
    assert imported(source)[0].by_name["n1"].gpus == 8
    (tmp_path / "new.yaml").unlink()
    source.write_text(text.format("ansible_group_priority=10\n"))
    assert imported(source)[0].by_name["n1"].gpus == 4


def test_the_longest_way_from_all_says_how_deep_a_group_is(imported, tmp_path):
    text = "[a]\nn1\n[b]\nn1\n[a:vars]\ngpus=8\n[b:vars]\ngpus=4\n[top:children]\na\nmiddle\n[middle:children]\na\n"
    assert imported(written(tmp_path / "etc", {"hosts": text}))[0].by_name["n1"].gpus == 8


def test_groups_that_contain_themselves_are_named_and_the_rest_is_taken(imported, tmp_path):
    text = "[a:children]\nb\n[b:children]\nc\n[c:children]\na\n[c]\nn1\n[c:vars]\ngpus=4\n[d:children]\nd\n"
    found, said = imported(written(tmp_path / "etc", {"hosts": text}))
    assert found.by_name["n1"].gpus == 4
    assert "contains itself" in not_mapped(said)


def test_many_ways_through_the_groups_take_no_time(imported, tmp_path):
    lines = [f"[g{n}{side}:children]\ng{n + 1}a\ng{n + 1}b\n" for n in range(40) for side in "ab"]
    began = time.process_time()
    found, _ = imported(written(tmp_path / "etc", {"hosts": "".join(lines) + "[g40a]\nn1 gpus=2\n"}))
    assert found.by_name["n1"].gpus == 2
    assert time.process_time() - began < 5


def test_a_note_for_each_of_many_hosts_takes_no_time(imported, tmp_path):
    lines = "".join(f"n{number} gpus=2 note=x\n" for number in range(8000))
    began = time.process_time()
    found, said = imported(written(tmp_path / "etc", {"hosts": "[r1]\n" + lines}))
    assert len(found.hosts) == 8000
    assert said[-2] == "not mapped: 7980 more; --dry-run prints all notes"
    assert time.process_time() - began < 20


def test_a_dry_run_prints_every_note(gpurun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"hosts": "[r1]\n" + "".join(f"n{number} gpus=2 note=x\n" for number in range(50))})
    code, _, err = gpurun("inventory", "import", "hosts", "--dry-run")
    assert (code, len(not_mapped(err.splitlines()).splitlines())) == (0, 50)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("hosts", "[x]\nn[1:1000000]\n", "more than"),
        ("hosts", "[x]\nn[1:9]-[1:9999]-[1:9999]\n", "more than"),
        ("hosts", "[x]\nn[9:1]\n", "found no host"),
        ("hosts.yml", "all: {hosts: !!python/object/new:os.system ['touch /tmp/gpurun-pwned']}\n", "hosts.yml:1:"),
        ("hosts.yml", "all: &a {children: {x: *a}}\n", "hosts.yml:1:"),
        ("slurm.conf", "NodeName=n[1-1000000] Gres=gpu:1\n", "found no host"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(gpurun, tmp_path, monkeypatch, name, text, said):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {name: text})
    code, out, err = gpurun("inventory", "import", name)
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / "inventory.yaml").exists() and not Path("/tmp/gpurun-pwned").exists()


def test_ranges_with_steps_and_letters(imported, tmp_path):
    found, _ = imported(written(tmp_path / "etc", {"hosts": "[r1]\nn[01:09:4]-[a:c:2] gpus=2\n"}))
    assert {host.name for host in found.hosts} == {"n01-a", "n01-c", "n05-a", "n05-c", "n09-a", "n09-c"}


HOSTILE_GROUPS = "[..]\nn1 gpus=2\n[../a]\nn1\n[ ]\nn1\n"


def test_folders_of_variables_that_lead_elsewhere_are_not_read(imported, tmp_path):
    source = written(
        tmp_path / "etc", {"hosts": "[..]\nn1 gpus=2\n[/etc]\nn1\n[ ]\nn1\n", "group_vars/a/x.yml": "gpus: 9\n"}
    )
    (tmp_path / "etc" / "group_vars" / "a" / "loop").symlink_to(tmp_path / "etc")
    shutil.copy(source, tmp_path / "etc" / "x.yml")
    assert imported(source)[0].by_name["n1"].gpus == 2


EVERY_KEY = """\
version: 1
defaults: {python: /opt/py/bin/python3}
fabrics:
  tcp: {kind: tcp, interface: eth0}
racks:
  hall-1:
    hosts:
      "a[1-2]": {generation: odd-9, gpus: 4, folder: /scratch/gpurun, ssh: system, data_quota_mib: 1TiB,
                 health: [/site/check, "a b", "*"], prolog: [/site/prolog, "0"], epilog: ["it's", 'é"']}
  r2:
    hosts:
      b1: {generation: volta, gpus: 0, docker_host: 'unix:///run/docker.sock', labels: {a.b: 'yes', n: '1'}}
"""


def test_what_is_exported_for_ansible_is_the_same_inventory_again(gpurun, imported, tmp_path):
    (tmp_path / "old.yaml").write_text(EVERY_KEY)
    code, out, err = gpurun("inventory", "export", "ansible", "-i", str(tmp_path / "old.yaml"))
    assert code == 0, err
    (tmp_path / "again.yml").write_text(out)
    found, said = imported(tmp_path / "again.yml")
    before = parse_inventory(EVERY_KEY.encode(), Path("/x"))
    assert not_mapped(said) == ""
    assert found.by_name == before.by_name
    assert [(rack.name, rack.hosts) for rack in found.racks] == [(rack.name, rack.hosts) for rack in before.racks]
