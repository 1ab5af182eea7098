"""HTML that needs no script and no network. Pure. Every text from outside is made printable and escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from gpurun.documents.plain import printable
from gpurun.views.lines import Fold, Line, mark_line, out_lines, plain, rack_lines, total_line
from gpurun.views.picture import JobRow, Picture, WaitingJob

REFRESH_S = 10
ENTRY_COLUMNS = 132
JOB_COLOURS = (
    "#58a6ff", "#ffa657", "#7ee787", "#ff7b72", "#e3d04b", "#56d4dd", "#d2a8ff", "#ff9bce", "#a5d6a7", "#f2b880",
    "#9ecbff", "#e2c5ff",
)  # fmt: skip
STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:75rem;padding:0 1rem;color:#1f2328;"
    "background:#fff}"
    "h1{font-size:1.3rem}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}a{color:#0550ae}"
    "pre{font:13px/1.35 ui-monospace,monospace;overflow-x:auto;background:#f6f8fa;padding:.7rem;border-radius:6px}"
    "pre.log{white-space:pre-wrap;overflow-wrap:anywhere}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.2rem .7rem .2rem 0;vertical-align:top;"
    "border-bottom:1px solid #d0d7de}td.why{overflow-wrap:anywhere}"
    ".head{font-weight:600}.dim,.free{color:#59636e}.bad{color:#b42318}.good{color:#116329}.wait{color:#7d4e00}"
    ".curves svg{margin:.3rem;border:1px solid #d0d7de;border-radius:6px}dt{font-weight:600}dl{display:grid;"
    "grid-template-columns:max-content 1fr;gap:.1rem 1rem}dd{margin:0;overflow-wrap:anywhere}"
    "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}pre{background:#161b22}a{color:#79c0ff}"
    "th,td{border-color:#30363d}.dim,.free{color:#9198a1}.bad{color:#ff7b72}.good{color:#7ee787}.wait{color:#e3b341}}"
    + "".join(f".j{at}{{background:{colour};color:#000}}" for at, colour in enumerate(JOB_COLOURS))
)


def text(raw: str) -> str:
    """A text from outside as HTML."""
    return escape(printable(raw))


def whole_page(title: str, body: str, nonce: str, *, refresh_s: int | None = REFRESH_S) -> str:
    """A whole page. It loads itself again after `refresh_s` seconds."""
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>{again}'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<style nonce="{nonce}">{STYLE}</style></head><body>{body}</body></html>\n'
    )


def cluster_body(
    picture: Picture,
    queue: Sequence[WaitingJob],
    problems: Iterable[str],
    fold: Fold,
    duration: Callable[[float], str],
    expected: Callable[[float], str],
) -> str:
    """Hosts, jobs and the queue."""
    parts = [f'<h1>gpurun</h1><p>{text(plain(total_line(picture)))} · <a href="/report">use of GPUs</a></p>']
    parts += [f'<p class="bad">{text(problem)}</p>' for problem in problems]
    outs = out_lines(picture.outs, fold, duration)
    lines = [*rack_lines(picture, fold, ENTRY_COLUMNS), mark_line(picture), *outs]
    parts.append("<h2>Hosts</h2><pre>" + "\n".join(map(_line, lines)) + "</pre>")
    parts.append("<h2>Jobs</h2>" + jobs_table(picture, duration))
    if queue:
        rows = [
            [str(row.position or "–"), job_link(row.job), text(row.owner), text(row.name), str(row.gpus),
             duration(row.waiting_s), expected(row.expected_start_s) if row.expected_start_s else "", text(row.message)]
            for row in queue
        ]  # fmt: skip
        heads = ["place", "job", "owner", "name", "GPUs", "waits for", "expected", "because"]
        parts.append("<h2>Queue</h2>" + _table(heads, rows))
    return "".join(parts)


def report_body(accounts: str, problems: Iterable[str]) -> str:
    """The accounts, which are HTML already, and what could not be read for them."""
    damaged = "".join(f'<p class="bad">{text(problem)}</p>' for problem in problems)
    return f'<p><a href="/">all jobs</a></p>{damaged}{accounts}'


def problem_body(message: str, hint: str | None) -> str:
    """Return the body of an error page."""
    return f'<h1>gpurun</h1><p class="bad">{text(message)}</p>' + (f"<p>{text(hint)}</p>" if hint else "")


def jobs_table(picture: Picture, duration: Callable[[float], str]) -> str:
    """A row for each job."""
    if not picture.jobs:
        return "<p>There is no job.</p>"
    order = list(picture.letters)
    rows = [
        [_letter(job, order), job_link(job.id), text(job.owner), text(job.name), text(job.state.value), job.gpus,
         duration(job.for_s), text(job.hosts), text(job.reason)]
        for job in picture.jobs
    ]  # fmt: skip
    return _table(["", "job", "owner", "name", "state", "GPUs", "for", "hosts", "reason"], rows)


def job_body(
    title: str, facts: Iterable[tuple[str, str]], curves: Sequence[str], log: Iterable[str], shown: str
) -> str:
    """One job: what is known of it, its curves, the end of its log.

    Args:
        curves: SVG that gpurun itself has drawn.
        log: lines, raw.
        shown: which part of the log this is.
    """
    listed = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in facts if value)
    drawn = f'<h2>Metrics</h2><div class="curves">{"".join(curves)}</div>' if curves else ""
    lines = "\n".join(escape(line) for line in log)
    printed = f'<h2>Log</h2><p class="dim">{text(shown)}</p><pre class="log">{lines}</pre>'
    return f'<p><a href="/">all jobs</a></p><h1>{text(title)}</h1><dl>{listed}</dl>{drawn}{printed}'


def job_link(job: str) -> str:
    """A job's id as a link to its page. Only gpurun's own ids become links."""
    return f'<a href="/job/{escape(job, quote=True)}">{escape(job)}</a>'


def _letter(job: JobRow, order: Sequence[str]) -> str:
    return f'<span class="j{order.index(job.id) % len(JOB_COLOURS)}">{escape(job.letter)}</span>' if job.letter else ""


def _line(line: Line) -> str:
    return "".join(
        f'<span class="{_class(mark)}">{escape(said)}</span>' if mark else escape(said) for said, mark in line
    )


def _class(mark: str) -> str:
    return f"j{int(mark[4:]) % len(JOB_COLOURS)}" if mark.startswith("job:") else mark


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already; the last column may be long."""
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row[:-1]) + f'<td class="why">{row[-1]}</td></tr>'
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
