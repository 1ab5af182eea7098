"""Users who share a state directory keep equal code once each, and nobody gets another user's."""

from __future__ import annotations

import os

import pytest
from shared_code import PRELUDE, needs_root
from users import ALICE, BOB

from gpurun.jobs.folder import CODES
from gpurun.jobs.store import JobStore

pytestmark = needs_root

SUBMIT_CODE = (
    PRELUDE
    + """
from functools import partial
from gpurun.content.tree import scan
from gpurun.content.workdir import Code, CodeStore
work = Path(os.environ["HOME"]) / "work"
work.mkdir(exist_ok=True)
(work / "train.py").write_text("equal code")
tree = scan(work)
spec = JobSpec(name="n", image="i", gpus=2, command=("true",), workdir=str(work), code=tree.digest)
codes = {tree.digest: partial(CodeStore(home).add, tree=tree)}
(job,) = JobStore(home).create_many([spec], inventory=home.parent / "inventory.yaml", now_s=1.0, codes=codes)
Code(job.code).compare(tree)
print(job.id)
"""
)  # fmt: skip
LOOK = PRELUDE + "print(os.listdir(home / 'jobs' / '%s'))"


def inode(state, job):
    return JobStore(state).get(job).code.stat().st_ino


def test_each_user_has_a_store_that_nobody_else_reads(state, alice, bob):
    one, two, bobs = alice.python(SUBMIT_CODE), alice.python(SUBMIT_CODE), bob.python(SUBMIT_CODE)
    assert inode(state, one) == inode(state, two) != inode(state, bobs)
    assert len(os.listdir(state / "jobs" / f"{CODES}{ALICE}")) == len(os.listdir(state / "jobs" / f"{CODES}{BOB}")) == 1
    done = bob.run("-c", LOOK % f"{CODES}{ALICE}")
    assert done.returncode != 0 and "PermissionError" in done.stderr
    assert bob.run("-c", PRELUDE + f"open(home / 'jobs/{one}/code')").returncode != 0
    assert bob.python(PRELUDE + "JobStore(home).sweep(now_s=time.time()); print(JobStore(home).codes())") == str(
        [f"{CODES}{BOB}"]
    )


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_store_that_another_user_made_first_is_not_used(state, alice, bob, mode):
    bob.python(PRELUDE + f"path = home / 'jobs/{CODES}{ALICE}'; path.mkdir(); path.chmod({mode}); print()")
    one, two = alice.python(SUBMIT_CODE), alice.python(SUBMIT_CODE)
    assert inode(state, one) != inode(state, two), "each job has its own copy"
    assert os.listdir(state / "jobs" / f"{CODES}{ALICE}") == []


def test_root_removes_code_that_no_job_has_any_more(state, alice, bob):
    gone, stays = alice.python(SUBMIT_CODE), bob.python(SUBMIT_CODE)
    store = JobStore(state)
    store.get(gone).path.rmtree()
    store.sweep(now_s=0.0)
    assert store.codes() == [f"{CODES}{BOB}"]
    assert inode(state, stays) == next((state / "jobs" / f"{CODES}{BOB}").iterdir()).stat().st_ino
