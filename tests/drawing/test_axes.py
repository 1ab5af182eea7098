"""Where values stand on an axis, and what is written beside it, whatever the numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpurun.drawing import MOST_MARKS, Choices, Numbers, around, written

FINITE = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(min_value=5e-324, allow_nan=False, allow_infinity=False)


def texts(axis):
    return [text for _, text in axis.marks()]


def test_round_numbers_stand_beside_an_axis():
    assert texts(Numbers(0.0, 1.0)) == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert texts(Numbers(0.8703, 0.8756)) == ["0.871", "0.872", "0.873", "0.874", "0.875"]
    assert texts(Numbers(-50.0, 100.0)) == ["-50", "0", "50", "100"]


def test_a_logarithmic_axis_has_powers_of_ten_at_equal_distances():
    axis = Numbers(1e-5, 1e-1, is_log=True)
    assert texts(axis) == ["1e-5", "0.0001", "0.001", "0.01", "0.1"]
    assert [place for place, _ in axis.marks()] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert texts(Numbers(0.03, 0.4, is_log=True)) == ["0.05", "0.1", "0.2"]
    assert axis.place(0.0) is None and axis.place(-1.0) is None


@given(one=FINITE, other=FINITE)
@example(one=0.0, other=0.3)
def test_no_numbers_break_an_axis(one, other):
    axis = Numbers(min(one, other), max(one, other))
    marks = axis.marks()
    assert 1 <= len(marks) <= 2 * MOST_MARKS
    assert all(0 <= place <= 1 for place, _ in marks)
    assert axis.place(one) is not None


@given(one=POSITIVE, other=POSITIVE)
def test_no_numbers_break_a_logarithmic_axis(one, other):
    axis = Numbers(min(one, other), max(one, other), is_log=True)
    assert 1 <= len(axis.marks()) <= 2 * MOST_MARKS
    assert all(0 <= place <= 1 for place, _ in axis.marks())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, True, None, "1", b"", [1], 2.0, -1])
def test_what_is_no_number_of_the_axis_has_no_place(value):
    assert Numbers(0.0, 1.0).place(value) is None


def test_choices_stand_in_order_and_a_truth_is_no_number():
    axis = Choices([1, True, "1", 2.5])
    assert [axis.place(value) for value in (1, True, "1", 2.5, 1.0, "x")] == [0.125, 0.375, 0.625, 0.875, None, None]
    assert texts(axis) == ["1", "true", "1", "2.5"]
    assert len(Choices(list(range(1000))).marks()) <= MOST_MARKS


def test_a_metric_that_differs_a_thousandfold_is_drawn_by_its_logarithm():
    assert around([0.001, 5.0]).is_log and not around([0.1, 5.0]).is_log and not around([-1.0, 5000.0]).is_log
    assert around([]) == Numbers(0.0, 1.0)


def test_numbers_are_written_short():
    assert [written(each) for each in (1e-5, 1e20, 0.1 + 0.2, 3.0, 7)] == ["1e-5", "1e20", "0.3", "3", "7"]
