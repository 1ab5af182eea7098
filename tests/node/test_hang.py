"""Where ranks stand is read from files and sockets of their programs: nothing of it is run, and little is believed."""

from __future__ import annotations

import ast
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpurun.runtime
from gpurun.node.job import hang, parts, rank_processes
from gpurun.runtime import gpurun_runtime
from gpurun.supervisor.start import RUNTIME

JOB = f"j-3{os.getpid():07x}"
CALL = SimpleNamespace(wait=time.sleep)
PYTHON = Path(gpurun.runtime.__path__[0])
HERE = "def load():\n    time.sleep(600)\ndef wait():\n    time.sleep(600)\n"


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The folder of a job; its `run` folder is that of its ranks."""
    monkeypatch.setattr(parts, "job_folder", lambda job: str(tmp_path))
    monkeypatch.setattr(parts, "outputs_folder", lambda job: str(tmp_path / "outputs"))
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.fixture
def rank(job):
    """Starts a Python program as a rank, with what a rank's script gives it; waits until it says so."""
    started = []

    def start(program, number=0, **environ):
        name = f"{number}.{len(started) + 1}.7"
        (job / "run" / "ranks" / "1" / name).mkdir(parents=True)
        given = {"GPURUN_JOB": JOB, "GPURUN_ATTEMPT": "1", "GPURUN_RANK": str(number), "GPURUN_RUN": str(job / "run")}
        given |= {"GPURUN_RANK_ID": f"{JOB}/1/{name}", "PYTHONPATH": str(PYTHON), **environ}
        source = f"import os, signal, subprocess, sys, time\n{HERE}print('up', flush=True)\n{program}\n"
        (job / "train.py").write_text(source)
        argv = [sys.executable, str(job / "train.py")]
        made = subprocess.Popen(argv, env=os.environ | given, stdout=subprocess.PIPE, start_new_session=True)
        started.append(made)
        assert made.stdout.readline() == b"up\n"
        return made

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def settled(attempt=1):
    """The stacks when all programs have called what they wait in."""
    for _ in range(200):
        told = hang.stacks(CALL, JOB, attempt)
        if told and all(one["frames"] and one["frames"][0][2] in ("load", "wait") for one in told):
            break
        time.sleep(0.05)
    return told


def file_of(job, number=1, rank=0):
    return job / "run" / "ranks" / "1" / f"{rank}.{number}.7" / "stacks"


def test_the_container_has_the_same_numbers_and_names():
    given = {name: {} for name in ("SIGNAL", "STACKS", "RECORDER")}
    exec(compile("".join(RUNTIME["launch/python/sitecustomize.py"][0].split("\n_main()")[0]), "s", "exec"), given)
    assert (given["SIGNAL"], given["STACKS"]) == (hang.SIGNAL, hang.STACKS)
    assert given["RECORDER"] % "3" == hang.RECORDER % 3
    assert gpurun_runtime.__name__  # the package itself imports nothing of it
    assert "sitecustomize" not in vars(gpurun.runtime)


def test_where_ranks_stand(job, rank):
    rank("load()", 0)
    rank("wait()", 1)
    told = {one["rank"]: one for one in settled()}
    assert told[0]["frames"][0][1:] == [3, "load"] and told[1]["frames"][0][1:] == [5, "wait"]
    assert told[0]["frames"][1][2] == "<module>" and told[0]["state"] == "S" and told[0]["threads"] == 1
    assert hang.stacks(CALL, JOB, 2) == [], "another attempt"


def test_a_program_goes_on_after_it_was_asked(job, rank):
    made = rank("for _ in range(25): time.sleep(0.2)\nprint('done', flush=True)")
    for _ in range(5):
        assert hang.stacks(CALL, JOB, 1)[0]["frames"]
    assert made.stdout.readline() == b"done\n" and made.wait(10) == 0


def test_only_the_main_thread_is_printed(job, rank):
    """`faulthandler` reads the frames of other threads while they run: Python 3.6, 3.10, 3.12 and 3.13 then ended by
    SIGSEGV after 15 to 1100 signals, with three threads that call functions.
    """
    rank(
        "import threading\nthreading.Thread(target=wait, daemon=True).start()\nprint('all', flush=True)\nload()"
    ).stdout.readline()
    (told,) = settled()
    assert told["frames"][0][2] == "load" and told["threads"] == 1


def test_the_process_below_a_starter_counts_and_its_data_loaders_do_not(job, rank):
    """As `accelerate launch` does: the started ones have numbers of their own."""
    worker = "import os, time\nif os.fork() == 0: time.sleep(600)\nprint('up', flush=True)\ntime.sleep(600)\n"
    (job / "worker.py").write_text(worker)
    rank(
        f"for n in (4, 5): subprocess.Popen([sys.executable, {str(job / 'worker.py')!r}],"
        " env=os.environ | {'RANK': str(n)}, stdout=subprocess.PIPE).stdout.readline()\n"
        "print('all', flush=True)\nwait()"
    ).stdout.readline()
    told = hang.stacks(CALL, JOB, 1)
    assert sorted((one["rank"], one["inner"]) for one in told) == [(0, 4), (0, 5)]
    assert all(one["frames"][0][1] == 4 for one in told)


def test_the_program_below_a_python_that_only_runs_it_counts(job, rank):
    (job / "below.py").write_text("import time\ndef load():\n    time.sleep(600)\nprint('up', flush=True)\nload()\n")
    rank(f"subprocess.call([sys.executable, {str(job / 'below.py')!r}])").stdout.readline()
    (told,) = settled()
    assert told["frames"][0][0].endswith("below.py") and told["frames"][0][1:] == [3, "load"]


def test_children_of_a_rank_that_waits_for_them_count(job, rank):
    """As `torch.multiprocessing.spawn` does."""
    rank(
        "import multiprocessing\ncontext = multiprocessing.get_context('fork')\n"
        "child = context.Process(target=load)\nchild.start()\nprint('all', flush=True)\nchild.join()"
    ).stdout.readline()
    (told,) = settled()
    assert told["frames"][0][1:] == [3, "load"]


@pytest.mark.parametrize(
    "program",
    [
        "signal.signal(57, signal.SIG_DFL); load()",
        "signal.signal(57, signal.SIG_IGN); load()",
        "os.close(200); load()",
        "os.closerange(3, 300); [open('/dev/null') for _ in range(300)]; load()",
        "signal.signal(57, lambda *_: open('/dev/null')); os.close(200); load()",
        "os.execv('/bin/sleep', ['sleep', '600'])",
    ],
    ids=["default", "ignored", "closed", "reused", "own handler", "another program"],
)
def test_a_process_that_cannot_print_its_stacks_is_left_alone(job, rank, program):
    made = rank(program)
    time.sleep(0.3)
    assert hang.stacks(CALL, JOB, 1) == []
    time.sleep(0.2)
    assert made.poll() is None


def test_a_process_that_waits_for_signals_in_a_thread_gets_none(job, rank):
    made = rank(
        "import threading\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "threading.Thread(target=lambda: os._exit(signal.sigwait(signal.valid_signals()))).start()\n"
        "print('all', flush=True)\nload()"
    )
    made.stdout.readline()
    assert hang.stacks(CALL, JOB, 1) == []
    time.sleep(0.2)
    assert made.poll() is None


def test_a_stopped_process_prints_once_when_it_goes_on(job, rank, monkeypatch):
    """Real-time signals queue: a rank that was stopped for a weekend got thousands."""
    monkeypatch.setattr(hang, "PRINTED_S", 0.1)
    made = rank("load()")
    settled()
    before = file_of(job).read_text().count("most recent call first")
    os.kill(made.pid, signal.SIGSTOP)
    time.sleep(0.2)
    for _ in range(5):
        assert [one["frames"] for one in hang.stacks(CALL, JOB, 1)] == [[]]
    os.kill(made.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert file_of(job).read_text().count("most recent call first") == before + 1


def test_a_program_that_runs_is_asked_only_when_its_gang_ends(job, rank):
    """CPython may crash when it is interrupted there: a person who looks is not worth that."""
    rank("while True: pass", 0)
    rank("wait()", 1)
    for _ in range(100):
        told = {one["rank"]: one for one in hang.stacks(CALL, JOB, 1, gently=True)}
        if told[1]["frames"]:
            break
    assert told[1]["frames"][0][2] == "wait" and told[0]["frames"] == [] and told[0]["state"] == "R"
    assert file_of(job).read_bytes() == b""
    told = {one["rank"]: one for one in hang.stacks(CALL, JOB, 1)}
    assert told[0]["frames"] and told[1]["frames"]


def test_a_stopped_process_does_not_hold_up_the_others(job, rank):
    stopped = rank("load()", 0)
    rank("wait()", 1)
    settled()
    os.kill(stopped.pid, signal.SIGSTOP)
    began = time.monotonic()
    told = {one["rank"]: one for one in hang.stacks(CALL, JOB, 1)}
    assert time.monotonic() - began < hang.PRINTED_S + 2
    assert told[0]["frames"] == [] and told[0]["state"] == "T" and told[1]["frames"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "gone", "huge"])
def test_the_file_may_be_anything(job, rank, kind):
    rank("load()")
    path, secret = file_of(job), job / "secret"
    secret.write_text('Current thread 0x1 (most recent call first):\n  File "secret", line 1 in secret\n')
    if kind == "huge":
        with path.open("ab") as stream:
            stream.truncate(1 << 40)
        (told,) = settled()
        assert told["frames"][0][2] == "load"
        return
    path.unlink()
    {
        "link": lambda: path.symlink_to(secret), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir,
        "gone": lambda: None,
    }[kind]()  # fmt: skip
    assert hang.stacks(CALL, JOB, 1) == []


@pytest.mark.parametrize("mark", ["", "x", "j/1/../../secret", "j/1/0.1.7/../..", "j/../0.1.7", "j/1/0.1.7\n", "///"])
def test_a_name_that_no_script_made_is_no_file(job, rank, mark):
    rank("load()", GPURUN_RANK_ID=mark)
    assert hang.stacks(CALL, JOB, 1) == []


def test_what_stands_in_the_file_before_does_not_count(job, rank):
    rank("load()")
    with file_of(job).open("a") as stream:
        stream.write('Current thread 0x1 (most recent call first):\n  File "made up", line 1 in it\n')
    (told,) = settled()
    assert told["frames"][0][2] == "load"


def test_frames_are_few_and_short():
    frame = '  File "{}", line {} in {}\n'
    text = "Current thread 0x1 (most recent call first):\n" + frame.format("a" * 5000, 7, "f" * 5000)
    text += "".join(frame.format("x", 99_999_999_999, "f") + frame.format("y", 5, "g") for _ in range(1000))
    frames, threads = hang.read_stacks(text + "Thread 0x2 [x] (most recent call first):\n" + frame.format("z", 1, "h"))
    assert threads == 2 and len(frames) == hang.MOST_FRAMES
    assert frames[0] == ["a" * hang.MOST_TEXT, 7, "f" * hang.MOST_TEXT] and frames[1] == ["y", 5, "g"]


@given(st.text(alphabet='Currenthad 0x1[](most recent call first):\n"File,line in<>', max_size=400))
def test_any_text_is_read(text):
    frames, threads = hang.read_stacks(text)
    assert threads >= 0 and all(len(frame) == 3 for frame in frames)


# A program starts as it always did.


def python(job, *argv, **environ):
    folder = job / "run" / "ranks" / "1" / "0.1.7"
    folder.mkdir(parents=True, exist_ok=True)
    given = {"GPURUN_RUN": str(job / "run"), "GPURUN_RANK_ID": f"{JOB}/1/0.1.7", "PYTHONPATH": str(PYTHON), **environ}
    return subprocess.run(
        [sys.executable, *argv], env=os.environ | given, capture_output=True, text=True, check=False, timeout=60
    )


def test_another_sitecustomize_is_imported_as_well(job):
    (job / "site").mkdir()
    (job / "site" / "sitecustomize.py").write_text("import sys\nprint('mine', __name__)\nsys.path.append('/added')\n")
    show = "import sys, sitecustomize; print('/added' in sys.path, sitecustomize.__file__, sys.path.count(sys.argv[1]))"
    done = python(job, "-c", show, str(PYTHON), PYTHONPATH=f"{PYTHON}{os.pathsep}{job / 'site'}")
    assert done.stdout.split() == ["mine", "sitecustomize", "True", f"{job}/site/sitecustomize.py", "1"], done.stderr
    (job / "site" / "sitecustomize.py").write_text("raise ValueError('broken')")
    done = python(job, "-c", "print('up')", PYTHONPATH=f"{PYTHON}{os.pathsep}{job / 'site'}")
    assert done.stdout == "up\n" and "broken" in done.stderr, "as Python itself says it"


@pytest.mark.parametrize(
    "environ",
    [
        {"GPURUN_RUN": "/nowhere"}, {"GPURUN_RANK_ID": "nonsense"}, {"GPURUN_RANK_ID": ""}, {"GPURUN_RUN": ""},
        {"GPURUN_RUN": "/proc"}, {"GPURUN_RANK_ID": "a/b/c"},
    ],
    ids=repr,
)  # fmt: skip
def test_a_program_starts_whatever_is_wrong(job, environ):
    done = python(job, "-c", "print('up')", **environ)
    assert (done.stdout, done.stderr, done.returncode) == ("up\n", "", 0)


def test_a_process_with_few_descriptors_starts(job):
    again = f"os.execv({sys.executable!r}, ['python', '-c', 'print(1)'])"
    limited = f"import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); {again}"
    done = python(job, "-c", limited)
    assert (done.stdout, done.stderr) == ("1\n", "")


OLD = ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE"]
NEW = ["TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"]


@pytest.mark.parametrize(
    ("version", "given", "names"),
    [
        ("2.7.1+cu126", {}, OLD),
        ("2.13.0a0+git1", {}, NEW),
        ("2.13.0", {"TORCH_FR_BUFFER_SIZE": "7"}, ["TORCH_FR_BUFFER_SIZE"]),
        ("2.13.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, ["TORCH_NCCL_TRACE_BUFFER_SIZE"]),
        ("main", {}, []), ("", {}, []), (None, {}, []),
    ],
)  # fmt: skip
def test_the_flight_recorder_is_on_under_the_names_that_this_pytorch_knows(job, version, given, names):
    if version is not None:
        (job / "torch").mkdir()
        (job / "torch" / "version.py").write_text(
            f"from typing import Optional\n\n__version__ = '{version}'\ndebug = False\n"
        )
    show = "import os; print(*sorted(name for name in os.environ if name.startswith('TORCH_')))"
    done = python(job, "-c", show, PYTHONPATH=f"{PYTHON}{os.pathsep}{job}", **given)
    assert (done.stdout.split(), done.stderr) == (names, "")
    assert (job / "run" / "recorder.1").is_dir() == (len(names) == 3)


@pytest.mark.parametrize("inherited", [False, True])
def test_pytorch_is_given_no_folder_that_it_cannot_use(job, inherited):
    """It ends the program if it can make no pipe. A program may drop its rights after its first Python has started."""
    (job / "torch").mkdir()
    (job / "torch" / "version.py").write_text("__version__ = '2.13.0'\n")
    given = {"GPURUN_RUN": "/proc"}
    if inherited:
        given |= dict.fromkeys(NEW, "200") | {"TORCH_FR_DUMP_PIPE_FILE": "/proc/recorder.1/pipe_"}
    show = "import os; print(*sorted(name for name in os.environ if name.startswith('TORCH_')))"
    done = python(job, "-c", show, PYTHONPATH=f"{PYTHON}{os.pathsep}{job}", **given)
    assert (done.stdout.split(), done.stderr) == ([], "")


def test_warnings_as_errors_find_nothing(job):
    (job / "torch").mkdir()
    (job / "torch" / "version.py").write_text("__version__ = '2.13.0'\n")
    given = {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONDEVMODE": "1", "PYTHONPATH": f"{PYTHON}{os.pathsep}{job}"}
    assert python(job, "-c", "print('up')", **given).stderr == ""


def test_a_python_that_has_no_such_modules_starts(job):
    """Python 2 for example, whose syntax this is as well: it would say that the import failed, at each start."""
    (job / "fcntl.py").write_text("raise ImportError")
    (job / "faulthandler.py").write_text("raise ImportError")
    done = python(job, "-c", "print('up')", PYTHONPATH=f"{job}{os.pathsep}{PYTHON}")
    assert (done.stdout, done.stderr) == ("up\n", "")
    tree = ast.parse(Path(PYTHON, "sitecustomize.py").read_text(), feature_version=(3, 4))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert functions and not any(node.returns or any(arg.annotation for arg in node.args.args) for node in functions)


# The flight recorder.


def entry(number, state, name="nccl:all_reduce", **more):
    frames = [{"name": "train", "filename": "/w/train.py", "line": 57}]
    made = {"collective_seq_id": number, "state": state, "profiling_name": name, "frames": frames, "is_p2p": False}
    return (
        made | {"process_group": ["0", "default_pg"], "input_sizes": [[10]], "duration_ms": 1.5, "retired": None} | more
    )


DUMP = {
    "version": "2.10",
    "entries": [entry(20, "completed"), entry(21, "scheduled")],
    "pg_config": {"0": {"ranks": "[]"}},
}


@pytest.fixture
def recorded(job):
    """Stands for PyTorch: answers at a rank's pipe with a file."""
    folder = job / "run" / "recorder.1"
    folder.mkdir()
    threads = []

    def start(number, data):
        os.mkfifo(folder / f"pipe_{number}.pipe")
        reader = os.open(folder / f"pipe_{number}.pipe", os.O_RDONLY | os.O_NONBLOCK)

        def answer():
            for _ in range(200):
                try:
                    if os.read(reader, 10):
                        path = folder / f"dump_{number}"
                        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # never through a link
                        path.write_bytes(data)
                        break
                except BlockingIOError:
                    pass
                except FileExistsError:
                    break
                time.sleep(0.02)
            os.close(reader)

        threads.append(threading.Thread(target=answer))
        threads[-1].start()

    start.folder = folder
    yield start
    for thread in threads:
        thread.join()


def test_the_last_collective_of_each_rank(recorded):
    recorded(0, pickle.dumps(DUMP, 2))
    recorded(1, pickle.dumps({**DUMP, "entries": DUMP["entries"][:1]}, 2))
    one, two = hang.recorder(CALL, JOB, 1)
    assert one["groups"] == [
        {"group": "default_pg", "entered": 21, "done": 20, "name": "nccl:all_reduce", "state": "scheduled",
         "frames": [["/w/train.py", 57, "train"]]},
    ]  # fmt: skip
    assert (two["rank"], two["groups"][0]["entered"], two["groups"][0]["done"], two["problem"]) == (1, 20, 20, "")


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (["0", "default_pg"], "default_pg"), (["7", "default_pg"], "default_pg"), (["3", "undefined"], "3"),
        (["3", ""], "3"), (["3"], "3"), ([], ""), ([3, None], ""),
        (["3", "DATA_PARALLEL_GROUP"], "DATA_PARALLEL_GROUP 3"),
        (["4", "DATA_PARALLEL_GROUP"], "DATA_PARALLEL_GROUP 4"),
    ],
)  # fmt: skip
def test_groups_of_the_same_kind_are_several(told, name):
    """Megatron-LM describes the groups of all pipeline stages alike; their counts differ while all is well."""
    (found,) = hang.last_collectives({"entries": [entry(7, "x", process_group=told)]})
    assert found["group"] == name


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/gpurun-was-here",)


def test_no_file_runs_code_or_fills_memory(recorded, monkeypatch):
    monkeypatch.setattr(hang, "DUMPED_S", 1.5)
    recorded(0, pickle.dumps({"entries": [Evil()]}))
    recorded(1, b"\x80\x02r\xff\xff\xff\x7f.")
    recorded(2, b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.")
    recorded(3, b"")
    recorded(4, b"\0" * (hang.MOST_DUMP_BYTES + 1))
    problems = {one["rank"]: one["problem"] for one in hang.recorder(CALL, JOB, 1)}
    assert "no plain value: it has the opcode" in problems[0] and problems[4] == "it has more than 16 MiB"
    assert problems[1] == problems.get(3, hang.CUT) == hang.CUT and problems[2].endswith("BINBYTES8")
    assert not Path("/tmp/gpurun-was-here").exists()


def test_many_files_that_take_long_to_read_have_a_deadline(recorded, monkeypatch):
    monkeypatch.setattr(hang, "DUMPED_S", 1.0)
    monkeypatch.setattr(hang, "_dump", lambda path: time.sleep(0.5) or {"groups": [], "problem": "x"})
    for number in range(30):
        recorded(number, b"x")
    began = time.monotonic()
    assert hang.recorder(CALL, JOB, 1)
    assert time.monotonic() - began < 3


def test_pipes_and_files_may_be_anything(recorded, monkeypatch):
    monkeypatch.setattr(hang, "DUMPED_S", 0.5)
    folder = recorded.folder
    os.mkfifo(folder / "pipe_0.pipe")  # nobody reads
    (folder / "pipe_1.pipe").write_text("a file")
    (folder / "pipe_2.pipe").symlink_to(folder / "pipe_0.pipe")
    (folder / "pipe_x.pipe").write_text("")
    recorded(3, b"late")
    (secret := folder / "secret").write_bytes(pickle.dumps(DUMP, 2))
    (folder / "dump_3").symlink_to(secret)
    assert hang.recorder(CALL, JOB, 1) == []
    assert (folder / "pipe_1.pipe").read_text() == "a file"


KEYS = st.text() | st.integers(1 - hang.MOST_KEY, hang.MOST_KEY - 1)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner),
    max_leaves=30,
)


@given(PLAIN, st.integers(min_value=2, max_value=5))
def test_plain_pickles_are_read_as_python_reads_them(value, protocol):
    def listed(each):
        if isinstance(each, (list, tuple)):
            return [listed(inner) for inner in each]
        return {key: listed(inner) for key, inner in each.items()} if isinstance(each, dict) else each

    assert hang.read_pickle(pickle.dumps(value, protocol)) == listed(value)


@given(st.integers(), st.integers(min_value=0, max_value=40))
def test_damaged_pickles_are_refused(seed, changes):
    rng = random.Random(seed)
    data = bytearray(pickle.dumps(DUMP, rng.choice([2, 4])))
    for _ in range(changes):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        found = hang.read_pickle(bytes(data[: rng.randrange(len(data) + 1)]))
    except hang.PickleRefused:
        return
    hang.last_collectives(found)


@pytest.mark.parametrize("key", [1 << 61, -(1 << 60), 1.5, None, True], ids=repr)
def test_keys_that_may_have_equal_hashes_are_refused(key):
    with pytest.raises(hang.PickleRefused, match="neither a text nor a number"):
        hang.read_pickle(pickle.dumps({"a": 1, key: 2}, 2))


def test_thousands_of_keys_with_equal_hashes_take_no_time():
    """Before, 20 000 took 5 s, and time grew with their square."""
    began = time.monotonic()
    with pytest.raises(hang.PickleRefused):
        hang.read_pickle(pickle.dumps({number * ((1 << 61) - 1): 0 for number in range(1, 3000)}, 2))
    assert time.monotonic() - began < 1


def test_the_argument_of_a_refused_opcode_is_not_read(monkeypatch):
    """Python before 3.10.7 needs time that grows with the square of a decimal number's length."""
    monkeypatch.setattr(hang._OPCODES["I"].arg, "reader", lambda stream: pytest.fail("it was read"))
    with pytest.raises(hang.PickleRefused, match="the opcode INT"):
        hang.read_pickle(b"I" + b"9" * 100_000 + b"\n.")


def test_a_pickle_with_too_many_items_is_refused(monkeypatch):
    monkeypatch.setattr(hang, "MOST_ITEMS", 100)
    with pytest.raises(hang.PickleRefused, match="more than 100 items"):
        hang.read_pickle(pickle.dumps(list(range(1000)), 2))


ODD = [
    None, 7, [], {"entries": 7}, {"entries": [7, {}, {"collective_seq_id": -1}]},
    {"entries": [entry("7", "x"), entry(7, None), entry(7, "x", is_p2p=True)]},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_dumps_have_no_collectives(odd):
    assert hang.last_collectives(odd) == []


def test_odd_names_are_cut_and_groups_are_few():
    odd = entry(7, "s" * 1000, "n" * 1000, process_group=7, frames=[{"filename": 1}, 7, {"filename": "f", "line": -1}])
    (found,) = hang.last_collectives({"entries": [odd]})
    assert (
        found["group"] == "" and len(found["name"]) == len(found["state"]) == hang.MOST_TEXT and found["frames"] == []
    )
    many = [entry(7, "x", process_group=[str(n), "undefined"]) for n in range(1000)]
    assert len(hang.last_collectives({"entries": many})) == hang.MOST_GROUPS


# NCCL RAS.


@pytest.fixture
def listener():
    """A process of a rank that answers as NCCL, or as nothing that NCCL ever said."""
    made = socket.create_server(("127.0.0.1", 0))

    def start(answer):
        def serve():
            connection, _ = made.accept()
            with connection, suppress(OSError):
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        return made.getsockname()[1]

    yield start
    made.close()


def mine(monkeypatch):
    """This process counts as a rank."""
    me = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
    monkeypatch.setattr(rank_processes, "of_job", lambda job, attempt: [me])


def test_what_nccl_says(listener, monkeypatch):
    mine(monkeypatch)
    asked = []

    def answer(connection):
        asked.append(connection.recv(1000))
        connection.sendall(b"SERVER PROTOCOL 2\nOK\n#0-0 MISMATCH\n  Rank 1 has launched up to operation 20\n")

    assert "operation 20" in hang.ras(JOB, 1, listener(answer))
    assert asked == [b"CLIENT PROTOCOL 2\nTIMEOUT 2\nVERBOSE STATUS\n"]


@pytest.mark.parametrize("kind", ["silent", "endless", "slow", "binary"])
def test_what_answers_there_may_be_anything(listener, monkeypatch, kind):
    mine(monkeypatch)
    monkeypatch.setattr(hang, "RAS_S", 0.5)

    def answer(connection):
        if kind == "binary":
            connection.sendall(bytes(range(256)))
        while kind in ("endless", "slow"):
            connection.sendall(b"x" * (1 if kind == "slow" else 1 << 16))
            time.sleep(0.05 if kind == "slow" else 0)
        connection.recv(1000)
        connection.recv(1000)

    began = time.monotonic()
    text = hang.ras(JOB, 1, listener(answer))
    assert time.monotonic() - began < 3 and len(text) <= hang.MOST_RAS_BYTES


def test_the_process_of_another_job_is_not_asked(listener, monkeypatch):
    monkeypatch.setattr(rank_processes, "of_job", lambda job, attempt: [])
    assert hang.ras(JOB, 1, listener(lambda connection: connection.sendall(b"lies"))) == ""
    mine(monkeypatch)
    assert hang.ras(JOB, 1, 1) == "", "nobody listens"


# Outputs.


def test_when_outputs_were_written(job):
    assert hang.written(CALL, JOB) == {"age_s": None}
    (job / "outputs" / "deep").mkdir(parents=True)
    (job / "outputs" / "deep" / "w").write_text("x")
    os.utime(job / "outputs" / "deep" / "w", (1, time.time() - 100))
    (job / "outputs" / "link").symlink_to("/proc/self/status")
    for folder in (job / "outputs" / "deep", job / "outputs"):
        os.utime(folder, (1, time.time() - 200))
    assert 99 < hang.written(CALL, JOB)["age_s"] < 110
    os.utime(job / "outputs" / "deep" / "w", (1, time.time() + 1000))
    assert hang.written(CALL, JOB) == {"age_s": 0.0}


def test_a_new_file_shows_among_more_than_are_looked_at(job, monkeypatch):
    """A program that only writes files, such as a generator of pictures, counted as hung after the 20 000th file."""
    monkeypatch.setattr(hang, "MOST_FILES", 3)
    (job / "outputs").mkdir()
    for number in range(9):
        (job / "outputs" / str(number)).write_text("x")
        os.utime(job / "outputs" / str(number), (1, time.time() - 500))
    os.utime(job / "outputs", (1, time.time() - 500))
    assert hang.written(CALL, JOB)["age_s"] > 400
    (job / "outputs" / "new").write_text("x")
    with os.scandir(job / "outputs") as entries:
        seen = {entry.name for _, entry in zip(range(3), entries, strict=False)}
    os.utime(job / "outputs" / "new", (1, time.time() - 500 * ("new" in seen)))
    assert hang.written(CALL, JOB)["age_s"] < 60


def test_a_walk_that_waits_for_a_broken_disk_is_alone_and_one_of_a_slow_disk_ends(job, monkeypatch):
    (job / "outputs").mkdir()
    for number in range(50):
        (job / "outputs" / str(number)).write_text("x")
    begun, goes_on = threading.Event(), threading.Event()
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (begun.set(), goes_on.wait(10), scan(path))[2])
    first = threading.Thread(target=lambda: hang.written(CALL, JOB))
    first.start()
    assert begun.wait(10) and hang.written(CALL, JOB) == {"age_s": None}
    goes_on.set()
    first.join()
    assert hang.written(CALL, JOB)["age_s"] < 60
    monkeypatch.setattr(hang, "MOST_WALK_S", 0.0)
    assert len(list(hang._times(str(job / "outputs")))) <= 1
