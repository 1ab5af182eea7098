"""An elastic gang: the list of hosts that Horovod's driver asks for, and the flags that make it ask. Pure.

Facts behind it, of Horovod 0.28.1 (`runner/elastic`): the driver runs the discovery script every second and keeps the
order in which hosts first appear, so that the host that appears first has rank 0; a host on which a rank failed is
never used again under its name; a rank's end is known by the end of its ``ssh``, and all wait for it before they go on.
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
    """What makes horovodrun elastic.

    Args:
        script: the discovery script's path in the container.
    """
    return "--min-np", str(spec.min_gpus), "--max-np", str(spec.gpus), "--host-discovery-script", script


def names(grants: Sequence[Grant], joins: Sequence[str]) -> tuple[str, ...]:
    """What the driver calls each host: another name each time it comes (``n3``, ``n3+1``, ``n3+2`` …).

    Args:
        joins: hosts that came after the start, oldest first.
    """
    return tuple(f"{g.host}+{n}" if (n := joins.count(g.host)) else g.host for g in grants)


def host_of(name: str) -> str:
    """The inventory's name for what the driver calls a host."""
    return name.partition("+")[0]


def hosts_text(members: Sequence[Grant], joins: Sequence[str]) -> str:
    """The discovery script's answer: ``name:slots``, a line for each host."""
    return "".join(f"{name}:{len(g.gpus)}\n" for name, g in zip(names(members, joins), members, strict=True))
