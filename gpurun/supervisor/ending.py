"""What an attempt that ends still owes, and when nothing more is waited for. Pure: no host, no file, no clock.

A host owes three things: the last lines of its ranks, its outputs, and the proof that nothing of the attempt is left
there. Its GPUs wait for the proof only. The effects are in `gpurun.supervisor.stop`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gpurun.jobs.record import JobRecord
from gpurun.leases.lease import Lease

GIVE_UP_S = 10.0
"""How long hosts are asked for what they owe, and at least twice, before their GPUs count as lost."""


@dataclass(frozen=True)
class Ending:
    """What the hosts of an attempt that ends still owe.

    Attributes:
        suspects: hosts that the job avoids. They are asked, and nobody waits for them.
        lines: those whose ranks' last lines may not all be on the head.
        outputs: those that may have outputs that the head has not.
        proof: those that have not proved that nothing of the attempt is left there.
        first_asked_s: when the first proof was asked for; None before. The copies before it take nothing of its time.
        is_last: all time for it is over: what is owed after this round stays owed.
    """

    suspects: frozenset[str]
    lines: frozenset[str]
    outputs: frozenset[str]
    proof: frozenset[str]
    first_asked_s: float | None = None
    is_last: bool = False

    @classmethod
    def of(cls, record: JobRecord, hosts: Collection[str]) -> Ending:
        """How the ending of an attempt on `hosts` begins."""
        owed = frozenset() if record.reached == "nothing" else frozenset(hosts)
        printed = owed if record.reached == "containers" else frozenset()
        return cls(suspects=owed.intersection(record.avoid), lines=printed, outputs=owed, proof=owed)

    @property
    def asked(self) -> frozenset[str]:
        """The hosts that owe something that is still waited for."""
        return self.proof | self.outputs

    @property
    def is_over(self) -> bool:
        """Whether nothing more is waited for."""
        return self.is_last or self.asked <= self.suspects

    @property
    def kept(self) -> frozenset[str]:
        """Hosts without a process of the job whose outputs are not on the head: they keep them."""
        return self.outputs - self.proof

    def after_lines(self, ended: Collection[str]) -> Ending:
        """`ended` have no more lines."""
        return replace(self, lines=self.lines.difference(ended))

    def after_outputs(self, left: Collection[str]) -> Ending:
        """The outputs were copied, but those of `left`."""
        return replace(self, outputs=frozenset(left))

    def now_asked(self, now_s: float) -> Ending:
        """The proof is asked for now."""
        first_s = now_s if self.first_asked_s is None else self.first_asked_s
        return replace(self, first_asked_s=first_s, is_last=now_s - first_s > GIVE_UP_S)

    def after_fence(self, unproven: Collection[str]) -> Ending:
        """The hosts were asked, and `unproven` have not given their proof. The fence has removed the others' lines."""
        return replace(self, proof=frozenset(unproven), lines=self.lines.intersection(unproven))


def with_only_copies(record: JobRecord | None, lease: Lease, hosts: Collection[str]) -> set[str]:
    """Those of the hosts of a lost lease that may have the only copy of something that the job's last attempt wrote.

    Args:
        record: None after a person has removed the job.
    """
    if lease.found:
        return set(hosts)
    if record is None or record.outputs_left is None or record.attempt > lease.attempt or record.state.holds_gpus:
        return set()
    return set(record.outputs_left.hosts).intersection(hosts)
