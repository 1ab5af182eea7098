"""The worst of it through the real command, in a process of its own that may have 1 GiB of memory and 20 s."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_fuzz_state import CODES, Home

from gpurun.leases.look import WaiterLocks
from gpurun.leases.store import LeaseStore

DEEP, LONG, HUGE = b"[" * 1_000_000, b'"' + b"x" * 30_000_000, b'{"a":' * 1_000_000
BOMB = b"".join(
    b"%c: &%c [%s]\n" % (now, now, b",".join([b"x" if now == ord("a") else b"*%c" % (now - 1)] * 9))
    for now in b"abcdefghi"
)
CASES = [
    ("leases/RUNS.json", DEEP, ("status",)),
    ("leases/LOST.1.lost.json", LONG, ("recover",)),
    ("jobs/RUNS/state.json", HUGE, ("status",)),
    ("jobs/RUNS/spec.json", b'{"name": "\xed\xa0\x80"}', ("why", "WAITS")),
    ("jobs/WAITS/state.json", b'{"id": "../../x"}', ("cancel", "--no-wait", "WAITS")),
    ("cordons.json", b'{"hosts": {"h1": NaN}}', ("queue",)),
    ("audit.jsonl", DEEP + b"\n" + LONG, ("audit", "--job", "x")),
    ("jobs/RUNS/events.jsonl", DEEP + b"\n", ("status", "RUNS")),
    ("../inventory.yaml", BOMB, ("inventory", "validate")),
    ("../inventory.yaml", DEEP, ("status",)),
    ("../recipe.yaml", BOMB, ("submit", "RECIPE", "--dry-run")),
    ("../recipe.yaml", b"env: {[a]: b}\n", ("submit", "RECIPE", "--dry-run")),
    (None, b"", ("submit", "-n", "1", "--image", "i", "--name", "\udcff", "--", "\udcfe")),
    (None, b"", ("submit", "/dev/zero")),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("command"))


@contextmanager
def nobody_is_started(home: Home, place: Path) -> Iterator[None]:
    """This process is every supervisor, and the waiter."""
    leases = LeaseStore(place)
    locks = [leases.try_lock(home.told(name)) for name in ("RUNS", "LOST.1.lost")]
    waiter, _ = WaiterLocks(place).take()
    yield
    os.close(waiter)
    for lock in locks:
        lock.close()


@pytest.mark.parametrize(("file", "data", "words"), CASES, ids=[f"{at} {case[2][0]}" for at, case in enumerate(CASES)])
def test_it_says_what_is_wrong(home, file, data, words):
    with home.copy() as place, nobody_is_started(home, place):
        inventory, recipe = place.parent / "inventory.yaml", place.parent / "recipe.yaml"
        inventory.write_bytes((home.folder / "inventory.yaml").read_bytes())
        if file is not None:
            (place / home.told(file)).write_bytes(data)
        environ = {**os.environ, "GPURUN_HOME": str(place), "GPURUN_INVENTORY": str(inventory), "PATH": ""}
        done = subprocess.run(
            [sys.executable, "-m", "gpurun", *[home.told(word).replace("RECIPE", str(recipe)) for word in words]],
            env=environ, capture_output=True, text=True, errors="replace", timeout=20,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
        )  # fmt: skip
        assert done.returncode in (*CODES, 3), done.stderr[-2000:]
        assert "Traceback" not in done.stderr
        if file is not None and file.startswith(("leases/", "jobs/RUNS/", "cordons")):
            assert (place / home.told(file)).read_bytes() == data
