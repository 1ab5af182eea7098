"""Describe exit codes for people: a program that a signal ended exits with 128 and the signal's number. Pure."""

from __future__ import annotations

import signal

FULL_SHM = "/dev/shm is full: --shm-size (`shm_size` in a recipe) makes it larger"  # noqa: S108 (words)
_MEANT = {
    signal.SIGBUS: f"usually {FULL_SHM}",
    signal.SIGKILL: "a person killed the program, or the kernel killed the program because memory ran out",
    signal.SIGSEGV: "the program used memory that it does not have",
    signal.SIGABRT: "the program aborted, for example after a failed assertion",
    signal.SIGILL: "the program was built for another processor",
    signal.SIGFPE: "the program divided by zero",
    signal.SIGXFSZ: "the program wrote a file larger than its limit",
    signal.SIGPIPE: "the program wrote to a pipe that nobody reads",
}


def code_words(code: int | None) -> str:
    """Describe an exit code: ``exit code 135 (SIGBUS: usually /dev/shm is full: …)``; ``exit code 3``."""
    try:
        sent = signal.Signals((code or 0) - 128)
    except ValueError:
        return f"exit code {code}"
    meant = f": {_MEANT[sent]}" if sent in _MEANT else ""
    return f"exit code {code} ({sent.name}{meant})"
