"""Messages of a waiting command on stderr: what it waits for, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gpurun.cli.printing import duration, printable, say
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder

FIRST_S, EVERY_S = 5.0, 30.0
MOST_NAMED = 3


class Patience:
    """Says what a command waits for: after 5 s, then every 30 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._due_s = self._began_s + FIRST_S

    def tell(self, what: Callable[[], str]) -> None:
        """Print the message if it is due.

        Args:
            what: returns what the command waits for; called only if a message is due.
        """
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            say(f"waited {duration(now_s - self._began_s)} so far: {printable(what())}")


def jobs_in_words(folders: Iterable[JobFolder]) -> str:
    """Return a text such as ``j-1 is STOPPING, j-2 is RUNNING and 4 more jobs``."""
    records = [record for folder in folders if not (record := folder.record()).state.ended]
    named = ", ".join(f"{record.id} is {record.state.value}" for record in records[:MOST_NAMED])
    more = len(records) - MOST_NAMED
    checks = "gpurun checks that the jobs left no process on their hosts"
    return f"{named} and {count(more, 'more job')}" if more > 0 else named or checks
