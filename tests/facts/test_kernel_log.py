"""Lines of kernel logs: as people have posted them, where a comment says who, and others written by hand in the wording
of the driver or the kernel; and lines that users could forge parts of, which are all by hand. Some are cut short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.doctor.findings import XIDS, xid
from gpurun.facts import LinkLine, OomLine, XidLine, parse_kernel_line, same_gpu
from gpurun.node.job.watch import _WORTH

ID = "00748bf4e957f82c239a1db8a88579059b7d40c7b5fbd3f43617d31d3f646f12"

XID_LINES = [
    # an H200 with driver 580.159.04, after a kernel wrote to an address that was not its own
    ("NVRM: Xid (PCI:0000:00:06): 31, pid=795, name=python3, channel 0x0000000a, intr 00000000. MMU Fault: ENGINE "
     "GRAPHICS GPC1 GPCCLIENT_T1_8 faulted @ 0x0_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
     "0000:00:06", 31),
    # NVIDIA/open-gpu-kernel-modules issue 1151
    ("NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus.", "0000:2b:00", 79),
    ("NVRM: GPU 0000:2b:00.0: GPU has fallen off the bus.", "0000:2b:00", 79),
    # pastebin C4RfJB4y, driver 304
    ("NVRM: GPU at 0000:01:00.0 has fallen off the bus.", "0000:01:00", 79),
    # a log kept in leptonai/gpud, cut short
    ("NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 7, TPC 7",
     "0000:cb:00", 13),
    # NVIDIA's "XID Errors", section 2.1
    ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "0000:03:00", 14),
    # akash-network/support issue 244
    ("NVRM: Xid (PCI:0000:00:08): 94, pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No",
     "0000:00:08", 94),
    # forums.developer.nvidia.com, "Xid 62 / Xid 154 GSP PMU halt crash on RTX PRO 6000 Blackwell"
    ("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
     "0000:01:00", 154),
    # leptonai/gpud pull request 1160
    ("NVRM: Xid (PCI:0000:01:00): 144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008 0x00000000 0x00000000)",
     "0000:01:00", 144),
    # by hand: AWS's line for trying out a replacement of nodes, with the letters of the address in capitals
    ("NVRM: Xid (PCI:0000:B9:00): 74, pid=<unknown>, name=<unknown>, NVLink: fatal error detected on link 6(0x10000)",
     "0000:b9:00", 74),
    # by hand: an instance of a partitioned GPU
    ("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 31, pid=2153, name=python3, Ch 00000008, intr 10000000. MMU Fault: ENGINE",
     "0000:3b:00", 31),
]  # fmt: skip

OOM_LINES = [
    # dyrnq/install-docker issue 14
    ("oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=aegis,mems_allowed=0,global_oom,"
     f"task_memcg=/system.slice/docker-{ID}.scope,task=java,pid=7134,uid=1000", 7134, False, ID),
    # by hand: the same of a container's limit, under cgroup v1
    (f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset={ID},mems_allowed=0,oom_memcg=/docker/{ID},"
     f"task_memcg=/docker/{ID},task=python3,pid=15617,uid=0", 15617, True, ID),
    # by hand: the limit of a group that contains the container: not the job's own
    ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/system.slice,"
     f"task_memcg=/system.slice/docker-{ID}.scope,task=python3,pid=15617,uid=0", 15617, False, ID),
    # docker/for-linux issue 1001, cut short
    ("Memory cgroup out of memory: Killed process 15617 (python3) total-vm:11892kB, anon-rss:4kB", 15617, True, ""),
    # apache/doris issue 3525, kernel 3.10
    ("Memory cgroup out of memory: Kill process 24984 (palo_be) score 968 or sacrifice child", 24984, True, ""),
    # by hand: the wording of the kernel's mm/oom_kill.c
    ("Out of memory: Killed process 1234 (python) total-vm:9kB, UID:1000 pgtables:1kB oom_score_adj", 1234, False, ""),
]  # fmt: skip


LINK_LINES = [
    # by hand, in the wording of the drivers' sources
    ("mlx5_core 0000:3b:00.0 ens1f0np0: Link down", "ens1f0np0"),
    ("mlx5_core 0000:af:00.0: Port module event: module 0, Cable unplugged", "0000:af:00.0"),
    ("mlx5_core 0000:af:00.0: Port module event[error]: module 1, Cable error, Bus stuck", "0000:af:00.0"),
    ("mlx4_en: ens3: Link Down", "ens3"),
    ("i40e 0000:02:00.0 ens2f0: NIC Link is Down", "ens2f0"),
    ("bnxt_en 0000:5e:00.0 eth0: NIC Link is Down", "eth0"),
    ("tg3 0000:04:00.0 eth0: Link is down", "eth0"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "device"), LINK_LINES)
def test_links_that_go_down(line, device):
    assert parse_kernel_line(line) == LinkLine(device)
    assert _WORTH.match(line), "a host passes it on"


@pytest.mark.parametrize(("line", "pci", "number"), XID_LINES)
def test_errors_of_gpus(line, pci, number):
    assert parse_kernel_line(line) == XidLine(pci, number)


@pytest.mark.parametrize(("line", "pid", "limit", "container"), OOM_LINES)
def test_killed_processes(line, pid, limit, container):
    assert parse_kernel_line(line) == OomLine(pid, limit, container)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "NVRM: Xid",
        "NVRM: Xid (PCI:0000:2b:00): , pid=1",
        "NVRM: Xid (PCI:0000:2b:00): 99999, too long",
        "NVRM: Xid (PCI:zzzz:2b:00): 79",
        "audit: comm=NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus.",
        "NVRM: GPU at PCI:0000:3b:00: GPU-b850f46d-d5ea-c752-ddf3-c4453e44d3f7",
        "usb 1-1: Product: Out of memory: Killed process 1 (init)",
        "oom-kill:constraint=CONSTRAINT_NONE,task=x,pid=1",
        "python invoked oom-killer: gfp_mask=0xd0, order=0, oom_score_adj=0",
        "NVRM: Xid (PCI:0000:2b:00" + " " * 60 + "): 79",
        "mlx5_core 0000:3b:00.0 ens1f0np0: Link up",
        "mlx5_core 0000:af:00.0: Port module event: module 0, Cable plugged",
        "br0: port 2(veth1) entered disabled state",
        "audit: comm=mlx5_core 0000:3b:00.0 ens1f0np0: Link down" + " " * 9,
    ],
)
def test_what_only_looks_like_one(line):
    assert parse_kernel_line(line) is None


def test_a_process_named_to_deceive_moves_no_blame():
    name = ",pid=1,uid=0"  # 15 letters are a process's own to choose
    line = f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task_memcg=/user.slice,task={name},pid=777,uid=1000"
    assert parse_kernel_line(line) == OomLine(777, False, "")
    deceit = f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task_memcg=/x,task=docker-{ID},pid=7,uid=1000"
    assert parse_kernel_line(deceit) == OomLine(7, False, "")


@given(st.text(max_size=300))
def test_no_line_breaks_the_parser(text):
    for start in (
        "",
        "NVRM: Xid (",
        "NVRM: Xid (PCI:0000:2b:00): ",
        "oom-kill:constraint=CONSTRAINT_NONE,",
        "NVRM: GPU ",
        "mlx5_core 0000:3b:00.0 ",
        "mlx5_core 0000:3b:00.0: Port module event",
    ):
        parse_kernel_line(start + text)


def test_addresses_are_compared_as_nvml_and_the_kernel_write_them():
    assert same_gpu("0000:3b:00", "0000:3b:00.0")
    assert same_gpu("0000:3b:00", "00000000:3B:00.0")
    assert not same_gpu("0000:3b:00", "0000:3c:00.0")
    assert not same_gpu("0000:3b:00", "")


# What NVIDIA's catalog says of Ampere and newer, as read in November 2026: its buckets of immediate actions.
RESETS = {46, 48, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 158}
RESETS_BUT_GOES_ON = {109, 155, 156}
CHECK_THE_PROGRAM = {11, 13, 25, 31, 69, 80, 137}
HEALTHY_FOR_THE_DEVICE_PLUGIN = {13, 31, 43, 45, 68, 109}


def test_what_no_healthy_gpu_does_costs_the_host():
    assert {number for number in RESETS if xid(number).blame != "hardware"} == set()
    assert {number for number in RESETS - {79} if xid(number).advice != "reset the GPU"} == set()
    assert {number for number, meant in XIDS.items() if meant.blame == "hardware"} == RESETS | {54}


def test_programs_never_cost_a_host():
    programs = CHECK_THE_PROGRAM | (HEALTHY_FOR_THE_DEVICE_PLUGIN - {109})
    assert {number for number in programs if xid(number).blame != "program"} == set()
    assert not [number for number in RESETS_BUT_GOES_ON if xid(number).blame == "hardware"]
    assert not [number for number, meant in XIDS.items() if meant.fatal and meant.blame in ("program", "unclear")]
    assert xid(12345).blame == "unclear"


def test_a_bus_or_a_contained_error_is_the_hosts_and_no_more():
    assert [xid(number).blame for number in (32, 94, 109)] == ["host"] * 3
