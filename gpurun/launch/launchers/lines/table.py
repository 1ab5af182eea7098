"""The launchers whose command lines gpurun reads: a line of `LAUNCHERS` adds the next. Pure."""

from __future__ import annotations

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
from gpurun.launch.launchers.lines.instead import (
    behind_mpirun,
    behind_torchrun,
    in_the_image,
    in_this_queue,
    of_paddle,
    of_torchx,
    on_one_host,
    ray,
)
from gpurun.launch.launchers.lines.mpi import HOROVODRUN, MPIRUN
from gpurun.launch.launchers.lines.torch import DEEPSPEED, LAUNCH, TORCHRUN

MPI_STARTERS = (
    "flux run",
    "lrun",
    "jsrun",
    "aprun",
    "ibrun",
    "mpirun_rsh",
    "mpiexec_mpt",
    "prun",
    "oshrun",
    "shmemrun",
)
CONTAINERS = (
    "docker run", "docker exec", "podman run", "nerdctl run", "apptainer exec", "apptainer run", "singularity exec",
    "singularity run", "enroot start", "shifter",
)  # fmt: skip
"""Programs that start a container: gpurun starts one itself, and there these programs have no daemon and no rights."""
OWN_STARTERS = (
    "xtuner train", "mim train", "msrun",
    *(f"litgpt {verb}" for verb in ("pretrain", "finetune", "finetune_full", "finetune_lora")),
)  # fmt: skip
"""Programs that start a process for each GPU of their host."""
QUEUES = (
    "sbatch", "salloc", "qsub", "bsub", "flux batch", "flux submit", "ray job submit", "ray submit", "sky launch",
    "sky jobs launch", "runai submit", "runai submit-dist", "mcli run", "dstack apply", "condor_submit",
)  # fmt: skip

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
    Typed("paddle.distributed.launch", "", ("fleetrun",), ("paddle.distributed.launch",), instead=of_paddle),
    Typed("torchx run", "", ("torchx run",), instead=of_torchx),
    Typed("deepspeed.launcher.launch", "", (), ("deepspeed.launcher.launch",), instead=behind_torchrun),
    Typed("ipexrun", "", ("ipexrun",), ("intel_extension_for_pytorch.cpu.launch", "torch.backends.xeon.run_cpu"),
          instead=behind_torchrun),
    Typed("xla_dist", "", (), ("torch_xla.distributed.xla_dist",), instead=behind_torchrun),
    *(Typed(name, "", (name,), instead=behind_torchrun) for name in ("dlrover-run", "bpslaunch")),
    *(Typed(name, "", (name,), instead=behind_mpirun(name)) for name in MPI_STARTERS),
    Typed("oneflow.distributed.launch", "", (), ("oneflow.distributed.launch",),
          instead=on_one_host("python3 -m oneflow.distributed.launch")),
    *(Typed(name, "", (name,), instead=on_one_host(name)) for name in OWN_STARTERS),
    *(Typed(name, "", (name,), instead=in_the_image) for name in CONTAINERS),
    Typed("ray start", "", ("ray start",), instead=ray),
    *(Typed(name, "", (name,), instead=in_this_queue, is_queue=True) for name in QUEUES),
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
        **flags("taken", "-K? --kill-on-bad-exit? -W= --wait= -k --no-kill? --signal= --propagate?",
                "gpurun stops all ranks when one fails"),
        **flags("taken", "--pty?", "ranks have no terminal"),
        **flags("taken", "--cpu-bind= --mem-bind= --tres-bind= --hint= --threads-per-core= -B= "
                "--extra-node-info= --cpu-freq= -S= --core-spec=",
                "gpurun does not bind ranks to cores"),
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
        **flags("refused", "--multi-prog",
                "write the program and its arguments in the command: all ranks of a job run the same command"),
        **flags("refused", "-d= --dependency= -b= --begin= --deadline= -H --hold",
                "remove the flag, and submit the job when it may start: a job of gpurun waits only for its GPUs"),
        **flags("refused", "--bcast? --prolog= --epilog= --task-prolog= --task-epilog= --uid= --gid= --x11? "
                "--test-only -Z --no-allocate -T= --threads= -h --help -V --version --usage",
                "remove the flag from the command"),
    },
)  # fmt: skip
"""Slurm's ``srun``: a launcher of its own, or in front of another one."""
