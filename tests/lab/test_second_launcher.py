"""A launcher that the ranks start themselves is named while the gang runs, on real hosts."""

from __future__ import annotations

import pytest
from cluster import TINY
from faulting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("second launcher")]

HIDES = "import subprocess, sys\nsubprocess.run([sys.executable, '/workspace/torchrun', 'train.py'])\n"


def test_a_launcher_below_ranks_is_named_in_status(cluster, tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "hides.py").write_text(HIDES)
    (tmp_path / "w" / "torchrun").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    args = cluster.submit_args("--launcher", "tasks", "--workdir", str(tmp_path / "w"), image=TINY)
    job = cluster.gpurun(*args, "--", "python3", "hides.py").out.strip()
    cluster.wait_for_log(job, "up", times=2)
    wait_until(lambda: cluster.status(job)["jobs"][0]["warnings"])
    (said,) = cluster.status(job)["jobs"][0]["warnings"]
    assert said.startswith("2 ranks each started torchrun itself") and "--one-per-host" in said
    assert f"   warning  {said}" in cluster.gpurun("status", job).out
    assert cluster.gpurun("cancel", job).code == 0
