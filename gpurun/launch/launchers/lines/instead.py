"""What to write instead of a launcher that gpurun cannot take the place of. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping

from gpurun.errors import BadInput
from gpurun.launch.launchers.lines.flags import Flag, FoundFlag, Typed, flags, read_flags, value_of
from gpurun.launch.launchers.lines.wrappers import ASSIGNMENT


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
