"""pip's words become one error: whose fault, why, and what to do."""

from __future__ import annotations

import pytest

from gpurun.content.build import MOST_CHARS, failure_of, hidden, tail
from gpurun.content.inside import NO_PIP, NO_VENV

CONFLICT = """ERROR: Cannot install tinyone and tinytwo<1 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested tinytwo<1
    tinyone 1.0 depends on tinytwo>=1

To fix this you could try to:
ERROR: ResolutionImpossible: for help visit https://pip.pypa.io
"""
REFUSED = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(1)': /simple/x\n"


@pytest.mark.parametrize(
    ("code", "log", "exit_code", "why"),
    [
        (NO_PIP, "", 2, "neither the image base:1 nor the head has pip"),
        (NO_VENV, "No module named 'venv'", 2, "must have Python 3.8 or newer"),
        (
            1,
            "ERROR: No matching distribution found for nosuch==1\n",
            2,
            "no package index has nosuch==1 for the Python of base:1",
        ),
        (1, CONFLICT, 2, "The user requested tinytwo<1; tinyone 1.0 depends on tinytwo>=1"),
        (1, "ERROR: Invalid requirement: 'a b' (from line 1)", 2, "a requirement cannot be read: Invalid requirement"),
        (
            1,
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM\n    idna==3 from https",
            2,
            "in the lock file: idna==3$",
        ),
        (1, "ERROR: Failed building wheel for x\ngcc: not found\n", 2, "could not be built in base:1"),
        (1, "ERROR: 401 Error, Credentials not correct for https://x/simple/a/\n" + REFUSED, 2, "wants a password"),
        (
            1,
            REFUSED + "ERROR: No matching distribution found for x\n",
            4,
            "pip cannot reach the package index: .*NewConnection",
        ),
        (1, "OSError: [Errno 28] No space left on device", 4, "the head's disk is full"),
        (137, "Collecting x", 4, "was killed"),
        (1, "", 2, "pip printed no message"),
        (2, "something\nelse", 2, r"something \| else"),
    ],
)
def test_each_failure_says_whose_fault_it_is(code, log, exit_code, why):
    error = failure_of(code, log, "base:1")
    assert error.exit_code == exit_code
    with pytest.raises(type(error), match=why):
        raise error


def test_what_only_pips_own_log_says_counts_too():
    details = "a\n2026 Could not fetch URL https://me:s3cret@x/simple/: 401 Client Error: Unauthorized for url\n"
    error = failure_of(1, "ERROR: No matching distribution found for x", "base", ("s3cret",), details)
    assert "wants a password" in error.message and "401 Client Error" in error.message and "s3cret" not in str(error)
    error = failure_of(1, "Traceback\nERROR: it is broken\nTraceback (most recent call last):\n  x", "base")
    assert error.message.endswith(": it is broken")


def test_no_message_shows_a_secret_or_is_endless():
    error = failure_of(1, "see https://me:s3cret@x " + "y" * 100_000 + "\n" * 5 + "s3cret", "base", ("s3cret",))
    assert "s3cret" not in str(error) and len(str(error)) < 4 * MOST_CHARS
    assert hidden("abcd abc", ("abc", "abcd", "")) == "*** abc"
    assert tail("[notice] A new release of pip\n") == ""
