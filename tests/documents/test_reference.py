"""Pages that are written from the code say what the code says now."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference

from gpurun.cli import cancel
from gpurun.cli.main import INTERRUPTED
from gpurun.errors import EXIT_CODES, GpurunError

TOP = Path(__file__).parents[2]


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_a_page_is_what_the_code_says(page):
    assert page.read_text(encoding="utf-8") == reference.PAGES[page](), "run `make reference`"


def below(error):
    return {error.exit_code}.union(*map(below, error.__subclasses__()))


def test_every_exit_code_has_a_meaning():
    assert {0, cancel.TIMED_OUT, INTERRUPTED} | below(GpurunError) == EXIT_CODES.keys()


def test_what_markdown_would_take_for_its_own_is_printed_letter_for_letter():
    assert reference.text("a|b *c* `d|*e*` [f]") == r"a\|b \*c\* `d|*e*` \[f\]"
    assert reference.code("rack|any <x") == "<code>rack&#124;any &lt;x</code>"
