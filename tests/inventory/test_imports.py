"""Other tools' lists of hosts: what is taken, guessed and left, and that the result is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.errors import BadInput
from gpurun.inventory.folding import fold
from gpurun.inventory.imports.again import compose_inventory
from gpurun.inventory.imports.draft import Draft, generation_of
from gpurun.inventory.imports.source import detect, read_source
from gpurun.inventory.model import Inventory
from gpurun.inventory.read import parse_inventory

CASES = Path(__file__).parent / "cases"
TCP = {"kind": "tcp", "interface": "eth0"}


def imported(path: Path, kind: str | None = None, **given: str) -> tuple[Inventory, Draft, str]:
    draft = read_source(path, kind)
    text = compose_inventory(draft, given, TCP)
    return parse_inventory(text.encode(), Path("/inventory.yaml")), draft, text


def racks(inventory: Inventory) -> dict[str, str]:
    return {rack.name: fold(rack.hosts) for rack in inventory.racks}


def test_ansible_ini() -> None:
    found, draft, _ = imported(CASES / "ansible_ini" / "hosts")
    assert racks(found) == {
        "rack_a": "gpu-a[01-05]",
        "rack_b": "gpu-b[1-3,9].cluster.example",
    }
    host = found.by_name["gpu-a05"]
    assert (host.address, host.port, host.gpus, host.generation) == ("10.1.0.5", 2222, 4, "pascal")
    assert host.gpu_model == "P100-PCIE-16GB"
    assert found.by_name["gpu-a02"].user == "ops"
    assert found.by_name["gpu-a03"].gpus == 2
    nine = found.by_name["gpu-b9.cluster.example"]
    assert (nine.generation, nine.gpus, nine.gpu_model) == ("volta", 4, "V100-SXM2-32GB")
    assert found.by_name["gpu-b1.cluster.example"].gpus == 8
    assert nine.labels == {"training": "yes"}
    left = "\n".join(draft.left)
    assert "variable note" in left
    assert "secret: a template or a secret" in left
    assert "admin_password: a template or a secret" in left
    assert "groups used as racks: rack_a, rack_b" in draft.guessed


def test_files_of_host_vars_win_over_the_inventorys_own_lines(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("[rack1]\nn1 gpus=4 ansible_port=22\nn2 gpus=4\n")
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars" / "n1.yml").write_text("gpus: 8\n")
    found, _, _ = imported(tmp_path / "hosts", generation="volta")
    assert (found.by_name["n1"].gpus, found.by_name["n1"].port, found.by_name["n2"].gpus) == (8, 22, 4)


@pytest.mark.parametrize("kind", ["v100", "V100", "gtx1080", "nvidia_a100-sxm4-80gb"])
def test_a_schedulers_word_for_a_gpu_is_a_label_and_no_model(kind: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.csv").write_text(f"host,gpus,gpu\nn1,4,{kind}\n")
    found = imported(tmp_path / "hosts.csv")[0].by_name["n1"]
    assert (found.gpu_model, found.labels, found.generation) == (None, {"gpu_type": kind}, generation_of(kind))


@pytest.mark.parametrize("kind", ["Tesla V100-SXM2-16GB", "A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"])
def test_a_model_as_nvml_names_it_is_a_model(kind: str, tmp_path: Path) -> None:
    (tmp_path / "hosts.csv").write_text(f"host,gpus,gpu\nn1,4,{kind}\n")
    found = imported(tmp_path / "hosts.csv")[0].by_name["n1"]
    assert (found.gpu_model, found.labels, found.generation) == (kind, {}, generation_of(kind))


def test_an_exported_roce_cluster_can_be_imported_again_with_all_that_hosts_have() -> None:
    from gpurun.inventory.exports import ansible
    from gpurun.inventory.imports import ansible as importer

    text = """\
version: 1
defaults: {generation: volta, gpus: 8, fabric: roce25}
fabrics:
  roce25: {kind: roce, interface: ens1f0, hcas: [mlx5_0]}
  roce100: {kind: roce, interface: ens2f0, hcas: [mlx5_1]}
racks:
  r1: {hosts: {"a[1-3]": {nvlink: [0-3, 4-7], near_hca: 0-3, gpu_memory_mib: 16GiB, labels: {row: a, 'x.y': "1: 2"}}}}
  r2: {hosts: {b1: {fabric: roce100, gpu_model: v100, user: train, port: 2222, fabric_address: 'fd00::1'}}}
"""
    before = parse_inventory(text.encode(), Path("/inventory.yaml"))
    again = Draft("again")
    importer.read_yaml(ansible(before.hosts).encode(), again, "again.yml", lambda _: ())
    roce = {"kind": "roce", "interface": "ens1f0", "hcas": "[mlx5_0]"}
    after = parse_inventory(compose_inventory(again, {}, roce).encode(), Path("/inventory.yaml"))
    assert not again.left
    assert after.by_name == before.by_name
    assert set(after.fabrics) == set(before.fabrics)


def test_ansible_yaml() -> None:
    found, draft, text = imported(CASES / "ansible_yaml" / "hosts.yml")
    assert racks(found) == {"rack1": "node[001-003,010]", "rack2": "node[101-102]"}
    assert {h.generation for h in found.hosts if h.rack == "rack1"} == {"hopper"}
    assert {h.generation for h in found.hosts if h.rack == "rack2"} == {"ampere"}
    assert {h.user for h in found.hosts} == {"train"}
    assert found.by_name["node010"].address == "192.0.2.10"
    assert "api_token: a template or a secret" in "\n".join(draft.left)
    assert '"node[001-003]": ' in text


def test_slurm() -> None:
    found, draft, text = imported(CASES / "slurm")
    assert racks(found) == {"leaf1": "gpu[001-003]", "leaf2": "gpu[004-007],mixed1"}
    first, fifth, seventh = (found.by_name[f"gpu00{n}"] for n in (1, 5, 7))
    assert (first.gpus, first.generation, first.gpu_model, first.address) == (4, "volta", None, "10.2.0.1")
    assert first.labels == {"gpu_type": "v100", "nvlink": "yes", "ib": "yes", "partition.train": "yes"}
    assert (fifth.gpus, fifth.generation, fifth.address) == (8, "ampere", None)
    assert (seventh.gpus, seventh.gpu_model, seventh.labels) == (2, None, {"gpu_type": "gtx1080"})
    assert found.by_name["mixed1"].gpus == 3
    left = "\n".join(draft.left)
    assert "cpu[01-20]: left out, because the source has no GPUs" in left
    assert "State=drain" in left
    assert "cannot include 'gone.conf'" in left
    assert "GPUs of several types" in left
    assert '"gpu[001-003]": {' in text
    assert "address: '10.2.0.[1-3]'" in text


def test_ssh_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").symlink_to(CASES / "ssh")
    found, draft, _ = imported(CASES / "ssh" / "config", gpus="4", generation="pascal")
    assert racks(found) == {"r1": "gpu-r1-[01-02]", "r2": "gpu-r2-[01-02]"}
    assert found.ssh_config == str(CASES / "ssh" / "config")
    assert {host.address for host in found.hosts} == {None}
    left = "\n".join(draft.left)
    assert "bastion: left out, because SSH reaches other hosts through this jump host" in left
    assert "github.com: left out, because SSH logs in as git" in left
    assert "Host gpu-*: a pattern" in left
    assert "the racks of 4 hosts, from their names" in draft.guessed


def test_hostfile() -> None:
    found, draft, text = imported(CASES / "hostfile" / "hosts")
    assert {host.name: host.gpus for host in found.hosts} == {"n1": 6, "n2": 8, "n3": 4, "n4": 4} | {
        "n3": found.by_name["n3"].gpus
    }
    assert found.by_name["n4"].user == "bob"
    assert any("max_slots=4" in note for note in draft.left)
    assert "# Guessed: generation unknown" in text


def test_csv() -> None:
    found, _, text = imported(CASES / "csv" / "hosts.csv")
    assert racks(found) == {"A1": "n[1-2]", "B1": "n3"}
    third = found.by_name["n3"]
    assert (third.gpus, third.generation, third.address) == (8, "hopper", "10.3.0.9")
    assert found.by_name["n2"].labels == {"owner": "vision", "comment": "fan; noisy"}
    assert "defaults: {generation: pascal, gpus: 4" in text


def test_what_is_exported_can_be_imported_again() -> None:
    from gpurun.inventory.exports import ansible, deepspeed, openmpi

    found, _, _ = imported(CASES / "slurm")
    again = Draft("again")
    from gpurun.inventory.imports import ansible as importer

    importer.read_yaml(ansible(found.hosts).encode(), again, "again.yml", lambda _: ())
    back = parse_inventory(compose_inventory(again, {}, TCP).encode(), Path("/inventory.yaml"))
    for host in found.hosts:
        other = back.by_name[host.name]
        assert (other.gpus, other.generation, other.address, other.rack) == (
            host.gpus, host.generation, host.address, host.rack,
        )  # fmt: skip
    assert "gpu001 slots=4 max_slots=4\n" in openmpi(found.hosts)
    assert deepspeed(found.hosts[:1]) == "gpu001 slots=4\n"


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("Tesla P100-SXM2-16GB", "pascal"), ("v100", "volta"), ("NVIDIA A100-SXM4-80GB", "ampere"), ("h100", "hopper"),
        ("GeForce GTX 1080 Ti", "pascal"), ("Quadro RTX 6000", "turing"), ("NVIDIA L40S", "ada"),
        ("gtx1080", "pascal"), ("gpu_hopper", "hopper"), ("B200", "blackwell"), ("tesla_k80", "kepler"),
        ("mi250", None), ("", None), ("rack_a", None), ("a", None),
    ],
)  # fmt: skip
def test_generations(model: str, family: str | None) -> None:
    assert generation_of(model) == family


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("slurm.conf", "", "slurm"), ("my.conf", "ClusterName=x\n", "slurm"), ("x", "Host a\n", "ssh-config"),
        ("hosts", "a ansible_host=b\n", "ansible"), ("hosts", "[x]\na\n", "ansible"),
        ("hosts", "a slots=4\nb:2\n", "hostfile"),
        ("x.csv", "", "csv"), ("x.tsv", "", "csv"), ("x", "host,gpus\n", "csv"), ("x.yml", "", "ansible"),
    ],
)  # fmt: skip
def test_formats_are_told_apart(name: str, text: str, kind: str) -> None:
    assert detect(Path(name), text) == kind


HOSTILE = [
    ("hosts", "[x]\n-oProxyCommand=touch${IFS}/tmp/pwned\ngood\n"),
    ("hosts", "[x]\n\"a; rm -rf /\" gpus=4\ngood\n"),
    ("hosts", "[x]\ngood user='-oX' gpus=four address='$(x)'\n"),
    ("x.yml", "all: {hosts: {good: {gpus: !!python/object/apply:os.system ['x']}, 'a b': {}}}\n"),
    ("slurm.conf", "NodeName=good Gres=gpu:2\nNodeName=$(x) Gres=gpu:2\nInclude ../../../../etc/passwd\n"),
    ("slurm.conf", "NodeName=good Gres=gpu:2\nNodeName=x[1-999999999] Gres=gpu:99999999999\n"),
    ("x.csv", "name,gpus,user\ngood,4,\n-o x,4,\n\"a\nb\",4,\ngood2,99999999999999999999,-l\n"),
    ("hostfile", "good slots=999999999999\n-x slots=2\n@ slots=1\n"),
    ("config", "Host good -oX 'a b' gpü\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), HOSTILE)
def test_hostile_lists_give_their_good_hosts_and_name_the_others(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    found, draft, _ = imported(path, {"config": "ssh-config", "hostfile": "hostfile"}.get(name))
    assert {host.name for host in found.hosts} <= {"good", "good2"}
    assert "good" in found.by_name
    assert draft.left
    assert not Path("/tmp/pwned").exists()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("hosts", b""), ("hosts", b"\0\0"), ("x.csv", b"a,b\n1,2\n"), ("x.yml", b"[1]\n"),
        ("x.yml", b"all: {hostz: {}}\n"),
        ("hosts", b"[x\na\n"), ("hosts", b"[x]\nnode[1:99999999]\n"), ("hosts", b"[x]\nnode[aa:b]\n"),
        ("hosts", b"[x]\n'\n"),
        ("x.yml", b"a: &a [" + b"*a," * 9 + b"]\n"), ("x.yml", b"{" * 100_000), ("x.yml", b"all: {children: " * 90),
        ("config", b"Host \"x\n"), ("x", b"\xff\xfe\x00"), ("slurm.conf", b"NodeName=\n"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_hosts_is_refused_with_its_name(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(BadInput) as refused:
        read_source(path)
    assert name in str(refused.value)


def test_an_include_that_includes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    path = tmp_path / ".ssh" / "config"
    path.write_text("Host a\nInclude config\n")
    with pytest.raises(BadInput, match="does a file include itself"):
        read_source(path)
    slurm = tmp_path / "slurm.conf"
    slurm.write_text("NodeName=a Gres=gpu:1\nInclude slurm.conf\n")
    assert list(read_source(slurm).values) == ["a"]


def test_a_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with path.open("wb") as file:
        file.truncate(100 * 1024 * 1024)
    with pytest.raises(BadInput, match="larger than 8 MiB"):
        read_source(path)
