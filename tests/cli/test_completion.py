"""What a shell completes: the words themselves, and a real bash, zsh and fish on a terminal."""

from __future__ import annotations

import json
import os
import pty
import queue
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from typer._completion_shared import get_completion_script
from typer.main import get_command

from gpurun.cli import completion, shell_words
from gpurun.cli.main import app
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.lab.spec import LabSpec
from gpurun.studies.store import SweepStore
from gpurun.studies.sweep_plan import Wish

LIMIT_S = 60
INVENTORY = """\
version: 1
defaults: {generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks: {r1: {hosts: {"gpu-[01-02]": {labels: {owner: me}}}}}
pools: {vision: {reservation: 4}}
"""
ODD = "my job'; $x [a-b]"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.chdir(tmp_path)
    found = JobStore(tmp_path / "home")
    for name in ("ns:train", ODD, "evil\nname", "-flag"):
        spec = JobSpec(name=name, image="me/net:1", gpus=1, command=("true",), project="cats")
        folder = found.create(spec, inventory=tmp_path / "inventory.yaml", now_s=1.0)
        folder.write(folder.record().but(owner="eve"))
    folder.write(folder.record().but(state=State.FAILED))
    plan = Wish(grid={"lr": ("1", "2")}).plan(JobSpec(name="tune", image="i", gpus=1, command=("x",)), "i.yaml", 1.0)
    SweepStore(tmp_path / "home").create(plan, None)
    return found


def words(capsys, line, shell="zsh", breaks=""):
    shell_words.answer(shell, get_command(app), {shell_words.LINE: f"gpurun {line}", shell_words.BREAKS: breaks})
    return capsys.readouterr().out.splitlines()


def test_every_value_is_completed(store, capsys, monkeypatch):
    """`status JOB`, `diff`, `tensorboard`, sweeps, campaigns and most options of `submit` completed nothing."""
    lab = LabSpec(name="other", racks=2, hosts=1, gpus=1)
    up = SimpleNamespace(spec=lab, subnet=IPv4Network("10.99.0.0/24"))
    monkeypatch.setattr("gpurun.lab.spec.labs", lambda: iter([up]))
    for line, found in {
        "status ns": ["ns:train"], "diff @": ["@last"], "diff @last ns": ["ns:train"], "requeue ns": ["ns:train"],
        "events ns": ["ns:train"], "tensorboard tu": ["tune"], "tensorboard ns": ["ns:train"],
        "sweep status tu": ["tune"], "sweep stop tu": ["tune"], "sweep st": ["status", "stop"], "scale sh": ["show"],
        "status --state RUN": ["RUNNING"], "status --user e": ["eve"], "submit --host gpu-01,@ra": ["gpu-01,@rack:r1"],
        "submit --avoid @label": ["@label:owner=me"], "submit --launcher torch": ["torchrun"],
        "submit --generation pa": ["pascal"], "submit --pool v": ["vision"], "submit --project c": ["cats"],
        "submit --locality ra": ["rack"], "submit --image me/": ["me/net:1"], "submit --data x=ho": ["x=host:/"],
        "submit --host=@rack": ["--host=@rack:r1"], "sweep run --launcher torch": ["torchrun"],
        "sweep recipe --pool v": ["vision"], "inventory cordon @fa": ["@fabric:tcp"], "exec @l": ["@last"],
        "history --user e": ["eve"], "history --state F": ["FAILED"], "report --pool v": ["vision"],
        "init --user e": [], "prune --state S": ["SUCCEEDED"], "audit --job ns": ["ns:train"], "du ns": ["ns:train"],
        "ship me": ["me/net:1"], "data evict --host gpu-01,@fa": ["gpu-01,@fabric:tcp"],
        "bench --image me": ["me/net:1"],
        "scale run --launcher jax,torchr": ["jax,torchrun"], "history --project c": ["cats"],
        "inventory set gpu-01 gpu_mo": ["gpu_model="], "inventory set gpu-01 gpus=8 generation=p":
        ["generation=pascal"], "inventory set gpu-01 labels.": ["labels.owner="], "inventory add x ra": ["rack="],
        "inventory set gpu-01 rack=": ["rack=r1"], "inventory set gpu-01 labels=": [], "inventory set gpu-01 __c": [],
        "inventory export js": ["json"], "inventory import x --from sl": ["slurm"], "simulate t --policy s": ["sjf"],
        "lab crash gpu-": ["gpu-r1-01", "gpu-r2-01"], "lab cut he": ["head"], "lab heal gpu-r2": ["gpu-r2-01"],
        "lab run --name o": ["other"], "lab crash head": [],
        "inventory label gpu-01 ow": ["owner=", "owner-"], "inventory label gpu-01 owner=": ["owner=me"],
        "inventory import x --fabric ro": ["roce"], "lab up --fabric t": ["tcp"], "bench --engine h": ["horovod"],
        "sweep run --stop n": ["none"], "submit --notify ma": ["mail:"], "inventory add gpu": [],
        "submit --notify start,fa": ["start,failure="], "submit --notify end=s": ["end=slack:"],
        "history --name ns": ["ns:train"], "share x --group roo": ["root"], "data stage ho": [],
        "exec @last -- @l": [], "nonsense x": [], "logs 'my": [ODD], "logs @last nothing": [],
    }.items():  # fmt: skip
        assert words(capsys, line) == found, line
    assert "submit" in words(capsys, "") and "--rank" in words(capsys, "logs --r")
    damaged = SweepStore(store.home).folder.plain / "s-00000000"  # hides no other
    damaged.mkdir()
    (damaged / "plan.json").write_bytes(b"{")
    assert words(capsys, "sweep stop tu") == ["tune"]
    for folder in store.folder.plain.iterdir():
        (folder / "state.json").write_bytes(b"{")
    Path("inventory.yaml").write_text("{")
    assert words(capsys, "logs ns") == words(capsys, "submit --host gpu") == []


QUANTITIES = {"NUMBER", "COUNT", "GPUS", "GPUS,GPUS…", "SIZES", "LINES", "RANK", "PORT", "TIME", "SIZE", "RATE", "WHEN"}
FILES = {"FILE", "[FILE]", "FOLDER", "NAME=FILE", "[RECIPE]", "[RECIPE] [NAME=RANGE…]", "FOLDER:PATH[:rw]"}
"""A shell completes files by itself where gpurun offers no word; of a recipe, too."""
NOT_KNOWN = {
    "NAME",
    "TEXT",
    "PATTERN",
    "GLOB",
    "NAME=VALUE",
    "NAME=A,B",
    "ADDRESS",
    "-- CMD ...",  # a person's own words
    "PATH",
    "init USER",
    "import USER",
    "run USER",
    "init [SOURCE]",  # of hosts or of a container
    "import NAME",
    "DEVICE",
    "NAMES",  # of hosts that no inventory has yet
    "METRIC",
    "NAME:max|min",  # what a program reports that has not run yet
}


def commands(command, path=()):
    """Each command with its words."""
    for name in command.list_commands(click.Context(command)) if isinstance(command, click.Group) else ():
        yield from commands(command.get_command(click.Context(command), name), (*path, name))
    if not isinstance(command, click.Group):
        yield path, command


def test_every_value_from_a_known_set_has_its_completion():
    """A new option completes its value, or one of the three lists above says why nothing can."""
    allowed, used, bare = {*QUANTITIES, *FILES, *NOT_KNOWN}, set(), []
    for path, command in commands(get_command(app)):
        for parameter in command.params:
            kind, value = parameter.type, parameter.make_metavar(click.Context(command))
            told = {f"{path[-1]} {value}", value}
            completes = getattr(parameter, "_custom_shell_complete", None) is not None
            completes |= isinstance(kind, click.Choice | click.Path | click.File) or getattr(
                parameter, "is_flag", False
            )
            if not completes and not told & {*completion.BY_VALUE}:
                used |= told & allowed
                bare += [] if told & allowed else [(" ".join(path), parameter.opts[-1], value)]
    assert bare == []
    assert allowed - used == set()


def test_bash_gets_what_follows_the_last_character_at_which_it_splits(capsys):
    breaks = " \t\n\"'@><=;|&(:"
    for line, found in {
        "logs @l": ["@last"], "inventory list @rack:r": ["r1"], "inventory list @rack:": ["r1"],
        "logs ns": ["ns:train"], "submit --host=@rack:r": ["r1"], "submit --host=gpu-01,@rack:": ["r1"],
        "logs my": [r"my\ job\'\;\ \$x\ \[a-b\]"], "logs 'my": [ODD], "logs my\\ j": [r"my\ job\'\;\ \$x\ \[a-b\]"],
    }.items():  # fmt: skip
        assert words(capsys, line, "bash", breaks) == found, line


def test_the_command_answers_shells(tmp_path):
    env = {**os.environ, "_GPURUN_COMPLETE": "words_fish", "_GPURUN_LINE": "gpurun logs @l"}
    run = {"capture_output": True, "text": True, "timeout": LIMIT_S, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-m", "gpurun"], env=env, **run)
    assert (done.returncode, done.stdout) == (0, "@last\n"), done.stderr


CLIENT = f"""#!{sys.executable} -IS
import json, os, socket, sys
told = {{"argv": sys.argv[1:], "env": {{k: v for k, v in os.environ.items() if k.startswith("_GPURUN")}}}}
server = socket.socket(socket.AF_UNIX)
server.connect(SOCKET)
server.sendall(json.dumps(told).encode())
server.shutdown(socket.SHUT_WR)
with server.makefile("rb") as answer:
    sys.stdout.buffer.write(answer.read())
"""


@pytest.fixture
def typed(tmp_path, capsys):
    """Answers the shells' questions in this process; the queue gets the arguments of commands that they run."""
    here, ran = str(tmp_path / "socket"), queue.Queue()
    (tmp_path / "bin").mkdir()
    client = tmp_path / "bin" / "gpurun"
    client.write_text(CLIENT.replace("SOCKET)", f"{here!r})"))
    client.chmod(0o755)
    server = socket.socket(socket.AF_UNIX)
    server.bind(here)
    server.listen()

    def serve():
        with suppress(OSError):
            while True:
                asks, _ = server.accept()
                with asks, asks.makefile("rb") as file:
                    told = json.load(file)
                    if (shell := shell_words.asked_by(told["env"])) is None:
                        ran.put(told["argv"])
                    else:
                        shell_words.answer(shell, get_command(app), told["env"])
                        asks.sendall(capsys.readouterr().out.encode())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield ran
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(LIMIT_S)


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "--private", "--interactive"],
}  # fmt: skip
BEGIN = {"bash": "source {0}\n", "zsh": "autoload -U compinit; compinit -u -D; source {0}\n", "fish": "source {0}\n"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_completes(typed, tmp_path, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: .ci/install-packages installs it")
    script = tmp_path / "script"
    shell_words.use_scripts()
    script.write_text(get_completion_script(prog_name="gpurun", complete_var=shell_words.VARIABLE, shell=shell))
    ours, theirs = pty.openpty()
    env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "xterm", "LANG": "C.UTF-8",
        "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path),
    }  # fmt: skip
    process = subprocess.Popen(["setsid", "-c", *SHELLS[shell]], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = bytearray()

    def read():
        with suppress(OSError):
            while data := os.read(ours, 1 << 16):
                shown.extend(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        os.write(ours, BEGIN[shell].format(script).encode() + b"gpurun ready\r")
        try:
            assert typed.get(timeout=LIMIT_S) == ["ready"]
        except queue.Empty:
            pytest.fail(f"{shown!r}")
        for line, argv in {
            "logs @l": ["logs", "@last"], "inventory list @rack:r": ["inventory", "list", "@rack:r1"],
            "logs ns:t": ["logs", "ns:train"], "submit --host=gpu-01,@ra": ["submit", "--host=gpu-01,@rack:r1"],
            "logs my": ["logs", ODD], "status --state RUNN": ["status", "--state", "RUNNING"],
            "inventory set gpu-01 gpus\t8": ["inventory", "set", "gpu-01", "gpus=8"],
        }.items():  # fmt: skip
            os.write(ours, f"gpurun {line}\t\r".encode())
            try:
                assert typed.get(timeout=LIMIT_S) == argv, shown[-400:]
            except queue.Empty:
                pytest.fail(f"{line}: {shown[-600:]!r}")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        reader.join(LIMIT_S)
