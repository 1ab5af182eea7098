"""Random edits of random commented inventories: only the lines that must change do, and the model is right."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st
from written_inventories import Written, inventories

from gpurun.errors import GpurunError
from gpurun.inventory.edit import AddHosts, Edit, RemoveHosts, SetFields, apply, parse_settings
from gpurun.inventory.hostset import expand
from gpurun.inventory.read import parse_inventory

SOURCE = Path("/inventory.yaml")
SETTINGS = [
    ("gpus=16", "gpus", 16),
    ("generation=hopper", "generation", "hopper"),
    ("user=eve", "user", "eve"),
    ("gpu_model=A: b # 'c'", "gpu_model", "A: b # 'c'"),
    ("near_hca=0-1", "near_hca", (0, 1)),
    ("gpu_memory_mib=80GiB", "gpu_memory_mib", 81920),
]
relaxed = examples("inventories with a change")


def names_of(written: Written) -> list[str]:
    return [host.name for host in parse_inventory(written.text.encode(), SOURCE).hosts]


def changed(written: Written, edit: Edit) -> bytes:
    try:
        return apply(written.text.encode(), SOURCE, edit)
    except GpurunError as error:
        raise AssertionError(f"{edit}: {error}\n{written.text}") from error


def diff(written: Written, after: str) -> str:
    return "".join(unified_diff(written.text.splitlines(keepends=True), after.splitlines(keepends=True)))


def loses_its_comma(written: Written, number: int, touched: set[str]) -> bool:
    """Whether all that stands behind a line of a mapping in braces may be gone."""
    behind = written.commas.get(number)
    return bool(behind) and all(names <= touched for names in behind or ())


def assert_other_lines_stay(written: Written, after: str, touched: set[str], rack: str | None = None) -> None:
    """Every line about nobody, or about hosts that are not touched, is still there, in the same order."""
    may_change = written.racks.get(rack or "", set())
    must_stay = [
        line + written.newline
        for number, (line, about) in enumerate(zip(written.lines, written.about, strict=True))
        if not (about & touched) and number not in may_change and not loses_its_comma(written, number, touched)
    ]
    remaining = iter(after.splitlines(keepends=True))
    for line in must_stay:
        assert any(line == other for other in remaining), f"gone or moved: {line!r}\n{diff(written, after)}"
    assert after.count("\r\n") == (after.count("\n") if written.newline == "\r\n" else 0)


def assert_comments_stay(written: Written, after: str, but: set[str] = frozenset()) -> None:
    for line, about in zip(written.lines, written.about, strict=True):
        if "#" in line and not (about & but):
            assert line[line.index("#") :] in after, diff(written, after)


@relaxed
@given(inventories(), st.data())
def test_set(written: Written, data: st.DataObject) -> None:
    names = names_of(written)
    hosts = tuple(name for name in names if data.draw(st.booleans(), label=name))
    word, field, value = data.draw(st.sampled_from(SETTINGS))
    before = parse_inventory(written.text.encode(), SOURCE)
    after_bytes = changed(written, SetFields(hosts, parse_settings([word])))
    after = parse_inventory(after_bytes, SOURCE)
    for host in after.hosts:
        expected = {**vars(before.by_name[host.name])}
        if host.name in hosts:
            expected[field] = value
        assert vars(host) == expected
    assert_other_lines_stay(written, after_bytes.decode(), set(hosts))
    assert_comments_stay(written, after_bytes.decode())
    assert apply(after_bytes, SOURCE, SetFields(hosts, parse_settings([word]))) == after_bytes


@relaxed
@given(inventories(), st.data())
def test_label_and_back(written: Written, data: st.DataObject) -> None:
    hosts = tuple(name for name in names_of(written) if data.draw(st.booleans(), label=name))
    labelled = changed(written, SetFields(hosts, parse_settings(["labels.shelf=7"])))
    found = parse_inventory(labelled, SOURCE)
    assert {host.name for host in found.hosts if host.labels.get("shelf") == "7"} == set(hosts)
    assert_other_lines_stay(written, labelled.decode(), set(hosts))
    assert_comments_stay(written, labelled.decode())
    back = apply(labelled, SOURCE, SetFields(hosts, parse_settings(["labels.shelf="])))
    assert {h.name: h for h in parse_inventory(back, SOURCE).hosts} == {
        h.name: h for h in parse_inventory(written.text.encode(), SOURCE).hosts
    }


@relaxed
@given(inventories(), st.data())
def test_remove(written: Written, data: st.DataObject) -> None:
    names = names_of(written)
    hosts = tuple(name for name in names if data.draw(st.booleans(), label=name))
    before = parse_inventory(written.text.encode(), SOURCE)
    after = changed(written, RemoveHosts(hosts))
    left = parse_inventory(after, SOURCE)
    assert {h.name: h for h in left.hosts} == {h.name: h for h in before.hosts if h.name not in hosts}
    assert_other_lines_stay(written, after.decode(), set(hosts))
    assert_comments_stay(written, after.decode(), set(hosts))


@relaxed
@given(inventories(), st.sampled_from(["r0", "r1", "new"]), st.sampled_from(["n-1", "n-[01-04]"]))
def test_add(written: Written, rack: str, folded: str) -> None:
    before = parse_inventory(written.text.encode(), SOURCE)
    edit = AddHosts(expand(folded), rack, parse_settings(["gpus=2", "labels.row=z"]))
    after = changed(written, edit)
    found = parse_inventory(after, SOURCE)
    assert {h.name: h for h in found.hosts if h.name in before.by_name} == dict(before.by_name)
    new = [host for host in found.hosts if host.name not in before.by_name]
    assert [host.name for host in new] == list(expand(folded))
    assert all((h.rack, h.gpus, h.labels["row"]) == (rack, 2, "z") for h in new)
    assert_other_lines_stay(written, after.decode(), set(), rack)
    assert_comments_stay(written, after.decode())


@relaxed
@given(inventories(), st.data())
def test_move(written: Written, data: st.DataObject) -> None:
    hosts = tuple(name for name in names_of(written) if data.draw(st.booleans(), label=name))
    after = changed(written, SetFields(hosts, parse_settings(["rack=r0"])))
    found, before = parse_inventory(after, SOURCE), parse_inventory(written.text.encode(), SOURCE)
    for host in found.hosts:
        assert host.rack == ("r0" if host.name in hosts else before.by_name[host.name].rack)
    assert_other_lines_stay(written, after.decode(), set(hosts), "r0")
    for line in written.lines:  # a comment that comes above a row of several hosts names its host
        comment = line.partition("#")[2].strip()
        assert not comment or comment in after.decode(), f"gone: {line!r}\n{diff(written, after.decode())}"


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_a_change_to_all_hosts_of_a_range_does_not_split_it(text: str) -> None:
    base = "version: 1\nfabrics: {t: {kind: tcp, interface: e}}\ndefaults: {gpus: 4, generation: p}\n"
    base += f'{text}racks: {{r: {{hosts: {{"gpu-[01-16]": {{}}}}}}}}  # all\n'
    after = apply(base.encode(), SOURCE, SetFields(expand("gpu-[01-16]"), parse_settings(["gpus=8"])))
    assert after.decode() == base.replace('"gpu-[01-16]": {}', '"gpu-[01-16]": {gpus: 8}')
    split = apply(base.encode(), SOURCE, SetFields(("gpu-07",), parse_settings(["gpus=8"])))
    assert '"gpu-[01-06,08-16]": {}, "gpu-07": {gpus: 8}' in split.decode()
