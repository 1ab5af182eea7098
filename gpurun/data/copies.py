"""Check a host's copy of a data set, and discard a damaged one."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpurun.errors import HostFailure
from gpurun.remote import Agent, RemoteOpFailed
from gpurun.remote.agent import bad_answer

SILENCE_S, READ_LIMIT_S = 120.0, 6 * 3600.0
DISCARD_LIMIT_S = 600.0


class DamagedCopy(HostFailure):
    """A host says that its copy of a set is not what the set's digest says."""


class Unusable(HostFailure):
    """A host cannot use what another host sends. It is unknown which of the two is at fault."""


def damage_of(agent: Agent, digest: str, check: Callable[[], object]) -> DamagedCopy | None:
    """Let a host read its whole copy of a set; return the damage that it finds.

    Args:
        check: called repeatedly; raises to stop.

    Raises:
        HostFailure: the host has no copy, or does not read it in time.
    """
    deadline = time.monotonic() + READ_LIMIT_S
    try:
        with agent.stream("data.verify", digest=digest, silence_s=SILENCE_S) as progress:
            for _ in progress:
                check()
                if time.monotonic() > deadline:
                    raise HostFailure(
                        f"the host did not read its copy of the data within {READ_LIMIT_S:g} s", host=agent.host
                    )
    except RemoteOpFailed as error:
        if error.kind != "corrupt":
            raise
        hint = "remove the damaged copy with `gpurun data evict`, and submit the job again"
        return DamagedCopy(f"the host's copy of the data is damaged: {error.message}", host=agent.host, hint=hint)
    return None


def discard(agent: Agent, digest: str, job: str) -> None:
    """Remove a host's damaged copy of a set.

    Args:
        job: uses the copy, but has not started.

    Raises:
        HostFailure: another job uses it, or the host sends it at the moment.
    """
    kept = agent.call("data.evict", digests=[digest], job=job, timeout_s=DISCARD_LIMIT_S).value
    if not kept.keys() <= {digest}:
        raise bad_answer(agent.host, "the host's answer to data.evict names a data set that gpurun did not ask for")
    if kept:
        raise HostFailure(
            f"the host's copy of the data is damaged, and gpurun cannot replace the copy: {kept[digest]}",
            host=agent.host,
        )
