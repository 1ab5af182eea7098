"""A gang with one process for each host, which sees all of the job's GPUs there."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from placed_gangs import GANG, SPEC, plan

from gpurun.errors import BadInput
from gpurun.facts import DockerFacts, Hardware
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers import NAMES, settled
from gpurun.launch.launchers.direct import JAX, TASKS, TORCHRUN, environment
from gpurun.launch.launchers.launcher import seats_of
from gpurun.supervisor.ranks import Seating
from gpurun.supervisor.verdict.decide import GangSeen

EACH = replace(GANG, one_per_host=True)
ONCE = replace(SPEC, one_per_host=True)


def test_a_host_has_one_rank_however_many_gpus_it_has():
    assert [(seat.rank, seat.host, seat.local_rank, seat.local_size) for seat in EACH.places] == [
        (0, "h2", 0, 1), (1, "h3", 0, 1),
    ]  # fmt: skip
    assert EACH.size == 2


@pytest.mark.parametrize("launcher", [TASKS, TORCHRUN, JAX])
def test_it_sees_all_gpus_of_the_job_there_and_knows_that_it_is_alone_on_its_host(launcher):
    first, second = (environment(launcher, EACH, place) for place in EACH.places)
    assert "CUDA_VISIBLE_DEVICES" not in {**first, **second}
    assert [first[name] for name in ("GPURUN_SIZE", "GPURUN_LOCAL_RANK", "GPURUN_LOCAL_SIZE")] == ["2", "0", "1"]
    assert (second["GPURUN_RANK"], second["GPURUN_NODE"]) == ("1", "1")


def test_a_launcher_that_it_starts_finds_the_other_hosts_by_variables():
    first, second = (environment(TASKS, EACH, place) for place in EACH.places)
    names = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
    assert [first[name] for name in names] == ["2", "0", "2", "10.0.0.2", "23022"]
    assert [second[name] for name in names] == ["2", "1", "1", "10.0.0.2", "23022"]
    assert all(told[f"PET_{name}"] == told[name] for told in (first, second) for name in names)  # torchrun's flags
    assert (first["GLOO_SOCKET_IFNAME"], second["GLOO_SOCKET_IFNAME"]) == ("eth0", "ens5")
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & {*first}


def test_an_mpirun_that_it_starts_takes_the_number_of_processes_that_the_text_says_however_few_cores_the_host_has():
    names = ("OMPI_MCA_rmaps_base_oversubscribe", "PRTE_MCA_rmaps_default_mapping_policy")  # Open MPI 4, and 5
    told, given = environment(TASKS, EACH, EACH.places[0]), replace(EACH, given=frozenset(names))
    assert [told.get(name) for name in names] == ["1", ":oversubscribe"]
    assert not {*names} & {*environment(TASKS, given, EACH.places[0])}  # a person's own setting stays
    assert not {*names} & {*environment(TASKS, GANG, GANG.places[0])}  # a copy for each GPU starts none


def test_pytorchs_world_is_the_hosts():
    told = environment(TORCHRUN, EACH, EACH.places[1])
    assert [told[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["1", "2", "0", "1"]


def test_mpirun_starts_one_rank_on_each_host():
    assert plan("mpirun", "h2", "h4", spec=ONCE).launch[2:6] == ("-np", "2", "-H", "h2:1,h4:1")


def test_a_program_that_only_mpirun_started_finds_its_host_by_its_rank():
    hosts = json.loads(plan("mpirun", "h2", "h4", spec=ONCE).first.files["launch/gang.json"][0])["hosts"]
    assert [(host["gpus"], host["ranks"]) for host in hosts] == [(2, 1), (2, 1)]


def test_its_threads_are_those_of_one_gpu_as_it_starts_a_process_for_each():
    hardware = {"h2": Hardware(host="h2", docker=DockerFacts(cores=32))}
    made = plan("tasks", "h2", spec=ONCE, hardware=hardware)
    (threads,) = (each for each in made.first.settings if each.name == "OMP_NUM_THREADS")
    assert (threads.value, threads.reason) == ("8", "the job's share of 32 cores, divided by 2 GPUs")


def test_the_supervisor_awaits_one_rank_of_each_host_and_believes_a_host_nothing_of_others():
    seen = GangSeen(now_s=0.0, members=GANG.grants, one_per_host=True)
    assert (seen.world, seen.awaited) == (2, {0, 1})
    seating = Seating.of(GANG.grants, ONCE)
    assert [seating.host_of(rank) for rank in range(3)] == ["h2", "h3", None]
    assert not seating.has("h2", 1)


@pytest.mark.parametrize("launcher", NAMES)
def test_it_is_refused_with_the_reason_where_each_rank_has_one_gpu(launcher):
    spec = replace(ONCE, launcher=launcher)
    if launcher in ("tasks", "torchrun", "jax", "mpirun", "srun"):
        assert settled(spec, is_named=True)[0].one_per_host
    else:
        with pytest.raises(BadInput, match=f"the launcher {launcher} does not support one_per_host: .*GPU") as refused:
            settled(spec, is_named=True)
        assert "--launcher tasks" in refused.value.hint


def test_without_a_launcher_the_command_runs_as_it_is():
    assert settled(ONCE, is_named=False)[0] == replace(ONCE, launcher="tasks")


def test_a_record_of_an_older_gpurun_has_one_rank_for_each_gpu():
    old = msgspec.to_builtins(SPEC)
    del old["one_per_host"]
    assert not msgspec.convert(old, JobSpec).one_per_host


def test_servers_without_gpus_have_no_such_rank():
    assert len(seats_of([*GANG.grants, replace(GANG.grants[0], host="c5", gpus=())], one_per_host=True)) == 2
