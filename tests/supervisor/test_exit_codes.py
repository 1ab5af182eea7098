from __future__ import annotations

import pytest

from gpurun.supervisor.exit_codes import code_words
from gpurun.supervisor.verdicts import rank_failed


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
