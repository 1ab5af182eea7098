"""Live samples as a table; whatever a host says stays text."""

from pathlib import Path

from rich.console import Console

from gpurun.cli import jobs
from gpurun.cli.jobs import table
from gpurun.errors import HostUnreachable
from gpurun.facts import HostSample, sample_from_document
from gpurun.inventory.read import parse_inventory
from gpurun.remote.fleet import Fleet

GPU = {
    "index": 0, "utilization_percent": 87, "memory_used_mib": 15900, "memory_mib": 16384, "temperature_c": 91,
    "power_w": 287.4, "throttle": ["power brake"], "problem": "",
}  # fmt: skip


def shown(leased, samples):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(table(leased, samples))
    return console.export_text()


def test_a_line_for_each_leased_gpu():
    sample = sample_from_document("h1", {"gpus": [GPU, {"index": 1}], "clock_s": 1.0}, 0.0)
    text = shown({"h1": {0: "j-1", 1: "j-2", 5: "j-3"}}, {"h1": sample})
    first, second, third = text.splitlines()[1:]
    assert "87 %" in first
    assert "15.5 of 16.0 GiB" in first
    assert "91 °C" in first
    assert "power brake" in first
    assert "–" in second
    assert "does not answer" in third


def test_hosts_that_say_nothing():
    text = shown({"h1": {0: "j"}, "h2": {3: "j", 1: "j"}}, {"h2": HostSample(problem="the driver\x1b[2J hangs")})
    assert "connecting" in text
    assert "1,3" in text
    assert "\x1b" not in text


def test_a_host_that_failed_is_asked_again(monkeypatch):
    hosts = "racks: {r: {hosts: {h1: {generation: volta, gpus: 1}}}}\n"
    text = f"version: 1\nfabrics: {{tcp: {{kind: tcp, interface: eth0}}}}\n{hosts}"
    asked = []

    def fail(targets):
        asked.append([target.name for target in targets])
        return Fleet({}, {"h1": HostUnreachable("no route", host="h1")})

    def leased():
        if len(asked) > 2:
            raise KeyboardInterrupt
        return {"h1": {0: "j-1"}}

    monkeypatch.setattr(Fleet, "open", fail)
    monkeypatch.setattr("gpurun.views.feed.AGAIN_S", -1.0)
    monkeypatch.setattr("gpurun.views.feed.TICK_S", 0.01)
    monkeypatch.setattr(jobs, "REFRESH_S", 0.01)
    jobs.watch_gpus(parse_inventory(text.encode(), Path("/inventory.yaml")), leased)
    assert asked[:3] == [["h1"]] * 3
