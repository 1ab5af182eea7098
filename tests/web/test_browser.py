"""``gpurun web`` as a process, over HTTP and in a real browser."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from sites import HOSTILE, log, new_job

CHROMIUM = shutil.which("chromium-headless-shell")


@pytest.fixture
def call(home):
    calls = []

    def begin(*argv):
        environ = {**os.environ, "GPURUN_HOME": str(home), "GPURUN_INVENTORY": str(home.parent / "inventory.yaml")}
        calls.append(subprocess.Popen(
            [sys.executable, "-m", "gpurun", "web", *argv], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        ))  # fmt: skip
        return calls[-1], calls[-1].stdout.readline().strip()

    yield begin
    for one in calls:
        one.terminate()
        one.communicate()


def test_over_http_the_url_lets_in_and_ctrl_c_ends_it(call, home):
    process, url = call()
    port, path = urlsplit(url).port, url[url.index("/?") :]
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/")
    answer = connection.getresponse()
    assert answer.status == 403 and b"gpurun web" in answer.read()
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    cookie = answer.headers["Set-Cookie"].partition(";")[0]
    assert answer.status == 303
    connection.request("GET", "/", headers={"Cookie": cookie})
    answer = connection.getresponse()
    assert answer.status == 200 and b"GPUs free" in answer.read()
    taken, _ = call("--port", str(port))
    assert taken.wait(30) == 2 and "gpurun cannot use port" in taken.stderr.read()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in said


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium-headless-shell")
def test_a_browser_shows_a_job_and_runs_nothing_of_it(call, home, tmp_path):
    job = new_job(home, HOSTILE)
    log(
        job, "<script>document.title = 'stolen'</script>", reports=[(step, {"loss": 1 / step}) for step in range(1, 40)]
    )
    _, url = call()
    base = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-3d-apis", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1200,900", "--hide-scrollbars"]  # fmt: skip
    page = url.replace("/?", f"/job/{job.id}?")
    drawn = subprocess.run([*base, "--dump-dom", page], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<polyline" in drawn and "loss: 0.025641 at step 39" in drawn
    assert "stolen" in drawn and "<title>stolen" not in drawn and "<script" not in drawn
    picture = tmp_path / "page.png"
    subprocess.run([*base, f"--screenshot={picture}", page], capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 10_000, "an empty page is smaller"
