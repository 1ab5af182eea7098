"""How busy a job's GPUs on this host are: NVML's answers of up to half a minute as one item for each GPU."""

import time
from typing import Any, Callable, Dict, Iterable, List

from gpurun.node.gpu.claim_rules import Card

FIRST_S, EVERY_S = 5.0, 30.0
"""The first lines come after 5, 10 and 20 s, then one every half minute: what follows the last is not counted. With
lines after 5 and 35 s only, a job of 24 s that kept an H200 at 99 % was 1 % busy, because its first 5 s were its start.
"""


class UseTally:
    """Adds up NVML's answers. Each GPU has the index and UUID of its card."""

    def __init__(self, cards: Iterable[Card], clock: Callable[[], float] = time.monotonic) -> None:
        self._uuids = dict(cards)
        self._clock = clock
        self._due_s, self._gap_s = clock() + FIRST_S, FIRST_S
        self._seen: Dict[int, List[Dict[str, int]]] = {}

    def add(self, said: Dict[str, Any]) -> List[Dict[str, Any]]:
        """Add one answer of NVML. Returns the item for the head when it is due, else nothing.

        The item is ``{"kind": "use", "gpus": [{"index", "uuid", "samples", "mean", "most", "memory_mib"}…]}``: use in
        percent, and the most memory in use.
        """
        for gpu in said.get("gpus", []):
            if gpu.get("use") is not None:
                self._seen.setdefault(gpu["index"], []).append(gpu)
        if not self._seen or self._clock() < self._due_s:
            return []
        self._due_s, self._gap_s = self._clock() + self._gap_s, min(2 * self._gap_s, EVERY_S)
        seen, self._seen = self._seen, {}
        return [{"kind": "use", "gpus": [self._line(index, each) for index, each in sorted(seen.items())]}]

    def _line(self, index: int, each: List[Dict[str, int]]) -> Dict[str, Any]:
        uses = [gpu["use"] for gpu in each]
        return {
            "index": index,
            "uuid": self._uuids.get(index, ""),
            "samples": len(uses),
            "mean": round(sum(uses) / len(uses), 1),
            "most": max(uses),
            "memory_mib": max(gpu.get("memory_mib") or 0 for gpu in each),
        }
