"""Claims on a host's GPUs: who gets which, and what hostile labels, crashes and rivals can do about it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from waiting import until

from gpurun.node.claim_rules import (
    Claimant,
    Container,
    Seen,
    Volume,
    container_labels,
    decide,
    given_cards,
    read_cards,
    read_claimant,
    read_volume,
    same_gpu,
    volume_labels,
    volume_name,
)
from gpurun.node.job import claims
from gpurun.node.job.claims import release_claims, take

ALICE = Claimant("j-0000000a", 1, "a" * 16, "alice", 1001, "head-1")
BOB = Claimant("j-0000000b", 1, "b" * 16, "bob", 1002, "head-2")
CARDS = [(index, f"GPU-{index}") for index in range(4)]
HOSTILE = [
    "",
    "\x1b]0;owned\x07\x1b[2J",
    "a\nb\r",
    "x" * 1_000_000,
    "💥" * 9,
    "../../etc",
    "-1",
    "1e9",
    "٣",
    "\udcff",
    "\0",
]


@dataclass
class Host:
    """A host's Docker in memory; `on_make` runs before a volume is made, as a rival would."""

    volumes: dict[str, dict[str, str]] = field(default_factory=dict)
    containers: dict[str, tuple[dict[str, str], str]] = field(default_factory=dict)
    connected: set = field(default_factory=set)
    left: dict[str, str] = field(default_factory=dict)
    on_make: list = field(default_factory=list)
    on_remove: list = field(default_factory=list)

    def look(self) -> Seen:
        volumes = [read_volume(name, labels) for name, labels in self.volumes.items()]
        return Seen(
            tuple(one._replace(alive=one.claimant.key in self.connected) for one in volumes if one is not None),
            tuple(Container(i, read_claimant(w), read_cards(w) or (), s) for i, (w, s) in self.containers.items()),
        )

    def make(self, me, card):
        for rival in self.on_make:
            rival()
        return read_claimant(self.volumes.setdefault(volume_name(card), volume_labels(me, card, 1500, 1)))

    def remove(self, volume):
        for rival in self.on_remove:
            rival()
        now = read_volume(volume.name, self.volumes.get(volume.name))
        if now != volume._replace(alive=False):
            return volume.name not in self.volumes
        del self.volumes[volume.name]
        return True

    def still_runs(self, volume):
        return self.left.get(volume.claimant.job, "")

    def holder(self, card):
        return read_claimant(self.volumes.get(volume_name(card))).job

    def run(self, me, cards, status="running"):
        self.containers[f"{len(self.containers):064x}"] = (container_labels(me, cards), status)


def test_a_free_gpu_is_claimed_and_a_claimed_one_is_refused_with_its_holder():
    host = Host(connected={ALICE.key})
    assert take(host, ALICE, CARDS[:2]) == []
    assert take(host, ALICE, CARDS[:2]) == [], "a second call changes nothing"
    (refused,) = take(host, BOB, CARDS[1:3])
    assert (refused.holder, refused.card) == (ALICE, CARDS[1])
    assert refused.cards == tuple(CARDS[:2]), "it says all that the holder has here"
    assert "connected" in refused.why
    assert host.holder(CARDS[2]) == "", "what was refused in part is not kept in part"


def test_a_gpu_that_a_rival_takes_in_between_gives_back_the_others():
    host = Host()
    host.on_make.append(lambda: host.volumes.setdefault(volume_name(CARDS[2]), volume_labels(BOB, CARDS[2], 0, 1)))
    (refused,) = take(host, ALICE, CARDS[:3])
    assert refused.holder == BOB
    assert list(host.volumes) == [volume_name(CARDS[2])]


@pytest.mark.parametrize("first, second", list(itertools.product(["01", "12", "012", "3", "30"], repeat=2)))
def test_of_two_that_race_for_some_gpus_one_gets_all_whatever_the_order(first, second):
    """Each tries to slip in before every single claim of the other."""
    wanted = {ALICE: [CARDS[int(i)] for i in first], BOB: [CARDS[int(i)] for i in reversed(second)]}
    for stolen_at in range(4):
        host, calls, outcome = Host(connected={ALICE.key, BOB.key}), itertools.count(), {}

        def rival(host=host, calls=calls, outcome=outcome, stolen_at=stolen_at):
            if next(calls) == stolen_at:
                outcome[BOB] = take(host, BOB, wanted[BOB])

        host.on_make.append(rival)
        outcome[ALICE] = take(host, ALICE, wanted[ALICE])
        if BOB not in outcome:
            outcome[BOB] = take(host, BOB, wanted[BOB])
        won = [who for who, refused in outcome.items() if not refused]
        common = set(wanted[ALICE]) & set(wanted[BOB])
        assert len(won) == (1 if common else 2)
        for who in won:
            assert all(host.holder(card) == who.job for card in wanted[who])


def test_a_claim_is_live_while_its_agent_is_connected_or_a_container_of_its_job_is_there():
    host = Host(connected={ALICE.key})
    take(host, ALICE, CARDS[:1])
    host.connected.clear()
    host.run(ALICE, CARDS[:1], "exited")
    (refused,) = take(host, BOB, CARDS[:1])
    assert "exited" in refused.why
    host.containers.clear()
    assert take(host, BOB, CARDS[:1]) == [], "nothing of alice's job is left: bob takes the GPU over"
    assert host.holder(CARDS[0]) == BOB.job


def test_two_stale_claims_on_one_gpu_are_taken_over_at_once():
    """One was made by index, when NVML did not answer; the other by UUID."""
    host = Host(volumes={volume_name(card): volume_labels(ALICE, card, 0, 1) for card in ((0, ""), CARDS[0])})
    assert take(host, BOB, CARDS[:1]) == []
    assert list(host.volumes) == [volume_name(CARDS[0])]
    assert host.holder(CARDS[0]) == BOB.job


@pytest.mark.parametrize("wanted", [(0, ""), CARDS[0]])
@pytest.mark.parametrize("stale, live", [((0, ""), CARDS[0]), (CARDS[0], (0, ""))])
def test_a_live_claim_beside_a_stale_one_is_met_under_either_name(wanted, stale, live):
    carol = Claimant("j-0000000c", 1, "c" * 16, "carol", 1003, "head-3")
    host = Host(connected={ALICE.key})
    host.volumes[volume_name(stale)] = volume_labels(carol, stale, 0, 1)
    host.volumes[volume_name(live)] = volume_labels(ALICE, live, 0, 1)
    before = dict(host.volumes)
    (refused,) = take(host, BOB, [wanted])
    assert (refused.holder, host.volumes) == (ALICE, before)


def test_a_stale_claim_stays_while_a_process_of_its_job_runs_or_holds_the_gpu():
    host = Host(left={ALICE.job: "its process 4711 is there (sshd)"})
    take(host, ALICE, CARDS[:1])
    (refused,) = take(host, BOB, CARDS[:1])
    assert "4711" in refused.why
    assert host.holder(CARDS[0]) == ALICE.job


def test_of_two_that_take_over_one_stale_claim_the_slower_one_removes_nothing_of_the_quicker():
    host = Host()
    take(host, Claimant("j-0000dead", 1, "d" * 16), CARDS[:1])
    host.connected |= {ALICE.key, BOB.key}

    def rival():
        host.on_remove.clear()
        assert take(host, BOB, CARDS[:1]) == []

    host.on_remove.append(rival)
    (refused,) = take(host, ALICE, CARDS[:1])
    assert "taken over the claim" in refused.why
    assert host.holder(CARDS[0]) == BOB.job


def test_a_pruned_claim_counts_while_the_container_is_there():
    host = Host(connected={ALICE.key})
    take(host, ALICE, CARDS[:2])
    host.run(ALICE, CARDS[:2])
    host.volumes.clear()
    (refused,) = take(host, BOB, CARDS[1:3])
    assert (refused.holder.user, refused.cards) == ("alice", tuple(CARDS[:2]))
    assert take(host, ALICE, CARDS[:2]) == [], "its own container is no obstacle, and the claim is made again"
    assert host.holder(CARDS[0]) == ALICE.job


def test_a_supervisor_that_comes_back_after_its_claim_was_taken_over_is_refused():
    host = Host()
    take(host, ALICE, CARDS[:1])
    host.connected.add(BOB.key)
    assert take(host, BOB, CARDS[:1]) == []
    (refused,) = take(host, ALICE, CARDS[:1])
    assert refused.holder == BOB


def test_two_containers_for_one_gpu_exist_but_the_second_look_refuses():
    """Whatever became of the volumes: who looks after both containers are there does not start."""
    host = Host(connected={ALICE.key, BOB.key})
    take(host, ALICE, CARDS[:1])
    host.run(ALICE, CARDS[:1], "created")
    host.volumes.clear()
    host.run(BOB, CARDS[:1], "created")
    assert take(host, BOB, CARDS[:1])
    assert take(host, ALICE, CARDS[:1])


def test_another_attempt_of_the_same_job_and_another_state_directory_are_others():
    host = Host(connected={ALICE.key})
    take(host, ALICE, CARDS[:1])
    assert take(host, ALICE._replace(attempt=2), CARDS[:1])
    assert take(host, ALICE._replace(state="c" * 16), CARDS[:1])


def test_release_removes_this_attempts_claims_and_nothing_else():
    host = Host(connected={ALICE.key, BOB.key})
    take(host, ALICE, CARDS[:2])
    take(host, BOB, CARDS[2:])
    host.volumes["gpurun-gpu-"] = {}
    host.volumes["somebody's-data"] = volume_labels(ALICE, CARDS[0], 0, 0)
    assert release_claims(host, ALICE) == []
    assert release_claims(host, ALICE) == []
    assert sorted(host.volumes) == ["gpurun-gpu-", "gpurun-gpu-GPU-2", "gpurun-gpu-GPU-3", "somebody's-data"]


def test_a_gpu_without_a_uuid_is_claimed_by_its_index():
    host = Host(connected={ALICE.key})
    assert take(host, ALICE, [(0, "")]) == []
    assert list(host.volumes) == ["gpurun-gpu-index-0"]
    assert take(host, BOB, [(0, "GPU-0")]), "an index and a UUID may be the same GPU"
    assert take(host, BOB, [(1, "GPU-1")]) == []


def test_a_container_of_an_older_gpurun_counts_with_the_gpus_that_docker_gave_it():
    cards = given_cards([{"Driver": "", "Count": 0, "DeviceIDs": ["0", "GPU-3"], "Capabilities": [["gpu"]]}])
    seen = Seen((), (Container("c" * 64, read_claimant({"gpurun.job": "j-0000000c"}), cards, "running"),))
    steps = decide(ALICE, CARDS, seen)
    assert [step.card[0] for step in steps if step.refused] == [0, 3]
    assert steps[0].refused.holder.job == "j-0000000c"


def test_a_claim_of_a_newer_gpurun_is_left_alone():
    host = Host()
    host.volumes[volume_name(CARDS[0])] = {"gpurun.claim": "2", "who": "knows"}
    (refused,) = take(host, ALICE, CARDS[:1])
    assert "newer version of gpurun" in refused.why


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_labels_block_nobody_and_are_fit_to_be_printed(text):
    """Whoever may use Docker here may write them; a claim that nobody stands behind is stale."""
    keys = [*volume_labels(ALICE, CARDS[0], 0, 0), "gpurun.gpus", "gpurun.uuids"]
    for key in (key for key in keys if key != "gpurun.claim"):
        for labels in ({key: text}, {**volume_labels(ALICE, CARDS[0], 0, 0), key: text}):
            host = Host({volume_name(CARDS[0]): labels, f"gpurun-gpu-{text}": labels, text: labels})
            assert take(host, BOB, CARDS[:1]) == []
            who = read_claimant(labels)
            assert (who.user + who.head + who.state + who.job).isprintable()
            assert len(json.dumps(who)) < 2000
            assert all(isinstance(index, int) for index, _ in read_cards({**labels, "gpurun.gpus": text}))


@pytest.mark.parametrize("labels", [None, [], "x", 3, {"a": 1}, {1: "a"}, {"gpurun.job": ["j-0000000a"]}])
def test_labels_that_are_no_texts_are_as_good_as_none(labels):
    assert read_volume(volume_name(CARDS[0]), labels).claimant == Claimant()
    assert read_cards(labels) is None
    assert given_cards(labels) == ()
    assert given_cards([labels, {"DeviceIDs": labels}, {"DeviceIDs": [labels]}]) in ((), ((3, ""),), ((-1, "x"),))


def test_what_is_written_is_what_is_read():
    for card in [*CARDS, (7, "")]:
        found = read_volume(volume_name(card), volume_labels(ALICE, card, 1500, 1_700_000_000))
        assert found == Volume(volume_name(card), card, ALICE, 1500, 1_700_000_000)
    assert read_cards(container_labels(ALICE, CARDS)) == tuple(CARDS)
    assert read_cards(container_labels(ALICE, [(0, ""), (1, "GPU-1")])) == ((0, ""), (1, ""))
    assert read_claimant(container_labels(ALICE, CARDS)) == ALICE


def test_uuids_tell_gpus_apart_and_indices_only_where_one_is_missing():
    assert same_gpu((0, "GPU-a"), (1, "GPU-a")), "a lost GPU shifts those behind it"
    assert not same_gpu((0, "GPU-a"), (0, "GPU-b"))
    assert same_gpu((0, ""), (0, "GPU-b"))


# -- signs of life, by real sockets --------------------------------------------------------------------

SHOW = """
import sys, time
from gpurun.node.job import claims as claim_store
from gpurun.node.claim_rules import Claimant
claim_store.show_life(Claimant(*eval(sys.argv[1])))
print("up", flush=True)
exec(sys.argv[2])
time.sleep(600)
"""


def is_alive(me, account=None):
    volume = Volume("x", CARDS[0], me, os.getuid() if account is None else account)
    return claims._is_alive(volume, claims._seen_signs())


@pytest.fixture
def me():
    """Nobody else on this machine has such an attempt."""
    return ALICE._replace(state=os.urandom(8).hex())


@pytest.fixture
def agent(me):
    started = []

    def start(then="pass", who=me):
        argv = [sys.executable, "-c", SHOW, repr(tuple(who)), then]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_sign_of_life_goes_with_the_agent_however_it_dies(me, agent):
    assert not is_alive(me)
    process = agent()
    assert is_alive(me)
    assert not is_alive(me._replace(attempt=2))
    process.kill()
    until(lambda: not is_alive(me))


def test_a_second_agent_of_the_attempt_stands_for_it_when_the_first_is_gone(me, agent):
    """A head that was cut off comes back while its old agent still hangs."""
    first, _ = agent(), agent()
    first.kill()
    first.wait()
    assert is_alive(me)


def test_what_the_agent_forked_does_not_stand_for_it(me, agent):
    """A probe that hangs in a broken driver lives for hours."""
    process = agent("import os; os.fork()")
    until(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    process.kill()
    process.wait()
    until(lambda: not is_alive(me))


def test_a_sign_that_was_taken_back_is_gone(me):
    claims.show_life(me)
    claims.show_life(me)
    assert is_alive(me)
    claims.hide_life(me)
    claims.hide_life(me)
    assert not is_alive(me)


@pytest.mark.skipif(os.getuid() != 0, reason="another account's socket needs root")
@pytest.mark.parametrize("line", ["open", "full"])
def test_another_accounts_socket_stands_for_nobody(me, line):
    """A local user without Docker knows the name from a process's command line, and can call itself."""
    name = claims._SIGN % me.key
    code = (
        "import os, socket, sys, time; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        "s.bind(chr(0) + sys.argv[1]); s.listen(0); mine = [socket.socket(socket.AF_UNIX) for _ in range(9)]\n"
        "for each in mine if sys.argv[2] == 'full' else ():\n"
        "    each.setblocking(False)\n"
        "    try: each.connect(chr(0) + sys.argv[1])\n"
        "    except BlockingIOError: break\n"
        "print('up', flush=True); time.sleep(60)"
    )
    squatter = subprocess.Popen([sys.executable, "-c", code, name + "1", line], stdout=subprocess.PIPE)
    try:
        assert squatter.stdout.readline() == b"up\n"
        assert not is_alive(me, account=1500)
        claims.show_life(me)
        assert is_alive(me), "nor does it keep the agent from showing its own"
    finally:
        claims.hide_life(me)
        squatter.kill()
        squatter.wait()


def test_looks_without_end_leave_an_agent_alive_and_reveal_each_time_whose_it_is(me):
    claims.show_life(me)
    (name,) = [name for name in claims._seen_signs() if name.startswith(claims._SIGN % me.key)]
    for _ in range(100):
        assert is_alive(me)
    until(lambda: claims._listener(name) == os.getuid())
    claims.hide_life(me)
    until(lambda: name not in claims._seen_signs())


def test_callers_that_fill_the_line_do_not_make_an_agent_look_dead(me, agent):
    agent()
    (name,) = [name for name in claims._seen_signs() if name.startswith(claims._SIGN % me.key)]
    callers = []
    try:
        for _ in range(200):
            caller = socket.socket(socket.AF_UNIX)
            caller.setblocking(False)
            callers.append(caller)
            try:
                caller.connect("\0" + name)
            except BlockingIOError:
                break
        assert is_alive(me)
    finally:
        for caller in callers:
            caller.close()
