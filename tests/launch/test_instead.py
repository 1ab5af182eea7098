"""Launchers that gpurun cannot start: the refusal has the line that does the same, and this line is read."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placed_gangs import SPEC

from gpurun.errors import BadInput
from gpurun.launch.launchers import settled
from gpurun.launch.launchers.table import LAUNCHERS

INSTEAD = [
    # what is typed with -n 8, and what is proposed
    ("torchx run -s local_cwd dist.ddp -j 2x4 --gpu 4 --env A=1,B=2 --script t.py -- --lr 1",
     "-n 8 … -- A=1 B=2 torchrun --nnodes=2 --nproc-per-node=4 t.py --lr 1"),
    ("torchx run -s slurm -cfg partition=x dist.ddp -j 1x8 -m pkg.t", "-n 8 … -- torchrun --nproc-per-node=8 -m pkg.t"),
    ("torchx run dist.spmd --script t.py", "-n 8 … -- torchrun t.py"),
    ("torchx run --dryrun utils.echo --msg hello", "-n 8 … -- torchrun SCRIPT.py ARGUMENTS"),
    ("torchx run ./mine.py:ddp -j 2x1", "-n 8 … -- torchrun SCRIPT.py ARGUMENTS"),
    ("jsrun -n6 -c1 -g1 -a1 -r3 ./a 1", "-n 6 … -- mpirun ./a 1"),
    ("jsrun --nrs=2 -a 4 -E A=1 -b packed:1 python3 x.py", "-n 8 … -- mpirun -x A=1 python3 x.py"),
    ("jsrun --frob 2 ./a", "-n 8 … -- mpirun PROGRAM ARGUMENTS"),
    ("flux run -N4 -n16 -g1 -o cpu-affinity=per-task --env=A=1 ./a -n 3", "-n 16 … -- mpirun -x A=1 ./a -n 3"),
    ("aprun -n 8 -d 4 -e A=1 python3 x.py", "-n 8 … -- mpirun -x A=1 python3 x.py"),
    ("mpirun_rsh -np 4 -hostfile h A=1 B='x y' ./a", "-n 4 … -- mpirun -x A=1 -x 'B=x y' ./a"),
    ("ibrun python3 -m torch.distributed.run --nnodes=2 t", "-n 8 … -- python3 -m torch.distributed.run --nnodes=2 t"),
    ("A=1 ibrun python3 x.py", "-n 8 … -- A=1 mpirun python3 x.py"),
    ("python3 -m paddle.distributed.launch --log_dir=l --ips=a,b --gpus 0,1 t.py -c c",
     "-n 8 --gpus-per-host 8 --one-per-host … -- python3 -m paddle.distributed.launch --log_dir=l t.py -c c"),
    ("xtuner train c.py", "-n 8 --gpus-per-host 8 --one-per-host … -- xtuner train c.py"),
    ("docker run --rm --gpus all -v /a:/b me/x:1 python3 t.py 'a b'", "-n 8 --image me/x:1 … -- python3 t.py 'a b'"),
    ("srun -l apptainer exec --nv docker://me/x torchrun t.py", "-n 8 --image me/x … -- torchrun t.py"),
    ("singularity exec --nv x.sif bash -c 'cd a; ./b'", "-n 8 --image IMAGE … -- bash -c 'cd a; ./b'"),
    ("apptainer exec x.sif ./a", "-n 8 --image IMAGE … -- COMMAND"),
    ("salloc -N 2 --gres=gpu:4 torchrun t.py", "-n 8 … -- torchrun t.py"),
    ("sky launch -c x t.yaml", "-n 8 … -- bash SCRIPT"),
]  # fmt: skip


def test_the_refusal_has_the_line_that_does_the_same():
    for line, proposed in INSTEAD:
        spec = replace(SPEC, gpus=8, command=tuple(shlex.split(line)))
        with pytest.raises(BadInput) as refused:
            settled(spec, is_named=False)
        assert f"gpurun submit {proposed}\n" in f"{refused.value.hint}\n", line
        gpus, command = int(re.search("-n ([0-9]+)", proposed)[1]), shlex.split(proposed.partition(" -- ")[2])
        once = "--one-per-host" in proposed
        settled(replace(spec, gpus=gpus, command=tuple(command), one_per_host=once, launcher="tasks"), is_named=once)


def test_a_launcher_that_runs_itself_or_its_processes_start_no_other_launcher():
    for line, hint in (
        ("accelerate launch --no_python torchrun t.py", "command: torchrun t.py"),
        ("accelerate launch -m torch.distributed.run t.py", "command: python3 -u -m torch.distributed.run t.py"),
        ("composer -c deepspeed t.py", "command: deepspeed t.py"),
        ("mpirun -np 8 -x A=1 singularity exec --nv x.sif python3 t.py",
         "--image IMAGE … -- mpirun -np 8 -x A=1 python3 t.py"),
        ("mpirun -np 8 sbatch x.sh", "write: gpurun submit -n 8 … -- bash x.sh"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match="would run 8 times") as refused:
            settled(replace(SPEC, gpus=8, command=tuple(shlex.split(line))), is_named=False)
        assert hint in refused.value.hint, line


WORDS = (
    "-n", "-n4", "-a", "-j", "2x", "x2", "--script", "-m", "--env", "A", "--frob", "=,=", "--", "-", "", "dist.ddp",
    "t.py", "é", "python3", "bash",
)  # fmt: skip
OTHERS = [each for each in LAUNCHERS if each.instead is not None]


@given(st.sampled_from(OTHERS), st.lists(st.sampled_from(WORDS), max_size=9))
def test_whatever_is_behind_such_a_launcher_a_line_is_proposed(typed, words):
    assert typed.instead(tuple(words), 8).startswith("gpurun submit -n ")
