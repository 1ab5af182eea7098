"""What Prometheus reads: names and units by the conventions, numbers that are true, and text that nobody can forge."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from ended_jobs import fail_once, run, submit, uses
from prometheus_client.parser import text_string_to_metric_families

from gpurun import metrics
from gpurun.cli.serve import FRESH_S, address_of
from gpurun.errors import BadInput, StateError
from gpurun.inventory.read import load_inventory
from gpurun.jobs.folder import write_use
from gpurun.jobs.record import State
from gpurun.jobs.spec import Grant
from gpurun.leases.look import Cluster
from gpurun.metrics import FAMILIES, MOST_LABEL_CHARS, Metrics, measure_all, write_textfile
from gpurun.state.hosts import Machine, Machines, Out
from gpurun.views.loopback import Remade, scrapes, server

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-4]": {}}}}
pools: {vision: {reservation: 8}}
"""
TOP = Path(__file__).parents[2]
NAME = 'a"b\\n\n# TYPE x counter\nx 1\x1b[2J'


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("GPURUN_HOME", str(home))
    monkeypatch.setenv("GPURUN_INVENTORY", str(home / "inventory.yaml"))
    home.mkdir()
    (home / "inventory.yaml").write_text(INVENTORY)
    first = submit(home)
    fail_once(home, first, at_s=110.0, stopped_s=210.0)
    run(home, first, at_s=250.0, stopped_s=350.0, use=uses(90, 91, 92, 12))
    running, _ = submit(home, name=NAME), submit(home, now_s=900.0, gpus=8)
    grants = (Grant("h1", (0, 1)), Grant("h2", (0, 1)))
    running.move(State.GRANTED, granted=grants, granted_s=950.0, attempt=1, generation="pascal")
    write_use(running, 1, uses(90, 80, 70, 60))
    return home


def text(home, now_s=1000.0):
    return measure_all(Cluster(load_inventory(home / "inventory.yaml"), home), now_s=now_s).text()


def test_what_is_told(home):
    lines = text(home, now_s=550.0).splitlines()
    for line in (
        'gpurun_hosts{state="ok"} 4',
        'gpurun_gpus{generation="pascal",state="free"} 16',  # the job above has no lease file
        'gpurun_pool_leased_gpus{pool="vision"} 4',
        'gpurun_jobs{state="GRANTED"} 1',
        'gpurun_jobs{state="QUEUED"} 1',
        'gpurun_queue_gpus{pool="vision"} 8',
        'gpurun_attempts_total{outcome="RETRIED"} 1',
        'gpurun_attempts_total{outcome="SUCCEEDED"} 1',
        'gpurun_attempts_total{outcome="FAILED"} 0',
        'gpurun_gpu_seconds_total{generation="pascal",pool="vision"} 800',
        'gpurun_failures_total{cause="xid"} 1',
        'gpurun_wait_seconds_total{pool="vision"} 50',
        'gpurun_problems 0',
    ):  # fmt: skip
        assert line in lines
    assert "gpurun_queue_oldest_wait_seconds 100" in text(home, now_s=1000.0).splitlines()
    (info,) = [line for line in lines if line.startswith("gpurun_gpu_info") and 'UUID="GPU-3"' in line]
    assert 'gpu="1",UUID="GPU-3",host="h2",job_id="j-' in info
    assert any(line.startswith("gpurun_gpu_utilization_ratio{") for line in lines)
    assert "gpurun_gpu_utilization_ratio{" not in text(home, now_s=9000.0)  # the host has been silent since


def test_hosts_that_are_out_are_told_by_user_and_their_gpus_are_not_free(home, monkeypatch):
    """Here, `monitor` measures, and has looked at no host; a host that only alice cannot reach is not out for all."""
    inventory, me = load_inventory(home / "inventory.yaml"), os.getuid()
    broken = Out("reach", "no answer", 900.0)
    outs = {"alice": {"h1": broken, "h2": broken, "h3": None}, "bob": {"h1": broken, "h2": None}}
    looks = {
        uid: {
            inventory.by_name[name].machine: Machine(name, 940.0, out=out) for name, out in outs[user].items()
        } for uid, user in ((61001, "alice"), (61002, "bob"))
    }  # fmt: skip
    monkeypatch.setattr(metrics.Machines, "users", lambda _: sorted(looks))
    monkeypatch.setattr(metrics.Machines, "read", lambda _, uid: looks.get(uid, {}))
    monkeypatch.setattr(metrics, "user_name", {61001: "alice", 61002: "bob"}.get)
    lines = text(home, now_s=1000.0).splitlines()
    for line in (
        'gpurun_hosts{state="out"} 1', 'gpurun_hosts{state="ok"} 3',
        'gpurun_gpus{generation="pascal",state="free"} 12', 'gpurun_gpus{generation="pascal",state="unavailable"} 4',
        'gpurun_host_out{host="h1",user="alice",check="reach"} 1',
        'gpurun_host_out{host="h1",user="bob",check="reach"} 1',
        'gpurun_host_out{host="h2",user="alice",check="reach"} 1',
        'gpurun_host_look_age_seconds{host="h3",user="alice"} 60',
    ):  # fmt: skip
        assert line in lines
    assert len([line for line in lines if line.startswith("gpurun_host_out{")]) == 3
    monkeypatch.undo()
    monkeypatch.setenv("GPURUN_HOME", str(home))
    Machines(home).note(looks[61001])
    assert Machines(home).users() == [me]
    (Machines(home).folder().plain / "12345.json").write_bytes(
        (Machines(home).folder().plain / f"{me}.json").read_bytes()
    )
    assert Machines(home).users() == [me], "a file that another user wrote is not that user's word"
    assert 'gpurun_hosts{state="out"} 2' in text(home, now_s=1000.0).splitlines()


def test_job_ids_are_on_info_metrics_only(home):
    named = {line.partition("{")[0] for line in text(home).splitlines() if "j-" in line and not line.startswith("#")}
    assert named == {"gpurun_job_info", "gpurun_gpu_info"}


def test_no_text_of_a_job_is_a_line_of_its_own(home):
    found = text(home)
    assert "\x1b" not in found
    assert not [
        line for line in found.splitlines() if not line.startswith(("gpurun_", "# HELP gpurun_", "# TYPE gpurun_"))
    ]
    metrics = Metrics()
    metrics.add("gpurun_hosts", float("inf"), '\\"\n')
    assert metrics.text().splitlines()[2] == r'gpurun_hosts{state="\\\"\\n"} NaN'
    assert not any("\\" in family.help for family in FAMILIES.values()), "a help with one would have to be escaped"


@pytest.mark.parametrize("pair", [("\x1b", "\\x1b"), ("x" * MOST_LABEL_CHARS, "x" * (MOST_LABEL_CHARS + 1))])
def test_labels_that_look_the_same_are_one_sample(pair):
    """node_exporter refuses a file that has a sample twice."""
    metrics = Metrics()
    for cause in pair:
        metrics.add("gpurun_failures_total", 1, cause)
        metrics.put("gpurun_gpu_utilization_ratio", 0.5, cause, "", "")
    samples = [sample for family in text_string_to_metric_families(metrics.text()) for sample in family.samples]
    assert [sample.value for sample in samples] == [0.5, 2]


def test_a_reader_of_the_format_finds_every_family_with_help_type_and_unit(home):
    """As promtool checks; its package would start a server on a machine that only runs tests."""
    families = list(text_string_to_metric_families(text(home)))
    assert len(families) > 10
    for family in families:
        assert family.documentation and family.type in ("gauge", "counter"), family.name
        assert not re.search(r"_(ms|minutes|hours|mib|percent)(_|$)", family.name), "base units"
        assert all(sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples)


def test_dashboard_and_alerts_name_metrics_that_exist(home):
    known = {line.split()[2] for line in text(home, now_s=550.0).splitlines() if line.startswith("# TYPE")}
    for file in ("gpurun-dashboard.json", "gpurun-alerts.yaml"):
        used = set(re.findall(r"\bgpurun_[a-z_]+", (TOP / "docs/prometheus" / file).read_text()))
        assert used
        assert used <= known, file
    json.loads((TOP / "docs/prometheus/gpurun-dashboard.json").read_text())


# -- the textfile ------------------------------------------------------------------------------------------


def test_the_textfile_is_whole_and_readable(gpurun, home, tmp_path):
    path = tmp_path / "gpurun.prom"
    path.write_text("old")
    os.umask(0o077)
    assert gpurun("metrics", "--textfile", str(path)) == (0, "", "")
    assert path.read_text() == gpurun("metrics")[1] or "gpurun_hosts" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [each.name for each in tmp_path.iterdir() if each.suffix in (".tmp", ".prom")] == ["gpurun.prom"]


def test_a_textfile_that_cannot_be_written_leaves_nothing(gpurun, home, tmp_path):
    assert gpurun("metrics", "--textfile", str(tmp_path / "metrics.txt"))[0] == 2
    assert gpurun("metrics", "--textfile", str(tmp_path / "none" / "x.prom"))[0] == 2
    (tmp_path / "x.prom").mkdir()
    with pytest.raises(BadInput):
        write_textfile(tmp_path / "x.prom", "text")
    assert list(tmp_path.glob(".*.tmp")) == []
    assert gpurun("metrics", "--textfile", "x.prom", "--serve", "0")[0] == 2


# -- the server --------------------------------------------------------------------------------------------


@pytest.fixture
def serve():
    made = []

    def start(make):
        one = server(("127.0.0.1", 0), scrapes(Remade(make, FRESH_S)))
        threading.Thread(target=one.serve_forever, daemon=True).start()
        made.append(one)
        return f"http://127.0.0.1:{one.server_port}"

    yield start
    for one in made:
        one.shutdown()
        one.server_close()


def get(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, "", error.read().decode()


def test_the_server_gives_metrics_and_nothing_else(serve):
    made = []
    url = serve(lambda: made.append(1) or "gpurun_x 1\n")
    assert get(f"{url}/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", "gpurun_x 1\n")
    assert get(f"{url}/metrics?x=1")[0] == 200
    assert len(made) == 1  # the second one was cheap
    for path in ("/", "/metrics/../etc/passwd", "/metricsx"):
        assert get(f"{url}{path}")[0] == 404


@pytest.mark.parametrize(
    ("method", "status", "body"), [("HEAD", 200, b""), ("POST", 405, b"read"), ("X", 405, b"read")]
)
def test_the_server_only_reads(serve, method, status, body):
    connection = socket.create_connection(("127.0.0.1", int(serve(lambda: "gpurun_x 1\n").rpartition(":")[2])), 10)
    with connection:
        connection.sendall(f"{method} /metrics HTTP/1.0\r\n\r\n".encode())
        head, _, rest = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode() and body in rest and (method != "HEAD" or not rest)


def test_a_scrape_that_fails_says_why(serve):
    def fail():
        raise StateError("the cordons are damaged")

    assert get(f"{serve(fail)}/metrics")[::2] == (500, "gpurun: the cordons are damaged\n")


def test_addresses():
    assert address_of("9836") == address_of(":9836") == ("127.0.0.1", 9836)
    assert address_of("0.0.0.0:1") == ("0.0.0.0", 1)
    assert address_of("[::1]:1") == ("::1", 1)
    for wrong in ("", "x", "localhost", "1:99999", "1:-1", "1:١"):
        with pytest.raises(BadInput):
            address_of(wrong)
    with pytest.raises(BadInput, match="cannot listen"):
        server(("203.0.113.1", 1), scrapes(Remade(str, FRESH_S)))


def test_while_a_lease_is_damaged_no_gpu_counts_as_leased_or_free(home):
    (home / "leases").mkdir(exist_ok=True)
    (home / "leases" / "j-0000000a.json").write_text("{")
    told = text(home)
    assert 'gpurun_hosts{state="unknown"} 4\n' in told
    for state, count in (("leased", 0), ("free", 0), ("unavailable", 0), ("unknown", 16)):
        assert f'gpurun_gpus{{generation="pascal",state="{state}"}} {count}\n' in told
    (home / "leases" / "j-0000000a.json").unlink()
    assert 'gpurun_gpus{generation="pascal",state="unknown"} 0\n' in text(home)
