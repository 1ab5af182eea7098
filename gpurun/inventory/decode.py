"""JSON documents of hosts as dataclasses, checked: whatever a host sends is not to be trusted. Pure."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import TypeVar

from gpurun.errors import HostNotReady

T = TypeVar("T")


def decode(host: str, kind: type[T], document: object) -> T:
    """A host's JSON document as a dataclass of this kind, checked. Raises HostNotReady with the place."""
    try:
        return _decode_record(kind, document, "")
    except _WrongType as wrong:
        raise HostNotReady(f"the probe's answer makes no sense at {wrong}", host=host) from None


class _WrongType(ValueError):
    """A value of a document has the wrong type; the message is path and value."""


def _decode(kind: object, value: object, path: str) -> object:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _decode(arguments[0], value, path)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_decode(arguments[0], each, f"{path}[{at}]") for at, each in enumerate(value))
    if origin is collections.abc.Mapping and isinstance(value, Mapping):
        return {str(key): _decode(arguments[1], each, f"{path}.{key}") for key, each in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_record(kind, value, path)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _WrongType(f"{path or 'the top'}: {value!r:.60}")
    return value


def _decode_record(kind: type[T], value: object, path: str) -> T:
    if not isinstance(value, Mapping):
        raise _WrongType(f"{path or 'the top'}: {value!r:.60}")
    hints = _hints(kind)
    known = {name: each for name, each in value.items() if name in hints}
    decoded = {name: _decode(hints[name], each, f"{path}.{name}".lstrip(".")) for name, each in known.items()}
    try:
        return kind(**decoded)
    except TypeError as error:
        raise _WrongType(f"{path or 'the top'}: {error}") from None


def _hints(kind: type) -> dict[str, object]:
    if kind not in _KNOWN_HINTS:
        _KNOWN_HINTS[kind] = typing.get_type_hints(kind)
    return _KNOWN_HINTS[kind]


_KNOWN_HINTS: dict[type, dict[str, object]] = {}
"""Reading them is slow, and each dataclass is decoded many times."""
