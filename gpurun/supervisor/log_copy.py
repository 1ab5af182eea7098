"""Copy the gang's log to the head: all output of the launcher and the ranks, until all of them have ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from gpurun.errors import OUTLIVED, HostFailure, StateError, words_of
from gpurun.node.job.rank_processes import STREAMS
from gpurun.remote.agent import BAD_ANSWER, Agent, RemoteOpFailed, Reply
from gpurun.state.paths import StatePath
from gpurun.supervisor.links import Links
from gpurun.supervisor.log import JobLog
from gpurun.supervisor.ranks import RankReports

RETRY_S = 0.2
FULL_RETRY_S = 5.0
RELEASE_BYTES = 16 << 20
"""How much ranks of a host print until the host may forget what is safe on the head: their disks are finite."""
REST_BYTES = 128 << 20
"""What all ranks of a host have printed last, and is copied after their end however much there is. GPUs wait for it."""
PACE_BYTES, PACE_S = 1 << 20, 20.0
"""What is left on a host is copied as long as so much comes in this time: a host can lie, or fall silent, for ever."""
ENDED = ("exited", "dead", "created")
"""Docker's words for a container that prints nothing more."""


class LogCopy:
    """Copies the log of an attempt: one thread for its launcher, and one for the ranks of each host.

    Waits for a host that cannot be reached; the owner of `links` reconnects.

    Args:
        reports: gets what hosts report about ranks, beside their output.
    """

    def __init__(
        self, links: Links, first: str, *, job: str, attempt: int, container: str, path: StatePath,
        clock: Callable[[], float], reports: RankReports, limit: int | None = None,
    ) -> None:  # fmt: skip
        self._links = links
        self._first = first
        self._job = job
        self._attempt = attempt
        self._container = container
        self._path = path
        self._clock = clock
        self._reports = reports
        self._limit = limit
        self._log: JobLog | None = None
        self._note: Callable[[str], None] = lambda _: None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._launcher_ended = threading.Event()
        self._followed: dict[str, object] = {}  # the turn: a host that has left may come back
        self._is_started = self._told_full = False
        self.last_line_s = time.monotonic()
        """When the last piece came, on the monotonic clock."""
        self.launcher_line_s = time.monotonic()
        """When the last piece of the launcher's own came."""

    def start(self, note: Callable[[str], None] = lambda _: None) -> None:
        """Start to copy the launcher's log, or continue where another supervisor stopped. Idempotent.

        Args:
            note: receives messages about damage in the existing log, and about failed writes.

        Raises:
            StateError: the log cannot be opened.
        """
        if not self._is_started:
            self._note = note
            with self._lock:
                self._log = self._opened()
            self._is_started = True
            self.last_line_s = time.monotonic()
            threading.Thread(target=self._copy_launcher, name="log", daemon=True).start()

    def follow(self, hosts: Iterable[str]) -> None:
        """Start to copy the output of the ranks on these hosts. Idempotent."""
        for host in hosts:
            if host not in self._followed:
                turn = self._followed[host] = object()
                threading.Thread(target=self._copy_ranks, args=(host, turn), name=f"log {host}", daemon=True).start()

    def forget(self, hosts: Iterable[str]) -> None:
        """Stop to follow hosts, and discard the reports of their ranks."""
        for host in hosts:
            self._followed.pop(host, None)
            with self._lock:
                self._reports.forget(host)

    def wait_for_launcher(self, silent_s: float) -> bool:
        """Wait until all of the launcher's output is here, while some still arrives; return True once it is.

        Call it only for an ended launcher: the output of a running one has no end.

        Args:
            silent_s: the longest wait without new output.
        """
        begun = time.monotonic()
        while time.monotonic() - max(begun, self.last_line_s) < silent_s:
            if self._launcher_ended.wait(RETRY_S):
                return True
        return self._launcher_ended.is_set()

    @property
    def has_launchers_log(self) -> bool:
        """Return whether all output of the ended launcher is here."""
        return self._launcher_ended.is_set()

    def take_rest(self, hosts: Iterable[str], most_s: float) -> None:
        """Copy the rest from these hosts, whose containers have been killed. Skips hosts that do not answer.

        If more is left than `REST_BYTES` of a host, copies the last of it, and the log says how much is missing.

        Args:
            most_s: the longest time; the GPUs stay leased meanwhile.
        """
        until_s = time.monotonic() + most_s

        def take(agent: Agent) -> None:
            if agent.host in self._followed:
                turn = self._followed[agent.host] = object()  # the thread that follows stops: it would copy all of it
                try:
                    self._take_all(agent, turn, once=True, until_s=until_s)
                except _Closed:
                    pass
                except HostFailure as error:
                    self._say(f"gpurun could not copy the last lines of the ranks on {agent.host}: {error.message}")
                    raise
                except (OSError, StateError) as error:
                    self._say_lost(error)

        self._links.each(take, hosts)

    def close(self) -> None:
        """Stop copying and close the file. Idempotent. Ignores a full disk."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            log, self._log = self._log, None
        if log is not None:
            try:
                log.close()
            except OSError as error:
                self._say_lost(error)

    # -- the launcher -------------------------------------------------------------------------------------

    def _copy_launcher(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow_launcher()
                if self._has_ended():
                    break
            except RemoteOpFailed as error:
                if error.kind == "not-found":
                    break
                self._name_liar(error)
            except (HostFailure, _Closed):
                pass
            except OUTLIVED as error:  # the head's own
                self._wait_for_room(error)
            self._closed.wait(RETRY_S)
        if not self._closed.is_set():
            self._launcher_ended.set()

    def _follow_launcher(self) -> None:
        with self._writing() as log:
            log.resume()
            since = log.since
        agent = self._links.agent(self._first)
        with agent.stream("docker.logs", container=self._container, since=since) as stream:
            for reply in stream:
                if reply.value and reply.value.get("stream"):
                    with self._writing(log):
                        log.take(reply.value["stream"], reply.payload)
                        self.launcher_line_s = time.monotonic()

    def _has_ended(self) -> bool:
        """Return whether the container has ended: the end of its stream may only mean that the engine stopped."""
        found = self._links.agent(self._first).call("gang.inspect", job=self._job).value
        return all(one["status"] in ENDED for one in found if one["name"] == self._container)

    # -- ranks --------------------------------------------------------------------------------------------

    def _copy_ranks(self, host: str, turn: object) -> None:
        while self._is_followed(host, turn):
            try:
                self._take_all(self._links.agent(host), turn)
            except RemoteOpFailed as error:
                self._name_liar(error)
            except (HostFailure, _Closed):
                pass
            except OUTLIVED as error:  # the head's own
                self._wait_for_room(error)
            self._closed.wait(RETRY_S)

    def _take_all(self, agent: Agent, turn: object, *, once: bool = False, until_s: float | None = None) -> None:
        with self._writing() as log:
            have = log.have(agent.host)
        came = since = 0
        came_s = time.monotonic()
        silence_s = None if until_s is None else min(PACE_S, max(1.0, until_s - came_s))
        with agent.stream(
            "ranks.follow",
            job=self._job,
            attempt=self._attempt,
            have=have,
            once=once,
            silence_s=silence_s,
            rest_bytes=REST_BYTES if once else None,
        ) as stream:
            for reply in stream:
                if not self._is_followed(agent.host, turn):
                    return
                if since >= PACE_BYTES:
                    since, came_s = 0, time.monotonic()
                if until_s is not None and time.monotonic() > min(until_s, came_s + PACE_S):
                    self._note(
                        f"ranks on {agent.host} printed more than gpurun could copy in time, so their "
                        "last lines are lost"
                    )
                    return
                self._take(log, agent.host, turn, reply)
                came, since = came + len(reply.payload), since + len(reply.payload)
                if came >= RELEASE_BYTES:
                    came = 0
                    self._release(agent, log)

    def _release(self, agent: Agent, log: JobLog) -> None:
        """Allow a host to discard output that is synced on the head's disk. Without this, the host keeps all of it."""
        with self._writing(log):
            log.sync()
            known = log.have(agent.host)
        with suppress(RemoteOpFailed):
            agent.call("ranks.release", job=self._job, attempt=self._attempt, known=known)

    def _is_followed(self, host: str, turn: object) -> bool:
        return not self._closed.is_set() and self._followed.get(host) is turn

    def _take(self, log: JobLog, host: str, turn: object, reply: Reply) -> None:
        """Process one event of ``ranks.follow``. Checks the host's words, because they become part of the log's
        lines.
        """
        said = reply.value
        if not self._reports.believes(host, said, self._say):
            return
        if reply.payload and isinstance(said, dict) and _is_output(said, len(reply.payload)):
            with self._writing(log):
                log.take_output(f"{host}/{said['id']}", said["rank"], said["stream"], said["end"], reply.payload)
            return
        rank = self._reports.rank_in(host, said, time.monotonic())
        if rank and rank.code is not None and not said.get("more"):  # its last words are here before anybody judges it
            with self._writing(log):
                log.end_lines(f"{host}/{rank.id}")
        with self._lock:
            if rank and self._is_followed(host, turn):  # else `forget` has come meanwhile
                self._reports.keep(rank)

    def _name_liar(self, error: RemoteOpFailed) -> None:
        """Report once a host whose answers cannot be true. Its ranks' output is lost."""
        if error.kind == BAD_ANSWER and error.host:
            self._reports.accuse(error.host, f"the output of ranks on {error.host} is lost: {error.message}", self._say)

    # -- the file -----------------------------------------------------------------------------------------

    def _opened(self) -> JobLog:
        return JobLog(self._path, attempt=self._attempt, now=self._clock, on_damage=self._note, limit=self._limit)

    @contextmanager
    def _writing(self, mine: JobLog | None = None) -> Iterator[JobLog]:
        """Give one thread at a time the log. Reopens it after a failure, which may have left a partial line.

        Args:
            mine: the log with which the caller began.

        Raises:
            _Closed: it is closed, or has been reopened: what the caller knows about it is outdated.
            OSError, StateError: it cannot be written.
        """
        with self._lock:
            if self._closed.is_set() or (mine is not None and mine is not self._log):
                raise _Closed
            if self._log is None:
                self._log = self._opened()
            try:
                yield self._log
            except OSError:
                broken, self._log = self._log, None
                os.close(broken.descriptor)
                raise
            if mine is not None:
                self.last_line_s = time.monotonic()
                self._told_full = False

    def _wait_for_room(self, error: Exception) -> None:
        """Wait while the disk is full, or this machine is short of something. Meanwhile the hosts keep the output."""
        if not self._told_full:
            self._told_full = True
            why = getattr(error, "strerror", words_of(error))
            self._say(f"gpurun cannot write the log now and will add the missing lines later: {why}")
        self._closed.wait(FULL_RETRY_S)

    def _say_lost(self, error: OSError | StateError) -> None:
        self._say(f"gpurun could not write the end of the log: {getattr(error, 'strerror', error)}")

    def _say(self, text: str) -> None:
        with suppress(OSError, StateError):  # it goes to the same disk
            self._note(text)


class _Closed(Exception):
    """The log is closed, or was reopened."""


def _is_output(said: dict[object, object], length: int) -> bool:
    ident, rank, end = said.get("id"), said.get("rank"), said.get("end")
    return (
        said.get("kind") == "output" and said.get("stream") in STREAMS
        and isinstance(ident, str) and 0 < len(ident) <= 64 and not set(ident) - set("0123456789.")
        and type(rank) is int and rank >= 0 and type(end) is int and end >= length
    )  # fmt: skip
