"""Track what hosts of an ending attempt still owe, and when to stop waiting. Pure: no host, no file, no clock.

A host owes three things: the last lines of its ranks, its outputs, and a successful fence. Only the fence delays the
release of its GPUs. `gpurun.supervisor.stop` does the work.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gpurun.jobs.record import JobRecord
from gpurun.leases.lease import Lease

GIVE_UP_S = 10.0
"""gpurun tries for this time, and at least twice, to fence a host before its GPUs count as lost."""


@dataclass(frozen=True)
class Ending:
    """What the hosts of an ending attempt still owe.

    Attributes:
        suspects: hosts that the job avoids. gpurun asks them, but does not wait for their answers.
        lines: hosts whose ranks' last lines may not all be on the head.
        outputs: hosts with outputs that the head may not have.
        proof: hosts that are not fenced yet.
        first_asked_s: when the first fence began; None before. The copies before it do not use its time.
        is_last: all time is used up: what hosts owe after this round stays owed.
    """

    suspects: frozenset[str]
    lines: frozenset[str]
    outputs: frozenset[str]
    proof: frozenset[str]
    first_asked_s: float | None = None
    is_last: bool = False

    @classmethod
    def of(cls, record: JobRecord, hosts: Collection[str]) -> Ending:
        """Return the initial state for an attempt on `hosts`."""
        owed = frozenset() if record.reached == "nothing" else frozenset(hosts)
        printed = owed if record.reached == "containers" else frozenset()
        suspects = owed.intersection((*record.avoid, *record.failed_to_start))
        return cls(suspects=suspects, lines=printed, outputs=owed, proof=owed)

    @property
    def asked(self) -> frozenset[str]:
        """Return the hosts that owe something that is still awaited."""
        return self.proof | self.outputs

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is awaited."""
        return self.is_last or self.asked <= self.suspects

    @property
    def kept(self) -> frozenset[str]:
        """Return hosts without a process of the job whose outputs are not on the head. They keep their outputs."""
        return self.outputs - self.proof

    def after_lines(self, ended: Collection[str]) -> Ending:
        """Return the state after all lines of `ended` were copied."""
        return replace(self, lines=self.lines.difference(ended))

    def after_outputs(self, left: Collection[str]) -> Ending:
        """Return the state after the outputs were copied, except those of `left`."""
        return replace(self, outputs=frozenset(left))

    def now_asked(self, now_s: float) -> Ending:
        """Return the state when the fence begins."""
        first_s = now_s if self.first_asked_s is None else self.first_asked_s
        return replace(self, first_asked_s=first_s, is_last=now_s - first_s > GIVE_UP_S)

    def after_fence(self, unproven: Collection[str]) -> Ending:
        """Return the state after the fence, which failed on `unproven`. The fence has removed the others' lines."""
        return replace(self, proof=frozenset(unproven), lines=self.lines.intersection(unproven))


def with_only_copies(record: JobRecord | None, lease: Lease, hosts: Collection[str]) -> set[str]:
    """Return hosts of a lost lease that may have the only copy of something that the job's last attempt wrote.

    Args:
        record: None after a person has removed the job.
    """
    if lease.found:
        return set(hosts)
    if record is None or record.outputs_left is None or record.attempt > lease.attempt or record.state.holds_gpus:
        return set()
    return set(record.outputs_left.hosts).intersection(hosts)
