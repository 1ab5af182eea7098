# ruff: noqa: PTH102, PTH103, PTH104, PTH106, PTH108, PTH112, PTH118, PTH120, PTH123, PTH211
"""Random trees of outputs, changed while they are copied: what is on the head is what was left, or is named."""

from __future__ import annotations

import os
import random
import stat
import time
from pathlib import Path
from typing import Any

from local_agents import Hosts
from outputs_world import meanwhile, outputs_job, shape

from gpurun.errors import HostFailure
from gpurun.supervisor.outputs.outputs import collect_outputs, copy_outputs

NAMES = [b"a", b"b", b"c c", b"caf\xe9", b"$(x)", b"\n", b"x" * 40]


def change(top: bytes, chance: random.Random) -> None:
    """One thing that a program may do; it may fail, as a program's deeds may."""
    path = top
    for _ in range(chance.randint(1, 4)):
        path = os.path.join(path, chance.choice(NAMES))
    other = os.path.join(top, chance.choice(NAMES))
    try:
        what = chance.randrange(9)
        if what <= 1:
            os.makedirs(path, exist_ok=True)
        elif what <= 3:
            with open(path, "ab") as file:
                file.write(bytes([chance.randrange(256)]) * chance.choice([0, 1, 1000, 200_000]))
        elif what == 4:  # it writes through its links: they must not lead out of the test's folder
            os.symlink(chance.choice([os.path.join(os.path.dirname(top), b"elsewhere"), b"..", b"a", b"nowhere"]), path)
        elif what == 5 and not os.path.isdir(other):
            os.rename(other, path)
        elif what == 6:
            os.unlink(path)
        elif what == 7:
            os.rmdir(path)
        else:
            os.link(other, path, follow_symlinks=False)
    except OSError:
        pass


def of_one_host(folder: Path, seed: int) -> None:
    """Raises AssertionError if the head's copy is not what the host has once the changes have ended."""
    hosts, chance = Hosts(folder), random.Random(seed)
    job = outputs_job(folder, hosts, "h1")
    top = os.fsencode(job.host())
    os.mkdir(os.path.join(os.path.dirname(top), b"elsewhere"))
    try:
        for _ in range(4):
            for _ in range(40):
                change(top, chance)
            with meanwhile(lambda: (change(top, chance), time.sleep(0.001))):
                copy_outputs(job)
            try:
                copy_outputs(job)
            except HostFailure as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            assert shape(job.head) == shape(job.host()), seed
        left = shape(job.host())
        assert collect_outputs(job) == set(), seed
        assert shape(job.head) == left, seed
        assert job.record.outputs_left is None, seed
    finally:
        hosts.close()


def is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """The same content, or both are folders: modes and times are the first host's."""
    return one[0] == other[0] and (stat.S_ISDIR(one[0]) or one[-1] == other[-1])


def of_two_hosts(folder: Path, seed: int) -> None:
    """What either has is on the head, also if both have other content; what is where the other has a folder stays."""
    hosts, chance = Hosts(folder), random.Random(seed)
    job = outputs_job(folder, hosts, "h1", "h2")
    tops = [os.fsencode(job.host(name)) for name in ("h1", "h2")]
    try:
        for _ in range(4):
            for _ in range(40):
                change(chance.choice(tops), chance)
            with meanwhile(lambda: (change(chance.choice(tops), chance), time.sleep(0.001))):
                copy_outputs(job)
        left = [shape(job.host(name)) for name in ("h1", "h2")]
        kept = collect_outputs(job)
        head = shape(job.head)
        of = {os.fsencode(name): version for name, version in job.outputs.versions.items()}
        for path, entry in head.items():
            was = os.fsencode(of[path].path) if path in of else path
            assert any(entry == one.get(was) for one in left), (seed, path)
        for name, one in zip(("h1", "h2"), left, strict=True):
            names = {os.fsencode(version.path): path for path, version in of.items() if version.host == name}
            for path, entry in one.items():
                brought = head.get(names.get(path, path))
                if brought is None or not is_same(brought, entry):
                    assert name in kept and path in shape(job.host(name)), (seed, path)
    finally:
        hosts.close()
