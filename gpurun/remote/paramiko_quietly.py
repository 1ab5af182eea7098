"""Import Paramiko once, without unneeded modules and without its log output.

`paramiko.config` imports all of Invoke (half of Paramiko's own import time, about 55 ms of CPU) for ``Match exec``
lines of a parser that gpurun does not use. So this module hides Invoke during the import. Paramiko also logs the errors
that it raises; without a handler, Python would print them on stderr in the middle of the user's output.
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
# Each log call formats its message even without a handler; with thousands of packets, this takes measurable time.
_logger.setLevel(logging.CRITICAL + 1)

__all__ = ["paramiko"]
