"""An upgrade leaves files of another version: its supervisors go on beside the new commands."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from gpurun.jobs.record import JobRecord
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.allocate import Allocator
from gpurun.leases.store import LeaseStore

INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""
NEWER = {"tomorrow's key": {"it's": [1, None, "é"]}, "": 1, "$(reboot)": "x"}


@pytest.fixture
def home(tmp_path):
    """A state directory with a job that has a lease."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    spec = JobSpec("n", "i", 4, ("true",))
    JobStore(tmp_path / "home").create(spec, inventory=tmp_path / "inventory.yaml", now_s=1.0)
    for _, lock in Allocator(tmp_path / "home").run_pass(now_s=2.0).granted:
        lock.close()
    return tmp_path / "home"


def change(path, edit):
    """Change a document where it is: it stays the file that was written."""
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def read(home):
    (record,) = JobStore(home).live_records()
    folder = JobStore(home).get(record.id)
    return record, folder.spec(), LeaseStore(home).read(record.id)


def test_keys_of_a_newer_version_change_nothing(home):
    before = read(home)
    for pattern in ("jobs/*/state.json", "jobs/*/spec.json", "leases/*.json"):
        (path,) = home.glob(pattern)
        change(path, lambda document: document.update(NEWER))
    (path,) = home.glob("jobs/*/spec.json")
    change(path, lambda document: document["constraints"].update(NEWER) if "constraints" in document else None)
    assert read(home) == before


def required(kind):
    """The keys without a default; all others may be missing."""
    if not dataclasses.is_dataclass(kind):
        return {field.name for field in msgspec.structs.fields(kind) if field.required}
    nothing = dataclasses.MISSING
    return {each.name for each in dataclasses.fields(kind) if each.default is each.default_factory is nothing}


def test_a_key_that_an_older_version_did_not_write_has_its_default(home):
    record, spec, lease = read(home)
    for pattern, kind in (("jobs/*/state.json", JobRecord), ("jobs/*/spec.json", JobSpec)):
        (path,) = home.glob(pattern)
        change(path, lambda document, kind=kind: [document.pop(key) for key in {*document} - required(kind)])
    old, its_spec, its_lease = read(home)
    assert (old.id, old.state, its_spec, its_lease) == (record.id, record.state, spec, lease)
