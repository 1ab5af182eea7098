from __future__ import annotations

import pytest

from gpurun.jobs.spec import JobSpec
from gpurun.launch.output import Line
from gpurun.supervisor.exit_codes import code_words
from gpurun.supervisor.verdicts import rank_failed, with_last_words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (135, "exit code 135 (SIGBUS: usually /dev/shm is full: `shm_size` makes it larger)"),
        (137, "exit code 137 (SIGKILL: somebody, or the kernel for lack of memory, killed it)"),
        (139, "exit code 139 (SIGSEGV: it used memory that it does not have)"),
        (134, "exit code 134 (SIGABRT: it aborted itself, as after a failed assertion)"),
        (143, "exit code 143 (SIGTERM)"),
        (130, "exit code 130 (SIGINT)"),
        *((code, f"exit code {code}") for code in (0, 1, 127, 128, 255, -1, 1 << 70, None)),
    ],
)
def test_signals_have_names(code, words):
    assert code_words(code) == words


def test_a_full_dev_shm_is_named_in_the_reason():
    assert "SIGBUS: usually /dev/shm is full" in rank_failed(3, "h1", 135, who="rank 3").reason


LOADER = (
    "RuntimeError: DataLoader worker (pid 27) is killed by signal: Bus error. It is possible that dataloader's workers"
)
FULL = (
    f"{LOADER} are out of shared memory. Please try to raise your shared memory limit.",
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    "RuntimeError: unable to allocate shared memory(shm) for file </torch_12_9>: No space left on device (28)",
    "h:9621:9691 [6] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes",
    "[3] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
)
OTHER = (
    "OSError: [Errno 28] posix_fallocate: No space left on device: '/out/shard-00001.arrow'",
    "OSError: [Errno 28] No space left on device: '/out/model.pt'",
    "NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-glnlGK (size 1), error: No such file (2)",
    "[1] misc/shmutils.cc:114 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-NzwJ7O (size 9637888)",
    "RuntimeError: DataLoader worker (pid 27) is killed by signal: Killed.",
    "",
)


def ended(code, *said):
    spec = JobSpec("n", "image:1", 4, ("python3", "train.py"))
    lines = [Line(3, "stderr", each) for each in said]
    return with_last_words(rank_failed(3, "h1", code, who="rank 3"), lines, spec)


@pytest.mark.parametrize("said", FULL)
def test_a_rank_that_outlived_a_full_dev_shm_is_told_which_setting_to_change(said):
    """The signal goes to a process of its data loader; the rank itself fails with exit code 1."""
    traceback = [f'  File "train.py", line {n}, in step' for n in range(20)]
    end = ended(1, said, "Traceback (most recent call last):", *traceback, "RuntimeError: DataLoader worker exited")
    assert end.reason.endswith("exit code 1; probably /dev/shm is full: `shm_size` makes it larger")
    assert end.failure.reason == end.reason
    assert ended(135, said).reason.count("shm_size") == 1


@pytest.mark.parametrize("said", OTHER)
def test_other_errors_do_not_accuse_dev_shm(said):
    assert "shm_size" not in ended(1, said).reason
