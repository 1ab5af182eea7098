"""Printing for all commands: JSON to stdout, messages to stderr, colours only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

import typer

from gpurun.documents.plain import printable as printable  # noqa: PLC0414  for all commands
from gpurun.documents.plain import printed as printed  # noqa: PLC0414
from gpurun.quantities.counts import count
from gpurun.quantities.sizes import size_text as size_text  # noqa: PLC0414
from gpurun.quantities.times import duration as duration  # noqa: PLC0414

if TYPE_CHECKING:
    from gpurun.errors import GpurunError
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord


def print_json(document: object) -> None:
    """Print one JSON document on stdout, indented on a terminal."""
    sys.stdout.write(json.dumps(document, indent=2 if sys.stdout.isatty() else None, default=list) + "\n")
    sys.stdout.flush()


quiet = False
"""Set by ``gpurun --quiet``: `say` prints nothing."""


def say(text: str) -> None:
    """Print a message for people on stderr."""
    if not quiet:
        typer.echo(text, err=True)


def say_problem(problem: GpurunError) -> None:
    """Print an error and its hint. Escapes control characters: names of files and hosts in it are untrusted."""
    for line in f"gpurun: {problem}".split("\n"):
        typer.echo(printable(line), err=True)
    if problem.hint:
        for line in f"  → {problem.hint}".split("\n"):
            typer.echo(printable(line), err=True)


def wants_colour(stream: TextIO) -> bool:
    """Return whether to colour text: only on a terminal, and not with NO_COLOR (https://no-color.org) or TERM=dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def job_json(record: JobRecord) -> dict[str, Any]:
    """Return a job as ``status --json`` shows it, with the keys that scripts use most first."""
    failure = record.first_failure
    return {
        "id": record.id,
        "name": record.name,
        "state": record.state.value,
        "gpus": record.gpus,
        "hosts": [grant.host for grant in record.granted],
        "pool": record.pool,
        "priority": record.priority,
        "submitted_s": record.submitted_s,
        "started_s": record.started_s,
        "ended_s": record.ended_s,
        "exit_code": record.exit_code,
        "reason": record.reason,
        "owner": record.owner,
        "attempt": record.attempt,
        "restarts": record.restarts,
        "grants": [{"host": grant.host, "gpus": list(grant.gpus)} for grant in record.granted],
        "restart": None
        if record.restart is None
        else {"at_s": record.restart.at_s, "attempt": record.restart.attempt, "of": record.restart.of},
        "outputs_left": None
        if record.outputs_left is None
        else {
            "count": record.outputs_left.count,
            "first": list(record.outputs_left.first),
            "hosts": list(record.outputs_left.hosts),
        },
        "first_failure": None
        if failure is None
        else {
            "reason": failure.reason,
            "rank": failure.rank,
            "host": failure.host,
            "exit_code": failure.exit_code,
            "excerpt": list(failure.excerpt),
            "kind": failure.kind,
            "evidence": failure.evidence,
        },
    }


def ran_text(folder: JobFolder, record: JobRecord, now_s: float) -> str:
    """Format how long a job's attempt has run; without one that has begun to run, name the last one that did."""
    if record.started_s is not None:
        return duration((record.ended_s or now_s) - record.started_s)
    if record.granted and not record.state.ended:
        return "not yet"
    from gpurun.errors import StateError
    from gpurun.jobs.attempts import kept

    try:
        ran = [each.attempt for each, _ in kept(folder) if each.started_s is not None] if record.attempt else []
    except (FileNotFoundError, StateError):  # `gpurun prune` removed it, or it is damaged
        ran = []
    if ran:
        return f"not since attempt {ran[-1]}"
    tried = f", in {count(record.attempt, 'attempt')}" if record.attempt > 1 else ""
    return ("never" if record.state.ended else "not yet") + tried


def waited_s(record: JobRecord, now_s: float) -> float:
    """Return for how many seconds a job has waited, or waited before its last attempt, since it was last queued."""
    is_granted = record.granted_s is not None and record.granted_s >= record.queued_s
    until_s = record.granted_s if is_granted else record.ended_s or now_s
    return max(0.0, (until_s or now_s) - record.queued_s)
