"""The gang's log on its way to the head: from RUNNING until the launcher's container has ended, in STOPPING too.

What ranks print between the notice and their end belongs to the log as much as the rest, so the copy goes on under the
ladder and is waited for only once the launcher has ended: until then it has no end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from gpurun.errors import HostFailure
from gpurun.remote.agent import RemoteOpFailed
from gpurun.state.path import StatePath
from gpurun.supervisor.joblog import JobLog
from gpurun.supervisor.links import Links

RETRY_S = 0.2
FULL_RETRY_S = 5.0
ENDED = ("exited", "dead", "created")
"""Docker's words for a container that prints nothing more."""


class LogCopy:
    """Copies a container's log, in a thread of its own.

    It waits for a host that cannot be reached; to reach it again is up to whoever opens `links`.
    """

    def __init__(self, links: Links, host: str, *, job: str, container: str, path: StatePath) -> None:
        self._links = links
        self._host = host
        self._job = job
        self._container = container
        self._path = path
        self._log: JobLog | None = None
        self._note: Callable[[str], None] = lambda _: None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._complete = threading.Event()
        self.last_line_s = time.monotonic()
        """When the last piece came, on the monotonic clock."""

    def start(self, note: Callable[[str], None] = lambda _: None) -> None:
        """Begin, or go on where another supervisor stopped. Idempotent.

        Args:
            note: told of damage in what was there before, and when nothing can be written.
        """
        if self._log is None:
            self._note = note
            self._log = JobLog(self._path, on_damage=note)
            self.last_line_s = time.monotonic()
            threading.Thread(target=self._copy, name="log", daemon=True).start()

    def wait(self, silent_s: float) -> bool:
        """Wait until all of it is here, as long as more of it comes; True once it is.

        For a container that has ended: of one that runs on there is no end.

        Args:
            silent_s: how long nothing may have come.
        """
        begun = time.monotonic()
        while time.monotonic() - max(begun, self.last_line_s) < silent_s:
            if self._complete.wait(RETRY_S):
                return True
        return self._complete.is_set()

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here."""
        return self._complete.is_set()

    def close(self) -> None:
        """Stop copying and close the file. Idempotent."""
        with self._lock:
            if self._log is not None and not self._closed.is_set():
                self._log.close()
            self._closed.set()

    def _copy(self) -> None:
        told = False
        while not self._closed.is_set():
            try:
                self._follow()
                told = False
                if self._has_ended():
                    break
            except RemoteOpFailed as error:
                if error.kind == "not-found":
                    break
            except HostFailure:
                pass
            except OSError as error:  # the disk is full: until it is not, the host keeps what is printed
                if not told:
                    with suppress(OSError):  # it goes to the same disk
                        self._note(f"the log cannot be written, and will be caught up: {error.strerror}")
                told = True
                self._closed.wait(FULL_RETRY_S)
                self._open_again()
            self._closed.wait(RETRY_S)
        if not self._closed.is_set():
            self._complete.set()

    def _open_again(self) -> None:
        """Go on from the last whole line: the one that could not be written may be there in part."""
        with self._lock, suppress(OSError):
            if self._log is not None and not self._closed.is_set():
                log = JobLog(self._path, on_damage=self._note)
                os.close(self._log.descriptor)
                self._log = log

    def _follow(self) -> None:
        log = self._log
        assert log is not None
        log.resume()
        with self._links.agent(self._host).stream("docker.logs", container=self._container, since=log.since) as stream:
            for reply in stream:
                if reply.value and reply.value.get("stream"):
                    with self._lock:
                        if self._closed.is_set():
                            return
                        log.take(reply.value["stream"], reply.payload)
                    self.last_line_s = time.monotonic()

    def _has_ended(self) -> bool:
        """A stream that ends tells of the container's end, or only of its engine's."""
        found = self._links.agent(self._host).call("gang.inspect", job=self._job).value
        return all(one["status"] in ENDED for one in found if one["name"] == self._container)
