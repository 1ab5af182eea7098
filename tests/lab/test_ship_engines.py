"""Both kinds of engine, as host and as head: Debian's with its graph driver, a newer one with the containerd store."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from imaging import MIB, Head, digest_of, layer
from local_agents import Hosts
from newer_engine import NotToBeHad, newer_engine

from gpurun.content import images
from gpurun.content.export import Exporter
from gpurun.content.images import Engine
from gpurun.content.ship import ship
from gpurun.inventory.model import Inventory
from gpurun.lab import engine
from gpurun.node.images import full_name

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.xdist_group("ship_engines"), pytest.mark.timeout(1500)]

NOWHERE = Inventory(hosts=(), racks=(), fabrics={})


NEWER = Path(f"/tmp/gpurun-newer-{os.getpid()}")
"""Where the newer engine has its data."""


@pytest.fixture(scope="module")
def containerd():
    """A newer engine's ``DOCKER_HOST``."""
    try:
        with newer_engine(NEWER) as address:
            yield address
    except NotToBeHad as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def graph():
    """The lab's engine for the head, with its graph driver."""
    address = engine.ensure(keep=False)
    yield address
    engine.release_engine()


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Hosts(tmp_path)
    yield made
    made.close()


@pytest.fixture
def heads():
    made = []

    def at(address):
        made.append(Head(address))
        return made[-1]

    yield at
    for each in made:
        each.close()


def layers_of(head, name):
    """The digests of what ``docker save`` writes, unpacked."""
    with tarfile.open(fileobj=io.BytesIO(head.docker("save", name))) as archive:
        (manifest,) = json.load(archive.extractfile("manifest.json"))
        return [digest_of(archive.extractfile(path).read()) for path in manifest["Layers"]]


def states(report):
    assert not report.failed, report.failed
    return [host.state for host in report.hosts]


def test_from_a_graph_driver_to_the_containerd_store(hosts, heads, graph, containerd):
    head, there = heads(graph), heads(containerd)
    base = [layer("c1", 3 * MIB), layer("c2", MIB)]
    first = head.make("eng/a:1", base)
    second = head.make("eng/a:2", [*base, layer("c3", MIB), base[0], layer("c4")], Env=["A=1"])
    fleet = hosts.fleet("h0", "h1", DOCKER_HOST=containerd)
    there.made += ["eng/a:1", "eng/a:2"]
    report = ship("eng/a:1", fleet, inventory=NOWHERE, hosts=["h0"], docker_host=graph)
    assert states(report) == ["done"] and layers_of(there, "eng/a:1") == list(first.layers)
    report = ship("eng/a:2", fleet, inventory=NOWHERE, hosts=["h0"], docker_host=graph)
    assert states(report) == ["done"] and layers_of(there, "eng/a:2") == list(second.layers)
    assert report.hosts[0].bytes_received < 2 * MIB  # what came with the first is not sent again
    found = Engine(containerd).image("eng/a:2")
    assert found.layers == second.layers and found.facts["Env"] == ["A=1"]
    report = ship("eng/a:2", fleet, inventory=NOWHERE, hosts=["h0"], docker_host=graph)
    assert states(report) == ["present"]
    there.docker("rmi", "-f", "eng/a:1", "eng/a:2")
    assert states(ship("eng/a:2", fleet, inventory=NOWHERE, hosts=["h0"], docker_host=graph)) == ["done"]
    assert layers_of(there, "eng/a:2") == list(second.layers)
    pruned = images.prune(fleet, ["h0"], keep=[]).raise_first()["h0"]
    assert [one.freed for one in pruned] == [True]
    assert there.docker("images", "-q").strip() == b""


def test_from_the_containerd_store_to_a_graph_driver(hosts, heads, graph, containerd):
    head, there = heads(containerd), heads(graph)
    base = [layer("g1", 2 * MIB), layer("g2", MIB)]
    made = head.make("eng/b:1", base, Cmd=["/x", "a b"])
    again = head.make("eng/b:2", [*base, base[0], layer("g3")])  # its third layer is there, but on another parent
    fleet = hosts.fleet("h0", DOCKER_HOST=graph)
    there.made += ["eng/b:1", "eng/b:2"]
    assert states(ship("eng/b:1", fleet, inventory=NOWHERE, hosts=["h0"], docker_host=containerd)) == ["done"]
    found = Engine(graph).image("eng/b:1")
    assert found.id == made.id and found.layers == made.layers
    assert layers_of(there, "eng/b:1") == list(made.layers)
    assert states(ship("eng/b:1", fleet, inventory=NOWHERE, hosts=["h0"], docker_host=containerd)) == ["present"]
    report = ship("eng/b:2", fleet, inventory=NOWHERE, hosts=["h0"], docker_host=containerd)
    assert states(report) == ["done"] and layers_of(there, "eng/b:2") == list(again.layers)
    assert 2 * MIB < report.hosts[0].bytes_received < 3 * MIB


def test_from_one_containerd_store_to_another(hosts, heads, containerd):
    head = heads(containerd)
    made = head.make("eng/c:1", [layer("e1", MIB)])
    fleet = hosts.fleet("h0", DOCKER_HOST=containerd)
    assert states(ship("eng/c:1", fleet, inventory=NOWHERE, hosts=["h0"], docker_host=containerd)) == ["present"]
    assert layers_of(head, "eng/c:1") == list(made.layers)


def test_the_containerd_store_takes_a_layer_while_the_next_one_arrives(hosts, heads, graph, containerd):
    head, there = heads(graph), heads(containerd)
    made = head.make("eng/e:1", [layer("s1", 64 << 10), layer("s2", 8 * MIB)])
    there.made.append("eng/e:1")
    taken_at = []

    def look(event):
        if event.state == "receiving" and list((NEWER / "data").rglob(f"blobs/sha256/{made.layers[0].split(':')[1]}")):
            taken_at.append(event.bytes)

    fleet = hosts.fleet("h0", DOCKER_HOST=containerd)
    options = {"inventory": NOWHERE, "hosts": ["h0"], "docker_host": graph, "progress": look}
    assert states(ship("eng/e:1", fleet, **options, rate_bytes_s=2.0 * MIB)) == ["done"]
    assert taken_at and taken_at[0] < 6 * MIB
    assert layers_of(there, "eng/e:1") == list(made.layers)


@pytest.mark.parametrize("kind", ["graph", "containerd"])
def test_docker_save_gives_the_same_layers_as_dockers_folder(heads, tmp_path, request, kind, monkeypatch):
    address = request.getfixturevalue(kind)
    head = heads(address)
    made = head.make("eng/d:1", [layer("s1", 2 * MIB), layer("s2", 10), layer("s1", 2 * MIB)])
    contents = {}
    for way in ("folder", "save"):
        if way == "save":
            monkeypatch.setattr("gpurun.content.export.find_layers", lambda root, layers: {})
            monkeypatch.setattr("gpurun.content.export.config_of", lambda root, image: None)
        (tmp_path / way).mkdir()
        exporter = Exporter(Engine(address), Engine(address).image("eng/d:1"), tmp_path / way)
        contents[way] = [exporter.layer(digest).path.read_bytes() for digest in made.layers]
        assert digest_of(exporter.config()) == made.id or kind == "containerd"
    assert contents["folder"] == contents["save"]


def test_an_engine_that_says_loaded_but_is_not_believed(hosts, heads, graph, containerd, monkeypatch):
    """Docker 28 with the containerd store prints success when a layer is missing: the comparison notices."""
    head = heads(graph)
    head.make("eng/e:1", [layer("x1", MIB), layer("x2", MIB)])
    fleet = hosts.fleet("h0", DOCKER_HOST=containerd)
    honest = fleet.agents["h0"].call

    def lie(op, **params):
        reply = honest(op, **params)
        if op == "images.ask":  # it claims to have a layer that it lacks
            return type(reply)({**reply.value, "have": params["image"]["layers"][:1]}, b"")
        return reply

    monkeypatch.setattr(fleet.agents["h0"], "call", lie)
    report = ship("eng/e:1", fleet, inventory=NOWHERE, hosts=["h0"], docker_host=graph)
    there = heads(containerd)
    there.made.append("eng/e:1")
    assert states(report) == ["done"]  # the load that could not be verified is done again, whole
    assert layers_of(there, "eng/e:1") == [digest_of(layer("x1", MIB)), digest_of(layer("x2", MIB))]


def test_names_as_containerd_keeps_them():
    assert full_name("a:1") == "docker.io/library/a:1"
    assert full_name("gpurun/train:tf2.15") == "docker.io/gpurun/train:tf2.15"
    assert full_name("localhost/a:1") == "localhost/a:1"
    assert full_name("registry:5000/a/b:1") == "registry:5000/a/b:1"
