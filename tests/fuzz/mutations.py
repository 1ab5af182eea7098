"""What may have become of a file: bits flipped, cut, doubled, spliced, or well formed with other values in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import hypothesis.strategies as st
from how_many import count
from hypothesis import HealthCheck, Phase, settings

LONG = 50_000
SNIPPETS = (
    b"", b"\0", b"\0" * 512, b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"NaN", b"-Infinity", b"1e999", b"-0.0",
    b"1e308", b"9" * 5000, b"-1", b"4294967296", b'"\\ud800"', b'"\\u0000"', b'"\x1b[2J"', "\u202e".encode(), b"null",
    b"true", b'""', b"{}", b"[]", b"[" * LONG, b'{"a":' * LONG, b"{" * LONG, b"x" * LONG, b"\n" * LONG, b"\\",
    b'"', b",", b"\r", b"\n", b" ",
)  # fmt: skip
YAML_SNIPPETS = (
    *SNIPPETS, b"&a ", b"*a", b"<<: *a", b"!!python/object/apply:os.system ['true']", b"!!binary x", b"? ", b": ",
    b"- " * 150, b"2026-01-01", b"2026-01-01T00:00:00Z", b"0o17", b"1_000", b"12:30:45", b"~", b"%YAML 9.9\n---\n",
    b"---\n", b"...\n", b"|\n", b">-\n", b"\t", b"{[a]: b}", b"{{a: b}: c}", b"? [a, b]\n: c\n", b"[a, [b, {c: d}]]",
    b"'", b"@", b"`", b"1" * 400 + b"d", b" " * 5000 + b"x", b"1 " + b" " * 20_000 + b"x", b"a: &x [*x]\n",
    b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
    b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n"
    b"g: [*f,*f,*f,*f,*f,*f,*f,*f,*f]\n",
)  # fmt: skip
VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "\0", "\n", "\ud800", "\x1b[2J", "\u202e", "../../etc/passwd", "/", "-oProxyCommand=x",
    "x" * LONG, "0", "h1", "QUEUED", "RUNNING", "STOPPING", "SUCCEEDED", "j-00000000", [], [[]], {}, {"a": 1}, [None],
    ["h1"], [0, 0, 1, 10**9],
)  # fmt: skip


WRONG = st.sampled_from(VALUES).map(deepcopy)


def examples(what: str) -> Callable[[Any], Any]:
    """As many examples as `how_many` says. What fails is printed, not made smaller: an example may take minutes."""
    return settings(
        max_examples=count(what),
        database=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged_bytes(draw: st.DrawFn, files: Sequence[bytes], snippets: Sequence[bytes] = SNIPPETS) -> bytes:
    """One of the files after some accidents; another one may have got into it."""
    data = draw(st.sampled_from(files))
    for _ in range(draw(st.integers(1, 3))):
        data = _accident(draw, data, files, snippets)
    return data


def _accident(draw: st.DrawFn, data: bytes, files: Sequence[bytes], snippets: Sequence[bytes]) -> bytes:
    start, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
    what = draw(st.sampled_from(["flip", "cut", "double", "splice", "put", "replace", "zeros"]))
    if what == "flip" and data:
        at = min(start, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
    if what == "cut":
        return data[:start]
    if what == "double":
        return data[:end] + data[start:]
    if what == "splice":
        other = draw(st.sampled_from(files))
        return data[:start] + other[min(end, len(other)) :]
    if what == "zeros":
        return data[:start] + b"\0" * (end - start) + data[end:]
    snippet = draw(st.sampled_from(snippets))
    return data[:start] + snippet + data[end if what == "replace" else start :]


@st.composite
def damaged_json(draw: st.DrawFn, files: Sequence[bytes]) -> bytes:
    """Well formed JSON, or lines of it, with other values, or without, or with more of them."""
    data = draw(st.sampled_from(files))
    lines = data.splitlines() if data.count(b"\n{") > 1 or data.startswith(b'{"t') else [data]
    at = draw(st.integers(0, len(lines) - 1))
    try:
        document = json.loads(lines[at])
    except ValueError:
        return data
    for _ in range(draw(st.integers(1, 2))):
        document = _changed(draw, document)
    text = json.dumps(document)
    if isinstance(document, dict) and document and draw(st.integers(0, 9)) == 0:  # a key that is given twice
        key = draw(st.sampled_from(sorted(document)))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(draw(WRONG))}}}"
    return b"\n".join([*lines[:at], text.encode(), *lines[at + 1 :]]) + b"\n"


def _changed(draw: st.DrawFn, document: Any) -> Any:
    """A document with one place changed, at any depth."""
    places = list(_places(document))
    if not places:
        return draw(WRONG)
    holder, key = draw(st.sampled_from(places))
    what = draw(st.sampled_from(["value", "value", "value", "gone", "double", "more"]))
    if what == "gone":
        del holder[key]
    elif what == "double" and isinstance(holder, list):
        holder.append(holder[key])
    elif what == "more" and isinstance(holder, dict):
        holder[draw(st.sampled_from(["version", "x", "", "lost", "job"]))] = draw(WRONG)
    else:
        holder[key] = draw(WRONG)
    return document


def _places(document: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        found.append((document, key))
        found += _places(document[key])
    return found
