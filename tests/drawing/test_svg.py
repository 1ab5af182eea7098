"""An SVG stays one, whatever is written into it."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from gpurun.drawing import Drawing

HOSTILE = [
    '"/><script>alert(1)</script>',
    "a & b <b>",
    "\x1b[2J\x00\x07",
    "\ud800",
    "' onload='x",
    "]]>",
    "𝕏 ü",
    "\u202e",
    "",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_a_text(text):
    sheet = Drawing(10, 10, text)
    sheet.text(1, 1, text, tip=text)
    sheet.line([(0, 0), (1, 1)], "#000", tip=text)
    sheet.box(0, 0, 1, 1, "#000", tip=text)
    sheet.dot(0, 0, "#000", tip=text)
    root = ElementTree.fromstring(str(sheet).encode())
    names = {each.tag.rpartition("}")[2] for each in root.iter()}
    assert names <= {"svg", "rect", "text", "title", "polyline", "circle"}
    assert not any(name.startswith("on") for each in root.iter() for name in each.attrib)
    assert "\x1b" not in str(sheet)
