"""``gpurun audit``: who did what in a state directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gpurun.cli.options import JsonOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.quantities.local_time import UNKNOWN, date_time

HOST = re.compile(r"[A-Za-z][A-Za-z0-9.-]*")
COMMON = ("time_s", "what", "user", "uid", "sudo_user", "host", "pid", "command", "job")


def audit(
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            "-j",
            metavar="JOB",
            help="Show only entries of this job. JOB is the job's id or the beginning of the id.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which users submitted, granted, preempted or cancelled jobs, cordoned hosts, or changed the inventory."""
    from gpurun.state.audit import read
    from gpurun.state.home import home

    entries = [entry for entry in read(home(os.environ)) if job is None or _is_about(entry, job)]
    if as_json:
        print_json({"entries": entries})
        return
    for entry in entries:
        typer.echo(printable(_line(entry)))
    if not entries:
        say("no entry of the audit log matches")


def _is_about(entry: Mapping[str, Any], job: str) -> bool:
    about = entry.get("job")
    return isinstance(about, str) and bool(job) and about.startswith((job, f"j-{job}"))


def _line(entry: Mapping[str, Any]) -> str:
    try:
        when = date_time(float(entry["time_s"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        when = UNKNOWN
    behind = f"{entry['sudo_user']} as " if entry.get("sudo_user") else ""
    rest = " ".join(f"{key}={_text(value)}" for key, value in entry.items() if key not in COMMON and value != "")
    who = f"{behind}{entry.get('user', '?')}"
    return f"{when:23}  {who:12} {entry.get('what', '?')!s:10} {entry.get('job') or '':10}  {rest}".rstrip()


def _text(value: object) -> str:
    """Return a field as text. Folds a list only if all its words look like host names: the log may be damaged."""
    if not isinstance(value, list):
        return str(value)
    words = [str(each) for each in value]
    if words and all(HOST.fullmatch(word) for word in words):
        from gpurun.inventory.hostset import fold

        return fold(words)
    return ",".join(words)
