"""Who cannot reach whom → the host that is to blame."""

import random

import pytest

from gpurun.doctor import gang_checks, host_checks
from gpurun.doctor.findings import Severity
from gpurun.facts import Hardware, Nic

HOSTS = tuple(f"h{n:02d}" for n in range(16))
ADDRESSES = {host: f"10.0.0.{at}" for at, host in enumerate(HOSTS)}
PORTS = (23100, 26000, 30000, 40000)


def attempts(blocked, hosts=HOSTS):
    """`blocked(source, target, port)` → why it fails, or None."""
    for source, target in gang_checks.pairs(hosts):
        failed = {port: why for port in PORTS if (why := blocked(source, target, port))}
        yield gang_checks.ReachAttempt(source, target, failed, len(PORTS))


def found(blocked, hosts=HOSTS):
    return gang_checks.judge(attempts(blocked, hosts), "eth0", ADDRESSES)


def test_everybody_reaches_everybody():
    assert found(lambda *_: None) == ()


def test_a_dead_link_is_one_finding():
    (finding,) = found(lambda s, t, p: "timeout" if "h03" in (s, t) else None)
    assert (finding.check, finding.hosts) == ("path", ("h03",))
    assert "no answer" in finding.evidence


def test_an_incoming_firewall():
    (finding,) = found(lambda s, t, p: "timeout" if t == "h03" else None)
    assert (finding.check, finding.hosts) == ("firewall", ("h03",))
    assert "any port of 10.0.0.3" in finding.evidence


def test_a_firewall_on_some_ports_names_them():
    (finding,) = found(lambda s, t, p: "refused" if t == "h03" and p < 27000 else None)
    assert "port 23100, 26000 of" in finding.evidence
    assert "refused" in finding.evidence


def test_an_outgoing_firewall():
    (finding,) = found(lambda s, t, p: "timeout" if s == "h03" else None)
    assert finding.hosts == ("h03",)
    assert "cannot connect to any" in finding.evidence


def test_one_pair():
    (finding,) = found(lambda s, t, p: "timeout" if (s, t) == ("h01", "h02") else None)
    assert (finding.hosts, finding.links) == (("h01", "h02"), (("h01", "h02"),))


def test_a_split_between_racks():
    (finding,) = found(lambda s, t, p: "timeout" if (s < "h08") != (t < "h08") else None)
    assert "h[00-07] | h[08-15]" in finding.evidence


def test_two_hosts_blame_the_path():
    (finding,) = found(lambda s, t, p: "timeout", HOSTS[:2])
    assert finding.hosts == ("h00", "h01")
    assert "each other" in finding.evidence


@pytest.mark.parametrize("seed", range(20))
def test_several_faults_are_all_found_and_none_invented(seed):
    chance = random.Random(seed)
    dead, closed, mute = chance.sample(HOSTS, 3)

    def blocked(source, target, port):
        if dead in (source, target) or target == closed:
            return "timeout"
        return "No route to host" if source == mute else None

    assert {(one.check, one.hosts) for one in found(blocked)} == {
        ("path", (dead,)), ("firewall", (closed,)), ("firewall", (mute,)),
    }  # fmt: skip


def test_large_fleets_try_a_few_each_and_still_find_the_closed_host():
    hosts = tuple(f"h{n:03d}" for n in range(100))
    tries = gang_checks.pairs(hosts)
    assert len(tries) == 100 * 7
    assert len(set(tries)) == len(tries)
    assert all(a != b for a, b in tries)
    (finding,) = found(lambda s, t, p: "timeout" if t == "h042" else None, hosts)
    assert finding.hosts == ("h042",)


def test_pairs_of_one_host_and_of_none():
    assert gang_checks.pairs(("a",)) == ()
    assert gang_checks.pairs(()) == ()


def hardware(**addresses):
    return {
        name: Hardware(name, nics=(Nic("eth0", "UP", addresses=(f"{one}/24",)), Nic("eth1", addresses=("9.9.9.9/8",))))
        for name, one in addresses.items()
    }


FOUND = hardware(a="10.0.0.1", b="10.0.0.2")


def test_names_that_resolve_to_the_fabric_are_fine():
    assert list(host_checks.judge({"a": {"b": ["10.0.0.2"]}, "b": {"a": ["10.0.0.1"]}}, FOUND, "eth0")) == []


def test_a_name_that_does_not_resolve():
    (finding,) = host_checks.judge({"a": {"b": []}}, FOUND, "eth0")
    assert (finding.hosts, finding.severity) == (("a",), Severity.WARNING)


def test_a_resolver_that_does_not_answer_proves_nothing():
    assert list(host_checks.judge({"a": {"b": None}}, FOUND, "eth0")) == []


def test_a_name_that_leads_elsewhere():
    (finding,) = host_checks.judge({"a": {"b": ["10.0.0.77"]}}, FOUND, "eth0")
    assert "10.0.0.77" in finding.evidence


def test_the_other_interface_of_the_right_host_is_a_note():
    (finding,) = host_checks.judge({"a": {"b": ["9.9.9.9"]}}, FOUND, "eth0")
    assert finding.severity is Severity.NOTE


def test_each_host_looks_up_a_bounded_number_of_others():
    wanted = host_checks.wanted([str(n) for n in range(200)])
    assert {len(found) for found in wanted.values()} == {host_checks.NEIGHBOURS}
    assert all(host not in found for host, found in wanted.items())
    assert host_checks.wanted(["a"]) == {"a": ()}
