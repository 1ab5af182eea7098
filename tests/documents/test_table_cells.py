"""Cells of CSV tables: a spreadsheet that opens one computes nothing, and numbers stay numbers."""

from __future__ import annotations

import pytest

from gpurun.documents.plain import cell

FORMULA = "=cmd|'/C calc'!A0"


@pytest.mark.parametrize("before", ["", " ", "   ", "\t", "\u00a0", "\u3000", "\ufeff", "\u200b", " \t "])
@pytest.mark.parametrize("formula", [FORMULA, "+1+cmd", "-2+3", "@SUM(A1)", "\uff1d1+1", "\uff0b1+1", "\uff20a"])
def test_a_formula_becomes_text_whatever_blanks_are_in_front(before, formula):
    assert str(cell(before + formula)).startswith("'")


@pytest.mark.parametrize("before", ["\r", "\n", "\r\n", "\x0b", "\x00", "\x1b"])
def test_a_control_character_is_spelled_out_and_nothing_hides_behind_it(before):
    shown = str(cell(before + FORMULA))
    assert shown.isprintable() and shown[0] in "'\\"


def test_a_leading_tab_is_no_way_around():
    assert cell("\tx") == "'\tx"


@pytest.mark.parametrize("number", ["-1.5", "+3", "-1e-05", "-0", "-.5", "1,5", "-1.5E+10", -1.5, -3, 0.0, None, True])
def test_numbers_stay_numbers(number):
    assert cell(number) == number and type(cell(number)) is type(number)


@pytest.mark.parametrize("text", ["-1.5-2", "-1e", "--1", "-", "- 1", "-1\u0661", "+1 ", "-inf"])
def test_what_only_begins_like_a_number_is_text(text):
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "accuracy", "a=b", "it's", "3 - 4", "'=1", "x\ty", "ü"])
def test_other_texts_stay_as_they_are(text):
    assert cell(text) == text
