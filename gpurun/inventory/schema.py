"""The JSON Schema of inventories, for editors that check while a person types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpurun.inventory import fields
from gpurun.inventory.fields import Field

_NAME = "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
_HOSTS = r"^[A-Za-z0-9][A-Za-z0-9_.\[\],/-]*$"


def schema() -> dict[str, Any]:
    """The schema, draft 2020-12. It knows each value; how they must agree, only ``validate`` knows."""
    host = _mapping(fields.HOST)
    shared = _mapping({key: field for key, field in fields.HOST.items() if key not in fields.PER_HOST})
    rack = {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {"defaults": shared, "hosts": _named(host, _HOSTS)},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpurun inventory",
        "type": "object",
        "required": ["version"],
        "additionalProperties": False,
        "patternProperties": {"^x-": {"description": "Anything, such as a place for anchors"}},
        "properties": {
            "version": {"const": 1, "description": fields.VERSION.about},
            "defaults": shared,
            "fabrics": _named(_mapping(fields.FABRIC, fields.FABRIC_NEEDS)),
            "racks": _named(rack),
            "pools": _named(_mapping(fields.POOL)),
            "ssh_config": {**fields.SSH_CONFIG.kind.schema(), "description": fields.SSH_CONFIG.about},
            "head": _mapping(fields.HEAD),
        },
    }


def _mapping(known: Mapping[str, Field], needs: tuple[str, ...] = ()) -> dict[str, Any]:
    properties = {key: {**field.kind.schema(), "description": field.about} for key, field in known.items()}
    made: dict[str, Any] = {
        "type": "object" if needs else ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
    }
    return {**made, "required": list(needs)} if needs else made


def _named(value: dict[str, Any], names: str = _NAME) -> dict[str, Any]:
    return {"type": ["object", "null"], "propertyNames": {"pattern": names}, "additionalProperties": value}
