"""The disk of the state directory is really full: every command works, or says what failed and what to do next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import SimpleNamespace

import pytest
from users import left_over
from waiting import LIMIT_S

from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import LeaseStore
from gpurun.state.paths import StatePath
from gpurun.state.sharing import append_only

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs, which needs root")

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""
GROUP = "62000"
FULL = "is full"


class Docker(BaseHTTPRequestHandler):
    """A Docker engine that has every image."""

    def do_GET(self) -> None:
        body = json.dumps({"Id": "sha256:" + "0" * 64, "RootFS": {"Layers": []}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "a socket"

    def log_message(self, *_) -> None:
        """Say nothing."""


@pytest.fixture
def docker(tmp_path):
    with ThreadingUnixStreamServer(str(tmp_path / "docker.sock"), Docker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"unix://{tmp_path / 'docker.sock'}"
        server.shutdown()


class Disk:
    """A small file system, and the commands that use it."""

    def __init__(self, folder: Path, docker: str) -> None:
        self.folder = folder / "disk"
        self.folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=300", "tmpfs", self.folder], check=True)
        self.home = self.folder / "home"
        inventory = folder / "inventory.yaml"
        inventory.write_text(INVENTORY)
        self.inventory = inventory
        self.environ = {
            **os.environ, "GPURUN_HOME": str(self.home), "GPURUN_INVENTORY": str(inventory), "DOCKER_HOST": docker,
            "HOME": str(folder),
        }  # fmt: skip

    def fill(self, how: str) -> None:
        """Leave not one byte, or not one name, for new files."""
        if how == "bytes":
            with suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as stream:
                while True:
                    stream.write(bytes(4096))
        else:
            (self.folder / "fillers").mkdir()
            with suppress(OSError):
                for number in range(1000):
                    (self.folder / "fillers" / str(number)).touch()

    def free(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)
        subprocess.run(["rm", "-rf", str(self.folder / "fillers")], check=True)

    def gpurun(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "gpurun", *words], env=self.environ, capture_output=True, text=True,
            timeout=LIMIT_S, stdin=subprocess.DEVNULL, cwd=self.folder,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def files(self) -> dict[str, bytes]:
        """What commands keep: jobs, their marks, and leases."""
        found = {}
        for name in ("jobs", "live", "leases"):
            for path in (self.home / name).rglob("*") if (self.home / name).exists() else ():
                if path.is_file():
                    found[str(path.relative_to(self.home))] = path.read_bytes()
        return found


@pytest.fixture
def disk(tmp_path, docker):
    made = Disk(tmp_path, docker)
    yield made
    for pid in left_over(made.home):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    append_only(StatePath(made.home) / "audit.jsonl", on=False)
    subprocess.run(["umount", "-l", str(made.folder)], check=True)


@pytest.fixture
def jobs(disk):
    """A job that runs, as far as anybody can see: this process holds its lease. And one that waits for its GPUs."""
    store = JobStore(disk.home)
    spec = JobSpec(name="n", image="i", gpus=4, command=("true",))
    ids = [store.create(spec, inventory=disk.inventory, now_s=float(n)).id for n in range(2)]
    done = Allocator(disk.home).run_pass(now_s=3.0)
    if not done.granted:  # met once, on a busy machine, and not understood: the warning says what the pass saw
        warnings.warn(f"a pass granted nothing: {done}", stacklevel=1)
        done = Allocator(disk.home).run_pass(now_s=3.0)
    ((lease, lock),) = done.granted
    store.get(lease.job).log.touch()
    yield SimpleNamespace(runs=lease.job, waits=next(job for job in ids if job != lease.job), store=store)
    lock.close()


def says_what_to_do(done) -> bool:
    return done.returncode == 5 and FULL in done.stderr and "free some space" in done.stderr


SUBMIT = ("submit", "-n", "1", "--image", "i", "--", "true")


@pytest.mark.parametrize("how", ["bytes", "names"])
def test_a_submission_stores_all_of_the_job_or_nothing(disk, jobs, how):
    before = disk.files()
    disk.fill(how)
    done = disk.gpurun(*SUBMIT)
    assert says_what_to_do(done), (done.returncode, done.stdout, done.stderr)
    assert done.stdout == "", "who gets no id may submit again"
    assert disk.files() == before
    disk.free()
    again = disk.gpurun(*SUBMIT)
    assert again.returncode == 0, again.stderr
    disk.gpurun("recover")
    assert set(jobs.store.ids()) == set(jobs.store.live_ids()) == {jobs.runs, jobs.waits, again.stdout.strip()}


@pytest.mark.parametrize("how", ["bytes", "names"])
@pytest.mark.parametrize("which", ["runs", "waits"])
def test_a_cancel_that_is_not_stored_says_so_and_is_not_audited(disk, jobs, how, which):
    job, before = getattr(jobs, which), disk.files()
    disk.fill(how)
    done = disk.gpurun("cancel", "--no-wait", job)
    assert says_what_to_do(done), (done.returncode, done.stderr)
    assert disk.files() == before
    disk.free()
    assert disk.gpurun("audit", "--json", "--job", job).stdout.count('"cancel"') == 0
    assert disk.gpurun("cancel", "--no-wait", job).returncode == 0
    record = jobs.store.get(job).record()
    assert jobs.store.get(job).cancel_request() is not None
    assert record.state.value == ("CANCELLED" if which == "waits" else "GRANTED")


@pytest.mark.parametrize("how", ["bytes", "names"])
@pytest.mark.parametrize(
    "words",
    [("status",), ("status", "--json"), ("status", "RUNS"), ("queue",), ("why", "WAITS"), ("logs", "RUNS"), ("audit",)],
    ids=" ".join,
)
def test_a_command_that_only_reads_works(disk, jobs, how, words):
    words = [word.replace("RUNS", jobs.runs).replace("WAITS", jobs.waits) for word in words]
    empty, before = disk.gpurun(*words), disk.files()
    disk.fill(how)
    full = disk.gpurun(*words)
    assert full.returncode == empty.returncode == 0, full.stderr
    if words[0] != "why":  # its answer holds seconds that passed
        assert len(full.stdout.splitlines()) == len(empty.stdout.splitlines())
    disk.free()
    assert {name: disk.files().get(name) for name in before} == before


@pytest.mark.parametrize("how", ["bytes", "names"])
def test_waiting_goes_on_until_the_job_has_ended(disk, jobs, how):
    disk.fill(how)
    waiting = disk.gpurun("wait", "--timeout", "0.5s", jobs.waits)
    assert waiting.returncode == 124, waiting.stderr
    disk.free()
    disk.gpurun("cancel", "--no-wait", jobs.waits)
    assert disk.gpurun("wait", "--timeout", "100s", jobs.waits).returncode == 1


@pytest.mark.parametrize("how", ["bytes", "names"])
def test_recover_says_so_and_recovers_all_when_there_is_space(disk, how):
    """The supervisor that held the lease is gone: the lease stays, whatever cannot be written."""
    store = JobStore(disk.home)
    spec = JobSpec(name="n", image="i", gpus=4, command=("true",))
    job = store.create(spec, inventory=disk.inventory, now_s=1.0)
    ((_, lock),) = Allocator(disk.home).run_pass(now_s=2.0).granted
    lock.close()
    disk.fill(how)
    done = disk.gpurun("recover")
    assert done.returncode == 0 or says_what_to_do(done), (done.returncode, done.stderr)
    assert LeaseStore(disk.home).read(job.id) is not None
    assert not job.record().state.ended
    disk.free()
    done = disk.gpurun("recover")
    assert done.returncode == 0, done.stderr
    cancelled = disk.gpurun("cancel", job.id)  # its supervisor lives, though its host cannot be reached
    assert cancelled.returncode == 0, cancelled.stderr
    assert job.record().state.ended


@pytest.mark.parametrize("how", ["bytes", "names"])
def test_a_shared_directory_is_made_whole_or_not_used(disk, how):
    shared = disk.folder / "shared"
    disk.fill(how)
    done = disk.gpurun("share", str(shared), "--group", GROUP)
    assert says_what_to_do(done), (done.returncode, done.stderr)
    disk.environ["GPURUN_HOME"] = str(shared)
    used = disk.gpurun(*SUBMIT)
    assert used.returncode == 5, "a directory that was made in part keeps nobody apart"
    disk.free()
    done = disk.gpurun("share", str(shared), "--group", GROUP)
    assert done.returncode == 0, done.stderr
    stored = disk.gpurun(*SUBMIT)
    assert stored.returncode == 0, stored.stderr
    assert JobStore(shared).ids() == (stored.stdout.strip(),)
    disk.gpurun("cancel", "--no-wait", stored.stdout.strip())
    append_only(StatePath(shared) / "audit.jsonl", on=False)
