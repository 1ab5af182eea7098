"""What starts the ranks of a gang, and what each rank is told; `test_typed_lines` has what people type."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from placed_gangs import GANG, SPEC, plan, told
from waiting import LIMIT_S, until

from gpurun.errors import BadInput
from gpurun.facts import DockerFacts, Gpu, Hardware
from gpurun.jobs.spec import Grant, HorovodKnobs
from gpurun.launch.launchers import NAMES, launcher_of, settled
from gpurun.launch.launchers.direct import TASKS, TORCHRUN, UNTOLD, environment, start_script


def test_ranks_are_counted_host_by_host_in_the_order_of_the_grant():
    assert [(each["GPURUN_RANK"], each["GPURUN_NODE"], each["GPURUN_LOCAL_RANK"]) for each in told(TASKS)] == [
        ("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0")
    ]  # fmt: skip
    assert {(each["GPURUN_SIZE"], each["GPURUN_NODES"], each["GPURUN_ADDRESSES"]) for each in told(TASKS)} == {
        ("3", "2", "10.0.0.2,10.0.0.3")
    }
    assert [each["GPURUN_LOCAL_SIZE"] for each in told(TASKS)] == ["2", "2", "1"]


def test_a_task_sees_one_gpu_its_own():
    assert [each["CUDA_VISIBLE_DEVICES"] for each in told(TASKS)] == ["0", "1", "0"]
    assert not any("CUDA_VISIBLE_DEVICES" in each for each in told(TORCHRUN))


def test_what_a_recipe_sets_itself_stays_but_for_the_ranks_number():
    given = replace(GANG, given=frozenset({"CUDA_VISIBLE_DEVICES", "GPURUN_RANK"}))
    first = environment(TASKS, given, given.places[0])
    assert "CUDA_VISIBLE_DEVICES" not in first
    assert first["GPURUN_RANK"] == "0"


def test_pytorch_is_told_what_torchrun_tells_also_where_hosts_have_unequal_numbers_of_ranks():
    first, _, last = told(TORCHRUN)
    assert {name: last[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
    }  # fmt: skip
    assert (last["MASTER_ADDR"], last["MASTER_PORT"]) == ("10.0.0.2", "23022")
    assert (first["GLOO_SOCKET_IFNAME"], last["GLOO_SOCKET_IFNAME"]) == ("eth0", "ens5")
    assert last["TORCHELASTIC_RUN_ID"] == "j-00000001.2"
    assert (last["TORCH_NCCL_ASYNC_ERROR_HANDLING"], last["TORCHELASTIC_USE_AGENT_STORE"]) == ("1", "False")


BY_HAND = {
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu-r1-01",
    "MASTER_PORT": "36575", "OMP_NUM_THREADS": "1", "RANK": "1", "ROLE_NAME": "default", "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/attempt_0/1/error.json",
    "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "d5dce7cc",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "WORLD_SIZE": "2",
}  # fmt: skip
"""What ``torchrun --nproc-per-node=2`` of PyTorch 2.13 adds to the environment of the second rank, recorded."""
OTHERWISE = {
    "MASTER_ADDR": "127.0.0.1",  # needs no name service
    "MASTER_PORT": "23022",  # no other job of the head has it
    "TORCHELASTIC_RUN_ID": "j-00000001.2",
    "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 listens, there is no agent
    "TORCHELASTIC_ERROR_FILE": None,  # torchrun itself reads it; gpurun reports what the rank printed
    "TORCHELASTIC_SIGNALS_TO_HANDLE": None,  # of torchrun's own process
}


def test_a_rank_on_one_host_has_each_variable_that_it_has_under_torchrun_by_hand():
    gpus = tuple(Gpu(index) for index in range(4))
    known = {"h2": Hardware("h2", gpus=gpus, docker=DockerFacts(cores=4))}  # two of four GPUs: two cores for two ranks
    alone = plan("torchrun", "h2", hardware=known).first
    container = dict(word.split("=", 1) for flag, word in pairwise(alone.run) if flag == "--env")
    rank = {**container, **alone.ranks[1]}
    assert {name: rank.get(name) for name in BY_HAND} == {**BY_HAND, **OTHERWISE}


SHELLS = pytest.mark.parametrize("shell", [["dash"], ["bash"], ["busybox", "sh"]], ids=["dash", "bash", "busybox"])


@pytest.fixture
def start(tmp_path):
    """Start the main process of the container on h2, with another text in the place of the rank's script."""
    started = []

    def start(shell, rank_text):
        rank, script = tmp_path / "rank", tmp_path / "start"
        rank.write_text(f"#!/bin/sh\n{rank_text}\n")
        rank.chmod(0o755)
        script.write_text(start_script(TORCHRUN, GANG, "h2").replace("/gpurun/bin/rank", str(rank)))
        environ = {**os.environ, "OUT": str(tmp_path), "GPURUN_RUN": str(tmp_path / "run"), "GPURUN_ATTEMPT": "2"}
        started.append(
            subprocess.Popen([*shell, str(script)], env=environ, stderr=subprocess.PIPE, start_new_session=True)
        )
        return started[0]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@SHELLS
def test_the_main_process_starts_every_rank_of_its_host_and_stays(start, tmp_path, shell):
    notes = "mkdir -p $GPURUN_RUN/ranks/2/$GPURUN_RANK.7.1; >$GPURUN_RUN/ranks/2/$GPURUN_RANK.7.1/end.3; exit 3"
    process = start(shell, f'printf "%s|" "$RANK" "$WORLD_SIZE" "$#" >"$OUT/$GPURUN_RANK"; {notes}')
    until(lambda: len(list(tmp_path.glob("run/ranks/2/*/end.3"))) == 2)
    assert (tmp_path / "1").read_text() == "1|3|0|"
    assert not (tmp_path / "2").exists(), "it is on the other host"
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)


@SHELLS
@pytest.mark.parametrize("code", [0, 5])
def test_a_rank_whose_end_cannot_be_noted_ends_the_container_or_nobody_would_know(start, shell, code):
    process = start(shell, f"exit {code}")
    assert process.wait(LIMIT_S) == UNTOLD
    assert b"rank 0 has ended, but gpurun could not write its exit code" in process.stderr.read()


@SHELLS
def test_a_signal_to_the_main_process_is_not_taken_for_the_end_of_its_ranks(start, tmp_path, shell):
    process = start(shell, ">$OUT/up.$GPURUN_RANK; exec sleep 60")
    until(lambda: len(list(tmp_path.glob("up.*"))) == 2)
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)


@pytest.mark.parametrize("launcher", ["torchrun", "tasks"])
def test_where_gpurun_starts_the_ranks_every_host_runs_them_and_no_sshd(launcher):
    made = plan(launcher, "h2", "h3")
    assert not made.has_launcher
    for host in made.hosts:
        at = host.run.index("--entrypoint")
        assert host.run[at + 1] == "/gpurun/bin/start"
        assert not set(SPEC.command) & set(host.run)
        assert not any(name.startswith(("sshd/", "launch/ssh")) for name in host.files)
        assert "launch/bin/start" in host.files
        assert "gpurun_variable=GPURUN_RANK " in host.files["launch/bin/rank"][0]


def test_a_launcher_that_takes_one_interface_for_all_is_refused_hosts_that_differ():
    with pytest.raises(BadInput, match="different network interfaces"):
        plan("mpirun", "h2", "h3")


def test_a_program_of_pytorch_that_mpirun_starts_finds_the_first_rank():
    """Accelerate's line `mpirun … python nlp_example.py` died: environment variable MASTER_ADDR expected."""
    launch = " ".join(plan("mpirun", "h2", "h4").launch)
    for each in ("MASTER_ADDR=<eth0 of h2>", "MASTER_PORT=23022", "GLOO_SOCKET_IFNAME=eth0"):
        assert launch.count(f" -x {each} ") == 1
    own = " ".join(plan("mpirun", "h2", "h4", spec=replace(SPEC, env={"GLOO_SOCKET_IFNAME": "ib0"})).launch)
    assert "GLOO_SOCKET_IFNAME" not in own and " -x MASTER_ADDR=<eth0 of h2> " in own
    assert " -x MASTER_ADDR=127.0.0.1 " in " ".join(plan("mpirun", "h2").launch)


def test_mpirun_starts_a_rank_for_each_gpu_in_rank_order_over_the_named_interface():
    launch = plan("mpirun", "h2", "h4").launch
    assert launch[0] == "mpirun"
    assert launch[launch.index("-H") + 1] == "h2:2,h4:2"
    assert (launch[launch.index("--map-by") + 1], launch[launch.index("--rank-by") + 1]) == ("slot", "slot")
    assert launch[launch.index("btl_tcp_if_include") + 1] == "eth0"
    assert launch[-1] == "/gpurun/bin/rank"


@pytest.mark.parametrize(("hosts", "is_direct"), [(2, False), (64, False), (65, True)])
def test_mpirun_itself_reaches_every_host_of_a_large_gang(hosts, is_direct):
    """Open MPI would start the 66th daemon from another host, which has no key of the job."""
    names = [f"n{at}" for at in range(hosts)]
    gang = replace(
        GANG, grants=tuple(Grant(name, (0,)) for name in names), interfaces=dict.fromkeys(names, "eth0"),
        addresses=dict.fromkeys(names, "10.0.0.1"),
    )  # fmt: skip
    argv = launcher_of(replace(SPEC, launcher="mpirun")).argv(SPEC, gang)
    assert ("-mca plm_rsh_no_tree_spawn 1" in " ".join(argv)) == is_direct


@pytest.mark.parametrize("named", [False, True])
def test_a_script_of_deepspeed_has_its_local_rank_as_a_flag_too(tmp_path, named):
    script = tmp_path / "train 'it'.py"
    script.write_text("import sys; print(sys.argv[1:])")
    command = (*(() if named else ("deepspeed", "--num_gpus=4")), str(script), "--deepspeed", "a b")
    spec, _ = settled(replace(SPEC, launcher="deepspeed", command=command), is_named=named)
    environ = {**os.environ, **told(launcher_of(spec))[1]}
    done = subprocess.run(spec.command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "['--local_rank=1', '--deepspeed', 'a b']\n"


def test_jax_is_told_who_coordinates_how_many_there_are_and_which_one_it_is():
    first, _, last = told(launcher_of(replace(SPEC, launcher="jax")))
    assert first["JAX_COORDINATOR_ADDRESS"] == last["JAX_COORDINATOR_ADDRESS"] == "10.0.0.2:23022"
    assert (last["JAX_NUM_PROCESSES"], last["JAX_PROCESS_ID"], last["CUDA_VISIBLE_DEVICES"]) == ("3", "2", "0")


def test_a_launcher_that_is_named_wins_over_one_that_is_typed():
    spec, _ = settled(replace(SPEC, launcher="tasks", command=("torchrun", "x.py")), is_named=True)
    assert (spec.launcher, spec.command) == ("tasks", ("python3", "-u", "x.py"))


def test_torchrun_takes_a_python_file_for_a_program_of_python():
    spec, _ = settled(replace(SPEC, launcher="torchrun", command=("train.py", "x.py")), is_named=True)
    assert spec.command == ("python3", "-u", "train.py", "x.py")
    tasks, _ = settled(replace(SPEC, launcher="tasks", command=("./train.py",)), is_named=True)
    assert tasks.command == ("./train.py",)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"launcher": "slurm"}, "there is no launcher 'slurm'"),
        ({"controller": "mpi", "min_gpus": 2}, "cannot use the controller mpi"),
        ({"launcher": "tasks", "controller": "mpi"}, "only the launcher horovod uses"),
        ({"launcher": "mpirun", "horovod": HorovodKnobs(cycle_time_ms=1.0)}, "only the launcher horovod uses"),
        ({"command": ("torchrun", "--nproc-per-node")}, "--nproc-per-node"),
        ({"command": ("torchrun", "--frob=1", "x.py")}, "--frob"),
        ({"command": ("mpirun", "-np", "4")}, "has no program after mpirun"),
        ({"command": ("mpirun",)}, "has no program after mpirun"),
    ],
)
def test_what_cannot_be_is_refused_with_the_word_that_is_wrong(changes, word):
    with pytest.raises(BadInput, match=word):
        settled(replace(SPEC, **changes), is_named="launcher" in changes)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pytorch", "did you mean torchrun?"), ("PyTorch", "torchrun"), ("ddp", "torchrun"), ("slurm", "srun"),
        ("mpi", "mpirun"), ("openmpi", "mpirun"), ("tf", "tensorflow"), ("hvd", "horovod"), ("torchrn", "torchrun"),
        ("accelerate", "accelerate launch"),
    ],
)  # fmt: skip
def test_a_launcher_of_another_name_is_named_as_gpurun_calls_it(name, hint):
    with pytest.raises(BadInput, match="there is no launcher") as caught:
        settled(replace(SPEC, launcher=name), is_named=True)
    first, all_names = caught.value.hint.split(" The launchers are: ")
    assert hint in first and all_names == ", ".join(NAMES)


@pytest.mark.parametrize("name", ["", "x" * 10_000, "\x1b[31m", "frob"])
def test_a_launcher_that_is_like_none_gets_the_list_alone(name):
    with pytest.raises(BadInput) as caught:
        settled(replace(SPEC, launcher=name), is_named=True)
    assert caught.value.hint.startswith("the launchers are: horovod")


@pytest.mark.parametrize("launcher", NAMES)
def test_an_elastic_gang_goes_on_or_is_formed_again_as_its_launcher_can(launcher):
    """Only Horovod's ranks go on; nobody but the launcher's own value says so, whatever a recipe claims."""
    elastic = replace(SPEC, launcher=launcher, min_gpus=2, reforms=launcher == "horovod")
    if launcher == "tensorflow":
        with pytest.raises(BadInput, match="tensorflow cannot be elastic"):
            settled(elastic, is_named=True)
        return
    spec, _ = settled(elastic, is_named=True)
    assert (spec.reforms, spec.is_live_elastic) == (launcher != "horovod", launcher == "horovod")
    assert not settled(replace(elastic, min_gpus=None), is_named=True)[0].reforms


def test_each_attempt_of_a_gang_that_is_formed_again_is_a_gang_of_the_size_it_has_got():
    spec, _ = settled(replace(SPEC, launcher="torchrun", min_gpus=2, gpus=8), is_named=True)
    assert (spec.sized(6).gpus, spec.sized(6).min_gpus, spec.wants.reforms) == (6, None, True)
    live, _ = settled(replace(SPEC, launcher="horovod", min_gpus=2, gpus=8), is_named=True)
    assert live.sized(6) == live


def test_every_launcher_says_what_an_image_needs_for_it():
    assert all(launcher_of(replace(SPEC, launcher=name)).needs for name in NAMES)
