from __future__ import annotations

from dataclasses import replace

import pytest

from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers.direct import UNTOLD
from gpurun.launch.output import Line
from gpurun.supervisor.verdict.decide import ContainerEnd, container_ended, rank_failed, with_last_words
from gpurun.supervisor.verdict.ends import code_words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (135, "exit code 135 (SIGBUS: usually /dev/shm is full: --shm-size (`shm_size` in a recipe) makes it larger)"),
        (
            137,
            "exit code 137 (SIGKILL: a person killed the program, "
            "or the kernel killed the program because memory ran out)",
        ),
        (139, "exit code 139 (SIGSEGV: the program used memory that it does not have)"),
        (134, "exit code 134 (SIGABRT: the program aborted, for example after a failed assertion)"),
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
    assert end.reason.endswith(
        "exit code 1; probably /dev/shm is full: --shm-size (`shm_size` in a recipe) makes it larger"
    )
    assert end.failure.reason == end.reason
    assert ended(135, said).reason.count("--shm-size") == 1


@pytest.mark.parametrize("said", OTHER)
def test_other_errors_do_not_accuse_dev_shm(said):
    assert "shm" not in ended(1, said).reason


def test_the_hint_for_the_error_that_ended_it_is_part_of_the_reason():
    end = ended(1, "Traceback (most recent call last):", "    main()", "ModuleNotFoundError: No module named 'yaml'")
    assert end.reason.startswith("rank 3 on h1 failed first, with exit code 1; neither the image nor")
    assert end.failure.reason == end.reason and end.failure.excerpt[-1].endswith("'yaml'")


def test_a_path_that_the_user_replaced_is_said_before_the_image_is_blamed():
    spec = JobSpec("n", "image:1", 4, ("python3", "train.py"), env={"PATH": "/opt/x/bin:$PATH"})
    lines = [Line(3, "stderr", "/gpurun/bin/rank: 61: exec: python3: not found")]
    end = with_last_words(rank_failed(3, "h1", 127, who="rank 3"), lines, spec)
    assert end.reason.startswith("`env` replaces the image's PATH by '/opt/x/bin:$PATH'") and end.code == 2
    untold = container_ended("h1", ContainerEnd(1.0, code=UNTOLD))
    assert "could not report its exit code: `env` replaces the image's PATH" in with_last_words(untold, [], spec).reason
    assert "disk is full" in with_last_words(untold, [], replace(spec, env={})).reason
