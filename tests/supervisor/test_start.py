"""Starting containers with each launcher: a port that something else has, and an image without what it needs."""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.errors import GpurunError
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.launch.container import HostAccount
from gpurun.launch.launchers import NAMES, settled
from gpurun.node.agent.frames import OpError
from gpurun.node.job import gang
from gpurun.node.job.rules import OWNER
from gpurun.remote import answers
from gpurun.remote.agent import RemoteOpFailed
from gpurun.remote.fleet import Results
from gpurun.supervisor import start
from gpurun.supervisor.hosts import ask_accounts
from gpurun.supervisor.verdict.ends import GangEnd


class Hosts:
    """Two hosts without containers; `busy` says which ports are in use on the second one."""

    def __init__(self, job, busy):
        self.job, self.busy, self.calls, self.there, self.made, self.asked = job, busy, [], {}, {}, {}

    def each(self, call, hosts=None):
        ok, failed = {}, {}
        for host in self.job.hosts if hosts is None else hosts:
            try:
                ok[host] = call(self.agent(host))
            except GpurunError as error:
                failed[host] = error
        return Results(ok, failed)

    def agent(self, host):
        return SimpleNamespace(host=host, call=lambda op, **asked: self.answer(host, op, asked))

    def answer(self, host, op, asked):
        self.calls.append((op, host))
        self.asked[host] = asked
        if op == "gang.prepare":
            number = self.job.hosts.index(host)
            said = {"uid": "1500", "gid": "1500", "groups": [], "user": "train", "folder": "/home/train/.gpurun"}
            said |= {"hostname": host, "address": f"10.0.0.{number}", "names": [], "sshd": "/usr/sbin/sshd"}
            return SimpleNamespace(value={**said, "docker_host": "unix:///d", "public_key": "ssh-ed25519 AAAA"})
        if op == "gang.inspect":
            return SimpleNamespace(value=self.there.get(host, []))
        if op == "gang.create" and host == self.job.hosts[1] and self.busy(self.job.lease.ssh_port):
            raise RemoteOpFailed("it's taken\n", kind="port-in-use", host=host)
        if op == "gang.create" and host in self.made:
            return SimpleNamespace(value=answers.checked_answer(op, self.made[host]))
        return SimpleNamespace(value={})

    def counted(self, op):
        return sum(each == op for each, _ in self.calls)


@pytest.fixture
def prepared(carry):
    """A gang of two hosts that have said who they are, just before its containers are made."""

    def prepared(launcher, busy):
        spec = JobSpec("n", "i", 4, ("true", "it's\nü"), launcher=launcher)
        job = carry(gpus=4, launcher=launcher, command=spec.command, roles=settled(spec, is_named=True)[0].roles)
        job.links = Hosts(job, busy)
        job.image_sets = frozenset()
        for number, host in enumerate(job.hosts):
            job.accounts[host] = HostAccount("1500", "1500", "train", "/home/train/.gpurun", host, f"10.0.0.{number}")
            job.public_keys[host] = "ssh-ed25519 AAAA"
        return job

    return prepared


def test_a_host_on_which_the_layer_is_a_copy_is_named_with_the_reason(prepared):
    job = prepared("tasks", lambda _: False)
    said = {"container": "c", "copied": "mount overlay:\ninvalid \x1b argument"}
    job.links.made = dict(zip(job.hosts, (said, {"container": "c"}), strict=True))
    start._create_all(job)
    events = job.folder.events.read_text()
    assert events.count("cannot mount an overlay above the code") == 1, events
    assert (
        f"{job.hosts[0]} cannot mount an overlay" in events
        and "copy of the code: mount overlay: invalid argument" in events
    )


def test_only_a_host_whose_inventory_allows_caches_is_asked_for_them(prepared):
    job = prepared("tasks", lambda _: False)
    first, second = job.hosts
    hosts = [replace(each, cache_quota_mib=2 if each.name == second else None) for each in job.inventory.hosts]
    job.inventory = replace(job.inventory, hosts=tuple(hosts))
    ask_accounts(job)
    assert "caches" not in job.links.asked[first]
    caches = job.links.asked[second]["caches"]
    plan = start._create_all(job)
    assert caches["most_bytes"] == 2 << 20
    assert OWNER.match(caches["owner"])
    mounted = {host.host: f"/caches/{caches['owner']}/files," in str(host.run) for host in plan.hosts}
    assert mounted == {first: False, second: True}


@pytest.mark.parametrize("launcher", NAMES)
def test_a_port_that_something_else_has_is_left_to_it(prepared, launcher):
    job = prepared(launcher, lambda port: port == taken)
    taken = job.lease.ssh_port
    plan = start._create_all(job)
    assert job.lease.ssh_port != taken
    assert job.leases.read(job.lease.job).ssh_port == job.lease.ssh_port, "later passes know of it"
    assert f"port {taken} is in use on {job.hosts[1]}, so gpurun chooses another port" in job.folder.events.read_text()
    assert job.links.counted("gang.create") == 4 and job.links.counted("gang.fence") == 2, "all is made again"
    assert str(taken) not in str(plan) and str(job.lease.ssh_port) in str(plan)


@pytest.mark.parametrize("launcher", NAMES)
def test_where_every_port_is_taken_the_gang_ends_with_nothing_left(prepared, launcher):
    job = prepared(launcher, lambda port: True)
    with pytest.raises(GangEnd) as ended:
        start._create_all(job)
    end = ended.value.end
    assert (end.outcome, end.code) == (State.FAILED, 4)
    assert "no free port for the job in 5 tries" in end.reason
    assert job.links.counted("gang.fence") == job.links.counted("gang.create") == 2 * start.PORT_TRIES


@pytest.mark.parametrize("launcher", NAMES)
def test_an_image_that_cannot_start_the_main_process_is_at_fault_and_no_host(prepared, launcher):
    job = prepared(launcher, lambda port: False)
    error = RemoteOpFailed('exec: "/gpurun/bin/it\'s": no such file', kind="no-command", host="h1")
    meant = start._meant(job, error)
    assert meant.exit_code == 2 and meant.host is None
    assert meant.message.startswith(f"the image i cannot start {job.launcher.program}: ")
    assert meant.hint == f"the image needs {job.launcher.needs}"


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_a_host_says_that_a_port_is_taken(address):
    with socket.socket() as other:
        other.bind((address, 0))
        other.listen()
        with pytest.raises(OpError, match="Address already in use") as refused:
            gang._check_port(other.getsockname()[1])
        assert refused.value.kind == "port-in-use"
    gang._check_port(0)


def container(status, attempt="1"):
    return {"attempt": attempt, "status": status}


@pytest.mark.parametrize("launcher", NAMES)
@pytest.mark.parametrize("other", [[], [container("created")], [container("dead")], [container("running", "2'; true")]])
def test_a_start_that_was_cut_off_is_made_again_unless_all_that_start_ranks_run(prepared, launcher, other):
    """Where there is a launcher, it starts last. Else a host may lack its ranks although the first one has its own."""
    job = prepared(launcher, lambda port: False)
    job.links.there = {job.hosts[0]: [container("running")], job.hosts[1]: other}
    starts_all = job.launcher.argv is not None
    assert start._is_launched(job) is starts_all
    assert [host for op, host in job.links.calls if op == "gang.fence"] == (
        [] if starts_all else [job.hosts[0], *([job.hosts[1]] if other else [])]
    )
    job.links.there[job.hosts[1]] = [container("exited")]
    assert start._is_launched(job), "its ranks have ended already"
