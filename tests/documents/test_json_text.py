"""Values of gpurun become JSON as they are, whatever is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.documents.plain import json_text


class Colour(str, Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    gpus: tuple[int, ...]
    colour: Colour = Colour.RED

    @property
    def half(self) -> float:
        return len(self.gpus) / 2


@dataclass(frozen=True)
class Outer(Inner):
    named: Mapping[str, Inner] = field(default_factory=dict)
    reason: str | None = None


def test_a_dataclass_is_an_object_with_its_fields_and_no_other_keys():
    outer = Outer((0, 1), named=MappingProxyType({"h1": Inner((2,))}))
    told = {"gpus": [0, 1], "colour": "red", "named": {"h1": {"gpus": [2], "colour": "red"}}, "reason": None}
    assert json.loads(json_text(outer)) == told
    assert list(json.loads(json_text(outer))) == ["gpus", "colour", "named", "reason"]


@given(st.text() | st.text(st.characters(categories=["Cs", "Cc"])))
def test_text_from_outside_controls_no_terminal(text):
    said = json_text({text: Outer((), reason=text)})
    assert said.isascii() and min(said) >= " " and json.loads(said)[text]["reason"] == text


@pytest.mark.parametrize("value", [object(), Inner, {1: object()}])
def test_what_is_no_value_is_refused(value):
    with pytest.raises(TypeError):
        json_text(value)


def test_a_value_that_contains_itself_is_refused():
    inner: dict[str, object] = {}
    inner["again"] = Outer((), named=inner)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Circular"):
        json_text(inner)
