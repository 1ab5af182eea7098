"""Convert a host's JSON documents to values. A host is not trusted: every type is checked."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from gpurun.errors import HostNotReady
from gpurun.msgspec_types import ready

T = TypeVar("T")


def convert(host: str, kind: type[T], document: object) -> T:
    """Convert a host's JSON document to a dataclass of this kind.

    Ignores unknown keys, so that the head can read a newer node's answer. Missing keys take their defaults.

    Raises:
        HostNotReady: a value has the wrong type; the message names its path.
    """
    try:
        return msgspec.convert(document, ready(kind))
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # a lone surrogate raises ValueError
        raise HostNotReady(f"the host's answer is not valid: {error}", host=host) from None
