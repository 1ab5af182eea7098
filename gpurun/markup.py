"""HTML and SVG, whose texts are always printable and escaped; pages that need no script and no network. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from html import escape

from gpurun.documents.plain import printable

STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:75rem;padding:0 1rem;color:#1f2328;"
    "background:#fff}"
    "h1{font-size:1.3rem}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}a{color:#0550ae}td a{white-space:nowrap}"
    "pre{font:13px/1.35 ui-monospace,monospace;overflow-x:auto;background:#f6f8fa;padding:.7rem;border-radius:6px}"
    "pre.log{white-space:pre-wrap;overflow-wrap:anywhere}"
    "table{border-collapse:collapse;width:100%;margin:.5rem 0}th{font-weight:600}"
    "th,td{text-align:left;padding:.2rem .7rem .2rem 0;vertical-align:top;border-bottom:1px solid #d0d7de}"
    ".figure{text-align:right}td:last-child{overflow-wrap:anywhere}"
    ".head{font-weight:600}.dim,.free{color:#59636e}.bad{color:#b42318}.good{color:#116329}.wait{color:#7d4e00}"
    "svg{max-width:100%;height:auto}.curves svg{margin:.3rem;border:1px solid #d0d7de;border-radius:6px}"
    "dt{font-weight:600}dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}"
    "dd{margin:0;overflow-wrap:anywhere}"
    "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}pre{background:#161b22}a{color:#79c0ff}"
    "th,td{border-color:#30363d}.dim,.free{color:#9198a1}.bad{color:#ff7b72}.good{color:#7ee787}.wait{color:#e3b341}}"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


class Markup(str):
    """HTML or SVG. `markup` and `element` make it of other texts, so that no hostile text becomes a part of it."""

    __slots__ = ()


def markup(*parts: object, between: str = "") -> Markup:
    """Join parts. Those that are not Markup are written as text: printable and escaped."""
    return Markup(between.join(map(_written, parts)))


def _written(part: object) -> str:
    return part if isinstance(part, Markup) else escape(printable(str(part)))


def element(name: str, *content: object, **attributes: object) -> Markup:
    """Return an element with its content, as in `markup`.

    Args:
        attributes: ``class_`` is written ``class``, and ``aria_label`` ``aria-label``. None leaves an attribute out.
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    written = "".join(f' {key}="{_written(value)}"' for key, value in given.items())
    return Markup(f"<{name}{written}>{''.join(map(_written, content))}</{name}>")


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], figures: Container[int] = ()) -> Markup:
    """Return a table.

    Args:
        figures: numbers of the columns that are right-aligned.
    """
    looks = [' class="figure"' if at in figures else "" for at in range(len(heads))]

    def line(cells: Sequence[object], kind: str) -> str:
        found = zip(cells, looks, strict=True)
        return "<tr>" + "".join(f"<{kind}{look}>{_written(cell)}</{kind}>" for cell, look in found) + "</tr>"

    return element("table", Markup(line(heads, "th") + "".join(line(row, "td") for row in rows)))


def page(
    title: str, *body: object, nonce: str | None = None, refresh_s: int | None = None, style: str = STYLE
) -> Markup:
    """Return a whole page.

    Args:
        nonce: allows the style where the server's policy names it; None = the page is a file, and has a policy itself.
        refresh_s: the page loads itself again after so many seconds.
    """
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    if nonce is None:
        head += f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    if refresh_s:
        head += f'<meta http-equiv="refresh" content="{refresh_s}">'
    top = element("head", Markup(head), element("title", title), element("style", Markup(style), nonce=nonce))
    return Markup(f"<!doctype html>{element('html', top, element('body', *body), lang='en')}\n")
