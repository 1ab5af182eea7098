"""What a host says of itself becomes names and addresses in every container of its gang: it may not take another's."""

import pytest

from gpurun.launch.container import HostAccount, contradictions


def account(hostname, address):
    return HostAccount("1000", "1000", "train", "/home/train", hostname, address)


SOUND = {"h1": account("gpu-1", "10.0.0.1"), "h2": account("gpu-2", "10.0.0.2"), "h3": account("h3", "10.0.0.3")}


def test_hosts_that_call_themselves_what_they_are_are_believed():
    assert contradictions(SOUND) == {}
    assert contradictions({"h1": account("H1.rack.example", "10.0.0.1"), "h2": account("h2", "10.0.0.2")}) == {}
    assert contradictions({}) == {}


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "localhost.localdomain", "localhost."])
def test_a_host_that_calls_itself_localhost_is_named(name):
    found = contradictions({**SOUND, "h2": account(name, "10.0.0.2")})
    assert list(found) == ["h2"] and name in found["h2"]


@pytest.mark.parametrize("name", ["h1", "H3"])
def test_a_host_that_takes_anothers_name_in_the_inventory_is_named(name):
    assert "h2" in contradictions({**SOUND, "h2": account(name, "10.0.0.2")})


def test_of_two_with_one_name_or_one_address_both_are_named():
    assert list(contradictions({**SOUND, "h2": account("gpu-1", "10.0.0.2")})) == ["h1", "h2"]
    assert list(contradictions({**SOUND, "h2": account("GPU-1", "10.0.0.2")})) == ["h1", "h2"]
    assert list(contradictions({**SOUND, "h2": account("gpu-2", "10.0.0.3")})) == ["h2", "h3"]


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.9.9.9", "0.0.0.0", "224.0.0.1", "300.1.1.1", "", "h1", "10.0.0.2\n"]
)
def test_an_address_that_does_not_lead_to_it_is_refused(address):
    assert list(contradictions({**SOUND, "h2": account("gpu-2", address)})) == ["h2"]
