from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace

import pytest
from own_sshd import own_sshd

from gpurun.errors import BadInput
from gpurun.facts import DockerFacts, Gpu, Hardware
from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Rack
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.launch import jobssh
from gpurun.launch.container import HostAccount, Mount
from gpurun.launch.plan import make_plan
from gpurun.node.claim_rules import Claimant, read_cards, read_claimant

HOSTS = tuple(Host(name=f"h{i}", rack=f"r{i // 2}", generation="pascal", gpus=4, fabric="tcp") for i in range(4))
INVENTORY = Inventory(
    hosts=HOSTS, racks=(Rack("r0", ("h0", "h1")), Rack("r1", ("h2", "h3"))),
    fabrics={"tcp": Fabric("tcp", FabricKind.TCP, "eth0"), "other": Fabric("other", FabricKind.TCP, "eth1")},
)  # fmt: skip
SPEC = JobSpec(
    name="n", image="gpurun/train:tf2.15", gpus=6, command=("python3", "train.py", "a b\n'\""), workdir="/w",
    outputs="/checkpoints", secret_files={"token": "/head/only/secret"}, env={"K": "v w"},
    mounts=(("/data, set", "/data", "ro"),),
)  # fmt: skip
CLAIMANT = Claimant("j-00000001", 2, "a" * 16, "alice", 1001, "head-1")
GRANTS = (Grant("h2", (1, 3)), Grant("h3", (0, 1, 2, 3)))


def account(name):
    return HostAccount(
        uid="1500",
        gid="1501",
        user="train",
        folder="/home/train/.gpurun",
        hostname=name.upper(),
        address=f"10.0.0.{name[1]}",
    )


def plan(spec=SPEC, grants=GRANTS, inventory=INVENTORY, accounts=None, hardware=None, image_sets=()):
    known = {grant.host: account(grant.host) for grant in grants} if accounts is None else accounts
    return make_plan(
        claimant=CLAIMANT,
        hardware=hardware or {},
        image_sets=image_sets,
        spec=spec,
        grants=grants,
        inventory=inventory,
        accounts=known,
        ssh_port=23022,
    )


def test_a_rehearsal_writes_its_outputs_to_a_folder_that_goes_with_the_attempt():
    (host,) = plan(SPEC.rehearsal, grants=(Grant("h2", (3,)),)).hosts
    assert host.outputs is None and "GPURUN_OUTPUTS=/checkpoints" in options(host.run, "--env")
    scratch = [mount for mount in options(host.run, "--mount") if "target=/checkpoints" in mount]
    assert scratch == ["type=bind,source=/home/train/.gpurun/jobs/j-00000001/run/scratch,target=/checkpoints"]
    assert "run/scratch/.removed" in host.files, "the folder is made with its first file, before Docker wants it"
    assert not [name for each in plan().hosts for name in each.files if "scratch" in name]


def options(argv, name):
    return [argv[i + 1] for i, word in enumerate(argv) if word == name]


def test_containers_have_what_the_design_asks_and_no_more():
    first, second = plan().hosts
    for host, gpus in ((first, "1,3"), (second, "0,1,2,3")):
        assert host.run[:3] == ("docker", "run", "--detach")
        assert options(host.run, "--gpus") == [f'"device={gpus}"']
        assert options(host.run, "--label") == [
            "gpurun.job=j-00000001", "gpurun.attempt=2", f"gpurun.state={'a' * 16}", "gpurun.user=alice",
            "gpurun.uid=1001", "gpurun.head=head-1", f"gpurun.gpus={gpus}",
        ]  # fmt: skip
        assert options(host.run, "--user") == ["1500:1501"]
        assert options(host.run, "--cap-drop") == ["ALL"]
        assert options(host.run, "--security-opt") == ["no-new-privileges", "label=disable"]
        assert options(host.run, "--userns") == ["host"]
        assert options(host.run, "--network") == ["host"]
        assert set(options(host.run, "--add-host")) == {
            "h2:10.0.0.2", "h3:10.0.0.3", "H2:10.0.0.2", "H3:10.0.0.3",
        }  # fmt: skip
        assert options(host.run, "--log-driver") == ["json-file"]
        assert "--privileged" not in host.run
        assert "--init" in host.run
    assert options(second.run, "--entrypoint") == ["/gpurun/bin/hold"]
    assert options(first.run, "--entrypoint") == ["/gpurun/bin/launch"]
    assert first.run[-len(plan().launch) :] == plan().launch


def with_cores(cores):
    gpus = tuple(Gpu(index, uuid=f"GPU-{index}") for index in range(4))
    return {grant.host: Hardware(grant.host, gpus=gpus, docker=DockerFacts(cores=cores)) for grant in GRANTS}


@pytest.mark.parametrize("launcher", ["horovod", "torchrun", "deepspeed", "tasks", "mpirun"])
def test_ranks_of_one_host_divide_its_cores_unless_the_recipe_or_the_image_says_otherwise(launcher):
    """Without it each of eight ranks starts a thread for each core of the host."""
    spec = replace(SPEC, launcher=launcher)
    for host in plan(spec, hardware=with_cores(64)).hosts:
        assert [value for value in options(host.run, "--env") if "THREADS" in value] == ["OMP_NUM_THREADS=16"]
        script, _ = host.files["launch/bin/rank"]
        assert "export OMP_NUM_THREADS=16\n" in script, "horovodrun sends rank 0's environment"
        (setting,) = [one for one in host.settings if one.name == "OMP_NUM_THREADS"]
        assert (setting.source, setting.reason[:33]) == ("probe", "the job's share of 64 cores, divi")
    own = plan(replace(spec, env={"OMP_NUM_THREADS": "3"}), hardware=with_cores(64)).first
    assert [value for value in options(own.run, "--env") if "THREADS" in value] == ["OMP_NUM_THREADS=3"]
    assert "OMP_NUM_THREADS" not in own.files["launch/bin/rank"][0]
    assert "OMP_NUM_THREADS" not in str(plan(spec, hardware=with_cores(64), image_sets={"OMP_NUM_THREADS"}).first)
    assert "OMP_NUM_THREADS" not in str(plan(spec).first), "its cores are not known"


@pytest.mark.parametrize(("support", "by_uuid"), [("runtime", True), ("hook", True), ("cdi", False), ("", False)])
def test_a_container_gets_its_gpus_by_uuid_because_indices_shift(support, by_uuid):
    """A GPU that falls off the bus before the start moves the indices after it. CDI specifications may lack UUIDs."""
    gpus = tuple(Gpu(index, uuid=f"GPU-{index}") for index in range(4))
    known = {"h2": Hardware("h2", gpus=gpus, docker=DockerFacts(gpu_support=support))}
    first, second = plan(hardware=known).hosts
    assert options(first.run, "--gpus") == ['"device=GPU-1,GPU-3"' if by_uuid else '"device=1,3"']
    assert {"gpurun.gpus=1,3", "gpurun.uuids=GPU-1,GPU-3"} <= set(options(first.run, "--label"))
    assert (first.gpus, options(second.run, "--gpus")) == ((1, 3), ['"device=0,1,2,3"'])
    odd = Hardware("h2", gpus=(gpus[1], Gpu(3, uuid='GPU-3",x')), docker=DockerFacts(gpu_support="runtime"))
    assert options(plan(hardware={"h2": odd}).first.run, "--gpus") == ['"device=1,3"']


def test_gpus_are_numbered_as_nvml_numbers_them():
    """CUDA's own order begins with the fastest GPU: on a host with mixed cards, ranks would swap theirs."""
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in options(plan().first.run, "--env")
    own = options(plan(replace(SPEC, env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})).first.run, "--env")
    assert [value for value in own if "ORDER" in value] == ["CUDA_DEVICE_ORDER=FASTEST_FIRST"]


def test_a_container_knows_the_machines_that_its_host_knows_after_those_of_the_gang():
    """With any --add-host, Docker leaves out the host's /etc/hosts, in which small sites name their file servers."""
    known = {"h2": replace(account("h2"), names=(("minio.site", "10.9.0.1"), ("v6", "fd00::1"), ("H3", "192.168.0.3")))}
    first, second = plan(accounts={**known, "h3": account("h3")}).hosts
    gang = ["h2:10.0.0.2", "h3:10.0.0.3", "H2:10.0.0.2", "H3:10.0.0.3"]
    assert options(first.run, "--add-host") == [*gang, "minio.site:10.9.0.1", "v6:fd00::1"]
    assert options(second.run, "--add-host") == gang


def test_mounts_are_read_only_but_for_outputs():
    mounts = options(plan().first.run, "--mount")
    assert [mount for mount in mounts if not mount.endswith("readonly")] == [
        "type=bind,source=/home/train/.gpurun/jobs/j-00000001/run,target=/run/gpurun",
        "type=bind,source=/home/train/.gpurun/outputs/j-00000001,target=/checkpoints",
    ]
    assert 'type=bind,"source=/data, set",target=/data,readonly' in mounts
    assert Mount('a"b,c', "/x").argv()[1] == 'type=bind,"source=a""b,c",target=/x,readonly'


def test_the_launcher_gets_slots_in_rank_order_and_no_word_of_the_command():
    launch = plan().launch
    assert launch[0] == "horovodrun"
    assert options(launch, "-np") == ["6"]
    assert options(launch, "-H") == ["h2:2,h3:4"]
    assert options(launch, "--network-interfaces") == ["eth0"]
    assert "--disable-cache" in launch
    assert "--gloo" in launch
    assert launch[-1] == "/gpurun/bin/rank"
    assert not set(SPEC.command) & set(launch)
    assert "--mpi" in plan(replace(SPEC, controller="mpi")).launch


@pytest.mark.parametrize("launcher", ["horovod", "mpirun", "torchrun", "jax", "tasks"])
def test_a_gang_on_one_host_uses_no_network(launcher):
    """Neither the fabric's interface nor an address of it need be there: pre-flight does not ask for them."""
    alone = plan(replace(SPEC, gpus=2, launcher=launcher), (Grant("h2", (0, 1)),))
    told = [
        *alone.first.run,
        *alone.launch,
        *(f"{name}={value}" for rank in alone.first.ranks for name, value in rank.items()),
    ]
    told += [text for text, _ in alone.first.files.values()]
    assert not [word for word in told if "eth0" in word or "10.0.0." in word]
    assert "NCCL_SOCKET_IFNAME==lo" in told
    assert "h2:127.0.0.1" in told
    assert all("one host" in one.reason for one in alone.first.settings if "lo" in one.value)


def test_one_host_needs_no_interface_and_no_peers():
    alone = plan(replace(SPEC, gpus=1), (Grant("h0", (2,)),))
    assert "--network-interfaces" not in alone.launch
    assert "sshd/config" not in alone.first.files


def test_a_container_has_all_groups_of_the_user_who_may_read_data_through_one_of_them():
    mine = replace(account("h2"), groups=(("2001", "ml"), ("1200000513", "domain users"), ("0", "wheel")))
    host = plan(grants=(Grant("h2", (3,)),), accounts={"h2": mine}).first
    given = [host.run[i + 1] for i, word in enumerate(host.run) if word == "--group-add"]
    assert given == ["2001", "1200000513", "0"] and host.run.index("--group-add") < host.run.index("--entrypoint")
    lines = host.files["group"][0].splitlines()
    assert sorted(lines) == sorted(
        ["root:x:0:", "train:x:1501:", "ml:x:2001:", "domain users:x:1200000513:", "nogroup:x:65534:"]
    )


def test_a_fork_bomb_has_an_end():
    limits = [options(host.run, "--pids-limit") for host in plan().hosts]
    assert limits == [["32768"], ["65536"]], "for two GPUs and for four"


def test_memory_and_cores_follow_the_gpus_of_each_host():
    engine = DockerFacts(memory_bytes=64 << 30, cores=16, nofile=1024, may_raise_limits=True)
    first, second = plan(hardware={host: Hardware(host, docker=engine) for host in ("h2", "h3")}).hosts
    usable = 64 * 1024 - 64 * 1024 * 5 // 100
    assert [options(host.run, "--memory") for host in (first, second)] == [[f"{usable // 2}m"], [f"{usable}m"]]
    assert [options(host.run, "--shm-size") for host in (first, second)] == [[f"{usable // 4}m"], [f"{usable // 2}m"]]
    assert "gpurun.cpus=8.00" in options(first.run, "--label")
    assert "nofile=1048576:1048576" in options(first.run, "--ulimit"), "on TCP, too"
    assert (first.share.memory_mib, second.share.gpus) == (usable // 2, 4)


def test_no_secret_is_in_a_plan():
    assert "/head/only" not in str(plan())
    assert any("/run/secrets" in mount for mount in options(plan().first.run, "--mount"))


def test_hosts_with_different_interfaces_are_refused():
    mixed = replace(INVENTORY, hosts=(*HOSTS[:3], replace(HOSTS[3], fabric="other")))
    with pytest.raises(BadInput, match="different network interfaces"):
        plan(inventory=mixed)


def test_a_dry_run_needs_no_host():
    run = plan(accounts={}).first.run
    assert options(run, "--user") == ["$(id -u):$(id -g)"]


def test_the_private_sshd_can_only_enter_the_container():
    config = plan().hosts[1].files["sshd/config"][0]
    assert "ListenAddress 10.0.0.3:23022\n" in config
    enter = "ForceCommand exec docker --host unix:///var/run/docker.sock exec -i -e GPURUN_STDIN=launcher"
    assert re.search(f'^{enter} gpurun-j-00000001-2 sh -c "unset [A-Z0-9_ ]+; \\$SSH_ORIGINAL_COMMAND"\n', config, re.M)
    assert "DisableForwarding yes\n" in config
    assert "PasswordAuthentication no\n" in config
    assert "sshd/config" not in plan().first.files


def test_host_keys_are_verified_whatever_horovodrun_asks():
    config = plan().first.files["launch/ssh/config"][0]
    assert "StrictHostKeyChecking yes" in config
    assert "HostKeyAlias h3" in config
    assert 'ssh -F /gpurun/ssh/config -o StrictHostKeyChecking=yes "$@"' in jobssh.SSH_WRAPPER
    assert jobssh.known_hosts_lines([("h3", "ssh-ed25519 AAAA")]) == "h3 ssh-ed25519 AAAA\n"


def test_openssh_accepts_the_configurations(tmp_path):
    sshd = plan().hosts[1].files["sshd/config"][0]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    (tmp_path / "sshd").write_text(sshd.replace("/home/train/.gpurun/jobs/j-00000001/sshd/host_key", f"{tmp_path}/key"))
    subprocess.run([own_sshd(), "-t", "-f", tmp_path / "sshd"], check=True)
    (tmp_path / "ssh").write_text(plan().first.files["launch/ssh/config"][0])
    shown = subprocess.run(
        ["ssh", "-F", tmp_path / "ssh", "-G", "h3"], check=True, capture_output=True, text=True
    ).stdout
    assert "hostname 10.0.0.3\n" in shown
    assert "port 23022\n" in shown
    assert "stricthostkeychecking true\n" in shown


@pytest.mark.parametrize("name", sorted(jobssh.scripts()))
def test_scripts_are_valid_shell(name):
    subprocess.run(["sh", "-n"], input=jobssh.scripts()[name], text=True, check=True)


def test_the_rank_script_passes_words_byte_for_byte(tmp_path):
    text, mode = plan().first.files["launch/bin/rank"]
    script = tmp_path / "rank"
    script.write_text(text)
    script.chmod(mode)
    words = ["a b", "c'd\"e", "f\ng", "", "$HOME", "*", "ü"]
    done = subprocess.run([script, "printf", "%s\\0", *words], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == words


def test_launchers_of_elastic_gangs_learn_at_once_that_a_rank_failed():
    """Others learn it when the agent has had time for its notice."""
    elastic = plan(spec=replace(SPEC, min_gpus=2)).first.files["launch/bin/rank"][0]
    assert " gpurun_notice=0 " in elastic
    assert " gpurun_notice=300 " in plan().first.files["launch/bin/rank"][0]


def test_shell_quoting_is_not_needed_anywhere():
    assert all(isinstance(word, str) for word in plan().first.run)
    assert shlex.split(shlex.join(plan().first.run)) == list(plan().first.run)


def test_a_container_says_whose_it_is_and_which_gpus_it_has_by_uuid_where_that_is_known():
    known = {"h2": Hardware("h2", gpus=tuple(Gpu(i, uuid=f"GPU-{i}") for i in range(4)))}
    first, second = plan(hardware=known).hosts
    labels = dict(word.split("=", 1) for word in options(first.run, "--label"))
    assert read_claimant(labels) == CLAIMANT
    assert read_cards(labels) == ((1, "GPU-1"), (3, "GPU-3"))
    labels = dict(word.split("=", 1) for word in options(second.run, "--label"))
    assert read_cards(labels) == tuple((i, "") for i in range(4))
