"""Locks of one user's files, which no other member can hold: not even a read lock, for which reading is enough."""

from __future__ import annotations

import pytest
from shared_code import PRELUDE, SUBMIT, needs_root

pytestmark = needs_root

LOCKS = {
    "a job's outputs": """
from gpurun.supervisor.outputs.copy import HeadCopy
folder = JobStore(home).create(JobSpec("n", "i", 1, ("true",)), inventory=home.parent / "inventory.yaml", now_s=1.0)
with HeadCopy(folder).alone():
    show(folder.path / "outputs.lock")
""",
    "a sweep": """
from gpurun.studies.store import SweepFolder
folder = StatePath(home) / "sweeps" / "s-0000000a"
folder.mkdir(0o755)
SweepFolder(folder).take_lock()
show(folder / "conductor.log")
""",
    "a campaign": """
from gpurun.studies.campaigns import CampaignFolder
folder = StatePath(home) / "scaling" / "one"
folder.mkdir(0o755)
with CampaignFolder(folder).carried():
    show(folder / "lock")
""",
    "a draft": """
from gpurun.state.caches import new_folder
with new_folder(StatePath(home) / "sweeps") as draft:
    show(draft.sibling(f"{draft.name}.lock"))
""",
    "a submission": """
from gpurun.jobs.store import Drafts
with Drafts(StatePath(home) / "jobs", StatePath(home) / "live"):
    (name,) = (StatePath(home) / "jobs").names()
    show(StatePath(home) / "jobs" / name / "lock")
""",
}
SHOW = (
    PRELUDE + "from gpurun.state.paths import StatePath\nshow = lambda path: print(oct(path.stat().st_mode & 0o777))\n"
)
OLDER = SHOW + "path = StatePath(home) / 'sweeps' / 'x'\npath.touch()\nfrom gpurun.state.locks import open_own_lock\n"


@pytest.mark.parametrize("lock", LOCKS.values(), ids=LOCKS)
def test_nobody_else_can_read_a_lock_file(alice, lock):
    assert alice.python(SHOW + lock) == "0o600"


def test_a_lock_file_of_an_older_version_is_closed(alice):
    assert alice.python(OLDER + "show(path)") == "0o640"
    assert alice.python(OLDER + "open_own_lock(path)\nshow(path)") == "0o600"


def test_a_read_lock_on_a_lease_keeps_its_job_from_nobody(state, alice, bob):
    """Bob locks alice's lease, which he may read, before a command of hers adopts the job."""
    job = alice.python(SUBMIT)
    alice.python(PRELUDE + "Allocator(home).run_pass(now_s=2.0)")
    hold = f"""
from gpurun.state import locks as lock
held = os.open(home / 'leases' / '{job}.json', os.O_RDONLY)
print(lock.try_take(held, shared=True), flush=True); time.sleep(60)
"""
    bobs = bob.start("-c", PRELUDE + hold)
    assert bobs.stdout.readline() == "True\n"
    adopt = "from gpurun.head import spawn\nspawn.Head.start_supervisor = lambda *_, **__: None\n"
    adopt += f"print(spawn.Head(home, {{}}).adopt_orphans(), LeaseStore(home).is_alive({job!r}))"
    assert alice.python(PRELUDE + adopt) == f"('{job}',) True"
    assert alice.python(PRELUDE + f"print(LeaseStore(home).read('{job}').job)") == job
    bobs.kill()
    bobs.communicate()
