from __future__ import annotations

from ipaddress import IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import BadInput, GpurunError
from gpurun.lab import network
from gpurun.lab.lab import Lab
from gpurun.lab.network import head_interface
from gpurun.lab.process import LabFailed
from gpurun.lab.spec import LabSpec, hosts_of, netns_prefix

NET = IPv4Network("10.200.3.0/24")
HOSTILE = ["", "a b", "A", "../etc", "a/b", "a.b", "a'; touch /tmp/x #", "-a", "a-", "ü", "a\nb", "x" * 31]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_could_be_more_than_a_name_is_refused(name):
    with pytest.raises(BadInput):
        Lab(name)
    with pytest.raises(BadInput):
        LabSpec(name=name)


def test_a_lab_is_not_brought_up_with_anothers_options():
    with pytest.raises(BadInput):
        Lab("one").up(LabSpec("other"))


@pytest.mark.parametrize(
    "options",
    [
        {"racks": 0},
        {"hosts": -1},
        {"racks": 16, "hosts": 16},
        {"gpus": 17},
        {"generation": ("voodoo",)},
        {"fabric": "x"},
        {"disk_mib": 1},
    ],
)
def test_sizes_that_make_no_lab_are_refused_with_a_hint(options):
    with pytest.raises(GpurunError) as caught:
        LabSpec(**options)
    assert caught.value.hint


@given(racks=st.integers(1, 15), hosts=st.integers(1, 16))
def test_every_host_has_its_own_name_address_and_namespace(racks, hosts):
    found = hosts_of(LabSpec(racks=racks, hosts=hosts), NET)
    assert len(found) == racks * hosts
    for distinct in ("name", "address", "netns", "number"):
        assert len({getattr(host, distinct) for host in found}) == len(found)
    assert all(host.address in NET and host.address not in (NET[0], NET[1], NET[-1]) for host in found)
    assert max(len(host.name) for host in found) <= 15  # it names an interface too


def test_generations_go_to_racks_and_the_last_goes_on():
    found = hosts_of(LabSpec(racks=3, hosts=1, generation=("pascal", "volta")), NET)
    assert [host.generation for host in found] == ["pascal", "volta", "volta"]


def test_a_spec_survives_its_json():
    spec = LabSpec("x", generation=("volta", "pascal"), disk_mib=100, resolve_names=False)
    assert LabSpec.from_json(spec.to_json()) == spec


def test_no_labs_namespaces_can_be_taken_for_anothers():
    assert not netns_prefix("a-b").startswith(netns_prefix("a"))


def test_interface_names_fit_the_kernel_and_differ():
    names = ["a", "default", "a-rather-long-name-of-a-lab", "a-rather-long-name-of-a-lac"]
    found = [head_interface(name) for name in names]
    assert len(set(found)) == len(names) and max(map(len, found)) <= 15


def test_a_lab_gets_the_same_addresses_again_unless_they_are_taken():
    first = network.choose_subnet("lab", [])
    assert network.choose_subnet("lab", []) == first
    assert network.choose_subnet("lab", [IPv4Network("192.168.0.0/16")]) == first
    second = network.choose_subnet("lab", [first])
    assert second != first and not second.overlaps(first)
    with pytest.raises(LabFailed):
        network.choose_subnet("lab", [IPv4Network("10.0.0.0/8")])
