"""Ranks of one job on this machine, started by gpurun's own script, and what the agent says of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from waiting import LIMIT_S

from gpurun.launch.launchers.horovod import GLOO
from gpurun.launch.rank import rank_script
from gpurun.node.agent.frames import Call, Cancelled
from gpurun.node.job import ranks

JOB = f"j-1{os.getpid():07x}"  # processes of other test runs on this machine are other jobs'
WAIT = "trap 'echo told; exit 7' TERM; echo up; while :; do sleep 0.05; done"


def call():
    return Call(1, lambda *_: None, False, b"")


class Host:
    """A host with one job; ranks are started as its containers would start them."""

    def __init__(self, home: Path) -> None:
        self.folder = home / ".gpurun" / "jobs" / JOB
        self.run = self.folder / "run"
        self.run.mkdir(parents=True)
        self.script = self.folder / "rank"
        self.write()
        self.started: list[subprocess.Popen[bytes]] = []

    def write(self, grace_s: float = 1) -> None:
        self.script.write_text(rank_script([], GLOO, grace_s=grace_s, notice_s=0, copied_s=LIMIT_S))

    def start(self, rank: int, *command: str, attempt: int = 1, job: str = JOB, **environ: str):
        env = {**os.environ, "GPURUN_RUN": str(self.run), "GPURUN_ATTEMPT": str(attempt), "GPURUN_JOB": job}
        env |= {"HOROVOD_RANK": str(rank), **environ}
        argv = ["sh", str(self.script), *command]
        self.started.append(subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
        return self.started[-1]

    def fake(self, name: str, attempt: int = 1, **files: str) -> Path:
        """A rank's folder that no script made; file names have their dot as ``_``."""
        folder = self.run / "ranks" / str(attempt) / name
        folder.mkdir(parents=True)
        (folder / "start").write_text("started\n")
        for file, text in files.items():
            (folder / file.replace("_", ".")).write_text(text)
        return folder


@contextlib.contextmanager
def host_at(home: Path) -> Iterator[Host]:
    """Give a host whose user has this home; its processes end with it."""
    host = Host(home)
    yield host
    for process in host.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


def follow(have=None, attempt=1, once=True, rest_bytes=None):
    """What is there, as (kind, id, rank, rest) of each item; output of one stream in one piece."""
    return list(ranks.follow(call(), JOB, attempt, have or {}, once, rest_bytes))


def kinds(replies):
    return [(reply.value["kind"], reply.value["rank"]) for reply in replies]


def text(replies, rank, stream="o"):
    return b"".join(
        bytes(reply.payload) for reply in replies
        if reply.value["kind"] == "output" and reply.value["rank"] == rank and reply.value["stream"] == stream
    )  # fmt: skip


def ends(replies):
    return [
        (reply.value["rank"], reply.value["code"], reply.value.get("killed", False)) for reply in replies
        if reply.value["kind"] == "end"
    ]  # fmt: skip


@contextlib.contextmanager
def following(have=None) -> Iterator[SimpleNamespace]:
    """Follow in a thread; `until` waits for a condition on all that came."""
    mine, came, changed = call(), [], threading.Condition()
    failed = []

    def read():
        try:
            for reply in ranks.follow(mine, JOB, 1, have or {}):
                with changed:
                    came.append(reply)
                    changed.notify_all()
        except Cancelled:
            pass
        except BaseException as error:
            failed.append(error)
            raise

    def until(condition):
        with changed:
            assert changed.wait_for(lambda: condition(came), LIMIT_S), came[-20:]

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield SimpleNamespace(came=came, until=until)
    finally:
        mine.cancel()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert not failed


def printed(host, what=b"up"):
    """Ranks that have printed it."""
    return sum(what in path.read_bytes() for path in host.run.glob("ranks/*/*/o"))
