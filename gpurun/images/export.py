"""Export layers from the head's Docker into the layer store, in the fastest way that this machine allows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpurun.errors import HostNotReady
from gpurun.images.engine import Engine, HeadImage
from gpurun.images.export_overlay import OverlayLayer, config_of, find_layers, tar_of
from gpurun.images.export_save import import_save
from gpurun.images.store import LayerStore, Stored
from gpurun.node.docker.engine import is_containerd
from gpurun.state import lock


def default_folder() -> Path:
    """Return the default folder of the layer store, below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "gpurun" / "layers"


class Exporter:
    """An image's layers and configuration, from the store or from Docker.

    If this process may read Docker's own folder, it reads only the wanted layers there, one by one. Otherwise one
    ``docker save`` fills the store with all layers. Layers that this exporter returned stay in the store until it is
    closed, even beyond the store's limit.
    """

    def __init__(self, engine: Engine, image: HeadImage, folder: Path | None = None) -> None:
        self._engine = engine
        self._image = image
        self._folder = folder or default_folder()
        self._store = LayerStore(self._folder)
        info = engine.info()
        self._docker_root: str | None = info.get("DockerRootDir")
        self._containerd = is_containerd(info)
        self._layers: dict[str, OverlayLayer] | None = None

    def close(self) -> None:
        """Allow the store to remove the layers again. Idempotent."""
        self._store.close()

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each layer's tar: exact for layers in the store, estimated for others."""
        found = {digest: self._store.find(digest) for digest in self._image.layers}
        estimated = self._engine.layer_sizes(self._image)
        return {digest: blob.size if blob else estimated.get(digest, 0) for digest, blob in found.items()}

    def layer(self, digest: str) -> Stored:
        """Return one layer; export it if necessary.

        Raises:
            HostNotReady: Docker fails, or its bytes do not have this digest.
        """
        found = self._store.pin(digest)
        if found is not None:
            return found
        if self._layers is None:
            self._layers = find_layers(self._docker_root, self._image.layers)
        readable = self._layers.get(digest)
        if readable is not None:
            # What cannot be put together again from Docker's folder, docker save may still write.
            with suppress(HostNotReady):
                self._store.add(digest, lambda: tar_of(readable))
        found = self._store.pin(digest)
        if found is None:
            self._save()
            found = self._store.pin(digest)
        if found is None:
            raise HostNotReady(f"docker save of {self._image.reference} on the head did not write the layer {digest}")
        return found

    def discard(self, digest: str) -> None:
        """Discard the store's damaged copy of a layer. The next `layer` exports it again."""
        self._store.remove(digest)

    def config(self) -> bytes:
        """Return the image's configuration, byte for byte.

        Raises:
            HostNotReady: Docker fails.
        """
        path = self._configs() / self._image.id.removeprefix("sha256:")
        if path.exists() and self._is_config(path.read_bytes()):
            return path.read_bytes()
        content = config_of(self._docker_root, self._image.id)
        if content is None:
            self._save()
            return path.read_bytes()
        self._keep_config(content)
        return content

    def config_id(self) -> str:
        """Return the digest of the configuration, which engines with a graph driver use as the image's ID."""
        return f"sha256:{hashlib.sha256(self.config()).hexdigest()}" if self._containerd else self._image.id

    def _save(self) -> None:
        """Run one ``docker save`` and put all its layers into the store. Waits for another process that does the
        same.
        """
        with self._alone():
            if (self._configs() / self._image.id.removeprefix("sha256:")).exists() and all(
                self._store.pin(digest) for digest in self._image.layers
            ):
                return
            self._store.make_room(self._image.size_bytes)
            small = import_save(self._engine.save(self._image.id), self._store, self._folder / "sha256")
            for content in small.values():
                if self._is_config(content):
                    self._keep_config(content)
                    return
            raise HostNotReady(
                f"docker save of {self._image.reference} on the head did not write the image's configuration"
            )

    def _is_config(self, content: bytes) -> bool:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if not self._containerd and digest != self._image.id:
            return False
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError):
            return False
        rootfs = parsed.get("rootfs") if isinstance(parsed, dict) else None
        return isinstance(rootfs, dict) and rootfs.get("diff_ids") == list(self._image.layers)

    def _keep_config(self, content: bytes) -> None:
        folder = self._configs()
        folder.mkdir(mode=0o700, exist_ok=True)
        temporary = folder / f"making-{os.getpid()}"
        temporary.write_bytes(content)
        temporary.replace(folder / self._image.id.removeprefix("sha256:"))

    def _configs(self) -> Path:
        return self._folder / "configs"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with lock.alone(self._folder / f"{self._image.id.removeprefix('sha256:')}.lock"):
            yield
