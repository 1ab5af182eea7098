"""Pruning in a state directory of several users: everybody removes their own, root everybody's."""

from __future__ import annotations

import json

import pytest
from shared_code import PRELUDE, SUBMIT, needs_root
from users import ALICE, make_user

pytestmark = needs_root

END = (
    SUBMIT.replace("print(", "folder = JobStore(home).get(").replace(".id)\n", ".id)\n")
    + """
from gpurun.jobs.record import State
folder.write(folder.record().but(state=State.SUCCEEDED, ended_s=5.0))
JobStore(home).retire(folder.id)
(home / 'jobs' / folder.id / 'outputs').mkdir()
(home / 'jobs' / folder.id / 'outputs' / 'model').write_bytes(b'x' * 100_000)
print(folder.id)
"""
)


@pytest.fixture
def root(tmp_path, state):
    return make_user(0, tmp_path, state)


def there(state):
    return {path.name for path in (state / "jobs").iterdir()}


def test_everybody_removes_their_own_alone(state, alice, bob, root):
    alices, bobs = alice.python(END), bob.python(END)
    assert there(state) == {alices, bobs}
    done = bob.gpurun("prune", alices, "--yes")
    assert done.returncode == 2
    assert f"belongs to uid {ALICE}" in done.stderr
    done = bob.gpurun("prune", "--older-than", "30d", "--yes", "--json")
    assert [each["id"] for each in json.loads(done.stdout)["jobs"]] == [bobs]
    assert there(state) == {alices}
    done = bob.gpurun("prune", "--keep-below", "0MiB", "--yes")
    assert done.returncode == 0, done.stderr
    assert there(state) == {alices}
    done = root.gpurun("prune", "--older-than", "30d", "--yes")
    assert done.returncode == 0, done.stderr
    assert there(state) == set()


def test_du_counts_others_as_far_as_they_may_be_read(state, alice, bob):
    alices = alice.python(END)
    (state / "jobs" / alices / "outputs").chmod(0o700)
    done = bob.gpurun("du", "--json")
    (row,) = json.loads(done.stdout)["jobs"]
    assert row["id"] == alices
    assert "Permission denied" in row["unread"][0]
    assert row["bytes"]["total"] > 0
    assert (state / "jobs" / alices / "outputs").stat().st_mode & 0o777 == 0o700, "it only looks"


def test_nobody_removes_anothers_job_past_the_command(state, alice, bob):
    alices = alice.python(END)
    attack = """
from unittest import mock
from gpurun.head import prune
with mock.patch.object(prune, "_is_mine", lambda uid: True):
    wish = prune.PruneWish(ended_before_s=1e12)
    done = prune.carry_out(home, prune.plan_prune(home, wish), wish)
print(sorted(done.failed))
"""
    assert bob.python(PRELUDE + attack) == f"['{alices}']"
    assert (state / "jobs" / alices / "outputs/model").exists()


@pytest.mark.parametrize("way", ["a job that is a link", "a name that is doomed", "outputs that are a link"])
def test_root_s_prune_is_no_way_to_anothers_files(state, alice, bob, root, way):
    alices, bobs = alice.python(END), bob.python(END)
    keep = f"(home / 'jobs' / '{alices}' / 'keep').touch()\nfrom gpurun.jobs.record import State\n"
    alice.python(PRELUDE + keep + f"f = JobStore(home).get('{alices}')\nf.write(f.record().but(state=State.QUEUED))")
    attack = {
        "a job that is a link": f"(home / 'jobs/j-0000000f').symlink_to('{alices}')",
        "a name that is doomed": f"(home / 'jobs/.doomed-{alices}-1').symlink_to('{alices}')",
        "outputs that are a link": f"import shutil\nshutil.rmtree(home / 'jobs/{bobs}/outputs')\n"
        f"(home / 'jobs/{bobs}/outputs').symlink_to('../{alices}')",
    }[way]
    assert bob.python(PRELUDE + attack) == ""
    root.gpurun("prune", "--older-than", "30d", "--yes")
    assert (state / "jobs" / alices / "outputs/model").exists()
    assert (state / "jobs" / alices / "keep").exists()
    assert bobs not in there(state)
