"""Launchers that run themselves once on each host: what they are told, and what of a typed line stays."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace

import pytest
from placed_gangs import GANG, SPEC

from gpurun.errors import BadInput
from gpurun.launch.launchers import launcher_of, settled
from gpurun.launch.launchers.choosing import Clue, ProgramClues, choose_launcher
from gpurun.launch.launchers.direct import SRUN, TASKS, environment

EACH = replace(GANG, one_per_host=True)
"""Three GPUs: two on h2, one on h3."""
HOSTS = {
    "accelerate": "--num_machines 2 --machine_rank 1 --num_processes 2 --main_process_ip 10.0.0.2 "
    "--main_process_port 23022 --gpu_ids all",
    "torchrun": "--nnodes 2 --node_rank 1 --nproc_per_node 1 --master_addr 10.0.0.2 --master_port 23022",
    "tune": "--nnodes 2 --node_rank 1 --nproc_per_node 1 --rdzv_endpoint 10.0.0.2:23022",
    "fabric": "--devices 1 --num-nodes 2 --node-rank 1 --main-address 10.0.0.2 --main-port 23022",
    "composer": "--nproc 1 --world_size 3 --node_rank 1 --base_rank 2 --master_addr 10.0.0.2 --master_port 23022",
    "colossalai": "--nproc_per_node 1 --master_addr 10.0.0.2 --master_port 23022 --extra_launch_args "
    "nnodes=2,node_rank=1",
}
"""On h3. Accelerate divides processes by machines: one process on h3, two on h2."""


def read(line, *, gpus=3, launcher=None, **spec):
    words = tuple(shlex.split(line))
    given = replace(SPEC, command=words, gpus=gpus, **spec, **({} if launcher is None else {"launcher": launcher}))
    return settled(given, is_named=launcher is not None)


@pytest.fixture
def run(tmp_path):
    """Return what a launcher of a line is called with, on the second of two hosts."""
    for name in (
        "accelerate",
        "torchrun",
        "tune",
        "fabric",
        "axolotl",
        "llamafactory-cli",
        "python3",
        "composer",
        "colossalai",
        "swift",
    ):
        (tmp_path / name).write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"\n')
        (tmp_path / name).chmod(0o755)

    def started(line, *, gang=EACH, node=1, **settings):
        spec, _ = read(line, **settings)
        assert (spec.launcher, spec.one_per_host) == ("tasks", True)
        env = {**spec.env, **environment(TASKS, gang, gang.places[node])}
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(spec.command, env={**env, "PATH": path}, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return started


@pytest.mark.parametrize(
    ("line", "called"),
    [
        ("accelerate launch train.py --lr 1", "accelerate launch --multi_gpu {accelerate} train.py --lr 1"),
        (
            "accelerate launch --mixed_precision bf16 --num_processes=3 -m pkg.train 'a b'",
            "accelerate launch --multi_gpu {accelerate} --mixed_precision bf16 -m pkg.train 'a b'",
        ),
        (
            "accelerate launch --config_file fsdp.yaml --machine-rank 3 --main_process_ip n1 t.py --num_machines 9",
            "accelerate launch {accelerate} --deepspeed_multinode_launcher standard --config_file fsdp.yaml "
            "t.py --num_machines 9",
        ),
        ("accelerate launch --use_fsdp t.py", "accelerate launch {accelerate} --use_fsdp t.py"),
        (
            "accelerate launch --multi_gpu --config_file c.yaml t.py",
            "accelerate launch --multi_gpu {accelerate} --deepspeed_multinode_launcher standard "
            "--config_file c.yaml t.py",
        ),
        (
            "python3 -m accelerate.commands.launch --use_deepspeed --zero_stage 3 t.py",
            "python3 -m accelerate.commands.launch {accelerate} --deepspeed_multinode_launcher standard "
            "--use_deepspeed --zero_stage 3 t.py",
        ),
        ("tune run --nproc_per_node 3 full_finetune --config x", "tune run {tune} full_finetune --config x"),
        ("fabric run --devices=4 --precision bf16-mixed t.py", "fabric run {fabric} --precision bf16-mixed t.py"),
        (
            "axolotl train c.yml --learning-rate 1 -- --num_processes 3 --mixed_precision bf16",
            "axolotl train c.yml --learning-rate 1 -- --mixed_precision bf16 --multi_gpu {accelerate}",
        ),
        ("axolotl train c.yml --launcher torchrun", "axolotl train c.yml --launcher torchrun -- {torchrun}"),
        ("llamafactory-cli train x.yaml a=1", "llamafactory-cli train x.yaml a=1"),
        (
            "fabric run model t.py --lr 1 --devices 2 --precision=16 --main-port=5 -- --devices 9",
            "fabric run model {fabric} --precision=16 t.py --lr 1 -- --devices 9",
        ),
        (
            "axolotl train c.yml --num-processes 3 --main_process_port=5 --learning-rate 1",
            "axolotl train c.yml --learning-rate 1 -- --multi_gpu {accelerate}",
        ),
        (
            "composer -n 2 --stdout '{rank}.txt' --base_rank 4 t.py a=1",
            "composer {composer} --stdout {{rank}}.txt t.py a=1",
        ),
        ("python3 -m composer.cli.launcher -m pkg 'a b'", "python3 -m composer.cli.launcher {composer} -m pkg 'a b'"),
        ("colossalai run --nproc_per_node 4 --host a,b t.py -p 3d", "colossalai run {colossalai} t.py -p 3d"),
        (
            "colossalai run --extra_launch_args max_restarts=2,master_port=5 -m pkg x",
            "colossalai run {colossalai},max_restarts=2 -m pkg x",
        ),
        ("swift sft --model m", "swift sft --model m"),
    ],
)
def test_a_launcher_is_told_where_it_is_and_the_rest_of_its_line_stays(run, line, called):
    assert run(line) == shlex.split(called.format(**HOSTS))


def test_torchrun_itself_runs_once_on_each_host_if_somebody_wants_it(run):
    line = "torchrun --standalone --nproc-per-node=8 --max-restarts=3 --log-dir /l t.py"
    assert run(line, one_per_host=True) == shlex.split(
        f"torchrun {HOSTS['torchrun']} --max-restarts=3 --log-dir /l t.py"
    )
    _spec, said = read(line, one_per_host=True)
    assert "--standalone --nproc-per-node=8" in "\n".join(said)
    assert not read("torchrun t.py")[0].one_per_host


def test_accelerate_refuses_multi_gpu_with_one_process_as_in_a_rehearsal(run):
    alone = replace(EACH, grants=EACH.grants[1:])
    assert "--multi_gpu" not in run("accelerate launch t.py", gang=alone, node=0)
    assert "--multi_gpu" not in run("accelerate launch --multi_gpu t.py", gang=alone, node=0)


@pytest.mark.parametrize(
    ("text", "is_alone"),
    [
        ("distributed_type: 'NO'\n", True), ("distributed_type: NO\nnum_processes: 1\n", True),
        ('{"distributed_type": "NO",\n"x": 1}', True), ("distributed_type: MULTI_GPU\nuse_cpu: 'NO'\n", False),
        ("# distributed_type\n", False), ("distributed_type: FSDP\n", False), ("", False),
    ],
)  # fmt: skip
def test_a_configuration_file_for_one_process_does_not_train_on_each_host_alone(run, tmp_path, text, is_alone):
    (tmp_path / "a 'b'.yaml").write_text(text)
    line = f"accelerate launch --config_file {shlex.quote(str(tmp_path))}/'a '\\''b'\\''.yaml' t.py"
    assert ("--multi_gpu" in run(line)) == is_alone
    alone = replace(EACH, grants=EACH.grants[1:])
    assert "--multi_gpu" not in run(line, gang=alone, node=0)
    assert "--multi_gpu" not in run(f"{line.removesuffix('t.py')} --use_fsdp t.py")


@pytest.mark.parametrize("word", ["'", '"', "$HOME", "$(id)", "`id`", "a\nb", " ", "", "*", "\\", "é", "--", "&&"])
def test_no_word_of_the_line_is_read_by_a_shell(run, word):
    quoted = shlex.quote(word)
    assert "\n".join(run(f"accelerate launch --config_file {quoted or chr(39) * 2} t.py {quoted}")).endswith(
        f"--config_file\n{word}\nt.py\n{word}"
    )


def test_what_is_replaced_is_said_and_what_is_set_too():
    spec, said = read("NNODES=4 MASTER_ADDR=n1 FORCE_TORCHRUN=1 llamafactory-cli train x.yaml")
    assert dict(spec.env) == {"FORCE_TORCHRUN": "1"}
    assert "NNODES=4" in "\n".join(said) and "MASTER_ADDR=n1" in "\n".join(said)
    assert read("accelerate launch --machine_rank 1 --gpu_ids 0,1 t.py")[1][1].startswith(
        "  left out: --machine_rank 1 --gpu_ids 0,1 (gpurun chooses hosts"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("accelerate launch --num_processes 16 t.py", "asks for 16 processes, but the job has 3 GPUs"),
        ("accelerate launch --cpu --config_file c.yml t.py", "cannot combine --cpu with --config_file"),
        ("accelerate launch --use_cpu --use_fsdp t.py", "cannot combine --use_cpu with --use_fsdp"),
        ("accelerate launch --no-such t.py", "does not know the flag --no-such"),
        ("axolotl train c.yml --launcher python", "axolotl starts no processes on other hosts"),
        ("axolotl train c.yml --num-processes 16", "asks for 16 processes, but the job has 3 GPUs"),
        ("composer --world_size 16 t.py", "asks for 16 processes, but the job has 3 GPUs"),
        ("composer --frob t.py", "does not know the flag --frob"),
        ("fabric run t.py --devices=8 --num-nodes 2", "asks for 16 processes"),
        ("colossalai run --extra_launch_args frob=1 t.py", "does not know frob=1 in --extra_launch_args"),
    ],
)
def test_what_gpurun_cannot_do_is_refused(line, words):
    with pytest.raises(BadInput, match=words) as refused:
        read(line)
    assert refused.value.hint


def test_accelerate_on_cpus_forms_one_group(run):
    """It starts one process for `--cpu`, whatever the number; mpirun, its other way, needs the variable, too."""
    line = "accelerate launch --cpu --num_processes 3 t.py"
    spec, said = read(line)
    assert dict(spec.env) == {"ACCELERATE_USE_CPU": "1"}
    assert "  left out: --cpu (gpurun sets ACCELERATE_USE_CPU=1 for each process instead)" in said
    assert run(line) == ["accelerate", "launch", "--multi_gpu", *HOSTS["accelerate"].split(), "t.py"]
    assert dict(read("axolotl train c.yml -- --use_cpu")[0].env) == {"ACCELERATE_USE_CPU": "1"}
    alone = read("accelerate launch --cpu t.py", gpus=1)[0]  # as it was typed
    assert (alone.command, dict(alone.env)) == (("accelerate", "launch", "--cpu", "t.py"), {})


def test_a_line_that_starts_several_processes_needs_several_gpus():
    for line in ("composer -n 8 t.py", "tune run --nproc_per_node 2 x", "colossalai run --nproc_per_node 4 t.py"):
        with pytest.raises(BadInput, match="asks for several processes, but the job has 1 GPU"):
            read(line, gpus=1)
    assert read("composer -n 1 --whatever t.py", gpus=1)[0].command == ("composer", "-n", "1", "--whatever", "t.py")


def test_another_launcher_beside_the_typed_one_is_refused_and_copies_are_run_if_somebody_wants_them():
    with pytest.raises(BadInput, match="which itself starts all processes of a host"):
        read("accelerate launch t.py", launcher="torchrun")
    copies, said = read("accelerate launch t.py", launcher="tasks")
    assert not copies.one_per_host and "each of 3 ranks starts accelerate launch itself" in said[0]


def test_mpirun_with_one_process_for_each_host_is_asked_for_by_the_flag():
    with pytest.raises(BadInput, match="asks for 2 processes") as refused:
        read("mpirun -np 2 -npernode 1 ./a", gpus=16)
    assert "--one-per-host" in refused.value.hint
    spec, _ = read("mpirun -np 2 -npernode 1 ./a", gpus=16, one_per_host=True)
    assert (spec.launcher, spec.one_per_host) == ("mpirun", True)


def test_behind_srun_a_program_has_slurms_variables_and_pytorchs():
    spec, said = read("srun -N 2 --export=ALL,A=1 python3 train.py")
    assert (spec.launcher, spec.command, dict(spec.env)) == ("srun", ("python3", "train.py"), {"A": "1"})
    assert "variables of Slurm" in said[0]
    told = environment(launcher_of(spec), GANG, GANG.places[2])
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES", "RANK", "MASTER_ADDR")
    assert [told[name] for name in names] == ["2", "0", "1", "3", "2", "2", "10.0.0.2"]
    assert (told["SLURM_TASKS_PER_NODE"], told["SLURM_JOB_NODELIST"], told["SLURM_JOB_ID"]) == ("2,1", "h2,h3", "1")
    assert "SLURM_NTASKS_PER_NODE" not in told and "CUDA_VISIBLE_DEVICES" not in told
    assert environment(SRUN, EACH, EACH.places[1])["SLURM_NTASKS_PER_NODE"] == "1"


@pytest.mark.parametrize(
    ("clue", "launcher"), [("torch.distributed", "srun"), ("mpi4py", "mpirun"), ("horovod", "horovod"), ("", "srun")]
)
def test_a_program_behind_srun_that_needs_mpi_or_horovod_keeps_them(clue, launcher):
    clues = {Clue(clue, {"torch.distributed": "torchrun", "mpi4py": "mpirun"}.get(clue, clue), clue): "line 1"}
    spec = replace(SPEC, command=("srun", "python3", "train.py"))
    choice = choose_launcher(spec, (), ProgramClues(clues=clues if clue else {}))
    assert (choice.spec.launcher, choice.doubt) == (launcher, None)
    assert settled(choice.spec, is_named=True)[0].command == ("python3", "train.py")


def test_a_program_behind_srun_that_gpurun_does_not_know_may_use_mpi():
    """Without MPI's launcher, each process of an MPI program is one of its own, and all succeed."""

    def chosen(line, gpus=4, **found):
        spec = replace(SPEC, gpus=gpus, command=tuple(shlex.split(line)))
        return choose_launcher(spec, (), ProgramClues(**found))

    mpi = chosen("srun --mpi=pmix ./xhpl", unknown="./xhpl", unread="gpurun does not know what ./xhpl does")
    assert (mpi.spec.launcher, mpi.doubt) == ("mpirun", None) and "--mpi says that ./xhpl uses MPI" in mpi.said[0]
    assert settled(mpi.spec, is_named=True)[0].command == ("./xhpl",)
    for line in ("srun ./xhpl", "srun --mpi=none ./xhpl"):
        doubt = chosen(line, unknown="./xhpl", unread="x").doubt
        assert f"--launcher mpirun -- {line}" in doubt.hint and f"--launcher srun -- {line}" in doubt.hint
        assert settled(replace(SPEC, launcher="mpirun", command=tuple(line.split())), is_named=True)[0].command == (
            "./xhpl",
        )
        assert chosen(line, gpus=1, unknown="./xhpl", unread="x").doubt is None
    python = chosen("srun --mpi=pmi2 python3 x.py", unread="gpurun cannot read x.py")
    assert (python.spec.launcher, python.doubt) == ("srun", None) and "--launcher mpirun" in python.said[0]
    assert chosen("srun --mpi=pmix bash -c 'cd x; ./a'", is_harmless=True).said == python.said
    assert chosen("srun hostname", is_harmless=True).spec.launcher == "srun"
