"""What tests of a shared state directory have its users run."""

from __future__ import annotations

import os

import pytest
from users import NEEDS_OPEN_PYTHON, open_python

needs_root = pytest.mark.skipif(os.geteuid() != 0 or open_python() is None, reason=f"needs root; {NEEDS_OPEN_PYTHON}")

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics:
  tcp: {kind: tcp, interface: eth0}
racks:
  r1: {hosts: {"h[1-2]": {}}}
"""
PRELUDE = """
import os, sys, time
from pathlib import Path
from gpurun.state.sharing import StateDirectory
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import AllocatorLock
from gpurun.leases.occupancy import Occupancy
from gpurun.leases.store import LeaseStore
home = Path(os.environ["GPURUN_HOME"])
StateDirectory(home).enter()
"""
SUBMIT = (
    PRELUDE
    + """
spec = JobSpec(name="n", image="i", gpus=2, command=("true",))
print(JobStore(home).create(spec, inventory=home.parent / "inventory.yaml", now_s=1.0).id)
"""
)
