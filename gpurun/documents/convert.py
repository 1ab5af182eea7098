"""Convert YAML nodes to checked values, and report every problem with its place, the value and what is allowed.

A type is the rule: a ``TypedDict`` lists the keys of a mapping, ``Annotated`` with `msgspec.Meta` gives a value its
bounds, pattern and description, and `written` its spelling, such as ``80GiB``. msgspec checks each single value. This
module walks through the nodes, because msgspec would stop at the first problem and knows no places.

A scalar is its text as written. gpurun ignores YAML's own types: ``generation: 2080`` is a text, and ``no`` is not
false.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from functools import cache, lru_cache
from typing import Any

import msgspec
from msgspec import Meta
from yaml.nodes import Node, ScalarNode, SequenceNode

from gpurun.documents.nodes import Entries, ProblemReport, entries, is_null, node_of
from gpurun.documents.problems import shown
from gpurun.errors import BadInput
from gpurun.msgspec_types import ready

Parse = Callable[[str], object]

_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]{0,39})\Z")
_NUMBER = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?\Z")


def written(
    parse: Parse, expected: str, *allowed: str, schema: Mapping[str, Any] | None = None, null: bool = False
) -> Meta:
    """Declare how people write a value of the annotated type.

    Args:
        parse: converts the text to the value. A ValueError refuses the text; its message, if any, is the reason.
        expected: completes "VALUE is not …".
        allowed: examples or bounds for the message.
        schema: the JSON Schema of the written form, if it differs from the type's own.
        null: whether null is a text like any other.
    """
    return Meta(title=expected, extra={"parse": parse, "allowed": allowed, "schema": schema, "null": null})


@dataclass(frozen=True, eq=False)
class Kind:
    """What the converter knows about a type, computed once.

    Attributes:
        type: the type for msgspec, with bounds and pattern.
        about: what the value means.
        examples: values as people write them, in YAML.
        options: the only allowed texts; empty = any.
        item: the kind of a list's or a mapping's values.
        key: the kind of a mapping's keys.
        keys: for a mapping with known keys: each key's kind.
        spelled: whether `parse` converts the whole value from one text, even if the type is a list.
        nullable: null means None; otherwise null is refused, or a text if `null_is_text`.
    """

    type: Any
    expected: str
    about: str = ""
    examples: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    parse: Parse = str
    item: Kind | None = None
    key: Kind | None = None
    keys: Mapping[str, Kind] | None = None
    spelled: bool = False
    nullable: bool = False
    null_is_text: bool = False
    own_schema: Mapping[str, Any] | None = None


@cache
def keys_of(mapping: type) -> Mapping[str, Kind]:
    """Return the keys that a TypedDict allows, with their kinds."""
    return {key: kind_of(hint) for key, hint in typing.get_type_hints(mapping, include_extras=True).items()}


def kind_of(hint: Any) -> Kind:
    """Return the kind of a type hint."""
    base, metas = (hint.__origin__, hint.__metadata__) if typing.get_origin(hint) is typing.Annotated else (hint, ())
    about = next((meta.description for meta in reversed(metas) if meta.description), "")
    examples = tuple(next((meta.examples for meta in reversed(metas) if meta.examples), ()))
    origin, arguments = typing.get_origin(base), typing.get_args(base)
    if origin in (typing.Union, types.UnionType):
        return replace(kind_of(arguments[0]), nullable=True, about=about)
    if typing.is_typeddict(base):
        return Kind(base, "a mapping (key: value)", about, examples, keys=keys_of(base))
    if origin is dict:
        key, item = map(kind_of, arguments)
        return Kind(base, "a mapping (key: value)", about, examples, key=key, item=item)
    extra: dict[str, Any] = next((meta.extra for meta in metas if meta.extra), {})
    options = _options(base)
    expected = _EXPECTED.get(base, "a known word" if options else "a list")
    return Kind(
        hint,
        next((meta.title for meta in metas if meta.title), expected),
        about,
        examples,
        extra.get("allowed") or options or _bounds(metas),
        options,
        extra.get("parse") or _PARSE.get(base, str),
        item=kind_of(arguments[0]) if origin is tuple and arguments[-1] is ... else None,
        spelled="parse" in extra,
        null_is_text=extra.get("null", False),
        own_schema=extra.get("schema"),
    )


def _whole(text: str) -> object:
    return int(text) if _WHOLE.match(text) else text


def _number(text: str) -> object:
    return float(text) if _NUMBER.match(text) else text


def _truth(text: str) -> object:
    return {"true": True, "false": False}.get(text.lower(), text)


_PARSE: Mapping[Any, Parse] = {int: _whole, float: _number, bool: _truth}
_EXPECTED: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "a truth value", str: "a text"}


def _options(base: Any) -> tuple[str, ...]:
    if typing.get_origin(base) is typing.Literal:
        return tuple(map(str, typing.get_args(base)))
    if isinstance(base, type) and issubclass(base, Enum):
        return tuple(str(member.value) for member in base)
    return ("true", "false") if base is bool else ()


def _bounds(metas: Iterable[Meta]) -> tuple[str, ...]:
    return tuple(f"{meta.ge} to {meta.le}" for meta in metas if meta.le is not None)


def mapping(
    node: Node, keys: Mapping[str, Kind], report: ProblemReport, where: str, meant: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Convert a mapping with known keys. A wrong value becomes None, and the report names it.

    Args:
        meant: keys of other tools, with the key that each means.
    """
    found = entries(node, report, where)
    if not found.keys() <= keys.keys():
        refuse_unknown(found, keys, report, where, meant)
    return {key: value(node, keys[key], report, key) for key, (_, node) in found.items() if key in keys}


def refuse_unknown(
    found: Entries, known: Iterable[str], report: ProblemReport, where: str, meant: Mapping[str, str] | None = None
) -> None:
    """Report every unknown key, with the key that it means or is similar to; with all known keys if there is none."""
    allowed = tuple(known)
    for key, (node, _) in found.items():
        if key not in allowed:
            other = (meant or {}).get(key)
            near = f"; did you mean '{other}'?" if other in allowed else did_you_mean(key, allowed)
            report.wrong(node, f"unknown key {shown(key)} in {where}{near}", allowed=allowed)


def value(node: Node, kind: Kind, report: ProblemReport, name: str) -> Any:
    """Convert one value. A wrong value becomes None, a list with a wrong item becomes empty; the report names them.

    Args:
        name: the value's name in messages.
    """
    if kind.nullable and is_null(node):
        return None
    if kind.keys is not None:
        return mapping(node, kind.keys, report, name)
    if kind.key is not None and kind.item is not None:
        return _named_values(node, kind.key, kind.item, report, name)
    if kind.item is not None and not (kind.spelled and isinstance(node, ScalarNode)):
        return _list(node, kind, kind.item, report, name)
    return _one(node, kind, report, name)


def _one(node: Node, kind: Kind, report: ProblemReport, name: str) -> Any:
    if not isinstance(node, ScalarNode) or (is_null(node) and not kind.null_is_text):
        got = "but has no value" if isinstance(node, ScalarNode) else "not a list or a mapping"
        report.wrong(node, f"{name} must be {kind.expected}, {got}", allowed=kind.allowed)
        return None
    try:
        return _scalar(kind, node.value)
    except ValueError as error:
        report.wrong(node, f"{name}: {shown(node.value)} {_why(error, kind, node.value)}", allowed=kind.allowed)
        return None


def _named_values(node: Node, key: Kind, item: Kind, report: ProblemReport, name: str) -> dict[Any, Any]:
    return {
        value(key_node, key, report, f"name in {name}"): value(value_node, item, report, f"{name}.{text}")
        for text, (key_node, value_node) in entries(node, report, name).items()
    }


def _list(node: Node, kind: Kind, item: Kind, report: ProblemReport, name: str) -> tuple[Any, ...]:
    """Convert a list. A single value is a list of one, null is an empty list."""
    if isinstance(node, ScalarNode):
        children = [] if is_null(node) else [node]
    elif isinstance(node, SequenceNode):
        children = list(node.value)
    else:
        report.wrong(node, f"{name} must be a list")
        return ()
    before = len(report.problems)
    values = tuple(value(child, item, report, name) for child in children)
    if len(report.problems) > before:
        return ()
    try:
        msgspec.convert(values, ready(kind.type))
    except ValueError:
        report.wrong(node, f"{name} is not {kind.expected}", allowed=kind.allowed)
    return values


@lru_cache(maxsize=4096)
def _scalar(kind: Kind, text: str) -> Any:
    """Return the value of a text. Raises ValueError. Caches results, because large inventories repeat the same few
    texts.
    """
    return msgspec.convert(kind.parse(text), ready(kind.type))


def _why(error: ValueError, kind: Kind, text: str) -> str:
    if str(error) and not isinstance(error, msgspec.ValidationError):
        return str(error)
    if kind.parse in (_whole, _number) and not isinstance(kind.parse(text), str):
        return "is out of range"
    return f"is not {kind.expected}{did_you_mean(text, kind.options)}"


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return words that name the most similar known text, to stand behind a message; empty if none is similar."""
    close = get_close_matches(text, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def convert(plain: object, kind: Kind, name: str) -> Any:
    """Convert a value that is not from a file, such as a flag's. Raises BadInput that calls it `name`."""
    return convert_node(node_of(plain), kind, name)


def convert_node(node: Node, kind: Kind, name: str) -> Any:
    """Convert a node that is not from a file. Raises BadInput that calls it `name`."""
    report = ProblemReport("")
    converted = value(node, kind, report, name)
    if report.problems:
        raise BadInput("; ".join(problem.text for problem in report.problems))
    return converted


def schema(kind: Kind) -> dict[str, Any]:
    """Return the JSON Schema of the written form."""
    made = _schema(kind)
    if kind.nullable:
        made = {"anyOf": [made, {"type": "null"}]}
    return {**made, "description": kind.about} if kind.about else made


def mapping_schema(keys: Mapping[str, Kind], needs: Iterable[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of a mapping with known keys."""
    needed = list(needs)
    return {
        "type": "object" if needed else ["object", "null"],
        "additionalProperties": False,
        "properties": {key: schema(kind) for key, kind in keys.items()},
        **({"required": needed} if needed else {}),
    }


def _schema(kind: Kind) -> dict[str, Any]:
    if kind.own_schema:
        return dict(kind.own_schema)
    if kind.keys is not None:
        return mapping_schema(kind.keys)
    if kind.key is not None and kind.item is not None:
        names, values = _schema(kind.key), schema(kind.item)
        return {"type": ["object", "null"], "propertyNames": names, "additionalProperties": values}
    if kind.item is not None:
        return {"type": "array", "items": schema(kind.item)}
    if kind.options and kind.parse is str:
        return {"enum": list(kind.options)}
    made = msgspec.json.schema(kind.type)
    made.pop("description", None)
    if "pattern" in made:
        made["pattern"] = made["pattern"].replace("\\Z", "$")
    return made
