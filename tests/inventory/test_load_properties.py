"""Whatever bytes a file has: an inventory, or a list of problems each with a place in the file."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from written_inventories import Written, inventories

from gpurun.documents.plain import DocumentError
from gpurun.errors import GpurunError
from gpurun.inventory.edit import SetFields, apply, parse_settings
from gpurun.inventory.read import parse_inventory

SOURCE = Path("/inventory.yaml")
SNIPPETS = [
    *(
        b"&a ",
        b"*a",
        b"<<: ",
        b"!!int ",
        b"[",
        b"]",
        b"{",
        b"}",
        b"- ",
        b"? ",
        b": ",
        b"#",
        b"\n",
        b"\t",
        b"\r",
        b"\x00",
    ),
    *(
        b"|",
        b">",
        b"'",
        b'"',
        b"\\",
        b"%YAML 1.2\n",
        b"---\n",
        b"...\n",
        b"~",
        b"\xef\xbb\xbf",
        b"\xff",
        b", ",
        b"@",
        b"`",
    ),
    *(b"gpus: 99", b"gpu-[1-3]", b"-oProxyCommand=x", b"racks:\n", b"hosts: {a: }", b"null", b"0x10", b"1e9"),
]


def read_or_refused(data: bytes) -> None:
    try:
        parse_inventory(data, SOURCE)
    except DocumentError as error:
        lines = data.count(b"\n") + 1
        assert error.problems
        for problem in error.problems:
            assert 1 <= problem.line <= lines + 1
            assert problem.column >= 1
            assert "\n" not in problem.message


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    read_or_refused(data)


@given(st.lists(st.sampled_from(SNIPPETS), max_size=25))
def test_pieces_of_yaml(pieces: list[bytes]) -> None:
    read_or_refused(b"".join(pieces))


@given(inventories(), st.data())
def test_inventories_with_something_in_them(written: Written, data: st.DataObject) -> None:
    text = written.text.encode()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 5))
        text = text[:at] + data.draw(st.sampled_from(SNIPPETS)) + text[at + cut :]
    read_or_refused(text)
    try:
        after = apply(text, SOURCE, SetFields(("gpu-r0-01",), parse_settings(["gpus=3"])))
    except GpurunError as error:
        assert "bug in gpurun" not in str(error)
    else:
        assert parse_inventory(after, SOURCE).by_name["gpu-r0-01"].gpus == 3
