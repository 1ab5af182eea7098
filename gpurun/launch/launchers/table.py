"""The launchers whose command lines gpurun reads: a line of `LAUNCHERS` adds the next. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping

from gpurun.errors import BadInput
from gpurun.launch.launchers.torch import (
    ACCELERATE,
    AXOLOTL,
    COLOSSALAI,
    COMPOSER,
    DEEPSPEED,
    FABRIC,
    LAUNCH,
    LLAMAFACTORY,
    RESTARTS,
    SWIFT,
    TORCHRUN,
    TUNE,
)
from gpurun.launch.launchers.words import (
    ASSIGNMENT,
    CHOSEN,
    Counts,
    Flag,
    FoundFlag,
    Meaning,
    Typed,
    as_mpi,
    flags,
    kept_of,
    number_of,
    read_flags,
    taken_of,
    value_of,
)

# The command lines of ``mpirun`` and ``horovodrun``. Pure.


SENT = ("PATH", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT")
"""gpurun's own command line has these variables."""
OWN_PARAMETERS = frozenset({
    "btl_tcp_if_include", "btl_tcp_if_exclude", "oob_tcp_if_include", "oob_tcp_if_exclude", "plm_rsh_agent",
    "plm_rsh_args", "plm_ssh_agent", "plm_ssh_args", "plm_rsh_no_tree_spawn", "plm_ssh_no_tree_spawn", "plm",
    "orte_default_hostfile", "prte_default_hostfile", "rmaps_base_mapping_policy", "rmaps_base_ranking_policy",
    "rmaps_default_mapping_policy", "rmaps_default_ranking_policy",
})  # fmt: skip
"""MCA parameters for hosts, the way to them, and the order of ranks."""
PARAMETERS = ("--mca", "--gmca", "--omca", "--gomca", "--pmca", "--prtemca", "--pmixmca")
MAPPED = "gpurun gives ranks their GPUs host by host (--map-by slot)"
SAME = "gpurun does the same by itself"
UNBOUND = "gpurun does not bind ranks to cores"
OTHER = "flags of another MPI: gpurun starts Open MPI's mpirun"


def _decided(each: FoundFlag) -> str:
    """Return why gpurun leaves out a flag that it keeps with other values; "" = it keeps the flag."""
    if each.name in PARAMETERS and each.values[0] in OWN_PARAMETERS:
        return CHOSEN
    if each.name in ("--map-by", "--rank-by") and each.values[0].partition(":")[0] != "slot":
        return MAPPED
    if each.name == "-x" and each.values[0] in SENT:
        return SAME
    return ""


def _slots(found: list[FoundFlag]) -> int | None:
    """Return the sum of the slots that ``-H a:4,b:4`` names, so many processes start; None if it names none."""
    hosts = [host for each in found if each.name in ("-H", "--host") for host in each.values[0].split(",")]
    slots = [host.rpartition(":")[2] for host in hosts]
    return sum(map(int, slots)) if slots and all(re.fullmatch("[0-9]{1,5}", each) for each in slots) else None


def _mpirun(found: list[FoundFlag], words: tuple[str, ...], _interpreter: tuple[str, ...]) -> Meaning:
    if ":" in words:
        raise BadInput(
            "mpirun: the command starts several programs (':'), but all ranks of a job run the same command",
            hint="start one program that decides by its rank what to run, or submit a job for each program",
        )
    env = dict[str, str]()
    kept, taken = list[FoundFlag](), [each for each in found if each.flag.does == "taken"]
    for each in found:
        name, equals, value = each.values[0].partition("=") if each.name == "-x" else ("", "", "")
        if why := _decided(each):
            taken.append(each._replace(flag=each.flag._replace(does="taken", why=why)))
        elif equals:
            env[name] = value
        elif each.name in ("--genv", "--env"):
            name, _, value = each.values[0].partition("=")
            env[name] = each.values[1] if len(each.values) == 2 else value
        elif each.flag.does == "kept":
            kept.append(each)
    ranks = number_of("mpirun", found, "--np", "-n", "-c", "--n")
    counts = Counts(_slots(found) if ranks is None else ranks)
    retries = number_of("mpirun", found, "--max-restarts") or 0
    return Meaning(words, kept_of(kept), taken_of(taken), env, counts, retries=retries)


MPIRUN = Typed(
    "mpirun", "mpirun",
    ("mpirun", "mpiexec", "orterun", "prterun", "mpirun.openmpi", "mpiexec.openmpi", "mpiexec.hydra",
     "mpirun.mpich", "mpiexec.mpich"), (),
    {
        **flags(
            "taken",
            "--np= -n= --n= -c= -H= --host= --hosts= --hostfile= --machinefile= --default-hostfile= -f= -N= "
            "--npernode= --pernode --npersocket= --ppn= --perhost= --rankfile= --rf= --nolocal --nooversubscribe "
            "--oversubscribe --iface= --launcher= --hetero-nodes --launch-agent= --do-not-resolve --uniform-nodes "
            "--novm --max-vm-size= --machine= --machines= --machinelist= --hostlist= --rankmap= --rr --grr= "
            "--hosts-group= --hybrid-hosts --skip-launch-node --order-nodes= --localhost= --launcher-exec= "
            "--bootstrap= --bootstrap-exec= --gpus-per-proc= --gpu-subdevs-per-proc=",
            CHOSEN,
        ),
        **flags("taken", "--bynode --byslot --byboard --bycore --bysocket --loadbalance --ppr=", MAPPED),
        **flags("taken", "--allow-run-as-root --genvall --envall", SAME),
        **flags("taken", "--output-filename= --output-directory= --outfile-pattern= --errfile-pattern= --xterm= "
                "--outfile= --errfile= --output-from= --prepend-rank --prepend-pattern= -l --label --line-buffer "
                "--ordered-output --demux=",
                "gpurun keeps the output of every rank: `gpurun logs --rank N`"),
        **flags("taken", "--binding= --membind= --topolib= --cpu-bind= --gpu-bind= --mem-bind= --depth=", UNBOUND),
        **flags("taken", "--rmk= --usize= --nameserver= --pmi-port --print-all-exitcodes --print-rank-map --info "
                "--profile --enable-x --disable-x --enable-auto-cleanup --disable-auto-cleanup "
                "--enable-hostname-propagation --disable-hostname-propagation --silent-abort --cleanup "
                "--branch-count= --no-vni --no-transfer --pmi=", OTHER),
        **flags("taken", "--max-restarts=", RESTARTS),
        **flags(
            "kept",
            "-x= --prefix= --noprefix --mca== --gmca== --omca== --gomca== --pmca== --prtemca== --pmixmca== --am= "
            "--amca= --tune= --path= --runtime-options= --stream-buffering= --forward-signals= --report-pid= "
            "--report-uri= --show-progress --leave-session-attached --debug-daemons --with-ft= --display-comm "
            "--display-devel-allocation --display-diffable-map --tag-output --timestamp-output "
            "--report-bindings --wdir= --wd= --bind-to= --map-by= --rank-by= --bind-to-core "
            "--bind-to-none --bind-to-socket --display-map --display-allocation --display-devel-map --display= "
            "--output= -q --quiet -v --verbose --merge-stderr-to-stdout --use-hwthread-cpus --enable-recovery "
            "--disable-recovery --continuous --abort-on-error --tmpdir= --report-child-jobs-separately --personality= "
            "--debug-daemons-file --report-state-on-timeout --get-stack-traces --spawn-timeout= --no-aggregate-help "
            "--gpu-support= --memory-alloc-kinds= --rtos= --index-argv-by-rank --set-cwd-to-session-dir --xml "
            "--display-comm-finalize --initial-errhandler=",
        ),
        **flags("read", "--genv==? --env==?"),
        **flags("refused", "--timeout=", "write `gpurun submit --time-limit 1h`"),
        **flags("refused", "--preload-files= --preload-binary -s", "put the files into the workdir, or use --data"),
        **flags("refused", "--app= --configfile=",
                "write the program and its arguments in the command: all ranks of a job run the same command"),
        **flags("refused", "--stdin=", "remove the flag: gpurun gives each rank /dev/null as stdin"),
        **flags("refused", "--cpus-per-proc= --cpus-per-rank= --cpu-set= --cpu-list=",
                "remove the flag, or write `numactl` in front of the program to bind ranks to cores"),
        **flags("refused", "--genvlist= --genvnone --envlist= --envnone --genvexcl= --envexcl=",
                "write -x NAME for each variable"),
        **flags("refused", "--dvm= --hnp= --ompi-server= --wait-for-server --server-wait-time= --do-not-launch "
                "--stop-on-exec --stop-in-init", "remove the flag: gpurun itself starts mpirun and waits for its end"),
        **flags("refused", "-d", "remove -d: the flag starts a debugger in Open MPI, and sets cores in other MPIs"),
        **flags("refused", "--debug --tv --debugger= --gdb --gtool= --gtoolfile= --trace --check-mpi",
                "write the tool in front of the program: mpirun TOOL PROGRAM"),
        **flags("refused", "-V --version -h --help", "to see what the flag prints, run: docker run IMAGE mpirun …"),
    },
    spelled=as_mpi, read=_mpirun,
)  # fmt: skip


def _horovodrun(found: list[FoundFlag], words: tuple[str, ...], _interpreter: tuple[str, ...]) -> Meaning:
    names = {each.name for each in found}
    most = number_of("horovodrun", found, "--max-np", "--max-num-proc")
    ranks = most if most is not None else number_of("horovodrun", found, "-np", "--num-proc")
    least = number_of("horovodrun", found, "--min-np", "--min-num-proc")
    return Meaning(
        words, kept_of(found), taken_of(found), counts=Counts(ranks, least),
        controller="mpi" if "--mpi" in names else "gloo" if "--gloo" in names else None,
    )  # fmt: skip


HOROVODRUN = Typed(
    "horovodrun", "horovod", ("horovodrun",), ("horovod.runner.launch",),
    {
        **flags(
            "taken",
            "-np= --num-proc= --min-np= --min-num-proc= --max-np= --max-num-proc= --slots-per-host= --slots= -H= "
            "--hosts= -hostfile= --hostfile= -p= --ssh-port= -i= --ssh-identity-file= --network-interfaces= "
            "--network-interface= --host-discovery-script=",
            CHOSEN,
        ),
        **flags("taken", "--disable-cache", SAME),
        **flags("taken", "--output-filename=", "gpurun keeps the output of every rank: `gpurun logs --rank N`"),
        **flags(
            "kept",
            "--verbose --start-timeout= --fusion-threshold-mb= --cycle-time-ms= --cache-capacity= "
            "--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather "
            "--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune "
            "--autotune-log-file= --autotune-warmup-samples= --autotune-steps-per-sample= "
            "--autotune-bayes-opt-max-samples= --autotune-gaussian-process-noise= --elastic-timeout= --reset-limit= "
            "--blacklist-cooldown-range== --timeline-filename= --timeline-mark-cycles --no-timeline-mark-cycles "
            "--stall-check --no-stall-check --stall-check-warning-time-seconds= --stall-check-shutdown-time-seconds= "
            "--mpi-threads-disable --no-mpi-threads-disable --mpi-args= --tcp --binding-args= --num-nccl-streams= "
            "--thread-affinity= --gloo-timeout-seconds= --log-level= --log-with-timestamp --log-without-timestamp "
            "--log-hide-timestamp --no-log-hide-timestamp "
            "-prefix-timestamp --prefix-output-with-timestamp",
        ),
        **flags("read", "--gloo --mpi"),
        **flags("refused", "--jsrun", "remove the flag: gpurun starts Horovod by Gloo or, with --mpi, by MPI"),
        **flags("refused", "--config-file=",
                "write the settings of the file as flags, or under `horovod:` in a recipe"),
        **flags("refused", "-v --version -cb --check-build",
                "to see what the flag prints, run: docker run IMAGE horovodrun …"),
    },
    read=_horovodrun,
)  # fmt: skip


# What to write instead of a launcher that gpurun cannot take the place of. Pure.


def _value(words: tuple[str, ...], at: int) -> str:
    _name, equals, value = words[at].partition("=")
    return value if equals else next(iter(words[at + 1 :]), "")


def behind_torchrun(_words: tuple[str, ...], gpus: int) -> str:
    """Return a line for a script whose launcher has flags that gpurun does not read."""
    return f"gpurun submit -n {gpus} … -- torchrun SCRIPT.py ARGUMENTS"


def of_torchx(words: tuple[str, ...], gpus: int) -> str:
    """Return torchrun's line for TorchX's components dist.ddp and dist.spmd."""
    found, component = _flags_of(_TORCHX, words)
    of_component, arguments = _flags_of(_TORCHX_DDP, component[1:])
    if found is None or of_component is None or component[:1] not in (("dist.ddp",), ("dist.spmd",)):
        return behind_torchrun(words, gpus)
    script, module = value_of(of_component, "--script"), value_of(of_component, "-m")
    program = (script,) if script is not None else ("-m", module) if module is not None else None
    if program is None:
        return behind_torchrun(words, gpus)
    nodes, _, each = (value_of(of_component, "-j") or str(gpus)).rpartition("x")
    size = re.fullmatch(r"(?:[0-9]+:)?([0-9]{1,4})", nodes or "1")
    total = int(size[1]) * int(each) if size is not None and re.fullmatch("[0-9]{1,4}", each) else gpus
    env = [pair for pair in (value_of(of_component, "--env") or "").split(",") if "=" in pair]
    shape = (f"--nnodes={nodes}",) if nodes not in ("", "1") else ()
    each_flag = (f"--nproc-per-node={each}",) if nodes else ()
    return f"gpurun submit -n {total} … -- {shlex.join((*env, 'torchrun', *shape, *each_flag, *program, *arguments))}"


def of_paddle(words: tuple[str, ...], gpus: int) -> str:
    """Return Paddle's own line, once, on one host: only its launcher knows the addresses of its ranks."""
    found, script = _flags_of(_PADDLE, words)
    kept = [word for each in found or () if each.flag.does == "kept" for word in each.words]
    words = (*kept, *script) if found is not None else words
    return on_one_host("python3 -m paddle.distributed.launch")(words, gpus)


def behind_mpirun(name: str) -> Callable[[tuple[str, ...], int], str]:
    """Return what proposes mpirun's line for a program that another launcher of MPI programs starts."""

    def proposed(words: tuple[str, ...], gpus: int) -> str:
        found, program = _flags_of(_MPI_FLAGS.get(name, {}), words)
        if found is None or not program:
            return f"gpurun submit -n {gpus} … -- mpirun PROGRAM ARGUMENTS"
        ranks, each = _count(value_of(found, *_RANKS)), _count(value_of(found, "-a", "--tasks-per-rs"))
        sets = [word for flag in found if flag.flag.does == "read" for word in ("-x", flag.values[0])]
        while program and ASSIGNMENT.fullmatch(program[0]):  # mpirun_rsh
            sets, program = [*sets, "-x", program[0]], program[1:]
        own = () if _is_launcher(program) else ("mpirun", *sets)
        return f"gpurun submit -n {(ranks or gpus) * (each or 1)} … -- {shlex.join((*own, *program))}"

    return proposed


def in_the_image(words: tuple[str, ...], gpus: int) -> str:
    """Return the line for what another container shall run: gpurun starts the container of each host."""
    at = _program_at(words)
    if at is None:
        return f"gpurun submit -n {gpus} --image IMAGE … -- COMMAND"
    image = words[at - 1].removeprefix("docker://")
    is_image = _IMAGE.fullmatch(image) is not None and not image.endswith((".sif", ".simg", ".img"))
    return f"gpurun submit -n {gpus} --image {image if is_image else 'IMAGE'} … -- {shlex.join(words[at:])}"


def _program_at(words: tuple[str, ...]) -> int | None:
    """Return where a command begins behind flags that gpurun does not know: at Python, a shell or a launcher."""
    return next((at for at, word in enumerate(words) if at > 0 and _STARTS.match(word.rpartition("/")[2])), None)


def _is_launcher(program: tuple[str, ...]) -> bool:
    return program[0].rpartition("/")[2] in ("torchrun", "deepspeed", "accelerate") or "torch.distributed" in "".join(
        program[1:4]
    )


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch("[0-9]{1,5}", text) and int(text) else None


def _flags_of(known: Mapping[str, Flag], words: tuple[str, ...]) -> tuple[list[FoundFlag] | None, tuple[str, ...]]:
    """Return the flags of a line and the words behind them; no flags if some are unknown."""
    try:
        return read_flags(Typed("", "", (), flags=known), words)
    except BadInput:
        return None, ()


_STARTS = re.compile(
    r"(python|pypy)[0-9.]*$|torchrun$|accelerate$|deepspeed$|horovodrun$|mpirun$|mpiexec$|(ba|da|z)?sh$"
)
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._/:@-]{0,200}")
_TORCHX = flags("taken", "-s= --scheduler= -cfg= --scheduler-args= --dryrun --wait --log --workspace= --stdin")
_TORCHX_DDP = flags(
    "taken",
    "-j= --script= -m= --env= --gpu= --cpu= --memMB= --image= -h= --h= --name= --max-retries= --rdzv-port= "
    "--rdzv-backend= --mounts= --debug= --tee=",
)
_PADDLE = {
    **flags("taken", "--master= --nnodes= --rank= --ips= --host= --gpus= --devices= --selected-gpus= --nproc-per-node= "
            "--start-port="),
    **flags("kept", "--log-dir= --log-level= --log-overwrite= --run-mode= --job-id= --legacy= --sort-ip= "
            "--max-restart= --elastic-level= --elastic-timeout= --auto-parallel-config= --auto-tuner-json="),
}  # fmt: skip
_RANKS = ("-n", "--nrs", "-np", "--np", "--ntasks")
_MPI_FLAGS: Mapping[str, Mapping[str, Flag]] = {
    "jsrun": {
        **flags("taken", "-n= --nrs= -a= --tasks-per-rs= -c= --cpu-per-rs= -g= --gpu-per-rs= -r= --rs-per-host= -l= "
                "--latency-priority= -d= --launch-distribution= -b= --bind= -p= --np= -e= -o= -k= -M= --smpiargs= -X= "
                "--exit-on-error="),
        **flags("read", "-E= --env="),
    },
    "flux run": {
        **flags("taken", "-N= --nodes= -n= --ntasks= -c= --cores-per-task= -g= --gpus-per-task= --tasks-per-node= "
                "--gpus-per-node= --cores= -o= --setopt= -t= --time-limit= -q= --queue= -x --exclusive -l --label-io "
                "-u --unbuffered --output= --error= --bank= -B= --job-name= --mpi= --requires="),
        **flags("read", "--env="),
    },
    "aprun": {
        **flags("taken", "-n= -N= -d= -j= -S= -ss -cc= -q -b -B -r= -m= -L="),
        **flags("read", "-e="),
    },
    "ibrun": flags("taken", "-n= -o= -np= --npernode="),
    "lrun": flags("taken", "-n= -N= -T= -g= -c= -M= --pack"),
    "mpirun_rsh": flags("taken", "-n= -np= -hostfile= -f= -rsh -ssh -export -export-all"),
    "mpiexec_mpt": flags("taken", "-n= -np= -ppn="),
    "prun": {**flags("taken", "-n= --np= -N= --map-by= --hostfile="), **flags("read", "-x=")},
}  # fmt: skip
"""Flags of launchers of MPI programs: those that name processes, places and cores, and those that set variables."""


def on_one_host(program: str) -> Callable[[tuple[str, ...], int], str]:
    """Return what proposes the line itself, once, on a host with all GPUs: right for whatever starts its own ranks."""
    return lambda words, gpus: (
        f"gpurun submit -n {gpus} --gpus-per-host {gpus} --one-per-host … -- {shlex.join((*program.split(), *words))}"
    )


def ray(_words: tuple[str, ...], gpus: int) -> str:
    """Return a line for a script that starts Ray's head on the first host and its workers on the others."""
    return (
        f"gpurun submit -n {gpus} --one-per-host … -- bash SCRIPT   (SCRIPT runs `ray start --head` on the host "
        "with GPURUN_NODE=0; on other hosts, it starts a worker for the first address of $GPURUN_ADDRESSES)"
    )


def in_this_queue(words: tuple[str, ...], gpus: int) -> str:
    """Return the line for a script, or a text, that was meant for another queue."""
    at = next((at for at, word in enumerate(words) if word.partition("=")[0] == "--wrap"), None)
    text = _value(words, at) if at is not None else ""
    scripts = (
        at for at, word in enumerate(words) if word.endswith((".sh", ".sbatch", ".slurm", ".bash", ".job", ".pbs"))
    )
    script = words[first:] if (first := next(scripts, None)) is not None else ("SCRIPT",)
    command = f"bash -c {shlex.quote(text)}" if text else f"bash {shlex.join(script)}"
    at = _program_at(words) if not text and first is None else None
    command = shlex.join(words[at:]) if at is not None else command
    if "--" in words:
        command = shlex.join(words[words.index("--") + 1 :])
    return f"gpurun submit -n {_gpus(words) or gpus} … -- {command}"


def _gpus(words: tuple[str, ...]) -> int | None:
    """Return the GPUs that flags of Slurm ask for; None if they do not say."""
    found = dict[str, int]()
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if (
            match := re.fullmatch(r"(?:gpu:)?(?:[a-zA-Z]\w*:)?([0-9]{1,5})", value if equals else following)
        ) is not None:
            found.setdefault(
                {"-N": "--nodes", "-G": "--gpus", "--gres": "--gpus-per-node"}.get(name, name), int(match[1])
            )
    return found.get("--gpus") or found.get("--nodes", 1) * found.get("--gpus-per-node", 0) or None


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
