"""What submit refuses at once: the hint is about what was wrong."""

import pytest

from gpurun.errors import NeverFits
from gpurun.head.wish import refuse_impossible
from gpurun.inventory.load import parse
from gpurun.jobs.spec import JobSpec

TEXT = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""


POOLS = "pools: {vision: {reservation: 2}}\n"


@pytest.mark.parametrize(
    ("pools", "more", "hint"),
    [
        (
            POOLS,
            {"pool": "nosuch'; --"},
            "its pools are: vision; choose one with --pool",
        ),
        (POOLS, {"pool": "vision", "gpus": 3}, "borrow with --preemptible"),
        ("", {"gpus": 5}, "the inventory has 4 GPUs"),
    ],
)
def test_a_hint_is_about_pools_or_gpus_as_the_refusal_is(tmp_path, pools, more, hint):
    inventory = parse((TEXT + pools).encode(), source=tmp_path / "inventory.yaml")
    spec = JobSpec(**{"name": "n", "image": "i", "gpus": 1, "command": ("true",), **more})
    with pytest.raises(NeverFits) as caught:
        refuse_impossible(spec, inventory)
    assert hint in caught.value.hint
