"""Build the probe as one file: ``python3 probe.pyz`` prints a host's document."""

from __future__ import annotations

import io
import zipfile

from gpurun.remote.bootstrap import agent_zip

_MAIN = "from gpurun.node.probe.probe import main\n\nmain()\n"


def probe_pyz() -> bytes:
    """Return a zipapp (PEP 441) with the agent's own modules and pynvml. The same code gives the same bytes."""
    archive = io.BytesIO(b"#!/usr/bin/env python3\n" + agent_zip())
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as out:
        out.writestr(zipfile.ZipInfo("__main__.py"), _MAIN)
    return archive.getvalue()
