"""Fetch the files that the next copy of a job's outputs needs from their hosts. They arrive beside the present copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpurun.errors import HostFailure
from gpurun.node.agent import frames
from gpurun.node.agent.call import OpError
from gpurun.node.folder import batches
from gpurun.node.folder.beginnings import Begun
from gpurun.node.folder.contents import Listed
from gpurun.node.folder.making import Receiver
from gpurun.quantities.counts import count
from gpurun.remote.agent import Agent
from gpurun.state.path import may_pass
from gpurun.supervisor.outputs_arriving import Arriving
from gpurun.supervisor.outputs_listed import SILENCE_S, Unbrought
from gpurun.supervisor.outputs_plan import CopyPlan
from gpurun.supervisor.outputs_room import OutputsRoom
from gpurun.supervisor.outputs_versions import Origin, Versions


class Arrival:
    """Fetches the files that the next copy needs."""

    def __init__(
        self,
        arriving: Arriving,
        room: OutputsRoom,
        versions: Versions,
        *,
        job: str,
        force: bool,
        cancelled: Callable[[], bool],
    ) -> None:
        self._arriving = arriving
        self._versions = versions
        self._room = room
        self._came = 0
        self._job = job
        self._force = force
        self._cancelled = cancelled
        self.unbrought: list[Unbrought] = []
        self.origins: dict[str, Origin] = {}

    def fetch_all(self, plan: CopyPlan, agents: Mapping[str, Agent]) -> None:
        """Fetch every planned file, from an earlier copy's files or from its host."""
        left = {host: self._resume(host, wanted) for host, wanted in plan.fetched.items()}
        self._arriving.forget_others()
        for host, (lacking, begun) in left.items():
            if lacking:
                self._arriving.of(host)
                self._fetch(agents[host], lacking, begun)
        for path, first in plan.twins.items():
            if first in self.origins:
                self.origins[path] = self.origins[first]

    def refused(self, refused: Sequence[tuple[str, OSError]]) -> None:
        """Report what the head's file system refuses, with everything below it."""
        for path, error in refused:
            lost = [path, *(name for name in self.origins if name.startswith(f"{path}/"))]
            for name in lost:
                host, _ = self.origins.pop(name, ("", []))
                self.unbrought.append(Unbrought(host, name, f"cannot be kept on the head ({error.strerror})"))

    def _resume(self, host: str, wanted: Sequence[Listed]) -> tuple[list[Listed], Mapping[str, Begun]]:
        """Return the files that a host must still send, and their beginnings that are here."""
        lacking, begun = [], {}
        for entry in wanted:
            left = self._arriving.resume(host, entry, check=lambda: self._check(host))
            if left is True:
                held = self._arriving.held(entry.path)
                if refused := self._room.refuses(entry, held, 0):
                    self._arriving.remove(entry.path)
                    self.unbrought.append(Unbrought(host, entry.path, refused, no_room=True))
                    continue
                self._room.end(entry, held)
                self.origins[entry.path] = (host, entry.marks)
                continue
            lacking.append(entry)
            if left:
                begun[entry.path] = left
        return lacking, begun

    def _check(self, host: str) -> None:
        if self._cancelled():
            raise HostFailure("the copy was cancelled", host=host)

    def _fetch(self, agent: Agent, wanted: Sequence[Listed], begun: Mapping[str, Begun]) -> None:
        """Fetch files from one host."""
        asked = batches.packed((self._question(entry, begun.get(entry.path)), b"") for entry in wanted)
        stream = agent.stream("outputs.read", job=self._job, force=self._force, payload_in=asked, silence_s=SILENCE_S)
        receiver, number, is_refused = Receiver(self._arriving), 0, False

        def pieces() -> Iterator[bytes]:
            for reply in stream:
                self._check(agent.host)
                yield reply.payload

        try:
            for frame in batches.unpacked(pieces()):
                if number == len(wanted) or frame.header.get("n") != number:
                    raise OpError("corrupt", "the host sent files that the head did not ask for")
                ended, is_refused = self._take(agent.host, wanted[number], receiver, frame, is_refused)
                number += ended
        except OpError as error:
            self._arriving.distrust(agent.host)
            name = f"{wanted[number].path!r:.200}: " if number < len(wanted) else ""
            raise HostFailure(
                f"the files that the host sent are not the job's outputs: {name}{error.message}", host=agent.host
            ) from error
        except _NoRoomError as error:
            for entry in wanted[number:]:
                self.unbrought.append(Unbrought(agent.host, entry.path, f"{error}", no_room=True))
                self._arriving.forget(entry.path)
            return
        finally:
            stream.close()
        if number < len(wanted):
            raise HostFailure(f"the host sent only {number} of {count(len(wanted), 'file')}", host=agent.host)

    def _question(self, entry: Listed, begun: Begun | None) -> dict[str, Any]:
        version = self._versions.get(entry.path)
        asked: dict[str, Any] = {"p": entry.path if version is None else version.path}
        return asked if begun is None else {**asked, "marks": begun.marks, "at": begun.size, "sha": begun.sha}

    def _take(
        self, host: str, entry: Listed, receiver: Receiver, frame: frames.Frame, is_refused: bool
    ) -> tuple[bool, bool]:
        """Take one frame; return whether the file's content has ended, and whether to skip the rest of it."""
        header, payload = frame
        ends = "whole" in header or "sha" in header or "gone" in header
        if is_refused:
            return ends, not ends
        self._came += len(payload)
        if refused := self._room.refuses(entry, self._came, len(payload)):
            receiver.forget()
            self._came = 0
            raise _NoRoomError(refused)
        try:
            why = receiver.take(entry, header, payload)
        except OSError as error:
            if may_pass(error):
                raise  # it ends everything; what else the head's file system refuses is one name
            self.unbrought.append(Unbrought(host, entry.path, f"cannot be kept on the head ({error.strerror})"))
            receiver.forget()
            self._arriving.forget(entry.path)
            self._came = 0
            return ends, not ends
        self._came += header.get("from", 0)  # the receiver knows that so much is there
        if why is None:
            return False, False
        if why:
            self.unbrought.append(Unbrought(host, entry.path, why))
            self._arriving.forget(entry.path)
        else:
            self._room.end(entry, self._came)
            self.origins[entry.path] = (host, receiver.marks)
        self._came = 0
        return True, False


class _NoRoomError(Exception):
    """What arrives does not fit, so no more of this host is taken."""
