"""What a Python file says of how its processes find each other: the libraries that it uses. Pure.

Nothing is executed or imported: `ast` reads the text.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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
