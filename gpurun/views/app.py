"""The live screen. Only this module imports Textual."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import DataTable, Footer, Input, Log, Static, TabbedContent, TabPane

from gpurun.errors import GpurunError
from gpurun.views.rows import (
    HOST_COLUMNS,
    JOB_COLUMNS,
    QUEUE_COLUMNS,
    SORTS,
    Duration,
    Moment,
    TopRow,
    host_rows,
    job_rows,
    queue_rows,
    screen_summary,
    silent_hosts,
)

TICK_S = 1.0
FIGURES_EVERY_S = 10.0
"""The screen updates numbers and times at this interval; states, reasons and silent hosts immediately."""
COLUMNS = {"jobs": JOB_COLUMNS, "queue": QUEUE_COLUMNS, "hosts": HOST_COLUMNS}
STYLES = {
    "RUNNING": "green", "QUEUED": "yellow", "FAILED": "red", "TIMED_OUT": "red", "no answer": "red", "lost": "red",
    "out": "red", "cordoned": "yellow", "SUCCEEDED": "dim", "CANCELLED": "dim",
}  # fmt: skip


W = TypeVar("W", bound=Widget)


class MomentSource(Protocol):
    """The source of moments and logs: a `gpurun.views.feed.Feed`."""

    def latest(self) -> Moment:
        """Return the present state."""
        ...

    def hurry(self) -> None:
        """Read again immediately."""
        ...

    def log(self, job: str) -> list[str]:
        """Return the last lines of a job's log."""
        ...

    def log_stamp(self, job: str) -> object:
        """Return a value that changes when the job's log changes."""
        ...


@dataclass(frozen=True)
class Actions:
    """The actions of keys; each returns a message, or raises GpurunError. An action may take seconds."""

    cancel: Callable[[str], str]
    cordon: Callable[[str], str]


class Question(ModalScreen[bool]):
    """Asks before an action. `y` is yes; `n` and Escape are no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"), Binding("n,escape,q", "answer(False)", "no")
    ]  # fmt: skip
    DEFAULT_CSS = (
        "Question{align:center middle} Question Static{width:auto;max-width:90%;padding:1 3;border:thick $warning;"
        "background:$surface}"
    )

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Return the question."""
        yield Static(Text(f"{self._text}\n\ny yes   n no"))

    def action_answer(self, answer: bool) -> None:
        """Close with the answer."""
        self.dismiss(answer)


class TopApp(App[None]):
    """Jobs, queue and hosts as tables, with the log of the selected job below them."""

    TITLE = "gpurun top"
    ENABLE_COMMAND_PALETTE = False
    CSS = (
        "#summary{height:auto;padding:0 1;text-style:bold} TabbedContent{height:2fr;min-height:6} DataTable{height:1fr}"
        "#logs{height:1fr;min-height:3;border-top:solid $primary} #filter{display:none;height:3}"
        "#filter.shown{display:block}"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "show('jobs')", "jobs"), Binding("2", "show('queue')", "queue"),
        Binding("3", "show('hosts')", "hosts"), Binding("f", "follow", "follow log"),
        Binding("c", "cancel", "cancel job"), Binding("o", "cordon", "cordon host"),
        Binding("s", "sort", "sort"), Binding("slash", "filter", "filter", key_display="/"),
        Binding("escape", "clear", "clear filter", show=False), Binding("q", "quit", "quit"),
    ]  # fmt: skip

    def __init__(self, source: MomentSource, actions: Actions, duration: Duration) -> None:
        super().__init__()
        self.animation_level = "none"
        self._source, self._actions, self._duration = source, actions, duration
        self._sort, self._wanted, self._follows = SORTS[0], "", True
        self._shown: dict[str, list[TopRow]] = {}
        self._log_of: tuple[str, object] | None = None
        self._moment: Moment | None = None
        self._drawn_s = 0.0

    def compose(self) -> ComposeResult:
        """Return the widgets of the screen."""
        yield Static(id="summary", markup=False)
        with TabbedContent(initial="jobs"):
            for name in COLUMNS:
                with TabPane(name, id=name):
                    yield DataTable(id=f"table-{name}", cursor_type="row")
        with Vertical(id="logs"):
            yield Log(id="log", max_lines=2000)
        yield Input(id="filter", placeholder="show only lines with this text; Enter keeps it, Escape shows all")
        yield Footer()

    def on_mount(self) -> None:
        """Fill the tables, and refresh them every second."""
        for name, columns in COLUMNS.items():
            table = self._table(name)
            for column in columns:
                table.add_column(column, key=column or "letter")
        self._table("jobs").focus()
        self.refresh_all()
        self.set_interval(TICK_S, self.refresh_all)

    def _find(self, selector: str, kind: type[W]) -> W:
        """Return a widget of the main screen, even while a question covers it."""
        return self.screen_stack[0].query_one(selector, kind)

    # -- drawing ------------------------------------------------------------------------------------------

    def refresh_all(self) -> None:
        """Show changes. Draws only the visible table."""
        if not self.screen_stack or not self.screen_stack[0].query("#summary"):  # the app is ending
            return
        moment, now_s = self._source.latest(), time.monotonic()
        if self._moment is None or (
            moment != self._moment
            and (now_s - self._drawn_s >= FIGURES_EVERY_S or _states(moment) != _states(self._moment))
        ):
            self._moment, self._drawn_s = moment, now_s
            text = (
                screen_summary(moment)
                + (f" · only {self._wanted!r}" if self._wanted else "")
                + f" · sorted by {self._sort}"
            )
            self._find("#summary", Static).update(text)
            self._draw(moment)
        self._draw_log()

    def _draw(self, moment: Moment) -> None:
        name = self._active()
        if name == "jobs":
            rows = job_rows(moment, self._duration, sort=self._sort, wanted=self._wanted)
        elif name == "queue":
            rows = queue_rows(moment, self._duration, wanted=self._wanted)
        else:
            rows = host_rows(moment, wanted=self._wanted)
        self._put(name, rows)

    def _put(self, name: str, rows: list[TopRow]) -> None:
        """Update the visible cells that differ. Fills the table again only if rows appear, disappear or move."""
        table, before = self._table(name), self._shown.get(name, [])
        columns = [column or "letter" for column in COLUMNS[name]]
        if [row.key for row in before] == [row.key for row in rows]:
            first = max(0, int(table.scroll_y) - 1)
            seen = slice(first, first + table.size.height + 2)
            self._shown[name] = [*before[:first], *rows[seen], *before[seen.stop :]]
            for old, new in zip(before[seen], rows[seen], strict=True):
                for column, was, now in zip(columns, old.cells, new.cells, strict=True):
                    if was != now:
                        table.update_cell(new.key, column, _cell(now), update_width=len(now) > len(was))
            return
        self._shown[name] = rows
        selected = self._selected(name, before)
        table.clear()
        for row in rows:
            table.add_row(*map(_cell, row.cells), key=row.key)
        keys = [row.key for row in rows]
        if selected in keys:
            table.move_cursor(row=keys.index(selected))

    def _draw_log(self) -> None:
        """Show the log of the selected job, if it has changed."""
        job = self._job()
        if job is None or (not self._follows and self._log_of is not None and self._log_of[0] == job):
            return
        stamp = self._source.log_stamp(job)
        if (job, stamp) == self._log_of:
            return
        self._log_of = (job, stamp)
        log = self._find("#log", Log)
        log.border_title = f"log of {job}"
        log.clear()
        log.write_lines(self._source.log(job) or ["nothing printed yet"])
        log.scroll_end(animate=False)

    # -- what is selected ---------------------------------------------------------------------------------

    def _active(self) -> str:
        return self._find("TabbedContent", TabbedContent).active or "jobs"

    def _table(self, name: str) -> DataTable[Text]:
        return self._find(f"#table-{name}", DataTable)

    def _selected(self, name: str, rows: Sequence[TopRow]) -> str | None:
        at = self._table(name).cursor_row
        return rows[at].key if 0 <= at < len(rows) else None

    def _job(self) -> str | None:
        name = self._active()
        return self._selected(name, self._shown.get(name, [])) if name != "hosts" else self._log_of and self._log_of[0]

    # -- keys ---------------------------------------------------------------------------------------------

    def action_show(self, name: str) -> None:
        """Switch to a table."""
        self._find("TabbedContent", TabbedContent).active = name

    def on_tabbed_content_tab_activated(self) -> None:
        """Draw the table that has become visible."""
        self._moment = None
        self._table(self._active()).focus()
        self.refresh_all()

    def on_data_table_row_highlighted(self) -> None:
        """Show the log of the newly selected job."""
        if self.screen_stack and self.screen_stack[0].query("#log"):
            if self._moment is not None:  # rows outside the screen may be outdated
                self._draw(self._moment)
            self._draw_log()

    def action_follow(self) -> None:
        """Stop or continue to show new lines of the log."""
        self._follows = not self._follows
        self.notify("the log follows the job" if self._follows else "the log is paused; press f to continue")

    def action_sort(self) -> None:
        """Sort jobs by the next column."""
        self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        self._moment = None
        self.refresh_all()

    def action_filter(self) -> None:
        """Ask for a filter text."""
        field = self._find("#filter", Input)
        field.add_class("shown")
        field.focus()

    def action_clear(self) -> None:
        """Show all lines again."""
        self._set_filter("")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        self._set_filter(event.value)

    def _set_filter(self, text: str) -> None:
        field = self._find("#filter", Input)
        field.value = text
        field.remove_class("shown")
        self._wanted, self._moment = text, None
        self._table(self._active()).focus()
        self.refresh_all()

    def action_cancel(self) -> None:
        """Cancel the selected job, after a question."""
        name = self._active()
        job = None if name == "hosts" else self._selected(name, self._shown.get(name, []))
        if job is None:
            self.notify("select a job in the jobs or queue table first", severity="warning")
            return
        self._ask(f"Cancel {job}? Its ranks get SIGTERM and their grace period.", self._actions.cancel, job)

    def action_cordon(self) -> None:
        """Cordon the selected host, or remove its cordon, after a question."""
        host = self._selected("hosts", self._shown.get("hosts", [])) if self._active() == "hosts" else None
        if host is None:
            self.notify("select a host in the hosts table first (key 3)", severity="warning")
            return
        self._ask(f"Cordon {host}, or remove its cordon?", self._actions.cordon, host)

    def _ask(self, question: str, action: Callable[[str], str], about: str) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._do(action, about)

        self.push_screen(Question(question), answered)

    @work(thread=True)
    def _do(self, action: Callable[[str], str], about: str) -> None:
        try:
            said, severity = action(about), "information"
        except GpurunError as error:
            said, severity = f"{error}" + (f"\n→ {error.hint}" if error.hint else ""), "error"
        self._source.hurry()
        self.call_from_thread(self.notify, said, severity=severity, markup=False, timeout=10)


def _states(moment: Moment) -> object:
    """Return the values whose change the screen shows immediately."""
    jobs = [(job.id, job.state, job.reason) for job in moment.picture.jobs]
    queue = [(job.job, job.position) for job in moment.queue]
    hosts = [(host.cells, host.shown, host.out and host.out.reason) for host in moment.picture.hosts]
    return jobs, queue, hosts, silent_hosts(moment), moment.problems


def _cell(text: str) -> Text:
    """Return a cell without markup, whatever the job's name contains."""
    return Text(text, style=STYLES.get(text, ""), no_wrap=True)
