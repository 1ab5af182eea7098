"""Ranks that end with 0 and have never formed a group are said, on real hosts; those that have met are not."""

from __future__ import annotations

import pytest
from cluster import TINY, TRAIN

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("second launcher")]

APART = "import time\ntime.sleep(3)\nprint('trained', flush=True)\n"
TOGETHER = """
import os, socket, time
rank, address = int(os.environ['RANK']), (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))
if rank == 0:
    with socket.create_server(address) as server:
        server.accept()[0].recv(1)
else:
    while True:
        try:
            socket.create_connection(address).sendall(b'x')
            break
        except OSError:
            time.sleep(0.05)
time.sleep(2)
"""


HOROVOD = """
import sys, time
if sys.argv[1] == 'together':
    import horovod.tensorflow as h
    h.init()
time.sleep(3)
"""


@pytest.mark.parametrize(("program", "is_said"), [(APART, True), (TOGETHER, False)], ids=["apart", "together"])
@pytest.mark.parametrize("each_host", ["1", "2"])
def test_only_copies_that_never_form_a_group_are_said(cluster, tmp_path, program, is_said, each_host):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "train.py").write_text(program)
    args = cluster.submit_args(
        "--launcher", "torchrun", "--workdir", str(tmp_path / "w"), "--gpus-per-host", each_host, image=TINY
    )
    job = cluster.gpurun(*args, "--", "train.py").out.strip()
    cluster.wait_for(job, "SUCCEEDED")
    said = cluster.job(job)["warnings"]
    assert [text.startswith("the 2 ranks ended without a connection") for text in said] == [True] * is_said
    assert (
        "without a connection to each other" in (cluster.home / "jobs" / job / "events.jsonl").read_text()
    ) is is_said


@pytest.mark.train
@pytest.mark.parametrize("way", ["apart", "together"])
def test_copies_that_horovodrun_starts_are_said_if_none_calls_init(cluster, tmp_path, way):
    """It looks for networks between the hosts for seconds before it starts ranks: those connections are not theirs."""
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "train.py").write_text(HOROVOD)
    args = cluster.submit_args("--workdir", str(tmp_path / "w"), image=TRAIN)
    job = cluster.gpurun(*args, "--", "horovodrun", "-np", "2", "python3", "train.py", way).out.strip()
    cluster.wait_for(job, "SUCCEEDED")
    (said,) = cluster.job(job)["warnings"] or [""]
    assert ("without a connection to each other" in said and "horovod's init()" in said) is (way == "apart"), said
