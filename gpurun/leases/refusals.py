"""What a user's jobs learned from hosts that refused a GPU. Pure.

The host knows all claims on its GPUs, and all processes; the leases of this state directory do not. After a refusal
(by a claim, or by pre-flight because of a process that no gpurun job started), the next passes treat
these GPUs as taken for some seconds, so that they place the gang elsewhere, and then try again. A refusal affects only
gangs of the same user, so false refusals harm no other user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpurun.jobs.record import GpuHolder, HostRefusal, JobRecord

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
FORGET_S = 600.0
"""A host that refused so long ago starts again with the first pause."""


def remember(
    before: Sequence[HostRefusal], refused: Mapping[str, Iterable[GpuHolder]], *, now_s: float
) -> tuple[HostRefusal, ...]:
    """Add a refusal to a job's refusals. Each host that refuses again is left alone for twice as long.

    A host need not name all its held GPUs. Its earlier refusals of other GPUs stay valid until they expire.

    Args:
        before: the refusals in the job's record.
        refused: host → who holds its GPUs.
        now_s: the head's clock, seconds since the epoch.
    """
    renewed = {host: {gpu for holder in holders for gpu in holder.gpus} for host, holders in refused.items()}
    kept = [
        each for each in before
        if abs(now_s - each.until_s) < FORGET_S
        and (each.host not in renewed or (each.until_s > now_s and not renewed[each.host].issuperset(each.holder.gpus)))
    ]  # fmt: skip
    for host, holders in refused.items():
        pauses = [each.pause_s for each in before if each.host == host and abs(now_s - each.until_s) < FORGET_S]
        pause_s = min(2 * max(pauses), LONGEST_PAUSE_S) if pauses else FIRST_PAUSE_S
        kept += [HostRefusal(host, holder, until_s=now_s + pause_s, pause_s=pause_s) for holder in holders]
    return tuple(kept)


def active(records: Iterable[JobRecord], uid: int, now_s: float) -> tuple[HostRefusal, ...]:
    """Return the valid refusals of one user's jobs. A clock that was set back extends none."""
    return tuple(
        refusal
        for record in records
        if record.owner_uid == uid
        for refusal in record.refusals
        if 0.0 < refusal.until_s - now_s <= LONGEST_PAUSE_S
    )


def refused_gpus(records: Iterable[JobRecord], uid: int, now_s: float) -> Mapping[str, tuple[int, ...]]:
    """Return host → GPUs that this user's gangs must not use now, because the host recently refused them.

    Args:
        records: jobs of one inventory, which defines the hosts' names.
        uid: the user whose gangs are placed.
        now_s: the head's clock, seconds since the epoch.
    """
    found: dict[str, set[int]] = {}
    for refusal in active(records, uid, now_s):
        found.setdefault(refusal.host, set()).update(refusal.holder.gpus)
    return {host: tuple(sorted(gpus)) for host, gpus in sorted(found.items())}


def next_try_s(records: Iterable[JobRecord], uid: int, now_s: float) -> float | None:
    """Return when the first of this user's refusals ends, seconds since the epoch; None if none is valid."""
    return min((refusal.until_s for refusal in active(records, uid, now_s)), default=None)
