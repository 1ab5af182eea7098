"""What a sweep tries, as people write it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import BadInput
from gpurun.studies import sweep_plan
from gpurun.studies.sweep_plan import Dimension


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-3", -3), ("0.1", 0.1), (".5", 0.5), ("1e-3", 1e-3), ("true", True), ("false", False),
        ("True", "True"), ("adam", "adam"), ("1e999", "1e999"), ("nan", "nan"), ("inf", "inf"), ("1_000", "1_000"),
        ("٣", "٣"), ("0x10", "0x10"),
        ("1" * 40, float("1" * 40)),
    ],
)  # fmt: skip
def test_a_value_is_what_it_looks_like(text, value):
    found = sweep_plan.value_of(text)
    assert (found, type(found)) == (value, type(value))


@given(st.one_of(st.booleans(), st.integers(-(10**17), 10**17), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_value_is_written_as_it_is_read(value):
    assert sweep_plan.value_of(sweep_plan.value_text(value)) == value


@pytest.mark.parametrize(
    ("word", "dimension"),
    [
        ("lr=0.1,0.01", Dimension((0.1, 0.01))),
        ("lr=log:1e-5..1e-1", Dimension(low=1e-5, high=0.1, is_log=True)),
        ("layers=2..8", Dimension(low=2, high=8, is_whole=True)),
        ("batch=log:16..512", Dimension(low=16, high=512, is_log=True, is_whole=True)),
        ("dropout=0..0.5", Dimension(low=0, high=0.5)),
        ("path=../data,b", Dimension(("../data", "b"))),
        ("x=-2..-1", Dimension(low=-2, high=-1, is_whole=True)),
    ],
)
def test_a_parameter_is_a_list_or_a_range(word, dimension):
    ((found),) = sweep_plan.parse_space(sweep_plan.assignments((word,))).values()
    assert found == dimension


@pytest.mark.parametrize(
    "words",
    [
        ("lr",), ("lr=",), ("lr=1,",), ("=1",), ("lr=1", "lr=2"), ("lr=1,1",), ("l r=1",), ("lr=5..1",),
        ("lr=log:0..1",), ("lr=log:1e-5.1e-1",), ("lr=1,log:1..2",),
        ("lr=a..b",), ("lr=log:-1..1",), ("-x=1",), ("a" * 65 + "=1",), ("lr=1..1",), ("a\nb=1",), ("é=1",),
    ],
)  # fmt: skip
def test_what_is_no_parameter_is_refused(words):
    with pytest.raises(BadInput):
        sweep_plan.parse_space(sweep_plan.assignments(words))


def test_a_grid_has_every_point_once_the_last_parameter_fastest():
    points = sweep_plan.parse_space(sweep_plan.assignments(("a=1,2", "b=x,y")))
    assert sweep_plan.check_grid(points) == 4
    assert [sweep_plan.grid_point(points, number) for number in range(4)] == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip


@pytest.mark.parametrize("words", [(), ("a=1..2",), tuple(f"p{n}={','.join(map(str, range(10)))}" for n in range(7))])
def test_a_grid_of_a_range_of_nothing_or_of_too_much_is_refused(words):
    with pytest.raises(BadInput):
        sweep_plan.check_grid(sweep_plan.parse_space(sweep_plan.assignments(words)))


def test_flags_of_a_program():
    assert sweep_plan.words({"lr": 0.1, "big": True, "name": "a b"}) == ("--lr=0.1", "--big=true", "--name=a b")
