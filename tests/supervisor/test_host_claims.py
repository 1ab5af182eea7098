"""A host refuses a claim: the gang waits, nobody is blamed, and a host's words are not trusted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpurun.errors import HostUnreachable
from gpurun.jobs.record import State
from gpurun.jobs.spec import Grant
from gpurun.node.claim_rules import Claimant, Refused
from gpurun.remote.agent import RemoteOpFailed
from gpurun.supervisor.hosts import claim, raise_first, refusals_in, refused_end
from gpurun.supervisor.verdict.ends import GangEnd

ALICE = Claimant("j-0000000a", 1, "a" * 16, "alice", 1001, "head-1")
BOB = Claimant("j-0000000b", 3, "b" * 16, "bob", 1002, "head-2")


def as_json(value):
    return [as_json(each) for each in value] if isinstance(value, tuple | list) else value


def refusal(*refused, kind="claimed"):
    return RemoteOpFailed("others hold them", kind=kind, detail={"refused": as_json(refused)}, host="gpu-1")


def held(holder=BOB, cards=((0, "GPU-a"), (1, "GPU-b")), why="its container 0123 is running"):
    return Refused(cards[0], holder, cards, why)


def test_the_head_asks_each_host_for_the_gangs_gpus_and_notes_who_holds_them():
    asked, events = {}, []

    def call(host, op, *, claimant, cards, **_):
        asked[host] = (op, claimant["job"], [index for index, _ in cards])
        if host == "gpu-2":
            raise refusal(held())

    def each(ask, hosts):
        failed = {}
        for host in hosts:
            try:
                ask(SimpleNamespace(host=host, call=lambda op, host=host, **facts: call(host, op, **facts)))
            except RemoteOpFailed as error:
                failed[host] = error
        return SimpleNamespace(failed=failed)

    job = SimpleNamespace(
        lease=SimpleNamespace(grants=(Grant("gpu-1", (0, 1)), Grant("gpu-2", (2,)))), claimant=ALICE, hardware={},
        links=SimpleNamespace(each=each),
        events=SimpleNamespace(emit=lambda kind, **facts: events.append((facts["host"], facts["state"]))),
    )  # fmt: skip
    assert list(claim(job, ("gpu-1", "gpu-2"))) == ["gpu-2"]
    assert asked == {"gpu-1": ("claims.take", ALICE.job, [0, 1]), "gpu-2": ("claims.take", ALICE.job, [2])}
    assert events == [("gpu-2", "refused")]


def test_a_refused_gang_goes_back_to_the_queue_and_no_host_is_to_blame():
    with pytest.raises(GangEnd) as caught:
        raise_first({"gpu-1": refusal(held()), "gpu-2": HostUnreachable("gone", host="gpu-2")})
    end = caught.value.end
    assert (end.outcome, end.suspects, end.failure) == (State.QUEUED, (), None)
    assert end.reason == "gpu-1: job j-0000000b of bob on head-2 holds GPUs 0, 1: its container 0123 is running"
    (holder,) = end.refused["gpu-1"]
    assert (holder.gpus, holder.job, holder.attempt, holder.uid, holder.state) == (
        (0, 1), "j-0000000b", 3, 1002, "b" * 16,
    )  # fmt: skip


def test_a_holder_of_several_gpus_is_named_once_and_several_holders_each():
    carol = BOB._replace(job="j-0000000c", user="carol")
    found = refusals_in({"gpu-1": refusal(held(), held(), held(carol, ((3, ""),)))})
    assert [(each.user, each.gpus) for each in found["gpu-1"]] == [("bob", (0, 1)), ("carol", (3,))]


def test_a_holder_that_no_label_names_is_told_as_such():
    end = refused_end(refusals_in({"gpu-1": refusal(held(Claimant(), ((2, "GPU-c"),), "its container 9 is created"))}))
    assert end.reason == "gpu-1: an unknown job holds GPU 2: its container 9 is created"


@pytest.mark.parametrize("text", ["\x1b]0;x\x07", "a\nb", "x" * 100_000, "\0", "💥\u202e"])
def test_what_a_host_says_is_fit_to_be_printed_and_stored(text):
    holder = BOB._replace(user=text, head=text, state=text, job=text)
    (found,) = refusals_in({"gpu-1": refusal(held(holder, ((0, text),), text))})["gpu-1"]
    assert (found.user + found.head + found.why + found.state + found.job).isprintable()
    assert len(repr(found)) < 1000


@pytest.mark.parametrize("index", [-1, 1024, 2**62])
def test_a_gpu_that_no_host_has_is_left_out_of_what_a_host_says(index):
    (found,) = refusals_in({"gpu-1": refusal(held(cards=((0, ""), (index, ""))))})["gpu-1"]
    assert found.gpus == (0,)


@pytest.mark.parametrize("detail", [None, [], "x", [1], [["a"]], [[[0, ""], {}, [], ""]], [[[0], [], [], ""]]])
def test_an_answer_that_is_not_valid_is_a_failure_of_the_host(detail):
    error = RemoteOpFailed("?", kind="claimed", detail={"refused": detail} if detail else {}, host="gpu-1")
    found = refusals_in({"gpu-1": error})
    if detail == []:
        return
    assert found == {}
    with pytest.raises(GangEnd) as caught:
        raise_first({"gpu-1": error})
    assert caught.value.end.suspects == ("gpu-1",)


def test_other_failures_are_no_refusals():
    assert refusals_in({"gpu-1": refusal(held(), kind="docker"), "gpu-2": HostUnreachable("gone", host="gpu-2")}) == {}
