"""What a program imports says what starts its ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpurun.jobs.spec import Constraints, JobSpec
from gpurun.launch.launchers import NAMES, choosing
from gpurun.launch.launchers.choosing import (
    ProgramClues,
    agreed,
    choose_launcher,
    needs_choice,
    programs_in,
    programs_of,
    read_source,
)

SPEC = JobSpec("n", "i:1", 4, ("python3", "train.py"))
ONCE = "gpurun starts one process (tasks)"

PROGRAMS = {
    "Horovod's pytorch_mnist.py, whose sampler is PyTorch's": (
        "import torch.utils.data.distributed\nimport horovod.torch as hvd\n"
        "s = torch.utils.data.distributed.DistributedSampler(d, num_replicas=hvd.size())", "horovod"),
    "Horovod's tensorflow2_keras_mnist.py": (
        "import tensorflow as tf\nimport horovod.tensorflow.keras as hvd", "horovod"),
    "nanoGPT's train.py": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "from torch.distributed import init_process_group, destroy_process_group", "torchrun"),
    "timm's train.py": ("from torch.nn.parallel import DistributedDataParallel as NativeDDP", "torchrun"),
    "YOLOv5's train.py, which takes tools from Ultralytics": (
        "import torch.distributed as dist\nfrom ultralytics.utils.patches import x\ndist.barrier()", "torchrun"),
    "Lightning": ("import lightning as L", "torchrun"),
    "Lightning before 2.0": ("from pytorch_lightning import Trainer", "torchrun"),
    "run_glue.py": ("from transformers import HfArgumentParser, Trainer, TrainingArguments", "torchrun"),
    "run_glue_no_trainer.py": ("from accelerate import Accelerator", "torchrun"),
    "TRL's sft.py": ("from trl import SFTTrainer", "torchrun"),
    "alpaca-lora's finetune.py, whose map is a variable": (
        "import transformers\nm = f(device_map=device_map)\nt = transformers.Trainer(model=m)", "torchrun"),
    "DeepSpeed's cifar10_deepspeed.py": (
        "import deepspeed\np.add_argument('--local_rank', type=int)", "deepspeed"),
    "DeepSpeed's train_bert_ds.py": ("import deepspeed", "torchrun"),
    "a trainer of Sentence Transformers": (
        "from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer", "torchrun"),
    "a cross encoder's trainer": (
        "from sentence_transformers.cross_encoder import CrossEncoderTrainer as T", "torchrun"),
    "an encoder that only encodes": ("from sentence_transformers import SentenceTransformer", None),
    "fastai's distrib.py": ("from fastai.vision.all import *\nfrom fastai.distributed import *", "torchrun"),
    "Keras 3's distribution": ("import keras\nd = keras.distribution.DataParallel()", ONCE),
    "mpi4py's helloworld.py": ("from mpi4py import MPI", "mpirun"),
    "JAX": ("import jax\njax.distributed.initialize()", "jax"),
    "MultiWorkerMirroredStrategy": (
        "import tensorflow as tf\ns = tf.distribute.MultiWorkerMirroredStrategy()", "tensorflow"),
    "parameter servers of TensorFlow 1": (
        "import tensorflow.compat.v1 as tf\ntf.distribute.experimental.ParameterServerStrategy(r)", "tensorflow"),
    "the import is in a function": (
        "def main():\n    try:\n        import horovod.torch\n    except E: pass", "horovod"),
    "DataParallel": ("from torch import nn\nm = nn.DataParallel(m)", ONCE),
    "MirroredStrategy": (
        "import tensorflow as tf\ns = tf.distribute.MirroredStrategy()\ntf.distribute.get_strategy()", ONCE),
    "MirroredStrategy, or a TPU": (
        "import tensorflow as tf\ntf.distribute.TPUStrategy(tf.distribute.cluster_resolver.TPUClusterResolver())\n"
        "tf.distribute.MirroredStrategy(cross_device_ops=tf.distribute.NcclAllReduce())", ONCE),
    "JAX's pmap": ("import jax\nf = jax.pmap(g)", ONCE),
    "JAX's pmap in a gang": ("import jax\njax.distributed.initialize()\nf = jax.pmap(g)", "jax"),
    "device_map": ("from transformers import AutoModel\nm = AutoModel.from_pretrained(n, device_map='auto')", ONCE),
    "device_map and Trainer, which share one model": (
        "from transformers import Trainer\nm = f(device_map='auto')", ONCE),
    "detectron2's train_net.py": (
        "import detectron2.utils.comm as comm\nfrom detectron2.engine import DefaultTrainer, launch", ONCE),
    "PyTorch's imagenet/main.py, which can do both": (
        "import torch.multiprocessing as mp\nimport torch.distributed as dist\nimport torch\n"
        "mp.spawn(w, nprocs=n)\ndist.init_process_group()\ntorch.nn.DataParallel(m)", ONCE),
    "Ultralytics": ("from ultralytics import YOLO\nYOLO('x').train(device=[0, 1])", ONCE),
    "DataParallel where no gang is": (
        "import torch\nimport torch.distributed as dist\ndist.barrier()\ntorch.nn.DataParallel(m)", "torchrun"),
    "minGPT": ("import torch\nfrom torch.utils.data.dataloader import DataLoader", None),
    "it only asks": ("import torch.distributed as dist\nif dist.is_available() and dist.is_initialized(): pass", None),
    "two that tell differently": ("import horovod.torch\nimport torch.distributed", None),
    "mpi4py beside Horovod": ("from mpi4py import MPI\nimport horovod.torch", None),
    "a pipeline": ("from transformers import pipeline", None),
    "mmdetection's tools/train.py": ("from mmengine.runner import Runner", None),
    "a name in a text": ("'''import horovod'''\n# import torch.distributed\nx.horovod.init()", None),
    "nothing": ("", None),
}  # fmt: skip


def choice_of(text: str, spec: JobSpec = SPEC, given=()):
    source = read_source(text)
    assert not source.damage
    return choose_launcher(spec, given, ProgramClues({clue: f"train.py line {n}" for clue, n in source.clues.items()}))


@pytest.mark.parametrize(("text", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_a_program_uses_says_what_starts_it(text, expected):
    choice = choice_of(text)
    if expected is None:
        assert choice.spec.launcher == "tasks" and not choice.spec.one_per_host
        assert choice.doubt is not None and not choice.said
        assert all(way in choice.doubt.hint for way in ("--launcher ", "--launcher tasks", "--one-per-host"))
    elif expected == ONCE:
        assert (choice.spec.launcher, choice.spec.one_per_host, choice.doubt) == ("tasks", True, None)
        assert choice.spec.constraints.locality == "host", "on a second host it would train by itself"
        assert "train.py line" in choice.said[0]
    else:
        assert (choice.spec.launcher, choice.spec.one_per_host, choice.doubt) == (expected, False, None)
        assert choice.said[0].startswith(f"{expected} starts the ranks: train.py line")


@pytest.mark.parametrize(("text", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_one_gpu_is_never_refused(text, expected):
    choice = choice_of(text, replace(SPEC, gpus=1))
    assert (choice.doubt, choice.spec.one_per_host) == (None, False)
    assert choice.spec.launcher == (expected if expected in NAMES else "tasks")


def test_what_tells_is_asked_in_this_order():
    text, mpi = "import torch.distributed", ProgramClues()
    assert choice_of(text, given={"horovod"}).spec.launcher == "horovod"
    assert choice_of(text, given={"controller"}).said == ("horovod starts the ranks: the job has `controller`",)
    assert choice_of(text, replace(SPEC, one_per_host=True)).spec.launcher == "tasks"
    assert not needs_choice(SPEC, {"launcher", "horovod"})
    assert not needs_choice(replace(SPEC, command=("torchrun", "train.py")), {"horovod"})
    assert not needs_choice(replace(SPEC, command=("sh", "-c", "cd x; torchrun train.py")), ())
    assert needs_choice(SPEC, {"gpus", "horovod"}) and agreed(mpi.clues) is None


def test_a_program_for_one_host_is_refused_where_each_host_shall_give_some_gpus():
    spec = replace(SPEC, constraints=Constraints(gpus_per_host=2))
    for text in ("from torch import nn\nnn.DataParallel(m)", "from ultralytics import YOLO"):
        choice = choice_of(text, spec)
        assert choice.doubt is not None and "the job gets 2 GPUs of each host" in choice.doubt.message


def test_two_that_differ_are_both_named_with_their_flags():
    doubt = choice_of("import horovod.torch\nimport torch.distributed").doubt
    assert "train.py line 1 uses Horovod, and train.py line 2 uses torch.distributed" in doubt.message
    assert "--launcher horovod -- python3 train.py   (or --launcher torchrun)" in doubt.hint


DAMAGED = {
    "Python 2": b"print 'x'", "no syntax": b"def f(:", "NUL": b"\0\0", "an unknown encoding": b"# coding: nosuch\nx",
    "UTF-16": "é = 1".encode("utf-16"), "Latin-1 that says nothing": b"x = '\xe9'", "brackets": b"(" * 5000,
    "signs": b"-" * 100_000 + b"1", "a sum": b"1" + b"+1" * 100_000, "a chain": b"a" + b".a" * 50_000, "empty": b"",
    "a program": b"\x7fELF" + b"\x80" * 99,
}  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_is_no_python_is_an_answer_and_no_error(data):
    source = read_source(data)
    assert source.damage or not source.clues
    assert len(source.damage) < 200


def test_a_very_long_file_is_read_only_in_part(monkeypatch):
    monkeypatch.setattr(choosing, "MANY", 100)
    source = read_source("x = [" + "1," * 100 + "]\nimport horovod\n")
    assert not source.damage and not source.clues


def test_other_encodings_are_read():
    assert read_source("# -*- coding: latin-1 -*-\nimport horovod\nx = 'é'".encode("latin-1")).clues
    assert read_source("\ufeffimport horovod".encode()).clues


COMMANDS = {
    ("python3", "-u", "-W", "ignore", "train.py", "--x"): [("python", "train.py")],
    ("/usr/bin/python3.11", "-Wignore", "-Xdev", "train.py"): [("python", "train.py")],
    ("python", "-m", "pkg.train"): [("module", "pkg.train")],
    ("python", "-um", "pkg.train"): [("module", "pkg.train")],
    ("python", "-c", "import x"): [("source", "import x")],
    ("python",): [("unread", "python")],
    ("python", "-"): [("unread", "python")],
    ("python", "--version"): [("harmless", "--version")],
    ("python", "-V"): [("harmless", "-V")],
    ("train.py", "x"): [("python", "train.py")],
    ("./train.sh",): [("shell", "./train.sh")],
    ("bash", "-e", "-o", "pipefail", "run", "x"): [("shell", "run")],
    ("bash",): [("unread", "bash")],
    ("env", "A=1", "uv", "run", "train.py"): [("python", "train.py")],
    ("conda", "run", "-n", "e", "python", "train.py"): [("python", "train.py")],
    ("nsys", "profile", "-o", "r", "--trace=cuda", "python", "-u", "train.py"): [("python", "train.py")],
    ("/opt/nvidia/nsys", "profile", "-t", "cuda", "./train.py"): [("python", "./train.py")],
    ("ncu", "--set", "full", "-o", "r", "uv", "run", "python", "train.py"): [("python", "train.py")],
    ("nsys", "profile", "bash", "run.sh"): [("shell", "run.sh")],
    ("nsys", "profile", "./a.out", "python"): [("unread", "python")],
    ("nsys", "profile", "./a.out"): [("program", "nsys")],
    ("py-spy", "record", "-o", "p.svg", "--", "python", "train.py"): [("python", "train.py")],
    ("gdb", "-ex", "run", "--args", "python", "train.py"): [("python", "train.py")],
    ("catchsegv", "python", "train.py"): [("python", "train.py")],
    ("stdbuf", "-oL", "python", "train.py"): [("python", "train.py")],
    ("time", "-p", "python", "train.py"): [("python", "train.py")],
    ("time", "nsys", "profile", "python", "-m", "cProfile", "train.py"): [("python", "train.py")],
    ("python", "-m", "cProfile", "-o", "x.prof", "-s", "time", "train.py"): [("python", "train.py")],
    ("python3", "-u", "-mcProfile", "-m", "pkg.train"): [("module", "pkg.train")],
    ("python", "-m", "pdb", "-c", "continue", "train.py"): [("python", "train.py")],
    ("python", "-m", "coverage", "run", "--source", "pkg", "-m", "pkg.train"): [("module", "pkg.train")],
    ("python", "-m", "debugpy", "--listen", "5678", "--wait-for-client", "train.py"): [("python", "train.py")],
    ("python", "-m", "cProfile"): [("module", "cProfile")],
    ("coverage", "run", "-p", "--source=pkg", "train.py", "--x"): [("python", "train.py")],
    ("coverage", "report"): [("program", "coverage")],
    ("kernprof", "-l", "-v", "train.py"): [("python", "train.py")],
    ("kernprof", "-lv", "-o", "x.lprof", "train.py"): [("python", "train.py")],
    ("scalene", "--cli", "--outfile", "x", "train.py", "---", "--x"): [("python", "train.py")],
    ("scalene",): [("program", "scalene")],
    ("true",): [("harmless", "true")],
    ("nvidia-smi", "-L"): [("harmless", "nvidia-smi")],
    ("./a.out",): [("program", "./a.out")],
    ("yolo", "train", "device=0,1"): [("program", "yolo")],
    ("sh", "-c", "cd /out && exec python3 /workspace/t.py 1"): [("harmless", "cd"), ("python", "/workspace/t.py")],
    ("sh", "-c", 'time "$@"', "x", "python", "t.py"): [("unread", "$@")],
    ("sh", "-c", ". $HOME/env; nvidia-smi"): [("harmless", "nvidia-smi")],
    ("bash", "-c", "nohup $RUN t.py"): [("unread", "$RUN")],
    ("sh", "-c", "echo python; sleep 1"): [("harmless", "echo"), ("harmless", "sleep")],
    ("sh", "-c", "for i in 1 2; do python t.py; done"): None,
    ("sh", "-c", "find . | xargs -n1 python t.py"): None,
}  # fmt: skip


@pytest.mark.parametrize(("command", "expected"), COMMANDS.items(), ids=map(" ".join, COMMANDS))
def test_the_programs_of_a_command(command, expected):
    found = [(each.kind, each.what) for each in programs_of(command)]
    if expected is None:
        assert {"python", "unread"} & {kind for kind, _ in found}, found
    else:
        assert found == expected


@pytest.mark.parametrize(
    "text", ["'", "$(", "((((", "a;" * 1500, "\0", "sh -c 'sh -c \"sh\"'", "<<EOF\n", "\\"], ids=len
)
def test_a_text_that_is_no_shell_s_is_an_answer(text):
    assert len(programs_in(text)) <= 1001
    assert isinstance(programs_of(("sh", "-c", text)), tuple)


def test_a_very_long_text_is_not_called_harmless():
    found = programs_of(("sh", "-c", "true;" * 3000 + "python3 train.py"))
    assert found[-1].kind == "unread", "the rest may train"


def test_a_shell_s_text_that_starts_a_launcher_says_so():
    text = "# torchrun\nset -e\nNCCL_DEBUG=INFO \\\n  torchrun --nproc_per_node=8 train.py\n"
    assert ("launcher", "torchrun") in [(each.kind, each.what) for each in programs_in(text)]
