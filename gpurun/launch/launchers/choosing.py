"""Choose the launcher of a job whose command and recipe name none, by what its program says. Pure.

First it finds the program in a command, and looks through what profiles or debugs it. Then it asks what a Python file
uses, and chooses the launcher. The files themselves are read by `gpurun.head.submit`.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from gpurun.errors import BadInput
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers.direct import SRUN as BY_SLURM
from gpurun.launch.launchers.direct import TASKS, TORCHRUN
from gpurun.launch.launchers.horovod import GLOO
from gpurun.launch.launchers.line import DEPTH, ScriptLaunch, about_directives, read_line, read_start
from gpurun.launch.launchers.mpirun import MPIRUN as BY_MPIRUN
from gpurun.launch.launchers.table import MPIRUN, SRUN
from gpurun.launch.launchers.words import SHELLS, look_through, name_of, shell_text, simple_commands
from gpurun.quantities import count

# Run a shell's text that starts launchers once on each host, and only on hosts where that is right. Pure.


VARIABLES = "$NNODES, $NODE_RANK, $MASTER_ADDR and $MASTER_PORT"


def once_on_hosts(
    spec: JobSpec, launches: Sequence[ScriptLaunch], where: str, *, by_srun: bool = False
) -> tuple[JobSpec, str]:
    """Return the job that runs its command once on each host, and what a person is told.

    Args:
        launches: the launchers that the command starts; one at least.
        where: the text that starts them, for people: ``train.sh``, or ``the command``.
        by_srun: ``srun`` stands in front, so the text finds Slurm's variables, too.

    Raises:
        BadInput: the text starts its processes on other hosts than gpurun can give it.
    """
    names = ", ".join(dict.fromkeys(each.typed.name for each in launches))
    refuse_left(launches, where)
    if slurms := [each for each in launches if each.typed is SRUN or each.typed.is_queue]:
        found = max((each for each in slurms if each.typed is SRUN), key=lambda each: len(each.line), default=None)
        srun = found.line if found is not None else "PROGRAM ARGUMENTS"
        besides = "".join(f"\n    {each}" for each in (found.besides if found is not None else ()))
        raise BadInput(
            f"{where} calls {slurms[0].typed.name}, but gpurun itself queues jobs and starts ranks",
            hint=f"write the line that starts the ranks as the command: gpurun submit -n {spec.gpus} … -- {srun}\n    "
            f"gpurun reads the line, and starts the ranks without srun{besides}",
        )
    if any(each.names_hosts for each in launches):
        raise BadInput(
            f"{where} names hosts for {names}, but gpurun chooses the hosts",
            hint=f"use {VARIABLES} in {where}: gpurun sets these variables on each host\n    "
            f"or write the launcher's line as the command: "
            f"gpurun submit -n {spec.gpus} … -- {next(each.line for each in launches if each.names_hosts)}",
        )
    each_host, why = _gpus_of_a_host(spec, launches, where)
    given = spec.constraints.gpus_per_host
    if each_host is not None and given not in (None, each_host):
        raise BadInput(
            f"{where} starts {names} for {count(each_host, 'GPU')} on each host, but gpus_per_host is {given}",
            hint=f"remove gpus_per_host, or change the numbers in {where}",
        )
    constraints = replace(spec.constraints, gpus_per_host=each_host if each_host is not None else given)
    said = f"{where} starts {names}, so gpurun runs {where} once on each host{why}"
    launcher = BY_SLURM.name if by_srun else TASKS.name
    return replace(spec, launcher=launcher, one_per_host=True, constraints=constraints), said


def refuse_left(launches: Sequence[ScriptLaunch], where: str) -> None:
    """Refuse a text that ends while a launcher runs in the background: the job would end with it, and succeed."""
    if left := next((each for each in launches if each.is_left), None):
        raise BadInput(
            f"{where} starts {left.typed.name} in the background (&) and does not wait, so the job would end at once",
            hint=f"remove the & (and nohup), or write `wait` at the end of {where}",
        )


def _gpus_of_a_host(spec: JobSpec, launches: Sequence[ScriptLaunch], where: str) -> tuple[int | None, str]:
    """Return the GPUs of the job on each of its hosts, and why; None if they may be as many as gpurun likes."""
    hosts = max((each.hosts for each in launches if each.hosts is not None), default=None)
    numbers = [(each.per_host, each) for each in launches if each.per_host is not None]
    numbers = [(number, each) for number, each in numbers if each.typed is not MPIRUN or number > spec.gpus]
    per_host = (
        max([number for number, _ in numbers] + [sum(number for number, each in numbers if each.at_once)]) or None
    )
    total = hosts * per_host if hosts is not None and per_host is not None else None
    wanted = per_host if total is None else total
    if wanted is not None and (spec.gpus % wanted if total is None else spec.gpus != wanted):
        on = "on each host" if hosts is None else "on one host" if hosts == 1 else f"on {hosts} hosts"
        some = count(wanted, "process", "processes")
        taken = next((each.line for number, each in numbers if number == per_host and each.typed.launcher), "")
        line = f"\n    or write the launcher's own line as the command: gpurun submit -n {wanted} … -- {taken}"
        raise BadInput(
            f"{where} starts {some} {on}, but the job has {count(spec.gpus, 'GPU')} and starts one process for each "
            "GPU",
            hint=f"use gpurun submit -n {wanted}, or change the numbers in {where}"
            + (line if taken and "…" not in taken else ""),
        )
    if hosts is not None and spec.gpus % hosts:
        raise BadInput(
            f"{where} starts its processes on {hosts} hosts: {count(spec.gpus, 'GPU')} cannot be divided by {hosts}",
            hint=f"choose another number of GPUs with -n, or change the numbers in {where}",
        )
    if hosts == 1:
        return spec.gpus, (
            f"; {where} is written for one host, so the job stays on one host (for more hosts, use {VARIABLES})"
        )
    if hosts is not None:
        return spec.gpus // hosts, f": {hosts} hosts"
    return per_host, "" if per_host is None else f", with {count(per_host, 'GPU')} on each"


# Look through the profilers and debuggers that people put in front of a program. Pure.


PYTHON = re.compile(r"(python|pypy)[0-9.]*(-dbg)?\Z")

_COMMANDS = (
    "nsys ncu nv-nsight-cu-cli nvprof dlprof compute-sanitizer cuda-memcheck cuda-gdb gdb lldb rr valgrind perf strace "
    "ltrace heaptrack py-spy austin catchsegv rocprof rocprofv2 rocprofv3 rocgdb tini dumb-init"
)
COMMANDS = frozenset(_COMMANDS.split())
"""Programs that start a command line of their own, behind flags of any kind."""
MODULES: Mapping[str, str] = {
    "cProfile": "-o -s --outfile --sort",
    "pdb": "-c --command",
    "ipdb": "-c --command",
    "debugpy": "--listen --connect --log-to",
    "torch.utils.bottleneck": "",
    "coverage run": "--rcfile --source --source-dirs --include --omit --data-file --context --concurrency",
    "kernprof": "-o -s -u -p -i --outfile --setup --unit --prof-mod --output-interval",
    "scalene": "--outfile --profile-only --profile-exclude --program-path --profile-interval --cpu-percent-threshold",
    "memory_profiler": "-o --precision --backend",
    "mprof run": "-o -T --output --interval --backend",
    "memray run": "-o --output --live-port",
    "viztracer": "-o --output_file --tracer_entries --max_stack_depth --min_duration --include_files --exclude_files",
    "pyinstrument": "-o -r -i --outfile --renderer --interval",
}
"""Programs and modules that run a Python file, or a module behind ``-m``, and their flags that have a value."""


def behind_command(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return what a profiler or debugger runs, as in ``nsys profile -o x python t.py``; None if words do not tell."""
    name = name_of(words)
    if name not in COMMANDS:
        return behind_module((name, *words[1:]))
    for at in range(1, len(words)):
        before, program = words[at - 1], name_of(words[at:])
        is_value = before.startswith("-") and "=" not in before and before not in ("--", "--args")
        if PYTHON.match(program) or program in SHELLS or (program.endswith((".py", ".sh")) and not is_value):
            return words[at:]
    return None


def behind_module(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return what a profiler of Python runs, as a command: ``cProfile -o x t.py``; None if it is none."""
    for name, with_value in MODULES.items():
        at = len(name.split())
        if words[:at] != tuple(name.split()):
            continue
        while at < len(words) and words[at].startswith("-"):
            if words[at] in ("-m", "--module"):
                return ("python", "-m", *words[at + 1 :])
            if words[at] == "--":
                at += 1
                break
            at += 2 if words[at] in with_value.split() else 1
        if at >= len(words):
            return None
        return words[at:] if PYTHON.match(name_of(words[at:])) else ("python", *words[at:])
    return None


# Find the programs that a command or a shell's text starts. Pure.


_HARMLESS = (
    "true false : [ test echo printf sleep wait yes seq cat head tail wc tee grep sort uname hostname id whoami date "
    "pwd cd ls find stat du df env printenv export set ulimit umask exit mkdir touch rm cp mv ln chmod tar ps top free "
    "nproc uptime lscpu lspci lsmod dmesg ip ifconfig ping getent curl wget kill trap sync dd nvidia-smi nvcc ibstat "
    "ibv_devinfo ibv_devices ibdev2netdev show_gids rdma"
)
HARMLESS = frozenset(_HARMLESS.split())
"""Programs that train nothing."""
SAY = ("echo", "printf")
"""Programs that only print their words, whatever these name."""
NAMES_PYTHON = re.compile(r"\b(python|pypy)[0-9.]*\b")
TAKES = re.compile(r"-[A-Za-z]*?[XWQ]\Z")
NOT_LITERAL = re.compile(r"[$`*?~\[{\0]")
"""What a shell replaces, so that a word does not say which folder it means."""
MOST_PARTS, MOST_LETTERS = 1000, 1000


class StartedProgram(NamedTuple):
    """A program that a command starts.

    Attributes:
        kind: ``python`` and ``shell``: a file; ``module``: of ``python -m``; ``source``: of ``python -c``;
            ``harmless``: it trains nothing; ``launcher``: it starts processes itself; ``program``: any other;
            ``unread``: words do not show what it runs.
        what: the path, the dotted name, the text, or the program's name.
        in_shell: a shell's text starts it.
        arguments: the words behind a file or a module.
        folder: where the shell's text has gone with ``cd``, as far as words tell; "": it has not.
    """

    kind: Literal["python", "shell", "module", "source", "harmless", "launcher", "program", "unread"]
    what: str
    in_shell: bool = False
    arguments: tuple[str, ...] = ()
    folder: str = ""


def programs_of(words: tuple[str, ...]) -> tuple[StartedProgram, ...]:
    """Return the programs that a command starts, wrappers, profilers and debuggers looked through."""
    for _ in range(DEPTH):
        if (text := shell_text(words)) is not None:
            return programs_in(text)
        inner = look_through(words)
        if (behind := _profiled(words) if inner is None else inner.words) is None:
            break
        words = behind
    return (_program(words) if words else StartedProgram("harmless", ""),)


def _program(words: tuple[str, ...]) -> StartedProgram:
    name = name_of(words)
    if words[0].startswith(("$", "`")):
        return StartedProgram("unread", words[0])
    if PYTHON.match(name):
        return _by_python(words)
    if name in SHELLS:
        at = 1
        while at < len(words) and words[at].startswith(("-", "+")):
            at += 2 if words[at].endswith("o") else 1
        found = StartedProgram("unread", name)
        return found if at >= len(words) else StartedProgram("shell", words[at], arguments=words[at + 1 :])
    if name in HARMLESS:
        return StartedProgram("harmless", name)
    kind: Literal["python", "shell", "program"] = "program"
    if name.endswith((".py", ".sh")):
        kind = "python" if name.endswith(".py") else "shell"
    return StartedProgram(kind, words[0], arguments=words[1:])


def programs_in(text: str, folder: str = "") -> tuple[StartedProgram, ...]:
    """Return the programs that a shell's text starts in a folder, as far as words can tell."""
    found = list[StartedProgram]()
    for command in simple_commands(text):
        if len(found) >= MOST_PARTS:
            found.append(StartedProgram("unread", "a text with so many commands", True))
            break
        if (typed := read_start(command)) is not None:
            found.append(StartedProgram("launcher", typed.name, True))
            continue
        if command[0] == "eval":
            found.append(StartedProgram("unread", command[0], True))
            continue
        if command[0] in (".", "source") and "".join(command[1:2]).startswith("$"):
            continue  # such a file sets variables, as a virtual environment's does
        if command[0] in ("cd", "pushd"):
            folder = _gone(folder, command[1:])
        sourced = command[1:] if command[0] in (".", "source") else command
        hides = any(NAMES_PYTHON.search(word) for word in command)
        for part in programs_of(sourced):
            is_hidden = hides and part.kind in ("program", "harmless") and part.what not in SAY
            inside = part._replace(in_shell=True, folder=_joined(folder, part.folder))
            found.append(StartedProgram("unread", part.what, True) if is_hidden else inside)
    return tuple(found)


def _gone(folder: str, words: tuple[str, ...]) -> str:
    """Return where ``cd`` leads; "" if words do not tell."""
    targets = [word for word in words if not word.startswith("-")]
    if len(targets) != 1 or len(words) > 2 or NOT_LITERAL.search(targets[0]):
        return ""
    return _joined(folder, targets[0])


def _joined(folder: str, path: str) -> str:
    joined = posixpath.normpath(posixpath.join(folder, path or "."))
    return joined if joined != "." and len(joined) <= MOST_LETTERS else ""


def _profiled(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return what a profiler or debugger in front runs; None if there is none."""
    if not PYTHON.match(name_of(words)):
        return behind_command(words)
    program = _by_python(words)
    return behind_module((*program.what.split(), *program.arguments)) if program.kind == "module" else None


def _by_python(words: tuple[str, ...]) -> StartedProgram:
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        if word.startswith("--"):
            return (
                StartedProgram("harmless", word) if word in ("--version", "--help") else StartedProgram("unread", word)
            )
        flag = next((letter for letter in word[1:] if letter in "cmVhXWQ"), "-")
        if flag in ("V", "h"):
            return StartedProgram("harmless", word)
        if flag in ("c", "m"):
            inside = word.partition(flag)[2]
            what, *behind = (inside, *words[at + 1 :]) if inside else words[at + 1 :] or ("",)
            return StartedProgram("source" if flag == "c" else "module", what, arguments=tuple(behind))
        at += 2 if TAKES.match(word) else 1
    if at >= len(words) or words[at] == "-":
        return StartedProgram("unread", words[0])
    return StartedProgram("python", words[at])


# What a Python file says of how its processes find each other: the libraries that it uses. Pure.


MANY = 200_000
"""The most nodes of a file that are looked at; real programs have fewer than 50,000."""


class Clue(NamedTuple):
    """A library that says how a program is started.

    Attributes:
        name: the library's name for people.
        means: the launcher of its ranks; "" if it says nothing. ``starts``: the program starts the processes of its
            host itself. ``one``: one process uses several GPUs.
        names: dotted names that show its use; the longest one that fits counts.
        is_soft: its programs also run in one process with several GPUs, if they say so.
    """

    name: str
    means: Literal["horovod", "mpirun", "torchrun", "deepspeed", "jax", "tensorflow", "starts", "one", ""]
    names: str
    is_soft: bool = False


def below(package: str, names: str) -> str:
    """Return dotted names of a package."""
    return " ".join(f"{package}.{name}" for name in names.split())


ASKS = (
    "Strategy get_strategy has_strategy get_replica_context in_cross_replica_context OneDeviceStrategy ReduceOp "
    "InputContext InputOptions DistributedDataset DistributedIterator DistributedValues ReplicaContext RunOptions "
    "CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce ReductionToOneDevice TPUStrategy experimental.TPUStrategy "
    "cluster_resolver.TPUClusterResolver"
)
TRAINERS = "Trainer TrainingArguments Seq2SeqTrainer Seq2SeqTrainingArguments trainer training_args"
ENCODERS = (
    "SentenceTransformerTrainer SparseEncoderTrainer trainer cross_encoder.CrossEncoderTrainer cross_encoder.trainer "
    "sparse_encoder.SparseEncoderTrainer sparse_encoder.trainer"
)
CLUES = (
    Clue("Horovod", "horovod", "horovod"),
    Clue("mpi4py", "mpirun", "mpi4py"),
    Clue("jax.distributed", "jax", "jax.distributed"),
    Clue("DeepSpeed", "torchrun", "deepspeed"),
    Clue("torch.distributed", "torchrun", "torch.distributed apex.parallel torch.nn.parallel.distributed"),
    Clue("DistributedDataParallel", "torchrun", "torch.nn.parallel.DistributedDataParallel"),
    Clue("torch.distributed", "", below("torch.distributed", "is_available is_initialized get_rank get_world_size")),
    Clue("Lightning", "torchrun", "lightning pytorch_lightning lightning_fabric"),
    Clue("Accelerate", "torchrun", "accelerate", is_soft=True),
    Clue("Accelerate", "", "accelerate.init_empty_weights accelerate.infer_auto_device_map accelerate.utils"),
    Clue("Transformers' Trainer", "torchrun", below("transformers", TRAINERS), is_soft=True),
    Clue("TRL", "torchrun", "trl", is_soft=True),
    Clue("Sentence Transformers' trainer", "torchrun", below("sentence_transformers", ENCODERS), is_soft=True),
    Clue("fastai.distributed", "torchrun", "fastai.distributed"),
    Clue("Colossal-AI", "torchrun", "colossalai"),
    Clue("Composer", "torchrun", "composer"),
    Clue("FairScale", "torchrun", "fairscale"),
    Clue("tf.distribute", "tensorflow", "tensorflow.distribute"),
    Clue("tf.distribute", "", below("tensorflow.distribute", ASKS)),
    Clue("MirroredStrategy", "one", "tensorflow.distribute.MirroredStrategy"),
    Clue("CentralStorageStrategy", "one", "tensorflow.distribute.experimental.CentralStorageStrategy"),
    Clue("DataParallel", "one", "torch.nn.DataParallel torch.nn.parallel.DataParallel torch.nn.parallel.data_parallel"),
    Clue("keras.distribution", "one", below("keras.distribution", "DataParallel ModelParallel")),
    Clue("multi_gpu_model", "one", "keras.utils.multi_gpu_model tensorflow.keras.utils.multi_gpu_model"),
    Clue("several devices of JAX", "one", "jax.pmap jax.make_mesh jax.sharding.Mesh flax.jax_utils.replicate"),
    Clue("dispatch_model", "one", "accelerate.dispatch_model accelerate.load_checkpoint_and_dispatch"),
    Clue("torch.multiprocessing", "starts", "torch.multiprocessing.spawn torch.multiprocessing.start_processes "
         "torch.multiprocessing.Process"),
    Clue("detectron2's launch()", "starts", "detectron2.engine.launch detectron2.engine.launch.launch"),
    Clue("YOLOX's launch()", "starts", "yolox.core.launch"),
    Clue("notebook_launcher", "starts", "accelerate.notebook_launcher"),
    Clue("vLLM", "starts", "vllm.LLM vllm.entrypoints"),
    Clue("SGLang", "starts", "sglang.launch_server sglang.Engine"),
    Clue("Papermill", "one", "papermill"),
    Clue("Jupyter", "one", "jupyter jupyterlab ipykernel_launcher"),
    Clue("TensorBoard", "one", "tensorboard.main"),
    Clue("Ultralytics", "starts", below("ultralytics", "YOLO YOLOE YOLOWorld RTDETR NAS SAM FastSAM models engine")),
)  # fmt: skip
ASKED = Clue("--launcher pytorch", "torchrun", "")
"""The flag by which OpenMMLab's programs join a gang."""
DEVICE_MAP = Clue("device_map", "one", "")
LOCAL_RANK = Clue("DeepSpeed and its flag --local_rank", "deepspeed", "")
_OF_COMMANDS = {
    "vllm": "vllm.LLM", "sglang": "sglang.Engine", "yolo": "ultralytics.YOLO", "papermill": "papermill",
    "jupyter": "jupyter", "tensorboard": "tensorboard.main",
}  # fmt: skip
"""Programs that are one process for all GPUs of a host, or start its processes themselves: a name of their clue."""
TENSORRT = Clue("TensorRT-LLM", "starts", "")
_BY_NAME: Mapping[str, Clue] = {name: clue for clue in CLUES for name in clue.names.split()}
KNOWN = frozenset(name.partition(".")[0] for name in _BY_NAME)
"""The packages of clues. They come from the image, whatever lies beside the program."""


@dataclass(frozen=True)
class PythonSource:
    """What a Python file says.

    Attributes:
        clues: what it uses → the first line that uses it.
        imports: its imports that may be files beside it: dots in front, and a dotted name.
        damage: why it cannot be read; "" if it can.
    """

    clues: Mapping[Clue, int] = field(default_factory=dict)
    imports: tuple[tuple[int, str], ...] = ()
    damage: str = ""


def read_source(data: bytes | str) -> PythonSource:
    """Read a Python file. Damage of any kind is in the answer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data)
    except SyntaxError as error:
        return PythonSource(damage=f"line {error.lineno or 1}: {error.msg}")
    except (ValueError, LookupError, RecursionError, MemoryError) as error:
        return PythonSource(damage=f"not valid Python: {str(error)[:80] or type(error).__name__}")
    nodes = list(_nodes(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    bound, used, local = _imported(imports)
    used += [found for node in nodes if (found := _dotted(node, bound)) is not None]
    clues = dict[Clue, int]()
    for clue, line in [*_clues(used), *_device_maps(nodes)]:
        clues[clue] = min(line, clues.get(clue, line))
    deepspeed = next((line for clue, line in clues.items() if clue.name == "DeepSpeed"), None)
    if deepspeed is not None and any(
        isinstance(node, ast.Constant) and node.value in ("--local_rank", "--local-rank") for node in nodes
    ):
        clues[LOCAL_RANK] = deepspeed
    return PythonSource(clues, tuple(dict.fromkeys(local)))


def name_clues(names: Sequence[str]) -> tuple[Clue, ...]:
    """Return the clues of names that a program has imported."""
    return tuple(clue for clue, _ in _clues([(name, 0) for name in names]))


def command_clue(program: str) -> Clue | None:
    """Return the clue of an installed program, such as ``vllm``; None if nothing is known of it."""
    if program in ("trtllm-serve", "trtllm-bench"):
        return TENSORRT
    name = _OF_COMMANDS.get("jupyter" if program.startswith("jupyter-") else program)
    return None if name is None else _BY_NAME[name]


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file, and of an attribute such as ``a.b.c`` only the whole."""
    stack, left = [tree], MANY
    while stack and left:
        node = stack.pop()
        left -= 1
        yield node
        while isinstance(node, ast.Attribute):
            node = node.value
        stack += reversed(list(ast.iter_child_nodes(node)))


def _imported(
    nodes: Sequence[ast.Import | ast.ImportFrom],
) -> tuple[dict[str, str], list[tuple[str, int]], list[tuple[int, str]]]:
    """Return variable → what it is, what is imported with its line, and what may be a file beside the program."""
    bound, used, local = dict[str, str](), list[tuple[str, int]](), list[tuple[int, str]]()
    for node in nodes:
        for each in node.names:
            if isinstance(node, ast.Import):
                whole, level, top = each.name, 0, each.name.partition(".")[0]
                bound[each.asname or top] = each.name if each.asname else top
            else:
                module, level = node.module or "", node.level
                whole = module if each.name == "*" else f"{module}.{each.name}".lstrip(".")
                if module:
                    local.append((level, module))
                if level == 0 and each.name != "*":
                    bound[each.asname or each.name] = whole
            local.append((level, whole))
            if level == 0:
                used.append((_plain(whole), node.lineno))
    return bound, used, [(level, name) for level, name in local if level or name.partition(".")[0] not in KNOWN]


def _dotted(node: ast.AST, bound: Mapping[str, str]) -> tuple[str, int] | None:
    """Return what an attribute means, as in ``dist.barrier`` after ``import torch.distributed as dist``; else None."""
    if not isinstance(node, ast.Attribute):
        return None
    names, line, at = list[str](), node.lineno, node.value
    names.append(node.attr)
    while isinstance(at, ast.Attribute) and len(names) < 20:
        names.append(at.attr)
        at = at.value
    if not isinstance(at, ast.Name) or at.id not in bound:
        return None
    return _plain(".".join([bound[at.id], *reversed(names)])), line


def _plain(name: str) -> str:
    return name.replace("tensorflow.compat.v1.", "tensorflow.").replace("tensorflow.compat.v2.", "tensorflow.")


def _clues(used: Sequence[tuple[str, int]]) -> Iterator[tuple[Clue, int]]:
    """Yield what the names show. A name counts only if no longer one follows it: ``a.b`` says less than ``a.b.c``."""
    inner = {name[:at] for name, _ in used for at, letter in enumerate(name) if letter == "."}
    for name, line in used:
        if name in inner:
            continue
        parts = name.split(".")
        for size in range(len(parts), 0, -1):
            if (clue := _BY_NAME.get(".".join(parts[:size]))) is not None:
                yield clue, line
                break


def _device_maps(nodes: Sequence[ast.AST]) -> Iterator[tuple[Clue, int]]:
    """Yield ``device_map="auto"``: parts of one model on the GPUs of one process."""
    for node in nodes:
        given = node.value if isinstance(node, ast.keyword) and node.arg == "device_map" else None
        if isinstance(given, ast.Constant) and given.value in ("auto", "balanced", "balanced_low_0", "sequential"):
            yield DEVICE_MAP, given.lineno


# Choose the launcher of a job whose command and recipe name none. Pure.


MOST_SHOWN = 160
BY_ITSELF = ("starts", "one")


@dataclass(frozen=True)
class ProgramClues:
    """What a job's program says of how its processes find each other.

    Attributes:
        clues: each clue → where it is, such as ``train.py line 3``.
        is_harmless: the command visibly trains nothing.
        launches: the launchers that a shell script of it starts.
        starts: that script.
        unread: why gpurun cannot read the program; "" if it can.
        looked: what gpurun has read, for people.
        unknown: the program that the command starts, if it is no script and gpurun does not know it; "" otherwise.
        directives: the ``#SBATCH`` lines of the first shell script that has some: flags and values.
        batch: that script.
        function: the name of the function of Python that each rank calls; "": each runs a command.
    """

    clues: Mapping[Clue, str] = field(default_factory=dict)
    is_harmless: bool = False
    launches: tuple[ScriptLaunch, ...] = ()
    starts: str = ""
    unread: str = ""
    looked: str = ""
    directives: tuple[tuple[str, str], ...] = ()
    batch: str = ""
    function: str = ""
    unknown: str = ""


@dataclass(frozen=True)
class LauncherChoice:
    """A chosen launcher.

    Attributes:
        spec: the job with the launcher.
        said: what a person is told.
        doubt: nothing says how the processes find each other: submit must not run the job, and the launcher is a guess.
        stays: one process uses several GPUs, so the gang stays on one host.
    """

    spec: JobSpec
    said: tuple[str, ...] = ()
    doubt: BadInput | None = None
    stays: str = ""


def needs_choice(spec: JobSpec, given: Collection[str]) -> bool:
    """Return whether nobody names the launcher: neither a recipe or flag (`given`, fields of the spec) nor the command.

    Raises:
        BadInput: gpurun cannot read the command.
    """
    if "launcher" in given:
        return False
    line = read_line(spec.command)
    return line.typed is None and line.hidden is None and bool(line.whole)


def choose_launcher(spec: JobSpec, given: Collection[str], found: ProgramClues) -> LauncherChoice:
    """Choose the launcher of a job for which `needs_choice`.

    Args:
        given: the fields of the spec that a recipe or a flag has given.
        found: what the program says.

    Raises:
        BadInput: a shell script of the job starts processes on other hosts than gpurun can give it.
    """
    about = about_directives(found.directives, found.batch, spec)
    try:
        choice = _as_srun(_chosen(spec, given, found), found)
    except BadInput as error:
        error.hint = "\n    ".join(filter(None, (error.hint, *about)))
        raise
    return replace(choice, said=(*choice.said, *about))


def _chosen(spec: JobSpec, given: Collection[str], found: ProgramClues) -> LauncherChoice:
    told = next((name for name in ("horovod", "controller") if name in given), None)
    means, alone = agreed(found.clues), replace(spec, launcher=TASKS.name)
    if spec.one_per_host:
        choice = LauncherChoice(alone)
    elif told is not None:
        choice = _by(spec, GLOO.name, f"the job has `{told}`")
    elif found.launches:
        once, said = once_on_hosts(spec, found.launches, found.starts, by_srun=read_line(spec.command).by_srun)
        is_one = once.constraints != spec.constraints and once.constraints.gpus_per_host == spec.gpus
        stays = f"{found.starts} starts {found.launches[0].typed.name} for one host" if is_one else ""
        choice = LauncherChoice(once, (said,), stays=stays)
    elif means is not None and not (means in BY_ITSELF and _needs_hosts(spec)):
        choice = _by_clue(spec, means, found.clues)
    elif spec.gpus == 1:
        choice = LauncherChoice(alone)
    elif found.is_harmless:
        said = (
            f"gpurun runs a copy for each of the {spec.gpus} GPUs ({TASKS.name}), because the command starts no "
            "launcher and no Python"
        )
        choice = LauncherChoice(alone, (said,))
    else:
        choice = LauncherChoice(alone, doubt=_doubt(spec, found))
    return choice


def _as_srun(choice: LauncherChoice, found: ProgramClues) -> LauncherChoice:
    """Return the choice for a line with ``srun``: its processes are told what Slurm and PyTorch tell.

    Programs that need MPI or a launcher of their own keep it. A compiled program behind ``srun`` uses MPI as a rule,
    but a command of a Python package does not: without ``--mpi``, a gang of such a program is in doubt.
    """
    spec, line = choice.spec, read_line(choice.spec.command)
    is_told = spec.launcher in (TASKS.name, TORCHRUN.name) and not spec.one_per_host
    if not is_told or not line.by_srun:
        return choice
    slurm = replace(spec, launcher=BY_SLURM.name)
    if spec.gpus == 1 or (choice.doubt is None and not line.by_mpi):
        return LauncherChoice(slurm)
    if found.unknown and line.by_mpi:
        said = f"{BY_MPIRUN.name} starts the ranks: srun's --mpi says that {found.unknown} uses MPI"
        return LauncherChoice(replace(spec, launcher=BY_MPIRUN.name), (said,))
    if found.unknown:
        return LauncherChoice(slurm, doubt=_doubt_of_srun(spec, found))
    said = "gpurun ignores srun's --mpi. A program that uses MPI needs --launcher mpirun"
    return LauncherChoice(slurm, (said,) if line.by_mpi and spec.launcher != TORCHRUN.name else ())


def _doubt_of_srun(spec: JobSpec, found: ProgramClues) -> BadInput:
    return BadInput(
        f"srun starts {found.unknown}, and gpurun does not know whether {found.unknown} uses MPI",
        hint=f"if the program uses MPI: {_way(spec, found, 'launcher', BY_MPIRUN.name)}\n"
        f"    if the program reads variables of Slurm or PyTorch: {_way(spec, found, 'launcher', BY_SLURM.name)}",
    )


def refuse_two_starters(spec: JobSpec, found: ProgramClues) -> None:
    """Refuse a launcher whose ranks run a script that starts a launcher, unless a person wants copies.

    Args:
        found: what the script of `spec.command` says.
    """
    if found.launches and spec.gpus > 1 and not spec.one_per_host and spec.launcher != TASKS.name:
        command = shlex.join(spec.command)
        raise BadInput(
            f"{spec.launcher} starts {found.starts} for each of {spec.gpus} ranks, and each copy would start "
            f"{found.launches[0].typed.name}",
            hint=f"to run {found.starts} once on each host, leave out the launcher: gpurun submit -n {spec.gpus} … -- "
            f"{command}\n    or choose --launcher {TASKS.name}, which runs {found.starts} once for each GPU",
        )


def _needs_hosts(spec: JobSpec) -> bool:
    """Return whether the gang needs several hosts: a program that knows one host would train once on each."""
    return spec.constraints.gpus_per_host not in (None, spec.gpus)


def _by_clue(spec: JobSpec, means: str, clues: Mapping[Clue, str]) -> LauncherChoice:
    clue, where = next((each, where) for each, where in clues.items() if each.means == means)
    if means not in BY_ITSELF:
        return _by(spec, means, f"{where} uses {clue.name}")
    how = "starts the processes of its host itself" if means == "starts" else "uses several GPUs in one process"
    why = f"{where} uses {clue.name}, and the program {how}"
    return _once(spec, why)


def _by(spec: JobSpec, launcher: str, why: str) -> LauncherChoice:
    return LauncherChoice(replace(spec, launcher=launcher), (f"{launcher} starts the ranks: {why}",))


def _once(spec: JobSpec, why: str) -> LauncherChoice:
    """Start one process, which sees all GPUs. On a second host it would be another program, which trains by itself."""
    alone = replace(spec, launcher=TASKS.name)
    if spec.gpus == 1:
        return LauncherChoice(alone)
    chosen = replace(alone, one_per_host=True, constraints=replace(spec.constraints, locality="host"))
    said = f"gpurun starts one process ({TASKS.name}), and the job stays on one host: {why}"
    return LauncherChoice(chosen, (said,), stays=why)


def agreed(clues: Collection[Clue]) -> str | None:
    """Return the launcher that all clues agree on, or "starts" or "one"; None if there is none.

    A program that can use several GPUs in one process, and also join a gang, joins it. A program that starts the
    processes of its host needs no launcher for PyTorch.
    """
    launchers = {clue.means for clue in clues if clue.means not in ("", *BY_ITSELF)}
    own = {clue.means for clue in clues if clue.means in BY_ITSELF}
    torch = {TORCHRUN.name, "deepspeed"}
    if "starts" in own and launchers <= torch:
        return "starts"
    is_soft = all(clue.is_soft for clue in clues if clue.means == TORCHRUN.name)
    if "one" in own and (not launchers or (launchers == {TORCHRUN.name} and is_soft and _has_device_map(clues))):
        return "one"
    if launchers == torch:
        return "deepspeed"
    return launchers.pop() if len(launchers) == 1 else None


def _has_device_map(clues: Collection[Clue]) -> bool:
    return any(clue.name == "device_map" for clue in clues)


def _doubt(spec: JobSpec, found: ProgramClues) -> BadInput:
    told: dict[str, str] = {
        clue.means: f"{where} uses {clue.name}" for clue, where in found.clues.items() if clue.means
    }
    names = [name for name in told if name not in ("", *BY_ITSELF)]
    own = ", and ".join(told[name] for name in BY_ITSELF if name in told)
    if found.unread:
        why = found.unread
    elif names:
        why = ", and ".join(told[name] for name in names)
    elif own:
        gives = count(spec.constraints.gpus_per_host or spec.gpus, "GPU")
        why = f"{own}, which runs on one host, but the job gets {gives} of each host"
    else:
        why = f"{found.looked or 'the command'} uses no library for distributed training that gpurun knows"
    first, *others = names or [TORCHRUN.name, GLOO.name]
    ors = "".join(f"   (or {_way(None, found, 'launcher', name)})" for name in others)
    return BadInput(
        f"gpurun does not know how {spec.gpus} processes of the program find each other: {why}",
        hint=f"if the processes train together: {_way(spec, found, 'launcher', first)}{ors}\n"
        f"    to run {spec.gpus} copies, one for each GPU: {_way(spec, found, 'launcher', TASKS.name)}\n"
        f"    to run one process on each host, with all GPUs of the host: {_way(spec, found, 'one_per_host', '')}",
    )


def _way(spec: JobSpec | None, found: ProgramClues, key: str, value: str) -> str:
    """Return what to write; `spec` None: the setting alone."""
    if found.function:
        setting = f"{key}={value!r}" if value else f"{key}=True"
        return setting if spec is None else f"gpurun.submit({found.function}, …, gpus={spec.gpus}, {setting})"
    flag = f"--{key.replace('_', '-')}{f' {value}' if value else ''}"
    if spec is None:
        return flag
    command = shlex.join(spec.command)
    shown = command if len(command) <= MOST_SHOWN else f"{command[:MOST_SHOWN]}…"
    return f"gpurun submit -n {spec.gpus} … {flag} -- {shown}"
