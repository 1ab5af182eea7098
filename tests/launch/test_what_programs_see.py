"""What a program in a container is told of its gang, whatever has started it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placed_gangs import SPEC, plan, told

from gpurun.launch.launchers.direct import TASKS
from gpurun.runtime import gpurun_runtime


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Be a rank in a container of a planned gang."""

    def be(launcher, environ, *hosts, one_per_host=False):
        made = plan(launcher, *hosts, spec=replace(SPEC, one_per_host=one_per_host))
        assert {host.files["launch/gang.json"] for host in made.hosts} == {made.first.files["launch/gang.json"]}
        assert "GPURUN_GANG=/gpurun/gang.json" in made.first.run
        (tmp_path / "gang.json").write_text(made.first.files["launch/gang.json"][0])
        monkeypatch.setenv("GPURUN_GANG", str(tmp_path / "gang.json"))
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return gpurun_runtime.gang()

    return be


def test_a_rank_that_gpurun_starts_knows_its_place(container):
    environ = {name: value for name, value in told(TASKS)[2].items() if name.startswith("GPURUN_")}
    gang = container("tasks", {**environ, "GPURUN_SIZE": "4", "GPURUN_LOCAL_SIZE": "2"}, "h2", "h3")
    assert (gang.rank, gang.size, gang.local_rank, gang.local_size, gang.node) == (2, 4, 0, 2, 1)
    assert (gang.hosts, gang.port) == (["h2", "h3"], 23022)
    assert len(gang.addresses) == 2


@pytest.mark.parametrize("prefix", ["HOROVOD_", "OMPI_COMM_WORLD_"])
def test_so_does_one_that_a_launcher_starts_and_the_port_is_its_sshds(container, prefix):
    told = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    launcher = "horovod" if prefix == "HOROVOD_" else "mpirun"
    gang = container(launcher, {prefix + name: value for name, value in told.items()}, "h2", "h4")
    assert (gang.rank, gang.size, gang.local_rank, gang.local_size, gang.node) == (3, 4, 1, 2, 1)
    assert (gang.hosts, gang.port) == (["h2", "h4"], 0)


def test_ranks_of_an_elastic_gang_that_has_grown_are_counted_as_the_driver_counts_them(container):
    gang = container("horovod", {"HOROVOD_RANK": "7", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1"}, "h2", "h4")
    assert (gang.rank, gang.size, gang.local_rank) == (7, 8, 1)


def test_a_process_that_the_only_process_of_its_host_started_has_the_numbers_of_its_launcher(container):
    own = {name: value for name, value in told(TASKS)[2].items() if name.startswith("GPURUN_")}
    own |= {"GPURUN_RANK": "1", "GPURUN_SIZE": "2", "GPURUN_LOCAL_RANK": "0", "GPURUN_LOCAL_SIZE": "1"}
    gang = container("tasks", own, "h2", "h3", one_per_host=True)
    assert (gang.rank, gang.size, gang.local_rank, gang.local_size, gang.node) == (1, 2, 0, 1, 1)
    by_torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    gang = container("tasks", {**own, **by_torchrun}, "h2", "h3", one_per_host=True)
    assert (gang.rank, gang.size, gang.local_rank, gang.local_size, gang.node) == (3, 4, 1, 2, 1)
    gang = container("tasks", {**own, **by_torchrun}, "h2", "h3")
    assert (gang.rank, gang.size) == (1, 2)


def test_outside_gpurun_a_program_is_alone(monkeypatch):
    monkeypatch.delenv("GPURUN_GANG", raising=False)
    assert gpurun_runtime.gang() == (0, 1, 0, 1, 0, ["localhost"], ["127.0.0.1"], 0, "", 0, {})
