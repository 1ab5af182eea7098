"""One machine for all golden files: its clock stands still, and its names and random ids are always the same."""

from __future__ import annotations

import itertools
import os
import pwd
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from golden_world import GIVEN, Later, Run

from gpurun.state import clock
from gpurun.state.boot import ClockReading

BOOT, UP_S, NOW_S = "0b007000-0000-4000-8000-000000000000@00c0ffee", 1e6, 1_790_000_000.0
USELESS = (
    "XDG_STATE_HOME", "SSH_AUTH_SOCK", "SUDO_USER", "VISUAL", "EDITOR", "SHELL", "TERM", "FORCE_COLOR", "LANG",
    "LC_ALL", "SLURM_JOB_ID",
)  # fmt: skip


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Stop the clock, also the kernel's, and let ids count from 1. Call it to let seconds pass."""
    passed, numbers = [0.0], itertools.count(1)
    read = time.clock_gettime

    def boot_clock(which: int) -> float:
        return UP_S + passed[0] if which == time.CLOCK_BOOTTIME else read(which)

    monkeypatch.setattr(time, "time", lambda: NOW_S + passed[0])
    monkeypatch.setattr(time, "clock_gettime", boot_clock)
    monkeypatch.setattr(secrets, "token_hex", lambda size=32: f"{next(numbers):0{2 * size}x}"[-2 * size :])
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "head", "6.1", "#1", "x86_64")))
    monkeypatch.setattr(
        pwd, "getpwuid", lambda uid: pwd.struct_passwd(("ann", "x", uid, uid, "", "/home/ann", "/bin/sh"))
    )
    reading = clock.HeadClock(
        lambda: ClockReading(BOOT, UP_S + passed[0], NOW_S + passed[0]), is_synchronised=lambda: True
    )
    monkeypatch.setattr(clock, "_of_process", reading)

    def later(seconds: float) -> None:
        passed[0] += seconds

    return later


@pytest.fixture
def top(tmp_path: Path, now: Later, nothing_resumes: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an inventory and a workdir. Commands see little of the developer's settings, and start nothing."""
    monkeypatch.setattr("gpurun.head.children.start_detached", lambda *_, **__: None)
    for name in USELESS:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        (tmp_path / name.lower()).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-docker")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    for name, text in GIVEN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (NOW_S - 1e6, NOW_S - 1e6))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def run(top: Path, gpurun: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line as it is typed, in this process; its exit code, stdout and stderr."""

    def typed(line: str) -> tuple[int, str, str]:
        words = shlex.split(line)
        monkeypatch.setattr(sys, "argv", ["gpurun", *words])
        with Path(os.devnull).open() as nobody:
            monkeypatch.setattr(sys, "stdin", nobody)
            return gpurun(*words)

    return typed
