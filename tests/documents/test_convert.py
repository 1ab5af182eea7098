"""The one converter: it reports every problem with its place, the value and what is allowed."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from gpurun.documents.convert import (
    ProblemReport,
    compose_document,
    convert,
    json_schema,
    keys_of,
    kind_of,
    mapping,
    written,
)
from gpurun.documents.plain import DocumentError, Problem
from gpurun.errors import BadInput


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def dozens(text: str) -> int:
    if text == "none":
        raise ValueError("is no dozen at all")
    return int(text.removesuffix(" dozen")) * 12 if text.endswith(" dozen") else -1


Capitals = Annotated[str, Meta(pattern=r"^[A-Z]+\Z", title="capitals")]
Raw = Annotated[str, written(str, "a text", null=True)]
Dozens = Annotated[int, Meta(ge=0), written(dozens, "dozens", "such as 3 dozen")]


class Inner(TypedDict, total=False):
    deep: bool


class Keys(TypedDict, total=False):
    count: Annotated[int, Meta(ge=1, le=9, description="How many")]
    maybe: Annotated[int, Meta(ge=1, le=9)] | None
    share: Annotated[float, Meta(gt=0, title="a number above 0")]
    word: Literal["one", "two"]
    colour: Colour
    eggs: Dozens
    list: tuple[Annotated[int, Meta(ge=0, le=9)], ...]
    full: Annotated[tuple[str, ...], Meta(min_length=1, title="a list with something in it")]
    env: dict[
        Annotated[str, Meta(pattern=r"^[A-Z]+\Z", title="capitals")], Annotated[str, written(str, "a text", null=True)]
    ]
    inner: Inner


KEYS = keys_of(Keys)


def read(text: str | bytes) -> tuple[dict[str, object], list[str]]:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    report = ProblemReport("f")
    root = compose_document(data, "f")
    found = mapping(root, KEYS, report, "the document") if root is not None else {}
    return found, [str(problem) for problem in report.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("count: 4", 4),
        ("count: '4'", 4),
        ("maybe: 4", 4),
        ("maybe: null", None),
        ("maybe: ", None),
        ("share: 2", 2.0),
        ("share: 2.5", 2.5),
        ("word: two", "two"),
        ("colour: blue", Colour.BLUE),
        ("eggs: 2 dozen", 24),
        ("list: [1, 2]", (1, 2)),
        ("list: 7", (7,)),
        ("list: ", ()),
        ("full: [null, 1.0, ~x]", None),
        ("env: {A: 1.0, B: null, C: yes}", {"A": "1.0", "B": "null", "C": "yes"}),
        ("env: ", {}),
        ("inner: {deep: True}", {"deep": True}),
        ("inner: ", {}),
    ],
)
def test_values(text: str, value: object) -> None:
    found, problems = read(text)
    if value is None and problems:
        assert problems == ["f:1:8: full must be a text, but has no value"]
    else:
        assert (list(found.values()), problems) == ([value], [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("count: four", "f:1:8: count: 'four' is not a whole number (allowed: 1 to 9)"),
        ("count: 10", "f:1:8: count: '10' is out of range (allowed: 1 to 9)"),
        (f"count: {'9' * 5000}", f"f:1:8: count: '{'9' * 80}…' is not a whole number (allowed: 1 to 9)"),
        ("count: 04", "f:1:8: count: '04' is not a whole number (allowed: 1 to 9)"),
        ("count: ٤", "f:1:8: count: '٤' is not a whole number (allowed: 1 to 9)"),
        ("count: null", "f:1:8: count must be a whole number, but has no value (allowed: 1 to 9)"),
        ("count: [1]", "f:1:8: count must be a whole number, not a list or a mapping (allowed: 1 to 9)"),
        ("share: nan", "f:1:8: share: 'nan' is not a number above 0"),
        ("share: 1e999", "f:1:8: share: '1e999' is not a number above 0"),
        ("share: 0", "f:1:8: share: '0' is out of range"),
        ("word: tow", "f:1:7: word: 'tow' is not a known word; did you mean 'two'? (allowed: one, two)"),
        ("colour: rd", "f:1:9: colour: 'rd' is not a known word; did you mean 'red'? (allowed: red, blue)"),
        ("eggs: 24", "f:1:7: eggs: '24' is not dozens (allowed: such as 3 dozen)"),
        ("eggs: none", "f:1:7: eggs: 'none' is no dozen at all (allowed: such as 3 dozen)"),
        ("list: {a: 1}", "f:1:7: list must be a list"),
        ("full: []", "f:1:7: full is not a list with something in it"),
        ("env: [A]", "f:1:6: env must be a mapping (key: value)"),
        ("env: {a: 1}", "f:1:7: name in env: 'a' is not capitals"),
        ("env: {A: [1]}", "f:1:10: env.A must be a text, not a list or a mapping"),
        ("inner: {dep: true}", "f:1:9: unknown key 'dep' in inner; did you mean 'deep'? (allowed: deep)"),
        ("inner: {deep: yes}", "f:1:15: deep: 'yes' is not a truth value (allowed: true, false)"),
    ],
)
def test_a_problem_names_place_value_and_what_is_allowed(text: str, problem: str) -> None:
    assert read(text)[1] == [problem]


def test_every_problem_is_reported_also_those_in_one_list() -> None:
    _, problems = read("count: x\nlist:\n  - 1\n  - y\n  - 12\nenv: {a: [1], b: {}}\nwhat: 1\n")
    assert [problem.split(" ")[0] for problem in problems] == [
        *("f:7:1:", "f:1:8:", "f:4:5:", "f:5:5:", "f:6:7:", "f:6:10:", "f:6:15:", "f:6:18:"),
    ]


def test_a_value_that_stands_in_no_file_is_named_by_its_flag() -> None:
    assert convert(["1", 2], KEYS["list"], "--list") == (1, 2)
    assert convert({"A": "x\ny"}, KEYS["env"], "--env") == {"A": "x\ny"}
    assert convert(True, KEYS["inner"].keys["deep"], "--deep") is True  # type: ignore[index]
    with pytest.raises(BadInput, match=r"^--count: '0' is out of range \(allowed: 1 to 9\)$"):
        convert(0, KEYS["count"], "--count")


def test_the_schema_describes_what_people_write() -> None:
    assert json_schema(KEYS["count"]) == {"type": "integer", "minimum": 1, "maximum": 9, "description": "How many"}
    assert json_schema(KEYS["colour"]) == {"enum": ["red", "blue"]}
    assert json_schema(KEYS["maybe"])["anyOf"][1] == {"type": "null"}
    assert json_schema(KEYS["env"])["propertyNames"]["pattern"] == "^[A-Z]+$"
    assert json_schema(kind_of(Annotated[int, written(dozens, "dozens", schema={"type": "string"})])) == {
        "type": "string"
    }


PIECES = st.sampled_from(
    [*KEYS, ": ", "[", "]", "{", "}", ", ", "\n", "- ", "1", "'", '"', "null", "~", "&a ", "*a", "<<: ", "\x00", "💥"]
)


@given(st.lists(PIECES, max_size=20).map("".join) | st.text(max_size=60))
def test_any_text_is_values_or_problems_with_places(text: str) -> None:
    try:
        _, problems = read(text)
    except DocumentError as error:
        problems = [str(problem) for problem in error.problems]
    for problem in problems:
        file, line, column, _ = problem.split(":", 3)
        assert file == "f"
        assert int(line) >= 1
        assert int(column) >= 1
        assert problem.isprintable()


def test_a_long_list_of_problems_is_cut_short_and_counted() -> None:
    problems = [Problem("f", line, 1, "is wrong") for line in range(1, 20_001)]
    error = DocumentError(problems)
    lines = str(error).split("\n")
    assert (len(lines), lines[0], lines[-1]) == (21, "f:1:1: is wrong", "… and 19980 more problems")
    assert len(error.problems) == 20_000
    assert str(DocumentError(problems[:20])).count("\n") == 19
