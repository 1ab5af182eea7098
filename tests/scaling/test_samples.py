"""Measured runs: as values, and as lines of JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import BadInput
from gpurun.scaling.model import LinkClass, LinkRates, Sample, Shape, decode, encode

RING = Sample(
    ranks_per_host=(4, 4), racks=("r1", "r2"), batch_per_rank=64, gradient_bytes=178_000_000, step_s=0.5,
    images_per_s=1024.0, windows_s=(0.49, 0.5, 0.52), gpus=8, launcher="horovod", compute_s=0.4, compute_spread=0.02,
    exchange_s=0.2, rates=LinkRates(None, 25e9, 10e9), compression=2.0, job="j-12345678",
)  # fmt: skip
SERVERS = replace(
    RING, ranks_per_host=(1, 1, 0), racks=("r", "r", "r"), servers_per_host=(0, 0, 2), exchange="servers", gpus=2
)


@pytest.mark.parametrize("sample", [RING, SERVERS, replace(RING, windows_s=(), compute_s=None, gpus=0)])
def test_a_sample_is_one_line_of_json_both_ways(sample):
    line = encode(sample)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode(line + b"\n\n" + line, "f") == (sample, sample)


def test_keys_of_newer_versions_are_ignored_and_missing_ones_take_their_defaults():
    line = {"ranks_per_host": [1], "racks": ["r"], "batch_per_rank": 1, "gradient_bytes": 4, "step_s": 0.1,
            "images_per_s": 10.0, "colour": "red"}  # fmt: skip
    (sample,) = decode(json.dumps(line).encode(), "f")
    assert (sample.ranks, sample.exchange, sample.bytes_sent) == (1, "ring", 4.0)


HOSTILE = [
    {"step_s": 0}, {"step_s": -1}, {"step_s": 1e300}, {"step_s": None}, {"step_s": "1"}, {"step_s": True},
    {"images_per_s": 0}, {"images_per_s": -1e9}, {"images_per_s": 1e300}, {"batch_per_rank": 0},
    {"batch_per_rank": -64}, {"batch_per_rank": 10**40}, {"batch_per_rank": 1.5}, {"gradient_bytes": 0},
    {"gradient_bytes": -1}, {"gradient_bytes": 10**18}, {"compression": 0}, {"compression": -2}, {"compression": 1e9},
    {"windows_s": [0.1, 0.0]}, {"windows_s": [-1]}, {"windows_s": [1] * 10_001}, {"windows_s": "0.1"},
    {"compute_s": 0}, {"compute_s": -1}, {"exchange_s": -1}, {"compute_spread": -0.1}, {"gpus": -1},
    {"rates": {"host": 0}}, {"rates": {"rack": -1}}, {"rates": {"racks": 1e99}}, {"rates": [1, 2, 3]},
    {"ranks_per_host": []}, {"ranks_per_host": [0, 0]}, {"ranks_per_host": [-1, 2]}, {"ranks_per_host": [10**9, 1]},
    {"ranks_per_host": [4]}, {"racks": ["r1"]}, {"racks": [1, 2]}, {"exchange": "gossip"}, {"exchange": "servers"},
    {"servers_per_host": [1, 0]}, {"servers_per_host": [1], "exchange": "servers"},
    {"servers_per_host": [-1, 2], "exchange": "servers"}, {"step_s": 1e-300}, {"windows_s": [1e-300]},
    {"compute_s": 1e-300}, {"exchange_s": 1e-300}, {"compression": 1e-300}, {"precision": "bf16+"}, {"precision": 16},
    {"precision": "\x1b[2J"}, {"precision": "BF 16"}, {"is_compiled": 1}, {"is_compiled": "yes"},
]  # fmt: skip


@pytest.mark.parametrize("wrong", HOSTILE, ids=str)
def test_a_figure_that_cannot_be_is_refused_with_its_line(wrong):
    line = json.dumps(json.loads(encode(RING)) | wrong).encode()
    with pytest.raises(BadInput, match="not a measured run") as raised:
        decode(b"\n" + line, "samples.jsonl")
    assert raised.value.where == "samples.jsonl:2"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["step_s", "images_per_s", "compression", "compute_s", "exchange_s", "compute_spread"])
def test_no_figure_is_nan_or_endless(name, value):
    with pytest.raises(ValueError, match=name):
        replace(RING, **{name: value})
    with pytest.raises(ValueError, match="windows_s"):
        replace(RING, windows_s=(value,))
    with pytest.raises(ValueError, match="bit/s"):
        LinkRates(rack=value)
    line = json.dumps(json.loads(encode(RING)) | {name: value}).encode()  # Python writes NaN and Infinity
    with pytest.raises(BadInput):
        decode(line, "f")


@given(st.binary(max_size=200))
def test_bytes_that_are_no_samples_are_refused_never_a_crash(data):
    if data.strip(b" \n\t\r\x0b\x0c"):
        with pytest.raises(BadInput):
            decode(data, "f")


def test_deep_nesting_is_refused():
    with pytest.raises(BadInput):
        decode(b"[" * 100_000, "f")


@pytest.mark.parametrize(
    ("ranks", "racks", "servers", "links", "flows"),
    [
        ((1,), ("a",), (), set(), 0),
        ((4,), ("a",), (), {LinkClass.HOST}, 0),
        ((1, 1), ("a", "a"), (), {LinkClass.RACK}, 0),
        ((1, 1), ("a", "b"), (), {LinkClass.RACKS}, 1),
        ((4, 4, 4), ("a", "a", "b"), (), set(LinkClass), 1),
        ((1, 1, 1, 1), ("a", "b", "a", "b"), (), {LinkClass.RACK, LinkClass.RACKS}, 2),
        ((1, 0), ("a", "b"), (0, 1), {LinkClass.RACKS}, 0),
        ((1, 0), ("a", "b"), (1, 0), {LinkClass.HOST}, 0),
    ],
)
def test_the_links_of_a_shape(ranks, racks, servers, links, flows):
    shape = Shape(ranks, racks, servers)
    assert (shape.links, shape.flows_between_racks) == (links, flows)
