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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from functools import cache, lru_cache
from typing import Any, NoReturn

import msgspec
import yaml
from msgspec import Meta
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpurun.documents.plain import DocumentError, Problem, shown
from gpurun.errors import BadInput
from gpurun.msgspec_types import ready

# Parse the bytes of a YAML file into nodes with line and column, and refuse features that no document here needs.


_TAG = "tag:yaml.org,2002:"
_NULL = f"{_TAG}null"
_MERGE = f"{_TAG}merge"
_NOWHERE = yaml.Mark("", 0, 0, 0, None, 0)
MAX_VALUES = 1_500_000
MAX_ALIASED_VALUES = 1_000_000
MAX_DEPTH = 100

# Control characters, a lone carriage return, and what shows text in another order or line than it has.
_UNWELCOME = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff]|\r(?!\n)")
_BLOCK_NESTING = re.compile(r"^[ \-?:]+", re.MULTILINE)
_BRACKETS = re.compile(r"[\[\]{}]")


class _Loader(yaml.CSafeLoader):
    """Loads each scalar as its text, except null and the merge key: to resolve YAML's types is also slower."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML reads the class's own
        first: [(tag, pattern) for tag, pattern in known if tag in (_NULL, _MERGE)]
        for first, known in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }


def compose_document(data: bytes, file: str, *, tags: bool = False) -> Node | None:
    """Return the root node of a YAML document, or None if the file has no value at all.

    Args:
        tags: accept tags, for other tools' files; gpurun never constructs objects from them.
    Raises DocumentError: not UTF-8, control characters, several documents, tags, aliases that multiply or contain
    themselves, or not YAML.
    """
    text = _decoded(data, file)
    _refuse_depth(text, file)
    try:
        root = yaml.compose(text, Loader=_Loader)
        if "!" in text and not tags:
            _refuse_tags(text, file)
    except yaml.MarkedYAMLError as error:
        _refuse_syntax(error, text, file)
    except yaml.YAMLError as error:
        raise DocumentError([Problem(file, 1, 1, f"the file is not YAML: {error}")]) from error
    if root is not None and "*" in text:
        _refuse_bombs(root, file)
    return root


def _decoded(data: bytes, file: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(file, data[: error.start].decode("utf-8"), f"byte 0x{data[error.start]:02x} is not UTF-8 text")
    found = _UNWELCOME.search(text)
    if found:
        _refuse(file, text[: found.start()], _why_unwelcome(found.group()))
    if text.count(",") + text.count("\n") > MAX_VALUES:
        raise DocumentError([Problem(file, 1, 1, f"the file has more than {MAX_VALUES} values")])
    return text


def _why_unwelcome(character: str) -> str:
    if character == "\ufeff":
        return "the file begins with a byte order mark; save the file as UTF-8 without the mark"
    if character == "\r":
        return "the file has a carriage return without a line feed"
    return f"character U+{ord(character):04X} is not allowed"


def _refuse(file: str, before: str, message: str) -> NoReturn:
    line = before.count("\n") + 1
    column = len(before) - (before.rfind("\n") + 1) + 1
    raise DocumentError([Problem(file, line, column, message)])


def _refuse_depth(text: str, file: str) -> None:
    """Refuse deep nesting, which overflows the C composer's stack. Checks a cheap bound first, the exact depth if in
    doubt.
    """
    block = max((len(found.group()) for found in _BLOCK_NESTING.finditer(text)), default=0)
    flow = deepest = 0
    for found in _BRACKETS.finditer(text):
        flow = flow + 1 if found.group() in "[{" else max(flow - 1, 0)
        deepest = max(deepest, flow)
    if block + deepest <= MAX_DEPTH:
        return
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise DocumentError(
                        [_problem_at(event, file, f"the file nests values more than {MAX_DEPTH} levels deep")]
                    )
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
    except yaml.YAMLError:
        return  # compose() meets the same error, at the same place, before it is any deeper


def _refuse_tags(text: str, file: str) -> None:
    for token in yaml.scan(text, Loader=yaml.CSafeLoader):
        if isinstance(token, (yaml.TagToken, yaml.DirectiveToken)):
            raise DocumentError([_problem_at(token, file, "YAML tags and directives are not allowed")])


def _problem_at(part: Node | yaml.Event | yaml.Token, file: str, message: str) -> Problem:
    mark = part.start_mark
    assert mark is not None  # the C scanner always sets it
    return Problem(file, mark.line + 1, mark.column + 1, message)


def _refuse_syntax(error: yaml.MarkedYAMLError, text: str, file: str) -> NoReturn:
    mark = error.problem_mark or error.context_mark
    message = " ".join(part for part in (error.context, error.problem) if part) or "not YAML"
    line, column = (mark.line, mark.column) if mark else (0, 0)
    lines = text.splitlines()
    if line < len(lines) and "\t" in lines[line][: column + 1]:
        column = lines[line].index("\t")
        message = "the line has a tab character; indent YAML with spaces"
    raise DocumentError([Problem(file, line + 1, column + 1, message)]) from error


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def _refuse_bombs(root: Node, file: str) -> None:
    """Count the values that remain when every alias is expanded. Memoised, so linear in the file."""
    weights: dict[int, int] = {}
    open_nodes: set[int] = set()

    def weigh(node: Node) -> int:
        if isinstance(node, ScalarNode):
            return 1
        known = weights.get(id(node))
        if known is not None:
            return known
        if id(node) in open_nodes:
            raise DocumentError([_problem_at(node, file, "a YAML alias contains itself")])
        open_nodes.add(id(node))
        weight = 1 + sum(weigh(child) for child in _children(node))
        open_nodes.discard(id(node))
        if weight > MAX_ALIASED_VALUES:
            message = f"with all aliases expanded, the value has more than {MAX_ALIASED_VALUES} parts"
            raise DocumentError([_problem_at(node, file, message)])
        weights[id(node)] = weight
        return weight

    weigh(root)


class ProblemReport:
    """Collects the problems of a document, so that a person sees all of them at once."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []

    def wrong(self, node: Node, message: str, *, allowed: tuple[str, ...] = ()) -> None:
        """Record a problem at the node's place."""
        value = node.value if isinstance(node, ScalarNode) else None
        place = node.start_mark
        self.problems.append(Problem(self.file, place.line + 1, place.column + 1, message, value, allowed))

    def raise_if_any(self) -> None:
        """Raise DocumentError with all recorded problems, if there are any."""
        if self.problems:
            raise DocumentError(self.problems)


Entries = dict[str, tuple[ScalarNode, Node]]


def entries(node: Node, report: ProblemReport, what: str) -> Entries:
    """Return the keys of a mapping with their key and value nodes, with merge keys (``<<``) applied.

    Keys written in the mapping override merged keys; of several merged mappings the first wins. null is an empty
    mapping. Reports anything else, a key that is not a scalar, and a duplicate key.
    """
    found: Entries = {}
    if not isinstance(node, MappingNode):
        if not is_null(node):
            report.wrong(node, f"{what} must be a mapping (key: value)")
        return found
    merges: list[Node] = []
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            report.wrong(key, f"a key of {what} must be a plain word")
        elif key.tag == _MERGE:
            merges.extend(value.value if isinstance(value, SequenceNode) else [value])
        elif key.value in found:
            first = found[key.value][0].start_mark.line + 1
            report.wrong(key, f"{shown(key.value)} is given twice in {what}; first on line {first}")
        else:
            found[key.value] = (key, value)
    for merged in merges:
        for name, pair in entries(merged, report, f"the merge (<<) in {what}").items():
            found.setdefault(name, pair)
    return found


def place_of(root: Node | None, path: Sequence[str]) -> tuple[int, int] | None:
    """Return line and column, from 1, of a key by its path; None = it is not there."""
    place, report = None, ProblemReport("")
    for name in path:
        found = entries(root, report, "").get(name) if isinstance(root, MappingNode) else None
        if found is None:
            return None
        key, root = found
        place = (key.start_mark.line + 1, key.start_mark.column + 1)
    return place


def is_null(node: Node) -> bool:
    """Return whether a value is missing, or written as ``null`` or ``~``."""
    return isinstance(node, ScalarNode) and node.tag == _NULL


def node_of(value: object) -> Node:
    """Return a node for a value that is not from a file: text, number, truth value, None, list or mapping of these."""
    if isinstance(value, Mapping):
        pairs = [(node_of(key), node_of(each)) for key, each in value.items()]
        return MappingNode(f"{_TAG}map", pairs, _NOWHERE, _NOWHERE)
    if isinstance(value, list | tuple):
        return SequenceNode(f"{_TAG}seq", [node_of(each) for each in value], _NOWHERE, _NOWHERE)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return ScalarNode(_NULL if value is None else f"{_TAG}str", text, _NOWHERE, _NOWHERE)


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


def short_for(key: str) -> Meta:
    """Declare that a single value in place of the annotated mapping is the value of one of its keys."""
    return Meta(extra={"short": key})


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
        short: for a mapping with known keys: the key whose value a single value stands for; "" = none.
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
    short: str = ""
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
        short = next((meta.extra["short"] for meta in metas if meta.extra and "short" in meta.extra), "")
        return Kind(base, "a mapping (key: value)", about, examples, keys=keys_of(base), short=short)
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
        below = {key: kind.keys for key, kind in keys.items() if kind.keys}
        refuse_unknown(found, keys, report, where, meant, below)
    return {key: value(node, keys[key], report, key) for key, (_, node) in found.items() if key in keys}


def refuse_unknown(
    found: Entries, known: Iterable[str], report: ProblemReport, where: str, meant: Mapping[str, str] | None = None,
    below: Mapping[str, Iterable[str]] | None = None,
) -> None:  # fmt: skip
    """Report every unknown key, with the key that it means or is similar to; with all known keys if there is none.

    Args:
        meant: keys of other tools, with the key that each means.
        below: known keys, with the keys of the mappings that are their values: people forget the mapping.
    """
    allowed = tuple(known)
    for key, (node, _) in found.items():
        if key in allowed:
            continue
        above = [name for name, keys in (below or {}).items() if key in keys]
        if (other := (meant or {}).get(key)) in allowed:
            near = f"; did you mean '{other}'?"
        else:
            near = f"; did you mean '{above[0]}: {{{key}: …}}'?" if above else did_you_mean(key, allowed)
        report.wrong(node, f"unknown key {shown(key)} in {where}{near}", allowed=allowed)


def value(node: Node, kind: Kind, report: ProblemReport, name: str) -> Any:
    """Convert one value. A wrong value becomes None, a list with a wrong item becomes empty; the report names them.

    Args:
        name: the value's name in messages.
    """
    if kind.nullable and is_null(node):
        return None
    if kind.keys is not None:
        if kind.short and isinstance(node, ScalarNode) and not is_null(node):
            return {kind.short: value(node, kind.keys[kind.short], report, name)}
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


def json_schema(kind: Kind) -> dict[str, Any]:
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
        "properties": {key: json_schema(kind) for key, kind in keys.items()},
        **({"required": needed} if needed else {}),
    }


def _schema(kind: Kind) -> dict[str, Any]:
    if kind.own_schema:
        return dict(kind.own_schema)
    if kind.keys is not None:
        below = mapping_schema(kind.keys)
        return {"anyOf": [json_schema(kind.keys[kind.short]), below]} if kind.short else below
    if kind.key is not None and kind.item is not None:
        names, values = _schema(kind.key), json_schema(kind.item)
        return {"type": ["object", "null"], "propertyNames": names, "additionalProperties": values}
    if kind.item is not None:
        return {"type": "array", "items": json_schema(kind.item)}
    if kind.options and kind.parse is str:
        return {"enum": list(kind.options)}
    made = msgspec.json.schema(kind.type)
    made.pop("description", None)
    if "pattern" in made:
        made["pattern"] = made["pattern"].replace("\\Z", "$")
    return made
