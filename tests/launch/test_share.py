"""What a job's container may use of its host: memory, ``/dev/shm`` and cores by its share of the GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.facts import DockerFacts, Gpu, Hardware
from gpurun.inventory.model import Host, Inventory
from gpurun.jobs.spec import LEAST_MEMORY_MIB, Grant, JobSpec
from gpurun.launch.container import KILLED_FIRST, alike, share_of, shares, size, threads

HOST = Host("h", rack="r", generation="hopper", gpus=8, fabric="tcp")
SPEC = JobSpec("n", "image:1", 1, ("true",))
ENGINE = DockerFacts(memory_bytes=400 << 30, cores=64, limits_memory=True)
USABLE_MIB = 380 * 1024


def of(gpus, spec=SPEC, engine=ENGINE, host=HOST):
    return share_of(host, gpus, spec, engine)


def flag(share, name):
    return next((share.flags[i + 1] for i, word in enumerate(share.flags) if word == name), None)


def test_a_job_gets_the_part_of_its_gpus_and_the_host_keeps_a_twentieth():
    share = of(1)
    assert (share.memory_mib, share.shm_mib, share.cpus) == (USABLE_MIB // 8, USABLE_MIB // 16, 8.0)
    assert flag(share, "--memory") == flag(share, "--memory-swap") == f"{USABLE_MIB // 8}m", "swap adds nothing"
    assert flag(share, "--shm-size") == f"{USABLE_MIB // 16}m"
    assert flag(share, "--label") == "gpurun.cpus=8.00"
    assert flag(share, "--oom-score-adj") is None
    assert (
        share.words == "47.5GiB of memory (up to 23.8GiB of it in /dev/shm), 8 cores while other jobs run on the host"
    )


def test_who_has_all_gpus_has_all_that_the_host_gives():
    share = of(8)
    assert (share.memory_mib, share.cpus) == (USABLE_MIB, None)
    assert share.words == "380GiB of memory (up to 190GiB of it in /dev/shm), all cores"


def test_gangs_that_share_a_host_without_gpus_are_not_promised_its_memory_twice_and_divide_its_cores():
    host = replace(HOST, gpus=0)
    share, more = of(0, host=host), of(0, replace(SPEC, memory_mib=100 * 1024, cpus=2), host=host)
    assert (share.memory_mib, share.is_over, flag(share, "--label")) == (USABLE_MIB // 8, False, "gpurun.cpus=64.00/n")
    assert share.words.endswith("64 cores, divided evenly while other jobs run on the host")
    assert (more.memory_mib, more.is_over, flag(more, "--label")) == (100 * 1024, True, "gpurun.cpus=2.00")
    assert flag(of(0, engine=None, host=host), "--label") is None


def test_gpus_that_an_inventory_leaves_out_have_their_share_too():
    """Two inventories divide one host of eight GPUs: neither gives away the memory of the other's."""
    half = replace(HOST, gpus=4)
    probe = Hardware("h", docker=ENGINE, gpus=tuple(Gpu(index) for index in range(8)))
    for gpus in (1, 4):
        spec, grants = replace(SPEC, gpus=gpus), [Grant("h", tuple(range(gpus)))]
        (share,) = shares(spec, grants, Inventory((half,), (), {}), {"h": probe}).values()
        assert (share.memory_mib, share.cpus, share.of) == (USABLE_MIB * gpus // 8, 8.0 * gpus, 8)
    assert share_of(HOST, 8, SPEC, ENGINE, found_gpus=7).memory_mib == USABLE_MIB, "one is broken: it returns"


def test_the_inventory_says_what_the_host_keeps():
    assert of(8, host=replace(HOST, system_memory_mib=80 * 1024)).memory_mib == 320 * 1024
    assert of(8, engine=replace(ENGINE, memory_bytes=4 << 30)).memory_mib == 3 * 1024, "1 GiB at least"
    small = replace(ENGINE, memory_bytes=1 << 30)
    assert of(8, engine=small).memory_mib == of(1, replace(SPEC, memory_mib=900), small).memory_mib == 512, "half"
    assert of(8, host=replace(HOST, system_memory_mib=1 << 30)).memory_mib == LEAST_MEMORY_MIB, "more than it has"


def test_a_recipe_overrides_the_share_but_no_job_gets_what_the_host_keeps():
    less, more = of(1, replace(SPEC, memory_mib=1024, cpus=2)), of(1, replace(SPEC, memory_mib=1 << 30, cpus=1e9))
    assert (less.memory_mib, less.shm_mib, less.cpus, less.is_over) == (1024, 512, 2, False)
    assert (more.memory_mib, more.cpus, more.is_over) == (USABLE_MIB, 64.0, True)
    assert flag(more, "--oom-score-adj") == str(KILLED_FIRST), "not its neighbours, if the host runs out of memory"
    assert of(1, replace(SPEC, shm_size_mib=64)).shm_mib == 64
    assert of(1, replace(SPEC, shm_size_mib=1 << 30)).shm_mib == USABLE_MIB // 8, "what is in it counts as memory"


@pytest.mark.parametrize("engine", [None, DockerFacts(), replace(ENGINE, limits_memory=False)])
def test_without_knowledge_of_its_memory_a_host_has_no_limit(engine):
    share = of(1, engine=engine)
    assert (share.memory_mib, share.shm_mib) == (None, 1024)
    assert flag(share, "--memory") is None and flag(share, "--cpu-shares") == "1024"
    assert "1/8 of the memory (half of it in /dev/shm)" in share.words


def test_where_cores_are_fewer_than_gpus_only_weights_divide_them():
    share = of(2, engine=replace(ENGINE, cores=7))
    assert (share.cpus, flag(share, "--cpu-shares"), flag(share, "--label")) == (None, "2048", None)


@given(
    gpus=st.integers(0, 1024), of_gpus=st.integers(0, 1024), memory=st.integers(1, 1 << 62),
    cores=st.integers(1, 1 << 20),
    system=st.none() | st.integers(1, 1 << 40), asked=st.none() | st.integers(LEAST_MEMORY_MIB, 1 << 40),
    shm=st.none() | st.integers(0, 1 << 40), cpus=st.none() | st.floats(0.1, 4096),
)  # fmt: skip
def test_docker_accepts_every_share(gpus, of_gpus, memory, cores, system, asked, shm, cpus):
    """Docker refuses less than 6 MiB of memory, a weight outside of 2 to 262144, and more cores than there are."""
    host = replace(HOST, gpus=of_gpus, system_memory_mib=system)
    share = of(
        gpus,
        replace(SPEC, memory_mib=asked, shm_size_mib=shm, cpus=cpus),
        DockerFacts("", "", memory_bytes=memory, cores=cores),
        host,
    )
    assert share.memory_mib > 6 and 1 <= share.shm_mib <= share.memory_mib
    assert 2 <= share.weight <= 262_144
    assert share.cpus is None or 0 < share.cpus <= cores


def test_shares_never_add_up_to_more_than_the_host_gives():
    for parts in ((1,) * 8, (1, 2, 5), (3, 3, 2), (7, 1)):
        each = [of(gpus) for gpus in parts]
        assert sum(share.memory_mib for share in each) <= USABLE_MIB
        assert sum(share.cpus for share in each) <= 64.0


def test_equal_shares_are_told_once():
    assert list(alike({"a": of(1), "b": of(1), "c": of(8)}).values()) == [["a", "b"], ["c"]]
    assert [size(mib) for mib in (512, 1024, 47 * 1024 + 300)] == ["512MiB", "1GiB", "47.3GiB"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "cores", "spec", "each"),
    [
        (8, 8, 64, SPEC, 8),
        (2, 2, 64, SPEC, 8),
        (1, 1, 64, SPEC, 8),  # one of eight GPUs: its neighbours use the other cores
        (8, 1, 64, SPEC, None),  # the whole host: PyTorch then takes its physical cores
        (8, 8, 4, SPEC, 1),
        (2, 2, 2, SPEC, 1),
        (4, 4, 64, replace(SPEC, cpus=6), 1),
        (8, 2, 64, replace(SPEC, cpus=6), 3),
        (8, 2, 64, replace(SPEC, cpus=600), 32),
        (8, 8, None, SPEC, None),
        (8, 0, 64, SPEC, None),
    ],
)
def test_each_rank_may_start_its_part_of_the_shares_threads(gpus, ranks, cores, spec, each):
    share = of(gpus, spec, replace(ENGINE, cores=cores))
    assert threads(share, ranks, cores) == each


def test_servers_on_a_host_without_gpus_divide_its_threads():
    bare = replace(HOST, gpus=0)
    assert threads(of(0, host=bare), 4, 64) == 16
    assert threads(of(0, host=bare, engine=None), 4, 64) is None
