"""Describe exit codes for people: a program that a signal ended exits with 128 and the signal's number. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable

_FULL = "/dev/shm is full: `shm_size` makes it larger"  # noqa: S108 (words)
_MEANT = {
    signal.SIGBUS: f"usually {_FULL}",
    signal.SIGKILL: "somebody, or the kernel for lack of memory, killed it",
    signal.SIGSEGV: "it used memory that it does not have",
    signal.SIGABRT: "it aborted itself, as after a failed assertion",
    signal.SIGILL: "it was built for another processor",
    signal.SIGFPE: "it divided by zero",
    signal.SIGXFSZ: "it wrote a larger file than it may",
    signal.SIGPIPE: "nobody read what it wrote",
}

_SAYS_FULL = ("killed by signal: Bus error", "insufficient shared memory", "failed to extend /dev/shm/")
_NEEDS_ROOM, _NO_ROOM = ("shared memory", "/dev/shm", "Call to posix_fallocate"), "No space left on device"  # noqa: S108 (words)


def code_words(code: int | None) -> str:
    """Describe an exit code: ``exit code 135 (SIGBUS: usually /dev/shm is full: …)``; ``exit code 3``."""
    try:
        sent = signal.Signals((code or 0) - 128)
    except ValueError:
        return f"exit code {code}"
    meant = f": {_MEANT[sent]}" if sent in _MEANT else ""
    return f"exit code {code} ({sent.name}{meant})"


def full_shm_words(code: int | None, lines: Iterable[str]) -> str:
    """Return words for a rank that failed because ``/dev/shm`` is full, but not by SIGBUS itself; else "".

    The kernel sends SIGBUS to a data loader's process, or NCCL's file cannot grow; the rank then raises an error.

    Args:
        lines: what the rank printed last, with the messages of PyTorch (``torch/csrc/DataLoader.cpp``,
            ``MapAllocator.cpp``) or NCCL (``misc/shmutils.cc``).
    """
    is_told = code == 128 + signal.SIGBUS
    return f"probably {_FULL}" if not is_told and any(map(_is_about_shm, lines)) else ""


def _is_about_shm(line: str) -> bool:
    return any(said in line for said in _SAYS_FULL) or (_NO_ROOM in line and any(said in line for said in _NEEDS_ROOM))
