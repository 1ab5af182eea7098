"""The launchers whose command lines gpurun reads: a line of `LAUNCHERS` adds the next. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from gpurun.launch.launchers.lines.each_host import (
    ACCELERATE,
    AXOLOTL,
    COLOSSALAI,
    COMPOSER,
    FABRIC,
    LLAMAFACTORY,
    SWIFT,
    TUNE,
)
from gpurun.launch.launchers.lines.flags import CHOSEN, Typed, flags
from gpurun.launch.launchers.lines.mpi import HOROVODRUN, MPIRUN
from gpurun.launch.launchers.lines.torch import DEEPSPEED, LAUNCH, TORCHRUN


def _value(words: tuple[str, ...], at: int) -> str:
    _name, equals, value = words[at].partition("=")
    return value if equals else next(iter(words[at + 1 :]), "")


def _on_one_gpu(_words: tuple[str, ...], _gpus: int) -> str:
    """Return a line for Paddle, whose ranks have addresses that only its own launcher knows."""
    return "gpurun submit -n 1 … -- python3 SCRIPT.py ARGUMENTS"


def _behind_mpirun(_words: tuple[str, ...], gpus: int) -> str:
    return f"gpurun submit -n {gpus} … -- mpirun PROGRAM ARGUMENTS"


def _behind_torchrun(_words: tuple[str, ...], gpus: int) -> str:
    return f"gpurun submit -n {gpus} … -- torchrun SCRIPT.py ARGUMENTS"


def _on_one_host(program: str) -> Callable[[tuple[str, ...], int], str]:
    """Return what proposes the line itself, once, on a host with all GPUs: right for whatever starts its own ranks."""
    return lambda words, gpus: (
        f"gpurun submit -n {gpus} --gpus-per-host {gpus} --one-per-host … -- {shlex.join((*program.split(), *words))}"
    )


def _ray(_words: tuple[str, ...], gpus: int) -> str:
    """Return a line for a script that starts Ray's head on the first host and its workers on the others."""
    return (
        f"gpurun submit -n {gpus} --one-per-host … -- bash SCRIPT   (it starts `ray start --head` where $GPURUN_NODE "
        "is 0, and elsewhere a worker for the first of $GPURUN_ADDRESSES)"
    )


def _in_this_queue(words: tuple[str, ...], gpus: int) -> str:
    """Return the line for a script, or a text, that was meant for another queue."""
    at = next((at for at, word in enumerate(words) if word.partition("=")[0] == "--wrap"), None)
    text = _value(words, at) if at is not None else ""
    scripts = (
        at for at, word in enumerate(words) if word.endswith((".sh", ".sbatch", ".slurm", ".bash", ".job", ".pbs"))
    )
    script = words[first:] if (first := next(scripts, None)) is not None else ("SCRIPT",)
    command = f"bash -c {shlex.quote(text)}" if text else f"bash {shlex.join(script)}"
    if "--" in words:
        command = shlex.join(words[words.index("--") + 1 :])
    return f"gpurun submit -n {_gpus(words) or gpus} … -- {command}"


def _gpus(words: tuple[str, ...]) -> int | None:
    """Return the GPUs that flags of Slurm ask for; None if they do not say."""
    found = dict[str, int]()
    for word, following in zip(words, (*words[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        if (
            match := re.fullmatch(r"(?:gpu:)?(?:[a-zA-Z]\w*:)?([0-9]{1,5})", value if equals else following)
        ) is not None:
            found.setdefault(
                {"-N": "--nodes", "-G": "--gpus", "--gres": "--gpus-per-node"}.get(name, name), int(match[1])
            )
    return found.get("--gpus") or found.get("--nodes", 1) * found.get("--gpus-per-node", 0) or None


MPI_STARTERS = ("flux run", "lrun", "jsrun", "aprun", "ibrun", "mpirun_rsh", "oshrun", "shmemrun")
OWN_STARTERS = (
    "xtuner train", "mim train", "msrun",
    *(f"litgpt {verb}" for verb in ("pretrain", "finetune", "finetune_full", "finetune_lora")),
)  # fmt: skip
"""Programs that start a process for each GPU of their host."""
QUEUES = ("sbatch", "salloc", "qsub", "bsub", "flux batch", "ray job submit", "ray submit")

LAUNCHERS = (
    TORCHRUN,
    LAUNCH,
    DEEPSPEED,
    MPIRUN,
    HOROVODRUN,
    ACCELERATE,
    COMPOSER,
    COLOSSALAI,
    LLAMAFACTORY,
    SWIFT,
    AXOLOTL,
    TUNE,
    FABRIC,
    Typed("paddle.distributed.launch", "", (), ("paddle.distributed.launch",),
          instead=_on_one_gpu),
    Typed("torchx run", "", ("torchx run",), instead=_behind_torchrun),
    Typed("deepspeed.launcher.launch", "", (), ("deepspeed.launcher.launch",), instead=_behind_torchrun),
    Typed("ipexrun", "", ("ipexrun",), ("intel_extension_for_pytorch.cpu.launch", "torch.backends.xeon.run_cpu"),
          instead=_behind_torchrun),
    Typed("xla_dist", "", (), ("torch_xla.distributed.xla_dist",), instead=_behind_torchrun),
    *(Typed(name, "", (name,), instead=_behind_torchrun) for name in ("dlrover-run", "bpslaunch")),
    *(Typed(name, "", (name,), instead=_behind_mpirun) for name in MPI_STARTERS),
    Typed("fleetrun", "", ("fleetrun",), instead=_on_one_gpu),
    Typed("oneflow.distributed.launch", "", (), ("oneflow.distributed.launch",),
          instead=_on_one_host("python3 -m oneflow.distributed.launch")),
    *(Typed(name, "", (name,), instead=_on_one_host(name)) for name in OWN_STARTERS),
    Typed("ray start", "", ("ray start",), instead=_ray),
    *(Typed(name, "", (name,), instead=_in_this_queue, is_queue=True) for name in QUEUES),
)  # fmt: skip
"""The first ones are started by a launcher of gpurun, the next run themselves on each host, and gpurun refuses the rest
for a gang."""

SRUN = Typed(
    "srun", "", ("srun",),
    flags={
        **flags(
            "taken",
            "-N= --nodes= -n= --ntasks= --ntasks-per-node= --ntasks-per-gpu= --ntasks-per-socket= --tasks-per-node= "
            "-G= --gpus= --gpus-per-node= --gpus-per-task= --gres= --gpu-bind= -p= --partition= -A= --account= -q= "
            "--qos= -w= --nodelist= -x= --exclude= -C= --constraint= --jobid= --reservation= -m= --distribution= -r= "
            "--relative= --exclusive? --overlap --overcommit -O --switches= --het-group= --mpi= -M= --clusters= "
            "--resv-ports? --network= --exact --contiguous --mincpus= --ntasks-per-core= --sockets-per-node= "
            "--spread-job --use-min-nodes -s --oversubscribe? --immediate? --priority= --nice? --wckey= -I? -L= "
            "--licenses= -F= --nodefile= --prefer= --tres-per-task= --gres-flags= --gpu-freq= --power= --delay-boot= "
            "--reboot --segment= --whole --interactive --cluster-constraint= --thread-spec= --tmp= -E --preserve-env "
            "--treewidth= --resv-port=",
            CHOSEN,
        ),
        **flags("taken", "-o= --output= -e= --error= -l --label -u --unbuffered -v --verbose -Q --quiet -i= --input= "
                "--open-mode= -X --disable-status",
                "gpurun keeps the output of every rank: `gpurun logs --rank N`"),
        **flags("taken", "-K? --kill-on-bad-exit? -W= --wait= -k --no-kill? --signal= --pty? --propagate?",
                "gpurun stops all ranks when one fails"),
        **flags("taken", "--cpu-bind= --mem-bind= --tres-bind= --hint= --threads-per-core= -B= "
                "--extra-node-info= --cpu-freq= -S= --core-spec=",
                "gpurun binds no rank to cores"),
        **flags("taken", "-J= --job-name= --comment=", "write `gpurun submit --name N` for a name"),
        **flags("taken", "--mail-type= --mail-user=", "write `notify:` in a recipe"),
        **flags("taken", "--profile= --acctg-freq= --slurmd-debug= --quit-on-interrupt --oom-kill-step?",
                "gpurun watches the ranks itself"),
        **flags("read", "--export="),
        **flags("refused", "-t= --time=", "write `gpurun submit --time-limit 1h`"),
        **flags("refused", "--mem= --mem-per-cpu= --mem-per-gpu=", "write `gpurun submit --memory 64GiB`"),
        **flags("refused", "-c= --cpus-per-task= --cpus-per-gpu= --cores-per-socket=",
                "write `gpurun submit --cpus N` for the cores on each host"),
        **flags("refused", "--container-image= --container-mounts= --container-name= --container-workdir= "
                "--container-env= --no-container-mount-home --container-mount-home --container-remap-root "
                "--container-writable", "write `gpurun submit --image IMAGE --mount A:B`"),
        **flags("refused", "-D= --chdir=", "write `sh -c 'cd DIR && exec …'` as the command"),
        **flags("refused", "--multi-prog", "all ranks of a job run the same command: write it on the line"),
        **flags("refused", "-d= --dependency= -b= --begin= --deadline= -H --hold",
                "a job of gpurun waits only for its GPUs: leave it out, and submit when the job may start"),
        **flags("refused", "--bcast? --prolog= --epilog= --task-prolog= --task-epilog= --uid= --gid= --x11? "
                "--test-only -Z --no-allocate -T= --threads= -h --help -V --version --usage", "leave it out"),
    },
)  # fmt: skip
"""Slurm's ``srun``: a launcher of its own, or in front of another one."""
