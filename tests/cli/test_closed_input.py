"""Commands whose standard streams are closed or full, as service managers, `<&-`, `>&-` and `| head` leave them."""

import errno
import os
import sys
from pathlib import Path

import pytest

from gpurun.cli.printing import disk_problem

PRINTS = ["--help", "version", "status", "status --json", "inventory list"]


@pytest.fixture(autouse=True)
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def inventory(tmp_path):
    text = "version: 1\ndefaults: {generation: pascal, gpus: 1}\nracks: {r1: {hosts: {h1: {}}}}\n"
    (tmp_path / "inventory.yaml").write_text(f"{text}fabrics: {{tcp: {{kind: tcp, interface: lo}}}}\n")


@pytest.mark.parametrize(("words", "said"), [("init", "the command names no hosts"), ("top", "needs a terminal")])
def test_a_closed_input_is_as_none_that_answers(gpurun, monkeypatch, words, said):
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of it
    code, out, err = gpurun(words)
    assert (code, out, said in err) == (2, "", True)


@pytest.mark.parametrize("words", PRINTS)
@pytest.mark.parametrize("buffering", [1, 1 << 16], ids=["line by line", "at the end"])
def test_output_on_a_full_disk_is_one_message(gpurun, inventory, monkeypatch, words, buffering):
    with Path("/dev/full").open("w", buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = gpurun(*words.split())
        assert (code, err) == (5, "gpurun: cannot write to stdout: No space left on device\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is left in the buffer goes there


@pytest.mark.parametrize("words", PRINTS)
def test_who_reads_no_further_sees_no_message(gpurun, inventory, monkeypatch, words):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        code, _, err = gpurun(*words.split())
        assert (code, err) == (1, "")
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())


@pytest.mark.parametrize("words", PRINTS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_changes_no_exit_code(gpurun, inventory, monkeypatch, words, stream):
    monkeypatch.setattr(sys, stream, None)
    assert gpurun(*words.split())[0] == 0
    monkeypatch.setattr(sys, stream, None)
    assert gpurun("status", "nobody")[0] == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_full_or_broken_disk_elsewhere_is_not_blamed_on_stdout(gpurun, monkeypatch, number):
    """Such as that of the caches, or of temporary files."""

    def fails(_):
        raise OSError(number, os.strerror(number), *named)

    monkeypatch.setattr("gpurun.state.paths.home", fails)
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        for named in (("/caches/x",), ()):
            code, _, err = gpurun("status")
            assert (code, "stdout" in err, os.strerror(number) in err, "df -h" in err) == (5, False, True, True), err
            assert ("/caches/x" in err) == bool(named)
    os.close(reads)


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EIO", "EUCLEAN", "ESTALE", "ETIMEDOUT", "ENOTCONN"])
def test_a_disk_or_its_server_that_fails_is_an_error_for_people(name):
    """A raw error names the file, such as that of a cache on a home of NFS."""
    number = getattr(errno, name)
    problem = disk_problem(OSError(number, os.strerror(number), "/nfs/home/.cache/gpurun/x"))
    assert str(problem) == f"/nfs/home/.cache/gpurun/x: the file cannot be read or written: {os.strerror(number)}"


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_a_machine_without_threads_or_memory_is_one_message(gpurun, monkeypatch, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("gpurun.cli.main.app", fails)
    code, _, err = gpurun("status")
    assert (code, "this machine has too little of a resource" in err, "ulimit -a" in err) == (5, True, True)


@pytest.mark.parametrize("name", ["ECONNREFUSED", "ETIMEDOUT"])
def test_a_connection_that_fails_is_no_disk(name):
    assert disk_problem(OSError(getattr(errno, name), "a connection")) is None


@pytest.mark.parametrize("name", ["EIO", "ESTALE", "EDQUOT"])
def test_output_to_a_file_whose_server_is_away_is_one_message(gpurun, tmp_path, monkeypatch, name):
    file = (tmp_path / "out").open("w", encoding="utf-8")

    class Away:
        def fileno(self):
            return file.fileno()

        def flush(self):
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))

        def write(self, text):
            return len(text)

        def isatty(self):
            return False

    monkeypatch.setattr(sys, "stdout", Away())
    code, _, err = gpurun("version")
    assert (code, err) == (5, f"gpurun: cannot write to stdout: {os.strerror(getattr(errno, name))}\n")
