"""The power of a host is cut at any moment: the next attempt gets one whole step, from real agents."""

from __future__ import annotations

import random

import pytest
from how_many import count
from local_agents import Hosts
from outputs_programs import CheckpointFolders, InPlace, Shards, VirtualTime
from outputs_world import outputs_job

from gpurun.launch.launchers.direct import TORCHRUN
from gpurun.supervisor.outputs import outputs
from gpurun.supervisor.outputs import outputs as outputs_watch
from gpurun.supervisor.outputs.outputs import OutputsWatch, collect_outputs, send_outputs


@pytest.fixture
def run_until(tmp_path, own_copy):
    """Runs a program on hosts, with gpurun's own loop of copies, until the power of its last host is cut."""
    worlds = []

    def run(program, *, cut_s, rest_s, piece_s=0.0, every_s=60.0):
        folder = tmp_path / str(len(worlds))
        folder.mkdir()
        hosts = Hosts(folder)
        worlds.append(hosts)
        names = [f"h{number}" for number in range(1, program.hosts + 1)]
        job = outputs_job(folder, hosts, *names, "new", launcher=TORCHRUN)
        job.hosts = job.members = tuple(names)
        job.spec.outputs_every_s = every_s
        virtual = VirtualTime(program.run([job.host(name) for name in names], rest_s), cut_s)
        own_copy(outputs, "time", monotonic=virtual.monotonic, sleep=virtual.advance)
        own_copy(outputs_watch, "time", monotonic=virtual.monotonic)
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                agent = job.links.agent(name)
                patch.setattr(agent, "stream", virtual.through(agent.stream, piece_s))
            OutputsWatch(job, virtual)._follow()
            job.links.silent = {names[-1]}
            collect_outputs(job)
        return job

    yield run
    for hosts in worlds:
        hosts.close()


def restart(job):
    """Begin the next attempt on the hosts that are left and a new one; return their folders."""
    lost = job.hosts[-1]
    job.links.silent = set()
    job.hosts = job.members = (*job.hosts[:-1], "new")
    send_outputs(job)
    assert lost not in job.hosts
    return [job.host(name) for name in job.hosts]


PROGRAMS = {"in place": InPlace, "shards on four hosts": Shards, "checkpoint-N": CheckpointFolders}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("seed", range(count("power cuts of programs that save")))
def test_a_restart_reads_one_whole_step(run_until, name, seed):
    chance = random.Random(f"{name} {seed}")
    program = PROGRAMS[name]()
    cut_s, rest_s = chance.uniform(90, 600), chance.uniform(8, 40)
    job = run_until(program, cut_s=cut_s, rest_s=rest_s, piece_s=chance.choice((0, 0.05, 0.1)))
    has_one = (job.folder.path.plain / "outputs.whole").exists()
    folders = restart(job)
    if has_one:
        assert 1 <= program.read(folders) <= cut_s / rest_s
    else:
        assert cut_s < 150, "the first copies have met no rest"
