"""A script that the workdir lacks is refused at submit: it was noticed when a gang stood."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace

import pytest

from gpurun.errors import BadInput
from gpurun.head.submit import missing_script, runs_itself, spec_of
from gpurun.inventory.read import load_inventory
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers import settled

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}}
"""


@pytest.fixture
def workdir(tmp_path):
    top = tmp_path / "w"
    for name in ("train.py", "src/model.py", "pkg/__init__.py", "pkg/main.py", "pkg/sub/__init__.py", "data/x.py",
                 "run me.py", "odd/ü.py", "-x.py"):  # fmt: skip
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    (top / "run.sh").write_text("#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "plain.sh").write_text("#!/bin/sh\n")
    (top / "link.py").symlink_to("train.py")
    (top / "out.py").symlink_to("../secret.py")
    (top / "loop.py").symlink_to("loop.py")
    (tmp_path / "secret.py").write_text("")
    return top


def missing(workdir, line, launcher="torchrun", **fields):
    words = tuple(shlex.split(line)) if isinstance(line, str) else line
    is_named = not words[0].startswith(("torchrun", "deepspeed", "mpirun", "horovodrun", "A=")) and "launch" not in line
    spec = JobSpec("n", "i:1", 4, words, workdir=str(workdir), launcher=launcher if is_named else "horovod", **fields)
    return missing_script(settled(spec, is_named=is_named)[0])


@pytest.mark.parametrize(
    "line",
    ["python3 nosuch.py", "python3 -u -X dev nosuch.py --lr 1", "torchrun nosuch.py", "deepspeed nosuch.py",
     "torchrun --nproc-per-node=4 nosuch.py", "deepspeed --num_gpus 4 nosuch.py --deepspeed", "nosuch.py",
     "python3 -m torch.distributed.launch nosuch.py", "mpirun -np 4 python3 nosuch.py", "A=1 torchrun nosuch.py",
     "horovodrun -np 4 python3 ./nosuch.py", "env A=1 python3 nosuch.py", "nohup nice -n 5 uv run python nosuch.py",
     "bash -c 'python3 nosuch.py'", "bash -ec 'A=1 exec python3 nosuch.py'", "./nosuch.py", "src/../nosuch.py a",
     "bash nosuch.py", "bash -e nosuch.py", "python3 /workspace/nosuch.py", "torchrun /workspace//src/../nosuch.py",
     "/workspace/nosuch.py", "uv run nosuch.py", "nohup uv run --with x nosuch.py --lr 1"],
)  # fmt: skip
def test_what_is_not_there_is_named_with_what_is_alike(workdir, line):
    problem = missing(workdir, line)
    assert isinstance(problem, BadInput)
    assert "the workdir has no nosuch.py" in str(problem)
    assert (problem.exit_code, str(workdir) in str(problem)) == (2, True)
    assert "train.py" in problem.hint


@pytest.mark.parametrize(
    "line",
    ["python3 train.py", "python3 ./src/model.py", "torchrun train.py", "deepspeed train.py", "./run.sh",
     "bash plain.sh", "python3 'run me.py'", "python3 odd/ü.py", "python3 link.py", "python3 pkg", "python3 out.py",
     "python3 -m pkg.main", "python3 -m pkg.sub", "python3 -m torch.distributed.launch train.py",
     # only the container knows
     "python3 /workspace/train.py", "python3 /workspace/../nosuch.py", "python3 /workspaces/nosuch.py",
     "uv run train.py", "/workspace/run.sh", "uv run nosuch", "uv run https://x/nosuch.py",
     "python3 /opt/nosuch.py", "python3 ../nosuch.py", "bash -c 'cd src && python3 nosuch.py'", "nosuch",
     "env -C src python3 model.py", "uv run --directory src python model.py", "mpirun -wdir /w python3 nosuch.py",
     "python3 -c 'import nosuch'", "python3 -m nosuch", "python3 -m data.nosuch", "python3 -m image.nosuch",
     "sh -c 'python3 $A'", "python3 -", "nvidia-smi", "./run.sh nosuch.py", "python3 train.py nosuch.py",
     "bash -c 'echo x > nosuch.py; python3 nosuch.py'"],
)  # fmt: skip
def test_what_is_there_and_what_only_the_container_knows_is_no_problem(workdir, line):
    assert missing(workdir, line, launcher="tasks") is None


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("python3 trian.py", "workdir has train.py"), ("python3 model.py", "workdir has src/model.py"),
        ("python3 Train.py", "has train.py"), ("python3 loop.py", ""), ("./runn.sh", "has run.sh"),
        ("python3 qqqqq.py", "the workdir has "), ("python3 '$HOME/x.py'", "sh -c '…'"), ("'${D}/run.sh'", "sh -c '…'"),
        ("python3 '~/x.py'", "sh -c '…'"), ("python3 '*/x.py'", "sh -c '…'"), ("python3 a/b/c/zzzz", "--workdir"),
        (("python3", "b\nc\x1b[31m.py"), "the workdir has "),
        (("python3", "x" * 5000), "--workdir"), (("python3", "a\0b"), None),
    ],
)  # fmt: skip
def test_hostile_and_mistyped_names(workdir, line, hint):
    problem = missing(workdir, line)
    assert (problem is None) == (hint is None)
    assert problem is None or hint in problem.hint


@pytest.mark.parametrize("word", ["python3 train.py --lr 1", "torchrun --nproc-per-node=4 train.py", "a\nb", "it's a"])
@pytest.mark.parametrize("has_workdir", [True, False])
def test_a_command_in_quotes_is_one_word_and_no_program(workdir, word, has_workdir):
    """It ended with 127 on a GPU."""
    problem = missing_script(JobSpec("n", "i:1", 4, (word,), workdir=str(workdir) if has_workdir else None))
    assert "is one word" in problem.message
    assert f"without quotes: {word}" in problem.hint
    assert f"bash -c {shlex.quote(word)}" in problem.hint


@pytest.mark.parametrize("words", [("run me.py",), ("./run me.py",), ("/opt/my tools/run",), ("my tool", "x"), ("a",)])
def test_a_program_whose_name_has_a_blank_is_no_command_in_quotes(workdir, words):
    (workdir / "run me.py").chmod(0o755)
    assert missing_script(JobSpec("n", "i:1", 4, words, workdir=str(workdir))) is None


def test_a_module_of_a_package_of_the_workdir_is_judged(workdir):
    assert "no module pkg.mian (pkg/mian.py)" in str(missing(workdir, "python3 -m pkg.mian"))
    assert "pkg/main.py" in missing(workdir, "torchrun -m pkg.mian --x").hint


def test_a_script_that_nobody_may_execute_is_named_with_what_to_do(workdir):
    problem = missing(workdir, "./plain.sh 1", launcher="tasks")
    assert "plain.sh is not executable" in str(problem)
    assert "chmod +x plain.sh" in problem.hint and "bash plain.sh" in problem.hint
    assert "python3 train.py" in missing(workdir, "./train.py", launcher="tasks").hint


@pytest.mark.parametrize("is_repository", [False, True])
def test_a_script_that_git_ignores_is_named_with_the_reason(workdir, is_repository):
    if is_repository:
        subprocess.run(["git", "init", "-q"], cwd=workdir, check=True)
    (workdir / ".gitignore").write_text("src/\n")
    problem = missing(workdir, "python3 src/model.py")
    assert ".gitignore excludes src/model.py" in str(problem)
    assert "git add -f src/model.py" in problem.hint
    if is_repository:
        subprocess.run(["git", "add", "-f", "src/model.py"], cwd=workdir, check=True)
        assert missing(workdir, "python3 src/model.py") is None


def test_what_a_mount_or_the_outputs_bring_is_not_judged(workdir):
    assert missing(workdir, "python3 tools/x.py", mounts=(("/nfs", "/workspace/tools", "ro"),)) is None
    assert missing(workdir, "python3 out/x.py", outputs="/workspace/out") is None
    assert missing(workdir, "python3 tools/x.py", mounts=(("/nfs", "/tools", "ro"),)) is not None
    assert missing_script(replace(JobSpec("n", "i", 1, ("python3", "nosuch.py")), workdir=None)) is None


def test_submit_refuses_it_and_a_plan_says_so(workdir, tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    flags = {
        "-n": ("gpus", 4), "--image": ("image", "i:1"), "COMMAND": ("command", ["python3", "nosuch.py"]),
        "--launcher": ("launcher", "torchrun"), "--workdir": ("workdir", str(workdir)),
    }  # fmt: skip
    inventory = load_inventory(tmp_path / "inventory.yaml")
    with pytest.raises(BadInput, match=r"the workdir has no nosuch\.py"):
        spec_of(None, inventory, flags)
    spec, said = spec_of(None, inventory, flags, is_plan=True)
    assert spec.command[-1] == "nosuch.py"
    assert any("submit would refuse this job: the workdir has no nosuch.py" in line for line in said)


OWN = "#!/usr/bin/env -S uv run --script\nimport torch.distributed\n"


@pytest.mark.parametrize(
    ("text", "mode", "command", "runs"),
    [
        (OWN, 0o755, ["./own.py", "--x"], ["./own.py", "--x"]),
        ("#! /opt/conda/bin/python\n", 0o755, ["/workspace/own.py"], ["/workspace/own.py"]),
        (OWN, 0o755, ["A=1", "./own.py"], ["./own.py"]),
        (OWN, 0o644, ["./own.py"], ["python3", "-u", "./own.py"]),
        (OWN, 0o755, ["own.py"], ["python3", "-u", "own.py"]),
        ("import torch.distributed\n", 0o755, ["./own.py"], ["python3", "-u", "./own.py"]),
        ("#!/usr/bin/env python3\r\n", 0o755, ["./own.py"], ["python3", "-u", "./own.py"]),
        ("#!python3\n", 0o755, ["./own.py"], ["python3", "-u", "./own.py"]),
        ("", 0o755, ["./own.py"], ["python3", "-u", "./own.py"]),
        (OWN, 0o755, ["torchrun", "./own.py"], ["python3", "-u", "./own.py"]),
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", "tensorflow", "jax"])
def test_an_executable_script_keeps_its_own_interpreter(workdir, tmp_path, text, mode, command, runs, launcher):
    (workdir / "own.py").write_bytes(text.encode())
    (workdir / "own.py").chmod(mode)
    spec, _ = spec_of(None, inventory_of(tmp_path), flags_of(workdir, command, launcher))
    assert (spec.launcher, list(spec.command)) == (launcher, runs)


def test_deepspeed_tells_such_a_script_its_number_too(workdir, tmp_path):
    (workdir / "own.py").write_text(OWN)
    (workdir / "own.py").chmod(0o755)
    spec, _ = spec_of(None, inventory_of(tmp_path), flags_of(workdir, ["./own.py", "--x"], "deepspeed"))
    assert spec.command[2].endswith('exec "$script" --local_rank="$LOCAL_RANK" "$@"')
    assert spec.command[4:] == ("./own.py", "--x")


@pytest.mark.parametrize("kind", ["nothing", "folder", "link out", "fifo"])
def test_what_is_no_script_has_no_interpreter(workdir, kind):
    path = workdir / "own.py"
    if kind == "folder":
        path.mkdir()
    elif kind == "link out":
        path.symlink_to("/bin/sh")
    elif kind == "fifo":
        os.mkfifo(path)
    spec = JobSpec("n", "i", 1, ("./own.py",), workdir=str(workdir))
    assert not runs_itself(spec) and not runs_itself(replace(spec, workdir=None))
    assert not runs_itself(replace(spec, command=("/a\0b/own.py",))) and not runs_itself(replace(spec, command=("",)))


@pytest.mark.parametrize("command", [["python3", "nosuch.py"], ["python3 train.py --x"]])
def test_a_plan_says_only_the_first_problem(workdir, tmp_path, command):
    flags = flags_of(workdir, command, None)
    _, said = spec_of(None, inventory_of(tmp_path), {**flags, "-n": ("gpus", 4)}, is_plan=True)
    refusals = [line for line in said if "submit would refuse" in line]
    assert len(refusals) == 1 and ("nosuch.py" in refusals[0] or "one word" in refusals[0])
    assert not any("--launcher" in line for line in said)


@pytest.mark.parametrize(
    ("words", "shell"),
    [
        (["python3", "-m", "m", "|", "tee", "log"], "bash -o pipefail -c 'python3 -m m | tee log'"),
        (["python3", "-m", "m", "--x", ">", "a b"], """bash -o pipefail -c 'python3 -m m --x > '"'"'a b'"'"''"""),
        (["torchrun", "-m", "m", "2>&1", "|", "tee", "l"], "bash -o pipefail -c 'torchrun -m m 2>&1 | tee l'"),
        (["true", "&&", "false"], "bash -o pipefail -c 'true && false'"),
        (["grep", "-F", "|", "x"], ""), (["python3", "-m", "m", "--sep", "|", "x"], ""), (["echo", "|"], ""),
        (["test", "1", "<", "2"], ""), (["echo", ">log"], ""), (["|", "x"], ""), (["bash", "-c", "a | b"], ""),
    ],
)  # fmt: skip
def test_a_pipe_that_no_shell_reads_is_pointed_out(workdir, tmp_path, words, shell):
    spec, said = spec_of(None, inventory_of(tmp_path), flags_of(workdir, words, None))
    pointed = [line for line in said if "starts no shell" in line]
    assert len(pointed) == bool(shell) and (not shell or f"  → {shell}" in said)
    assert set(words) - {"torchrun"} <= set(spec.command), "nothing of it is changed"


def inventory_of(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return load_inventory(tmp_path / "inventory.yaml")


def flags_of(workdir, command, launcher):
    return {
        "-n": ("gpus", 1), "--image": ("image", "i:1"), "COMMAND": ("command", command),
        "--launcher": ("launcher", launcher), "--workdir": ("workdir", str(workdir)),
    }  # fmt: skip


def test_a_large_workdir_is_not_read_to_its_end(workdir, monkeypatch):
    seen = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (seen.append(path), scandir(path))[1])
    for number in range(60):
        (workdir / f"z{number}/a").mkdir(parents=True)
    assert missing(workdir, "python3 train.py") is None
    assert seen == []
