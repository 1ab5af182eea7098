from __future__ import annotations

from dataclasses import replace

import pytest

from gpurun.jobs.record import FirstFailure, State
from gpurun.jobs.spec import Grant
from gpurun.supervisor.verdict.causes import Cause, cause_of, end_of, explained, first_cause, rank_of
from gpurun.supervisor.verdict.ends import End

GRANTS = (Grant("a", (0, 1)), Grant("b", (2,)))
CONTAINER = "0" * 64
BY_LAUNCHER = End(
    State.FAILED, "rank 0 on a failed first, with exit code 134", 1,
    failure=FirstFailure("rank 0 …", rank=0, host="a", exit_code=134, excerpt=("Traceback",), kind="rank"),
)  # fmt: skip


def kernel(line, *, rank=None, age_s=0.0):
    cards = {"0": "0000:1a:00.0", "1": "0000:27:00.0", "2": "0000:34:00.0"}
    return {"kind": "kernel", "line": line, "age_s": age_s, "rank": rank, "cards": cards}


def seen(item, host="b", now_s=100.0):
    return cause_of(item, host, GRANTS, (CONTAINER,), now_s)


def test_ranks_follow_hosts_and_gpus():
    assert [rank_of(GRANTS, "a", 1), rank_of(GRANTS, "b", 2), rank_of(GRANTS, "b", 0)] == [1, 2, None]


def test_an_xid_is_traced_to_gpu_and_rank():
    cause = seen(kernel("NVRM: Xid (PCI:0000:34:00): 79, GPU has fallen off the bus.", age_s=3.0))
    assert (cause.gpu, cause.rank, cause.blame, cause.fatal, cause.at_s) == (2, 2, "hardware", True, 97.0)
    end = end_of(cause)
    assert (end.suspects, end.code, end.failure.cordon, end.failure.kind) == (("b",), 4, True, "xid")
    assert end.reason == "b: GPU 2: Xid 79: GPU has fallen off the bus (rank 2); NVIDIA advises: reboot the host"
    assert end.failure.evidence.startswith("NVRM: Xid")


def test_what_asks_for_a_reset_but_may_be_the_programs_costs_a_host_one_gang_and_no_more():
    cause = seen(kernel("NVRM: Xid (PCI:0000:1a:00): 109, pid=1, name=python, CTX SWITCH TIMEOUT"), host="a")
    assert not cause.fatal
    end = explained(BY_LAUNCHER, first_cause([cause], []))
    assert (end.suspects, end.failure.cordon, end.code) == (("a",), False, 4)
    assert end.reason.endswith("NVIDIA advises: reset the GPU")


def test_other_peoples_trouble_is_no_cause():
    assert seen(kernel("NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.")) is None  # b's GPU 0 is not ours
    assert seen(kernel("NVRM: Xid (PCI:0000:ff:00): 79, GPU has fallen off the bus.")) is None
    assert seen(kernel("Out of memory: Killed process 7 (x) total-vm:1kB")) is None
    assert seen(kernel(oom("f" * 64))) is None


def oom(container, constraint="CONSTRAINT_NONE"):
    return f"oom-kill:constraint={constraint},nodemask=(null),task_memcg=/docker/{container},task=x,pid=7,uid=1"


def test_memory_is_the_hosts_or_the_programs():
    on_host, in_limit = seen(kernel(oom(CONTAINER), rank=2)), seen(kernel(oom(CONTAINER, "CONSTRAINT_MEMCG")))
    assert (on_host.rank, end_of(on_host).suspects, end_of(on_host).failure.cordon) == (2, ("b",), False)
    assert (end_of(in_limit).suspects, end_of(in_limit).code) == ((), 1)


def test_the_first_cause_wins_over_the_avalanche():
    late = seen({"kind": "lost", "gpu": 2, "text": "GPU is lost"}, now_s=105.0)
    first = seen(kernel("NVRM: Xid (PCI:0000:1a:00): 48, An uncorrectable double bit error"), host="a", now_s=101.0)
    program = seen(kernel("NVRM: Xid (PCI:0000:27:00): 31, pid=1, MMU Fault"), host="a", now_s=100.0)
    assert first_cause([late, program, first], []) is first
    assert first_cause([program], []) is program
    assert first_cause([], ["No space left on device"]) is None


def test_a_full_disk_explains_only_who_complained():
    full = seen({"kind": "disk", "what": "Docker's disk", "path": "/var/lib/docker", "free_bytes": 5 << 20})
    assert first_cause([full], ["Killed"]) is None
    assert first_cause([full], ["OSError: [Errno 28] No space left on device: '/out/ckpt'"]) is full
    assert (end_of(full).suspects, end_of(full).failure.cordon) == (("b",), False)


def test_the_launchers_verdict_gets_its_cause():
    cause = seen(kernel("NVRM: Xid (PCI:0000:34:00): 79, GPU has fallen off the bus."))
    end = explained(BY_LAUNCHER, cause)
    assert (end.code, end.suspects, end.failure.exit_code) == (4, ("b",), 134)
    assert (end.failure.host, end.failure.rank, end.failure.excerpt) == ("b", 2, ("Traceback",))
    assert explained(BY_LAUNCHER, None) is BY_LAUNCHER
    succeeded = replace(BY_LAUNCHER, outcome=State.SUCCEEDED)
    assert explained(succeeded, cause) is succeeded


def test_a_programs_own_xid_is_only_a_hint():
    cause = seen(kernel("NVRM: Xid (PCI:0000:1a:00): 31, pid=1, name=python, MMU Fault"), host="a")
    end = explained(BY_LAUNCHER, cause)
    assert (end.code, end.suspects, end.failure.rank, end.failure.cordon) == (1, (), 0, False)
    assert "exit code 134" in end.reason and "Xid 31" in end.reason


def test_memory_errors_that_grow():
    cause = seen({"kind": "ecc", "gpu": 2, "count": 5, "before": 3})
    assert isinstance(cause, Cause)
    assert (cause.rank, cause.blame, cause.fatal) == (2, "hardware", True)
    assert "2 uncorrectable memory errors" in cause.reason


def used(is_own, kills=1):
    return {"kind": "memory", "limit_bytes": 1 << 30, "peak_bytes": 1 << 30, "is_own_limit": is_own, "kills": kills}


def test_who_exceeds_its_memory_is_named_with_what_it_had_and_used_and_the_flag_to_write():
    cause = seen(used(True))
    end = explained(BY_LAUNCHER, cause)
    assert (end.suspects, end.code, end.failure.kind) == ((), 1, "oom")
    assert end.reason.startswith("b: out of memory: the job had 1 GiB on this host and used 1 GiB")
    assert "--memory 2048MiB (`memory:` in a recipe)" in end.reason
    line = kernel(oom(CONTAINER, "CONSTRAINT_MEMCG"), rank=2)
    assert seen({**line, "memory": used(True)}).text == cause.text
    assert seen({**line, "memory": used(True)}).rank == 2


def test_the_victim_of_a_host_without_memory_is_not_at_fault_even_if_no_kernel_log_can_be_read():
    end = explained(BY_LAUNCHER, first_cause([seen(used(False))], []))
    assert (end.suspects, end.code, end.failure.cordon) == (("b",), 4, False)
    assert "the host ran out of memory" in end.reason
    limit_of_all = kernel("Memory cgroup out of memory: Killed process 7 (x) total-vm:1kB", rank=2)
    assert seen({**limit_of_all, "memory": used(False)}).blame == "host"
    assert seen({**used(True), "limit_bytes": None}).blame == "host", "a limit that is none was not reached"


def test_who_fills_the_disk_is_ended_for_it():
    item = {
        "kind": "filled",
        "what": "Docker's disk",
        "path": "/var/lib/docker",
        "free_bytes": 1 << 30,
        "written_bytes": 37 << 30,
    }
    cause = seen(item)
    assert cause.fatal
    by_container = replace(BY_LAUNCHER, suspects=("b",))
    end = explained(by_container, first_cause([cause], []))
    assert (end.suspects, end.code) == ((), 1), "another host would be filled, too"
    assert "the job filled Docker's disk with 37 GiB" in end.reason


def test_a_limit_of_processes_is_a_hint():
    end = explained(BY_LAUNCHER, first_cause([seen({"kind": "pids", "refused": 4, "most": 16384})], []))
    assert (end.code, end.failure.exit_code, end.failure.kind) == (1, 134, "pids")
    assert "failed first, with exit code 134 (b: the job has reached its limit of 16384 processes" in end.reason


DOWN = "mlx5_core 0000:3b:00.0 ens1f0np0: Link down"
COMPLAINTS = (
    "[rank3]:[E ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=21",
    "torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:219, remote process exited or there was a "
    "network error, NCCL version 2.21.5",
    "RuntimeError: NCCL error in: /opt/pytorch/ProcessGroupNCCL.cpp:1081, unhandled system error, NCCL version 2.19.3",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:36116",
)  # fmt: skip


@pytest.mark.parametrize("says", COMPLAINTS)
def test_a_link_that_went_down_explains_a_rank_that_lost_its_connections(says):
    link = seen(kernel(DOWN, age_s=60.0))
    assert (link.kind, link.host, link.fatal) == ("link", "b", False)
    cause = first_cause([link], [says], [says], now_s=100.0)
    end = explained(BY_LAUNCHER, cause)
    assert (end.suspects, end.code, end.failure.kind, end.failure.cordon) == (("b",), 4, "link", False)
    assert end.reason == "b: the network link of ens1f0np0 went down"
    assert end.failure.evidence == DOWN


def test_a_link_explains_nothing_else():
    link, says = seen(kernel(DOWN)), COMPLAINTS[0]
    assert first_cause([link], [says], ["ValueError: no such layer"], now_s=100.0) is None, "another rank was the first"
    assert first_cause([link], [], [], now_s=100.0) is None
    assert first_cause([link], [], [], now_s=100.0, hangs=True) is link
    assert first_cause([link], [says], [says], now_s=100.0 + 2101.0) is None, "the gang has survived it"
    oom = seen(oom_of_this_job())
    assert first_cause([link, oom], [says], [says], now_s=100.0) is oom
    port = seen({"kind": "link", "device": "mlx5_0 port 1", "state": "DOWN"})
    assert first_cause([port], [says], [says], now_s=100.0) is port
    assert port.evidence == "mlx5_0 port 1: ACTIVE → DOWN"


def oom_of_this_job():
    return used(True)
