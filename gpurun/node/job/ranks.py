"""The ranks of a job on this host: their starts, their ends, their output, their number.

A rank's script records when the rank started and how it ended (`gpurun.node.job.rank_folders`). A killed script records
nothing, so this module looks for its process. It counts the process as gone only if this agent has seen processes of
the job's container, because an agent in another PID namespace than the Docker engine sees none.
"""

import os
import signal
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from gpurun.node.agent import processes
from gpurun.node.agent.call import Call, OpReply
from gpurun.node.job import job_parts, rank_folders, rank_meeting, rank_processes, rank_sockets, rank_starters
from gpurun.node.job.rank_folders import STREAMS, Name, RankFolders, RankState

POLL_S = 0.1
ENDED_LOOKS = 10
"""A rank that has ended is looked at every so many polls: what it left behind may still print."""
MOST_WAIT_S = 0.5
"""So long the end of a rank waits for its last words. Copying a gigabyte takes minutes, its rank is named before.
So long, too, it waits for the end of its container, if it was killed together with its script."""
PIECE_BYTES = 1 << 16
PIECES = 16
"""So many of one output are sent before the other ranks have their turn."""
KILLED = 128 + signal.SIGKILL


def count(call: Call, job: str) -> int:
    """Return the number of processes of ranks."""
    return len(rank_processes.of_job(job))


def list_ranks(call: Call, job: str, attempt: int) -> List[Dict[str, Any]]:
    """Return the ranks that have reported here, in the order of their start.

    Returns:
        A list of ``{"id", "rank", "code", "age_s"}``: ``rank`` is the present number, which an elastic launcher may
        have changed; ``code`` is None for a running rank; ``age_s`` is the time since its start.
    """
    scripts = _Scripts(job, attempt)
    found = []
    with RankFolders(job, attempt) as folder:
        for name in folder.names():
            seen = folder.see(name.id)
            if seen is not None:
                code = seen.code if seen.code is not None else KILLED if scripts.is_gone(name) else None
                age_s = rank_folders.age_s(seen.begun_s)
                found.append({"id": name.id, "rank": folder.number_now(name), "code": code, "age_s": age_s})
    return found


def follow(
    call: Call, job: str, attempt: int, have: Dict[str, List[int]], once: bool = False, rest_bytes: Optional[int] = None
) -> Iterator[OpReply]:
    """Yield what ranks report and print, as it happens, until cancelled.

    Args:
        have: by rank's id, how much of each of `STREAMS` is already known. Output continues there; starts and ends are
            reported again.
        once: end after everything present has been sent.
        rest_bytes: skip what all ranks have printed but for about so many last bytes; None = skip nothing.

    Yields:
        ``{"kind": "start", "id", "rank", "age_s"}``;
        ``{"kind": "output", "id", "rank", "stream", "end"}``: ``stream`` is one of `STREAMS`; the payload of at
        most 64 KiB ends at the offset ``end``;
        ``{"kind": "end", "id", "rank", "code", "age_s"}``: after all earlier output; if that takes long, before the
        rest of it, with ``"more": True``. A rank whose script was killed, too, has code 137 and ``"killed": True``,
        with ``"container": True`` if all other processes in its container ended with it; if another code follows later,
        that one is right. An id is new for every start of a rank, also after the host has left the gang and come back.
    """
    scripts = _Scripts(job, attempt)
    ranks: Dict[str, _Rank] = {}
    look = 0
    while True:
        more = is_due = False
        with RankFolders(job, attempt) as folder:
            for name in folder.names():
                rank = ranks.get(name.id)
                if rank is None:
                    rank = ranks[name.id] = _Rank(name, have.get(name.id, ()))
                    if rest_bytes is not None:
                        rank.skip(folder, rest_bytes // max(1, len(folder.names())))
                if rank.code is None or rank.more or look % ENDED_LOOKS == 0:
                    yield from rank.news(folder, scripts)
                    more, is_due = more or rank.more, is_due or rank.is_due
        look += 1
        if once and not more and not is_due:
            return
        call.wait(0.0 if more else POLL_S)


def release(call: Call, job: str, attempt: int, known: Dict[str, List[int]]) -> Dict[str, int]:
    """Free the disk space of output that the head has synced. `follow` continues after it.

    Args:
        known: by rank's id, how much of each of `STREAMS` the head has on its disk.

    Returns:
        ``{"bytes"}``: how many were freed.
    """
    freed = 0
    with RankFolders(job, attempt) as folder:
        for name in folder.names():
            for stream, until in zip(STREAMS, known.get(name.id, ())):
                freed += folder.release(name.id, stream, int(until))
    return {"bytes": freed}


class _Scripts:
    """The processes of scripts that have not recorded an end."""

    def __init__(self, job: str, attempt: int) -> None:
        self._job = job
        self._attempt = attempt
        self._found: Dict[str, Optional[processes.Process]] = {}
        self._sees_containers = False

    def is_gone(self, name: Name) -> bool:
        """Return whether a script that has reported its start no longer runs."""
        if name.id not in self._found:
            self._look()
            self._found.setdefault(name.id, None)
        process = self._found[name.id]
        return self._sees_containers if process is None else not processes.is_same(process)

    def fell_with_container(self, name: Name) -> bool:
        """Return whether a script that was running is gone together with everything else in the job's container."""
        return self._found.get(name.id) is not None and job_parts.is_ending(self._job)

    def _look(self) -> None:
        living = processes.list_processes()
        with RankFolders(self._job, self._attempt) as folder:
            for name in folder.names():
                process = rank_processes.script_of(self._job, name, living)
                if process is not None:
                    self._found.setdefault(name.id, process)
        main = processes.noted(os.path.join(job_parts.folder(self._job), job_parts.MAIN_FILE))
        self._sees_containers = self._sees_containers or any(self._found.values()) or main is not None


class _Due(NamedTuple):
    """An end to report. `ended_s` is by the host's clock; `since_s`, when it was seen, by the monotonic clock."""

    code: int
    sizes: Tuple[int, ...]
    ended_s: float
    since_s: float
    is_killed: bool = False


class _Rank:
    """How much of one rank has been reported."""

    def __init__(self, name: Name, have: Sequence[int]) -> None:
        self._name = name
        self._offsets = [max(0, int(have[index])) if index < len(have) else 0 for index in range(len(STREAMS))]
        self._begun = False
        self._due: Optional[_Due] = None
        self.code: Optional[int] = None
        """The last that was told."""
        self.more = False
        """Whether there is more to send than was sent."""

    @property
    def is_due(self) -> bool:
        """Return whether its end is known but not reported yet."""
        return self._due is not None

    def skip(self, folder: RankFolders, rest_bytes: int) -> None:
        """Continue at a line that begins in the last `rest_bytes` of each output."""
        seen = folder.see(self._name.id)
        if seen is None:
            return
        for index, stream in enumerate(STREAMS):
            begin = seen.sizes[index] - rest_bytes
            if begin > self._offsets[index]:
                _, data = folder.read(self._name.id, stream, begin, PIECE_BYTES)
                self._offsets[index] = begin + data.find(b"\n") + 1

    def news(self, folder: RankFolders, scripts: _Scripts) -> Iterator[OpReply]:
        """Yield its start, its new output, its end."""
        seen = folder.see(self._name.id)
        if seen is None:
            self.more = False
            return
        if not self._begun:
            self._begun = True
            yield self._say("start", age_s=rank_folders.age_s(seen.begun_s))
        self._note_end(seen, folder, scripts)
        self.more = False
        for index, stream in enumerate(STREAMS):
            yield from self._output(folder, index, stream, seen.sizes[index])
        if self._due is not None:
            due = self._due
            is_all = all(offset >= min(due.sizes[i], seen.sizes[i]) for i, offset in enumerate(self._offsets))
            is_gone = due.is_killed and scripts.fell_with_container(self._name)
            is_known = is_all and (is_gone or not due.is_killed)
            if is_known or time.monotonic() - due.since_s >= MOST_WAIT_S:
                self._due, self.code = None, due.code
                facts = {"killed": due.is_killed, "container": is_gone, "more": not is_all}
                told = {name: True for name, is_so in facts.items() if is_so}
                yield self._say("end", code=due.code, age_s=rank_folders.age_s(due.ended_s), **told)

    def _note_end(self, seen: RankState, folder: RankFolders, scripts: _Scripts) -> None:
        """Make an unreported end due after all present output has been sent."""
        if seen.code is None and self.code is None and self._due is None and scripts.is_gone(self._name):
            again = folder.see(self._name.id)  # it may have noted its end just before it went
            if again is not None and again.code is not None:
                seen = again
            else:
                self._due = _Due(KILLED, seen.sizes, time.time(), time.monotonic(), is_killed=True)
        if seen.code is not None and seen.code != self.code and (self._due is None or self._due.code != seen.code):
            self._due = _Due(seen.code, seen.sizes, seen.ended_s, time.monotonic())

    def _output(self, folder: RankFolders, index: int, stream: str, size: int) -> Iterator[OpReply]:
        if self._offsets[index] > size:
            self._offsets[index] = 0  # the program has cut it short
        for _ in range(PIECES):
            begin = self._offsets[index]
            end, data = folder.read(self._name.id, stream, begin, PIECE_BYTES)
            if end == begin:
                return
            self._offsets[index] = end
            yield OpReply(self._say("output", stream=stream, end=end).value, data)
        self.more = self.more or self._offsets[index] < size

    def _say(self, kind: str, **facts: Any) -> OpReply:
        return OpReply({"kind": kind, "id": self._name.id, "rank": self._name.rank, **facts})


def starters(call: Call, job: str, attempt: int, names: List[List[str]]) -> List[Dict[str, Any]]:
    """Return the ranks that have started one of these programs: `rank_starters.find`."""
    return rank_starters.find(job, attempt, names)


OPS = {
    "count": count,
    "cut": rank_sockets.cut,
    "follow": follow,
    "list": list_ranks,
    "look": rank_meeting.look,
    "release": release,
    "starters": starters,
}
