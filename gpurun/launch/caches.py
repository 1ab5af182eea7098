"""Which caches of models and kernels the ranks of a host get, and the variables that lead there. Pure."""

from __future__ import annotations

from collections.abc import Collection

from gpurun.inventory.model import Host
from gpurun.jobs.spec import JobSpec
from gpurun.launch.fabric import Setting
from gpurun.node.gpu.claim_rules import Claimant
from gpurun.node.job.cache_rules import ALONE, FOLLOW_XDG, TARGET, VARIABLES


def owner_of(claimant: Claimant) -> str:
    """Return whose caches a job uses: nobody else's job on the host sees them, under whatever account."""
    return f"{claimant.state}-{claimant.uid}"


def owner_on(host: Host, spec: JobSpec, claimant: Claimant) -> str | None:
    """Return whose caches a job's ranks get on a host; None = nobody's."""
    return owner_of(claimant) if _has_caches(host, spec) else None


def _has_caches(host: Host, spec: JobSpec) -> bool:
    """Return whether a job's ranks get the user's caches on a host. What a recipe mounts in their place wins."""
    folders = [target for _, target, _ in spec.mounts]
    folders += [each for each in (spec.outputs, spec.scratch) if each is not None]
    return host.cache_quota_mib is not None and not any(_overlap(TARGET, each) for each in folders)


def _overlap(one: str, other: str) -> bool:
    first, second = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return first.startswith(second) or second.startswith(first)


def settings(host: Host, spec: JobSpec, image_sets: Collection[str]) -> list[Setting]:
    """Return the variables that lead to the caches, without those that the user or the image sets.

    Who sets HOME or XDG_CACHE_HOME has said where the caches are that follow it.
    """
    if not _has_caches(host, spec):
        return []
    given = {*spec.env, *image_sets}
    is_said = "XDG_CACHE_HOME" in given or "HOME" in spec.env
    left_out = {*given, *(("XDG_CACHE_HOME", *FOLLOW_XDG) if is_said else ())}
    why = "the user's jobs share the caches on this host"
    found = [Setting(name, path, why, "inventory") for name, path in VARIABLES.items() if name not in left_out]
    alone = "jobs do not share this cache, because a killed build leaves a lock"
    return found + [Setting(name, path, alone, "default") for name, path in ALONE.items() if name not in left_out]
