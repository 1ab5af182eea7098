"""A few random trees of each kind; `benchmarks/bench_outputs.py --only trees` takes a thousand."""

from __future__ import annotations

import outputs_trees
import pytest


@pytest.mark.parametrize("seed", range(4))
def test_random_trees(tmp_path, seed):
    outputs_trees.of_one_host(tmp_path, seed)


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_of_two_hosts(tmp_path, seed):
    outputs_trees.of_two_hosts(tmp_path, seed)
