"""What people and programs see stays as it is: who changes it must change the golden files, too.

`GPURUN_GOLDEN=write pytest tests/golden` writes them anew. `state.txt` is a whole state directory. All answers are
about that recorded one, not about one that today's code has made: so these tests also show that it can still be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden_text import FOLDER, compared, packed, told, unpacked
from golden_world import Later, Run, make
from json_shapes import SHAPES

from gpurun.content.images import Engine, HeadImage
from gpurun.errors import EXIT_CODES
from gpurun.jobs.store import JobStore
from gpurun.leases.store import LeaseStore
from gpurun.state import clock
from gpurun.state.paths import StatePath
from gpurun.state.sharing import append_only

ANSWERS = """\
status
status --all
status good bad lost stops
queue
why waits
why moved
why good
logs good
events bad
show good
show bad
diff good bad
outputs good
history
report --since 2026-09-20T12:00:00Z --until 2026-09-22T12:00:00Z
du
audit
sweep status
sweep status net
sweep best net
sweep table net
scale list
scale show curve
scale report curve --to report
inventory list
inventory list @rack:r2
inventory show
inventory show h1
inventory validate
inventory validate broken.yaml
inventory diff --all
config view
version
validate recipe.yaml
validate wrong.yaml
simulate trace.csv
submit --dry-run recipe.yaml
wait good
wait bad
inventory probe h1
inventory trust h1
images h1
data list h1
data evict --unused --yes
du --caches
doctor h1
bench h1,h2
ship i:1 h1
data stage work h1
lab status
IMAGE
submit recipe.yaml
sweep run recipe.yaml --grid lr=1,2
rerun good
requeue --no-wait runs
cancel --no-wait runs waits
sweep stop net
sweep resume net
inventory uncordon h2
inventory cordon h1
inventory drain h2 --reason move
prune --older-than 1s --yes
recover
EMPTY
submit --dry-run recipe.yaml
submit --dry-run recipe.yaml --launcher horovod
submit --dry-run recipe.yaml --launcher tasks -n 6
sweep run --dry-run recipe.yaml --grid lr=1,2
scale run --dry-run recipe.yaml --gpus 1,2,99 --name other
status
queue
history
sweep status
scale list"""
"""Commands with --json, in this order: some change the state. From IMAGE on the head has the job's image; from EMPTY on
the state directory is another one, without jobs."""

MESSAGES = """\
status
queue
why waits
why good
follow good
follow bad
logs good
events bad
show good
diff good bad
outputs good
history
report --since 2026-09-20T12:00:00Z --until 2026-09-22T12:00:00Z
audit
sweep status net
sweep best net
scale list
scale show curve
inventory list
inventory show h1
inventory diff 1
inventory export --to csv
metrics
submit recipe.yaml --dry-run
wait good
wait bad
wait lost
wait runs --timeout 0s
status nosuch
status --state DONE
why nosuch
show j-a000
cancel good
requeue good
wait nosuch
exec good -- true
exec waits -- true
ssh nosuch
logs good --rank x
outputs waits
sweep best nosuch
scale show nosuch
validate wrong.yaml
validate nosuch.yaml
inventory validate broken.yaml
inventory list nosuch
inventory set h1 gpus=9999 --yes
inventory set h1 gpus=8
inventory undo 9
inventory cordon nosuch
config view --bogus
prune
recover --discard nosuch.json
simulate nosuch.csv
share .
submit recipe.yaml -n 0
submit recipe.yaml -n 99
submit recipe.yaml -n 2 --generation hopper
submit recipe.yaml --pool nosuch
submit nosuch
submit recipe.yaml
submit wrong.yaml
inventory probe h1
inventory trust h1
images h1
data list h1
DAMAGE
status
why waits
show good
scale show curve
recover
history
INTERRUPT
show good"""
"""Commands for people, and refusals. From DAMAGE on, files are damaged; from INTERRUPT on, somebody types Ctrl-C."""

IMAGE = HeadImage("i:1", "sha256:" + "a" * 64, ("sha256:" + "b" * 64,), 5, ("i:1",))


@pytest.fixture
def state(top: Path, now: Later) -> Iterator[Path]:
    """The recorded state directory, with a supervisor for each running job but one."""
    now(7200.0)
    home = top / "state"
    unpacked((FOLDER / "state.txt").read_text(encoding="utf-8"), home, top, clock.now_s())
    held = dict(LeaseStore(home).take_orphans(os.getuid()))
    for lease, lock in held.items():
        if lease.job == "j-a0000006":
            lock.close()
    yield home
    for lock in held.values():
        lock.close()


def test_a_state_directory_is_written_as_before(top: Path, run: Run, now: Later) -> None:
    make(top, run, now)
    compared("state.txt", packed(top / "state", top))


def test_the_recorded_state_directory_is_unpacked_as_it_was(state: Path, top: Path) -> None:
    assert packed(state, top) == (FOLDER / "state.txt").read_text(encoding="utf-8")


def test_answers_for_programs(state: Path, run: Run, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for line in ANSWERS.splitlines():
        if line == "IMAGE":
            monkeypatch.setattr(Engine, "image", lambda *_: IMAGE)
        elif line == "EMPTY":
            monkeypatch.setenv("GPURUN_HOME", str(top / "empty"))
        else:
            found.append(told(line, *run(f"{line} --json"), top))
    compared("answers.txt", "".join(found))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_messages_for_people(state: Path, run: Run, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for line in MESSAGES.splitlines():
        if line == "DAMAGE":
            for name in ("leases/j-c0000001.json", "jobs/j-a0000001/spec.json", "scaling/curve/plan.json"):
                (state / name).write_text("{")
        elif line == "INTERRUPT":
            monkeypatch.setattr(JobStore, "find", interrupted)
        else:
            found.append(told(line, *run(line), top))
    text = "".join(found)
    compared("messages.txt", text)
    assert {int(code) for code in re.findall(r"^=== exit code (.*)$", text, re.MULTILINE)} == EXIT_CODES.keys()


def test_every_command_with_json_is_asked() -> None:
    lines = [f"{line} " for line in ANSWERS.splitlines()]
    assert [name for name in SHAPES if not any(line.startswith(f"{name} ") for line in lines)] == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes a shared state directory")
def test_a_shared_state_directory_is_made_as_before(top: Path, run: Run) -> None:
    code, _, err = run("share shared --group root")
    append_only(StatePath(top / "shared") / "audit.jsonl", on=False)
    assert code == 0, err
    compared("shared.txt", packed(top / "shared", top))
