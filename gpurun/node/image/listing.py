"""Images on a host: look them up, load them while layers arrive, and compare the loaded image with the sent one.

Engines with a graph driver (overlay2 and the like) identify an image by its configuration's digest, the same on every
host. Those with the containerd image store identify it by a manifest's digest, which differs from the head's. There, an
image is the same if its layers and its configuration are.
"""

import os
import time
from contextlib import suppress
from typing import Any, Dict, Generator, Iterator, List, Optional, Tuple
from urllib.parse import quote

from gpurun.node.agent.call import Call, OpError, OpReply
from gpurun.node.docker.engine import image_root, is_containerd
from gpurun.node.image import shipped
from gpurun.node.image.api import Image, ImageApi, find_image
from gpurun.node.image.load import Loading
from gpurun.node.transfer import blobs, spool

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386", "loongarch64": "loong64"}
"""As ``uname -m`` names them → as Go, and with it images, do; the others have one name."""


def ask(call: Call, image: Image) -> Dict[str, Any]:
    """Return what this host has of an image.

    Args:
        image: ``{"id", "layers", "names", "facts"}``: the head's ID, all diffIDs, the wanted tags, and the result of
            `facts_of` on the head.

    Returns:
        ``{"local", "named", "store", "have", "root", "free_bytes", "spool_free_bytes", "one_disk"}``: the engine's ID
        of the image, None if it is not there; whether it has its tags; ``graph`` or ``containerd``; the layers that
        need not be sent; the free space on Docker's disk and on the spool's, and whether they are one disk.

    Raises:
        OpError: ``no-docker``; ``architecture``: the image is for other machines.
    """
    engine = ImageApi(call)
    info = engine.get("/info")
    _check_architecture(image, info)
    root = image_root(info) or "/var/lib/docker"
    store = "containerd" if is_containerd(info) else "graph"
    local, have = _what_stays(engine, image, store)
    return {
        "local": local,
        "named": local is not None and all(_is_named(engine, name, local) for name in image["names"]),
        "store": store,
        "driver": info.get("Driver"),
        "version": info.get("ServerVersion"),
        "have": have,
        "root": root,
        "free_bytes": _free(root),
        "spool_free_bytes": _free(blobs.spool_folder()),
        "one_disk": _device(root) == _device(blobs.spool_folder()),
    }


def _what_stays(engine: ImageApi, image: Image, store: str) -> Tuple[Optional[str], List[str]]:
    """Return the engine's ID of the image and its layers that are there. No prune removes them while this agent lives.

    So the record's images are noted before the engine is asked. On a host where no note can be written, a load that
    then lacks a layer is repeated with all of them.
    """
    with suppress(OSError):
        shipped.need(lambda _, entry: not set(image["layers"]).isdisjoint(entry["layers"]))
    local = find_image(engine, image, store)
    if local is None:
        return None, _layers_there(engine, image["layers"], store)
    with suppress(OSError):
        shipped.need(lambda ident, _: ident == image["id"])
    return local, image["layers"]


def _check_architecture(image: Image, info: Dict[str, Any]) -> None:
    """Raise OpError if this host cannot run the image. Docker names architectures in two ways."""
    wanted, name = image["facts"].get("Architecture"), str(info.get("Architecture") or "")
    here = _ARCHITECTURES.get(name, name)
    if wanted and here and wanted != here:
        raise OpError("architecture", "the image is for %s, this host runs %s" % (wanted, here))


def _layers_there(engine: ImageApi, layers: List[str], store: str) -> List[str]:
    """Return the layers that need not be sent: the longest common beginning with an image that is there.

    With the containerd store: the blobs of images that gpurun itself brought, because only those are known by digest.
    """
    if store == "containerd":
        recorded = [entry for entry in shipped.read().values() if engine.image(entry.get("local", "")) is not None]
        there = {digest for entry in recorded for digest in entry.get("layers", [])}
        return [digest for digest in layers if digest in there]
    longest = 0
    for summary in engine.get("/images/json?all=1"):
        found = engine.image(summary["Id"])
        other = (found or {}).get("RootFS", {}).get("Layers") or []
        common = next(
            (at for at, pair in enumerate(zip(layers, other)) if pair[0] != pair[1]), min(len(layers), len(other))
        )
        longest = max(longest, common)
    return layers[:longest]


def _is_named(engine: ImageApi, name: str, local: str) -> bool:
    found = engine.image(name)
    return found is not None and found["Id"] == local


def _free(path: str) -> Optional[int]:
    """Return how many bytes can still be written below a path; None if unknown."""
    try:
        status = os.statvfs(_existing(path))
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _device(path: str) -> int:
    try:
        return os.stat(_existing(path)).st_dev
    except OSError:
        return -1


def _existing(path: str) -> str:
    """Return the path, or the nearest existing folder above it."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def name(call: Call, image: Image) -> None:
    """Tag an image that is there.

    Raises:
        OpError: ``not-found``: it is no longer there; ``docker``.
    """
    engine = ImageApi(call)
    local = find_image(engine, image, "graph") or find_image(engine, image, "containerd")
    if local is None:
        raise OpError("not-found", "the image is gone")
    for full in image["names"]:
        repository, _, tag = full.rpartition(":")
        path = "/images/%s/tag?repo=%s&tag=%s" % (
            quote(local, safe=":"),
            quote(repository, safe=""),
            quote(tag, safe=""),
        )
        engine.expect("POST", path, (201,), "naming the image %s" % full)


def install(
    call: Call, transfer: str, image: Image, store: str, have: List[str]
) -> Generator[Dict[str, Any], None, OpReply]:
    """Load an image whose layers arrive with a transfer; those in `have` are there.

    The payload is the image's configuration. Loads layers as soon as enough of them are there, as an image without a
    name, and removes that image when the whole is loaded. Yields ``{"state", "layer", "layers"}``.

    Raises:
        OpError: ``no-space``; ``load-failed``; ``not-verified`` if Docker reports success but the image differs from
            the sent one; ``closed`` if the transfer ends before everything has arrived.
    """
    config = call.payload
    loading = Loading(call, transfer, image, store, have, config)
    try:
        yield from loading.run()
        local, sizes = loading.verify(), loading.sizes()
    finally:
        loading.remove_temporary()
    with shipped.change() as record:
        record[image["id"]] = {
            "local": local,
            "names": image["names"],
            "layers": image["layers"],
            "sizes": sizes,
            "shipped_s": time.time(),
            "needed_by": record.get(image["id"], {}).get("needed_by", []),
        }
    shipped.need(lambda ident, _: ident == image["id"])
    return OpReply({"local": local})


def listing(call: Call) -> List[Dict[str, Any]]:
    """Return what gpurun has put into this engine.

    Returns:
        For each image ``{"id", "local", "names", "present", "temporary", "needed", "shipped_s", "size_bytes",
        "used_by"}``: the head's ID and the engine's; gpurun's tags that still point to it; whether a ship or a job that
        runs counts on it; the containers that use it, running or not.
    """
    return [known for known, _ in _recorded(ImageApi(call))]


def prune(call: Call, keep: List[str]) -> List[Dict[str, Any]]:
    """Remove what gpurun has put here and no container uses: its tags, and the image if it has no other tag.

    Also removes what interrupted transfers have left, and nothing of those that go on.

    Args:
        keep: the head's IDs of images that jobs need.

    Returns:
        The removed images, as in `listing`; ``freed`` says whether the image itself is gone.
    """
    api = ImageApi(call)
    removed = []
    spool.sweep(blobs.spool_folder(), 0)
    for known, entry in _recorded(api):
        if known["id"] in keep or known["used_by"]:
            continue
        with shipped.change(required=False) as record:  # until it is gone, nobody can come to need it
            now = record.get(known["id"], {})
            if now.get("shipped_s") != entry.get("shipped_s") or _is_counted_on(now):
                continue
            known["freed"] = not known["present"] or _remove(api, known)
            del record[known["id"]]
        if known["present"]:
            removed.append(known)
    return removed


def _is_counted_on(entry: shipped.Entry) -> bool:
    """Return whether a ship or a job that runs needs an image of the record, or is still filling it."""
    return shipped.is_needed(entry) or (bool(entry.get("temporary")) and not shipped.is_abandoned(entry))


def _recorded(api: ImageApi) -> Iterator[Tuple[Dict[str, Any], Dict[str, Any]]]:
    """Yield (description, the record's entry) of each recorded image."""
    containers = api.get("/containers/json?all=1")
    for ident, entry in sorted(shipped.read().items()):
        local = str(entry.get("local", ""))
        found = api.image(local)
        known = {
            "id": ident,
            "local": local,
            "names": [name for name in entry.get("names", []) if found is not None and _is_named(api, name, local)],
            "present": found is not None,
            "temporary": bool(entry.get("temporary")),
            "needed": _is_counted_on(entry),
            "shipped_s": entry.get("shipped_s"),
            "size_bytes": int((found or {}).get("Size", 0)),
            "used_by": [c["Names"][0].lstrip("/") for c in containers if c.get("ImageID") == local and c.get("Names")],
        }
        yield known, entry


def _remove(api: ImageApi, known: Dict[str, Any]) -> bool:
    """Remove the tags that gpurun added. Returns True if the image is gone. Keeps an image that has a tag from
    others.
    """
    for full in known["names"]:
        api.expect("DELETE", "/images/" + quote(full, safe="/:"), (200, 404, 409), "removing %s" % full)
    left = api.image(known["local"])
    if left is not None and not left.get("RepoTags") and not left.get("RepoDigests"):
        api.expect("DELETE", "/images/" + known["local"], (200, 404, 409), "removing %s" % known["local"])
        left = api.image(known["local"])
    return left is None


OPS = {"ask": ask, "name": name, "install": install, "listing": listing, "prune": prune}
