"""Data sets on real hosts: mounted read-only, once on each disk, from a neighbour where one has them."""

from __future__ import annotations

import json
import os

import pytest
from cluster import TINY

from gpurun.lab import network

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("data")]

SIZE = 8 << 20
READ = "cat /data/set/hello; cksum < /data/set/noise; touch /data/set/new 2>&1; ls /data"


def run(cluster, top, *flags, gpus=2):
    flags = ("--launcher", "tasks", "--data", f"set={top}", *flags)
    return cluster.submit(*flags, gpus=gpus, image=TINY, command=["sh", "-c", READ])


def sent_by_head(cluster):
    return network.traffic(cluster.lab.name)["head"].from_bytes


def test_data_come_once_to_each_host_and_outlive_their_folder(cluster, tmp_path):
    top = tmp_path / "data"
    top.mkdir()
    (top / "noise").write_bytes(os.urandom(SIZE))
    (top / "hello").write_text("hello from the data\n")
    done = run(cluster, top, "--host", "gpu-r1-02", gpus=1)
    assert done.code == 0, done.err
    before = sent_by_head(cluster)
    done = run(cluster, top, "--host", "gpu-r1-02", gpus=1)
    assert done.code == 0, done.err
    assert "hello from the data" in done.out
    assert "ead-only" in done.out  # a program that writes to the data gets an error
    assert sent_by_head(cluster) - before < SIZE // 8, "nothing of the data travels again"

    (first,) = [job["id"] for job in cluster.status()["jobs"] if "gpu-r1-02" in job["hosts"]][:1]
    (top / "hello").write_text("something else\n")
    (sets,) = json.loads(cluster.gpurun("data", "list", "-i", str(cluster.inventory), "--json").out)["sets"]
    assert (sets["hosts"], sets["source"], sets["jobs"]) == (["gpu-r1-02"], str(top), [])
    done = cluster.gpurun("rerun", first, "--follow")
    assert done.code == 0, done.err
    assert "hello from the data" in done.out

    shown = json.loads(cluster.gpurun("show", first, "--json").out)["inputs"]
    assert shown["data.set.digest"] == sets["digest"]
    done = cluster.gpurun("data", "evict", "--unused", "--yes", "--json", "-i", str(cluster.inventory))
    assert json.loads(done.out)["evicted"] == {sets["digest"]: ["gpu-r1-02"]}
    done = cluster.gpurun("rerun", first)
    assert done.code == 2
    assert "is no longer in" in done.err


def test_a_folder_that_hosts_lack_is_named_before_anything_starts(cluster):
    done = cluster.submit("--launcher", "tasks", "--data", "a=host:/etc/ssh", "--data", "b=host:/none", image=TINY)
    assert done.code != 0
    assert "the data set 'b' cannot be mounted: /none" in done.err
