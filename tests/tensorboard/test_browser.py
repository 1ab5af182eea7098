"""The printed URL in a real browser: it draws the curve that a job wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from boards import new_job, until, write

CHROMIUM = shutil.which("chromium-headless-shell")
SCREENSHOT = os.environ.get("GPURUN_SCREENSHOT")
"""Where to keep the picture for the documentation."""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium-headless-shell")
def test_a_browser_draws_the_curve(home, call, tmp_path):
    for name, last in (("lr-0.1", 60), ("lr-0.01", 90)):
        write(new_job(home, name=name).outputs, 1, last)
    board = call("lr-0.1", "lr-0.01")
    board.get(board.url[board.url.index("/?") :])
    until(lambda: board.get("/data/runs")[1].count(b"lr-") == 2)
    picture = Path(SCREENSHOT or tmp_path / "curve.png")
    base = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-3d-apis", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1200,760", "--hide-scrollbars", "--virtual-time-budget=30000"]  # fmt: skip
    drawn = subprocess.run(
        [*base, "--dump-dom", board.url], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "lr-0.1-j-" in drawn and "lr-0.01-j-" in drawn and ">loss<" in drawn
    assert drawn.count('<path class="') or drawn.count("<path ") >= 2, "a curve"
    assert ">0.0169<" in drawn.replace(" ", ""), "1 / 59, the last value of the first"
    subprocess.run([*base, f"--screenshot={picture}", board.url], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 20_000, "an empty page is smaller"
