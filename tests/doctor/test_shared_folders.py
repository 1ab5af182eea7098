"""Hosts with one folder see each other's signs in it, whatever its file system calls itself: no gang starts there."""

from __future__ import annotations

import dataclasses
import os
import threading
from types import SimpleNamespace

import pytest
from faulty_hosts import NAMES, TCP, healthy, inventory
from local_agents import Hosts

from gpurun.doctor.gang_checks import check_shared_folders
from gpurun.doctor.survey import Survey, diagnose, judge, preflight, signs_at
from gpurun.facts import Hardware, hardware_from_document
from gpurun.inventory.folding import fold
from gpurun.node.probe import probe
from gpurun.remote.fleet import Results
from gpurun.state.filesystem import is_shared

A, B, C = NAMES[:3]
UNKNOWN = ("ext4", "xfs", "zfs", "overlay", "scoutfs", "infinite", "hammer2", "lizard", "yrfs", "")
"""Names under which two hosts may have one file system; none is known to be shared."""


def probed(name, folder, kind="ext4"):
    """Return a host as its probe found it, with gpurun's files in `folder`."""
    mounts = [f"22 1 8:1 / / rw - {kind} /dev/sda1 rw"] if kind else []
    facts = probe.collect_folder_facts(str(folder), mounts)
    return dataclasses.replace(
        healthy(NAMES.index(name) + 1), **{**facts, "folder_signs": tuple(facts["folder_signs"])}
    )


def blocked(hosts, signs=None):
    survey = Survey(hosts, {}, signs=signs or {})
    found = judge(inventory(), survey, dict.fromkeys(hosts, (0,))).blocking
    return [one for one in found if one.check == "shared-folder"]


@pytest.mark.parametrize("kind", UNKNOWN)
def test_hosts_with_one_folder_are_refused_with_the_setting_that_cures_it(tmp_path, kind):
    assert not is_shared(kind)
    (tmp_path / "home").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "home")
    keeps = tmp_path / "home" / ".gpurun" / "outputs" / "j-0123abcd"
    keeps.mkdir(parents=True)
    (keeps / "ckpt.pt").write_text("epoch 7")
    hosts = {A: probed(A, tmp_path / "home" / ".gpurun", kind), B: probed(B, tmp_path / "mounted" / ".gpurun", kind)}
    hosts[C] = probed(C, tmp_path / "own", kind)
    (finding,) = blocked(hosts)
    assert finding.hosts == (A, B)
    assert str(tmp_path / "home" / ".gpurun") in finding.evidence and kind in finding.evidence
    assert "folder=DIR" in finding.remedy and fold([A, B]) in finding.remedy and "{" not in finding.remedy
    assert (keeps / "ckpt.pt").read_text() == "epoch 7"
    assert blocked({A: hosts[A], C: hosts[C]}) == []


def test_agents_of_hosts_with_one_home_are_found_out_before_anything_is_made_or_removed(tmp_path):
    hosts = Hosts(tmp_path)
    (hosts.home("one") / ".gpurun/outputs/j-0123abcd").mkdir(parents=True)
    kept = hosts.home("one") / ".gpurun/outputs/j-0123abcd/ckpt.pt"
    kept.write_text("epoch 7")
    for name in (A, B):
        hosts.home(name).symlink_to(hosts.home("one"))
    try:
        fleet = hosts.fleet(A, B, C)
        found = preflight(fleet, inventory(TCP, NAMES[:3]), dict.fromkeys(NAMES[:3], ()))
        (shared,) = [one for one in found.blocking if one.check == "shared-folder"]
        assert shared.hosts == (A, B) and {A, B} <= found.bad_hosts.keys()
        joins = preflight(fleet, inventory(TCP, NAMES[:3]), {B: ()}, is_alone=False, members=[A, C])
        (shared,) = [one for one in joins.blocking if one.check == "shared-folder"]
        assert shared.hosts == (B,) and fold([A, B]) in shared.evidence
    finally:
        hosts.close()
    assert kept.read_text() == "epoch 7"


def test_at_the_same_moment_too(tmp_path):
    for number in range(20):
        ready, found = threading.Barrier(3), {}

        def look(name, number=number, ready=ready, found=found):
            ready.wait()
            found[name] = probe.show_sign(str(tmp_path / str(number)))

        threads = [threading.Thread(target=look, args=(name,)) for name in NAMES[:3]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hosts = {name: Hardware(name, folder_sign=own, folder_signs=tuple(seen)) for name, (own, seen) in found.items()}
        (finding,) = check_shared_folders(hosts)
        assert finding.hosts == (A, B, C)


def test_a_host_that_joins_a_gang_is_compared_with_those_that_run(tmp_path):
    """They were probed long ago: their own signs may be gone by now."""
    old = probed(A, tmp_path)
    (tmp_path / probe.FOLDER / old.folder_sign).unlink()
    new = probed(B, tmp_path)

    class Gang:
        def map(self, function, hosts):
            answer = SimpleNamespace(value=probe.seen(str(tmp_path)))
            ask = SimpleNamespace(call=lambda op, **_: answer if op == "probe.signs" else None)
            return Results({host: function(ask) for host in hosts if host != C}, {C: ValueError("gone")})

    (finding,) = blocked({B: new}, signs_at(Gang(), [A, C]))
    assert finding.hosts == (B,) and fold([A, B]) in finding.evidence


def test_signs_of_earlier_probes_prove_nothing_and_go_after_an_hour(tmp_path):
    first = probed(A, tmp_path)
    place = tmp_path / probe.FOLDER
    again, other = probed(A, tmp_path), probed(B, tmp_path / "other")
    assert first.folder_sign in again.folder_signs and blocked({A: again, B: other}) == []
    (place / "subfolder").mkdir()
    for name in [first.folder_sign, "subfolder"]:
        os.utime(place / name, (1, 1))
    last = probed(A, tmp_path)
    assert last.folder_fault == "" and first.folder_sign not in os.listdir(place)
    assert {again.folder_sign, last.folder_sign} <= set(os.listdir(place))


def test_a_file_system_that_is_known_to_be_shared_is_said_once(tmp_path):
    hosts = {name: probed(name, tmp_path, "nfs4") for name in (A, B)}
    assert [one.hosts for one in blocked(hosts)] == [(A,), (B,)]
    assert all("nfs4" in one.evidence for one in blocked(hosts))


@pytest.mark.parametrize("signs", [["x"] * 3, ["", "../..", "\x1b[2J"], []])
def test_what_a_lying_host_says_it_sees_blames_nobody(tmp_path, signs):
    liar = dataclasses.replace(probed(B, tmp_path / "b"), folder_signs=tuple(signs))
    assert blocked({A: probed(A, tmp_path / "a"), B: liar}) == []
    assert hardware_from_document("h", {"folder_signs": signs}).folder_signs == tuple(signs)
    assert [
        one for one in diagnose(inventory(), Survey({}, {}, signs={A: signs})) if one.check == "shared-folder"
    ] == []


def test_where_no_sign_can_be_made_the_folder_is_at_fault(tmp_path):
    (tmp_path / probe.FOLDER).write_text("in the way")
    found = probe.collect_folder_facts(str(tmp_path), [])
    assert found["folder_fault"] == "broken" and "signs" not in found["folder_problem"].split()[-1]
    assert found["folder_sign"] == "" and found["folder_signs"] == []
