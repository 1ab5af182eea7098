"""Reading an inventory: what it means, and everything that is refused, each with its place."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from gpurun.documents.plain import DocumentError
from gpurun.errors import BadInput
from gpurun.inventory.fields import POOL
from gpurun.inventory.model import FabricKind, Inventory
from gpurun.inventory.read import load_inventory, parse_inventory

DESIGN = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: roce25}
fabrics:
  roce25: {kind: roce, interface: ens1f0, hcas: [mlx5_0], traffic_class: 106}
  tcp:    {kind: tcp, interface: eno1}
racks:
  r1: {hosts: {"gpu-r1-[01-16]": {}}}
  r2: {hosts: {"gpu-r2-[01-08]": {generation: volta, gpus: 8}}}
pools:
  vision: {reservation: 64, limit: 96, share: 2}
"""
HEAD = """\
version: 1
defaults: {generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eno1}}
"""


def read(text: str | bytes) -> Inventory:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return parse_inventory(data, Path("/etc/gpurun/inventory.yaml"), shown_as="inventory.yaml")


def problems(text: str | bytes) -> list[str]:
    with pytest.raises(DocumentError) as refused:
        read(text)
    assert str(refused.value) == "\n".join(str(problem) for problem in refused.value.problems)
    assert refused.value.exit_code == 2
    return [str(problem) for problem in refused.value.problems]


def host(fields: str) -> str:
    return f"{HEAD}racks: {{r1: {{hosts: {{gpu-1: {{{fields}}}}}}}}}\n"


def test_the_designs_own_example() -> None:
    inventory = read(DESIGN)
    assert len(inventory.hosts) == 24
    assert inventory.total_gpus == 128
    assert inventory.generations == ("pascal", "volta")
    first, volta = inventory.hosts[0], inventory.by_name["gpu-r2-08"]
    assert (first.name, first.rack, first.gpus, first.user) == ("gpu-r1-01", "r1", 4, "train")
    assert (volta.rack, volta.generation, volta.gpus) == ("r2", "volta", 8)
    assert inventory.fabric_of(volta).kind is FabricKind.ROCE
    assert inventory.fabric_of(volta).hcas == ("mlx5_0",)
    assert inventory.racks[1].hosts == tuple(f"gpu-r2-{n:02}" for n in range(1, 9))
    assert (inventory.pools[0].reservation, inventory.pools[0].limit, inventory.pools[0].share) == (
        64,
        96,
        2.0,
    )


def test_every_host_field() -> None:
    fields = (
        "gpus: 8, generation: volta, fabric: tcp, gpu_model: Tesla V100-SXM2-32GB, gpu_memory_mib: 32GiB, "
        "nvlink: [[0, 1, 2, 3], 4-7], near_hca: '0-3', user: train, address: 10.0.0.7, port: 2222, "
        "fabric_address: 'fd00::7', labels: {team: vision, shelf: 7, spare: true}"
    )
    found = read(host(fields)).hosts[0]
    assert found.gpu_memory_mib == 32 * 1024
    assert found.nvlink == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.near_hca == (0, 1, 2, 3)
    assert (found.address, found.port, found.fabric_address) == ("10.0.0.7", 2222, "fd00::7")
    assert found.labels == {"team": "vision", "shelf": "7", "spare": "true"}


def test_a_scalar_is_its_text_whatever_yaml_takes_it_for() -> None:
    found = read(host("gpus: '4', generation: 2080, user: no, labels: {on: 0x10, off: 010, at: 2026-01-01}")).hosts[0]
    assert (found.gpus, found.generation, found.user) == (4, "2080", "no")
    assert found.labels == {"on": "0x10", "off": "010", "at": "2026-01-01"}


def test_every_wrong_item_of_a_list_is_named() -> None:
    assert [problem.split(": ", 1)[1] for problem in problems(host("near_hca: [x, 0, -1]"))] == [
        "near_hca: 'x' is not a whole number (allowed: 0 to 1023)",
        "near_hca: '-1' is out of range (allowed: 0 to 1023)",
    ]


def test_a_long_list_of_ranges_is_refused_before_it_is_counted_out() -> None:
    (problem,) = problems(host(f"near_hca: '{','.join(['0-9999'] * 100_000)}'"))
    assert "names more than 1024 GPUs" in problem


def test_defaults_of_the_rack_stand_between_the_top_and_the_host() -> None:
    text = (
        HEAD
        + "racks:\n  r1:\n    defaults: {gpus: 8, labels: {row: a}}\n"
        + "    hosts: {a: , b: {gpus: 2, labels: {x: y}}}\n"
    )
    a, b = read(text).hosts
    assert (a.gpus, dict(a.labels)) == (8, {"row": "a"})
    assert (b.gpus, dict(b.labels)) == (2, {"row": "a", "x": "y"})


def test_one_fabric_is_everybodys() -> None:
    text = "version: 1\nfabrics: {ib: {kind: infiniband, interface: ib0}}\n"
    text += "racks: {r: {hosts: {a: {gpus: 1, generation: hopper}}}}"
    assert read(text).hosts[0].fabric == "ib"


def test_a_range_of_addresses_goes_with_a_range_of_hosts() -> None:
    text = HEAD + "racks: {r1: {hosts: {'gpu-[01-03]': {address: '10.0.1.[7-9]', port: 22}}}}\n"
    assert [h.address for h in read(text).hosts] == ["10.0.1.7", "10.0.1.8", "10.0.1.9"]
    short = HEAD + "racks: {r1: {hosts: {'gpu-[01-03]': {address: 10.0.1.7}}}}\n"
    assert problems(short) == ["inventory.yaml:4:22: address '10.0.1.7' gives 1 address for 3 hosts"]


def test_anchors_and_merge_keys() -> None:
    text = HEAD + (
        "x-big: &big {gpus: 8, generation: volta}\nx-far: &far {gpus: 2, port: 2200}\n"
        "racks:\n  r1:\n    hosts:\n      a: *big\n      b: {<<: [*big, *far], generation: hopper}\n"
    )
    a, b = read(text).hosts
    assert (a.gpus, a.generation) == (8, "volta")
    assert (b.gpus, b.generation, b.port) == (8, "hopper", 2200)


def test_ssh_config_and_head(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(
        HEAD + "ssh_config: ssh/config\nhead: {docker_host: 'unix:///run/docker.sock', outputs_limit: 2GiB}\n"
    )
    found = load_inventory(path)
    assert found.ssh_config == str(tmp_path / "ssh" / "config")
    assert (found.docker_host, found.outputs_limit_mib) == ("unix:///run/docker.sock", 2048)
    (problem,) = problems(HEAD + "head: {outputs_limit: 500}\n")
    assert "outputs_limit: '500' has no unit; write 500MiB or 500GiB" in problem
    assert found.hosts == ()


def test_crlf_is_a_line_end() -> None:
    assert len(read(DESIGN.replace("\n", "\r\n")).hosts) == 24


def test_everything_wrong_is_said_at_once_with_value_and_allowed() -> None:
    text = DESIGN.replace("gpus: 4", "gpus: four").replace("kind: roce", "kind: rocee").replace("share: 2", "shares: 2")
    with pytest.raises(DocumentError) as refused:
        read(text)
    gpus, kind, share = refused.value.problems
    assert (gpus.line, gpus.column, gpus.value) == (2, 51, "four")
    assert str(gpus) == "inventory.yaml:2:51: gpus: 'four' is not a whole number (allowed: 0 to 128)"
    assert (kind.line, kind.value, kind.allowed) == (4, "rocee", ("infiniband", "roce", "tcp"))
    assert "did you mean 'roce'?" in kind.message
    assert "did you mean 'share'?" in share.message
    assert share.allowed == tuple(POOL)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("gpus: 3.5", "gpus: '3.5' is not a whole number"),
        ("gpus: -1", "gpus: '-1' is out of range (allowed: 0 to 128)"),
        ("gpus: 010", "gpus: '010' is not a whole number"),
        ("gpus: ' 4'", "gpus: ' 4' is not a whole number"),
        ("gpus: 0x10", "gpus: '0x10' is not a whole number"),
        ("gpus: 1_0", "gpus: '1_0' is not a whole number"),
        ("gpus: ", "gpus must be a whole number, but has no value"),
        ("gpus: [4]", "gpus must be a whole number, not a list or a mapping"),
        ("gpus: 99999999999999999999", "gpus: '99999999999999999999' is out of range"),
        ("port: 65536", "port: '65536' is out of range (allowed: 1 to 65535)"),
        ("fabric: ib", "there is no fabric 'ib' (allowed: tcp)"),
        ("user: -oProxyCommand=x", "user: '-oProxyCommand=x' is not a user name"),
        ("user: 'a b'", "user: 'a b' is not a user name"),
        ("address: -oProxyCommand=x", "address: '-oProxyCommand=x' is not a host name"),
        ("address: 'a;b'", "address: 'a;b' is not a host name"),
        ("generation: 'a/b'", "generation: 'a/b' is not a name"),
        ("gpu_model: \"a\\nb\"", "gpu_model: 'a\\nb' is not a printable text"),
        ("gpu_memory_mib: 80GX", "gpu_memory_mib: '80GX' has the unknown unit 'GX'; the units are KiB, MiB, GiB"),
        ("gpu_memory_mib: 0", "gpu_memory_mib: '0' is not an amount of memory"),
        ("data_quota_mib: 1KiB", "data_quota_mib: '1KiB' is less than 1MiB"),
        ("cache_quota_mib: 50.5", "cache_quota_mib: '50.5' has no unit; write 50.5MiB or 50.5GiB"),
        ("near_hca: 3-1", "near_hca: '3-1' counts down; write 1-3"),
        ("near_hca: 0-9999", "near_hca: '0-9999' names more than 1024 GPUs"),
        ("near_hca: [1024]", "near_hca: '1024' is out of range (allowed: 0 to 1023)"),
        ("near_hca: [0, x]", "near_hca: 'x' is not a whole number"),
        ("near_hca: [4]", "near_hca names GPU 4, but the host has 4, counted from 0"),
        ("nvlink: [[0, 1], [1, 2]]", "nvlink names a GPU twice"),
        ("labels: [a]", "labels must be a mapping"),
        ("labels: {-x: 1}", "'-x' is not a label name"),
        ("gpu: 4", "unknown key 'gpu' in host gpu-1; did you mean 'gpus'?"),
    ],
)  # fmt: skip
def test_wrong_values(fields: str, said: str) -> None:
    (problem,) = problems(host(fields))
    assert said in problem
    assert problem.startswith("inventory.yaml:4:")


@pytest.mark.parametrize(
    "name",
    [
        *("a b", "a'b", 'a"b', "-oProxyCommand=touch x", "a;b", "$(x)", "a`b", "gpü", "a\u200bb", "a\\nb", "~"),
        *(".", "..", "a/b", "a..b", "a-", "@all", "a" * 64, "gpu-[01-9999999]", "gpu-[1-99999]-[1-99999]"),
        *("gpu-[1-", "gpu-]1[", "gpu-[a-b]", "gpu-[3-1]", "gpu-[]", "a,,b", "x[01-02]-"),
    ],
)  # fmt: skip
def test_names_that_are_no_host_names(name: str) -> None:
    text = f"{HEAD}racks:\n  r1:\n    hosts:\n      {json.dumps(name)}: {{}}\n"
    (problem,) = problems(text)
    assert problem.startswith("inventory.yaml:7:7: ")
    assert problem.isprintable()


def test_a_host_twice_names_both_places() -> None:
    text = HEAD + "racks:\n  r1: {hosts: {'a-[1-3]': }}\n  r2: {hosts: {a-2: {}}}\n"
    assert problems(text) == ["inventory.yaml:6:16: host a-2 is in the inventory twice; first on line 5"]


@pytest.mark.parametrize(
    "second", ["h2: {address: h1}", "h2: {address: H1, port: 22}", 'h2: {address: "h1", user: eve}']
)
def test_two_hosts_are_not_one_machine(second: str) -> None:
    text = MINIMAL_HOSTS.format(second)
    assert problems(text) == [
        "inventory.yaml:4:30: hosts h1 and h2 are one machine, h1:22, so gpurun would grant its GPUs twice"
    ]


@pytest.mark.parametrize(
    ("first", "second", "machine"),
    [
        *[("10.0.0.7", text, "10.0.0.7:22") for text in ("10.7", "0xa.7", "167772167", "012.0.0.7", "::ffff:10.0.0.7")],
        ("2001:db8::1", "2001:DB8:0:0:0:0:0:1", "2001:db8::1:22"),
        ("fe80::1%eth0", "FE80:0::1%eth0", "fe80::1%eth0:22"),
    ],
)  # fmt: skip
def test_spellings_of_one_ip_address_are_one_machine(first: str, second: str, machine: str) -> None:
    hosts = f'h1: {{address: "{first}"}}, h2: {{address: "{second}"}}'
    (problem,) = problems(MINIMAL_HOSTS.replace("h1: {{}}, ", "").format(hosts))
    assert f"hosts h1 and h2 are one machine, {machine}, so" in problem


@pytest.mark.parametrize("name", ["08", "1x", "10.0.0.256", "10.0.0.7.example.org"])
def test_a_name_that_only_looks_like_an_ip_address_stays_a_name(name: str) -> None:
    text = MINIMAL_HOSTS.format(f"h2: {{address: {name}}}")
    assert read(text).by_name["h2"].machine == f"{name}:22"


def test_one_address_with_two_ports_is_two_machines() -> None:
    assert len(read(MINIMAL_HOSTS.format("h2: {address: h1, port: 2222}")).hosts) == 2


MINIMAL_HOSTS = """\
version: 1
defaults: {{user: train, generation: pascal, gpus: 4, fabric: tcp}}
fabrics: {{tcp: {{kind: tcp, interface: eth0}}}}
racks: {{r1: {{hosts: {{h1: {{}}, {}}}}}}}
"""


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ("a: {reservation: 3}, b: {reservation: 2}", "the pools reserve 5 GPUs together, but the inventory has 4"),
        (
            "a: {reservation: 1}, b: {reservation: 2, parent: a}",
            "pool a: its children reserve 2 GPUs, but its own reservation is 1",
        ),
        ("a: {limit: 1}, b: {reservation: 2, parent: a}", "pool a: its children reserve 2 GPUs, but its limit is 1"),
    ],
)
def test_reservations_above_what_there_is_are_refused_with_their_place(pools: str, said: str) -> None:
    """A pass never meets them: every pass of every inventory failed, and submit stored a job it did not name."""
    text = MINIMAL_HOSTS.format("x-: {}").replace(", x-: {}", "") + f"pools: {{{pools}}}\n"
    (found,) = problems(text)
    assert re.match(r"inventory\.yaml:5:\d+: ", found)
    assert said in found


IDLE = "{idle_timeout: 1h30m, idle_grace: 5m, idle_action: preempt, idle_longer: true}"


def test_idle_rules_of_a_pool() -> None:
    pool, plain = read(HEAD + f"pools: {{a: {IDLE}, b: {{idle_timeout: 2h}}}}\n").pools
    assert (pool.idle_timeout_s, pool.idle_grace_s, pool.idle_action, pool.idle_longer) == (5400, 300, "preempt", True)
    assert (plain.idle_timeout_s, plain.idle_grace_s, plain.idle_action, plain.idle_longer) == (7200, 600, "end", False)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("idle_grace: 5m", "pool a: idle_grace, idle_action and idle_longer need an idle_timeout of the same pool"),
        ("idle_action: tell", "need an idle_timeout of the same pool (allowed: idle_timeout: 1h)"),
        ("idle_timeout: 60", "idle_timeout: '60' has no unit; write 60s, 60m, 60h or 60d"),
        ("idle_timeout: 0s", "idle_timeout: '0s'"),
        ("idle_timeout: -5m", "idle_timeout: '-5m'"),
        ("idle_timeout: nan", "idle_timeout: 'nan'"),
        ("idle_timeout: 1h, idle_action: kill", "idle_action: 'kill' is not"),
    ],
)
def test_idle_rules_that_cannot_be(keys: str, said: str) -> None:
    with pytest.raises(DocumentError) as refused:
        read(HEAD + f"pools: {{a: {{{keys}}}}}\n")
    assert said in str(refused.value)


def test_pools_that_cannot_be() -> None:
    text = HEAD + "pools: {a: {parent: b}, b: {parent: a}, c: {parent: zz}, d: {reservation: 8, limit: 4}}\n"
    said = problems(text)
    assert "pool a is its own parent: a → b → a" in said[0]
    assert "there is no pool 'zz' (allowed: a, b, c, d)" in said[2]
    assert "reservation 8 is above its limit 4" in said[3]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "inventory.yaml:1:1: the inventory is empty"),
        (b"# nothing\n", "inventory.yaml:1:1: the inventory is empty"),
        (b"[1, 2]", "inventory.yaml:1:1: the inventory must be a mapping"),
        (b"version: 1\n\xff", "inventory.yaml:2:1: byte 0xff is not UTF-8 text"),
        (b"\xef\xbb\xbfversion: 1\n", "inventory.yaml:1:1: the file begins with a byte order mark"),
        (b"version: 1\nx-a: a\x00b\n", "inventory.yaml:2:7: character U+0000 is not allowed"),
        (b"version: 1\nx-a: \x1b[31m\n", "inventory.yaml:2:6: character U+001B"),
        ("version: 1 # \u202e\n".encode(), "inventory.yaml:1:14: character U+202E"),
        (b"version: 1\rracks: {}\r", "inventory.yaml:1:11: the file has a carriage return without a line feed"),
        (
            b"version: 1\nracks:\n\tr1: {}\n",
            "inventory.yaml:3:1: the line has a tab character; indent YAML with spaces",
        ),
        (b"version: 1\nracks: {r1: {hosts: {a: }\n", "inventory.yaml:3:1: while parsing a flow mapping"),
        (b"version: 1\n---\nversion: 1\n", "inventory.yaml:2:1: expected a single document"),
        (b"version: !!int 1\n", "inventory.yaml:1:10: YAML tags and directives are not allowed"),
        (b"x-a: !!python/object/apply:os.system [touch /tmp/pwned]\n", "inventory.yaml:1:6: YAML tags"),
        (b"version: 1\nversion: 1\n", "inventory.yaml:2:1: 'version' is given twice"),
        (b"version: 1\nx-a: &a [*a]\n", "inventory.yaml:2:6: a YAML alias contains itself"),
        (b"version: 1\nx-a: *b\n", "inventory.yaml:2:6: found undefined alias"),
        (b"version: 1\n? [a]\n: 1\n", "a key of the inventory must be a plain word"),
    ],
)
def test_what_no_inventory_needs(data: bytes, said: str) -> None:
    assert said in "\n".join(problems(data))


def test_a_yaml_bomb() -> None:
    lines = ["version: 1", "x-0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    (problem,) = problems("\n".join(lines))
    assert "with all aliases expanded, the value has more than" in problem


@pytest.mark.parametrize("unit", ["[", "{a: ", "- ", "? ", "{? "])
def test_nesting_that_would_overflow_the_stack(unit: str) -> None:
    assert "inventory.yaml:1:" in problems("version: 1\nx-a: " * 0 + unit * 200_000)[0]


def test_a_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 1024 * 1024)
    with pytest.raises(DocumentError, match="larger than 8 MiB"):
        load_inventory(path)


def test_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(BadInput) as refused:
            load_inventory(path)
        assert str(path) in str(refused.value)


def test_a_key_of_hosts_above_the_hosts_belongs_to_their_defaults() -> None:
    text = "version: 1\nuser: train\nracks: {r1: {gpus: 4, hosts: {h1: {}}}}\n"
    found = problems(text)
    assert any("unknown key 'user' in the inventory; did you mean 'defaults: {user: …}'?" in each for each in found)
    assert any("unknown key 'gpus' in rack r1; did you mean 'defaults: {gpus: …}'?" in each for each in found)
