"""Prolog and epilog, seen from the supervisor: where they run, with what, and what their failure means."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpurun.doctor import host_checks as limits
from gpurun.doctor.findings import MOST_LETTERS
from gpurun.errors import HostUnreachable
from gpurun.inventory.model import Fabric, FabricKind, Host, Inventory, Rack
from gpurun.jobs.spec import Grant
from gpurun.leases.lease import Lease
from gpurun.remote.agent import RemoteOpFailed
from gpurun.remote.fleet import Results
from gpurun.supervisor import stop
from gpurun.supervisor.links import Links
from gpurun.supervisor.stop import FENCE_TIMEOUT_S, fence

CLEAN = {"containers": [], "processes": [], "folder": False, "users": [], "gpu_problem": "", "claims": []}
PROGRAMS = {"h1": ("/site/prolog", "a b"), "h2": (), "h3": ("/site/prolog",)}


def inventory(epilogs=()):
    hosts = tuple(
        Host(name, "r1", "pascal", 4, "tcp", prolog=prolog, epilog=("/site/epilog",) if name in epilogs else ())
        for name, prolog in PROGRAMS.items()
    )
    return Inventory(hosts, (Rack("r1", tuple(PROGRAMS)),), {"tcp": Fabric("tcp", FabricKind.TCP, "eth0")})


def lease():
    grants = (Grant("h1", (0, 2)), Grant("h2", (1,)), Grant("h3", ()))
    return Lease("j-0a1b2c3d", 3, "alice", 1000, "pascal", ("r1",), grants, 40000, 1.0, "/x")


class Asked(Links):
    """Links whose hosts answer what a test says; what each was asked is noted."""

    def __init__(self, found, answers=None):
        super().__init__(found, PROGRAMS)
        self.calls, self._answers = [], answers or {}

    def each(self, call, hosts=None):
        ok, failed = {}, {}
        for host in hosts:

            def ask(op, *, host=host, **arguments):
                self.calls.append((host, op, arguments))
                answer = self._answers.get(host, {**CLEAN})
                if isinstance(answer, Exception):
                    raise answer
                return SimpleNamespace(value=answer)

            try:
                ok[host] = call(SimpleNamespace(host=host, call=ask))
            except Exception as error:  # noqa: BLE001 - as a fleet does
                failed[host] = error
        return Results(ok, failed)


def test_a_prolog_runs_on_the_hosts_that_have_one_with_their_gpus():
    links = Asked(inventory())
    assert stop.run_prologs(links, inventory(), lease(), ["h1", "h2"]) == {}
    ((host, op, arguments),) = links.calls
    assert (host, op) == ("h1", "hooks.prolog")
    whose = {key: arguments[key] for key in ("job", "attempt", "user", "gpus")}
    assert whose == {"job": "j-0a1b2c3d", "attempt": 3, "user": "alice", "gpus": [0, 2]}
    assert arguments["argv"] == ["/site/prolog", "a b"] and arguments["limit_s"] == limits.LIMIT_S
    assert arguments["timeout_s"] > arguments["limit_s"], "the host ends the prolog, and says so"


def test_without_a_prolog_no_host_is_asked():
    links = Asked(inventory())
    assert stop.run_prologs(links, inventory(), lease(), ["h2"]) == {}
    assert links.calls == []


def test_a_prolog_that_fails_is_a_failure_of_its_host_with_its_kind():
    said = RemoteOpFailed("/site/prolog exited with code 1: no licence", kind="prolog", host="h3")
    lost = HostUnreachable("gone", host="h1")
    found = stop.run_prologs(Asked(inventory(), {"h3": said, "h1": lost}), inventory(), lease(), PROGRAMS)
    assert found == {"h3": said, "h1": lost}
    assert said.kind == "prolog" and said.exit_code == 4


def test_a_fence_lets_hosts_run_their_epilog_and_waits_for_it():
    links, heard = Asked(inventory(epilogs=["h1"])), []
    assert fence(links, lease(), ["h1", "h2"], state="s", said=lambda *words: heard.append(words)) == {}
    asked = {host: arguments for host, _, arguments in links.calls}
    assert asked["h1"]["epilog"]["argv"] == ["/site/epilog"] and asked["h1"]["epilog"]["gpus"] == [0, 2]
    assert asked["h1"]["timeout_s"] >= FENCE_TIMEOUT_S + limits.LIMIT_S
    assert "epilog" not in asked["h2"] and heard == []


def test_an_epilog_that_failed_is_told_and_keeps_no_gpu():
    heard = []
    links = Asked(inventory(epilogs=["h1"]), {"h1": {**CLEAN, "epilog": "/site/epilog exited with code 1"}})
    assert fence(links, lease(), ["h1"], state="s", said=lambda *words: heard.append(words)) == {}
    assert heard == [("h1", "/site/epilog exited with code 1")]
    lies = Asked(inventory(epilogs=["h1"]), {"h1": {**CLEAN, "epilog": "\x1b[2J\n" + "x" * 60_000}})
    assert fence(lies, lease(), ["h1"], state="s", said=lambda *words: heard.append(words)) == {}
    assert heard[-1][1].isprintable() and len(heard[-1][1]) <= MOST_LETTERS


def test_an_epilog_of_a_host_that_is_not_fenced_is_told_too():
    heard = []
    links = Asked(inventory(epilogs=["h1"]), {"h1": {**CLEAN, "folder": True, "epilog": "no"}})
    unproven = fence(links, lease(), ["h1"], state="s", said=lambda *words: heard.append(words))
    assert list(unproven) == ["h1"] and "epilog" not in unproven["h1"].message and heard == [("h1", "no")]


def test_a_host_that_joins_later_has_its_epilog_too():
    links = Links(inventory(), ["h1"])
    links.add(["h3"], inventory(epilogs=["h3"]))
    assert links.epilogs == {"h1": (), "h3": ("/site/epilog",)}


def test_the_event_of_a_failed_epilog_ignores_a_job_that_was_removed():
    def gone(*_, **__):
        raise FileNotFoundError

    stop.epilog_failures(SimpleNamespace(emit=gone))("h1", "no")
    events = []
    stop.epilog_failures(SimpleNamespace(emit=lambda kind, **fields: events.append((kind, fields))))("h1", "no")
    assert events == [("host", {"host": "h1", "state": "epilog failed", "reason": "no"})]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, 60.0), ("5", 5.0), ("0.2", 0.2), ("0", 0.1), ("-3", 0.1), ("3600", 60.0), ("x", 60.0), ("", 60.0)],
)
def test_the_limit_can_only_be_shortened(text, seconds):
    assert limits.limit_s({} if text is None else {limits.LIMIT_VARIABLE: text}) == seconds


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_limit_that_is_no_number_of_seconds(text):
    assert 0.1 <= limits.limit_s({limits.LIMIT_VARIABLE: text}) <= 60.0
