"""Parse the bytes of a YAML file into nodes with line and column, and refuse features that no document here needs.

PyYAML's C scanner is fast and knows the place of each value. But it crashes the interpreter on deep nesting and lets
aliases multiply. So this module checks the text first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gpurun.documents.problems import DocumentError, Problem, shown

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


def compose(data: bytes, file: str, *, tags: bool = False) -> Node | None:
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
