"""Write the report as one page of HTML without scripts or network access. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from gpurun.documents.plain import printable
from gpurun.drawing.svg import Drawing
from gpurun.history.accounts import Accounts, Share
from gpurun.history.row import HistoryRow
from gpurun.quantities.counts import count
from gpurun.quantities.local_time import date_minute
from gpurun.quantities.times import duration

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 960, 200, 60, 40, 24
COLOUR = "#2f6fb0"
SPARK_WIDTH, SPARK_HEIGHT = 96, 18
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;color:#1b1f24;background:#fff}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse;width:100%;margin:.5em 0}
th,td{padding:.25em .6em;border-bottom:1px solid #d8dee4;text-align:right;vertical-align:top}
th:first-child,td:first-child,td.text,th.text{text-align:left}td.text{overflow-wrap:anywhere}
th{font-weight:600;color:#57606a}svg{max-width:100%;height:auto}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}th,td{border-color:#30363d}th{color:#9198a1}}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SHARES = (("user", "users"), ("pool", "pools"), ("project", "projects"), ("generation", "generations"))


def page(made: Accounts) -> str:
    """Return the whole document."""
    title = f"GPU use, {date_minute(made.since_s)} to {date_minute(made.until_s)}"
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style></head><body>",
            body(made),
            "</body></html>",
            "",
        ]
    )


def body(made: Accounts) -> str:
    """Return the report's content, for a page with its own head."""
    parts = [
        f"<h1>GPU use, {_text(date_minute(made.since_s))} to {_text(date_minute(made.until_s))}</h1>",
        f"<p>{_text(summary(made))}</p>",
        timeline(made),
    ]
    for name, attribute in _SHARES:
        shares = getattr(made, attribute)
        if len(shares) > 1 or name == "user":
            parts += [f"<h2>By {name}</h2>", _shares(name, shares)]
    parts += ["<h2>Outcomes</h2>", _counts("outcome", made.outcomes)]
    if made.causes:
        parts += ["<h2>Failures by cause</h2>", _counts("cause", made.causes)]
    if made.failed_hosts:
        parts += ["<h2>Failures by host</h2>", _counts("host", made.failed_hosts)]
    if made.largest:
        parts += ["<h2>Largest attempts</h2>", _largest(made.largest)]
    return "\n".join(parts)


def summary(made: Accounts) -> str:
    """Return one line: GPU hours, how busy, waiting time."""
    total = made.total
    of = made.capacity * (made.until_s - made.since_s) if made.capacity else 0
    share = f" ({100 * total.gpu_s / of:.0f} % of {count(made.capacity, 'GPU')})" if of and made.capacity else ""
    said = [f"{count(total.attempts, 'attempt')} used {hours(total.gpu_s)} GPU hours{share}"]
    if total.busy_percent is not None:
        said.append(f"leased GPUs were {total.busy_percent:.0f} % busy, and {hours(total.idle_gpu_s)} GPU hours idle")
    said.append(f"attempts waited {duration(total.mean_wait_s)} on average, {duration(total.longest_wait_s)} at most")
    return "; ".join(said) + "."


def timeline(made: Accounts) -> str:
    """Draw the number of leased GPUs over the period as SVG."""
    most = max([1.0, float(made.capacity or 0), *made.timeline])
    right, bottom = WIDTH - 10, TOP + HEIGHT
    step = (right - LEFT) / max(1, len(made.timeline))
    places: list[tuple[float, float]] = [(LEFT, bottom)]
    for number, value in enumerate(made.timeline):
        y = bottom - HEIGHT * min(1.0, value / most)
        places += [(LEFT + number * step, y), (LEFT + (number + 1) * step, y)]
    drawing = Drawing(WIDTH, bottom + BOTTOM, "Leased GPUs")
    drawing.area([*places, (right, bottom)], COLOUR)
    drawing.line([(LEFT, TOP), (LEFT, bottom), (right, bottom)], "#888")
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        drawing.text(LEFT - 6, bottom - HEIGHT * part + 4, f"{most * part:.4g}", anchor="end")
        when = date_minute(made.since_s + (made.until_s - made.since_s) * part)
        drawing.text(LEFT + (right - LEFT) * part, bottom + 16, when, anchor=anchor)
    return str(drawing)


def _shares(name: str, shares: Mapping[str, Share]) -> str:
    head = (name, "GPU hours", "jobs", "attempts", "failed", "mean wait", "longest", "busy", "idle GPU hours")
    return _table(
        head,
        (
            (
                label, hours(share.gpu_s), str(share.jobs), str(share.attempts), str(share.failed),
                duration(share.mean_wait_s), duration(share.longest_wait_s), percent(share.busy_percent),
                hours(share.idle_gpu_s),
            )
            for label, share in shares.items()
        ),
    )  # fmt: skip


def _counts(name: str, counts: Mapping[str, int]) -> str:
    return _table((name, "attempts"), ((label, str(count)) for label, count in counts.items()))


def _largest(found: Iterable[HistoryRow]) -> str:
    head = '<tr><th>job</th><th class="text">name</th><th>GPU hours</th><th class="text">use</th><th>over time</th>'
    lines = [f"{head}<th>outcome</th></tr>"]
    for row in found:
        lines.append(
            f'<tr><td>{_text(row.job)}</td><td class="text">{_text(f"{row.user}: {row.name}")}</td>'
            f'<td>{hours(row.gpu_s)}</td><td class="text">{_text(row.use_words)}</td><td>{_spark(row)}</td>'
            f"<td>{_text(row.outcome)}</td></tr>"
        )
    return f"<table>{''.join(lines)}</table>"


def _spark(row: HistoryRow) -> str:
    values = [min(100.0, float(word)) for word in row.sparks.split() if word.isascii() and word.isdigit()][:100]
    if len(values) < 2:
        return ""
    step = SPARK_WIDTH / (len(values) - 1)
    points = " ".join(f"{number * step:.1f},{SPARK_HEIGHT * (1 - v / 100):.1f}" for number, v in enumerate(values))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SPARK_WIDTH}" height="{SPARK_HEIGHT}" role="img" '
        f'aria-label="use over time"><polyline points="{points}" fill="none" stroke="{COLOUR}"/></svg>'
    )


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_text(word)}</th>" for word in head)
    rows = "".join(f"<tr>{''.join(f'<td>{_text(word)}</td>' for word in line)}</tr>" for line in lines)
    return f"<table><tr>{cells}</tr>{rows}</table>"


def _text(text: str) -> str:
    return escape(printable(text))


def hours(seconds: float) -> str:
    """Return seconds as hours: ``12.3``."""
    return f"{seconds / 3600:,.1f}"


def percent(value: float | None) -> str:
    """Return ``31 %``; nothing if unknown."""
    return "" if value is None else f"{value:.0f} %"
