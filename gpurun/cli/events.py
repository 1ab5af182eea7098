"""``gpurun events``: what has happened to a job, with times."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gpurun.cli.event_words import event_text
from gpurun.cli.jobs import POLL_S, find_job
from gpurun.cli.options import JobArgument
from gpurun.cli.printing import printable
from gpurun.head.caretaker import Caretaker
from gpurun.jobs.events import EventTail
from gpurun.quantities.local_time import UNKNOWN, date_time


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
        time.sleep(POLL_S)


def _time_s(event: Mapping[str, Any]) -> float | None:
    time_s = event.get("t")
    return time_s if isinstance(time_s, int | float) and math.isfinite(time_s) else None


def _when(event: Mapping[str, Any]) -> str:
    time_s = _time_s(event)
    return UNKNOWN if time_s is None else date_time(time_s)


def _json(event: Mapping[str, Any]) -> str:
    details = {name: value for name, value in event.items() if name not in ("t", "kind")}
    told = {"time_s": _time_s(event), "kind": str(event.get("kind")), "text": event_text(event), "details": details}
    return json.dumps(told) + "\n"
