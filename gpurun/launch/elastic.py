"""Elastic gangs with Horovod: the list of hosts for Horovod's driver, and the flags that enable it. Pure.

Facts about Horovod 0.28.1 (`runner/elastic`): the driver runs the discovery script every second and keeps the order in
which hosts first appear, so the host that appears first has rank 0. It never again uses a host name on which a rank
failed. It notices a rank's end by the end of the rank's ``ssh``, and all ranks wait for it before they continue.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpurun.jobs.spec import Grant, JobSpec

HOSTS_FILE = "launch/hosts"
"""Below the job's folder on the first host; the script prints it."""
HOSTS_SCRIPT = """#!/bin/sh
# Horovod's discovery script. At first the launcher's own host alone: it shall have rank 0, whose outputs are kept.
if [ -e /tmp/gpurun-hosts-asked ]; then cat /gpurun/hosts; else head -n 1 /gpurun/hosts; fi
: >/tmp/gpurun-hosts-asked
"""
GLOO_TIMEOUT_S = 60
"""How long ranks wait for one that says nothing: it may be on a host that died. Unless the recipe says otherwise."""
ALIVE_S = 5
"""After twice this long without an answer ``ssh`` ends, and with it, for the driver, the ranks of its host."""


def flags(spec: JobSpec, script: str) -> tuple[str, ...]:
    """Return the flags that make horovodrun elastic.

    Args:
        script: the discovery script's path in the container.
    """
    return "--min-np", str(spec.min_gpus), "--max-np", str(spec.gpus), "--host-discovery-script", script


def names(grants: Sequence[Grant], joins: Sequence[str]) -> tuple[str, ...]:
    """Return the driver's name for each host: a new name each time it joins (``n3``, ``n3+1``, ``n3+2`` …).

    Args:
        joins: hosts that joined after the start, oldest first.
    """
    return tuple(f"{g.host}+{n}" if (n := joins.count(g.host)) else g.host for g in grants)


def host_of(name: str) -> str:
    """Return the inventory's name of a host from the driver's name."""
    return name.partition("+")[0]


def hosts_text(members: Sequence[Grant], joins: Sequence[str]) -> str:
    """Return the discovery script's output: ``name:slots``, a line for each host."""
    return "".join(f"{name}:{len(g.gpus)}\n" for name, g in zip(names(members, joins), members, strict=True))
