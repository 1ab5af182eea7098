"""The command lines of launchers that tell ranks what ``torchrun`` tells them. Pure.

Sources: `torch.distributed.run` of PyTorch 2.13, `deepspeed.launcher.runner` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

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
    taken_of,
    value_of,
)

LOGS = "gpurun keeps the output of every rank: `gpurun logs --rank N`"
RESTARTS = (
    "gpurun does not restart a failed program; `gpurun submit --max-restarts N` restarts a job after a host's fault"
)
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
    return Meaning(python(found, words, interpreter), taken=taken_of(found), env=env, counts=counts)


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
