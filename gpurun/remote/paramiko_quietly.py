"""Paramiko, imported once, without what gpurun does not need and without its chatter.

`paramiko.config` imports all of Invoke (half of Paramiko's own import time, some 55 ms of CPU) for ``Match exec``
lines of a parser that gpurun does not use; while Paramiko is imported here, Invoke is hidden from it. Paramiko logs
what it also raises; without a handler Python would print that on stderr in the middle of a person's output.
"""

from __future__ import annotations

import logging
import sys

if "paramiko" not in sys.modules and "invoke" not in sys.modules:
    sys.modules["invoke"] = None  # type: ignore[assignment]
    try:
        import paramiko
    finally:
        del sys.modules["invoke"]
else:
    import paramiko

_logger = logging.getLogger("paramiko")
_logger.addHandler(logging.NullHandler())
_logger.propagate = False
# Each log call formats its message even when nobody reads it; thousands of packets make that measurable.
_logger.setLevel(logging.CRITICAL + 1)

__all__ = ["paramiko"]
