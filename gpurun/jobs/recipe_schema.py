"""The JSON Schema of recipes, for editors that check while the user types. Pure."""

from __future__ import annotations

from typing import Any

from gpurun.documents.convert import Kind
from gpurun.documents.convert import schema as of_type
from gpurun.jobs.recipe_keys import FIELDS

_TEXT = ["string", "number", "boolean"]
"""YAML reads ``4`` and ``true`` as a number and a truth value; gpurun takes each as the text that it is."""


def schema() -> dict[str, Any]:
    """Return the schema, draft 2020-12. It describes single values; ``gpurun validate`` also checks how they agree."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpurun recipe",
        "type": "object",
        "additionalProperties": False,
        "properties": {key: _described(kind) for key, kind in FIELDS.items()},
    }


def _described(kind: Kind) -> dict[str, Any]:
    about = {"description": kind.about} if kind.about else {}
    return {**_written(kind), **about, **({"examples": list(kind.examples)} if kind.examples else {})}


def _written(kind: Kind) -> dict[str, Any]:
    """Return the schema of what a person may write, as the converter of `gpurun.documents.convert` reads it."""
    if kind.own_schema:
        return dict(kind.own_schema)
    if kind.keys is not None:
        below = {key: _described(each) for key, each in kind.keys.items()}
        return {"type": ["object", "null"], "additionalProperties": False, "properties": below}
    if kind.key is not None and kind.item is not None:
        return {"type": ["object", "null"], "additionalProperties": _written(kind.item)}
    if kind.item is not None:
        one = {"type": _TEXT} if kind.spelled else _written(kind.item)
        return {"anyOf": [{"type": "array", "items": _written(kind.item)}, one, {"type": "null"}]}
    return _text(kind)


def _text(kind: Kind) -> dict[str, Any]:
    if kind.spelled:
        return {"type": [*_TEXT, "null"] if kind.null_is_text else _TEXT}
    if kind.options:
        return {"enum": [True, False] if kind.options == ("true", "false") else list(kind.options)}
    made = of_type(kind)
    return {**made, "type": _TEXT} if made.get("type") == "string" else made
