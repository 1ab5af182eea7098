"""Claims on a host's GPUs by real Docker engines: two heads, two names, crashes, prunes and hostile labels."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import Cluster
from crashing import build_image
from faulting import kill_supervisor, wait_until
from own_labs import own_lab
from racing import IMAGE, LAUNCHER, SCENARIOS, Side, race, two_heads

from gpurun.facts import held
from gpurun.inventory.read import load_inventory
from gpurun.jobs.store import JobStore
from gpurun.lab import engine, gpus
from gpurun.lab.spec import HostFolder
from gpurun.leases.store import LeaseStore
from gpurun.node.claim_rules import Claimant, container_labels, volume_labels, volume_name
from gpurun.remote import Fleet
from gpurun.remote.agent import RemoteOpFailed
from gpurun.remote.route import target_of
from gpurun.state.sharing import StateDirectory

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("claims")]

HOST, SECOND = HOSTS = ("gpu-r1-01", "gpu-r1-02")
ALICE = Claimant("j-0000000a", 1, "a" * 16, "alice", 1001, "head-1")
BOB = Claimant("j-0000000b", 1, "b" * 16, "bob", 1002, "head-2")
CARDS: list[tuple[int, str]] = []
"""The host's GPUs by index and UUID, once the lab is up."""
HOSTILE = "\x1b]0;owned\x07\x1b[2J\n$(reboot)" + "x" * 5000
FORGET = (
    "docker ps -aq --filter label=gpurun.job | xargs -r docker rm -f; docker volume ls -q | xargs -r docker volume rm"
)


@pytest.fixture(scope="module")
def claims_lab(tmp_path_factory):
    with own_lab("claims", racks=1, hosts=2) as lab:
        build_image(tmp_path_factory.mktemp("image"), IMAGE, LAUNCHER)
        environ = {**os.environ, "DOCKER_HOST": engine.ensure()}
        saved = subprocess.run(["docker", "save", IMAGE], env=environ, check=True, stdout=subprocess.PIPE).stdout
        for host in HOSTS:
            lab.run(host, ["docker", "load"], stdin=saved)
        cards = gpus.load_gpus(hardware(lab) / gpus.FILE)
        CARDS[:] = [(index, cards[f"gpu {index}"]["uuid"]) for index in range(4)]
        yield lab


@pytest.fixture
def lab(claims_lab):
    for host in HOSTS:
        claims_lab.run(host, ["sh", "-c", f"{FORGET}; rm -rf ~train/.gpurun"])
    yield claims_lab
    host = next(host for host in claims_lab.hosts if host.name == HOST)
    gpus.save(gpus.healthy(claims_lab.name, host), hardware(claims_lab) / gpus.FILE)


def hardware(lab):
    return HostFolder(lab.folder / "hosts" / HOST).hardware


@pytest.fixture
def agent(lab):
    """Open an agent on the host, as another head would. Each agent is a separate process."""
    inventory = load_inventory(lab.inventory)
    opened = []

    def open_one():
        opened.append(Fleet.open([target_of(inventory.by_name[HOST], inventory)]))
        return opened[-1].agents[HOST]

    yield open_one
    for fleet in opened:
        fleet.close()


def take(agent, me, cards=None):
    cards = CARDS[:1] if cards is None else cards
    agent.call("claims.take", claimant=me._asdict(), cards=cards)


def refused(agent, me, cards=None):
    """Return why a host refuses a claim."""
    with pytest.raises(RemoteOpFailed) as caught:
        take(agent, me, cards)
    assert caught.value.kind == "claimed"
    return "; ".join(each[3] for each in caught.value.detail["refused"])


def docker(lab, *words, host=HOST):
    done = lab.run(host, ["docker", *words])
    assert done.code == 0, done.stderr
    return done.stdout.decode().split()


def claims(lab, host=HOST):
    """Return volume → job, as Docker reports it."""
    found = {}
    for name in docker(lab, "volume", "ls", "-q", "--filter", "name=gpurun-gpu-", host=host):
        found[name] = json.loads(lab.run(host, ["docker", "volume", "inspect", name]).stdout)[0]["Labels"]["gpurun.job"]
    return found


def as_options(labels):
    return [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]


def run_container(lab, labels, *options):
    return docker(lab, "run", "--detach", *as_options(labels), *options, "--entrypoint", "sleep", IMAGE, "300")[0]


def sleeper(lab):
    """Start a process of alice's outside gpurun. Returns its pid."""
    command = ["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"]
    return lab.run(HOST, command, user="alice").stdout.decode().strip()


def fence(agent, me, **options):
    return agent.call(
        "gang.fence", job=me.job, attempt=me.attempt, claimant=me._asdict(), timeout_s=20.0, **options
    ).value


def gone(agent):
    """End an agent and wait until the host has noticed."""
    agent.close()
    time.sleep(0.5)


class TestTheEngine:
    """One host's dockerd, real agents."""

    def test_of_many_agents_that_claim_at_once_one_gets_the_gpus(self, lab, agent):
        agents = [agent() for _ in range(6)]
        for number in range(5):
            won, barrier = [], threading.Barrier(len(agents))

            def go(index, number=number, won=won, barrier=barrier):
                me = ALICE._replace(job=f"j-{index:08x}", attempt=number + 1)
                barrier.wait()
                try:
                    take(agents[index], me, CARDS[:4])
                    won.append(me)
                except RemoteOpFailed as error:
                    assert error.kind == "claimed"

            threads = [threading.Thread(target=go, args=(index,)) for index in range(len(agents))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            (winner,) = won
            assert claims(lab) == {volume_name(card): winner.job for card in CARDS}
            assert not any(fence(agents[int(winner.job[2:], 16)], winner).values())
            assert claims(lab) == {}

    def test_a_killed_and_restarted_engine_remembers_claims(self, lab, agent):
        take(agent(), ALICE)
        lab.run(HOST, ["sh", "-c", "kill -9 $(cat /run/docker.pid)"])
        wait_until(lambda: lab.run(HOST, ["docker", "ps"]).code == 0)
        assert claims(lab) == {volume_name(CARDS[0]): ALICE.job}
        assert "connected" in refused(agent(), BOB)

    def test_a_claim_of_an_agent_that_was_killed_is_taken_over_once_nothing_of_its_job_is_left(self, lab, agent):
        """Nothing: no connection, no container, no process of the job, and no process on the GPU."""
        first, second = agent(), agent()
        take(first, ALICE)
        assert "connected" in refused(second, BOB)
        container = docker(lab, "create", *as_options(container_labels(ALICE, CARDS[:1])), IMAGE)[0]
        sshd = f"exec -a 'sshd: /home/alice/.gpurun/jobs/{ALICE.job}/sshd/config' sleep 300 >/dev/null 2>&1 & echo $!"
        process = lab.run(HOST, ["bash", "-c", sshd], user="alice").stdout.decode().strip()
        user = sleeper(lab)
        gpus.change(hardware(lab) / gpus.FILE, 0, {"processes": f"{user}:512"})
        lab.run(HOST, ["kill", "-9", str(first.hello["pid"])])
        assert "created" in refused(second, BOB)
        docker(lab, "rm", container)
        wait_until(lambda: "connected" not in refused(second, BOB))
        assert process in refused(second, BOB)
        lab.run(HOST, ["kill", process])
        assert f"pid {user} of alice holds the GPU" in refused(second, BOB)
        lab.run(HOST, ["kill", user])
        take(second, BOB)
        assert claims(lab) == {volume_name(CARDS[0]): BOB.job}

    def test_a_prune_by_an_admin_frees_no_gpu_of_a_gang_that_runs(self, lab, agent):
        first = agent()
        take(first, ALICE)
        run_container(lab, container_labels(ALICE, CARDS[:1]))
        gone(first)
        docker(lab, "volume", "prune", "--force")
        assert claims(lab) == {}, "this engine's prune removes volumes that have names, too"
        assert "running" in refused(agent(), BOB)
        assert not any(fence(agent(), ALICE, gpus=[0]).values())
        take(agent(), BOB)

    def test_a_container_of_an_older_gpurun_is_known_by_the_gpus_docker_gave_it(self, lab, agent):
        run_container(lab, {"gpurun.job": "j-0000000c", "gpurun.attempt": "1"}, "--gpus", '"device=1,2"')
        take(agent(), BOB, CARDS[:1])
        assert "running" in refused(agent(), ALICE, CARDS[1:2])
        (mine, theirs) = sorted(held(HOST, agent().call("claims.list").value), key=lambda one: one.gpus)
        assert (mine.gpus, theirs.gpus, theirs.claimant.job) == ((0,), (1, 2), "j-0000000c")

    def test_hostile_labels_harm_nobody(self, lab, agent):
        labels = {key: HOSTILE for key in volume_labels(ALICE, CARDS[0], 0, 0) if key != "gpurun.claim"}
        for name in (volume_name(CARDS[0]), "gpurun-gpu-.", "gpurun-gpu-index-1x"):
            docker(lab, "volume", "create", *as_options(labels), name)
        run_container(lab, {**labels, "gpurun.gpus": HOSTILE, "gpurun.uuids": HOSTILE})
        for one in held(HOST, agent().call("claims.list").value):
            assert (one.why + one.claimant.user + "".join(one.volumes)).isprintable()
        take(agent(), BOB)

    def test_a_fence_takes_another_gangs_container_for_what_it_is(self, lab, agent):
        """Another head took over our claim while ours was down: the GPU is theirs, and our job is fenced."""
        mine = agent()
        ident = run_container(lab, container_labels(BOB, CARDS[:1]))
        pid = docker(lab, "inspect", "--format", "{{.State.Pid}}", ident)[0]
        gpus.change(hardware(lab) / gpus.FILE, 0, {"processes": f"{pid}:512"})
        rest = fence(mine, ALICE, gpus=[0])
        assert not any(rest.values()), rest
        docker(lab, "rm", "-f", ident)
        ident = run_container(lab, {"some": "label"})
        pid = docker(lab, "inspect", "--format", "{{.State.Pid}}", ident)[0]
        gpus.change(hardware(lab) / gpus.FILE, 0, {"processes": f"{pid}:512"})
        rest = fence(mine, ALICE, gpus=[0])
        docker(lab, "rm", "-f", ident)
        assert [user["pid"] for user in rest["users"]] == [int(pid)], "no gpurun job's container: a stranger's"

    @pytest.mark.story
    def test_claims_are_released_by_a_complete_fence_only(self, lab, agent):
        mine = agent()
        take(mine, ALICE)
        stranger = sleeper(lab)
        gpus.change(hardware(lab) / gpus.FILE, 0, {"processes": f"{stranger}:512"})
        assert fence(mine, ALICE, gpus=[0])["users"]
        assert list(claims(lab)) == [volume_name(CARDS[0])]
        lab.run(HOST, ["kill", stranger])
        assert not any(fence(mine, ALICE, gpus=[0]).values())
        assert claims(lab) == {}


@pytest.mark.parametrize("delay_s", [pytest.param(0.0, marks=pytest.mark.story), 1.0])
def test_of_two_that_race_for_a_host_one_runs_after_the_other(lab, tmp_path, delay_s):
    """Two heads race for one host. At the same time, one head races for the other host under two names."""
    with ThreadPoolExecutor() as pool:
        races = {
            host: pool.submit(race, SCENARIOS[name](lab, tmp_path, host), delay_s=delay_s)
            for name, host in (("heads", HOST), ("names", SECOND))
        }
    for host, found in races.items():
        assert not found.result().both, (host, found.result())
        assert found.result().loser_ran_afterwards, (host, found.result())
        assert claims(lab, host) == {}


@pytest.fixture
def heads(lab, tmp_path):
    return two_heads(lab, tmp_path, HOST)


def wait_for(side: Side, job: str, *states: str):
    wait_until(lambda: side.record(job).state.value in states)
    return side.record(job)


def gpurun(side: Side, tmp_path, *words: str):
    cluster = Cluster.__new__(Cluster)
    cluster.environ = {**os.environ, "GPURUN_HOME": str(side.home), "DOCKER_HOST": engine.ensure()}
    return cluster.gpurun(*words)


def test_the_last_gpus_beside_another_heads_gang_are_found_and_nobody_is_blamed(heads, tmp_path):
    """The second head has no record of the first head's gang. The host reports it, and the job gets the other GPUs."""
    first, second = heads
    holder = first.submit(2, 600)
    wait_for(first, holder, "RUNNING")
    job = second.submit(2, 1)
    record = wait_for(second, job, "SUCCEEDED")
    assert first.record(holder).state.value == "RUNNING"
    assert record.granted[0].gpus == (2, 3)
    assert (record.avoid, record.restarts) == ((), 0)
    (refusal,) = record.refusals
    assert (refusal.holder.job, refusal.holder.gpus) == (holder, (0, 1))
    assert not (second.home / "cordons.json").exists()
    assert gpurun(first, tmp_path, "cancel", holder).code == 0


def test_a_supervisor_killed_between_claim_and_container_gives_its_gpus_up_and_gets_them_later(lab, heads, tmp_path):
    """The image is shipped over a slow link; meanwhile another head takes over the GPUs."""
    first, second = heads
    build_image(tmp_path, f"{IMAGE}-{os.getpid()}", f"{LAUNCHER}# {os.urandom(1_500_000).hex()}\n")
    lab.shape(HOST, 2_000_000)
    slow = first.submit(4, 1, f"{IMAGE}-{os.getpid()}")
    try:
        wait_until(lambda: claims(lab))
        cluster = Cluster.__new__(Cluster)
        cluster.home = first.home
        kill_supervisor(cluster, slow)
    finally:
        lab.shape(HOST, 10_000_000_000)
    job = second.submit(4, 600)
    wait_for(second, job, "RUNNING")
    assert set(claims(lab).values()) == {job}
    assert gpurun(first, tmp_path, "recover").code == 0
    wait_until(lambda: '"state": "refused"' in first.events(slow))
    assert gpurun(second, tmp_path, "cancel", job).code == 0
    wait_for(first, slow, "SUCCEEDED")
    assert first.span(slow)[0] >= second.span(job)[1]


def test_a_removed_lease_and_record_free_nothing(lab, heads, tmp_path):
    """The container continues. The host refuses the next gang; after a fence of the host, the gang runs."""
    side = heads[0]
    job = side.submit(2, 600)
    wait_for(side, job, "RUNNING")
    cluster = Cluster.__new__(Cluster)
    cluster.home = side.home
    kill_supervisor(cluster, job)
    LeaseStore(side.home).path(job).unlink()
    JobStore(side.home).get(job).path.rmtree()
    (side.home / "live" / job).unlink()
    found = json.loads(gpurun(side, tmp_path, "doctor", "-i", str(side.inventory), "--json").out)
    (finding,) = [one for one in found["findings"] if one["check"] == "claim-forgotten"]
    assert finding["gpus"] == {HOST: [0, 1]}
    assert finding["remedy"] == "gpurun recover --claims"
    after = side.submit(4, 1)
    wait_for(side, after, "SUCCEEDED")
    assert '"state": "refused"' in side.events(after)
    assert job not in " ".join(docker(lab, "ps", "-a", "--format", "{{.Names}}"))
    wait_until(lambda: not list((side.home / "leases").glob("[!.]*")))


def test_recover_fences_what_hosts_claim_for_forgotten_jobs(lab, heads, agent, tmp_path):
    side = heads[0]
    me = Claimant("j-0000dead", 3, StateDirectory(side.home).id(), "root", os.getuid(), os.uname().nodename)
    first = agent()
    take(first, me, CARDS[:2])
    take(first, BOB, CARDS[2:3])
    run_container(lab, container_labels(me, CARDS[:2]))
    done = gpurun(side, tmp_path, "recover", "--claims", "-i", str(side.inventory), "--json")
    assert json.loads(done.out)["adopted"] == ["j-0000dead"], done.err
    wait_until(lambda: not list((side.home / "leases").glob("[!.]*")))
    assert claims(lab) == {volume_name(CARDS[2]): BOB.job}
    assert docker(lab, "ps", "-aq") == []


def test_doctor_shows_who_else_holds_gpus_whatever_their_labels_hold(lab, heads, agent, tmp_path):
    take(agent(), BOB._replace(user=HOSTILE, head=HOSTILE), CARDS[1:3])
    done = gpurun(heads[0], tmp_path, "doctor", "-i", str(heads[0].inventory))
    (line,) = [line for line in done.out.splitlines() if "gpu-claimed" in line]
    assert f"job {BOB.job} of ?]0;owned??[2J?$(reboot)" in line
    assert "GPUs 1, 2" in line
    assert line.isprintable()
