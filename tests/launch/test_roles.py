"""Gangs whose ranks have roles: who is where, what each is told, and which gangs cannot be."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placed_gangs import GANG, SPEC, plan

from gpurun.errors import BadInput
from gpurun.jobs.recipe import read_recipe
from gpurun.jobs.spec import Grant, Roles
from gpurun.launch.launchers import NAMES, launcher_of, settled
from gpurun.launch.launchers.direct import environment
from gpurun.launch.launchers.launcher import seats_of
from gpurun.node.claim_rules import read_cards

TENSORFLOW = replace(SPEC, launcher="tensorflow")
ALL = Roles(ps=2, chief=True, evaluator=True)
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=9)
grants = sizes.map(lambda sizes: [Grant(f"h{number}", tuple(range(size))) for number, size in enumerate(sizes)])
without_gpu = st.integers(0, 4).map(lambda hosts: [Grant(f"c{number}", ()) for number in range(hosts)])
roles = st.builds(Roles, ps=st.integers(0, 20), chief=st.booleans(), evaluator=st.booleans())


def settle(**changes):
    return settled(replace(TENSORFLOW, **changes), is_named=True)[0]


@given(grants, without_gpu, roles)
def test_every_rank_has_one_place_and_servers_are_spread_over_their_hosts(with_gpu, for_servers, roles):
    grants = [*with_gpu, *for_servers]
    seats = seats_of(grants, roles)
    gpus = sum(len(grant.gpus) for grant in grants)
    assert [seat.rank for seat in seats] == list(range(gpus + roles.without_gpu))
    assert [seat.host for seat in seats if seat.has_gpu] == [seat.host for seat in seats_of(grants)]
    assert {seat.role for seat in seats if seat.has_gpu} == {"worker"}
    assert len({(seat.role, seat.index) for seat in seats}) == len({(seat.host, seat.local_rank) for seat in seats})
    assert len({(seat.role, seat.index) for seat in seats}) == len(seats)
    for grant in grants:
        mine = [seat for seat in seats if seat.host == grant.host]
        assert [seat.local_rank for seat in mine] == list(range(len(mine)))
        assert {seat.local_size for seat in mine} <= {len(mine)}
        assert [seat.has_gpu for seat in mine] == sorted((seat.has_gpu for seat in mine), reverse=True)
    servers = Counter(seat.host for seat in seats if seat.role == "ps")
    able = [grant.host for grant in for_servers or with_gpu]
    assert {*servers} <= {*able}
    assert max(servers.values(), default=0) <= min(servers[host] for host in able) + 1


@given(grants)
def test_where_ranks_are_all_alike_each_is_awaited_and_has_no_role(grants):
    assert all((seat.role, seat.index, seat.is_awaited) == ("", 0, True) for seat in seats_of(grants))


@pytest.mark.parametrize(("ps", "hosts"), [(1, ["h3"]), (2, ["h3", "h1"]), (3, ["h3", "h2", "h1"])])
def test_the_first_host_has_a_server_last_because_the_chief_is_there(ps, hosts):
    four = [Grant(f"h{number}", (0,)) for number in range(4)]
    assert [seat.host for seat in seats_of(four, Roles(ps=ps)) if seat.role == "ps"] == hosts


@pytest.mark.parametrize(
    ("roles", "awaited"),
    [(Roles(), ["worker 0 (rank 0)", "worker 1 (rank 1)", "worker 2 (rank 2)"]), (ALL, ["chief 0 (rank 3)"])],
)
def test_the_chief_is_waited_for_and_without_one_every_worker(roles, awaited):
    assert [seat.title for seat in seats_of(GANG.grants, roles) if seat.is_awaited] == awaited


def told(roles=ALL, **changes):
    gang = replace(GANG, roles=roles, **changes)
    return {f"{seat.role} {seat.index}": environment(launcher_of(TENSORFLOW), gang, seat) for seat in gang.places}


def test_each_task_finds_the_others_and_itself_in_tf_config():
    tasks = told()
    cluster = {
        "worker": ["10.0.0.2:23023", "10.0.0.2:23024", "10.0.0.3:23023"],
        "chief": ["10.0.0.2:23025"],
        "ps": ["10.0.0.3:23024", "10.0.0.2:23026"],
    }
    for name, environ in tasks.items():
        role, index = name.split()
        said = json.loads(environ["TF_CONFIG"])
        assert said["task"] == {"type": role, "index": int(index)}
        assert said["cluster"] == (cluster if role != "evaluator" else {**cluster, "evaluator": ["10.0.0.2:23027"]})
        assert (environ["GPURUN_ROLE"], environ["GPURUN_ROLE_INDEX"]) == (role, index)
        assert environ["GRPC_FAIL_FAST"] == "use_caller"
    everywhere = [where for each in cluster.values() for where in each]
    assert len({*everywhere, "10.0.0.2:23022"}) == len(everywhere) + 1, "the gang's own port is nobody's"


def test_only_workers_see_a_gpu():
    found = {name: environ["CUDA_VISIBLE_DEVICES"] for name, environ in told().items()}
    assert found == {
        "worker 0": "0", "worker 1": "1", "worker 2": "0", "chief 0": "", "ps 0": "", "ps 1": "", "evaluator 0": "",
    }  # fmt: skip


def test_without_servers_there_are_workers_and_nobody_else():
    tasks = told(Roles())
    assert [*tasks] == ["worker 0", "worker 1", "worker 2"]
    assert json.loads(tasks["worker 0"]["TF_CONFIG"])["cluster"].keys() == {"worker"}


def test_every_host_is_asked_for_the_ports_of_all_its_ranks():
    made = plan("tensorflow", "h2", "h3", roles=Roles(ps=1, chief=True))
    assert [host.ports for host in made.hosts] == [(23022, 23023, 23024, 23025, 23027), (23023, 23024, 23025, 23027)]
    assert [host.ports for host in plan("torchrun", "h2", "h3").hosts] == [(23022, 23023), (23023,)]
    assert [host.ports for host in plan("mpirun", "h2", "h4").hosts] == [(23023,), (23023,)], "NCCL answers there"
    wants = replace(SPEC, gpus=4, roles=Roles(ps=1, chief=True)).wants
    used = {port for host in made.hosts for port in host.ports}
    assert used <= {*range(23022, 23022 + wants.ports_on([Grant(h.host, h.gpus) for h in made.hosts]))}


@given(grants, roles)
def test_a_gang_has_ports_for_all_its_ranks(grants, roles):
    gang = replace(GANG, grants=grants, roles=roles)
    mine = range(gang.port, gang.port + replace(SPEC, roles=roles).wants.ports_on(grants))
    for grant in grants:
        ports = gang.ports_of(grant.host)
        assert len({*ports}) == len(ports) and {*ports} <= {*mine}


def test_the_container_of_a_host_without_gpus_asks_docker_for_none():
    made = plan("tensorflow", "h2", "c5", roles=Roles(ps=2, chief=True))
    with_gpus, without = (host.run for host in made.hosts)
    assert with_gpus[with_gpus.index("--gpus") + 1] == '"device=0,1"'
    assert "--gpus" not in without and "gpurun.gpus=" in without
    assert int(without[without.index("--pids-limit") + 1]) > 0
    assert [rank["GPURUN_ROLE"] for rank in made.hosts[1].ranks] == ["ps", "ps"]
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in made.hosts[1].ranks} == {""}
    assert read_cards({"gpurun.gpus": ""}) == ()


def test_programs_find_roles_in_the_gangs_file():
    made = plan("tensorflow", "h2", "h3", roles=Roles(ps=1))
    (text,) = {host.files["launch/gang.json"][0] for host in made.hosts}
    roles = json.loads(text)["roles"]
    assert {role: len(where) for role, where in roles.items()} == {"worker": 4, "ps": 1}
    assert json.loads(plan("tasks", "h2").first.files["launch/gang.json"][0])["roles"] == {}


def test_servers_have_a_chief_unless_the_recipe_says_otherwise():
    assert settle(roles=Roles(ps=2)).roles == Roles(ps=2, workers=3, chief=True)
    assert settle(roles=Roles(ps=2, chief=False)).roles.chief is False
    assert settle().roles == Roles(workers=3, chief=False)
    assert settle(roles=Roles(evaluator=True)).roles == Roles(workers=3, chief=False, evaluator=True)


def test_a_program_of_tensorflow_1_gets_its_flags_behind_its_own():
    spec = settle(roles=Roles(ps=1, flags=True), command=("python3", "-c", "import sys; print(sys.argv[1:])", "a 'b'"))
    assert spec.roles.chief is False
    environ = {**os.environ, **told(Roles(ps=1, flags=True, chief=False))["ps 0"]}
    done = subprocess.run(spec.command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([
        "a 'b'", "--ps_hosts=10.0.0.3:23024", "--worker_hosts=10.0.0.2:23023,10.0.0.2:23024,10.0.0.3:23023",
        "--job_name=ps", "--task_index=0",
    ])  # fmt: skip


def test_a_rehearsal_plays_every_role_once():
    spec = settle(roles=Roles(ps=3, evaluator=True), gpus=3).rehearsal
    assert (spec.gpus, spec.roles) == (1, Roles(ps=1, workers=1, chief=True, evaluator=True))
    assert spec.wants.roles == spec.roles
    assert [seat.title for seat in seats_of([Grant("h", (0,))], spec.roles)] == [
        "worker 0 (rank 0)", "chief 0 (rank 1)", "ps 0 (rank 2)", "evaluator 0 (rank 3)"
    ]  # fmt: skip
    assert settled(TENSORFLOW, is_named=True)[0].rehearsal.roles.without_gpu == 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"roles": Roles(ps=0, chief=True)}, "a chief coordinates parameter servers, but the job has no"),
        ({"roles": Roles(flags=True)}, "'flags' name parameter servers, but the job has no"),
        ({"roles": Roles(ps=4)}, "4 parameter servers, but only 3 workers"),
        ({"roles": Roles(ps_hosts=("c5",))}, "'ps_hosts' are for parameter servers, but the job has no"),
        ({"roles": Roles(ps=1, workers=4)}, "4 workers need one GPU each, but the job has 3 GPUs"),
        ({"min_gpus": 1}, "tensorflow cannot be elastic"),
        ({"controller": "mpi"}, "only the launcher horovod uses"),
        *(({"launcher": name, "roles": Roles(ps=1)}, "supports 'roles'") for name in NAMES if name != "tensorflow"),
    ],
)
def test_roles_that_cannot_be_are_refused_with_what_is_wrong(changes, word):
    with pytest.raises(BadInput, match=re.escape(word)):
        settle(**changes)


@pytest.mark.parametrize(
    "line",
    [
        "{ps: -1}", "{ps: yes}", "{workers: 0}", "{chief: 1}", "{evaluator: 2}", "{servers: 2}", "[ps]", "ps",
        "{ps: 99999999999}", "{ps: '$(reboot)'}",
        "{ps: 1, ps_hosts: {}}", "{ps: 1, ps_hosts: [a b]}", "{ps: 1, ps_hosts: ['=x']}", "{ps: 1, ps_hosts: ['a=']}",
        '{ps: 1, ps_hosts: ["a=\\e[0m"]}',
    ],
)  # fmt: skip
def test_roles_in_a_recipe_that_mean_nothing_are_refused_where_they_stand(tmp_path, line):
    (tmp_path / "recipe.yaml").write_text(f"image: i\ngpus: 2\ncommand: [x]\nroles: {line}\n")
    with pytest.raises(BadInput, match=r"recipe\.yaml:4:"):
        read_recipe(tmp_path)


def test_a_recipe_has_its_roles(tmp_path):
    (tmp_path / "recipe.yaml").write_text("roles: {ps: 2, workers: 4, chief: true, evaluator: false}\n")
    assert read_recipe(tmp_path).given["roles"] == Roles(ps=2, workers=4, chief=True)
    (tmp_path / "recipe.yaml").write_text("roles: {ps: 5, ps_hosts: [c1, role=ps]}\n")
    given = read_recipe(tmp_path).given["roles"]
    assert given == Roles(ps=5, ps_hosts=("c1", "role=ps"))
    assert settle(roles=given).roles.ps == 5, "more than there are workers"
