"""An SVG stays one, whatever is written into it."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from gpurun.drawing import Chart, Drawing, Labelled, Numbers

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
    root = ElementTree.fromstring(sheet.svg().encode())
    names = {each.tag.rpartition("}")[2] for each in root.iter()}
    assert names <= {"svg", "rect", "text", "title", "polyline", "circle"}
    assert not any(name.startswith("on") for each in root.iter() for name in each.attrib)
    assert "\x1b" not in sheet.svg()


def chart_of(across, up, names=("", "")):
    sheet = Drawing(300, 200, "t")
    return sheet, Chart(sheet, (50.0, 20.0, 200.0, 100.0), across, up, names)


def test_a_chart_places_points_and_has_gaps_where_an_axis_has_no_place():
    sheet, chart = chart_of(Numbers(0.0, 10.0), Numbers(0.0, 1.0))
    assert chart.at(0, 0) == (50.0, 120.0) and chart.at(10, 1) == (250.0, 20.0) and chart.at(11, 0) is None
    chart.curve([(0, 0.5), (1, 0.5), (2, float("nan")), (3, 0.5), ("x", 0.5), (4, 0.5), (5, 0.5)], "#c0ffee", tip="<t>")
    root = ElementTree.fromstring(sheet.svg())
    lines = [each.get("points") for each in root if each.get("stroke") == "#c0ffee"]
    assert lines == ["50.0,70.0 70.0,70.0", "110.0,70.0 110.0,70.0", "130.0,70.0 150.0,70.0"]


def test_a_chart_names_its_axes_and_their_scale():
    sheet, _ = chart_of(Labelled([(0.0, "<monday>"), (1.0, "friday")]), Numbers(1.0, 1e6, is_log=True), ("day", "loss"))
    words = [each.text for each in ElementTree.fromstring(sheet.svg()) if each.tag.endswith("text")]
    assert {"<monday>", "friday", "day", "loss (log)", "1"} <= set(words)


def test_columns_of_a_chart_fill_it_and_rounding_leaves_it_nowhere():
    sheet, chart = chart_of(Labelled(()), Numbers(0.0, 4.0))
    chart.columns([1.0, 4.0 + 1e-12], "#c0ffee")
    chart.band([(0.0, 1.0, 2.0), (1.0, 1.0, 3.0)], "#facade")
    areas = [each.get("points") for each in ElementTree.fromstring(sheet.svg()) if each.tag.endswith("polygon")]
    assert areas[0] == "50.0,120.0 50.0,95.0 150.0,95.0 150.0,20.0 250.0,20.0 250.0,120.0"
    assert areas[1] == "50.0,70.0 250.0,45.0 250.0,95.0 50.0,95.0"
