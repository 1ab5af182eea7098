"""Documents of hosts become values; a host that sends nonsense is named, with the place of the nonsense."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import HostNotReady
from gpurun.facts import (
    Gpu,
    GpuSample,
    HostSample,
    hardware_from_document,
    sample_from_document,
)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        (None, ""),
        ([], ""),
        ("x", ""),
        ({"gpus": 3}, "$.gpus"),
        ({"gpus": [{"index": "0"}]}, "$.gpus[0].index"),
        ({"gpus": [{"index": 0}, {"index": True}]}, "$.gpus[1].index"),
        ({"gpus": [{}]}, "$.gpus[0]"),
        ({"nics": [None]}, "$.nics[0]"),
        ({"clock_s": "now"}, "$.clock_s"),
        ({"docker": []}, "$.docker"),
        ({"problems": {"a": 1}}, "$.problems"),
        ({"hcas": [{"name": "m", "ports": [{"number": 1}]}]}, "$.hcas[0].ports[0]"),
        ({"limits": {"nofile": 1.5}}, "$.limits.nofile"),
        ({"gpus": "\ud800"}, ""),
        ({"gpus": [{"index": "\udcff"}]}, ""),
    ],
)
def test_a_document_that_is_not_valid_is_refused_with_its_host_and_place(document, place):
    with pytest.raises(HostNotReady) as error:
        hardware_from_document("h'; x", document)
    assert error.value.host == "h'; x"
    assert place in error.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["gpus", "index", "nics", "x"]), inner),
)


@given(JSON)
def test_any_json_is_a_value_or_an_error_of_the_host(document):
    for convert in (hardware_from_document, lambda host, it: sample_from_document(host, it, 1.0)):
        try:
            convert("h", document)
        except HostNotReady as error:
            assert error.host == "h"


@pytest.mark.parametrize("number", [10**400, -(10**400), math.inf, math.nan])
def test_a_number_without_measure(number):
    try:
        hardware_from_document("h", {"clock_s": number, "gpus": [{"index": number}]})
    except HostNotReady as error:
        assert error.host == "h"


def test_a_document_survives_the_round_trip():
    found = hardware_from_document("h", {"hostname": "ü", "new": 1, "gpus": [{"index": 0, "nvlink_peers": [1]}]})
    assert found.gpus == (Gpu(0, nvlink_peers=(1,)),)
    again = json.loads(json.dumps(asdict(found)))
    assert hardware_from_document("h", again) == found


def test_a_host_does_not_choose_its_own_name():
    assert hardware_from_document("h", {"host": "other"}).host == "h"


def test_a_sample_is_stamped_with_the_heads_clock():
    sample = sample_from_document("h", {"gpus": [{"index": 1, "power_w": 80}], "clock_s": 3.0, "heard_s": 9.0}, 7.0)
    assert sample == HostSample((GpuSample(1, power_w=80.0),), heard_s=7.0)


@pytest.mark.parametrize("document", [None, {"gpus": [{"index": "0"}]}, {"gpus": 1}, {"problem": 5}])
def test_a_sample_that_is_not_valid(document):
    with pytest.raises(HostNotReady):
        sample_from_document("h", document, 0.0)
