"""Ask hosts for digests of outputs, so that equal content of several hosts need not travel to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpurun.errors import HostFailure
from gpurun.node.agent.call import OpError
from gpurun.node.folder import batches
from gpurun.remote.agent import Agent, Stream
from gpurun.supervisor.outputs_listed import SILENCE_S
from gpurun.supervisor.outputs_versions import Sums


def ask_sums(agents: Mapping[str, Agent], doubtful: Mapping[str, Sequence[str]], job: str, *, force: bool) -> Sums:
    """Return digests of files by host and path. All hosts read at the same time. A file that changes has none.

    Args:
        doubtful: paths by host.
        force: as for `outputs.read`.

    Raises:
        HostFailure: a host fails, hangs or lies.
    """
    streams: dict[str, Stream] = {}
    try:
        for host, paths in doubtful.items():
            asked = batches.packed(({"p": path}, b"") for path in paths)
            streams[host] = agents[host].stream(
                "outputs.sums", job=job, force=force, payload_in=asked, silence_s=SILENCE_S
            )
        return {
            (host, path): found
            for host, stream in streams.items()
            for path, found in _sums(host, doubtful[host], stream).items()
        }
    finally:
        for stream in streams.values():
            stream.close()


def _sums(host: str, paths: Sequence[str], stream: Stream) -> Mapping[str, tuple[list[int], str]]:
    found, number = {}, 0
    try:
        for frame in batches.unpacked(reply.payload for reply in stream):
            said = frame.header
            if number == len(paths) or said.get("n") != number:
                raise OpError("corrupt", "the host sent digests of files that the head did not ask for")
            if "marks" in said:
                marks, sha = said["marks"], said.get("sha")
                if isinstance(marks, list) and isinstance(sha, str):
                    found[paths[number]] = (marks, sha)
                number += 1
    except OpError as error:
        raise HostFailure(f"the host's digests of outputs are damaged: {error.message}", host=host) from error
    if number < len(paths):
        raise HostFailure(f"the host sent only {number} of {len(paths)} digests", host=host)
    return found
