"""Caches of models on a real host: the user's next job has them, nobody else's, and never more than the limit."""

from __future__ import annotations

import json
import shutil

import pytest
from cluster import TINY, Cluster
from faulting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("caches")]

HOST = "gpu-r1-01"
USES = """
import os, sys, time
top, hub = os.environ['XDG_CACHE_HOME'], os.environ['HF_HOME'] + '/hub'
print('found', *sorted(os.listdir(hub)) if os.path.isdir(hub) else [], flush=True)
for name in sys.argv[1:]:
    if name == 'hostile':
        for link, to in (('ssh', '/home/train/.ssh'), ('huggingface/hub/models--link', '/home/train'), ('torch', '/')):
            os.symlink(to, os.path.join(top, link))
        os.mkfifo(top + '/pipe')
        open(os.path.join(os.fsencode(top), b'\\xff\\n\\x1b[2J'), 'w').close()
        os.makedirs(top + '/closed/inner')
        os.chmod(top + '/closed', 0)
        os.chmod(top, 0)
    elif name == 'wait':
        while not os.path.exists('/run/gpurun-caches/go'):
            time.sleep(0.1)
        os.remove('/run/gpurun-caches/go')
    else:
        os.makedirs(f'{hub}/models--{name}/blobs', exist_ok=True)
        with open(f'{hub}/models--{name}/blobs/x', 'wb') as file:
            file.write(os.urandom(6 << 20))
        print('downloaded', name, flush=True)
"""


def start(cluster: Cluster, *words: str) -> str:
    folder = cluster.folder / "code"
    folder.mkdir(exist_ok=True)
    (folder / "uses.py").write_text(USES)
    done = cluster.gpurun(
        "submit", "-i", str(cluster.inventory), "-n", "1", "--image", TINY, "--launcher", "tasks", "--host", HOST,
        "--workdir", str(folder), "--", "python3", "uses.py", *words,
    )  # fmt: skip
    assert done.code == 0, done.err
    return done.out.strip()


def found_by(cluster: Cluster, *words: str) -> list[str]:
    """The models that a job finds when it begins."""
    job = start(cluster, *words)
    cluster.wait_for(job, "SUCCEEDED")
    return cluster.log(job).split("found", 1)[1].splitlines()[0].split()


def caches(cluster: Cluster, *words: str) -> dict:
    """What `gpurun du` or `gpurun prune` says of the host."""
    done = cluster.gpurun(*words, "--caches", "--host", HOST, "-i", str(cluster.inventory), "--json")
    assert done.code == 0, done.err
    (told,) = json.loads(done.out)["caches"] or [{"bytes": 0, "jobs": [], "stuck": []}]
    return told


def test_the_next_job_of_the_user_has_what_was_downloaded_and_nothing_leads_out(cluster, tmp_path):
    cluster.inventory = shutil.copy(cluster.inventory, cluster.inventory.with_name("caches.yaml"))
    done = cluster.gpurun("inventory", "set", HOST, "cache_quota_mib=16MiB", "-i", str(cluster.inventory), "--yes")
    assert done.code == 0, done.err
    (tmp_path / "other").mkdir()
    other = Cluster(cluster.lab, tmp_path / "other")
    other.inventory = cluster.inventory
    keys = cluster.lab.run(HOST, ["sh", "-c", "cat ~train/.ssh/*; ls -ln ~train/.ssh"]).stdout
    try:
        assert found_by(cluster, "one", "two", "hostile") == []
        assert caches(cluster, "du")["bytes"] >= 12 << 20, "the fence has left it, and a closed folder hides nothing"
        first = start(cluster, "wait")
        cluster.wait_for_log(first, "models--one models--two")
        assert found_by(cluster, "three") == ["models--link", "models--one", "models--two"], "two jobs at the same time"
        assert caches(cluster, "prune", "--keep-below", "0MiB", "--yes")["jobs"] == [first], (
            "nothing goes while it is used"
        )
        assert found_by(other) == [], "another user's job"
        cluster.lab.run(HOST, ["sh", "-c", "for top in ~train/.gpurun/caches/*/files; do : > $top/go; done"])
        cluster.wait_for(first, "SUCCEEDED")
        assert caches(cluster, "du")["bytes"] >= 18 << 20, "jobs may exceed the limit while they run"
        assert found_by(cluster)[-2:] == ["models--three", "models--two"], "the oldest model has gone, as a whole"
        assert caches(cluster, "du")["bytes"] <= 16 << 20
        told = caches(cluster, "prune", "--keep-below", "0MiB", "--yes")
        assert (told["bytes"], told["stuck"]) == (0, [])
        assert caches(cluster, "du")["bytes"] == 0
        assert cluster.lab.run(HOST, ["sh", "-c", "cat ~train/.ssh/*; ls -ln ~train/.ssh"]).stdout == keys
        assert found_by(cluster, "one") == []
    finally:
        other.cancel_all()
        other.end_processes()
        wait_until(lambda: not list((other.home / "leases").glob("[!.]*")))
        cluster.lab.run(HOST, ["sh", "-c", "rm -rf ~train/.gpurun/caches"])
        cluster.inventory.unlink()
        cluster.inventory = cluster.lab.inventory
