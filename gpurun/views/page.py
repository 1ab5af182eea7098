"""The pages of `gpurun web`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gpurun.markup import STYLE, Markup, element, markup, page, table
from gpurun.views.lines import Fold, Line, mark_line, out_lines, plain, rack_lines, total_line
from gpurun.views.picture import JobRow, Picture, WaitingJob

REFRESH_S = 10
ENTRY_COLUMNS = 132
JOB_COLOURS = (
    "#58a6ff", "#ffa657", "#7ee787", "#ff7b72", "#e3d04b", "#56d4dd", "#d2a8ff", "#ff9bce", "#a5d6a7", "#f2b880",
    "#9ecbff", "#e2c5ff",
)  # fmt: skip
JOB_STYLE = "".join(f".j{at}{{background:{colour};color:#000}}" for at, colour in enumerate(JOB_COLOURS))
ALL_JOBS = element("p", element("a", "all jobs", href="/"))


def whole_page(title: str, body: Markup, nonce: str, *, refresh_s: int | None = REFRESH_S) -> Markup:
    """Return a page, which loads itself again after `refresh_s` seconds."""
    return page(title, body, nonce=nonce, refresh_s=refresh_s, style=STYLE + JOB_STYLE)


def cluster_body(
    picture: Picture,
    queue: Sequence[WaitingJob],
    problems: Iterable[str],
    fold: Fold,
    duration: Callable[[float], str],
    expected: Callable[[float], str],
) -> Markup:
    """Return hosts, jobs and the queue."""
    outs = out_lines(picture.outs, fold, duration)
    lines = [*rack_lines(picture, fold, ENTRY_COLUMNS), mark_line(picture), *outs]
    parts = [
        element("h1", "gpurun"),
        element("p", plain(total_line(picture)), " · ", element("a", "use of GPUs", href="/report")),
        *(element("p", problem, class_="bad") for problem in problems),
        element("h2", "Hosts"), element("pre", markup(*map(_line, lines), between="\n")),
        element("h2", "Jobs"), jobs_table(picture, duration),
    ]  # fmt: skip
    if queue:
        rows = [
            (row.position or "–", job_link(row.job), row.owner, row.name, row.gpus, duration(row.waiting_s),
             expected(row.expected_start_s) if row.expected_start_s else "", row.message)
            for row in queue
        ]  # fmt: skip
        heads = ("place", "job", "owner", "name", "GPUs", "waits for", "expected", "because")
        parts += [element("h2", "Queue"), table(heads, rows)]
    return markup(*parts)


def report_body(accounts: Markup, problems: Iterable[str]) -> Markup:
    """Return the accounts, and what could not be read for them."""
    return markup(ALL_JOBS, *(element("p", problem, class_="bad") for problem in problems), accounts)


def problem_body(message: str, hint: str | None) -> Markup:
    """Return the body of an error page."""
    return markup(element("h1", "gpurun"), element("p", message, class_="bad"), element("p", hint) if hint else "")


def jobs_table(picture: Picture, duration: Callable[[float], str]) -> Markup:
    """Return a row for each job."""
    if not picture.jobs:
        return element("p", "There is no job.")
    order = list(picture.letters)
    rows = [
        (_letter(job, order), job_link(job.id), job.owner, job.name, job.state.value, job.gpus, duration(job.for_s),
         job.hosts, job.reason)
        for job in picture.jobs
    ]  # fmt: skip
    return table(("", "job", "owner", "name", "state", "GPUs", "for", "hosts", "reason"), rows)


def job_body(
    title: str, facts: Iterable[tuple[str, str]], curves: Sequence[Markup], log: Iterable[str], shown: str
) -> Markup:
    """Return one job: what is known of it, its curves, the end of its log.

    Args:
        log: lines, raw.
        shown: which part of the log this is.
    """
    listed = (markup(element("dt", name), element("dd", value)) for name, value in facts if value)
    drawn = (element("h2", "Metrics"), element("div", *curves, class_="curves")) if curves else ()
    return markup(
        ALL_JOBS, element("h1", title), element("dl", *listed), *drawn, element("h2", "Log"),
        element("p", shown, class_="dim"), element("pre", markup(*log, between="\n"), class_="log"),
    )  # fmt: skip


def job_link(job: str) -> Markup:
    """Return a job's id as a link to its page. Only gpurun's own ids become links."""
    return element("a", job, href=f"/job/{job}")


def _letter(job: JobRow, order: Sequence[str]) -> Markup | str:
    return element("span", job.letter, class_=_class(f"job:{order.index(job.id)}")) if job.letter else ""


def _line(line: Line) -> Markup:
    return markup(*(element("span", said, class_=_class(mark)) if mark else said for said, mark in line))


def _class(mark: str) -> str:
    return f"j{int(mark[4:]) % len(JOB_COLOURS)}" if mark.startswith("job:") else mark
