"""A variable that says which rank a process is has a value of its own for each rank: no person sets it for all."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
from placed_gangs import GANG, SPEC, plan

from gpurun.errors import BadInput
from gpurun.jobs.spec import Roles
from gpurun.launch.launchers import NAMES, launcher_of, settled
from gpurun.launch.launchers.launcher import IDENTITIES, PLACES, is_told, seats_of, unset_names

OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RUN_ID")
OF_OTHERS = (
    "TF_CONFIG", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS", "HOROVOD_RANK", "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMIX_RANK",
    "PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE",
)  # fmt: skip
SETTINGS = (
    "OMPI_MCA_btl", "PMIX_MCA_gds", "OMP_NUM_THREADS", "NCCL_DEBUG", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_TIMELINE",
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_ERROR_FILE",
    "JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL", "RANKS", "MY_RANK", "rank", "WORLD", "MASTER", "ROLE_NAME", "SLURM_JOB_ID",
)  # fmt: skip


def job(launcher="tasks", gpus=4, command=("python3", "x.py"), **env):
    return replace(SPEC, launcher=launcher, gpus=gpus, command=command, env=env)


@pytest.mark.parametrize("name", [*OF_TORCH, *OF_OTHERS])
@pytest.mark.parametrize("launcher", NAMES)
def test_no_gang_takes_one_identity_for_all_its_ranks(launcher, name):
    with pytest.raises(BadInput, match=name) as refused:
        settled(job(launcher, **{name: "7"}), is_named=True)
    setters = next(each.launchers for each in IDENTITIES if each.has(name))
    assert any(setter in f"{refused.value} {refused.value.hint}" for setter in setters)


@pytest.mark.parametrize("launcher", NAMES)
def test_what_is_a_persons_to_set_stays(launcher):
    env = dict.fromkeys(SETTINGS, "7")
    spec, said = settled(job(launcher, **env), is_named=True)
    assert (dict(spec.env), said) == (env, ())


@pytest.mark.parametrize(
    "line",
    [("RANK=3", "python3", "x.py"), ("env", "RANK=3", "python3", "x.py"), ("sh", "-c", "RANK=3 exec python3 x.py"),
     ("env", "-u", "A", "RANK=3", "torchrun", "x.py"), ("RANK=3", "torchrun", "x.py"),
     ("mpirun", "-x", "RANK=3", "./a"), ("srun", "--export=ALL,RANK=3", "torchrun", "x.py"),
     ("nohup", "env", "RANK=3", "./a")],
)  # fmt: skip
def test_so_does_none_that_is_written_in_front_of_the_command(line):
    with pytest.raises(BadInput, match="RANK"):
        settled(job("horovod", command=line), is_named=False)


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "mpirun"])
@pytest.mark.parametrize("gpus", [1, 4])
def test_places_are_replaced_and_a_line_says_so(launcher, gpus):
    places = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "NNODES": "2", "NODE_RANK": "0", "PET_NNODES": "2"}
    spec, said = settled(job(launcher, gpus, **places, A="1"), is_named=True)
    assert dict(spec.env) == {"A": "1"}
    (line,) = said
    assert all(f"{name}={value}" in line for name, value in places.items())
    assert "gpurun chooses hosts" in line
    spec, said = settled(job("torchrun", gpus, ("env", "MASTER_ADDR=x y", "python3", "x.py")), is_named=True)
    assert (spec.command, dict(spec.env)) == (("python3", "x.py"), {})
    assert "MASTER_ADDR=x y" in "\n".join(said)


@pytest.mark.parametrize("launcher", ["tasks", "horovod", "jax", "tensorflow"])
def test_places_that_nothing_replaces_are_refused_for_a_gang_and_stay_on_one_gpu(launcher):
    with pytest.raises(BadInput, match="env sets MASTER_ADDR, but the right value depends"):
        settled(job(launcher, MASTER_ADDR="n1"), is_named=True)
    spec, said = settled(job(launcher, 1, MASTER_ADDR="n1"), is_named=True)
    assert (dict(spec.env), said) == ({"MASTER_ADDR": "n1"}, ("  set for each rank: MASTER_ADDR",))


def test_the_only_process_of_a_host_gets_places_and_no_identity_of_a_rank():
    with pytest.raises(BadInput, match="the ranks of all hosts would have the same value of RANK"):
        settled(replace(job(RANK="0"), one_per_host=True), is_named=True)
    spec, (said,) = settled(replace(job(NNODES="2", PET_NNODES="2"), one_per_host=True), is_named=True)
    assert (dict(spec.env), "NNODES=2 PET_NNODES=2" in said) == ({}, True)


def test_a_program_on_one_gpu_may_be_told_that_it_is_alone():
    """So do scripts that call init_process_group() and are started by hand."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert dict(settled(job("tasks", 1, **alone), is_named=True)[0].env) == alone
    with pytest.raises(BadInput, match="torchrun itself sets RANK"):
        settled(job("torchrun", 1, RANK="0"), is_named=True)
    with pytest.raises(BadInput, match="only a launcher may set HOROVOD_RANK"):
        settled(job("tasks", 1, HOROVOD_RANK="0"), is_named=True)


@pytest.mark.parametrize("launcher", NAMES)
def test_the_table_knows_each_variable_that_says_who_a_rank_is(launcher):
    """What a launcher sets and the table does not know, a person may set instead."""
    value = launcher_of(replace(SPEC, launcher=launcher))
    roles = Roles(workers=3) if value.with_roles is not None else None
    gang = replace(GANG, roles=roles)
    seats = seats_of(gang.grants, roles)
    ranks = [value.environment(gang, seat) for seat in seats]
    mine = {name for name in ranks[0] if len({rank[name] for rank in ranks}) > 1}
    assert {name for name in mine if not is_told(name)} <= {"CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"}
    for each in IDENTITIES:
        if {*each.names} & {*ranks[0]}:
            assert launcher in each.launchers


@pytest.mark.parametrize("launcher", NAMES)
def test_an_image_does_not_tell_the_ranks_of_a_gang_who_they_are(launcher, tmp_path):
    spec = replace(SPEC, env={"MASTER_PORT": "1"})
    made = plan(launcher, "h2", "h4", roles=Roles(workers=4) if launcher == "tensorflow" else None, spec=spec)
    starts = [host.files.get("launch/bin/start", host.files["launch/bin/launch"])[0] for host in made.hosts]
    starts += [
        host.files["sshd/config"][0].rpartition('sh -c "')[2] for host in made.hosts if "sshd/config" in host.files
    ]
    names = ("RANK", "MASTER_ADDR", "TF_CONFIG", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "NNODES")
    for text in starts:
        unset = next(line for line in text.splitlines() if line.startswith("unset ")).partition(";")[0]
        assert {*names} <= {*unset.split()}
        assert "MASTER_PORT" not in unset, "the job sets it"
        environ = dict.fromkeys((*names, "MASTER_PORT"), "image")
        left = subprocess.run(["/bin/sh", "-c", f"{unset}; /usr/bin/env"], env=environ, capture_output=True, text=True)
        assert [line for line in left.stdout.splitlines() if line.endswith("=image")] == ["MASTER_PORT=image"]


def test_on_one_gpu_an_image_may_say_that_its_program_is_alone():
    alone = unset_names(1, ())
    assert "HOROVOD_RANK" in alone
    assert not {"RANK", *PLACES.names} & {*alone}
