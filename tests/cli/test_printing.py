"""How what ranks print is shown: as on a terminal, and never steering one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.documents.plain import printed

BACK = "\b" * 80


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loss 0.5", "loss 0.5"),
        ("\ta  b", "\ta  b"),
        ("\r 10%|#    | 1/10\r 20%|##   | 2/10", " 20%|##   | 2/10"),  # tqdm
        (f"1/125 - ETA: 10:01 - loss: 2.3043{BACK}\r25/125 - ETA: 30s{' ' * 16}", "25/125 - ETA: 30s"),  # Keras
        ("long line\rshort", "shortline"),
        ("ab\b\b\b\bX", "Xb"),
        ("done\r", "done"),
        ("\x1b[1;31mred\x1b[0m plain\x1b[K", "red plain"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\u202e", "\\u202e"),
        ("", ""),
    ],
)
def test_a_line_is_shown_as_on_a_terminal(text, shown):
    assert printed(text) == shown


@given(st.text(st.sampled_from("ab\r\b\x1b[0mK;\x07")))
def test_nothing_that_is_shown_steers_a_terminal(text):
    assert printed(text).replace("\t", "").isprintable()
