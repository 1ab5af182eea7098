"""Which ranks get their user's caches of models and kernels, and the variables that lead there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_plan import CLAIMANT, GRANTS, HOSTS, INVENTORY, SPEC, plan

from gpurun.launch.plan import owner_of
from gpurun.node.job.rules import CACHES_TARGET, OWNER

CACHED = replace(INVENTORY, hosts=(*HOSTS[:3], replace(HOSTS[3], cache_quota_mib=50 << 10)))
OWN = f"{'a' * 16}-1001"


def cached(spec=SPEC, image_sets=()):
    """Return the variables that lead to caches, and the mount, of the host that has some; the other has none."""
    without, host = plan(spec=spec, inventory=CACHED, image_sets=image_sets).hosts
    assert not [word for word in without.run if CACHES_TARGET in word]
    words = [word for word in host.run if CACHES_TARGET in word or word.startswith(("TORCH_EXT", "HOME="))]
    return {word.split("=")[0]: word.split("=", 1)[1] for word in words if not word.startswith("type=")}, [
        word for word in words if word.startswith("type=")
    ]


def test_only_hosts_whose_inventory_allows_it_have_caches_and_home_is_none():
    variables, mounts = cached()
    assert variables == {
        "HOME": "/tmp",
        "XDG_CACHE_HOME": CACHES_TARGET, "HF_HOME": f"{CACHES_TARGET}/huggingface",
        "TORCH_HOME": f"{CACHES_TARGET}/torch",
        "TRITON_CACHE_DIR": f"{CACHES_TARGET}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{CACHES_TARGET}/inductor",
        "CUDA_CACHE_PATH": f"{CACHES_TARGET}/cuda", "TORCH_EXTENSIONS_DIR": "/tmp/torch_extensions",
    }  # fmt: skip
    assert mounts == [f"type=bind,source=/home/train/.gpurun/caches/{OWN}/files,target={CACHES_TARGET}"]
    assert plan() == plan(inventory=replace(CACHED, hosts=HOSTS))


@pytest.mark.parametrize(
    ("env", "image", "missing"),
    [
        ({"HF_HOME": "/mine"}, (), {"HF_HOME"}),
        ({}, ("TORCH_HOME", "PATH"), {"TORCH_HOME"}),
        ({"XDG_CACHE_HOME": "/mine"}, (), {"XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"}),
        ({"HOME": "/out/home"}, (), {"XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"}),
    ],
)
def test_what_the_user_or_the_image_sets_stays_and_so_does_what_follows_it(env, image, missing):
    usual, _ = cached()
    found, mounts = cached(replace(SPEC, env=env), image)
    assert {name for name in usual if found.get(name) != usual[name]} - {"HOME"} == missing
    assert mounts


@pytest.mark.parametrize("target", [CACHES_TARGET, f"{CACHES_TARGET}/huggingface", "/run", "/run/"])
def test_what_a_recipe_mounts_there_wins(target):
    found, mounts = cached_of(replace(SPEC, mounts=(("/mine", target, "rw"),)))
    assert "HF_HOME" not in found
    assert not [mount for mount in mounts if "/caches/" in mount]


def cached_of(spec):
    host = plan(spec=spec, inventory=CACHED).hosts[1]
    return [word.split("=")[0] for word in host.run], [word for word in host.run if word.startswith("type=")]


def test_each_user_of_each_head_has_caches_of_their_own():
    owners = {owner_of(each) for each in (
        CLAIMANT, CLAIMANT._replace(uid=1002), CLAIMANT._replace(state="b" * 16), CLAIMANT._replace(job="j-00000002"),
    )}  # fmt: skip
    assert len(owners) == 3
    assert all(OWNER.match(each) for each in owners)
    assert GRANTS
