"""Every command with ``--json`` has a shape, a wrong document is seen, and what comes from hosts has its shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypedDict

import click
import pytest
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st
from json_shapes import SHAPES, members, objects, printed_problems, problems, summary, words
from typer.main import get_command

from gpurun.cli.doctor import BenchShape, _document
from gpurun.cli.main import app
from gpurun.cli.manual import contexts
from gpurun.content.caches import DataSetShape, HostedSet
from gpurun.content.images import Placed, PlacedImageShape
from gpurun.content.ship import HostShip, ShipPlan, ShipPlanShape, ShipReport, ShipShape
from gpurun.content.staging import StagedHost, StageReport, StageShape
from gpurun.doctor.findings import BenchResult, Collective, Finding
from gpurun.doctor.host_checks import Difference, ProbedHost
from gpurun.documents.plain import json_text
from gpurun.errors import HostUnreachable
from gpurun.facts import Gid, Hca, HcaPort, Nic
from gpurun.inventory.read import load_inventory
from gpurun.lab.lab import HostStatus, LabStatus
from gpurun.lab.network import Traffic

FEW = examples("documents of a type")
"""Values have few branches, and each is made of many parts."""
ERRORS = st.sampled_from([None, HostUnreachable("the connection timed out", host="h1")])
MEASURED = st.builds(Collective, time_us=st.floats(1, 1e9), ranks=st.integers(1, 1000))
OUTCOMES = st.sampled_from(["present", "done", "failed"])


def commands_with_json():
    for context in contexts("gpurun", get_command(app)):
        if not isinstance(context.command, click.Group) and any("--json" in one.opts for one in context.command.params):
            yield context.command_path.removeprefix("gpurun ")


def test_every_command_with_json_has_a_shape():
    assert sorted(commands_with_json()) == sorted(SHAPES)


@pytest.mark.parametrize("command", SHAPES)
def test_a_shape_can_be_read_and_says_what_it_is(command):
    for top in SHAPES[command]:
        assert summary(top).endswith(".")
        for one in objects(top):
            assert members(one)
            assert all(words(member.hint) for member in members(one).values())


class Colour(Enum):
    RED = "red"


@dataclass
class Inner:
    """An object.

    Attributes:
        where: a folder,
            or a file.
    """

    where: Path


class Always(TypedDict):
    number: float


class Outer(Always, total=False):
    """Another one."""

    kinds: list[Literal["a", "b"]]
    inner: Inner | None
    pair: tuple[int, str]
    named: dict[str, Colour]
    any: Any


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        ({"number": 1}, []),
        (
            {"number": 1.5, "kinds": ["a"], "inner": {"where": "x"}, "pair": [1, "x"], "named": {"x": "red"}, "any": 1},
            [],
        ),
        ({"number": 1, "inner": None, "kinds": [], "named": {}}, []),
        ({}, ["$: no number"]),
        ({"number": "1"}, ["$.number: '1' is no number"]),
        ({"number": True}, ["$.number: True is no number"]),
        ({"number": 1, "more": 2}, ["$: more is unknown"]),
        ({"number": 1, "kinds": ["c"]}, ["$.kinds[0]: 'c' is no `a` or `b`"]),
        ({"number": 1, "kinds": "a"}, ["$.kinds: 'a' is no list"]),
        ({"number": 1, "inner": {}}, ["$.inner: no where"]),
        ({"number": 1, "pair": [1]}, ["$.pair: 1 values, not 2"]),
        ({"number": 1, "pair": ["x", "x"]}, ["$.pair[0]: 'x' is no integer"]),
        ({"number": 1, "named": {"x": "blue"}}, ["$.named.x: 'blue' is no `red`"]),
        ({"number": 1, "named": []}, ["$.named: [] is no object"]),
        ([], ["$: [] is no Outer"]),
    ],
)
def test_a_wrong_document_is_seen(document, wrong):
    assert list(problems(document, Outer)) == wrong


def test_a_key_says_what_its_docstring_says():
    assert members(Inner)["where"].about == "a folder, or a file."
    assert members(Outer)["number"].is_optional is False and members(Outer)["any"].is_optional is True


def test_what_a_command_prints_is_compared_with_what_it_may_print():
    right = {"version": "1", "python": {"version": "3", "implementation": "CPython"}, "packages": {"x": None}}
    assert printed_problems(["version", "--json"], json.dumps(right)) == []
    assert printed_problems(["--quiet", "version", "--json"], json.dumps({**right, "x": 1})) == ["$: x is unknown"]
    assert printed_problems(["version"], "gpurun 1") == []
    line = {"time": "t", "rank": 0, "stream": "stdout", "text": "x"}
    lines = "\n".join(json.dumps(one) for one in (line, {**line, "rank": "0"}))
    assert printed_problems(["logs", "j", "--json"], lines) == ["$.rank: '0' is no integer"]
    assert printed_problems(["submit", "--", "x", "--json"], "j-1") == []


def differs(document, shape):
    """Where a document differs from its shape, after its way through JSON."""
    return list(problems(json.loads(json_text(document)), shape))


@FEW
@given(st.from_type(Finding))
def test_a_finding_has_its_shape(finding):
    assert differs(finding, Finding) == []


@FEW
@given(st.builds(BenchResult, collectives=st.tuples(MEASURED)), st.from_type(Finding), st.just({"h1": 25.0}))
def test_a_bench_has_its_shape(result, finding, rates):
    inventory = load_inventory(str(Path(__file__).parents[2] / "inventory/one-host.yaml"))
    assert differs(_document(inventory, result, [finding], rates), BenchShape) == []


@FEW
@given(
    st.builds(ShipReport, hosts=st.tuples(st.builds(HostShip, state=OUTCOMES, error=ERRORS))), st.from_type(ShipPlan)
)
def test_a_ship_has_its_shape(report, plan):
    assert differs(report.as_json(), ShipShape) == []
    assert differs(plan.as_json(), ShipPlanShape) == []


@FEW
@given(st.from_type(Placed), st.from_type(HostedSet))
def test_images_and_data_sets_on_hosts_have_their_shapes(placed, hosted):
    assert differs(placed.as_json(), PlacedImageShape) == []
    assert differs(hosted.as_json(), DataSetShape) == []


@FEW
@given(st.builds(StageReport, hosts=st.tuples(st.builds(StagedHost, state=OUTCOMES, error=ERRORS))))
def test_a_stage_has_its_shape(report):
    assert differs(report.as_json(), StageShape) == []


def test_the_hardware_of_a_host_has_its_shape():
    port = HcaPort(1, "ACTIVE", "InfiniBand", gids=(Gid(0, "::1"),), counters={"symbol_error": 1})
    found = ProbedHost(
        "h1", hcas=(Hca("mlx5_0", (port,)),), nics=(Nic("eno1", pfc=(3,)),), problems={"gpus": "none"},
        differences=(Difference("gpus", 4, 3),),
    )  # fmt: skip
    assert differs(found, ProbedHost) == []


def test_a_lab_has_its_shape():
    traffic = Traffic(1, 2)
    host = HostStatus("h1", "r1", "10.0.0.2", "up", 4, "pascal", 7, 48.5, "/hardware", "/sys", 1, 2)
    status = LabStatus("lab", "up", "/lab", head_state="up", hosts=(host,), uplinks={"r1": traffic}, head=traffic)
    assert differs(status.to_json(), LabStatus) == []
    assert differs(LabStatus("lab", "down", "/lab").to_json(), LabStatus) == []
