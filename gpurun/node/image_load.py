"""One image being loaded on a host while its layers arrive."""

import hashlib
from typing import Any, Dict, Generator, List, Optional, Sequence

from gpurun.node import blobs, image_record, thin
from gpurun.node.call import Call, OpError
from gpurun.node.image_api import Image, ImageApi, find_image
from gpurun.node.spool import Blob

# Layers are loaded ahead of the rest when so much of them has arrived: each load has a cost of its own.
PREFIX_BYTES = 64 << 20


class Loading:
    """One image being loaded, layer by layer."""

    def __init__(
        self, call: Call, transfer: str, image: Image, store: str, have: Sequence[str], config: bytes,
        docker_host: Optional[str],
    ) -> None:  # fmt: skip
        self._call = call
        self._transfer = transfer
        self._image = image
        self._layers: List[str] = image["layers"]
        self._store = store
        # Layers that need not arrive. On a graph driver the same layer on another parent is another one.
        self._have = set(have) if store == "containerd" else set()
        self._config = config
        self._docker_host = docker_host
        self._temporary: List[str] = []
        self._loaded: List[str] = []
        # How many layers, from the lowest on, need no look any more: the engine has them.
        self._done = len(have) if store == "graph" else 0

    def run(self) -> Generator[Dict[str, Any], None, None]:
        """Load what is there, wait for more, until all is loaded."""
        while True:
            ready = self._ready()
            if ready == len(self._layers):
                yield self._at("loading", ready)
                self._load(self._layers, self._config, self._image["names"])
                return
            if self._store == "graph" and self._bytes_above(ready) >= PREFIX_BYTES:
                yield self._at("loading", ready)
                self._load_prefix(ready)
            else:
                yield self._at("receiving", ready)
                self._wait(self._layers[ready])

    def _at(self, state: str, layer: int) -> Dict[str, Any]:
        return {"state": state, "layer": layer, "layers": len(self._layers)}

    def _ready(self) -> int:
        """How many layers are loaded or have arrived whole, without a gap."""
        known = blobs.find(self._transfer).blobs
        for at in range(self._done, len(self._layers)):
            digest = self._layers[at]
            blob = known.get(digest)
            if digest not in self._have and (blob is None or not blob.complete):
                return at
        return len(self._layers)

    def _bytes_above(self, ready: int) -> int:
        """The bytes that have arrived of what the engine does not have."""
        return sum(self._blob(digest).size for digest in self._layers[self._done : ready])

    def _wait(self, digest: str) -> None:
        """Wait until a layer has arrived."""
        while True:
            blob = blobs.find(self._transfer).blobs.get(digest)
            if blob is None:
                self._call.wait(0.05)
            elif blob.wait_complete(0.5):
                return
            self._call.check()

    def _blob(self, digest: str) -> Blob:
        return blobs.find(self._transfer).blob(digest)

    def _load_prefix(self, count: int) -> None:
        layers = self._layers[:count]
        config = thin.prefix_config(self._config, layers, "gpurun transfer " + self._transfer)
        temporary = "sha256:" + hashlib.sha256(config).hexdigest()
        with image_record.change() as record:  # first: so that it is found again if this process is killed
            record[temporary] = {"local": temporary, "names": [], "layers": layers, "temporary": True}
        self._temporary.append(temporary)
        self._load(layers, config, ())
        self._done = count

    def _load(self, layers: List[str], config: bytes, names: Sequence[str]) -> None:
        if self._store == "graph":
            # Everything above what is there, also a layer that is there on another parent: it is another one here.
            fresh = {digest: self._blob(digest) for digest in layers[self._done :]}
            parts = thin.graph_tar(config, layers, fresh, names)
        else:
            fresh = {digest: self._blob(digest) for digest in layers if digest not in self._have}
            parts = thin.containerd_tar(config, [(digest, self._size(digest)) for digest in layers], fresh, names)
        self._loaded = thin.load(self._call, parts, self._docker_host)

    def _size(self, digest: str) -> int:
        """The bytes of a layer's tar: those of the blob, or what the record says of one that was there."""
        blob = blobs.find(self._transfer).blobs.get(digest)
        if blob is not None:
            return blob.size
        for entry in image_record.read().values():
            if digest in entry.get("sizes", {}):
                return int(entry["sizes"][digest])
        raise OpError("load-failed", "the size of %s, which is there, is not known" % digest)

    def verify(self) -> str:
        """The engine's ID of the image, compared with what was sent.

        Raises:
            OpError: ``not-verified``.
        """
        engine = ImageApi(self._call, self._docker_host)
        local = find_image(engine, self._image, self._store, self._loaded)
        if local is None:
            raise OpError("not-verified", "the image that is there after loading is not the one that was sent")
        return local

    def sizes(self) -> Dict[str, int]:
        """The bytes of every layer's tar, where known: the containerd store wants them of the next image, too."""
        known = {digest: blob.size for digest, blob in blobs.find(self._transfer).blobs.items()}
        for entry in image_record.read().values():
            known.update(entry.get("sizes", {}))
        return {digest: known[digest] for digest in self._layers if digest in known}

    def remove_temporary(self) -> None:
        """Remove the images that only held layers until the whole was there."""
        if not self._temporary:
            return
        engine = ImageApi(None, self._docker_host)
        for temporary in self._temporary:
            engine.expect("DELETE", "/images/%s?noprune=1" % temporary, (200, 404, 409), "removing a temporary image")
        with image_record.change() as record:
            for temporary in self._temporary:
                record.pop(temporary, None)
