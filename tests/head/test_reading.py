"""The files of a program are read for what they import, whatever they are."""

from __future__ import annotations

import os
import shlex
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.errors import BadInput, NeverFits
from gpurun.head import submit
from gpurun.head.submit import clues_of, missing_script, script_clues_of, spec_of
from gpurun.inventory.read import load_inventory
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers.choosing import choose_launcher, refuse_two_starters

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""
HOROVOD, TORCH = "import horovod.torch\n", "import torch.distributed\n"


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    top = tmp_path / "w"
    top.mkdir()
    return top


def chosen(workdir: Path | None, *command: str, gpus: int = 4):
    spec = JobSpec("n", "i:1", gpus, command, workdir=None if workdir is None else str(workdir))
    return choose_launcher(spec, (), clues_of(spec))


def files(workdir: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = workdir / name.replace("__", "/").replace("_py", ".py").replace("_sh", ".sh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_modules_beside_a_script_are_read_too(workdir):
    files(workdir, train_py="from lib.model import Net\n", lib__model_py="from . import comm\n", lib__comm_py=TORCH)
    choice = chosen(workdir, "python3", "train.py", "--x")
    assert choice.said == ("torchrun starts the ranks: lib/comm.py line 1 uses torch.distributed",)
    files(workdir, other_py="x = 1\n" + HOROVOD)
    assert chosen(workdir, "python3", "train.py").spec.launcher == "torchrun", "nobody imports other.py"
    files(workdir, train_py="import other\nfrom lib.model import Net\n")
    doubt = chosen(workdir, "python3", "train.py").doubt
    assert "other.py line 2 uses Horovod, and lib/comm.py line 1 uses torch.distributed" in doubt.message


COMMANDS = [
    ("python", "tools/train.py"), ("python3", "-m", "tools.train"), ("tools/train.py",), ("sh", "run.sh", "1"),
    ("./run.sh",), ("./start",), ("sh", "-c", "cd /out && exec python3 /workspace/tools/train.py 1"),
    ("bash", "-c", "sh run.sh 2>&1 | cat"), ("uv", "run", "python", "tools/train.py"),
    ("srun", "-n", "4", "python", "tools/train.py"), ("A=1", "tools/train.py"),
    ("python", "/workspace/tools/train.py"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_script_is_found_however_it_is_started(workdir, command):
    files(workdir, tools__train_py="import top\n", top_py=HOROVOD, run_sh="set -e\npython -u tools/train.py \\\n  $1\n")
    files(workdir, start="#!/usr/bin/env python3\nimport top\n")
    assert chosen(workdir, *command).spec.launcher == "horovod"


@pytest.mark.parametrize(
    "line",
    ["nsys profile -o r python3 tools/train.py", "ncu --set full python3 tools/train.py", "catchsegv ./run.sh",
     "python3 -m cProfile -o p tools/train.py", "coverage run -m tools.train",
     "py-spy record -- python3 tools/train.py", "time python3 tools/train.py", "gdb --args python3 tools/train.py",
     "sh -c 'nsys profile python3 tools/train.py'"],
)  # fmt: skip
def test_a_script_behind_a_profiler_or_debugger_chooses_and_each_rank_runs_the_whole_line(workdir, line):
    files(workdir, tools__train_py=TORCH, run_sh="nsys profile python3 -m pdb tools/train.py\n")
    (workdir / "run.sh").chmod(0o755)
    flags = {"-n": ("gpus", "4"), "--image": ("image", "i:1"), "--workdir": ("workdir", str(workdir)),
             "command": ("command", shlex.split(line))}  # fmt: skip
    spec, said = spec_of(None, load_inventory(workdir.parent / "inventory.yaml"), flags)
    assert (spec.launcher, spec.command) == ("torchrun", tuple(shlex.split(line)))
    assert "tools/train.py line 1 uses torch.distributed" in said[0]


def test_a_missing_script_behind_a_profiler_is_found_missing(workdir):
    spec = JobSpec("n", "i:1", 4, ("nsys", "profile", "python3", "trian.py"), workdir=str(workdir))
    files(workdir, train_py=TORCH)
    assert "the workdir has no trian.py" in missing_script(spec).message


@pytest.mark.parametrize(
    "line",
    ["vllm serve m --tensor-parallel-size 4", "yolo train device=0,1", "/opt/bin/trtllm-serve m", "papermill a.ipynb b",
     "python3 -m vllm.entrypoints.openai.api_server --model m", "jupyter lab --port 8", "jupyter-notebook",
     "python3 -m sglang.launch_server --model m", "tensorboard --logdir x", "sh -c 'cd x && exec vllm serve m'",
     "python3 -m papermill a.ipynb b", "python3 -m jupyter lab", "A=1 uv run yolo train", "nohup vllm serve m"],
)  # fmt: skip
def test_a_program_of_one_process_for_all_gpus_runs_once_on_one_host(workdir, line):
    choice = chosen(workdir, *shlex.split(line))
    assert (choice.spec.launcher, choice.spec.one_per_host, choice.doubt) == ("tasks", True, None)
    assert choice.spec.constraints.locality == "host" and "stays on one host: the command " in choice.said[0]
    one = chosen(workdir, *shlex.split(line), gpus=1)
    assert (one.spec.launcher, one.spec.one_per_host, one.doubt, one.said) == ("tasks", False, None, ())


@pytest.mark.parametrize("line", ["pytest -x", "./a.out", "yolov5-train", "serve vllm", "python3 -m pytest", "./yolo"])
def test_programs_that_nobody_knows_are_still_refused(workdir, line):
    files(workdir, yolo="\x7fELF")
    assert all(way in chosen(workdir, *line.split()).doubt.hint for way in ("--launcher ", "tasks", "--one-per-host"))


def test_a_script_that_starts_such_a_program_is_named(workdir):
    files(workdir, serve_sh="set -e\npip list\nexec vllm serve m\n")
    choice = chosen(workdir, "bash", "serve.sh")
    assert choice.spec.one_per_host and "serve.sh uses vLLM" in choice.said[0]


def test_a_file_of_the_workdir_is_not_the_program_of_its_name(workdir):
    files(workdir, yolo="#!/usr/bin/env python3\n" + TORCH)
    assert chosen(workdir, "./yolo", "train").spec.launcher == "torchrun"


CHANGES = [
    ("bash", "-c", "cd tools && python3 train.py"), ("bash", "-c", "cd tools; python3 -m lib.train"), ("sh", "go.sh"),
    ("sh", "-c", "(cd data && make) && cd tools && python3 train.py"),
    ("sh", "-c", "(cd data; ls); python3 tools/train.py"), ("sh", "-c", "cd /workspace/tools && sh run.sh"),
    ("sh", "-c", 'cd "$HOME" && cd /workspace && python3 tools/train.py'),
    ("uv", "run", "bash", "-c", "cd tools/lib && bash -c 'cd .. && ./train.py'"),
    ("sh", "-c", "cd - && cd tools && . ./run.sh"),
]  # fmt: skip


@pytest.mark.parametrize("command", CHANGES, ids=" ".join)
def test_a_script_is_found_in_the_folder_that_the_shell_goes_to(workdir, command):
    files(workdir, tools__train_py=TORCH, tools__lib__train_py=TORCH, tools__run_sh="python3 train.py\n")
    files(workdir, go_sh="set -e\ncd tools/lib\npython3 ../train.py\n")
    choice = chosen(workdir, *command)
    assert (choice.spec.launcher, choice.doubt) == ("torchrun", None), choice


def test_a_script_that_a_shell_starts_twice_is_read_once_and_not_called_unreadable(workdir):
    files(workdir, prepare_py="import numpy\n")
    doubt = chosen(workdir, "sh", "-c", "python3 prepare.py a && python3 ./prepare.py b").doubt
    assert "prepare.py uses no library for distributed training" in doubt.message


def test_a_package_with_a_main_and_a_module_of_the_image(workdir):
    files(workdir, app__work_py=TORCH)
    (workdir / "app/__main__.py").write_text("from .work import x\n")
    assert chosen(workdir, "python3", "-m", "app").spec.launcher == "torchrun"
    assert chosen(None, "python3", "-m", "mpi4py.bench", "helloworld").spec.launcher == "mpirun"
    assert "module nosuch" in chosen(workdir, "python3", "-m", "nosuch").doubt.message
    assert chosen(None, "python3", "-c", TORCH).said == (
        "torchrun starts the ranks: the command uses torch.distributed",
    )


def test_a_script_that_starts_a_launcher_runs_once_on_each_host_where_that_is_right(workdir):
    files(workdir, run_sh="# a comment\ntorchrun --nproc_per_node=$1 train.py\n", train_py=HOROVOD)
    choice = chosen(workdir, "./run.sh", "4")
    assert (choice.spec.launcher, choice.spec.one_per_host) == ("tasks", True)
    assert choice.said[0].startswith("run.sh starts torchrun, so gpurun runs run.sh once on each host")
    with pytest.raises(BadInput, match=r"run.sh starts 8 processes"):
        chosen(workdir, "bash", "-x", "run.sh", "8")
    assert chosen(workdir, "./run.sh", "1", gpus=1).spec.launcher == "tasks"
    files(workdir, run_sh="cd x && torchrun train.py\n")
    assert chosen(workdir, "sh", "-c", "./run.sh | cat").spec.one_per_host


def test_a_launcher_does_not_start_a_script_that_starts_a_launcher(workdir):
    files(workdir, run_sh="bash inner.sh 4\n", inner_sh="torchrun --nproc_per_node=$1 train.py\n", train_py=HOROVOD)
    for command in (("./run.sh",), ("env", "A=1", "bash", "run.sh"), ("sh", "-c", "cd .; ./run.sh")):
        spec = JobSpec("n", "i:1", 4, command, workdir=str(workdir), launcher="mpirun")
        with pytest.raises(
            BadInput, match=r"mpirun starts inner.sh for each of 4 ranks, and each copy would start torchrun"
        ):
            refuse_two_starters(spec, script_clues_of(spec))
        for fine in (replace(spec, launcher="tasks"), replace(spec, one_per_host=True), replace(spec, gpus=1)):
            refuse_two_starters(fine, script_clues_of(fine))
    for command in (("python3", "train.py"), ("./a.out",), ("train.py",), ("sh", "-c", "true")):
        spec = JobSpec("n", "i:1", 4, command, workdir=str(workdir), launcher="mpirun")
        assert not script_clues_of(spec).launches and not script_clues_of(spec).clues


def test_a_script_with_launchers_for_one_host_says_why_its_gang_stays_there(workdir):
    files(workdir, run_sh="accelerate launch train.py\n")
    choice = chosen(workdir, "./run.sh")
    assert choice.stays == "run.sh starts accelerate launch for one host"
    files(workdir, run_sh="python3 prepare.py; bash a.sh; bash b.sh", a_sh="torchrun a.py", b_sh="deepspeed b.py")
    assert choice.spec.constraints.gpus_per_host == chosen(workdir, "./run.sh").spec.constraints.gpus_per_host == 4


UNREAD = [
    (("python3", "nosuch.py"), "nosuch.py in the workdir"), (("./a.out", "-b"), "what ./a.out does"),
    (("./binary",), "what ./binary does"), (("python3", "/opt/train.py"), "/opt/train.py"),
    (("python3",), "python3 runs"), (("python3", "old.py"), "old.py: line 1"), (("python3", "link.py"), "link.py"),
    (("python3", "out.py"), "out.py"), (("python3", "loop.py"), "loop.py"), (("python3", "pipe.py"), "pipe.py"),
    (("python3", "sock.py"), "sock.py"), (("python3", "folder.py"), "folder.py"),
    (("python3", "device.py"), "device.py"), (("python3", "huge.py"), "huge.py"),
    (("python3", "../outside.py"), "../outside.py"), (("python3", "a\0b.py"), "b.py"),
    (("python3", "-m", "../x"), "../x"), (("sh", "binary"), "binary"), (("python3", "utf16.py"), "utf16.py"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "said"), UNREAD, ids=[command[-1] for command, _ in UNREAD])
def test_what_cannot_be_read_is_said(workdir, tmp_path, command, said):
    (tmp_path / "outside.py").write_text(HOROVOD)
    files(workdir, old_py="print 'x'\n")
    (workdir / "binary").write_bytes(b"\x7fELF\0\0")
    (workdir / "utf16.py").write_text("import horovod", encoding="utf-16")
    for name, target in {"link.py": "nowhere", "out.py": tmp_path / "outside.py", "loop.py": "loop.py",
                         "device.py": "/dev/zero"}.items():  # fmt: skip
        (workdir / name).symlink_to(target)
    os.mkfifo(workdir / "pipe.py")
    (workdir / "folder.py").mkdir()
    with (workdir / "huge.py").open("wb") as file:
        file.truncate(1 << 30)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(workdir / "sock.py"))
        choice = chosen(workdir, *command)
    assert choice.doubt is not None and said in choice.doubt.message
    assert chosen(workdir, *command, gpus=1).doubt is None


def test_a_job_without_a_workdir_says_that_it_has_none():
    assert "train.py (the job has no workdir)" in chosen(None, "python3", "train.py").doubt.message


def test_files_and_bytes_are_bounded(workdir, monkeypatch):
    monkeypatch.setattr(submit, "MOST_READ", 5)
    files(workdir, train_py="".join(f"import m{n}\n" for n in range(9)))
    files(workdir, **{f"m{n}_py": HOROVOD if n == 8 else "x = 1\n" for n in range(9)})
    assert chosen(workdir, "python3", "train.py").doubt is not None
    monkeypatch.setattr(submit, "MOST_READ", 50)
    assert chosen(workdir, "python3", "train.py").spec.launcher == "horovod"
    monkeypatch.setattr(submit, "MOST_BYTES_IN_ALL", 150)
    assert chosen(workdir, "python3", "train.py").doubt is not None
    files(workdir, a_py="import b\n", b_py="import a\n")
    assert "a.py uses no library" in chosen(workdir, "python3", "a.py").doubt.message


def test_submit_refuses_last_and_a_dry_run_warns_with_the_same_lines(workdir):
    files(workdir, train_py="import torch\n")
    inventory = load_inventory(workdir.parent / "inventory.yaml")
    flags = {"-n": ("gpus", "4"), "--image": ("image", "i:1"), "--workdir": ("workdir", str(workdir)),
             "command": ("command", ["python3", "train.py"])}  # fmt: skip
    with pytest.raises(BadInput, match=r"how 4 processes of the program find each other: train.py uses") as caught:
        spec_of(None, inventory, flags)
    with pytest.raises(NeverFits):
        spec_of(None, inventory, {**flags, "-n": ("gpus", "99")})
    with pytest.raises(BadInput, match="min_gpus"):
        spec_of(None, inventory, {**flags, "--min-gpus": ("min_gpus", "7")})
    spec, said = spec_of(None, inventory, flags, is_plan=True)
    assert (spec.launcher, spec.one_per_host) == ("tasks", False)
    assert caught.value.message in said[0] and "\n".join(said[1:]).endswith(caught.value.hint)
    spec, said = spec_of(None, inventory, {**flags, "--one-per-host": ("one_per_host", True)})
    assert (spec.launcher, spec.one_per_host) == ("tasks", True)


def test_submit_refuses_a_launcher_in_a_launchers_script_and_a_scripts_gang_on_too_many_hosts(workdir):
    files(workdir, run_sh="accelerate launch train.py\n")
    inventory = load_inventory(workdir.parent / "inventory.yaml")
    flags = {"-n": ("gpus", "4"), "--image": ("image", "i:1"), "--workdir": ("workdir", str(workdir)),
             "command": ("command", ["mpirun", "-np", "4", "bash", "run.sh"])}  # fmt: skip
    for more in ({}, {"command": ("command", ["bash", "run.sh"]), "--launcher": ("launcher", "torchrun")}):
        with pytest.raises(BadInput, match=r"(mpirun|torchrun) starts run.sh for each of"):
            spec_of(None, inventory, {**flags, **more})
    with pytest.raises(NeverFits) as caught:
        spec_of(None, inventory, {**flags, "-n": ("gpus", "8"), "command": ("command", ["bash", "run.sh"])})
    assert "run.sh starts accelerate launch for one host, so the job stays on one host" in caught.value.hint
    piped = ["bash", "-c", "echo 100 | mpiexec -n 8 python3 train.py"]
    with pytest.raises(NeverFits) as caught:
        spec_of(None, inventory, {**flags, "-n": ("gpus", "8"), "command": ("command", piped)})
    assert "the command starts mpirun" in caught.value.hint and "stays on one" in caught.value.hint


def test_a_program_of_one_process_that_needs_more_than_a_host_says_why_it_stays_on_one(workdir):
    files(workdir, train_py="from torch import nn\nnn.DataParallel(m)\n")
    inventory = load_inventory(workdir.parent / "inventory.yaml")
    flags = {"-n": ("gpus", "8"), "--image": ("image", "i:1"), "--workdir": ("workdir", str(workdir)),
             "command": ("command", ["python3", "train.py"])}  # fmt: skip
    with pytest.raises(NeverFits) as caught:
        spec_of(None, inventory, flags)
    assert "train.py line 2 uses DataParallel" in caught.value.hint and "--one-per-host" in caught.value.hint
