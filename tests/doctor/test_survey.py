"""What a survey of many hosts holds: the site's own check beside the probe, and failures as data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from faulty_hosts import NAMES, TCP, inventory

from gpurun.doctor import host_checks
from gpurun.doctor.findings import MOST_LETTERS
from gpurun.doctor.survey import probe
from gpurun.errors import GpurunError, HostUnreachable
from gpurun.remote.agent import RemoteOpFailed
from gpurun.remote.fleet import Results

HOSTS = NAMES[:3]


class Asked:
    """A fleet whose hosts answer what a test says; what each was asked is noted."""

    def __init__(self, health):
        self.asked, self._health = [], health

    def map(self, function, hosts):
        ok, failed = {}, {}
        for host in hosts:
            try:
                ok[host] = function(
                    SimpleNamespace(host=host, call=lambda op, host=host, **rest: self._call(host, op, rest))
                )
            except GpurunError as error:
                failed[host] = error
        return Results(ok, failed)

    def _call(self, host, op, arguments):
        self.asked.append((host, op, arguments))
        answer = {
            "probe.facts": {},
            "probe.clock": {"clock_s": 1.0},
            "hooks.health": self._health.get(host, {"said": ""}),
        }[op]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(value=answer)


def test_a_host_with_a_program_of_the_site_s_is_asked_to_run_it():
    fleet = Asked({HOSTS[1]: {"said": "check exited with code 1: no /scratch"}})
    found = probe(fleet, inventory(TCP, HOSTS, health=("check", "a b")), HOSTS)
    assert found.health == {HOSTS[1]: "check exited with code 1: no /scratch"}
    assert list(found.hardware) == list(HOSTS) and found.failures == {}
    asked = [arguments for _, op, arguments in fleet.asked if op == "hooks.health"]
    assert [each["argv"] for each in asked] == [["check", "a b"]] * 3
    assert all(each["timeout_s"] > each["limit_s"] == host_checks.LIMIT_S for each in asked), (
        "the host ends it, and says so"
    )


@pytest.mark.parametrize("text", ["\x1b[2J\n\r\0x", "a\nb", "\u202eevil", "x" * 60_000, "\ud800 lone", " x "])
def test_what_a_lying_host_says_is_fit_to_be_printed_and_stored(text):
    found = probe(Asked({HOSTS[0]: {"said": text}}), inventory(TCP, HOSTS, health=("check",)), HOSTS).health
    assert found[HOSTS[0]].isprintable() and 0 < len(found[HOSTS[0]]) <= MOST_LETTERS


def test_without_one_no_host_runs_anything():
    fleet = Asked({})
    assert probe(fleet, inventory(TCP, HOSTS), HOSTS).health == {}
    assert "hooks.health" not in [op for _, op, _ in fleet.asked]


@pytest.mark.parametrize("error", [HostUnreachable("gone"), RemoteOpFailed("no such operation", kind="unknown-op")])
def test_a_host_that_cannot_run_it_is_a_failure_and_no_exception(error):
    found = probe(Asked({HOSTS[0]: error}), inventory(TCP, HOSTS, health=("check",)), HOSTS)
    assert found.failures == {HOSTS[0]: error} and list(found.hardware) == list(HOSTS[1:])
