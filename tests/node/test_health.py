"""What the watch on a host picks out of the kernel's log, and how it tells news from what was told."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest
from waiting import until

from gpurun.node.agent.frames import Call
from gpurun.node.job import watch as health
from gpurun.node.job.watch import ContainerWatch
from gpurun.node.probe import facts

XID = "NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus."


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "kmsg"
    path.touch()
    return path


def say(path, line, *, level=4, age_s=0.0):
    with path.open("a") as stream:
        stream.write(f"{level},7,{int((time.monotonic() - age_s) * 1e6)},-;{line}\n SUBSYSTEM=pci\n")


def lines(kernel_log):
    return [item["line"] for item in kernel_log.lines()]


def test_lines_are_told_once_with_their_age(log):
    began = time.monotonic()
    say(log, XID, age_s=5)
    kernel_log = health.KernelLog(60, str(log))
    (item,) = kernel_log.lines()
    assert item["line"] == XID
    assert 4.9 < item["age_s"] < 5.1 + time.monotonic() - began
    assert lines(kernel_log) == []
    say(log, "oom-kill:constraint=CONSTRAINT_NONE")
    assert lines(kernel_log) == ["oom-kill:constraint=CONSTRAINT_NONE"]


def test_what_is_older_than_the_attempt_is_not_its_own(log):
    say(log, XID, age_s=100)
    assert lines(health.KernelLog(60, str(log))) == []


def test_only_the_kernel_is_believed(log):
    say(log, XID, level=(1 << 3) | 4)  # facility 1: a program wrote to /dev/kmsg
    log.open("a").write(f"{XID}\n;{XID}\nx,y,z;{XID}\n4,1;{XID}\n\0\xff\n")
    say(log, f"audit: {XID}")
    assert lines(health.KernelLog(60, str(log))) == []


def test_half_a_line_waits_for_its_rest(log):
    kernel_log = health.KernelLog(60, str(log))
    say(log, XID)
    whole = log.read_bytes()
    log.write_bytes(whole[:30])
    assert lines(kernel_log) == []
    with log.open("ab") as stream:
        stream.write(whole[30:])
    assert lines(kernel_log) == [XID]


def test_a_storm_is_cut_short(log):
    for _ in range(1000):
        say(log, XID + "x" * 5000)
    found = lines(health.KernelLog(60, str(log)))
    assert len(found) == health.MOST_LINES
    assert max(map(len, found)) == health.LONGEST


def test_a_log_that_may_not_be_read_has_no_lines(tmp_path):
    assert lines(health.KernelLog(60, str(tmp_path / "none"))) == []


@pytest.mark.timeout(60)
def test_a_log_that_cannot_be_read_ends_the_look_and_overwritten_records_do_not(log, monkeypatch):
    kernel_log, read, errors = health.KernelLog(60, str(log)), os.read, [errno.EPIPE, errno.EIO, errno.EINVAL]
    say(log, XID)

    def failing(descriptor, length):
        if errors:
            raise OSError(errors.pop(0), "no")
        return read(descriptor, length)

    monkeypatch.setattr(health.os, "read", failing)
    assert lines(kernel_log) == [] and errors == [errno.EINVAL]
    assert lines(kernel_log) == [] and errors == []
    assert lines(kernel_log) == [XID]


def test_gpu_news_are_told_once():
    seen = health._Seen({}, ContainerWatch("j-00000001"))

    def gpu(**facts):
        return {"gpus": [{"index": 3, "lost": "", "ecc": 0, "xids": [], **facts}]}

    assert seen.gpus(gpu()) == []
    assert seen.gpus(gpu(ecc=2)) == [{"kind": "ecc", "gpu": 3, "count": 2, "before": 0}]
    assert seen.gpus(gpu(ecc=2)) == []
    assert seen.gpus(gpu(ecc=None, lost="GPU is lost")) == [{"kind": "lost", "gpu": 3, "text": "GPU is lost"}]
    assert seen.gpus(gpu(ecc=None, lost="GPU is lost")) == []
    assert seen.gpus(gpu(ecc=2, xids=[31, 43])) == [{"kind": "xid", "gpu": 3, "xid": number} for number in (31, 43)]
    assert seen.gpus({"missing": "no driver"}) == []


def test_ranks_are_known_by_their_environment():
    environ = {**os.environ, "GPURUN_JOB": "j-00000001", "HOROVOD_RANK": "5"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environ, stdin=subprocess.PIPE) as process:
        until(lambda: process.pid in health.ranks("j-00000001"))
        assert health.ranks("j-00000001") == {process.pid: 5}
        assert health.ranks("j-00000002") == {}
        process.communicate(b"\n")


def test_what_the_kernel_says_while_a_watch_runs_is_its_own_whatever_the_stamp(log):
    """The kernel stamps its lines with a clock that nobody corrects: after 100 days it can be a minute behind."""
    say(log, XID + " before", age_s=60)
    kernel_log = health.KernelLog(30, str(log))
    say(log, XID, age_s=60)
    say(log, XID + " ahead", age_s=-60)
    found = list(kernel_log.lines())
    assert [item["line"] for item in found] == [XID, XID + " ahead"]
    assert all(0.0 <= item["age_s"] < 30 for item in found)


def test_after_a_failure_the_kernel_s_lines_since_the_watch_began_count_whatever_their_stamps(log, monkeypatch):
    """Each of them, also one that the watch has told, and one that it has not read yet."""
    monkeypatch.setenv("GPURUN_DEV", str(log.parent))
    monkeypatch.setattr(health._Seen, "slowly", lambda *_: [])
    call = Call(1, lambda *_: None, False, b"")
    say(log, XID + " before", age_s=60)
    watch = health.watch(call, "j-0000000e", [], 30)
    assert next(watch) == []
    say(log, XID, age_s=60)
    assert [item["line"] for item in next(watch)] == [XID]
    say(log, XID + " unread", age_s=60)
    for _ in range(2):
        found = health.recent(call, "j-0000000e", 30)
        assert [item["line"] for item in found] == [XID, XID + " unread"] and found[0]["age_s"] < 30
    assert health.recent(call, "j-0000000f", 30) == []  # nobody watched: only stamps tell what is new
    watch.close()
    assert health.recent(call, "j-0000000e", 30) == [] and health._logs == {}


def test_ranks_that_have_ended_are_forgotten_after_a_while(monkeypatch):
    """A job that starts a thousand short processes a minute would fill the agent's memory."""
    seen, now_s, alive = health._Seen({}, ContainerWatch("j-0000000e")), [1000.0], {}
    monkeypatch.setattr(health.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(health, "ranks", lambda _job: dict(alive))
    for at in range(100):
        alive.clear()
        alive.update({at * 100 + pid: 0 for pid in range(100)})
        now_s[0] += 30.0
        seen.slowly("j-0000000e")
    assert health.rank_of("j-0000000e", 9_999) == 0 and health.rank_of("j-0000000e", 9_899) == 0
    assert health.rank_of("j-0000000e", 5) is None and health.rank_of("j-0000000f", 5) is None
    assert len(health._ranks["j-0000000e"]) <= 500


def test_a_port_that_was_active_and_is_not_is_told_once(tmp_path, monkeypatch):
    """A port that was down from the beginning is not the gang's, and a file that is gone is no port."""
    ports = tmp_path / "class/infiniband"
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        (ports / name / "ports/1").mkdir(parents=True)
        (ports / name / "ports/1/state").write_text(f"{state}\n")
    seen = health._Seen({}, ContainerWatch("j-00000001"))

    def told():
        return list(seen._links(facts.port_states(str(tmp_path))))

    assert told() == []
    (ports / "mlx5_0/ports/1/state").write_text("1: DOWN\n")
    (ports / "mlx5_2/ports/1/state").unlink()
    assert told() == [
        {"kind": "link", "device": "mlx5_0 port 1", "state": "DOWN"},
        {"kind": "link", "device": "mlx5_2 port 1", "state": ""},
    ]
    assert told() == []
    (ports / "mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    assert told() == []
    (ports / "mlx5_0/ports/1/state").write_text("2: INIT\n" + "x" * 10_000)
    assert [len(each["state"]) < 50 for each in told()] == [True]
    assert facts.port_states(str(tmp_path / "none")) == {}
