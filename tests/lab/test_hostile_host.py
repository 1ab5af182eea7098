"""A host with a hostile agent, which sends false answers in every operation, harms only its own gangs.

The host's ``python3`` is a wrapper that loads `hostile/lies.py` before gpurun's agent. Each gang has one rank there and
one on an honest host; a job beside runs on a third host. The liar is named, honest hosts are free again, the head's
other files are as they were, and no supervisor grows.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import LOOK_S
from faulting import events, wait_until
from scene import IMAGE, Scene, build_image
from waiting import until

from gpurun.lab.lab import Lab
from gpurun.node.agent.processes import list_processes

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("hostile_host"), pytest.mark.timeout(400)]

AGENT = Path(__file__).parent / "hostile" / "lies.py"
WRAPPER = """#!/bin/sh
case "$*" in
*gpurun.node.agent.serve*) ;;
*) exec /usr/bin/python3 "$@" ;;
esac
code=$(printf %s "$2" | sed 's#from gpurun.node.agent.serve import main;#exec(open("/opt/lies/lies.py").read());&#')
exec /usr/bin/python3 "$1" "$code"
"""
PLACE = "/usr/local/bin/python3"
MOST_KIB = 400 << 10
"""A supervisor has about 90 MiB; a lie may make it hold 64 MiB of one operation, and as much decoded."""
HARMLESS = [{"gang.prepare": "noise"}, {"gang.progress": "far"}]
STORY = [
    *HARMLESS,
    {"gang.prepare": "endless"}, {"gang.prepare": "another"}, {"gang.inspect": "no_frames"},
    {"outputs.list": "below_a_link"},
]  # fmt: skip
LIES = [
    {"gang.prepare": "rubbish"}, {"gang.start": "closes"}, {"docker.wait": "closes"}, {"docker.logs": "rubbish"},
    {"gang.prepare": "same_name"}, {"gang.create": "fails"}, {"images.ask": "huge"}, {"ranks.follow": "rubbish"},
    {"ranks.follow": "others"}, {"ranks.follow": "floods"}, {"ranks.follow": "hangs"}, {"ranks.follow": "endless"},
    {"outputs.list": "outside"}, {"outputs.read": "other_bytes"}, {"health.watch": "stream_of_rubbish"},
]  # fmt: skip
"""Rubbish for an answer of each operation: `tests/remote/test_liars.py`."""
TRAINS = 'echo "rank $GPURUN_RANK"; echo x >/out/x.$GPURUN_RANK; sleep 2'


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    build_image(tmp_path_factory.mktemp("image"))


class Liar:
    """A host of the lab whose agents lie."""

    def __init__(self, lab: Lab, host: str, plan: list[dict[str, str]]) -> None:
        self.lab, self.host = lab, host
        self.write("/opt/lies/lies.py", AGENT.read_text())
        self.write("/opt/lies/plan.json", json.dumps(plan))
        self.write("/opt/lies/turns.json", "{}")
        self.write(PLACE, WRAPPER, mode="755")

    def write(self, path: str, text: str, mode: str = "666") -> None:
        script = 'mkdir -p "$(dirname "$0")"; chmod 777 "$(dirname "$0")"; cat >"$0"; chmod "$1" "$0"'
        if path == PLACE:
            script = 'cat >"$0"; chmod "$1" "$0"'
        done = self.lab.run(self.host, ["sh", "-c", script, path, mode], stdin=text.encode())
        assert done.code == 0, done.stderr

    def turns(self) -> dict[str, int]:
        return json.loads(self.lab.run(self.host, ["cat", "/opt/lies/turns.json"]).stdout)

    def clean(self) -> None:
        """Remove outputs that its lies kept on the host."""
        self.lab.run(self.host, ["sh", "-c", "rm -rf /home/train/.gpurun/outputs/j-*"])

    def repent(self) -> None:
        self.lab.run(self.host, ["rm", "-rf", PLACE])
        self.lab.run(self.host, ["touch", "/opt/lies/off"])


class Sizes(threading.Thread):
    """The most memory that each supervisor of these jobs has had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.kib: dict[str, int] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.3):
            for process in list_processes():
                if "gpurun.supervisor j-" in process.command:
                    with suppress(OSError, StopIteration):
                        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
                        job = process.command.partition("gpurun.supervisor ")[2].split()[0]
                        self.kib[job] = max(peak, self.kib.get(job, 0))


@pytest.fixture
def liar(train_lab):
    made = []

    def make(plan):
        made.append(Liar(train_lab, train_lab.hosts[0].name, plan))
        return made[-1]

    yield make
    for each in made:
        each.repent()
        each.clean()
        each.lab.run(each.host, ["rm", "-rf", "/opt/lies"])


@pytest.fixture
def scene(cluster, image):
    made = Scene(cluster, [cluster.lab.hosts[2].name])
    made.begin()
    yield made


def submit(scene, liar, name, command=TRAINS, limit_s=5):
    honest = scene.cluster.lab.hosts[1].name
    return scene.start(
        name,
        f"image: {IMAGE}\ngpus: 2\nlauncher: tasks\noutputs: /out\noutputs_every: 1s\ngrace: 1s\n"
        f"time_limit: {limit_s}s\nconstraints: {{gpus_per_host: 1, hosts: [{liar.host}, {honest}]}}\n"
        f"command: {json.dumps(['sh', '-c', command])}\n",
    )  # fmt: skip


def told(scene, job):
    """Return all of the head's output about a job."""
    record = json.loads((scene.cluster.home / "jobs" / job / "state.json").read_text())
    said = []
    with suppress(FileNotFoundError):
        kinds = "note", "host", "state"  # a job that waits may begin again before its record is read
        said = [json.dumps(event) for event in events(scene.cluster, job) if event["kind"] in kinds]
    return record, "\n".join([record["reason"], *said])


def has_ended_or_waits(scene, job):
    """Whether a job has ended, or could not start on its hosts: gpurun would place it there again after a pause."""
    record = scene.cluster.record(job)
    return record["ended_s"] is not None or (record["state"] == "QUEUED" and record["placements"] > 0)


def ready_of(scene, jobs, found):
    return [job for job in jobs if job not in found and has_ended_or_waits(scene, job)]


@pytest.mark.parametrize("plan", [pytest.param(STORY, marks=pytest.mark.story), LIES], ids=["some", "others"])
def test_whatever_an_agent_answers_it_harms_its_own_gangs_and_is_named(scene, liar, plan):
    """The host has GPUs for two gangs at once, so it takes its harmless lies first. Those gangs have more time."""
    mine, sizes = liar(plan), Sizes()
    sizes.start()
    jobs = [submit(scene, mine, f"lie{n}", limit_s=300 if lie in HARMLESS else 5) for n, lie in enumerate(plan)]
    found = {}
    while len(found) < len(jobs):
        until(lambda: ready_of(scene, jobs, found), lambda: [told(scene, job) for job in jobs], every_s=LOOK_S)
        for job in ready_of(scene, jobs, found):
            found[job] = told(scene, job)
            if found[job][0]["ended_s"] is None:  # it would be placed again meanwhile
                assert scene.cluster.gpurun("cancel", job).code == 0
    sizes.ended.set()
    turns, wrong = mine.turns(), []
    for job in jobs:
        lie = plan[turns[job]]
        record, said = found[job]
        if lie in HARMLESS and record["state"] != "SUCCEEDED":
            wrong.append((lie, record["state"], record["reason"]))
        if lie not in HARMLESS and mine.host not in said:
            wrong.append((lie, record["state"], record["reason"], "nobody is named"))
        if sizes.kib.get(job, 0) > MOST_KIB:
            wrong.append((lie, sizes.kib[job]))
        log = scene.cluster.log(job)
        if "forged" in log or "\x1b" in said:
            wrong.append((lie, "its words were taken"))
    assert wrong == []
    mine.repent()
    mine.clean()
    assert not list(scene.cluster.folder.rglob("*owned*"))
    assert not Path("/tmp/owned").exists()
    assert not Path("/etc/owned").exists()
    scene.assert_unharmed()


def test_a_host_that_says_all_is_gone_while_its_container_runs_gives_its_gpus_to_nobody(scene, liar):
    """The next gang's claim is made at the host's Docker, which is honest, by an agent that is."""
    mine = liar([{"gang.fence": "all_gone", "docker.request": "rubbish", "gang.signal": "rubbish"}])
    first = submit(scene, mine, "first", "sleep 600", limit_s=300)
    scene.cluster.wait_for(first, "RUNNING")
    assert scene.cluster.gpurun("cancel", first).code == 0
    scene.cluster.wait_for(first, "CANCELLED")
    running = ["docker", "ps", "-q", "--filter", f"label=gpurun.job={first}"]
    assert scene.cluster.lab.run(mine.host, running).stdout, "it lied"
    mine.repent()
    second = scene.start(
        "second",
        f"image: {IMAGE}\ngpus: 2\nlauncher: tasks\nconstraints: {{gpus_per_host: 2, hosts: [{mine.host}]}}\n"
        "command: [sh, -c, 'echo got in']\n",
    )  # fmt: skip
    wait_until(lambda: first in json.dumps(told(scene, second)))
    assert "got in" not in scene.cluster.log(second)
    scene.cluster.lab.run(mine.host, ["sh", "-c", "docker ps -aq --filter label=gpurun.job | xargs -r docker rm -f"])
    scene.cluster.gpurun("recover", "--claims", "-i", str(scene.cluster.inventory))
    scene.cluster.wait_for(second, "SUCCEEDED")
    scene.cluster.lab.run(
        mine.host, ["rm", "-rf", f"/home/train/.gpurun/jobs/{first}", f"/home/train/.gpurun/outputs/{first}"]
    )
    scene.assert_unharmed()
