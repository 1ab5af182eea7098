"""What doctor says about claims on hosts: other people's, stale ones, and those of forgotten jobs."""

from __future__ import annotations

import pytest

from gpurun.doctor.findings import Severity
from gpurun.doctor.survey import check_claims
from gpurun.errors import HostNotReady
from gpurun.facts import held
from gpurun.node.claim_rules import Claimant, Container, Seen, Volume, read_claimant, read_volume

MINE = Claimant("j-0000000a", 1, "a" * 16, "alice", 1001, "head-1")
BOB = Claimant("j-0000000b", 1, "b" * 16, "bob", 1002, "head-2")


def as_json(value):
    return [as_json(each) for each in value] if isinstance(value, tuple | list) else value


def volume(who, gpu, *, alive=False):
    return Volume(f"gpurun-gpu-GPU-{gpu}", (gpu, f"GPU-{gpu}"), who, 1500, 1_700_000_000, alive)


def container(who, *gpus, status="running"):
    return Container(who.job[2:] * 8, who, tuple((gpu, f"GPU-{gpu}") for gpu in gpus), status)


def findings(volumes=(), containers=(), *, carried=(), uid=1001, state="a" * 16):
    found = held("gpu-1", as_json(Seen(tuple(volumes), tuple(containers))))
    return list(check_claims({"gpu-1": found}, state=state, uid=uid, carried=set(carried)))


def test_a_gang_of_this_state_directory_is_nothing_to_report():
    assert findings([volume(MINE, 0)], [container(MINE, 0)], carried=[("j-0000000a", 1)]) == []
    assert findings() == []


def test_somebody_elses_gang_is_named_with_user_and_head_and_makes_no_host_unhealthy():
    (found,) = findings([volume(BOB, 0), volume(BOB, 1)], [container(BOB, 0, 1)])
    assert (found.check, found.severity, found.gpus) == ("gpu-claimed", Severity.NOTE, {"gpu-1": (0, 1)})
    assert "job j-0000000b of bob on head-2 holds GPUs 0, 1" in found.evidence
    assert "docker rm -f" in found.remedy


def test_a_pruned_claim_is_told_from_its_container():
    (found,) = findings([], [container(BOB, 2, status="exited")])
    assert "GPU 2" in found.evidence
    assert "exited" in found.evidence
    assert "volume rm" not in found.remedy


def test_a_claim_that_nothing_stands_behind_is_stale():
    (found,) = findings([volume(BOB, 0)])
    assert (found.check, found.severity) == ("claim-stale", Severity.NOTE)
    (found,) = findings([volume(BOB, 0, alive=True)])
    assert found.check == "gpu-claimed"


@pytest.mark.parametrize("uid, remedy", [(1001, "gpurun recover --claims"), (0, "let alice or root run: ")])
def test_a_claim_without_a_lease_is_a_fault_with_the_command_that_fixes_it(uid, remedy):
    (found,) = findings([volume(MINE, 0)], [container(MINE, 0)], carried=[("j-0000000a", 2)], uid=uid)
    assert (found.check, found.severity) == ("claim-forgotten", Severity.WARNING)
    assert found.remedy.startswith(remedy)


def test_without_an_id_of_its_own_everything_is_somebody_elses():
    (found,) = findings([volume(Claimant(), 0, alive=True)], state=None)
    assert found.check == "gpu-claimed"


def test_hostile_labels_are_fit_to_be_printed():
    labels = {"gpurun.user": "\x1b]0;x\x07\n", "gpurun.head": "x" * 100_000, "gpurun.job": "$(reboot)"}
    claim = read_volume("gpurun-gpu-GPU-0", labels)
    lying = Volume("gpurun-gpu-GPU-1", (-5, "\n"), BOB._replace(user="\x1b[31m", job="../x"), -1, -1)
    for each in (claim, lying):
        found = findings([each], [Container("0" * 64, read_claimant(labels), ((0, ""),), "\n")])
        assert found
        assert all((one.evidence + one.remedy).isprintable() for one in found)
        assert all(len(one.evidence) < 1000 for one in found)


@pytest.mark.parametrize(
    "document", [None, 3, "x", [], [[]], [[1], []], [[["n", [0], [], 0, 0, 0, 0]], []], {"volumes": 1}]
)
def test_an_answer_that_is_not_valid_is_an_error_of_the_host(document):
    with pytest.raises(HostNotReady):
        held("gpu-1", document)
