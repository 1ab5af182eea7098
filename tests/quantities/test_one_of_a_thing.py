"""Messages about one GPU, one host or one file: no ``1 GPUs``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from clusters import cluster, runs

import gpurun
from gpurun.cli.dry_run import _files
from gpurun.cli.follow import placement_text
from gpurun.cli.job_options import smaller_in_words
from gpurun.cli.why import _line
from gpurun.errors import BadInput
from gpurun.inventory.edit import HostSetting, shares
from gpurun.inventory.imports.again import compose_inventory
from gpurun.inventory.imports.source import read_source
from gpurun.jobs.spec import Constraints, Wants
from gpurun.quantities import plural
from gpurun.scaling.choice import SmallerGang
from gpurun.scheduler.model import Gang, Snapshot
from gpurun.scheduler.passes import schedule
from gpurun.views.picture import WaitingJob
from gpurun.views.rows import TopRow, _job_line


def waits(inventory, gang, *running, now_s=0.0):
    return schedule(Snapshot(inventory, running, (gang,), now_s=now_s)).waits[gang.id].message


def test_the_scheduler_and_the_live_view_count_one():
    running = runs(Gang("r", 1), ("r0h0", (0,)))
    said = waits(cluster(1, 1, 2), Gang("g", 2), running)
    assert said.startswith("the job needs 2 GPUs; 1 suitable GPU of one generation is free for the job")
    never = schedule(Snapshot(cluster(1, 1, 1), queue=(Gang("g", 2),))).never["g"].message
    assert never.endswith("the inventory has at most 1 suitable GPU of one generation")
    near = Gang("g", 2, wants=Wants(constraints=Constraints(prefer="host", locality_wait_s=9.0)))
    spread = waits(cluster(1, 2, 2), near, running, runs(Gang("q", 1), ("r0h1", (0,))))
    assert spread == "the job fits on 2 hosts in 1 rack, but prefers one host"
    cells = ("A", "j-1", "me", "n", "RUNNING", "1", "–", "–", "5s", "h1", "")
    for gpus, shown in (("1", "1 GPU,"), ("1 of 2", "1 of 2 GPUs,"), ("8", "8 GPUs,")):
        assert f": RUNNING, {shown} 5s" in _job_line(TopRow("j-1", (*cells[:5], gpus, *cells[6:])))


def test_commands_and_imports_count_one(tmp_path):
    assert smaller_in_words(SmallerGang(1, 0.5, True, None), 2).startswith("1 GPU would start now")
    rows = (WaitingJob("j-1", "n", "ann", gpus, 1, None, 0, "inventory.yaml", 5.0, "why", None) for gpus in (1, 2))
    one, two = (_line(row, 0.0) for row in rows)
    assert "     1 GPU       5s  n: why" in one and one.replace("1 GPU ", "2 GPUs") == two
    event = {"hosts": [{"host": "h1", "gpus": [0]}], "racks": ["r1"], "generation": "pascal"}
    assert placement_text(event).startswith("1 pascal GPU on h1 (1 each)")
    assert [_files(1), _files(1000), plural(0, "file")] == ["1 file", "1,000 files", "files"]
    with pytest.raises(BadInput, match=r"gives 2 addresses for 1 host$"):
        shares(HostSetting("address", "", "10.0.0.[1-2]", "10.0.0.[1-2]"), ("h1",))
    for name, text, took in (
        ("hosts", "n1 slots=1\n", "1 host, with slots as gpus"),
        ("hosts.csv", "name,gpus\nh1,1\n", "1 host; columns name, gpus"),
        ("slurm.conf", "NodeName=n1 Gres=gpu:1\n", "1 node, 0 leaf switches as racks, 0 partitions as labels"),
        ("inventory.ini", "[gpu]\nh1 gpus=1\n", "1 host in 1 group"),
    ):
        (tmp_path / name).write_text(text)
        draft = read_source(tmp_path / name, None)
        compose_inventory(draft, {"gpus": "1", "generation": "pascal"}, {"kind": "tcp", "interface": "eth0"})
        assert took in draft.took, (draft.took, draft.left)
        assert "rack r1 for 1 host" in draft.guessed


NOUNS = (
    "GPUs jobs hosts ranks files restarts attempts trials racks points processes containers images lines sizes events "
    "columns pools cores workers servers problems nodes layers sweeps campaigns users inodes"
)
BY_HAND = re.compile(
    rf"(?<!\{{)\{{(?!count|plural)([^{{}}]*)\}} (?:more |free |other |such )?(?:{NOUNS.replace(' ', '|')})\b(?![./])"
)
SEVERAL = """
studies/campaign_plan.py len(sizes)
cli/cancel.py len(folders)
cli/follow.py len(racks)
cli/one_job.py len(error.args[0])
cli/one_job.py len(names)
content/data.py len(entries):,
launch/launchers/choosing.py spec.gpus
launch/launchers/launcher.py spec.gpus
launch/launchers/replacing.py most
launch/launchers/replacing.py spec.gpus
launch/launchers/choosing.py hosts
launch/container.py part
scaling/choice.py choice.larger.ranks
scaling/model.py hosts
scheduler/pools.py self.most:g
scheduler/explain.py len(names)
scheduler/placement.py gpus
supervisor/verdict/causes.py item['most']
supervisor/verdict/decide.py seen.world
supervisor/elastic.py self._job.spec.gpus
supervisor/watch.py job.record.gpus
supervisor/health.py spec.gpus
supervisor/watch.py gpus
supervisor/health.py ranks
"""
"""Numbers that are more than one there, or a part: ``1/2 of the cores``."""


def test_no_plural_is_made_by_hand():
    top, found = Path(gpurun.__file__).parent, []
    for path in sorted(top.rglob("*.py")):
        for match in BY_HAND.finditer(path.read_text()):
            line = f"{path.relative_to(top)} {match[1]}"
            if line not in SEVERAL.splitlines() and not re.search(r"\b_?(MOST|MAX|LEAST)", match[1]):
                found.append((line, match[0]))
    assert found == []
