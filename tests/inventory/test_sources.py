"""Lists of hosts of other tools: what is a GPU host, and what an import does that is repeated."""

from __future__ import annotations

import shlex
from collections import defaultdict
from pathlib import Path

import pytest
from listed_sources import SOURCES, Listed

from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import expand
from gpurun.inventory.imports.draft import is_slice, jumps_of, jumps_of_command, says_gpu
from gpurun.inventory.read import load_inventory


@pytest.fixture(name="place")
def folder(tmp_path, monkeypatch):
    """A folder for a source and an inventory, with a state directory of its own."""
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GPURUN_INVENTORY", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def gpus_of(path: Path) -> str:
    by_gpus = defaultdict(list)
    for host in load_inventory(path).hosts:
        by_gpus[host.gpus].append(host.name)
    return " ".join(f"{fold(names)}={gpus}" for gpus, names in sorted(by_gpus.items()))


def in_order(told: str) -> str:
    by_gpus = defaultdict(list)
    for word in told.split():
        names, _, gpus = word.rpartition("=")
        by_gpus[int(gpus)] += expand(names)
    return " ".join(f"{fold(names)}={gpus}" for gpus, names in sorted(by_gpus.items()))


def test_sources_are_imported_changed_and_imported_again(gpurun, place):
    for number, (name, listed) in enumerate(SOURCES.items()):
        (place / str(number)).mkdir()
        with pytest.MonkeyPatch.context() as there:
            there.chdir(place / str(number))
            check(gpurun, name, listed)


def check(gpurun, name: str, listed: Listed) -> None:
    """Import, edit as a person does, change the source, import again, and take everything back."""
    inventory = Path("inventory.yaml")
    write(listed.before)
    command = ("inventory", "import", listed.file or ".", *listed.flags)
    code, _, err = gpurun(*command)
    assert code == 0, (name, err)
    assert gpus_of(inventory) == in_order(listed.found), (name, err)

    kept = next(host.name for host in load_inventory(inventory).hosts if host.name in expand_all(listed.found_after))
    assert gpurun("inventory", "label", kept, "mine=yes", "--yes")[0] == 0
    inventory.write_text(inventory.read_text().replace("racks:\n", "racks:  # ours\n"))
    edited = inventory.read_bytes()
    assert (gpurun(*command, "--yes")[0], inventory.read_bytes()) == (0, edited), name

    write(listed.after)
    code, out, err = gpurun(*command, "--dry-run")
    assert (code, inventory.read_bytes()) == (0, edited), (name, err)
    assert "+++ inventory.yaml (after)" in out, (name, err)
    code, _, err = gpurun(*command, "--yes")
    assert code == 0, (name, err)
    assert gpus_of(inventory) == in_order(listed.found_after), (name, err, inventory.read_text())
    assert load_inventory(inventory).by_name[kept].labels["mine"] == "yes", name
    assert b"racks:  # ours\n" in inventory.read_bytes(), name

    merged = inventory.read_bytes()
    assert (gpurun(*command, "--yes")[0], inventory.read_bytes()) == (0, merged), name
    assert gpurun("inventory", "undo", "--yes")[0] == 0
    assert inventory.read_bytes() == edited, name
    assert (gpurun(*command, "--yes")[0], inventory.read_bytes()) == (0, merged), name


def expand_all(told: str) -> set[str]:
    return {host for word in told.split() for host in expand(word.rpartition("=")[0])}


JUMPS = {  # arguments of ssh → the jump hosts
    "-o ProxyJump=a": {"a"},
    "-J me@a:2222,b -o User=x": {"a", "b"},
    "-Ja": {"a"},
    "-o 'ProxyCommand=ssh -W %h:%p a'": {"a"},
    "-o ProxyCommand=\"ssh -W %h:%p -q -i ~/.ssh/k -p 22 me@a\"": {"a"},
    "-oProxyCommand='/usr/bin/ssh -qW %h:%p a'": {"a"},
    "-o ProxyCommand='sh -c \"ssh a nc %h %p\"'": {"a"},
    "-o ProxyCommand='nc -X connect -x proxy:3128 %h %p'": set(),
    "-o ProxyCommand=none -o ProxyJump=none": set(),
    "-o StrictHostKeyChecking=no -i key": set(),
    "-o": set(), "-J": set(), "'": set(), "": set(), "-o ProxyCommand='ssh'": set(),
}  # fmt: skip


def test_jump_hosts_in_arguments_of_ssh():
    assert {arguments: jumps_of(arguments) for arguments in JUMPS} == JUMPS
    assert jumps_of_command("ssh -o ProxyCommand='ssh -W %h:%p outer' -W %h:%p inner") == {"outer", "inner"}
    deep = "ssh x"
    for _ in range(12):
        deep = f"ssh -o {shlex.quote('ProxyCommand=' + deep)} y"
    assert jumps_of_command(deep) == {"y"}


def test_slices_and_names_of_gpus():
    slices = ("1g.5gb", "a100_3g.20gb", "nvidia_a100_1g.5gb", "mig-1g.10gb+me", "MIG", "a100-mig-7g.80gb", "1g.10gb.me")
    assert [kind for kind in slices if not is_slice(kind)] == []
    assert [kind for kind in ("v100", "a100_80gb", "h100", "migraine", "gtx1080", "tesla") if is_slice(kind)] == []
    assert [name for name in ("gpu01", "nvidia", "dgx-a", "rack1-gpunode3", "v100") if not says_gpu(name)] == []
    assert [name for name in ("login", "cpu01", "nongpu", "no-gpu", "no_gpu", "head") if says_gpu(name)] == []


REFUSED = {  # files, option → what the message says; each says a place
    "a folder": ({"src/a.py": ""}, ("src",), "src: no file in the folder has the usual name"),
    "a folder, what to do": ({"src/a.py": ""}, ("src",), "in a folder, gpurun looks only for slurm.conf"),
    "NUL bytes": ({"hosts": "a\nb\0"}, ("hosts",), "hosts: the file is not text: line 2 has a NUL byte"),
    "no format": ({"notes": "a b c\n"}, ("notes",), "one line is 'a b c'"),
    "an empty file": ({"hosts": "# none\n"}, ("hosts",), "of the file: the file has no line with text"),
    "gpus": ({"hosts": "a\n"}, ("hosts", "--gpus", "-1"), "--gpus: '-1'"),
    "fabric": ({"hosts": "a\n"}, ("hosts", "--fabric", "foo"), "--fabric: 'foo'"),
    "hca": ({"hosts": "a\n"}, ("hosts", "--hca", "mlx5_0"), "and --fabric tcp uses no RDMA device"),
    "all without GPUs": (
        {"hosts": "[a]\nx\n[gpu]\ny gpu_type=1g.5gb gpus=7\n"}, ("hosts", "--groups", "gpu"),
        "hosts: y: left out, because all GPUs are slices (MIG)",
    ),
    "a plugin of Ansible's": (
        {"aws.yml": "plugin: aws_ec2\nregions: [x]\n"}, ("aws.yml",), "aws.yml:1: the file configures",
    ),
    "what ansible-inventory --list prints": (
        {"d.json": '{"_meta": {"hostvars": {}}}'}, ("d.json",), "ansible-inventory -i SOURCE --list --yaml > hosts.yml",
    ),
    "a task of dstack's": ({".dstack.yml": "type: task\n"}, ("."), ".dstack.yml: a dstack file of type 'task' lists"),
    "a fleet of a cloud": ({"f.yml": "type: fleet\nnodes: 2\n"}, ("f.yml",), "f.yml: the dstack fleet has no ssh_"),
    "a pool without hosts": ({"p.yml": "a: {hosts: [x]}\nb: {user: u}\n"}, ("p.yml",), "p.yml:2:1: pool b has no host"),
    "a nameless host": ({"p.yml": "a: {hosts: [{user: x}]}\n"}, ("p.yml",), "p.yml:1:13: the host has neither ip nor"),
    "hosts that are no list": (
        {"f.yml": "type: fleet\nssh_config: {hosts: a}\n"}, ("f.yml",), "f.yml:2:21: hosts must be a list",
    ),
}  # fmt: skip


def test_what_is_refused_says_where_and_why(gpurun, place):
    for name, (files, words, told) in REFUSED.items():
        (place / name).mkdir()
        with pytest.MonkeyPatch.context() as there:
            there.chdir(place / name)
            write(files)
            code, out, err = gpurun("inventory", "import", *words)
            assert (code, out, told in err) == (2, "", True), (name, err)
            assert not Path("inventory.yaml").exists(), name


def test_notes_are_short_and_name_file_line_and_host(gpurun, place):
    topology = "".join(f"SwitchName=s{number} Nodes=n[{number}00-{number}99]\n" for number in range(1, 60))
    write({"topology.conf": topology})
    _, _, err = gpurun("inventory", "import", "topology.conf", "--from", "slurm")
    assert max(len(line) for line in err.splitlines()) < 400
    write({"hosts": "[rack1]\nn1 ansible_host=10.0.1.[1:8] gpus=4\nn2 ansible_host=10.0.1.2 gpus=many\n"})
    code, _, err = gpurun("inventory", "import", "hosts")
    assert code == 0
    assert "not mapped: hosts:2: n1: address: '10.0.1.[1:8]' is not a host name or an IP address of one host" in err
    assert "not mapped: hosts:3: n2: gpus: 'many' is not a whole number" in err


def test_a_folder_of_several_inventories_says_what_was_not_read(gpurun, place):
    write({"inv/hosts": "[rack1]\nn1 gpus=4\n", "inv/groups": "[train]\nn1\n", "inv/group_vars/train.yml": "gpus: 8\n"})
    code, _, err = gpurun("inventory", "import", "inv")
    assert (code, "not mapped: inv: gpurun reads one file of a folder, and did not read groups" in err) == (
        0,
        True,
    ), err


HOSTILE = {
    "ssh_node_pools.yaml": "a: {hosts: [-oX, good, 'a b', {ip: '$(x)'}, [1], {ip: [1]}]}\n",
    "f.dstack.yml": "type: fleet\nssh_config: {user: -oX, hosts: [good, -x, {hostname: good2, port: x, user: a;b}]}\n",
    "hosts": "10.0.0.1 good\n10.0.0.2 -oX\n10.0.0.3 'a\n",
    "nodefile": "good\ngood\n-x\n@\ngood-gpu\n",
}  # fmt: skip


def test_hostile_lists_of_the_new_formats(gpurun, place):
    for name, text in HOSTILE.items():
        write({name: text})
        code, out, err = gpurun("inventory", "import", name, "--dry-run", *(
            ("--from", "hostfile") if name == "nodefile" else ()
        ))  # fmt: skip
        if name == "ssh_node_pools.yaml":
            assert (code, "ssh_node_pools.yaml:1:" in err) == (2, True), err
            continue
        assert code == 0, err
        assert "good" in out and "-oX" not in out and "not mapped: " in err, name
