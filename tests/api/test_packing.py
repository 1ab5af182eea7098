"""A function travels to a process that has neither gpurun nor its module, and its value or traceback comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest

from gpurun.api.asking import pack
from gpurun.errors import BadInput
from gpurun.runtime.gpurun_call import RESULTS, decoded

LIMIT_S = 30
RUNTIME = """
class Gang:
    rank, size = 3, 4
def gang(): return Gang
def outputs(): return {outputs!r}
"""


def test_what_keeps_a_function_from_travelling_is_named(tmp_path):
    guard, table = threading.Lock(), {"a": threading.Lock()}

    def train(x):
        with guard:
            return x

    with pytest.raises(BadInput, match=r"cannot send .*train to hosts: the function.s variable guard.*lock") as caught:
        pack(tmp_path, train, (1,), {}, None)
    assert "inside the function" in caught.value.hint
    with pytest.raises(BadInput, match=r"argument x: .*lock"):
        pack(tmp_path, len, (), {"x": table}, None)
    with pytest.raises(BadInput, match="argument 1: no pickle"):
        pack(tmp_path, len, (0, Odd()), {}, None)


class Odd:
    def __reduce__(self):
        raise RuntimeError("no pickle")


@pytest.mark.parametrize("name", ["call.json", "call.pickle", "gpurun_call.py", "cloudpickle"])
def test_no_file_of_the_workdir_is_replaced_or_written_through(tmp_path, name):
    mine, workdir = tmp_path / "mine", tmp_path / "code"
    workdir.mkdir()
    mine.write_text("mine")
    (workdir / name).symlink_to(mine)
    (tmp_path / "call").mkdir()
    with pytest.raises(BadInput, match=name):
        pack(tmp_path / "call", len, ("x",), {}, workdir)
    assert mine.read_text() == "mine"


def test_a_workdir_that_cannot_be_copied_is_an_error_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    os.mkfifo(tmp_path / "code" / "pipe")
    with pytest.raises(BadInput, match=r"(?s)cannot store the function.*pipe"):
        pack(tmp_path, len, ("x",), {}, tmp_path / "code")
    with pytest.raises(BadInput, match="cannot store the function and its arguments: No such file"):
        pack(tmp_path / "none", len, ("x",), {}, None)


def test_two_threads_pack_at_once(tmp_path, monkeypatch):
    """cloudpickle's list of modules to travel by value is one for all threads."""
    (tmp_path / "alongside.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import alongside

    first_packs, second_packs = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, here, there, wait_s):
            self.parts = here, there, wait_s

        def __reduce__(self):
            here, there, wait_s = self.parts
            here.set()
            there(wait_s)
            return (int, ())

    for name in "ab":
        (tmp_path / name).mkdir()
    one = Slow(first_packs, second_packs.wait, 0.2)
    thread = threading.Thread(target=pack, args=(tmp_path / "a", print, (one, alongside.twice), {}, None))
    thread.start()
    assert first_packs.wait(LIMIT_S)
    pack(tmp_path / "b", print, (Slow(second_packs, thread.join, LIMIT_S), alongside.twice), {}, None)
    thread.join(LIMIT_S)
    for name in "ab":
        assert b"_make_function" in (tmp_path / name / "call.pickle").read_bytes(), "by value"
    del sys.modules["alongside"]


@pytest.fixture
def run(tmp_path):
    """Pack a call and run it as an image would: another process, an empty environment; what it has left."""

    def run(function, *args, workdir=None, change=None, **kwargs):
        folder, outputs = tmp_path / "call", tmp_path / "outputs"
        for each in (folder, outputs, tmp_path / "runtime"):
            each.mkdir(exist_ok=True)
        (tmp_path / "runtime" / "gpurun_runtime.py").write_text(RUNTIME.format(outputs=str(outputs)))
        shutil.rmtree(folder)
        folder.mkdir()
        pack(folder, function, args, kwargs, workdir)
        if change:
            change(folder)
        program = "import sys; sys.path[:0] = sys.argv[1:]; import gpurun_call; sys.exit(gpurun_call.main())"
        argv = [sys.executable, "-I", "-c", program, str(folder), str(tmp_path / "runtime")]
        done = subprocess.run(argv, env={}, capture_output=True, text=True, cwd="/", check=False)
        file = outputs / RESULTS / "3.json"
        return done.returncode, json.loads(file.read_text()) if file.exists() else None, done.stderr

    return run


def test_closures_classes_and_modules_beside_the_script_travel(run, tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("FACTOR = 3\nclass Net:\n    def grow(self, x):\n        return x * FACTOR\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside

    bias = {"b": 0.5}

    def train(x, *, scale=1):
        return {"loss": (beside.Net().grow(x) + bias["b"]) * scale, "where": (1, "ü")}

    code, told, err = run(train, 2, scale=10)
    assert code == 0, err
    assert decoded(told["value"]) == {"loss": 65.0, "where": (1, "ü")}
    del sys.modules["beside"]


def test_an_exception_comes_back_as_text_and_fails_the_rank(run):
    def train():
        raise ValueError("not \x1b[31mgood")

    code, told, err = run(train)
    assert code == 1 and "ValueError" in err
    assert told["error"]["kind"] == "ValueError" and "in train" in told["error"]["trace"]


def test_what_cannot_come_back_is_named_there(run):
    code, told, _ = run(lambda: {"model": [object()]})
    assert code == 1
    assert (
        told["error"]["kind"] == "NotPlain" and "the result['model'][0] is a builtins.object" in told["error"]["text"]
    )


class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("never")


@pytest.mark.parametrize("kind", [Unsayable, Unpicklable])
def test_an_exception_without_a_text_or_a_pickle_is_told_all_the_same(run, kind):
    def train():
        raise kind("x")

    code, told, _ = run(train)
    assert code == 1 and told["error"]["kind"] == kind.__name__ and "in train" in told["error"]["trace"]


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("function", "said"),
    [(lambda: 10**5000, "Exceeds the limit"), (deep, "recursion"), (lambda: "x" * 600_000, "larger than 0 MiB"),
     (lambda: b"x" * 600_000, "larger than 0 MiB")],
    ids=["digits", "deep", "text", "bytes"],
)  # fmt: skip
def test_a_result_that_cannot_be_written_is_told_and_leaves_no_half_file(run, tmp_path, function, said):
    def change(folder):
        program = folder / "gpurun_call.py"
        program.write_text(program.read_text().replace("MOST_BYTES = 256 << 20", "MOST_BYTES = 1 << 19"))

    code, told, err = run(function, change=change)
    assert code == 1 and told is not None, err
    assert said in told["error"]["text"]
    assert [path.name for path in (tmp_path / "outputs" / RESULTS).iterdir()] == ["3.json"]


def test_leaving_with_a_code_is_the_code_and_leaves_no_result(run):
    assert run(lambda: sys.exit(7))[:2] == (7, None)
    assert run(lambda: sys.exit(0))[:2] == (0, {"value": None})


def test_an_image_with_another_python_is_told(run):
    def other(folder):
        (folder / "call.json").write_text('{"python": "3.7"}')

    code, told, err = run(lambda: 1, change=other)
    assert code == 1 and "Python 3.7" in err
    assert told["error"]["kind"] == "PythonMismatch"


def test_the_workdir_is_there_too(run, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("ANSWER = 42")

    def train():
        import mine

        return mine.ANSWER

    assert run(train, workdir=tmp_path / "code")[1] == {"value": 42}


def test_what_cannot_be_pickled_or_is_too_large_is_said_before_anything_runs(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"cannot send lock.acquire to hosts: .*lock"):
        pack(tmp_path, threading.Lock().acquire, (), {}, None)
    monkeypatch.setattr("gpurun.api.asking.MOST_BYTES", 1000)
    with pytest.raises(BadInput, match="MiB, more than"):
        pack(tmp_path, len, (b"x" * 2000,), {}, None)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(BadInput) as caught:
        pack(tmp_path, len, (), {}, None)
    assert "gpurun[python]" in caught.value.hint


def test_importing_gpurun_loads_nothing_of_it():
    """Every command imports this package."""
    program = textwrap.dedent("""
        import sys, gpurun
        assert not [name for name in sys.modules if name.startswith("gpurun.")], sys.modules
        gpurun.submit, gpurun.map, gpurun.job, gpurun.Job, gpurun.RemoteError
        try:
            gpurun.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
    """)
    subprocess.run([sys.executable, "-c", program], check=True)
