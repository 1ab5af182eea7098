"""The pages: what they say, that they only read, and that hostile texts stay texts."""

from __future__ import annotations

import re
import time

import pytest
from sites import HOSTILE, TOKEN, ask, log, new_job

from gpurun.views.lines import MOST_METRICS, MOST_POINTS, Curves


def test_the_cluster_with_its_jobs_and_why_they_wait(door, home):
    job, large = new_job(home), new_job(home, "large", gpus=64)
    status, _, page = ask(door)
    assert status == 200
    assert "32 of 32 GPUs free on 8 hosts" in page and "n[1-8]" in page
    assert f'<a href="/job/{job.id}">{job.id}</a>' in page and large.id in page
    assert "<h2>Queue</h2>" in page and "64" in page


def test_a_job_with_its_log_and_curves(door, home):
    job = new_job(home)
    log(job, "epoch 1", "epoch 2", reports=[(step, {"loss": 1 / step}) for step in range(1, 9)])
    _, _, page = ask(door, f"/job/{job.id}")
    assert "[0] epoch 1\n[0] epoch 2" in page
    assert "loss: 0.125 at step 8" in page and "<polyline" in page
    log(job, reports=[(9, {"loss": 0.1})])
    assert "loss: 0.1 at step 9" in ask(door, f"/job/{job.id}")[2], "reports are read as they come"


def test_the_report_says_who_used_what(door, home):
    from ended_jobs import run, submit

    run(home, submit(home, name=HOSTILE), at_s=time.time() - 900, stopped_s=time.time() - 300)
    status, headers, page = ask(door, "/report")
    assert status == 200
    assert "<h1>GPU use, " in page and "<h2>By user</h2>" in page and "<svg" in page
    assert "<script" not in page and "<img" not in page and "style=" not in page
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert '<a href="/report">' in ask(door)[2]


def test_hostile_names_and_logs_stay_texts(door, home):
    job = new_job(home, HOSTILE)
    log(job, HOSTILE, "\x1b]0;title\x07", reports=[(1, {HOSTILE: 1.0}), (2, {"</svg><script>": 2.0})])
    for path in ("/", f"/job/{job.id}"):
        status, headers, page = ask(door, path)
        assert status == 200
        assert "<script" not in page and "<img" not in page and not re.search(r"[\x00-\x08\x0b-\x1f]", page)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script" not in policy and "unsafe" not in policy
        nonce = re.search(r"style-src 'nonce-([\w-]+)'", policy)[1]
        assert page.count("<style") == 1 and f'<style nonce="{nonce}">' in page and "style=" not in page
        assert not re.search(r"(src|href)=\"(?!/)", page), "nothing comes from another place"
    assert ask(door)[1]["Content-Security-Policy"] != ask(door)[1]["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path",
    ["/job/", "/job/j-00000000", "/job/../../etc/passwd", "/job/j-1", "/x", "//", "/job/cnn", "/job/\u0661", "/%00"],
)
def test_there_is_no_other_page(door, home, path):
    new_job(home)
    status, _, page = ask(door, path)
    assert status == 404 and "Traceback" not in page


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "x"])
def test_they_are_only_read(door, method):
    assert ask(door, method=method)[0] == 405


@pytest.mark.parametrize("host", ["evil.example:8000", "", "127.0.0.1.evil.example", "[::2]"])
def test_another_sites_name_for_this_machine_is_refused(door, host):
    assert ask(door, host=host)[0] == 403


@pytest.mark.parametrize("cookie", ["", "gpurun_x=1", "\udcff", f"x={TOKEN}"])
def test_nobody_gets_in_without_the_token(door, cookie):
    status, _, page = ask(door, cookie=cookie)
    assert status == 403 and "gpurun web" in page


@pytest.mark.parametrize("path", ["//evil.example/x", "/\\evil.example", "/a\r\nSet-Cookie: x=1", "/\u00e9"])
def test_the_token_leads_nowhere_else(door, path):
    status, headers, _ = ask(door, path, query=f"token={TOKEN}")
    assert status == 303
    assert re.fullmatch(r"/(?!/)[\x21-\x7e]*", headers["Location"]) and "\\" not in headers["Location"]


def test_a_wrong_inventory_is_said_and_the_page_comes_back_with_it(door, home):
    ask(door)
    door._inner._reading._for_s = 0
    inventory = home.parent / "inventory.yaml"
    before = inventory.read_text()
    inventory.write_text("version: 1\nracks: <b>\n")
    status, _, page = ask(door)
    assert status == 500 and "inventory.yaml" in page and "<b>" not in page
    inventory.write_text(before)
    assert ask(door)[0] == 200


def test_curves_are_bounded_whatever_ranks_report():
    curves = Curves()
    for step in [*range(MOST_POINTS + 10), 10**400, -(10**300)]:
        curves.add(0, step, {"loss": 1e308 if step % 2 else -1e308, "bad": float("nan"), "worse": float("inf")})
    for number in range(100):
        curves.add(0, 1, {f"metric-{number}": 1.0})
    assert len(curves.points) == MOST_METRICS and len(curves.points["loss"]) <= MOST_POINTS
    drawn = curves.drawn()
    assert len(drawn) == MOST_METRICS and all(len(each) < 60_000 for each in drawn)


def test_the_lowest_rank_counts_and_a_new_attempt_replaces_its_steps():
    curves = Curves()
    curves.add(3, 1, {"loss": 9.0})
    curves.add(1, 1, {"loss": 5.0})
    curves.add(3, 2, {"loss": 9.0})
    curves.add(1, 1, {"loss": 4.0})
    assert curves.points == {"loss": {1: 4.0}}
