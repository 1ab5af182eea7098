"""Hostile texts in HTML and SVG stay texts, wherever they stand."""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from gpurun.markup import Markup, element, markup, page, table

HOSTILE = "</p><script>alert('1')</script>\x1b[2J\u202e\" onload=\"x&amp;"


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.update(attrs)

    def handle_data(self, data):
        self.text += data


def test_a_text_is_a_text_in_an_element_and_in_an_attribute():
    shown = Reader(element("p", "a ", HOSTILE, title=HOSTILE))
    seen = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert (shown.tags, shown.text, shown.attributes) == (["p"], f"a {seen}", {"title": seen})


def test_only_markup_stays_markup():
    inner = element("b", "<")
    assert markup(inner, "<i>", 7, between=" ") == "<b>&lt;</b> &lt;i&gt; 7"
    assert markup(str.__str__(inner) + "") == "&lt;b&gt;&amp;lt;&lt;/b&gt;", "a plain text of it is escaped again"
    assert isinstance(element("a", inner), Markup) and element("a", inner) == "<a><b>&lt;</b></a>"


def test_attributes_that_python_cannot_name():
    assert element("i", class_="x", aria_label="y", id=None) == '<i class="x" aria-label="y"></i>'


def test_a_table_has_its_figures_at_the_right():
    root = ElementTree.fromstring(table(("name", "<n>"), [(HOSTILE, 1), (element("b", "x"), 2)], figures={1}))
    assert [cell.get("class") for row in root for cell in row] == [None, "figure"] * 3
    assert root[2][0][0].tag == "b" and len(root[1][0]) == 0
    with pytest.raises(ValueError, match="zip"):
        table(("a", "b"), [("too", "many", "cells")])


@pytest.mark.parametrize("nonce", [None, "abc"])
def test_a_page_loads_nothing_and_runs_nothing(nonce):
    text = page(HOSTILE, HOSTILE, element("h1", HOSTILE), nonce=nonce, refresh_s=7)
    shown = Reader(text)
    assert shown.tags == [
        "html",
        "head",
        "meta",
        "meta",
        *["meta"] * (not nonce),
        "meta",
        "title",
        "style",
        "body",
        "h1",
    ]
    assert ("default-src 'none'" in text) == (nonce is None) and '<meta http-equiv="refresh" content="7">' in text
    assert ('<style nonce="abc">' in text) == (nonce == "abc")
    assert "refresh" not in page("x")
