"""The examples in ``inventory/``: they are valid, say what they say they say, and can be edited."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from gpurun.inventory.edit import RemoveHosts, SetFields, apply, parse_settings
from gpurun.inventory.fields import inventory_schema
from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import select
from gpurun.inventory.read import load_inventory, parse_inventory

EXAMPLES = sorted((Path(__file__).parents[2] / "inventory").glob("*.yaml"))


def example(name: str) -> Path:
    return next(path for path in EXAMPLES if path.stem == name)


@pytest.mark.parametrize(
    ("name", "hosts", "gpus", "racks"),
    [("one-host", 1, 4, 1), ("lab", 4, 16, 2), ("two-racks-roce", 32, 127, 2), ("mixed-with-pools", 328, 2112, 11)],
)
def test_what_they_have(name: str, hosts: int, gpus: int, racks: int) -> None:
    found = load_inventory(example(name))
    assert (len(found.hosts), found.total_gpus, len(found.racks)) == (hosts, gpus, racks)
    assert len(EXAMPLES) == 4


def test_the_mixed_cluster() -> None:
    found = load_inventory(example("mixed-with-pools"))
    assert found.generations == ("hopper", "pascal", "volta")
    hopper = found.by_name["gpu-h2-07"]
    assert (hopper.gpus, hopper.address, hopper.fabric_address) == (8, "10.9.2.7", "10.10.2.7")
    assert hopper.nvlink == (tuple(range(8)),)
    assert len(found.fabric_of(hopper).hcas) == 8
    assert fold(select(found, "@label:data=local-nvme")) == "gpu-v3-[25-32]"
    assert found.pools[1].parent == "research"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_they_can_be_edited_and_keep_their_comments(path: Path) -> None:
    text = path.read_bytes()
    found = load_inventory(path)
    last = found.hosts[-1].name
    set_ = apply(text, path, SetFields((last,), parse_settings(["labels.checked=today"])))
    assert parse_inventory(set_, path).by_name[last].labels["checked"] == "today"
    removed = apply(text, path, RemoveHosts((last,)))
    assert len(parse_inventory(removed, path).hosts) == len(found.hosts) - 1
    for after in (set_, removed):
        old, new = text.decode().splitlines(), after.decode().splitlines()
        assert sum(line not in new for line in old) <= 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_they_fit_the_schema(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(inventory_schema())
    jsonschema.validate(yaml.safe_load(path.read_text()), inventory_schema())


@pytest.mark.parametrize(
    "wrong",
    ["version: 2", "version: 1\nracks: {r: {hosts: {a: {gpus: four}}}}", "version: 1\nracks: {r: {hosts: {'a b': {}}}}",
     "version: 1\ndefaults: {gpu: 4}", "version: 1\nfabrics: {a: {kind: rocee, interface: e}}"],
)  # fmt: skip
def test_the_schema_refuses_what_the_loader_refuses(wrong: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(wrong), inventory_schema())
