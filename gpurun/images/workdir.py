"""Copy a job's code from the head to every host, byte for byte; send only what changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate
from typing import TYPE_CHECKING

from gpurun.errors import GpurunError, HostUnreachable
from gpurun.images import topology
from gpurun.images.chain import Want
from gpurun.images.export import default_folder
from gpurun.images.plan import chains_of
from gpurun.images.relay import Relay
from gpurun.images.store import LayerStore, Stored
from gpurun.images.tree import FileTree
from gpurun.node.agent import frames
from gpurun.remote import Agent, Fleet, Results
from gpurun.remote.agent import bad_answer

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory

# Up to here each host is sent its own over its SSH channel: a chain takes longer to set up than that takes.
DIRECT_BYTES = 2 << 20
LIMIT_S = 6 * 3600.0
_MAKE_LIMIT_S = 600.0


Told = Callable[[str, int, int], object]
"""Receives how many bytes a host has, of how many."""


def sync_workdir(
    fleet: Fleet, folders: Mapping[str, str], tree: FileTree, *, inventory: Inventory | None,
    told: Told = lambda *_: None,
) -> Results[int]:  # fmt: skip
    """Make a folder on every host the same as `tree`: content, modes, times and links.

    Copies links as links. Sends a host only contents that it never had; large ones go through a chain of hosts.
    Idempotent.

    Args:
        folders: host → absolute folder there. It belongs to gpurun alone: entries that are not in `tree` are removed.
        tree: a folder on the head as it is now, or a job's copy.
        inventory: racks of hosts and how they reach each other; None = unknown.
        told: called by one thread at a time, and only for so many bytes that a person may wait for them.

    Returns:
        Bytes sent to each host.

    Raises:
        BadInput: a file of the folder changed while it was sent.
        StateError: the job's copy is damaged.
    """
    digests = list(tree.files)
    asked = fleet.map(lambda agent: _lacking(agent, digests), folders)
    failed = dict(asked.failed)
    sent = dict.fromkeys(asked.ok, 0)
    lacking = {host: found for host, found in asked.ok.items() if found}
    union = list(dict.fromkeys(digest for found in lacking.values() for digest in found))
    size = sum(tree.files[digest].size for digest in union)
    if size <= DIRECT_BYTES or len(lacking) == 1:
        how = told if size > DIRECT_BYTES else lambda *_: None
        added = fleet.map(lambda agent: _send(agent, tree, lacking[agent.host], how), lacking)
        sent.update(added.ok)
        failed.update(added.failed)
    elif lacking:
        failed.update(_send_through_chains(fleet, tree, lacking, union, inventory, told))
        sent.update(dict.fromkeys(lacking, size))
    entries = [entry.as_json() for entry in tree.entries]
    made = fleet.map(
        lambda agent: agent.call("tree.make", dest=folders[agent.host], entries=entries, timeout_s=_MAKE_LIMIT_S),
        [host for host in asked.ok if host not in failed],
    )
    failed.update(made.failed)
    return Results(
        {host: sent[host] for host in folders if host not in failed},
        {host: failed[host] for host in folders if host in failed},
    )


def _lacking(agent: Agent, digests: Sequence[str]) -> list[str]:
    """Return the contents that a host lacks, each once.

    Raises:
        RemoteOpFailed: it names others.
    """
    found = dict.fromkeys(agent.call("tree.lacking", digests=digests).value)
    if not found.keys() <= set(digests):
        raise bad_answer(agent.host, "the host's answer to tree.lacking names content that gpurun did not ask for")
    return list(found)


def _send(agent: Agent, tree: FileTree, digests: Sequence[str], told: Told) -> int:
    """Send contents directly to one host; return the number of bytes."""
    sent, size = 0, sum(tree.files[digest].size for digest in digests)

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for digest in digests:
            for piece in tree.content(digest):
                sent += len(piece)
                told(agent.host, sent, size)
                yield frames.encode({"d": digest}, piece)
            yield frames.encode({"d": digest, "end": True})

    for _ in agent.stream("tree.add", payload_in=pieces()):
        pass
    return sent


def _send_through_chains(
    fleet: Fleet,
    tree: FileTree,
    lacking: Mapping[str, Sequence[str]],
    union: Sequence[str],
    inventory: Inventory | None,
    told: Told,
) -> dict[str, GpurunError]:
    """Send all contents that any host lacks as one blob through these hosts; return the hosts that failed."""
    with closing(LayerStore(default_folder())) as store:
        pack = store.put(piece for digest in union for piece in tree.content(digest))
        return _send_pack(fleet, tree, lacking, union, inventory, pack, told)


def _send_pack(
    fleet: Fleet,
    tree: FileTree,
    lacking: Mapping[str, Sequence[str]],
    union: Sequence[str],
    inventory: Inventory | None,
    pack: Stored,
    told: Told,
) -> dict[str, GpurunError]:
    ends = accumulate(tree.files[digest].size for digest in union)
    index = [
        [digest, end - tree.files[digest].size, tree.files[digest].size]
        for digest, end in zip(union, ends, strict=True)
    ]
    wants = [Want(host, topology.rack_of(inventory, host), (pack.digest,)) for host in lacking]
    relay = Relay(
        fleet, chains_of(inventory, wants, {pack.digest: pack.size}), topology.options_for(inventory, lacking),
        told=lambda host, received: told(host, received, pack.size),
    )  # fmt: skip
    try:
        _bring(relay, pack)
        unpacked = fleet.map(
            lambda agent: agent.call(
                "tree.unpack", transfer=relay.transfer, pack=pack.digest, index=index, timeout_s=_MAKE_LIMIT_S
            ),
            relay.hosts,
        )
        return {**relay.failed, **unpacked.failed}
    finally:
        relay.close()


def _bring(relay: Relay, pack: Stored) -> None:
    relay.open()
    relay.announce(pack)
    deadline = time.monotonic() + LIMIT_S
    while not relay.finished([pack.digest]):
        if time.monotonic() > deadline:
            raise HostUnreachable(f"sending the workdir took longer than {LIMIT_S:g} s")
        relay.step()
