"""Load one image on a host while its layers arrive.

The containerd store takes each layer when it arrives and the manifest at the end. A graph driver reads nothing before
it has the whole tar, so the lower layers are loaded earlier, as separate images.
"""

import hashlib
import time
from typing import Any, Dict, Generator, List, Sequence

from gpurun.node.agent.call import Call, OpError
from gpurun.node.image import shipped, thin
from gpurun.node.image.api import Image, ImageApi, find_image
from gpurun.node.transfer import blobs
from gpurun.node.transfer.spool import Blob

# Layers are loaded ahead of the rest when so much of them has arrived: each load has a cost of its own.
PREFIX_BYTES = 64 << 20


class Loading:
    """Loads one image, layer by layer."""

    def __init__(
        self, call: Call, transfer: str, image: Image, store: str, have: Sequence[str], config: bytes,
    ) -> None:  # fmt: skip
        self._call = call
        self._transfer = transfer
        self._image = image
        self._layers: List[str] = image["layers"]
        self._store = store
        self._have = frozenset(have)
        self._config = config
        self._temporary: List[str] = []
        self._loaded: List[str] = []
        # A graph driver has layers from the lowest on, so many of them: on another parent a layer is another one.
        self._done = len(have)

    def run(self) -> Generator[Dict[str, Any], None, None]:
        """Load the layers that are there and wait for more, until all are loaded."""
        yield from self._into_containerd() if self._store == "containerd" else self._into_graph()

    def _into_containerd(self) -> Generator[Dict[str, Any], None, None]:
        sizes = {digest: self._size(digest) for digest in self._have}
        with thin.docker_load(self._call) as loading:
            for at, digest in enumerate(self._layers):
                if digest not in sizes:
                    yield self._at("receiving", at)
                    self._wait(digest)
                    sizes[digest] = self._blob(digest).size
                    loading.feed(thin.oci_layer(self._blob(digest)))
            yield self._at("loading", len(self._layers))
            layers = [(digest, sizes[digest]) for digest in self._layers]
            loading.feed(thin.oci_rest(self._config, layers, self._image["names"]))
            self._loaded = loading.finish()

    def _into_graph(self) -> Generator[Dict[str, Any], None, None]:
        while True:
            ready = self._ready()
            if ready == len(self._layers):
                yield self._at("loading", ready)
                self._load(self._layers, self._config, self._image["names"])
                return
            if self._bytes_above(ready) >= PREFIX_BYTES:
                yield self._at("loading", ready)
                self._load_prefix(ready)
            else:
                yield self._at("receiving", ready)
                self._wait(self._layers[ready])

    def _at(self, state: str, layer: int) -> Dict[str, Any]:
        return {"state": state, "layer": layer, "layers": len(self._layers)}

    def _ready(self) -> int:
        """Return how many layers are loaded or have arrived completely, without a gap."""
        known = blobs.find(self._transfer).blobs
        for at in range(self._done, len(self._layers)):
            digest = self._layers[at]
            blob = known.get(digest)
            if blob is None or not blob.complete:
                return at
        return len(self._layers)

    def _bytes_above(self, ready: int) -> int:
        """Return how many bytes have arrived that the engine does not have."""
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
        with shipped.change() as record:  # first: so that it is found again if this process is killed
            record[temporary] = {
                "local": temporary,
                "names": [],
                "layers": layers,
                "temporary": True,
                "shipped_s": time.time(),
                "by": shipped.this_process(),
            }
        self._temporary.append(temporary)
        self._load(layers, config, ())
        self._done = count

    def _load(self, layers: List[str], config: bytes, names: Sequence[str]) -> None:
        fresh = {digest: self._blob(digest) for digest in layers[self._done :]}
        self._loaded = thin.load(self._call, thin.graph_tar(config, layers, fresh, names))

    def _size(self, digest: str) -> int:
        """Return the tar size of a layer that was there, from the record."""
        for entry in shipped.read().values():
            if digest in entry.get("sizes", {}):
                return int(entry["sizes"][digest])
        raise OpError("load-failed", "the host has the layer %s, but gpurun does not know its size" % digest)

    def verify(self) -> str:
        """Compare the loaded image with the sent one; return the engine's ID of it.

        Raises:
            OpError: ``not-verified``.
        """
        engine = ImageApi(self._call)
        local = find_image(engine, self._image, self._store, self._loaded)
        if local is None:
            raise OpError("not-verified", "after the load, the image on the host is not the image that was sent")
        return local

    def sizes(self) -> Dict[str, int]:
        """Return the known tar sizes of layers: the containerd store needs them for the next image, too."""
        known = {digest: blob.size for digest, blob in blobs.find(self._transfer).blobs.items()}
        for entry in shipped.read().values():
            known.update(entry.get("sizes", {}))
        return {digest: known[digest] for digest in self._layers if digest in known}

    def remove_temporary(self) -> None:
        """Remove the images that only held layers until the whole image was there, also those of killed ships.

        One that another ship needs goes later: with it, or with the next ship.
        """
        if not self._temporary and not any(map(shipped.is_abandoned, shipped.read().values())):
            return
        engine = ImageApi(None)
        with shipped.change(required=False) as record:  # so that nobody comes to need one that is going
            mine = [ident for ident in self._temporary if not shipped.is_needed(record.get(ident, {}))]
            for temporary in {*mine, *(ident for ident, entry in record.items() if shipped.is_abandoned(entry))}:
                path = "/images/%s?noprune=1" % temporary
                engine.expect("DELETE", path, (200, 404, 409), "removing a temporary image")
                record.pop(temporary, None)
