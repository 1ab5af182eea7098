"""Layers out of Docker: both ways give the very bytes whose digest the layer has."""

import base64
import gzip
import hashlib
import io
import json
import os
import tarfile
from contextlib import closing

import pytest

from gpurun.content.export import Exporter, chain_ids, config_of, find_layers, import_save, tar_of
from gpurun.content.images import HeadImage
from gpurun.content.store import LayerStore
from gpurun.errors import HostNotReady


def layer_tar(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as made:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
                made.addfile(info)
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                made.addfile(info)
            else:
                info.size = len(content)
                made.addfile(info, io.BytesIO(content))
    return out.getvalue()


def digest_of(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


FILES = {
    "d/": None,
    "d/small": b"hello",
    "d/big": os.urandom(2_500_000),
    "link": "d/small",
    "empty": b"",
    "ünï": b"x" * 700,
}


def docker_root(top, files=FILES):
    """Docker's folder with one layer in it, as tar-split and overlay2 keep it."""
    tar = layer_tar(files)
    diff_id = digest_of(tar)
    layer = top / "image/overlay2/layerdb/sha256" / diff_id.removeprefix("sha256:")
    layer.mkdir(parents=True)
    (layer / "diff").write_text(diff_id)
    (layer / "cache-id").write_text("abc123")
    content = top / "overlay2/abc123/diff"
    (content / "d").mkdir(parents=True)
    entries, position = [], 0
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for entry in archive:
            if entry.isreg():
                (content / entry.name).write_bytes(files[entry.name])
            segment = tar[position : entry.offset_data]
            entries.append({"type": 2, "payload": base64.b64encode(segment).decode()})
            entries.append({"type": 1, "name": entry.name, "size": entry.size if entry.isreg() else 0})
            position = entry.offset_data + (entry.size if entry.isreg() else 0)
    entries.append({"type": 2, "payload": base64.b64encode(tar[position:]).decode()})
    with gzip.open(layer / "tar-split.json.gz", "wt") as out:
        out.write("\n".join(json.dumps(entry) for entry in entries))
    return tar, diff_id, content


def test_the_very_tar_is_put_together_from_dockers_folder(tmp_path):
    tar, diff_id, _ = docker_root(tmp_path)
    found = find_layers(str(tmp_path), [diff_id])
    assert b"".join(tar_of(found[diff_id])) == tar


def test_a_changed_file_gives_another_digest_and_is_refused(tmp_path, store):
    _, diff_id, content = docker_root(tmp_path)
    (content / "d/small").write_bytes(b"HELLO")
    found = find_layers(str(tmp_path), [diff_id])
    with pytest.raises(HostNotReady, match="does not match its digest"):
        store.add(diff_id, lambda: tar_of(found[diff_id]))


@pytest.mark.parametrize("trick", ["link", "fifo", "short", "gone"])
def test_what_somebody_put_in_a_files_place_is_not_read(tmp_path, store, trick):
    _, diff_id, content = docker_root(tmp_path)
    place = content / "d/small"
    place.unlink()
    if trick == "link":
        place.symlink_to("/etc/passwd")
    elif trick == "fifo":
        os.mkfifo(place)
    elif trick == "short":
        place.write_bytes(b"hel")
    found = find_layers(str(tmp_path), [diff_id])
    with pytest.raises(HostNotReady):
        store.add(diff_id, lambda: tar_of(found[diff_id]))


def test_no_docker_folder_no_layers(tmp_path):
    assert find_layers(None, ["sha256:" + "0" * 64]) == {}
    assert find_layers(str(tmp_path), ["sha256:" + "0" * 64, "sha256:" + "1" * 64]) == {}
    assert config_of(None, "sha256:" + "0" * 64) is None


def test_chain_ids_are_those_of_the_oci_specification():
    a, b = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    assert chain_ids([]) == [] and chain_ids([a]) == [a]
    assert chain_ids([a, b])[1] == digest_of(f"{a} {b}".encode())


def save_stream(layers, *, oci=False, pack=lambda content: content):
    config = json.dumps({"rootfs": {"diff_ids": [digest_of(layer) for layer in layers]}}).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:

        def add(name, content):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))

        add("manifest.json", b"[{}]")
        add("config.json", config)
        for number, layer in enumerate(layers):
            packed = pack(layer)
            add(f"blobs/sha256/{hashlib.sha256(packed).hexdigest()}" if oci else f"{number}/layer.tar", packed)
            add(f"{number}/VERSION", b"1.0")
    return out.getvalue(), config


@pytest.mark.parametrize(
    "pack", [lambda content: content, gzip.compress, lambda c: gzip.compress(c[:900]) + gzip.compress(c[900:])]
)
def test_docker_save_is_split_whatever_it_is_packed_with(store, tmp_path, pack):
    layers = [layer_tar(FILES), layer_tar({"x": b"1"})]
    stream, config = save_stream(layers, oci=True, pack=pack)
    pieces = [stream[start : start + 77_777] for start in range(0, len(stream), 77_777)]
    small = import_save(pieces, store, store._folder)
    for layer in layers:
        found = store.find(digest_of(layer))
        assert found is not None and found.path.read_bytes() == layer
    assert small[digest_of(config)] == config


@pytest.mark.parametrize("stream", [b"", b"no tar at all" * 100])
def test_docker_save_that_writes_nonsense(store, stream):
    with pytest.raises(HostNotReady):
        import_save([stream], store, store._folder)


def test_docker_save_that_breaks_off(store):
    stream, _ = save_stream([layer_tar(FILES)])
    with pytest.raises(HostNotReady):
        import_save([stream[: len(stream) // 2]], store, store._folder)
    assert store.find(digest_of(layer_tar(FILES))) is None


class HeadsDocker:
    """In the place of the head's engine, whose folder this process may not read: it can only save."""

    def __init__(self, layers, pack=lambda content: content):
        self.stream, _ = save_stream(layers, oci=True, pack=pack)
        self.saves = 0
        config = json.dumps({"rootfs": {"diff_ids": [digest_of(layer) for layer in layers]}}).encode()
        digests = tuple(digest_of(layer) for layer in layers)
        self.image = HeadImage("i:1", digest_of(config), digests, sum(map(len, layers)), ("i:1",))

    def info(self):
        return {"DockerRootDir": None}

    def layer_sizes(self, image):
        return dict.fromkeys(image.layers, 1)

    def save(self, _ident):
        self.saves += 1
        return [self.stream]


@pytest.fixture
def tiny_store(monkeypatch):
    """A limit below any image."""
    monkeypatch.setattr("gpurun.content.store.SHARE", 0.0)


def test_an_image_larger_than_the_stores_limit_ships_all_the_same(tmp_path, tiny_store):
    layers = [layer_tar({f"f{number}": os.urandom(100_000)}) for number in range(4)]
    engine = HeadsDocker(layers)
    with closing(Exporter(engine, engine.image, tmp_path)) as exporter:
        exported = [exporter.layer(digest) for digest in engine.image.layers]
        for stored, layer in zip(exported, layers, strict=True):
            with closing(stored.open()) as blob:
                assert blob.complete and stored.path.read_bytes() == layer
    assert engine.saves == 1, "each save writes the whole image"


def test_what_a_ship_needs_stays_while_another_ship_makes_room(tmp_path, tiny_store):
    layers = [layer_tar({f"f{number}": os.urandom(100_000)}) for number in range(3)]
    engine, other = HeadsDocker(layers), HeadsDocker([layer_tar({"g": os.urandom(100_000)})])
    with closing(Exporter(engine, engine.image, tmp_path)) as exporter:
        first = exporter.layer(engine.image.layers[0])
        with closing(Exporter(other, other.image, tmp_path)) as beside:
            beside.layer(other.image.layers[0])
        assert first.path.read_bytes() == layers[0]
        assert exporter.layer(engine.image.layers[2]).path.exists() and engine.saves == 1
    with closing(Exporter(other, other.image, tmp_path)) as beside:
        LayerStore(tmp_path).make_room(1)
        assert not first.path.exists(), "once nobody needs it, it goes"


def test_layers_that_are_packed_with_zstd_are_named_as_such(tmp_path):
    engine = HeadsDocker([layer_tar(FILES)], pack=lambda content: b"\x28\xb5\x2f\xfd" + content)
    with (
        closing(Exporter(engine, engine.image, tmp_path)) as exporter,
        pytest.raises(HostNotReady, match="zstd") as caught,
    ):
        exporter.layer(engine.image.layers[0])
    assert "zstd" in caught.value.message and "gzip" in str(caught.value.hint)


def test_a_blob_that_goes_while_it_is_looked_for_is_not_there(store, monkeypatch):
    stored = store.add(digest_of(b"x"), lambda: [b"x"])
    other = LayerStore(store._folder.parent)
    monkeypatch.setattr(other, "find", lambda _digest: stored)
    stored.path.unlink()
    assert other.pin(stored.digest) is None
