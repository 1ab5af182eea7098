"""A host with targets for a hostile program or host, and checks that they were not harmed."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterable
from pathlib import Path

from cluster import Cluster
from faulting import events

from gpurun.lab import engine

IMAGE = "gpurun/hostile:2"
DOCKERFILE = """FROM gpurun/tiny:1
RUN cp $(readlink -f /usr/bin/python3) /rootpython && chmod 6755 /rootpython
"""
TRICKS = Path(__file__).parent / "hostile" / "tricks.py"
NEIGHBOUR = """
i=0
while [ ! -e /out/go ]; do i=$((i+1)); echo "line $i"; sleep 0.1; done
cp /run/secrets/token /out/mine
echo "last $i"
"""
LIST = r"""
import hashlib, json, os, re, stat, sys
found, skipped = {}, re.compile(sys.argv[1])
def note(path):
    if skipped.fullmatch(path):
        return
    status = os.lstat(path)
    digest = ""
    if stat.S_ISREG(status.st_mode):
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    if stat.S_ISLNK(status.st_mode):
        digest = os.readlink(path)
    changed_ns = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
    found[path] = [status.st_ino, status.st_mode, status.st_uid, changed_ns, digest]
    if stat.S_ISDIR(status.st_mode):
        for name in os.listdir(path):
            note(os.path.join(path, name))
for top in sys.argv[2:]:
    if os.path.lexists(top):
        note(top)
print(json.dumps(found))
"""
"""Prints the values that reveal a change of any file below some folders: inode, mode, owner, ctime, content."""

OURS = (
    "/home/train/.gpurun", "/home/train/.gpurun/jobs", "/home/train/.gpurun/outputs", "/home/train/.cache",
    "/home/train/.local/state/gpurun/images.json",
)  # fmt: skip
"""Folders that come with the first job of a host."""


def build_image(folder: Path) -> None:
    """Build an image with Python and a setuid program of root's."""
    (folder / "Dockerfile").write_text(DOCKERFILE)
    environ = {**os.environ, "DOCKER_HOST": engine.ensure(), "DOCKER_BUILDKIT": "0"}
    argv = ["docker", "build", "-q", "--network", "none", "-t", IMAGE, str(folder)]
    subprocess.run(argv, env=environ, check=True, stdout=subprocess.DEVNULL)


class Scene:
    """Secrets of the SSH user, of the head's user and of a neighbour job; and all files that must not change."""

    def __init__(self, cluster: Cluster, hosts: Iterable[str]) -> None:
        self.cluster, self.hosts = cluster, tuple(hosts)
        self.words = {name: f"{name}-{secrets.token_hex(16)}" for name in ("host", "head", "neighbour")}
        self.own = cluster.folder / "own"
        self.own.mkdir()
        (self.own / "secret").write_text(self.words["head"])
        (self.own / "secret").chmod(0o600)
        for host in self.hosts:
            script = 'umask 077; mkdir -p ~/planted/folder; echo "$0" | tee ~/planted/secret >~/planted/folder/secret'
            done = cluster.lab.run(host, ["sh", "-c", script, self.words["host"]], user="train")
            assert done.code == 0, done.stderr
        self._neighbour = ""
        self._before: dict[str, dict] = {}

    @property
    def targets(self) -> tuple[str, ...]:
        """Where links lead: what the SSH user can read, and what the head's user can."""
        return (
            "/home/train/planted/secret",
            str(self.own / "secret"),
            "/home/train/planted/folder/secret",
            "/etc/shadow",
        )

    def start(self, name: str, recipe: str, *flags: str) -> str:
        folder = self.cluster.folder / name
        folder.mkdir()
        (folder / "recipe.yaml").write_text(recipe)
        (folder / "tricks.py").write_bytes(TRICKS.read_bytes())
        done = self.cluster.gpurun("submit", str(folder), "-i", str(self.cluster.inventory), *flags)
        assert done.code == 0, done.err
        return done.out.strip()

    def play(
        self, name: str, *tricks: str, hosts: Iterable[str] = (), gpus: int = 0, more: str = "", **environ: object
    ) -> str:
        """Start a job whose program plays tricks; its id."""
        hosts = list(hosts or self.hosts[:1])
        env = {"TARGETS": ":".join(self.targets), "NEIGHBOUR": self._neighbour or "j-00000000", **environ}
        return self.start(
            name,
            f"image: {IMAGE}\ngpus: {gpus or len(hosts)}\nlauncher: tasks\nworkdir: .\ngrace: 2s\n"
            "outputs: /out\noutputs_every: 1s\n"
            f"constraints: {{gpus_per_host: 1, hosts: {json.dumps(hosts)}}}\n"
            f"env: {json.dumps({name: str(value) for name, value in env.items()})}\n"
            f"command: {json.dumps(['python3', '/workspace/tricks.py', ','.join(tricks)])}\n"
            f"workdir_read_only: true\n{more}",
        )  # fmt: skip

    def begin(self) -> None:
        """Start a neighbour, let another job end, and remember all files."""
        self._start_neighbour()
        self._let_one_end()
        self.cluster.wait_for_log(self._neighbour, "line 3")
        self._before = self._files()

    def _start_neighbour(self) -> None:
        """A job beside, of the same user on the same host, which has a secret."""
        (self.cluster.folder / "token").write_text(self.words["neighbour"])
        self._neighbour = self.start(
            "neighbour",
            f"image: {IMAGE}\ngpus: 1\nlauncher: tasks\noutputs: /out\n"
            f"secrets: {{token: {self.cluster.folder}/token}}\n"
            f"constraints: {{hosts: [{self.hosts[0]}]}}\ncommand: {json.dumps(['sh', '-c', NEIGHBOUR])}\n",
        )  # fmt: skip

    def end_neighbour(self) -> None:
        """Check that the neighbour has all lines and outputs, and its secret is only in its own folder."""
        there = f"/home/train/.gpurun/outputs/{self._neighbour}"
        assert self.cluster.lab.run(self.hosts[0], ["touch", f"{there}/go"], user="train").code == 0
        record = self.cluster.wait_for(self._neighbour, "SUCCEEDED", "FAILED")
        assert (record["state"], record["reason"]) == ("SUCCEEDED", ""), record
        lines = [
            line.partition(":")[2] for line in self.cluster.log(self._neighbour).splitlines() if "<stdout>" in line
        ]
        said = [text.rpartition(":")[2] for text in lines]
        count = int(said[-1].removeprefix("last "))
        assert said == [*(f"line {number}" for number in range(1, count + 1)), f"last {count}"]
        outputs = self.cluster.home / "jobs" / self._neighbour / "outputs"
        assert sorted(path.name for path in outputs.iterdir()) == ["go", "mine"]
        assert (outputs / "mine").read_text() == self.words["neighbour"]

    def assert_unharmed(self) -> None:
        """Check that no other file was changed or added, and no secret was copied. Wait for the neighbour's end."""
        now = self._files()
        for place, before in self._before.items():
            changed = {path: (before.get(path), now[place].get(path)) for path in {*before, *now[place]}}
            changed = {path: both for path, both in changed.items() if both[0] != both[1]}
            assert changed == {}, (place, changed)
        self.end_neighbour()
        for word in (self.words["host"], self.words["head"]):
            self.assert_nowhere(word, self.cluster.home)

    def assert_nowhere(self, word: str, *folders: Path) -> None:
        """Check that neither the head's folders nor jobs' files on the hosts contain it."""
        for folder in folders:
            found = subprocess.run(
                ["grep", "-rlaF", "--devices=skip", word, str(folder)], capture_output=True, text=True
            )
            assert found.stdout == "", found.stdout
        for host in self.hosts:
            found = self.cluster.lab.run(host, ["grep", "-rlaF", "--devices=skip", word, "/home/train/.gpurun"])
            assert found.stdout == b"", found.stdout

    def end_of(self, job: str, *states: str) -> dict:
        """The record of a job that has ended, and all of whose hosts were fenced."""
        record = self.cluster.wait_for(job, *(states or ("SUCCEEDED", "FAILED", "CANCELLED")))
        lost = [event for event in events(self.cluster, job) if event.get("state") == "not fenced"]
        assert lost == [], lost
        assert not list((self.cluster.home / "leases").glob(f"{job}*"))
        return record

    def kill(self, job: str) -> None:
        """End a job's containers, as somebody else on the host may."""
        listing = f"docker ps -q --filter label=gpurun.job={job} | xargs -r docker kill"
        for host in self.hosts:
            self.cluster.lab.run(host, ["sh", "-c", listing])

    def notes(self, job: str) -> str:
        return "\n".join(event.get("text", "") for event in events(self.cluster, job) if event["kind"] == "note")

    def _files(self) -> dict[str, dict]:
        mine = self._neighbour.removeprefix("j-") or "none"
        others = rf"/home/train/\.gpurun/(jobs|outputs)/\.?(j-(?!{mine})|gpurun-).*"
        live = rf".*/\.cache/gpurun.*|.*/j-{mine}/(run|outputs).*|/home/train/\.gpurun/outputs/j-{mine}.*|.*\.lock"
        live += r"|/home/train/\.gpurun/(signs|code).*"  # each probe leaves one for an hour; each job its code
        roots = ["/home", "/root", "/opt", "/srv", "/etc", "/tmp", "/var/tmp", "/var/spool"]
        found = {}
        for host in self.hosts:
            done = self.cluster.lab.run(host, ["python3", "-c", LIST, f"{others}|{live}", *roots])
            assert done.code == 0, done.stderr
            found[host] = {path: marks for path, marks in json.loads(done.stdout).items() if path not in OURS}
        argv = ["python3", "-c", LIST, "nothing", str(self.own), str(self.cluster.lab.folder / "id_ed25519")]
        argv += [str(self.cluster.home / "jobs" / job) for job in self.ended]
        found["head"] = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
        return found

    @property
    def ended(self) -> list[str]:
        """Jobs on the head that had ended before."""
        return getattr(self, "_ended", [])

    def _let_one_end(self) -> None:
        """A job with outputs that is over: its folder on the head stays as it is."""
        job = self.start(
            "before",
            f"image: {IMAGE}\ngpus: 1\nlauncher: tasks\noutputs: /out\nconstraints: {{hosts: [{self.hosts[0]}]}}\n"
            f"command: [sh, -c, 'echo done >/out/done']\n",
        )  # fmt: skip
        self.end_of(job, "SUCCEEDED")
        self._ended = [job]
