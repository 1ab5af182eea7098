"""What a machine calls itself, from trees of files as the kernel writes them."""

import pytest

from gpurun.node.probe import probe
from gpurun.node.probe.facts import lowest_mac, machine_id

ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def etc(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text(f"{ID}\n")
    return tmp_path / "etc"


def card(root, name, mac, *, bus="pci", kind="0", before_bond=None, virtual_function=False):
    """A network device with its own hardware."""
    net = root / "class/net" / name
    (net / "device").mkdir(parents=True)
    (root / "bus" / bus).mkdir(parents=True, exist_ok=True)
    (net / "device/subsystem").symlink_to(root / "bus" / bus)
    (net / "address").write_text(f"{mac}\n")
    (net / "addr_assign_type").write_text(f"{kind}\n")
    if before_bond:
        (net / "bonding_slave").mkdir()
        (net / "bonding_slave/perm_hwaddr").write_text(f"{before_bond}\n")
    if virtual_function:
        (net / "device/physfn").symlink_to("../0000:01:00.0")


def virtual(root, name, mac):
    (root / "class/net" / name).mkdir(parents=True)
    (root / "class/net" / name / "address").write_text(f"{mac}\n")
    (root / "class/net" / name / "addr_assign_type").write_text("0\n")


def test_the_lowest_address_of_a_real_device_counts(tmp_path):
    card(tmp_path, "eth0", "0C:42:A1:00:00:02")
    card(tmp_path, "eth1", "0c:42:a1:00:00:01")
    virtual(tmp_path, "lo", "00:00:00:00:00:00")
    virtual(tmp_path, "docker0", "02:42:00:00:00:01")
    virtual(tmp_path, "bond0", "00:00:00:00:00:01")
    assert lowest_mac(str(tmp_path)) == "0c:42:a1:00:00:01"


def test_what_changes_or_is_the_same_in_many_machines_does_not_count(tmp_path):
    card(tmp_path, "usb0", "00:00:00:00:00:09", bus="usb")
    card(tmp_path, "eth1", "00:00:00:00:00:08", kind="1")
    card(tmp_path, "eth2", "00:00:00:00:00:07", kind="3")
    card(tmp_path, "eth3v0", "00:00:00:00:00:06", virtual_function=True)
    card(tmp_path, "eth4", "ff:ff:ff:ff:ff:ff")
    card(tmp_path, "eth5", "00:00:00:00:00:00")
    card(tmp_path, "ib0", "80:00:02:08:fe:80:00:00:00:00:00:00:0c:42:a1:03:00:00:00:01")
    card(tmp_path, "eth6", "'; rm -rf /'")
    assert lowest_mac(str(tmp_path)) is None


def test_a_bond_hides_no_address(tmp_path):
    card(tmp_path, "eth0", "0c:42:a1:00:00:01", kind="3", before_bond="0c:42:a1:00:00:02")
    assert lowest_mac(str(tmp_path)) == "0c:42:a1:00:00:02"


def test_the_id_needs_both_parts_and_shows_neither(tmp_path, etc):
    sysfs = tmp_path / "sys"
    assert machine_id(str(sysfs), str(etc)) == "", "no network device"
    card(sysfs, "eth0", "0c:42:a1:00:00:01")
    found = machine_id(str(sysfs), str(etc))
    assert len(found) == 32 and found != ID and found == machine_id(str(sysfs), str(etc))
    for content in ("", "uninitialized\n", ID[:31], f"{ID}\n{ID}\n", "\xff" * 32):
        (etc / "machine-id").write_text(content)
        assert machine_id(str(sysfs), str(etc)) == ""


def test_copies_of_one_disk_image_are_told_apart(tmp_path, etc):
    found = set()
    for number in (1, 2):
        sysfs = tmp_path / f"sys{number}"
        card(sysfs, "eth0", f"0c:42:a1:00:00:0{number}")
        found.add(machine_id(str(sysfs), str(etc)))
    assert len(found) == 2


def test_the_probe_says_it(tmp_path, etc):
    card(tmp_path / "sys", "eth0", "0c:42:a1:00:00:01")
    found = probe.probe_document([], probe.Roots(sysfs=str(tmp_path / "sys"), etc=str(etc)))
    assert found["machine_id"] == machine_id(str(tmp_path / "sys"), str(etc)) != ""
