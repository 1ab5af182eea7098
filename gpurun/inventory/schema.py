"""The JSON Schema of inventories, for editors that check while the user types."""

from __future__ import annotations

from typing import Any

from gpurun.documents.convert import mapping_schema
from gpurun.documents.convert import schema as schema_of
from gpurun.inventory import fields

_NAME = "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
_HOSTS = r"^[A-Za-z0-9][A-Za-z0-9_.\[\],/-]*$"


def schema() -> dict[str, Any]:
    """Return the schema, draft 2020-12. It describes single values; ``validate`` also checks consistency."""
    shared = mapping_schema({key: kind for key, kind in fields.HOST.items() if key not in fields.PER_HOST})
    rack = {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {"defaults": shared, "hosts": _named(mapping_schema(fields.HOST), _HOSTS)},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpurun inventory",
        "type": "object",
        "required": ["version"],
        "additionalProperties": False,
        "patternProperties": {"^x-": {"description": "Any value, which gpurun ignores, such as a place for anchors"}},
        "properties": {
            "version": {"const": 1, "description": fields.VERSION.about},
            "defaults": shared,
            "fabrics": _named(mapping_schema(fields.FABRIC, fields.FABRIC_NEEDS)),
            "racks": _named(rack),
            "pools": _named(mapping_schema(fields.POOL)),
            "ssh_config": schema_of(fields.SSH_CONFIG),
            "head": mapping_schema(fields.HEAD),
        },
    }


def _named(value: dict[str, Any], names: str = _NAME) -> dict[str, Any]:
    return {"type": ["object", "null"], "propertyNames": {"pattern": names}, "additionalProperties": value}
