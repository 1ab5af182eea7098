"""Live samples as a table; whatever a host says stays text."""

from rich.console import Console

from gpurun.cli.watch import table
from gpurun.facts.samples import HostSample, sample_from_document

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
