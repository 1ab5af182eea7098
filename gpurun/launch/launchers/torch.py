"""The command lines of launchers that tell ranks what ``torchrun`` tells them. Pure.

Sources: `torch.distributed.run` of PyTorch 2.13, `deepspeed.launcher.runner` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from gpurun.errors import BadInput
from gpurun.launch.launchers.words import (
    CHOSEN,
    Counts,
    FoundFlag,
    Meaning,
    Typed,
    as_gnu,
    flags,
    number_of,
    read_flags,
    replaced_of,
    started_by_shell,
    taken_of,
    value_of,
)

LOGS = "gpurun keeps the output of every rank: `gpurun logs --rank N`"
RESTARTS = "gpurun itself starts a failed job again: --retry N"
TASKS = "choose --launcher tasks: each rank then sees only its own GPU"
ANY_NUMBER = ("gpu", "auto", "cpu", "xpu")


def python(found: list[FoundFlag], words: tuple[str, ...], interpreter: tuple[str, ...]) -> tuple[str, ...]:
    """Return what ``torchrun`` runs: Python with a script or a module, or any program."""
    names = {each.name for each in found}
    if names & {"--no-python", "-c", "--command-mode"}:
        return words
    is_module = names & {"-m", "--module", "--module-mode"}
    return (*interpreter, *(["-m"] if is_module else []), *words)


def hosts_of(typed: str, found: list[FoundFlag], *names: str) -> tuple[int, int] | None:
    """Return the least and the most hosts, as in ``--nnodes=1:3``; None if the line does not say."""
    value = value_of(found, *names)
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", value)
    if match is None:
        raise BadInput(
            f"{typed}: {names[0]} must be a number of hosts or a range of numbers, not {value!r}",
            hint=f"write {names[0]} 2, or {names[0]} 1:3 for an elastic job",
        )
    least = int(match[1])
    return least, int(match[2] or least)


def _torchrun(found: list[FoundFlag], words: tuple[str, ...], interpreter: tuple[str, ...]) -> Meaning:
    role = value_of(found, "--role")
    counts = Counts(
        per_host=number_of("torchrun", found, "--nproc-per-node", words=ANY_NUMBER),
        hosts=hosts_of("torchrun", found, "--nnodes"),
    )
    env = {} if role is None else {"ROLE_NAME": role}
    retries = number_of("torchrun", found, "--max-restarts") or 0
    return Meaning(
        python(found, words, interpreter), taken=taken_of(found), env=env, counts=counts, retries=retries
    )  # fmt: skip


OF_TORCHRUN = {
    "--nnodes": '"$NNODES"', "--node_rank": '"$NODE_RANK"', "--nproc_per_node": '"$NPROC_PER_NODE"',
    "--master_addr": '"$MASTER_ADDR"', "--master_port": '"$MASTER_PORT"',
}  # fmt: skip
"""What ``torchrun`` needs on each host, if it runs itself."""


def torchrun_on_each_host(
    program: tuple[str, ...], words: tuple[str, ...], given: Mapping[str, str] = OF_TORCHRUN
) -> Meaning:
    """Return what ``torchrun``, or a launcher with its flags, runs on each host."""
    found, script = read_flags(TORCHRUN, words)
    taken, kept = replaced_of(found)
    counts = _torchrun(found, script, ()).counts
    return Meaning(started_by_shell(program, given, (*kept, *script)), taken=taken, counts=counts)


_TORCH_FLAGS = {
    **flags(
        "taken",
        "--nnodes= --nproc-per-node= --node-rank= --master-addr= --master-port= --local-addr= --standalone "
        "--rdzv-backend= --rdzv-endpoint= --rdzv-id= --rdzv-conf=",
        CHOSEN,
    ),
    **flags("taken", "--max-restarts=", RESTARTS),
    **flags(
        "taken",
        "--log-dir= --redirects= -r= --tee= -t= --local-ranks-filter= --logs-specs= --event-log-handler= "
        "--duplicate-stdout-filters= --duplicate-stderr-filters=",
        LOGS,
    ),
    **flags("taken", "--monitor-interval= --start-method= --signals-to-handle= --shutdown-timeout=",
            "gpurun starts and watches the ranks itself"),
    **flags("read", "-m --module --no-python --run-path --role="),
    **flags("refused", "--virtual-local-rank", TASKS),
    **flags("refused", "--numa-binding=", "write `numactl` in front of torchrun"),
}  # fmt: skip
TORCHRUN = Typed(
    "torchrun", "torchrun", ("torchrun",), ("torch.distributed.run", "torch.distributed.elastic.run"), _TORCH_FLAGS,
    read=_torchrun, each_host=torchrun_on_each_host,
)  # fmt: skip


def _with_torchs_flag(interpreter: tuple[str, ...], is_module: bool) -> tuple[str, ...]:
    """Return what runs a script with its local rank as the first flag, as ``torch.distributed.launch`` spells it.

    PyTorch 2.0 changed ``--local_rank`` into ``--local-rank``; only the image knows which PyTorch it has.
    """
    version = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    run = f'version=$({shlex.quote(interpreter[0])} -c "{version}" torch) || exit; '
    run += 'case "$version" in 0.*|1.*) flag=--local_rank;; *) flag=--local-rank;; esac; script="$1"; shift; '
    run += f'exec {shlex.join([*interpreter, *(["-m"] if is_module else [])])} "$script" "$flag=$LOCAL_RANK" "$@"'
    return "sh", "-c", run, "torch.distributed.launch"


def _launch(found: list[FoundFlag], words: tuple[str, ...], interpreter: tuple[str, ...]) -> Meaning:
    """Read ``torch.distributed.launch``. It hands a script its local rank as a flag, unless ``--use_env`` is there."""
    reading, names = _torchrun(found, words, interpreter), {each.name for each in found}
    if "--use-env" in names:
        return reading
    if "--no-python" in names:
        raise BadInput(
            "torch.distributed.launch: gpurun passes --local_rank only to Python programs",
            hint="write --use_env, and let the program read LOCAL_RANK",
        )
    runs = _with_torchs_flag(interpreter, bool(names & {"-m", "--module"}))
    return reading._replace(command=(*runs, *words))


LAUNCH = Typed(
    "torch.distributed.launch", "torchrun", (), ("torch.distributed.launch",),
    {**_TORCH_FLAGS, **flags("taken", "--logdir=", LOGS), **flags("read", "--use-env")}, read=_launch,
)  # fmt: skip


def with_local_rank(interpreter: tuple[str, ...]) -> tuple[str, ...]:
    """Return what runs a script with ``--local_rank=N`` as its first flag, as DeepSpeed's launcher does.

    Without an interpreter, the script runs by itself.
    """
    run = f'script="$1"; shift; {shlex.join(("exec", *interpreter))} "$script" --local_rank="$LOCAL_RANK" "$@"'
    return "sh", "-c", run, "deepspeed"


def _deepspeed(found: list[FoundFlag], words: tuple[str, ...], interpreter: tuple[str, ...]) -> Meaning:
    counts = Counts(
        per_host=number_of("deepspeed", found, "--num-gpus", "--num-accelerators"),
        hosts=hosts_of("deepspeed", found, "--num-nodes"),
    )
    plain = {"--no-python", "--module", "--no-local-rank"} & {each.name for each in found}
    command = python(found, words, interpreter) if plain else (*with_local_rank(interpreter), *words)
    return Meaning(command, taken=taken_of(found), counts=counts)


DEEPSPEED = Typed(
    "deepspeed", "deepspeed", ("deepspeed", "ds", "deepspeed.pt"), ("deepspeed.launcher.runner",),
    {
        **flags(
            "taken",
            "-H= --hostfile= -i= --include= -e= --exclude= --num-nodes= --num-gpus= --num-accelerators= "
            "--master-port= --master-addr= --node-rank= --launcher= --launcher-args= --ssh-port= --no-ssh "
            "--no-ssh-check --force-multi --venv-script=",
            CHOSEN,
        ),
        **flags("taken", "--enable-each-rank-log= --save-pid", LOGS),
        **flags("taken", "--bind-cores-to-rank --bind-core-list=", "gpurun does not bind ranks to cores"),
        **flags("read", "--module --no-python --no-local-rank"),
        **flags("refused", "--elastic-training --min-elastic-nodes= --max-elastic-nodes=",
                "write `gpurun submit --min-gpus N` for an elastic gang"),
        **flags("refused", "--autotuning=", "run the autotuner on one machine: the autotuner starts its own jobs"),
    },
    read=_deepspeed,
)  # fmt: skip


# Launchers that run themselves, once on each host: their command lines with gpurun's hosts, ranks and ports. Pure.


RANKS = "$((NNODES * NPROC_PER_NODE))"
OF_TUNE = {
    **{name: OF_TORCHRUN[name] for name in ("--nnodes", "--node_rank", "--nproc_per_node")},
    "--rdzv_endpoint": '"$MASTER_ADDR:$MASTER_PORT"',
}
"""Without an endpoint, ``tune run`` trains on each host alone (`Run._run_distributed`)."""
OF_FABRIC = {
    "--devices": '"$NPROC_PER_NODE"', "--num-nodes": '"$NNODES"', "--node-rank": '"$NODE_RANK"',
    "--main-address": '"$MASTER_ADDR"', "--main-port": '"$MASTER_PORT"',
}  # fmt: skip
OF_COMPOSER = {
    "--nproc": '"$NPROC_PER_NODE"', "--world_size": '"$GPURUN_GPUS"', "--node_rank": '"$NODE_RANK"',
    "--base_rank": '"$GPURUN_GPUS_BEFORE"', "--master_addr": '"$MASTER_ADDR"', "--master_port": '"$MASTER_PORT"',
}  # fmt: skip
OF_COLOSSALAI = {name: OF_TORCHRUN[name] for name in ("--nproc_per_node", "--master_addr", "--master_port")}
OF_ACCELERATE = {
    "--num_machines": '"$NNODES"', "--machine_rank": '"$NODE_RANK"', "--num_processes": RANKS,
    "--main_process_ip": '"$MASTER_ADDR"', "--main_process_port": '"$MASTER_PORT"', "--gpu_ids": "all",
}  # fmt: skip
"""Flags win over a configuration file. Accelerate divides the processes by the machines: so a host with fewer GPUs than
others starts as many processes as it has."""
MULTI_GPU = '$([ "$NNODES$NPROC_PER_NODE" = 11 ] || echo --multi_gpu)'
"""Without it, Accelerate starts one process on each host with one GPU, which trains alone. With it, it refuses one
process in all. Behind it, it does not read the kind of training from a configuration file."""
KINDS = ("--use-deepspeed", "--use-fsdp", "--use-megatron-lm", "--config-file")
ON_CPUS = "gpurun sets ACCELERATE_USE_CPU=1 for each process instead"
"""Accelerate starts one process for ``--cpu``, or mpirun."""
STANDARD = {"--deepspeed_multinode_launcher": "standard"}
"""DeepSpeed's other ways start a second launcher, by SSH."""
IF_ALONE = (
    "$(grep -Eqs 'distributed_type.?: *.?NO.?,? *$' -- {file} && [ \"$NNODES$NPROC_PER_NODE\" != 11 ] && "
    'echo --multi_gpu && echo "gpurun: the configuration file has distributed_type NO, so gpurun adds --multi_gpu: '
    'without this flag, each host would train its own model" >&2)'
)
"""Only the container has each configuration file. One that says NO starts one process on each host."""


def _of_accelerate(found: Sequence[FoundFlag]) -> dict[str, str]:
    names, file = {each.name for each in found}, value_of(found, "--config-file")
    kind = {MULTI_GPU: ""} if "--multi-gpu" in names or not names & {*KINDS} else {}
    if file is not None and not names & {"--multi-gpu", "--use-deepspeed", "--use-fsdp", "--use-megatron-lm"}:
        kind = {IF_ALONE.format(file=shlex.quote(file)): ""}
    return {**kind, **OF_ACCELERATE, **(STANDARD if names & {"--use-deepspeed", "--config-file"} else {})}


def accelerate(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what ``accelerate launch`` runs on each host."""
    found, script = read_flags(ACCELERATE, words)
    taken, kept = replaced_of(found)
    counts = _counts_of_accelerate(found)
    shell = started_by_shell(program, _of_accelerate(found), (*kept, *script))
    return Meaning(shell, taken=taken, env=_on_cpus(found, taken), counts=counts)


def _on_cpus(found: Sequence[FoundFlag], taken: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the variables for a group of CPUs. Adds to `taken` the flag in whose place they stand."""
    words = tuple(each.words[0] for each in found if each.flag.why == ON_CPUS)
    if words and (kinds := [each.words[0] for each in found if each.name in KINDS]):
        raise BadInput(
            f"accelerate launch: gpurun cannot combine {words[0]} with {kinds[0]}",
            hint=f"remove {words[0]} or {kinds[0]} from the command",
        )
    taken.update({ON_CPUS: words} if words else {})
    return {"ACCELERATE_USE_CPU": "1"} if words else {}


def tune(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what torchtune's ``tune run`` runs on each host."""
    return torchrun_on_each_host(program, words, OF_TUNE)


def fabric(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what Lightning's ``fabric run`` runs on each host."""
    found, script = read_flags(FABRIC, words)
    behind, rest = _behind_script(FABRIC, script)
    taken, kept = replaced_of([*found, *behind])
    counts = Counts(
        per_host=number_of(FABRIC.name, [*found, *behind], "--devices", words=("auto", "-1")),
        hosts=hosts_of(FABRIC.name, [*found, *behind], "--num-nodes"),
    )
    return Meaning(started_by_shell(program, OF_FABRIC, (*kept, *rest)), taken=taken, counts=counts)


def _behind_script(typed: Typed, words: tuple[str, ...]) -> tuple[list[FoundFlag], tuple[str, ...]]:
    """Return the flags of a launcher that stand behind its script, and the other words. Click finds them there, too."""
    found, others, rest = list[FoundFlag](), list[str](), list(words)
    while rest and rest[0] != "--":
        name = typed.spelled(rest[0].partition("=")[0])
        if name.startswith("--") and name in typed.flags:
            flags_there, behind = read_flags(typed, tuple(rest[: 1 if "=" in rest[0] else 2]))
            found += flags_there
            rest = [*behind, *rest[1 if "=" in rest[0] else 2 :]]
        else:
            others.append(rest.pop(0))
    return found, (*others, *rest)


def composer(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what Composer's launcher runs on each host."""
    found, script = read_flags(COMPOSER, words)
    taken, kept = replaced_of(found)
    world = number_of(COMPOSER.name, found, "--world-size")
    counts = Counts(world, None, number_of(COMPOSER.name, found, "-n", "--nproc"))
    return Meaning(started_by_shell(program, OF_COMPOSER, (*kept, *script)), taken=taken, counts=counts)


def colossalai(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what ``colossalai run`` runs on each host. It has no flags for several hosts, but hands some to torchrun,
    where they win over its own.
    """
    found, script = read_flags(COLOSSALAI, words)
    taken, kept = replaced_of(found)
    counts = Counts(
        per_host=number_of(COLOSSALAI.name, found, "--nproc-per-node"),
        hosts=hosts_of(COLOSSALAI.name, found, "--num-nodes"),
    )
    more = (value_of(found, "--extra-launch-args") or "").split(",")
    theirs = [each for each in more if each and as_gnu(f"--{each.partition('=')[0]}") in TORCHRUN.flags]
    if wrong := [each for each in more if each and each not in theirs]:
        raise BadInput(
            f"colossalai run: gpurun does not know {wrong[0]} in --extra_launch_args",
            hint=f"remove {wrong[0]}: --extra_launch_args may have only flags of torchrun",
        )
    replaced = [each for each in theirs if TORCHRUN.flags[as_gnu(f"--{each.partition('=')[0]}")].why == CHOSEN]
    if replaced:
        taken = {CHOSEN: (*taken.get(CHOSEN, ()), f"--extra_launch_args={','.join(replaced)}")}
    extra = "".join(f",{each}" for each in theirs if each not in replaced)
    given = {**OF_COLOSSALAI, "--extra_launch_args": f'"nnodes=$NNODES,node_rank=$NODE_RANK"{shlex.quote(extra)}'}
    return Meaning(started_by_shell(program, given, (*kept, *script)), taken=taken, counts=counts)


def llamafactory(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what ``llamafactory-cli train`` runs on each host. It reads where its hosts are from variables; without
    FORCE_TORCHRUN, it would train alone on a host with one GPU.
    """
    return Meaning((*program, *words), env={"FORCE_TORCHRUN": "1"})


def swift(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what SWIFT runs on each host. It starts torchrun with what NNODES, NODE_RANK and the others say."""
    return Meaning((*program, *words))


def axolotl(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what ``axolotl train`` runs on each host. Flags behind ``--`` are its launcher's."""
    own, behind = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, ())
    launcher = next((own[at + 1] for at, word in enumerate(own[:-1]) if word == "--launcher"), "")
    launcher = launcher or next((word[11:] for word in own if word.startswith("--launcher=")), "accelerate")
    early, own = _behind_script(_AXOLOTLS_OWN, own)
    if launcher not in ("accelerate", "torchrun"):
        raise BadInput(
            f"axolotl train: with --launcher {launcher}, axolotl starts no processes on other hosts and GPUs",
            hint="remove --launcher from the command",
        )
    found, more = read_flags(ACCELERATE if launcher == "accelerate" else TORCHRUN, behind)
    taken, kept = replaced_of([*early, *found])
    given = _of_accelerate(found) if launcher == "accelerate" else OF_TORCHRUN
    counts = _counts_of_accelerate([*early, *found])
    if launcher == "torchrun":
        counts = torchrun_on_each_host(("torchrun",), behind).counts
    flags = " ".join(f"{name} {value}".strip() for name, value in given.items())
    text = f'exec {shlex.join((*program, *own))} -- "$@" {flags}'
    env = _on_cpus(found, taken) if launcher == "accelerate" else {}
    return Meaning(("sh", "-c", text, program[0], *kept, *more), taken=taken, env=env, counts=counts)


def _counts_of_accelerate(found: Sequence[FoundFlag]) -> Counts:
    return Counts(number_of(ACCELERATE.name, found, "--num-processes"))


ACCELERATE = Typed(
    "accelerate launch", "", ("accelerate launch", "accelerate-launch"),
    ("accelerate.commands.launch", "accelerate.commands.accelerate_cli launch"),
    {
        **flags(
            "taken",
            "--num-processes= --num-machines= --machine-rank= --main-process-ip= --main-process-port= --gpu-ids= "
            "--deepspeed-hostfile= --deepspeed-exclusion-filter= --deepspeed-inclusion-filter= "
            "--deepspeed-multinode-launcher= --multi-gpu",
            CHOSEN,
        ),
        **flags(
            "kept",
            "--quiet -q --enable-cpu-affinity --use-deepspeed --use-fsdp --use-parallelism-config "
            "--use-megatron-lm --use-xpu --same-network -m --module --no-python --downcast-bf16 "
            "--fp8-use-autocast-during-eval --debug --dynamo-use-fullgraph --dynamo-use-dynamic "
            "--dynamo-use-regional-compilation --config-file= --mixed-precision= --num-cpu-threads-per-process= "
            "--dynamo-backend= --dynamo-mode= -t= --tee= --log-dir= --role= --rdzv-backend= --rdzv-conf= "
            "--max-restarts= --monitor-interval= --main-training-function= --deepspeed-config-file= --zero-stage= "
            "--offload-optimizer-device= --offload-param-device= --offload-optimizer-nvme-path= "
            "--offload-param-nvme-path= --gradient-accumulation-steps= --gradient-clipping= --zero3-init-flag= "
            "--zero3-save-16bit-model= --deepspeed-moe-layer-cls-names= --fsdp-version= --fsdp-offload-params= "
            "--fsdp-min-num-params= --fsdp-sharding-strategy= --fsdp-reshard-after-forward= --fsdp-auto-wrap-policy= "
            "--fsdp-transformer-layer-cls-to-wrap= --fsdp-backward-prefetch= --fsdp-backward-prefetch-policy= "
            "--fsdp-state-dict-type= --fsdp-forward-prefetch= --fsdp-use-orig-params= "
            "--fsdp-cpu-ram-efficient-loading= --fsdp-sync-module-states= --fsdp-activation-checkpointing= "
            "--megatron-lm-tp-degree= --megatron-lm-pp-degree= --megatron-lm-num-micro-batches= "
            "--megatron-lm-sequence-parallelism= --megatron-lm-recompute-activations= "
            "--megatron-lm-use-distributed-optimizer= --megatron-lm-gradient-clipping= --fp8-backend= --fp8-margin= "
            "--fp8-interval= --fp8-format= --fp8-amax-history-len= --fp8-amax-compute-algo= --fp8-opt-level= "
            "--fp8-override-linear-precision= "
            "--parallelism-config-dp-replicate-size= --parallelism-config-dp-shard-size= "
            "--parallelism-config-tp-size= --parallelism-config-cp-size= --parallelism-config-cp-backend= "
            "--parallelism-config-cp-comm-strategy= --parallelism-config-sp-size= --parallelism-config-sp-backend= "
            "--parallelism-config-sp-seq-length= --parallelism-config-sp-seq-length-is-variable= "
            "--parallelism-config-sp-attn-implementation=",
        ),
        **flags("read", "--cpu --use-cpu", ON_CPUS),
        **flags("refused", "--mpirun-hostfile= --mpirun-ccl=",
                "start the program with mpirun instead of accelerate launch"),
        **flags("refused", "--tpu --tpu-cluster --no-tpu-cluster --tpu-use-cluster --tpu-use-sudo --vm= --env= "
                "--aws-access-key-id= --aws-secret-access-key=", "remove the flag: the hosts have GPUs, not TPUs"),
    },
    each_host=accelerate,
)  # fmt: skip
LLAMAFACTORY = Typed(
    "llamafactory-cli train", "", ("llamafactory-cli train", "lmf train"), ("llamafactory.cli train",),
    each_host=llamafactory,
)  # fmt: skip
_AXOLOTLS_OWN = Typed("axolotl train", "", (), flags={
    name: flag for name, flag in ACCELERATE.flags.items() if flag.why == CHOSEN and not name.startswith("--deepspeed")
})  # fmt: skip
"""Its flags for hosts and processes, which it hands to Accelerate."""
SWIFT = Typed(
    "swift", "", ("swift sft", "swift pt", "swift rlhf"), ("swift.cli.main sft", "swift.cli.main pt",
    "swift.cli.main rlhf"), each_host=swift,
)  # fmt: skip
AXOLOTL = Typed("axolotl train", "", ("axolotl train",), ("axolotl.cli.main train",), each_host=axolotl)
TUNE = Typed("tune run", "", ("tune run",), ("torchtune._cli.tune run",), each_host=tune)
FABRIC = Typed(
    "fabric run", "", ("fabric run model", "fabric run", "lightning run model"),
    ("lightning run model", "lightning.fabric.cli run"),
    {
        **flags("taken", "--devices= --num-nodes= --node-rank= --main-address= --main-port=", CHOSEN),
        **flags("kept", "--accelerator= --strategy= --precision="),
    },
    each_host=fabric,
)  # fmt: skip
COMPOSER = Typed(
    "composer", "", ("composer",), ("composer.cli.launcher",),
    {
        **flags("taken", "-n= --nproc= --world-size= --base-rank= --node-rank= --master-addr= --master-port=", CHOSEN),
        **flags("kept", "--stdout= --stderr= -v --verbose -m --module-mode -c --command-mode"),
    },
    each_host=composer, is_it=lambda words: bool(words) and (words[0].endswith(".py") or _has_file(words)),
)  # fmt: skip


def _has_file(words: tuple[str, ...]) -> bool:
    """Return whether flags and a Python file follow; PHP's ``composer`` has other words."""
    modes = ("-m", "--module_mode", "-c", "--command_mode")
    return words[0].startswith("-") and any(word.endswith(".py") or word in modes for word in words)


COLOSSALAI = Typed(
    "colossalai run", "", ("colossalai run",), (),
    {
        **flags(
            "taken",
            "-H= --hostfile= -host= --host= --include= --exclude= --num-nodes= --nproc-per-node= --master-addr= "
            "--master-port= --ssh-port=",
            CHOSEN,
        ),
        **flags("kept", "-m"),
        **flags("read", "--extra-launch-args="),
    },
    each_host=colossalai,
)  # fmt: skip
