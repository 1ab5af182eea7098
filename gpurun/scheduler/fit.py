"""How many hosts, and which free counts: the arithmetic of a best fit, without a host in sight.

A *ladder* is a list `counts` where `counts[f]` hosts have f GPUs free. A *fit* says how many hosts of each free
count to use. Fewest hosts first, then the tightest: the used hosts' free counts, largest first, are the smallest
possible in lexicographic order. Since the total that stays free is fixed, that is the same as leaving the
largest possible gang on one host, then on two hosts, and so on. GPUs left over stay together on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

Fit = tuple[int, ...]
"""Hosts to use of each free count, from the highest count down to 1. Of two fits the smaller is the tighter."""


def hosts_needed(counts: Sequence[int], gpus: int) -> int | None:
    """Fewest hosts that together have `gpus` free; None if all together have fewer."""
    hosts = 0
    for free in range(len(counts) - 1, 0, -1):
        have = counts[free]
        if have:
            if have * free >= gpus:
                return hosts + -(-gpus // free)
            gpus -= have * free
            hosts += have
    return None


def tightest(counts: Sequence[int], gpus: int, hosts: int) -> Fit:
    """The tightest fit of `gpus` on `hosts` hosts, where `hosts` is what `hosts_needed` said."""
    if gpus == hosts * (len(counts) - 1):  # whole hosts of the largest size: nothing to choose
        return (hosts, *([0] * (len(counts) - 2)))
    frees = [free for free in range(len(counts) - 1, 0, -1) for _ in range(counts[free])]
    total = list(accumulate(frees, initial=0))  # total[i] = GPUs free on the i freest hosts
    seen = 0
    fit = []
    for free in range(len(counts) - 1, 0, -1):
        seen += counts[free]
        low, high = 0, min(counts[free], hosts)
        while low < high:  # the fewest here with which the lower levels can still do the rest
            middle = (low + high) // 2
            below = total[min(seen + hosts - middle, len(frees))] - total[seen]
            if middle * free + below >= gpus:
                high = middle
            else:
                low = middle + 1
        fit.append(low)
        gpus -= low * free
        hosts -= low
    return tuple(fit)


def even(counts: Sequence[int], per_host: int, hosts: int) -> Fit:
    """The tightest `hosts` hosts with at least `per_host` free each, of which there must be enough."""
    fit = [0] * len(counts)
    for free in range(per_host, len(counts)):
        fit[free] = min(counts[free], hosts)
        hosts -= fit[free]
    return tuple(reversed(fit[1:]))
