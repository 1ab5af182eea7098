"""``gpurun follow | events``, ``submit --follow``: a job's events and its ranks' output, live, until the job ends."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypedDict

import typer

from gpurun.cli.jobs import LOOK_S
from gpurun.cli.options import JobArgument
from gpurun.cli.printing import SubmittedShape, job_json, print_json, say
from gpurun.cli.shares import going_out
from gpurun.cli.stores import find_job
from gpurun.documents.plain import printable, printed
from gpurun.errors import GpurunError
from gpurun.head.caretaker import Caretaker
from gpurun.jobs.events import EventTail, Sent, read_sent
from gpurun.jobs.record import ENDED, State
from gpurun.moments import UNKNOWN, date_time
from gpurun.quantities import duration, plural, size_text
from gpurun.state.paths import myself
from gpurun.supervisor.lines import LoggedLine, LogTail

if TYPE_CHECKING:
    from gpurun.cli.tables import ShipProgress
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord


# A job's events in words, for ``gpurun events`` and ``gpurun follow``.


def event_text(event: Mapping[str, Any]) -> str:
    """Describe an event in one line. Its words are raw: hosts and ranks have written some of them."""
    kind = event.get("kind")
    if (what := going_out(event)) is not None:
        return f"{event.get('host')}: {what} {event.get('state')}{_size_of(event)}{because(event, 'message')}"
    if kind == "placement":
        with suppress(KeyError, TypeError, ValueError):  # a damaged line
            return placement_text(event)
    if kind == "state":
        attempt = f" (attempt {event['attempt']})" if event.get("attempt") else ""
        return f"{event.get('state')}{attempt}{because(event)}"
    if kind == "host":
        return f"{event.get('host')}: {event.get('state')}{because(event)}"
    if kind == "notify":
        done = "sent" if event.get("sent") else "could not send"
        return f"{done} the message {event.get('event')!r} to {event.get('to')}{because(event)}"
    return str(event.get("text") or kind)


def placement_text(event: Mapping[str, Any]) -> str:
    """Describe in one line where a gang runs, and why there."""
    from gpurun.inventory.folding import fold

    hosts = event["hosts"]
    gpus = sum(len(host["gpus"]) for host in hosts)
    each = sorted({len(host["gpus"]) for host in hosts})
    counts = "/".join(str(count) for count in each)
    racks = event["racks"]
    spread = f"one rack, {racks[0]}" if len(racks) == 1 else f"{len(racks)} racks, {fold(racks)}"
    what = plural(gpus, "GPU")
    return (
        f"{gpus} {event['generation']} {what} on {fold(host['host'] for host in hosts)} ({counts} each): {spread}; "
        "gpurun chose the fewest racks, then the fewest hosts, then the tightest fit"
    )


def _size_of(event: Mapping[str, Any]) -> str:
    total = event.get("total")
    return f", {size_text(total)}" if isinstance(total, int) and total else ""


def because(event: Mapping[str, Any], key: str = "reason") -> str:
    """Return ``: `` and an event's reason; "" without one."""
    return f": {event[key]}" if event.get(key) else ""


# ``gpurun events``: what has happened to a job, with times.


def events(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on each line.")] = False,
) -> None:
    """Print a job's events, the oldest first. Events are changes of state, hosts, transfers and problems.

    gpurun events @last
    """
    folder = find_job(job)
    tail, caretaker = EventTail(folder.events), Caretaker()
    while True:
        is_over = folder.record().state.ended
        for event in tail.new():
            sys.stdout.write(_json(event) if as_json else f"{_when(event)}  {printable(event_text(event))}\n")
        sys.stdout.flush()
        if is_over or not follow:
            return
        caretaker.look([folder])
        time.sleep(LOOK_S)


def _time_s(event: Mapping[str, Any]) -> float | None:
    time_s = event.get("t")
    return time_s if isinstance(time_s, int | float) and math.isfinite(time_s) else None


def _when(event: Mapping[str, Any]) -> str:
    time_s = _time_s(event)
    return UNKNOWN if time_s is None else date_time(time_s)


class EventShape(TypedDict):
    """One event of a job. The command prints one such object a line.

    Attributes:
        time_s: seconds since 1970; null: the event's time is damaged.
        kind: `state`, `placement`, `host`, `note`, `notify`, or what goes to hosts: `ship`, `stage`, `workdir`.
        text: the event in one line, for people.
        details: what this kind of event says, such as `host`, `state`, `reason` or `attempt`.
    """

    time_s: float | None
    kind: str
    text: str
    details: dict[str, Any]


def _json(event: Mapping[str, Any]) -> str:
    details = {name: value for name, value in event.items() if name not in ("t", "kind")}
    told = EventShape(time_s=_time_s(event), kind=str(event.get("kind")), text=event_text(event), details=details)
    return json.dumps(told) + "\n"


POLL_S = 0.05
WHY_AFTER_S = 1.0  # a job that starts immediately does not report that it waits
WHY_EVERY_S = 10.0
INTERRUPTED = 130
FIRST_LINES = 100


def follow_job(
    folder: JobFolder, *, print_id: bool = False, lines_to_stderr: bool = False, cancel_on_interrupt: bool = False,
    first_lines: int | None = None,
) -> int:  # fmt: skip
    """Show a job until it ends.

    Args:
        print_id: print the job's id first. From then on, Ctrl-C has the effect of `cancel_on_interrupt`.
        lines_to_stderr: write the ranks' lines to stderr, so that stdout has only one JSON document.
        first_lines: begin with this many of the lines that ranks have already printed; None = all.
        cancel_on_interrupt: the first Ctrl-C cancels the job and waits for its end; the second stops waiting.

    Returns:
        The exit code: the job's outcome, or 130 when interrupted.
    """
    view = _JobView(folder, sys.stderr if lines_to_stderr else sys.stdout)
    if first_lines is not None:
        view.log.skip_to_last(first_lines, lambda _: True)
    interrupted = False
    while True:
        try:
            if print_id:
                print_id = False
                typer.echo(folder.id)
            if view.show_until_ended():
                return INTERRUPTED if interrupted else int(folder.record().code or 0)
        except KeyboardInterrupt:
            view.close()
            if interrupted or not cancel_on_interrupt:
                goes_on = "is being cancelled" if interrupted else "continues"
                say(f"\n{folder.id} {goes_on}; `gpurun status {folder.id}` shows the job")
                return INTERRUPTED
            interrupted = True
            say(f"\ncancelling {folder.id}; a second Ctrl-C ends this view, and gpurun still cancels the job")
            cancel_job(folder, reason="Ctrl-C")


def follow_new(folder: JobFolder, *, as_json: bool) -> NoReturn:
    """Show a job that was just submitted until it ends, and exit with its exit code. Ctrl-C cancels it.

    Args:
        as_json: stdout gets the job as it ended, and nothing else.
    """
    code = follow_job(folder, print_id=not as_json, lines_to_stderr=as_json, cancel_on_interrupt=True)
    if as_json:
        print_json(SubmittedShape(job=job_json(folder.record())))
    raise typer.Exit(code)


def follow(
    job: JobArgument,
    tail: Annotated[
        int,
        typer.Option(
            "--tail", "-n", min=0, metavar="LINES", help="Begin with the last LINES lines that ranks printed."
        ),
    ] = FIRST_LINES,
) -> None:
    """Show a job's states, hosts and output live until the job ends. gpurun exits with the job's exit code.

    Ctrl-C ends the view, and the job continues. In `gpurun submit --follow`, Ctrl-C cancels the job.

    gpurun follow @last --tail 20
    """
    from gpurun.cli.stores import find_job

    raise typer.Exit(follow_job(find_job(job), first_lines=tail))


def cancel_job(folder: JobFolder, *, reason: str) -> None:
    """Request a job's cancellation. If the job is only queued, cancel it immediately.

    Raises:
        NotYours: the job belongs to another user.
    """
    from gpurun.head.spawn import cancel, refuse_others

    refuse_others(folder)
    cancel(folder, by=myself(), reason=reason, environ=os.environ)


class _JobView:
    """Shows a job's new events and lines; remembers what it has shown."""

    def __init__(self, folder: JobFolder, lines: Any) -> None:
        self.folder = folder
        self.lines = lines
        self.events = EventTail(folder.events)
        self.log = LogTail(folder.log)
        self.started = time.monotonic()
        self.caretaker = Caretaker()
        self.progress: ShipProgress | None = None
        self.sent: Collection[Sent] = ()
        self.reason_shown = ""
        self.why_due_s = self.started + WHY_AFTER_S

    def show_until_ended(self) -> bool:
        """Show events and lines until the job has ended. Returns True then."""
        while True:
            record = self.folder.record()
            ended = record.state.ended
            if record.state is State.PREPARING:
                self._show_sent(record)
            for event in self.events.new():
                self._show_event(event)
            for line in self.log.new():
                self._show_line(line)
            if ended:
                self.close()
                self._show_end(self.folder.record())
                return True
            if record.state is State.QUEUED:
                self._show_why()
            self.caretaker.look([self.folder])
            time.sleep(POLL_S)

    def close(self) -> None:
        """Remove the progress bars from the terminal."""
        if self.progress is not None:
            self.progress.close()
            self.progress = None

    def _show_event(self, event: Mapping[str, Any]) -> None:
        kind = event.get("kind")
        if (what := going_out(event)) is not None:
            self._show_progress(what, event)
        elif kind == "state":
            self._say_state(event)
        elif kind in ("placement", "host", "note"):
            self._say(event_text(event))

    def _show_sent(self, record: JobRecord) -> None:
        """Show how far image and data are, of the hosts that are further than before."""
        sent = read_sent(self.folder, record.attempt)
        for each in sent:
            event = asdict(each)
            if each not in self.sent and (what := going_out(event)) is not None:
                self._show_progress(what, event)
        self.sent = frozenset(sent)

    def _show_why(self) -> None:
        """Show why the job waits, and show the reason again each time it changes."""
        if time.monotonic() < self.why_due_s:
            return
        from gpurun.views.waiting import why_it_waits

        with suppress(GpurunError):  # `status` and `recover` report damage
            why = why_it_waits(self.folder.path.home, self.folder.id)
            if why and why != self.reason_shown:
                self._say(f"waits: {why}")
                self.reason_shown = why
        self.why_due_s = time.monotonic() + WHY_EVERY_S

    def _show_progress(self, what: str, event: Mapping[str, Any]) -> None:
        if self.progress is None or self.progress.what != what:
            from gpurun.cli.tables import ShipProgress

            self.close()
            self.progress = ShipProgress(what)
        self.progress.show(event)

    def _say_state(self, event: Mapping[str, Any]) -> None:
        if event["state"] != "PREPARING":
            self.close()
        if State(event["state"]) not in ENDED:  # _show_end reports the end
            self._say(event["state"] + because(event))
            self.reason_shown = str(event.get("reason") or "")

    def _say(self, text: str) -> None:
        elapsed = duration(time.monotonic() - self.started)
        say(f"{elapsed:>6}  {printable(text)}")

    def _show_line(self, logged: LoggedLine) -> None:
        self.lines.write(f"{logged.who} {printed(logged.line.text)}\n")
        self.lines.flush()

    def _show_end(self, record: JobRecord) -> None:
        took = (record.ended_s or 0) - (record.started_s or record.submitted_s)
        reason = f": {record.reason}" if record.reason and self.reason_shown != record.reason else ""
        self._say(f"{record.id} {record.state.value} after {duration(took)}{reason}")
        for text in record.first_failure.excerpt if record.first_failure else ():
            say(f"        | {printed(text)}")
        if self.folder.outputs.is_dir():
            self._say(f"outputs: {self.folder.outputs}")
