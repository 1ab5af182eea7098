"""Run the site's own programs on hosts: ``health`` here; the limit also holds for ``prolog`` and ``epilog``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpurun.doctor.findings import one_line
from gpurun.inventory.model import Host
from gpurun.remote.agent import Agent

LIMIT_S = 60.0
LIMIT_VARIABLE = "GPURUN_HOOK_LIMIT_S"
"""Tests shorten the limit."""
ANSWER_S = 15.0
"""How long a host may take to start a program and to report its end, beyond the program's own time."""


def limit_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return for how many seconds a host lets a hook run before it ends the hook."""
    try:
        return max(0.1, min(LIMIT_S, float(environ.get(LIMIT_VARIABLE, LIMIT_S))))
    except ValueError:
        return LIMIT_S


def ask_health(agent: Agent, host: Host) -> str:
    """Let a host run the site's ``health`` program. Returns why it failed, "" if it passed or there is none.

    Raises:
        HostFailure: the host does not answer.
    """
    if not host.health:
        return ""
    limit = limit_s()
    reply = agent.call("hooks.health", timeout_s=limit + ANSWER_S, argv=list(host.health), limit_s=limit)
    return one_line(reply.value["said"])
