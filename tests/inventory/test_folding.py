"""Folding without ClusterShell says what ClusterShell says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.inventory import folding, hostset

NAMES = st.builds(
    lambda prefix, rack, number, width: f"{prefix.format(rack)}{number:0{width}}",
    st.sampled_from(["n", "gpu-r{}-", "r{}n", "a.b-"]), st.integers(1, 11), st.integers(0, 120),
    st.sampled_from([1, 2, 3]),
)  # fmt: skip
RACKS = st.builds(
    lambda racks, first, count: [f"gpu-r{rack}-{first + at:02}" for rack in racks for at in range(count)],
    st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 5),
)  # fmt: skip


@given(st.lists(NAMES, min_size=1, max_size=20) | RACKS)
def test_it_folds_as_clustershell_does(names):
    assert folding.fold(names) == hostset.fold_by_clustershell(names)


@pytest.mark.parametrize(
    ("names", "folded"),
    [(["n1"], "n1"), (["login"], "login"), ([], ""), (["n1", "n3", "n2"], "n[1-3]"), (["n09", "n10"], "n[09-10]"),
     (["n9", "n10"], "n[9-10]"), (["a1", "b1"], "a1,b1"), (["7"], "7"), (["r1-n1", "r2-n1"], "r[1-2]-n1")],
)  # fmt: skip
def test_what_is_not_simple_is_folded_too(names, folded):
    assert folding.fold(names) == folded
