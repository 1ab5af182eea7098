"""The command of a job reaches each rank byte for byte, whatever starts the rank; no launcher reads a word of it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from placed_gangs import plan

from gpurun.errors import BadInput
from gpurun.jobs.recipe import build_spec
from gpurun.jobs.spec import as_bytes, as_text, quoted
from gpurun.launch.jobssh import scripts
from gpurun.launch.launchers import NAMES, settled

FLAGS = shlex.split(
    "--log --network --net --host --host=a --min --max --num --num-proc=2 --auto --time --timeline --no --stall "
    "--hierarchical --verbose -np 4 -H h:1 -x A=1 -mca btl self --mpi --gloo -p -v -c -n -e -- - -a --a=b"
)
"""A program's own flags: horovodrun and mpirun have flags that begin so."""
ODD = [
    *(b"", b" ", b"  two  ", b"\t", b"\n", b"\n\n", b"a\nb\n", b"\r", b"\r\n", b"'", b"''", b'"', b"'\"'\"'", b"\\"),
    *(b"\\n", b"\\\n", b"`id`", b"$(id)", b"$HOME", b"${x", b"$", b"%h", b"%%", b"%s\\n", b"@file", b"!!", b"!", b"#"),
    *(b"# x", b"*", b"?", b"[a]", b"{a,b}", b"~", b"~root", b";", b"&", b"&&", b"|", b"<", b">", b"(", b")", b"a=b"),
    *(b"=", b":", b"^", b"\x01", b"\x7f", b"\x1b[31m", b"\x81\x82", "ü".encode(), "日本".encode(), "🚀".encode()),
    *(b"caf\xe9", b"\xff\xfe\n", b"\n\xff", b"\xed\xb3\xbf", "\uefff".encode(), b"\xf4\x90\x80\x80"),
    *(b"x" * 100_000, b"'" * 1000, b"\xff" * 1000),
]
EVERY_BYTE = [*(bytes([byte]) for byte in range(1, 256)), bytes(range(1, 256)), bytes(range(255, 0, -1))]
PRINT = "import sys, os; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"


def spec(*words, launcher="tasks"):
    """Return the spec of a job whose command has these words, as the shell of a person gives them to gpurun."""
    command = ("python3", "-c", PRINT, *map(os.fsdecode, words))
    job = build_spec(None, {"image": "i:1", "gpus": 4, "command": command, "launcher": launcher}, {})
    return settled(job, is_named=True)[0]


def script_of(tmp_path, job):
    made = plan(job.launcher, "h2", "h4", roles=job.roles, spec=job)
    other = plan(job.launcher, "h2", "h4", roles=job.roles, spec=replace(job, command=("true",)))
    argvs, others = ([each.launch, *(host.run for host in each.hosts)] for each in (made, other))
    assert argvs == others, "a word of the command is read by something else than the rank's script"
    path = tmp_path / "rank"
    path.write_text(made.first.files["launch/bin/rank"][0], encoding="utf-8", newline="")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("launcher", NAMES)
def test_argv_is_what_was_typed_with_every_launcher(tmp_path, launcher):
    words = [*map(os.fsencode, FLAGS), *ODD, *EVERY_BYTE]
    done = subprocess.run([script_of(tmp_path, spec(*words, launcher=launcher))], capture_output=True, check=True)
    assert done.stdout.split(b"\0") == words


TYPED = (
    "accelerate launch --config_file a.yaml", "composer -n 4", "colossalai run --nproc_per_node 4 -m",
    "tune run --nproc_per_node 4", "fabric run --precision 16", "swift sft", "llamafactory-cli train", "torchrun",
    "axolotl train --",
)  # fmt: skip
"""Launchers that run themselves once on each host."""


def test_argv_is_what_was_typed_with_every_launcher_that_runs_itself_on_each_host(tmp_path):
    """The words reach the launcher: what it makes of them is its own."""
    words = [word for word in (*map(os.fsencode, FLAGS), *ODD, *EVERY_BYTE) if word != b"--"]
    for line in TYPED:
        program, *flags = line.split()
        (tmp_path / program).write_text(f"#!{sys.executable}\n{PRINT}\n")
        (tmp_path / program).chmod(0o755)
        command = (program, *flags, "t.py", *map(os.fsdecode, words))
        job = build_spec(None, {"image": "i:1", "gpus": 4, "command": command, "one_per_host": True}, {})
        job, _ = settled(job, is_named=False)
        assert (job.launcher, job.one_per_host) == ("tasks", True), line
        environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NNODES": "2", "NPROC_PER_NODE": "4"}
        done = subprocess.run([script_of(tmp_path, job)], env=environ, capture_output=True, check=True)
        got = done.stdout.split(b"\0")
        at = got.index(b"t.py")
        assert got[at + 1 : at + 1 + len(words)] == words, line
        assert program == "axolotl" or len(got) == at + 1 + len(words), line


def test_argv_is_what_was_typed_behind_wrappers_and_launchers_that_gpurun_replaces(tmp_path):
    words = [
        *map(os.fsencode, FLAGS),
        *(word for word in (*ODD, *EVERY_BYTE) if word != b":"),
    ]  # for mpirun, it ends one
    typed = ("env -u A nice -n 1", "timeout 60", "A=1 srun -n 4", "mpirun -np 4 -x A=1", "torchrun --no-python",
             "horovodrun -np 4", "deepspeed --no_python", "bash -ec 'exec \"$@\"' x")  # fmt: skip
    for line in typed:
        command = (*shlex.split(line), sys.executable, "-c", PRINT, *map(os.fsdecode, words))
        job = build_spec(None, {"image": "i:1", "gpus": 4, "command": command}, {})
        job, _ = settled(job, is_named=False)
        done = subprocess.run([script_of(tmp_path, job)], capture_output=True, check=True)
        assert done.stdout.split(b"\0") == words, line


@pytest.mark.parametrize("launcher", ["tasks", "torchrun", "jax", "mpirun", "srun"])
def test_argv_is_what_was_typed_with_one_process_for_each_host(tmp_path, launcher):
    words = [*map(os.fsencode, FLAGS), *ODD, *EVERY_BYTE]
    job = replace(spec(*words, launcher=launcher), one_per_host=True)
    done = subprocess.run([script_of(tmp_path, job)], capture_output=True, check=True)
    assert done.stdout.split(b"\0") == words


@pytest.mark.parametrize("shell", [["dash"], ["bash"], ["bash", "--posix"], ["busybox", "sh"]], ids=" ".join)
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_with_every_shell_that_images_have(tmp_path, shell, locale):
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    words = [*map(os.fsencode, FLAGS), *ODD, *EVERY_BYTE]
    argv = [*shell, str(script_of(tmp_path, spec(*words)))]
    environ = {"PATH": os.environ["PATH"], "LC_ALL": locale}
    assert subprocess.run(argv, env=environ, capture_output=True, check=True).stdout.split(b"\0") == words


def test_each_word_has_one_text_and_each_text_one_word_and_records_and_scripts_hold_it():
    for word in [*ODD, *EVERY_BYTE]:
        text = as_text(os.fsdecode(word))
        assert as_bytes(text) == word
        assert quoted(text).encode()
        assert msgspec.json.decode(msgspec.json.encode(text)) == text


def test_a_text_that_is_no_bytes_is_refused():
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        build_spec(None, {"image": "i", "gpus": 1, "command": ("a", "\ud800")}, {})


@pytest.mark.parametrize("size", [131_071, 131_072])
def test_a_word_is_as_long_as_linux_takes(size):
    if size > 131_071:
        with pytest.raises(BadInput, match="at most 131071"):
            spec(b"x" * size)
    else:
        subprocess.run(["true", "x" * size], check=True)
        assert spec(b"x" * size)


def test_a_script_that_an_older_launcher_gives_words_runs_these(tmp_path):
    script = script_of(tmp_path, replace(spec(b"new"), command=("false",)))
    assert subprocess.run([script, "printf", "%s", "old"], capture_output=True, check=True).stdout == b"old"


@pytest.mark.parametrize(
    ("command", "is_rank"),
    [
        ("cd /workspace > /dev/null 2>&1 ; env HOROVOD_RANK=1 A=b /gpurun/bin/rank", True),
        ("cd /workspace > /dev/null 2>&1 ; env HOROVOD_RANK=1 /gpurun/bin/rank python3 x.py", True),  # an older one's
        ("true", False), ("orted -mca ess env", False), ("cat /gpurun/bin/ranks", False),
    ],
)  # fmt: skip
def test_the_ssh_of_a_launcher_tells_a_rank_that_it_lives(tmp_path, command, is_rank):
    """The rank's script waits for the end of its stdin; the command that the ssh starts ends with the script."""
    ssh = tmp_path / "ssh"
    ssh.write_text(scripts()["ssh"].replace("exec /usr/bin/ssh", "exec timeout 0.2 head -n 1 #"))
    environ = {**os.environ, "GPURUN_RUN": str(tmp_path)}
    argv = ["sh", str(ssh), "-o", "StrictHostKeyChecking=no", "h3", command]
    done = subprocess.run(argv, env=environ, input=b"", capture_output=True)
    assert done.stdout == (b"gpurun\n" if is_rank else b"")
