"""Shell texts that start launchers: what they start, and on which hosts that is right."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placed_gangs import GANG, SPEC

from gpurun.errors import BadInput
from gpurun.jobs.spec import Constraints
from gpurun.launch.launchers import settled
from gpurun.launch.launchers.choosing import once_on_hosts
from gpurun.launch.launchers.direct import SRUN, environment
from gpurun.launch.launchers.line import MOST_LAUNCHES, launches_in
from gpurun.launch.launchers.words import simple_commands


def command_lines(text):
    return [" ".join(words) for words in simple_commands(text)]


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("a b; c && d || e & f | g", ["a b", "c", "d", "e", "f", "g"]),
        ("# don't\na # it's\nb#c '#d'", ["a", "b#c #d"]),
        ("a \\\n  b\\\nc", ["a bc"]),
        ("a 'x y' \"z $Q\" \\$w ''", ["a x y z $Q $w "]),
        ("a > out 2>&1 <in &>> all b", ["a b"]),
        ("if ! a; then b; else c; fi", ["a", "b", "c", "fi"]),
        ("f() { a; }", ["f", "a", "}"]),
        ("(cd x && a)", ["cd x", "a"]),
        ("x=$(a $(b 'c d')) y=`e`", ["x=$(a $(b 'c d')) y=`e`", "a $(b 'c d')", "b c d", "e"]),
        ("A=(x\n 'y w' # z's\n \"$V\" $(c)) b", ["A=x y w $V $(c) b", "c"]),
        ("cat > f <<'EOF'\na\nEOF\nb", ["cat", "b"]),
        ("bash <<-EOF\n\ta\n\tEOF\nb", ["bash", "b", "a"]),
        ("cat <<< x; diff <(a) <(b)", ["cat", "diff", "a", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ('echo "it\'s" ${A:-b c} `', ["echo it's ${A:-b c} `"]),
    ],
)
def test_a_text_is_read_as_its_simple_commands(text, commands):
    assert command_lines(text) == commands


MMCV = """#!/usr/bin/env bash
CONFIG=$1
GPUS=$2
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
PORT=${PORT:-29500}
MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
PYTHON=${PYTHON:-"python"}

PYTHONPATH="$(dirname $0)/..":$PYTHONPATH $PYTHON -m torch.distributed.launch \\
    --nnodes=$NNODES --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR \\
    --nproc_per_node=$GPUS --master_port=$PORT $(dirname "$0")/train.py $CONFIG --launcher pytorch ${@:3}
"""
MEGATRON = """
GPUS_PER_NODE=8
# Change for multinode config
MASTER_ADDR=localhost
MASTER_PORT=6000
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK \\
    --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt2.py --config fixed.yaml
"""
TIMM = """#!/bin/bash
NUM_PROC=$1
shift
torchrun --nproc_per_node=$NUM_PROC train.py "$@"
"""
SLURM = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-task=2
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address)
srun torchrun --nnodes 4 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint $head_node_ip:29500 ddp.py
"""
ACCELERATE = "accelerate launch --num_machines $NNODES --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR"
TEXTS = [
    # GPUs, text, arguments, GPUs on each host; or the words of the refusal
    (16, MMCV, "configs/mask_rcnn.py 8", 8),
    (8, MMCV, "configs/mask_rcnn.py 8", 8),
    (4, MMCV, "configs/mask_rcnn.py 8", "starts 8 processes on each host, but the job has 4 GPUs"),
    (12, MMCV, "configs/mask_rcnn.py 8", "starts 8 processes on each host, but the job has 12 GPUs"),
    (8, MEGATRON, "", 8),
    (16, MEGATRON, "", "starts 8 processes on one host, but the job has 16 GPUs"),
    (4, TIMM, "4 /data/imagenet --model seresnet34 --amp", 4),
    (16, TIMM, "8 /data/imagenet", 8),
    (8, SLURM, "", "calls srun"),
    (8, "for lr in 1 2; do sbatch --nodes=2 job.sh $lr; done", "", "calls sbatch"),
    (16, "python -m torch.distributed.launch --nproc_per_node=8 x.py", "", "starts 8 processes on one host"),
    (8, "python -m torch.distributed.launch --nproc_per_node=8 x.py", "", 8),
    (8, "mpirun -n 128 -npernode 4 -hostfile /job/hostfile python x.py", "", "starts 128 processes on one host"),
    (8, "mpirun -np 1 ./all_reduce_perf -g 8", "", 8),
    (8, "deepspeed --num_gpus=4 x.py", "", "starts 4 processes on one host"),
    (8, "torchrun --standalone --nproc_per_node=1 eval.py", "", "starts 1 process on one host"),
    (4, ": ${GPUS:=4}\ntorchrun --nproc_per_node=${GPUS} x.py", "", 4),
    (4, "torchrun --standalone --nnodes=1 --nproc_per_node=4 x.py", "", 4),
    (8, "torchrun --standalone --nproc_per_node=gpu x.py", "", 8),
    (8, "torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) x.py", "", None),
    (8, "torchrun --nnodes=$NNODES --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:29400 x.py", "",
     4),
    (8, "torchrun --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 x.py", "",
     "starts 4 processes on one host"),
    (8, "torchrun --nnodes=2 --nproc_per_node=4 --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR x.py", "", 4),
    (8, "torchrun --nnodes=2 --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR x.py", "", 4),
    (9, "torchrun --nnodes=2 --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR x.py", "", "cannot be divided by 2"),
    (16, "torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=192.168.1.19 x.py", "",
     "names hosts for torchrun, but"),
    (16, "NODES=$2\ntorchrun --nnodes=$NODES --node_rank=$3 --master_addr=$4 x.py", "cfg 2 0 host1",
     "names hosts for torchrun, but"),
    (8, "export OMP_NUM_THREADS=1\ntorchrun $EXTRA train.py", "", 8),
    (8, 'ARGS=(\n  --nproc_per_node 4\n  --nnodes ${NNODES:-1}\n)\ntorchrun "${ARGS[@]}" train.py', "", 4),
    (8, "OPTIONS='--nproc_per_node=4'\nrun_cmd=\"torchrun ${OPTIONS} train.py\"\necho ${run_cmd}\neval ${run_cmd}", "",
     4),
    (8, "export LAUNCHER='accelerate launch --config_file fsdp.yaml'\n$LAUNCHER train.py", "", 8),
    (4, "deepspeed --num_gpus=4 train.py", "", 4),
    (16, f"{ACCELERATE} --multi_gpu --num_processes $((NNODES * 8)) x.py", "", 8),
    (12, f"{ACCELERATE} --multi_gpu --num_processes $(( $NNODES*$EACH )) x.py\nEACH=4", "", 4),
    (8, f"{ACCELERATE} --use_fsdp --num_processes $((NNODES * NPROC_PER_NODE)) x.py", "", None),
    (12, f"{ACCELERATE} --num_processes $((NNODES * 8)) x.py", "", "starts 8 processes on each host"),
    (8, f"{ACCELERATE} --num_processes $((NNODES * NPROC_PER_NODE)) x.py", "", 8),
    (8, f"{ACCELERATE} --multi_gpu --num_processes 8 x.py", "", 8),
    (8, f"{ACCELERATE} --use_deepspeed --num_processes $((NNODES * 4)) x.py", "", "starts 4 processes on one host"),
    (8, f"{ACCELERATE} --use_deepspeed --deepspeed_multinode_launcher=standard --num_processes $((4*NNODES)) x", "", 4),
    (16, f"WORLD=$((2 * 8))\n{ACCELERATE.replace('$NNODES', '2')} --num_processes $WORLD x.py", "", 8),
    (16, "accelerate launch --num_machines 2 --machine_rank $1 --num_processes 16 x.py", "0", "names hosts for"),
    (8, "fabric run --num-nodes=$NNODES --node-rank=$NODE_RANK --main-address=$MASTER_ADDR x.py", "", None),
    (16, "export FORCE_TORCHRUN=1\nNPROC_PER_NODE=8 llamafactory-cli train x.yaml", "", 8),
    (8, "export FORCE_TORCHRUN=true\nllamafactory-cli train x.yaml 2>&1 | tee x", "", None),
    (8, "llamafactory-cli train x.yaml | tee x", "", 8),
    (8, "NNODES=2 NODE_RANK=0 MASTER_ADDR=h FORCE_TORCHRUN=1 llamafactory-cli train x.yaml", "", "names hosts for"),
    (16, "export NPROC_PER_NODE=8\nswift sft --model m", "", 8),
    (4, "torchrun --nproc_per_node=2 a.py & torchrun --nproc_per_node=2 b.py & wait", "", 4),
    (2, "torchrun --nproc_per_node=2 a.py & torchrun --nproc_per_node=2 b.py & wait", "", "starts 4 processes on each"),
    (2, "torchrun --nproc_per_node=2 a.py; torchrun --nproc_per_node=2 b.py & wait", "", 2),
    (8, "composer -n 4 t.py", "", "starts 4 processes on one host"),
    (4, "cd /workspace/a || exit\nnohup bash -c 'torchrun --nproc_per_node=2 x.py' > log &\nwait", "", 2),
    (8, "torchrun --nproc_per_node=8 train.py && torchrun --nproc_per_node=1 eval.py", "", 8),
    (8, "torchrun --frobnicate train.py", "", 8),
    (8, 'CMD=( "torchrun" "--standalone" "--nproc_per_node=${DGXNGPU}" )\n"${CMD[@]}" train.py', "", 8),
    (8, "if $MULTI; then CMD=( torchrun --nproc_per_node=4 ); else CMD=( python -u ); fi\n${CMD[@]} train.py", "", 4),
    (4, 'NUM=${NUM:-4}\nD=${D:-"-m torch.distributed.launch --nproc_per_node=$NUM"}\npython $D train.py', "", 4),
]  # fmt: skip
"""Scripts as people write them."""


@pytest.mark.parametrize(("gpus", "text", "arguments", "becomes"), TEXTS)
def test_a_text_that_starts_launchers_runs_once_on_each_host_where_that_is_right(gpus, text, arguments, becomes):
    launches = launches_in(text, tuple(arguments.split()))
    spec = replace(SPEC, gpus=gpus, command=("bash", "train.sh"))
    if isinstance(becomes, str):
        with pytest.raises(BadInput, match=r"train\.sh") as refused:
            once_on_hosts(spec, launches, "train.sh")
        assert becomes in refused.value.message and refused.value.hint
        return
    made, said = once_on_hosts(spec, launches, "train.sh")
    assert (made.launcher, made.one_per_host, made.constraints.gpus_per_host) == ("tasks", True, becomes)
    assert made.command == spec.command and "once on each host" in said


def test_behind_srun_a_text_finds_the_hosts_by_slurms_variables():
    text = (
        "torchrun --nproc_per_node=4 --nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR x.py"
    )
    spec = replace(SPEC, gpus=8, command=("srun", "bash", "-c", f"cd x; {text}"))
    for made, _said in (
        settled(spec, is_named=False),
        once_on_hosts(spec, launches_in(text, by_srun=True), "x", by_srun=True),
    ):
        assert (made.launcher, made.one_per_host, made.constraints.gpus_per_host) == ("srun", True, 4)
    gang = replace(GANG, one_per_host=True)
    told = environment(SRUN, gang, gang.places[1])
    assert [told[name] for name in ("SLURM_NNODES", "SLURM_NODEID", "MASTER_ADDR", "NNODES")] == [
        "2",
        "1",
        "10.0.0.2",
        "2",
    ]
    assert not {"RANK", "WORLD_SIZE"} & {*told}
    with pytest.raises(BadInput, match="4 processes on one host"):
        once_on_hosts(spec, launches_in(text), "x")


@pytest.mark.parametrize(
    ("text", "proposed"),
    [
        (SLURM, "-- srun torchrun --nnodes 4 --nproc_per_node 2 --rdzv_backend c10d ddp.py"),
        ("export L=\"accelerate launch --num_machines $N --main_process_ip $(a) --debug \"\nsrun -c 4 $L t.py",
         "-- srun accelerate launch --debug t.py\n    gpurun reads the line, and starts the ranks without srun\n"
         "    -c 4: write "),
        ("export L=\"torchrun --nproc_per_node 4 --nnodes $N --master_addr $(a) \" C='x.py --lr 1'\n"
         "srun --jobid $J bash -c '$L --node_rank $SLURM_PROCID $C' 2>&1 | tee x",
         "-- srun torchrun --nproc_per_node 4 x.py --lr 1\n"),
        ("srun -w $H bash -c \"cd x; ./a $Y\"", "-- srun bash -c 'cd x; ./a …'"),
        ("torchrun --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 t.py 'a b'",
         "-- torchrun --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 t.py 'a b'"),
        ("mpirun -n 128 -hostfile /job/hosts -x A=1 ./a", "-n 128 … -- mpirun -n 128 -hostfile /job/hosts -x A=1 ./a"),
    ],
)  # fmt: skip
def test_a_refused_text_has_the_line_to_write_instead(text, proposed):
    with pytest.raises(BadInput) as refused:
        once_on_hosts(replace(SPEC, gpus=8), launches_in(text), "train.sh")
    assert proposed in refused.value.hint


def test_a_text_that_leaves_its_launcher_in_the_background_is_refused():
    """The rank would end with the text, its container with the rank, and the job would succeed."""
    left = (
        "nohup torchrun x.py > log 2>&1 &", "cd a && torchrun x.py &\necho started; PID=$!", "deepspeed x.py & exit 0",
        "if a; then torchrun x.py & fi", "torchrun x.py 2>&1 | tee x &\n# wait\n",
    )  # fmt: skip
    stays = (
        "torchrun x.py &\nwait", "torchrun x.py & tail -f log", "torchrun x.py && a", "a & torchrun x.py",
        "torchrun x.py", "torchrun x.py >& log", "torchrun x.py &> log", "torchrun x.py & p=$!; wait $p; echo",
        "torchrun x.py |& tee",
    )  # fmt: skip
    for text in left:
        spec = replace(SPEC, command=("bash", "-c", text))
        for wanted in (replace(spec, gpus=1), spec):
            with pytest.raises(BadInput, match=r"in the background \(&\) and does not wait") as refused:
                settled(wanted, is_named=False)
        assert "wait" in refused.value.hint
        with pytest.raises(BadInput, match=r"train\.sh starts"):
            once_on_hosts(spec, launches_in(text), "train.sh")
    for text in stays:
        assert once_on_hosts(SPEC, launches_in(text), "x")[0].one_per_host, text


def test_a_text_without_a_launcher_starts_none():
    for text in (
        "python train.py",
        "echo torchrun",
        "# torchrun x.py",
        "cat <<E\ntorchrun x.py\nE",
        "",
        "'",
        "\0",
        "$",
    ):
        assert launches_in(text) == ()


def test_the_gpus_of_a_host_that_a_person_wants_do_not_change():
    spec = replace(SPEC, gpus=8, constraints=Constraints(gpus_per_host=4))
    assert once_on_hosts(spec, launches_in("torchrun x.py"), "x.sh")[0].constraints.gpus_per_host == 4
    with pytest.raises(BadInput, match="for 8 GPUs on each host, but gpus_per_host is 4"):
        once_on_hosts(spec, launches_in("torchrun --standalone x.py"), "x.sh")


HOSTILE = [
    "$(" * 20_000, "(" * 20_000, '"' * 19_999, "'" * 19_999, "`" * 19_999, "a=(" * 10_000, "${A:-" * 10_000,
    "<<A\n" * 10_000, 'x"$(' * 10_000, "torchrun $A\n" * 10_000, "torchrun " + "$A " * 10_000,
    "\n".join(f"A{at}=" + f"$A{at + 1}" * 50 for at in range(100)) + "\ntorchrun $A0",
    "A=$B\nB=$A\ntorchrun $A x.py", "eval torchrun\n" * 5_000, "torchrun " + "\\\n" * 10_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_text_is_read_quickly(text):
    begun = time.process_time()
    assert len(launches_in(text, ("$1", "$@"))) <= MOST_LAUNCHES
    assert time.process_time() - begun < 5


PIECES = ("torchrun", "python -m torch.distributed.run", "$", "$(", "${", "}", ")", "'", '"', "`", "\\", "\n", " ",
          "A=", "(", "$A", "<<E", "E", "#", "--nnodes=2", "--nproc_per_node", "srun", "eval",
          ";", "\0", "é")  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join), st.lists(st.sampled_from(PIECES), max_size=2))
def test_whatever_a_text_is_it_runs_or_is_refused(text, arguments):
    launches = launches_in(text, tuple(arguments))
    if launches:
        try:
            made, _ = once_on_hosts(replace(SPEC, gpus=8), launches, "x")
        except BadInput as refused:
            assert refused.hint
            return
        assert 8 % (made.constraints.gpus_per_host or 1) == 0
