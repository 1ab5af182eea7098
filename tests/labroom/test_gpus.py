"""The NVML stand-in, asked by the real pynvml: what is in the file is what is answered."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from ipaddress import IPv4Network

import pynvml
import pytest

from gpurun.lab.gpus import FILE, build_stand_in, change, healthy, load_gpus, save
from gpurun.lab.spec import MODELS, LabSpec, bus, hosts_of, link_ends, numa_node, nvlink_groups
from gpurun.node import nvml, nvml_apart

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc libc6-dev")


def host(generation="pascal", gpus=4):
    (made,) = hosts_of(LabSpec(racks=1, hosts=1, gpus=gpus, generation=(generation,)), IPv4Network("10.200.3.0/24"))
    return made


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """The file that the stand-in reads in this process; pynvml uses the stand-in and no other library."""
    path = tmp_path / FILE
    monkeypatch.setenv("GPURUN_LAB_GPUS", str(path))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(build_stand_in().library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def write(made):
        save(healthy("lab", made), path)
        return path

    return write


@needs_gcc
@pytest.mark.parametrize("generation", sorted(MODELS))
@pytest.mark.parametrize("count", [1, 4, 8, 16])
def test_the_probe_finds_each_generation_as_it_is(gpus, generation, count):
    gpus(host(generation, count))
    found = nvml.read_nvml(pynvml)
    assert [gpu["model"] for gpu in found["gpus"]] == [MODELS[generation].name] * count
    assert {gpu["generation"] for gpu in found["gpus"]} == {generation}
    assert {gpu["memory_mib"] for gpu in found["gpus"]} == {MODELS[generation].memory_mib}
    assert len({gpu["uuid"] for gpu in found["gpus"]}) == len({gpu["pci_bus"] for gpu in found["gpus"]}) == count
    assert [gpu["problem"] for gpu in found["gpus"]] == [""] * count
    groups = nvlink_groups(MODELS[generation], count)
    for gpu in found["gpus"]:
        group = next((group for group in groups if gpu["index"] in group), ())
        assert gpu["nvlink_peers"] == [peer for peer in group if peer != gpu["index"]]


@needs_gcc
def test_planted_faults_are_answered_at_once(gpus):
    path = gpus(host())
    for index, facts in enumerate(
        [
            {"ecc_uncorrected": "3", "retired_pages": "2", "retirement_pending": "1"},
            {"throttle": "0x40", "temperature_c": "95", "utilisation": "100", "power_w": "299"},
            {"nvlink": "0 - 3"},
            {"error": "15"},
        ]
    ):
        change(path, index, facts)
    first, hot, unlinked, lost = nvml.read_nvml(pynvml)["gpus"]
    assert (first["ecc_uncorrected"], first["retired_pages"], first["retirement_pending"]) == (3, 2, True)
    assert hot["throttle"] == ["hardware thermal slowdown"]
    assert unlinked["nvlink_inactive"] == [1]
    assert "lost" in lost["problem"].lower()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    assert pynvml.nvmlDeviceGetTemperature(handle, 0) == 95
    assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 100
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == 299_000


@needs_gcc
def test_what_makes_a_gpu_slow_is_answered_to_the_probe_and_to_the_watch_of_a_gang(gpus):
    """An idle GPU lowers the generation of its link, so that is no answer; rows exist since Ampere."""
    path = gpus(host("ampere"))
    change(path, 0, {"throttle": "0x88", "sm_mhz": "700", "utilisation": "100"})
    change(path, 1, {"pcie_width": "8", "pcie_generation": "1"})
    change(path, 2, {"pcie_generation": "1", "utilisation": "100"})
    change(path, 3, {"remapped_rows": "2", "retirement_pending": "1", "remap_failed": "1"})
    keys = "pcie_width", "pcie_max_width", "pcie_generation", "pcie_max_generation"
    links = [(16, 16, 4, 4), (8, 16, None, 4), (16, 16, 1, 4), (16, 16, None, 4)]
    probed = nvml.read_nvml(pynvml)["gpus"]
    assert [tuple(gpu[key] for key in keys) for gpu in probed] == links
    assert probed[0]["throttle"] == ["hardware slowdown", "power brake"]
    assert (probed[3]["retired_pages"], probed[3]["retirement_pending"], probed[3]["remap_failed"]) == (2, True, True)
    assert (probed[2]["retirement_pending"], probed[2]["remap_failed"]) == (False, False)
    pynvml.nvmlInit()
    watched = [nvml_apart._card(pynvml, (index, "")) for index in range(4)]
    assert [tuple(gpu[key] for key in keys) for gpu in watched] == links
    assert [(gpu["sm_mhz"], gpu["throttle"]) for gpu in watched[:2]] == [(700, probed[0]["throttle"]), (1410, [])]
    change(path, 0, {"throttle": "0x07"})
    assert nvml_apart._card(pynvml, (0, ""))["throttle"] == [], "idle, a power cap, or the user's settings: no faults"


@needs_gcc
def test_numbers_that_no_gpu_has_are_left_out(gpus):
    """The head would take the whole report of the host for broken."""
    change(gpus(host()), 0, {"pcie_width": "0", "pcie_max_width": "0xffffffff", "sm_mhz": "0xffffffff"})
    pynvml.nvmlInit()
    found, probed = nvml_apart._card(pynvml, (0, "")), nvml.read_nvml(pynvml)["gpus"][0]
    assert found["sm_mhz"] is found["pcie_width"] is found["pcie_max_width"] is probed["pcie_max_width"] is None
    assert (found["lost"], probed["problem"]) == ("", "")


@needs_gcc
@pytest.mark.parametrize("number", [2, 3, 999])
def test_a_driver_that_refuses_to_say_what_makes_a_gpu_slow_has_not_lost_it(gpus, monkeypatch, number):
    """A job ends for a GPU that is lost. With MIG, the clock and the link of a part of a GPU are not said."""

    def refuse(*_):
        raise pynvml.NVMLError(number)

    gpus(host())
    for name in ("ClockInfo", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "CurrentClocksThrottleReasons"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", refuse)
    pynvml.nvmlInit()
    found = nvml_apart._card(pynvml, (0, ""))
    assert (found["lost"], found["sm_mhz"], found["throttle"], found["pcie_width"]) == ("", None, [], None)
    assert (found["use"], found["pcie_max_width"]) == (0, 16)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda _: 0)
    assert [gpu["problem"] for gpu in nvml.read_nvml(pynvml)["gpus"]] == [""] * 4


@needs_gcc
def test_only_processes_that_live_are_listed(gpus):
    path = gpus(host())
    change(path, 0, {"processes": f"{os.getpid()}:512 4194000:100 nonsense 1", "used_mib": "3"})
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetComputeRunningProcesses_v2):
        assert [(each.pid, each.usedGpuMemory >> 20) for each in ask(handle)] == [(os.getpid(), 512), (1, 0)]
    assert pynvml.nvmlDeviceGetMemoryInfo(handle).used >> 20 == 515


@needs_gcc
def test_an_xid_is_told_once_to_those_who_listen(gpus):
    path = gpus(host())
    change(path, 0, {"xids": "31"})
    pynvml.nvmlInit()
    events = pynvml.nvmlEventSetCreate()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait_v2(events, 10)
    change(path, 0, {"xids": "31 79"})
    assert pynvml.nvmlEventSetWait_v2(events, 100_000).eventData == 79
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait_v2(events, 10)
    pynvml.nvmlEventSetFree(events)


@needs_gcc
def test_no_driver_and_a_hung_driver(gpus):
    path = gpus(host())
    path.unlink()
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()
    gpus(host())
    made = load_gpus(path)
    made["driver"]["hang_s"] = "30"
    save(made, path)
    code = f"import ctypes; ctypes.CDLL({str(build_stand_in().library)!r}).nvmlInit_v2()"
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", code], timeout=1)


@needs_gcc
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[gpu 0",
        "[gpu 0]\n",
        "[gpu 0]\nname\n=\nname = \n",
        "[gpu 0]\nname = " + "x" * 5000,
        "\0\xff[gpu 0]",
        "[gpu 1]\n",
    ],
)
def test_a_broken_file_never_breaks_who_asks(gpus, text):
    gpus(host()).write_text(text, encoding="latin-1")
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            assert len(pynvml.nvmlDeviceGetName(handle)) < 96
        except pynvml.NVMLError as error:
            assert error.value in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INSUFFICIENT_SIZE)


def test_topologies_are_those_of_real_servers():
    pascal, hopper, turing = MODELS["pascal"], MODELS["hopper"], MODELS["turing"]
    assert nvlink_groups(pascal, 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert nvlink_groups(hopper, 8) == (tuple(range(8)),)
    assert nvlink_groups(turing, 8) == nvlink_groups(pascal, 1) == ()
    assert nvlink_groups(pascal, 5) == ((0, 1, 2, 3),)
    assert link_ends(pascal, 1, 4) == ("0", "2", "3")
    assert link_ends(hopper, 0, 8) == ("switch",) * 18
    assert [numa_node(pascal, index, 4) for index in range(4)] == [0, 0, 1, 1]
    assert len({bus(index) for index in range(16)}) == 16 and bus(15) < 256
