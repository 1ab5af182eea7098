"""Launchers that run themselves, once on each host: their command lines with gpurun's hosts, ranks and ports. Pure.

Only flags for hosts, ranks, addresses, ports and numbers of processes are replaced. All others stay, so that a
launcher's precision, FSDP, DeepSpeed and configuration files do what they always do. The values are those of the
variables that `gpurun.launch.launchers.direct.host_environment` gives to the only process of each host.

Sources: `accelerate.commands.launch` of Accelerate 1.12, `torchtune._cli.run` of torchtune 0.6,
`lightning_fabric.cli` of Lightning 2.6, `llamafactory.cli` of LLaMA-Factory 0.9.3, `axolotl.cli` of Axolotl 0.19.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from gpurun.errors import BadInput
from gpurun.launch.launchers.lines.flags import (
    CHOSEN,
    Counts,
    FoundFlag,
    Meaning,
    Typed,
    flags,
    number_of,
    read_flags,
    replaced_of,
    started_by_shell,
)
from gpurun.launch.launchers.lines.torch import OF_TORCHRUN, TORCHRUN, torchrun_on_each_host

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
STANDARD = {"--deepspeed_multinode_launcher": "standard"}
"""DeepSpeed's other ways start a second launcher, by SSH."""


def _of_accelerate(found: Sequence[FoundFlag]) -> dict[str, str]:
    names = {each.name for each in found}
    kind = {MULTI_GPU: ""} if "--multi-gpu" in names or not names & {*KINDS} else {}
    return {**kind, **OF_ACCELERATE, **(STANDARD if names & {"--use-deepspeed", "--config-file"} else {})}


def accelerate(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what ``accelerate launch`` runs on each host."""
    found, script = read_flags(ACCELERATE, words)
    taken, kept = replaced_of(found)
    counts = Counts(number_of(ACCELERATE.name, found, "--num-processes"))
    return Meaning(started_by_shell(program, _of_accelerate(found), (*kept, *script)), taken=taken, counts=counts)


def tune(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what torchtune's ``tune run`` runs on each host."""
    return torchrun_on_each_host(program, words, OF_TUNE)


def fabric(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what Lightning's ``fabric run`` runs on each host."""
    found, script = read_flags(FABRIC, words)
    taken, kept = replaced_of(found)
    return Meaning(started_by_shell(program, OF_FABRIC, (*kept, *script)), taken=taken)


def llamafactory(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what ``llamafactory-cli train`` runs on each host. It reads where its hosts are from variables; without
    FORCE_TORCHRUN, it would train alone on a host with one GPU.
    """
    return Meaning((*program, *words), env={"FORCE_TORCHRUN": "1"})


def axolotl(program: tuple[str, ...], words: tuple[str, ...]) -> Meaning:
    """Return what ``axolotl train`` runs on each host. Flags behind ``--`` are its launcher's."""
    own, behind = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, ())
    launcher = next((own[at + 1] for at, word in enumerate(own[:-1]) if word == "--launcher"), "")
    launcher = launcher or next((word[11:] for word in own if word.startswith("--launcher=")), "accelerate")
    if launcher not in ("accelerate", "torchrun"):
        raise BadInput(
            f"axolotl train: with the launcher {launcher}, it knows nothing of other hosts and GPUs",
            hint="leave --launcher out",
        )
    found, more = read_flags(ACCELERATE if launcher == "accelerate" else TORCHRUN, behind)
    taken, kept = replaced_of(found)
    given = _of_accelerate(found) if launcher == "accelerate" else OF_TORCHRUN
    flags = " ".join(f"{name} {value}".strip() for name, value in given.items())
    text = f'exec {shlex.join((*program, *own))} -- "$@" {flags}'
    return Meaning(("sh", "-c", text, program[0], *kept, *more), taken=taken)


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
        **flags("refused", "--cpu --use-cpu", "for a gang on CPUs write `mpirun python3 SCRIPT.py`"),
        **flags("refused", "--mpirun-hostfile= --mpirun-ccl=", "write the line with mpirun"),
        **flags("refused", "--tpu --tpu-cluster --no-tpu-cluster --tpu-use-cluster --tpu-use-sudo --vm= --env= "
                "--aws-access-key-id= --aws-secret-access-key=", "leave it out: gpurun's hosts have GPUs"),
    },
    each_host=accelerate,
)  # fmt: skip
LLAMAFACTORY = Typed(
    "llamafactory-cli train", "", ("llamafactory-cli train", "lmf train"), ("llamafactory.cli train",),
    each_host=llamafactory,
)  # fmt: skip
AXOLOTL = Typed("axolotl train", "", ("axolotl train",), ("axolotl.cli.main train",), each_host=axolotl)
TUNE = Typed("tune run", "", ("tune run",), ("torchtune._cli.tune run",), each_host=tune)
FABRIC = Typed(
    "fabric run", "", ("fabric run", "lightning run model"), ("lightning run model", "lightning.fabric.cli run"),
    {
        **flags("taken", "--devices= --num-nodes= --node-rank= --main-address= --main-port=", CHOSEN),
        **flags("kept", "--accelerator= --strategy= --precision="),
    },
    each_host=fabric,
)  # fmt: skip
