"""The script that starts every rank, run by every shell that images have."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from how_many import count
from waiting import LIMIT_S, until

from gpurun.launch.fabric import Setting
from gpurun.launch.launchers.horovod import GLOO, MPI
from gpurun.launch.launchers.launcher import Launcher
from gpurun.launch.rank import rank_script
from gpurun.node.job.watch import counted_in

SHELLS = {"dash": ["dash"], "bash": ["bash"], "busybox": ["busybox", "sh"], "bash as sh": ["bash", "--posix"]}
JOB = f"j-3{os.getpid():07x}"
WORDS = ["a b", "c'd\"e", "f\ng", "", "$HOME", "*", "ü", "-n"]


class Ranks:
    """Starts ranks with one shell, in a `run` folder of their own."""

    def __init__(self, shell: list[str], folder: Path) -> None:
        self.shell = shell
        self.run = folder / "run"
        self.run.mkdir()
        self.script = folder / "rank"
        self.launcher = GLOO
        self.write()
        self.environ = {
            "PATH": os.environ["PATH"], "GPURUN_RUN": str(self.run), "GPURUN_ATTEMPT": "2", "GPURUN_JOB": JOB,
            "HOROVOD_RANK": "3", "READY": str(folder / "ready"),
        }  # fmt: skip

    def write(self, *settings: Setting, **limits: float) -> None:
        self.limits = {"grace_s": 20, "notice_s": 0, "copied_s": LIMIT_S, **limits}
        self.script.write_text(rank_script(settings, self.launcher, **self.limits))

    def use(self, launcher: Launcher) -> None:
        """Have another launcher start the ranks."""
        self.environ[launcher.rank_variable] = self.environ.pop(self.launcher.rank_variable)
        self.launcher = launcher
        self.write(**self.limits)

    def argv(self, *command: str) -> list[str]:
        return [*self.shell, str(self.script), *command]

    def start(self, *command: str, **options) -> subprocess.Popen[bytes]:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(self.argv(*command), **{"env": self.environ, **options})

    def done(self, *command: str, **options) -> tuple[int, bytes, bytes]:
        """Exit code, and what came through to the launcher."""
        process = self.start(*command, **options)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err

    @property
    def folder(self) -> Path:
        """The only rank's folder."""
        (found,) = (self.run / "ranks" / "2").iterdir()
        return found

    def wait_for(self, text: bytes) -> None:
        until(lambda: any(text in path.read_bytes() for path in self.run.glob("ranks/2/*/o")))

    @property
    def ends(self) -> list[str]:
        return [path.name for path in self.run.glob("ranks/2/*/end*")]


@pytest.fixture(params=list(SHELLS)[: count("shells that start ranks")])
def ranks(request, tmp_path):
    shell = SHELLS[request.param]
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    return Ranks(shell, tmp_path)


def test_words_settings_and_bytes_arrive_as_they_are_and_the_launcher_hears_nothing(ranks):
    ranks.write(Setting("NCCL_DEBUG", 'a\'; touch x #\n"$(id)"', "", "user"))
    code, out, err = ranks.done(
        "sh", "-c", 'printf "%s\\0" "$NCCL_DEBUG" "$@"; printf "\\377\\000x" >&2; exit 37', "_", *WORDS
    )
    assert (code, out, err) == (37, b"", b"")
    assert (ranks.folder / "o").read_bytes().split(b"\0")[:-1] == [
        b"a'; touch x #\n\"$(id)\"", *(word.encode() for word in WORDS)
    ]  # fmt: skip
    assert (ranks.folder / "e").read_bytes() == b"\377\0x"
    assert ranks.ends == ["end.37"]


def test_the_folder_names_rank_pid_and_start_of_the_script(ranks):
    process = ranks.start("sh", "-c", "echo up; read _", stdin=subprocess.PIPE)
    ranks.wait_for(b"up")
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    assert ranks.folder.name == f"3.{process.pid}.{started}"
    assert (ranks.folder / "start").read_text() == "started\n"
    assert ranks.ends == []
    process.communicate(b"\n", timeout=LIMIT_S)
    assert ranks.ends == ["end.0"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_a_signal_ended_has_the_code_of_a_shell(ranks, number):
    assert ranks.done("sh", "-c", f"kill -{int(number)} $$")[0] == 128 + number
    assert ranks.ends == [f"end.{128 + number}"]


@pytest.mark.parametrize(("command", "code"), [(["/no/such"], 127), (["/etc/passwd"], 126)])
def test_a_command_that_cannot_run_ends_the_rank_and_says_why_in_its_output(ranks, command, code):
    assert ranks.done(*command)[0] == code
    assert ranks.ends == [f"end.{code}"]
    assert command[0].encode() in (ranks.folder / "e").read_bytes()


def test_a_command_with_the_name_of_a_word_of_the_shell_is_the_program(ranks, tmp_path):
    for name in ("exit", "gpurun_sweep", "echo"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\nprintf 'the program %s' \"$1\"\n")
        program.chmod(0o755)
    ranks.environ["PATH"] = f"{tmp_path}:{ranks.environ['PATH']}"
    for name in ("exit", "gpurun_sweep", "echo"):
        assert ranks.done(name, "7")[0] == 0
        assert (ranks.folder / "o").read_bytes() == b"the program 7"
        shutil.rmtree(ranks.run / "ranks")


def test_the_environment_gains_the_mark_and_unbuffered_python_alone(ranks):
    ranks.environ |= {"rank": "mine", "code": "x", "file": "a b", "PYTHONUNBUFFERED": ""}
    dump = "import json, os; print(json.dumps(dict(os.environ)))"
    argv = [*ranks.shell, "-c", 'exec "$@"', "_", sys.executable, "-c", dump]
    expected = subprocess.run(argv, env=ranks.environ, capture_output=True, check=True)
    ranks.done(sys.executable, "-c", dump)
    found = json.loads((ranks.folder / "o").read_text())
    assert found.pop("GPURUN_RANK_ID") == f"{JOB}/2/{ranks.folder.name}"
    wanted = json.loads(expected.stdout)
    for volatile in ("_", "SHLVL", "PWD", "OLDPWD"):
        found.pop(volatile, None)
        wanted.pop(volatile, None)
    assert found == wanted
    del ranks.environ["PYTHONUNBUFFERED"]
    shutil.rmtree(ranks.run / "ranks")
    ranks.done(sys.executable, "-c", dump)
    assert json.loads((ranks.folder / "o").read_text())["PYTHONUNBUFFERED"] == "1"


def test_stdin_and_signals_of_the_rank_are_the_launchers(ranks):
    status = "import sys; print(sys.stdin.read(), open('/proc/self/status').read())"
    ignore = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        process = ranks.start(sys.executable, "-c", status, stdin=subprocess.PIPE, restore_signals=False)
    finally:
        signal.signal(signal.SIGUSR2, ignore)
    process.communicate(b"the words", timeout=LIMIT_S)
    said = (ranks.folder / "o").read_text()
    assert said.startswith("the words")
    masks = {line.split(":")[0]: int(line.split()[1], 16) for line in said.splitlines() if line.startswith("SigIgn")}
    ignored = {number for number in range(1, 32) if masks["SigIgn"] >> (number - 1) & 1}
    assert signal.SIGUSR2 in ignored
    assert not {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1} & ignored


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_process_group_ends_the_rank_and_the_script_tells_it(ranks, number):
    process = ranks.start("sh", "-c", "echo up; while :; do sleep 0.1; done", start_new_session=True)
    ranks.wait_for(b"up")
    os.killpg(process.pid, number)
    assert process.communicate(timeout=LIMIT_S) == (b"", b"")
    assert process.returncode == 128 + number
    assert ranks.ends == [f"end.{128 + number}"]


def test_ranks_with_the_same_number_do_not_share_a_folder(ranks):
    for _ in range(3):
        ranks.done("sh", "-c", "echo $$")
    assert len(list((ranks.run / "ranks" / "2").iterdir())) == 3


def test_after_a_notice_no_rank_starts_but_that_of_the_next_attempt_does(ranks, tmp_path):
    ranks.write(grace_s=0.5)
    (ranks.run / "stop.2").touch()
    assert ranks.done("touch", str(tmp_path / "ran"))[0] == 143
    assert not (tmp_path / "ran").exists()
    assert ranks.ends == ["end.143"]
    ranks.environ["GPURUN_ATTEMPT"] = "3"
    assert ranks.done("touch", str(tmp_path / "ran"))[0] == 0
    assert (tmp_path / "ran").exists()


def without_rank(ranks):
    del ranks.environ["HOROVOD_RANK"]


def odd_rank(ranks):
    ranks.environ["HOROVOD_RANK"] = "../../x"


def no_folder(ranks):
    ranks.environ["GPURUN_RUN"] = "/proc/1/no such"


def no_run(ranks):
    del ranks.environ["GPURUN_RUN"]


def a_file_in_the_way(ranks):
    (ranks.run / "ranks").write_text("")


def full_disk(ranks):
    """What can be made but not written: every file is /dev/full."""
    ranks.environ["PATH"] = f"{ranks.script.parent}:{ranks.environ['PATH']}"
    tool = ranks.script.parent / "mkdir"
    tool.write_text(f'#!/bin/sh\n{shutil.which("mkdir")} "$@" && ln -s /dev/full "$1/start" 2>/dev/null; :\n')
    tool.chmod(0o755)


@pytest.mark.parametrize("harm", [without_rank, odd_rank, no_folder, no_run, a_file_in_the_way, full_disk])
def test_where_nothing_can_be_reported_the_rank_runs_and_prints_to_the_launcher(ranks, harm):
    harm(ranks)
    assert ranks.done("sh", "-c", "printf out; printf err >&2; exit 5") == (5, b"out", b"err")
    assert not list(ranks.run.rglob("start"))


def test_mpi_numbers_ranks_by_another_name(ranks):
    ranks.use(MPI)
    ranks.done("true")
    assert ranks.folder.name.startswith("3.")


SURVIVOR = "trap 'echo told; exit' TERM; echo up; >$READY; while :; do sleep 0.1; done"
STUBBORN = "trap '' TERM; echo up; >$READY; while :; do sleep 0.1; done"
READY = "until [ -e $READY ]; do sleep 0.05; done"
"""What a rank does until the process that outlives it is ready for a signal."""


def rank_below(script: subprocess.Popen[bytes]) -> int:
    """The rank's process, as the agent finds it among the tools of its script, which come and go."""
    found = []
    for pid in Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split():
        with suppress(OSError):
            if b"GPURUN_RANK_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
    (only,) = found
    return only


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def old_grep(ranks):
    """A grep that knows no lines that end in NUL, as older busybox has it."""
    ranks.environ["PATH"] = f"{ranks.script.parent}:{ranks.environ['PATH']}"
    tool = ranks.script.parent / "grep"
    tool.write_text(f'#!/bin/sh\ncase $1 in -*z*) exit 2 ;; esac\nexec {shutil.which("grep")} "$@"\n')
    tool.chmod(0o755)


@pytest.mark.parametrize("tools", [lambda _: None, old_grep])
def test_what_the_rank_left_behind_gets_its_notice_and_does_not_hold_the_launcher(ranks, tools):
    tools(ranks)
    code, out, _ = ranks.done("sh", "-c", f'setsid sh -c "{SURVIVOR}" & {READY}; exit 4')
    assert (code, out) == (4, b"")
    assert (ranks.folder / "o").read_bytes() == b"up\ntold\n"


def test_what_ignores_its_notice_is_killed_after_the_grace_and_the_end_is_told_before(ranks):
    ranks.write(grace_s=1)
    process = ranks.start("sh", "-c", f'(exec setsid sh -c "{STUBBORN}") & echo pid $!; {READY}; exit 4')
    ranks.wait_for(b"pid")
    pid = (ranks.folder / "o").read_text().split("pid ")[1].split()[0]
    assert until(lambda: ranks.ends) == ["end.4"]
    assert process.wait(LIMIT_S) == 4
    process.communicate()
    assert not alive(pid)


def test_other_ranks_and_their_children_are_left_alone(ranks):
    other = ranks.start("sh", "-c", "sleep 600 & echo other $!; wait")
    ranks.wait_for(b"other")
    pid = (ranks.folder / "o").read_text().split()[1]
    try:
        assert ranks.done("sh", "-c", "sleep 60 & exit 0")[0] == 0
        assert other.poll() is None
        assert alive(pid)
    finally:
        os.kill(int(pid), signal.SIGKILL)
        other.communicate(timeout=LIMIT_S)


def test_a_shell_that_is_told_leaves_its_program_a_notice_and_grace(ranks):
    """A wrapper without exec: the notice ends the shell, and the program under it saves."""
    process = ranks.start("sh", "-c", f'sh -c "{SURVIVOR}"; true')
    ranks.wait_for(b"up")
    os.kill(rank_below(process), signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143
    assert (ranks.folder / "o").read_bytes() == b"up\ntold\n"


SAVER = "trap 'echo saving; sleep 0.3; echo saved; >$READY.saved; exit' TERM; echo up; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("outer", "form"),
    [
        ("sh", 'sh "$1" | tee "$0"; true'),
        ("bash", 'sh "$1" | tee "$0"'),
        ("./train.sh", 'sh "$1" 2>&1 | grep --line-buffered . | tee "$0"'),
        ("./train.sh", 'setsid sh "$1" | tee "$0"; true'),
    ],
)
def test_a_program_that_prints_into_a_pipe_saves_before_the_pipes_reader_ends(ranks, tmp_path, outer, form):
    """`python3 train.py | tee log` in a script: its handler printed into a pipe that nobody read any more, and died."""
    program, script, log = tmp_path / "program", tmp_path / "train.sh", tmp_path / "log"
    program.write_text(SAVER)
    script.write_text(f"#!/bin/sh\n{form.replace('$0', str(log)).replace('$1', str(program))}\n")
    script.chmod(0o755)
    argv = [str(script)] if outer == "./train.sh" else [outer, "-c", form, str(log), str(program)]
    process = ranks.start(*argv)
    ranks.wait_for(b"up")
    os.kill(rank_below(process), signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert Path(f"{ranks.environ['READY']}.saved").exists()
    assert {"up", "saving", "saved"} <= set(log.read_text().split())
    assert process.returncode == 143


def test_a_program_that_reads_from_another_is_told_when_that_has_ended(ranks):
    """`producer | python3 train.py`"""
    process = ranks.start("sh", "-c", f'sleep 600 | sh -c "{SURVIVOR}"; true')
    ranks.wait_for(b"up")
    os.kill(rank_below(process), signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert (ranks.folder / "o").read_bytes() == b"up\ntold\n"


def test_programs_that_read_from_each_other_are_told_together(ranks, tmp_path):
    for name in ("a", "b"):
        os.mkfifo(tmp_path / name)
    loop = "cat <&3 >&4 & cat <&4 >&3 & echo up; wait"
    opened = f"exec 3<>{tmp_path}/a 4<>{tmp_path}/b; {loop}"
    process = ranks.start("sh", "-c", opened)
    ranks.wait_for(b"up")
    os.kill(rank_below(process), signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143


def test_last_words_are_all_there_when_the_script_ends(ranks):
    """The copy of the output may be slow: on a busy host it has not run yet when the last process ends."""
    ranks.environ["PATH"] = f"{ranks.script.parent}:{ranks.environ['PATH']}"
    slow = ranks.script.parent / "cat"
    slow.write_text(f"#!/bin/sh\nsleep 1; exec {shutil.which('cat')}\n")
    slow.chmod(0o755)
    assert ranks.done("sh", "-c", f'setsid sh -c "{SURVIVOR}" & {READY}; echo last; exit 4')[0] == 4
    assert sorted((ranks.folder / "o").read_bytes().splitlines()) == [b"last", b"told", b"up"]


def test_a_disk_that_fills_up_makes_a_rank_wait_and_its_end_is_noted_all_the_same(ranks):
    """In namespaces of its own, which end with the command: so does what copies its output."""
    alone = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
    inside = (
        'mount -t tmpfs -o size=64k tmpfs "$GPURUN_RUN" || exit 99\n"$@"\ncode=$?\n'
        'cat "$GPURUN_RUN"/ranks/2/3.*/e; ls "$GPURUN_RUN"/ranks/2/3.*; exit $code'
    )
    ranks.write(copied_s=0.5)
    fill = "head -c 300000 /dev/zero || exit 9"
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespaces")
    done = subprocess.run(
        [*alone, "sh", "-c", inside, "_", *ranks.argv("sh", "-c", fill)],
        env=ranks.environ, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"end.0" in done.stdout.split()
    assert b"start" in done.stdout.split()


def test_a_rank_that_opens_its_output_anew_loses_nothing(ranks):
    """As scripts do for an error message, and programs that log to a file of that name."""
    script = "echo one; echo two >/dev/stdout; echo three; echo four >/dev/stderr; echo five >/dev/stderr; echo six >&2"
    assert ranks.done("sh", "-c", script)[0] == 0
    assert (ranks.folder / "o").read_bytes() == b"one\ntwo\nthree\n"
    assert (ranks.folder / "e").read_bytes() == b"four\nfive\nsix\n"


def test_a_daemon_that_leaves_no_trace_keeps_no_launcher_waiting(ranks):
    """It has cleared its environment and holds the rank's output; the launcher's pipe is not its."""
    ranks.write(copied_s=0.5)
    code, _, _ = ranks.done("sh", "-c", "env -i sleep 600 & echo $!; exit 4")
    ranks.wait_for(b"\n")
    pid = int((ranks.folder / "o").read_text())
    assert alive(str(pid))
    os.kill(pid, signal.SIGKILL)
    assert code == 4


TELLS = "trap 'echo told >&2; sleep 0.5; exit 7' TERM INT HUP; echo up; while :; do sleep 0.1; done"


def no_env_tool(ranks):
    """An `env` that cannot give signals back their meaning, as older coreutils and busybox have it."""
    ranks.environ["PATH"] = f"{ranks.script.parent}:{ranks.environ['PATH']}"
    tool = ranks.script.parent / "env"
    tool.write_text(f'#!/bin/sh\ncase $1 in -*) exit 125 ;; esac\nexec {shutil.which("env")} "$@"\n')
    tool.chmod(0o755)


@pytest.mark.parametrize("tools", [lambda _: None, no_env_tool], ids=["", "old env"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_of_the_launcher_to_the_script_reaches_the_rank_once_whose_code_counts(ranks, tools, number):
    tools(ranks)
    process = ranks.start("sh", "-c", TELLS)
    ranks.wait_for(b"up")
    process.send_signal(number)
    assert process.communicate(timeout=LIMIT_S) == (b"", b"")
    assert process.returncode == 7
    assert (ranks.folder / "e").read_bytes().count(b"told") == 1
    assert ranks.ends == ["end.7"]
    assert (ranks.folder / "told").exists()


def test_a_rank_that_the_launchers_signal_ends_has_the_code_of_that_signal(ranks):
    process = ranks.start("sh", "-c", "echo up; while :; do sleep 0.1; done")
    ranks.wait_for(b"up")
    process.terminate()
    process.communicate(timeout=LIMIT_S)
    assert (process.returncode, ranks.ends) == (143, ["end.143"])


def test_a_rank_that_the_agent_tells_is_not_told_again_by_its_launcher(ranks):
    """Another rank has saved sooner and ended, and so horovodrun ends this one, which is still saving."""
    process = ranks.start("sh", "-c", f"{TELLS}")
    ranks.wait_for(b"up")
    (ranks.run / "stop.2").touch()
    process.terminate()
    time.sleep(0.3)
    assert process.poll() is None
    assert (ranks.folder / "e").read_bytes() == b""
    os.kill(rank_below(process), signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert (process.returncode, ranks.ends) == (7, ["end.7"]), "the launcher is ending all: nothing is kept from it"
    assert not (ranks.folder / "told").exists()


def test_mpirun_signals_the_process_group_and_the_rank_is_told_once(ranks):
    ranks.use(MPI)
    process = ranks.start("sh", "-c", TELLS, start_new_session=True)
    ranks.wait_for(b"up")
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert (ranks.folder / "e").read_bytes().count(b"told") == 1
    assert (process.returncode, ranks.ends) == (7, ["end.7"])


def test_a_signal_to_the_process_group_that_comes_before_a_copy_has_begun_loses_no_output(ranks):
    ranks.use(MPI)
    ranks.script.write_text(ranks.script.read_text().replace("gpurun_copy() {", "gpurun_copy() { sleep 1;"))
    process = ranks.start("sh", "-c", TELLS.replace("echo up", "echo up; >$READY"), start_new_session=True)
    until(Path(ranks.environ["READY"]).exists)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert (process.returncode, ranks.ends) == (7, ["end.7"])
    assert (ranks.folder / "o").read_bytes() == b"up\n"
    assert (ranks.folder / "e").read_bytes().count(b"told") == 1


@pytest.mark.parametrize("word", [b"gpurun\n", b"", b"other\n"])
def test_a_rank_on_another_host_is_told_when_the_connection_to_its_launcher_ends(ranks, word):
    """The job's ssh says so first. A stdin that is at its end from the beginning says nothing."""
    ranks.environ["GPURUN_STDIN"] = "launcher"
    process = ranks.start("sh", "-c", f"cat; env | grep GPURUN_STDIN; {TELLS}", stdin=subprocess.PIPE)
    process.stdin.write(word)
    process.stdin.flush()
    ranks.wait_for(b"up")
    assert (ranks.folder / "o").read_bytes() == b"up\n"
    time.sleep(0.3)
    assert (ranks.folder / "e").read_bytes() == b""
    process.stdin.close()
    if word != b"gpurun\n":
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
    assert process.wait(LIMIT_S) == 7
    assert (ranks.folder / "e").read_bytes().count(b"told") == 1
    assert process.stdout.read() == b""


# -- when the launcher learns of an end -----------------------------------------------------------------------


def start_by(ranks, launcher: Launcher, *command: str, **options) -> subprocess.Popen[bytes]:
    """A rank as a launcher starts it, as the leader of its process group."""
    ranks.use(launcher)
    return ranks.start(*command, start_new_session=True, **options)


def assert_stays(ranks, process: subprocess.Popen[bytes]) -> None:
    """The rank's end is noted, its script runs on, and nobody takes that for a rank. A signal ends it at once."""
    until(lambda: ranks.ends)
    environ = Path(f"/proc/{process.pid}/environ")
    until(lambda: b"GPURUN_JOB=" in (found := environ.read_bytes()) and b"_RANK" not in found)
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    assert process.wait(LIMIT_S) == -signal.SIGTERM
    assert (process.stdout.read(), process.stderr.read()) == (b"", b"")


def end_after_a_notice(ranks, launcher: Launcher, code: int) -> subprocess.Popen[bytes]:
    process = start_by(ranks, launcher, "sh", "-c", f"echo up; read _; exit {code}", stdin=subprocess.PIPE)
    ranks.wait_for(b"up")
    (ranks.run / "stop.2").touch()
    process.stdin.write(b"\n")
    process.stdin.flush()
    return process


LAUNCHERS = pytest.mark.parametrize("launcher", [GLOO, MPI], ids=["gloo", "mpi"])


@LAUNCHERS
@pytest.mark.parametrize("code", [0, 3, 143])
def test_after_a_notice_the_launcher_does_not_learn_of_an_end(ranks, launcher, code):
    ranks.write(grace_s=600)
    assert_stays(ranks, end_after_a_notice(ranks, launcher, code))


@LAUNCHERS
@pytest.mark.parametrize("code", [0, 3, 143])
def test_when_the_grace_is_over_the_launcher_learns_of_an_end(ranks, launcher, code):
    ranks.write(grace_s=1)
    process = end_after_a_notice(ranks, launcher, code)
    assert process.wait(LIMIT_S) == code
    assert time.time() - (ranks.folder / f"end.{code}").stat().st_mtime >= 0.9
    assert (process.stdout.read(), process.stderr.read()) == (b"", b"")


def test_a_rank_that_starts_after_the_notice_does_not_end_the_others_either(ranks):
    ranks.write(grace_s=600)
    (ranks.run / "stop.2").touch()
    assert_stays(ranks, ranks.start("true"))


@LAUNCHERS
def test_a_failed_ranks_script_waits_for_the_notice(ranks, launcher):
    ranks.write(grace_s=600, notice_s=600)
    process = start_by(ranks, launcher, "sh", "-c", "exit 3")
    until(lambda: ranks.ends)
    (ranks.run / "stop.2").touch()
    assert_stays(ranks, process)


@LAUNCHERS
@pytest.mark.parametrize(("notice_s", "code"), [(1, 3), (600, 0), (0, 3)])
def test_without_a_notice_the_launcher_learns_of_a_success_at_once_and_of_a_failure_later(
    ranks, launcher, notice_s, code
):
    ranks.write(grace_s=600, notice_s=notice_s)
    process = start_by(ranks, launcher, "sh", "-c", f"exit {code}")
    assert process.wait(LIMIT_S) == code
    assert ranks.ends == [f"end.{code}"]


@LAUNCHERS
def test_a_launcher_that_is_ending_all_ranks_waits_for_none(ranks, launcher):
    ranks.write(grace_s=600, notice_s=600)
    process = start_by(ranks, launcher, "sh", "-c", TELLS)
    ranks.wait_for(b"up")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(LIMIT_S) == 7


@pytest.mark.parametrize("hostile", ["folder", "dangling link", "link to itself", "text"])
def test_whatever_a_program_makes_of_the_notice_the_script_leaves(ranks, hostile):
    ranks.write(grace_s=1, notice_s=1)
    stop = ranks.run / "stop.2"
    make = {"folder": "mkdir", "dangling link": "ln -s /no/such", "link to itself": f"ln -s {stop}", "text": "echo x >"}
    assert ranks.done("sh", "-c", f"{make[hostile]} {stop}; exit 9")[0] == 9
    assert ranks.ends == ["end.9"]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_rank_that_fails_leaves_what_the_kernel_counted_of_its_container(ranks, tmp_path, version):
    """The control group ends with the container, and so would the reason."""
    folder, counts = tmp_path / "cgroup", "oom 1\noom_kill 1\n"
    v1 = {"memory/memory.oom_control": counts, "memory/memory.limit_in_bytes": "7\n", "pids/pids.max": "max\n"}
    v2 = {"memory.events": counts, "memory.max": "7\n", "pids.max": "max\n"}
    for name, text in (v1 if version == "v1" else v2).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    ranks.script.write_text(ranks.script.read_text().replace("/sys/fs/cgroup", str(folder)))
    assert ranks.done("true") == (0, b"", b"")
    assert not (ranks.run / "cgroup.2").exists()
    assert ranks.done("sh", "-c", "kill -KILL $$") == (137, b"", b"")
    kept = {path.name: path.read_text() for path in (ranks.run / "cgroup.2").iterdir()}
    assert kept == {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert counted_in(str(ranks.run / "cgroup.2"), str(ranks.run / "cgroup.2")).kills == 1
