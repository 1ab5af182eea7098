"""A command that waits says for what, but not all the time."""

from __future__ import annotations

from gpurun.cli.cancel import Patience, jobs_in_words
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore


def test_it_speaks_after_a_while_and_then_now_and_again(capsys):
    now = [100.0]
    patience = Patience(lambda: now[0])
    for at_s in (100.0, 104.9, 105.0, 110.0, 134.9, 135.0, 136.0):
        now[0] = at_s
        patience.tell(lambda: "j-1\x1b[2J")
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == ["waited 5s so far: j-1\\x1b[2J", "waited 35s so far: j-1\\x1b[2J"]


def test_jobs_are_named_and_many_are_counted(tmp_path):
    spec = JobSpec(name="n", image="i", gpus=1, command=("x",))
    store = JobStore(tmp_path)
    folders = [store.create(spec, inventory=tmp_path / "i", now_s=1.0) for _ in range(5)]
    said = jobs_in_words(folders)
    assert said.startswith(f"{folders[0].id} is QUEUED, ") and said.endswith(" and 2 more jobs")
    assert jobs_in_words([]) == "gpurun checks that the jobs left no process on their hosts"
