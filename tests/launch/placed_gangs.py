"""A placed gang, unequal on its two hosts, and what ranks and hosts of gangs are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpurun.inventory.read import parse_inventory
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.launch.launchers import PlacedGang
from gpurun.launch.launchers.direct import environment
from gpurun.launch.plan import make_plan
from gpurun.node.claim_rules import Claimant

GANG = PlacedGang(
    "j-00000001.2", (Grant("h2", (1, 3)), Grant("h3", (0,))), {"h2": "eth0", "h3": "ens5"},
    {"h2": "10.0.0.2", "h3": "10.0.0.3"}, 23022, is_tcp=True,
)  # fmt: skip
SPEC = JobSpec("n", "image:1", 3, ("python3", "train.py", "a 'b'"))
INVENTORY = """
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}, other: {kind: tcp, interface: ens5}}
racks: {r1: {hosts: {h2: {}, h3: {fabric: other}, h4: {}, c5: {gpus: 0, generation: none}}}}
"""


def told(launcher):
    return [environment(launcher, GANG, place) for place in GANG.places]


def plan(launcher, *hosts, roles=None, hardware=None, spec=SPEC):
    spec = replace(spec, launcher=launcher, gpus=2 * len(hosts), roles=roles)
    return make_plan(
        claimant=Claimant("j-00000001", 2, "s", "o", 1, "head"), spec=spec,
        grants=[Grant(host, (0, 1) if host.startswith("h") else ()) for host in hosts],
        inventory=parse_inventory(INVENTORY.encode(), Path("i.yaml")),
        accounts={}, ssh_port=23022, hardware=hardware or {},
    )  # fmt: skip
