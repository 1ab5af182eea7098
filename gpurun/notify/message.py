"""Messages about a job: one document for programs, one line for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from email.message import EmailMessage
from typing import Any

from gpurun.documents.plain import printable
from gpurun.jobs.notify_wish import NotifyEvent
from gpurun.jobs.record import JobRecord
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.quantities.counts import count

MOST_REASON_CHARS = 1000
SUBJECT_CHARS = 150
_WORDS = {"start": "started", "preemption": "was preempted and waits again", "retry": "failed and starts again"}


def payload(
    events: tuple[NotifyEvent, ...], record: JobRecord, spec: JobSpec, grants: tuple[Grant, ...], *, head: str,
    now_s: float,
) -> dict[str, Any]:  # fmt: skip
    """The document that commands and webhooks get. Its keys stay.

    Args:
        events: what has happened; the first is the document's ``event``.
        grants: the GPUs of the attempt.
        head: the name of this machine.
    """
    failure = record.first_failure
    return {
        "event": events[0],
        "job": record.id,
        "name": record.name,
        "state": record.state.value,
        "attempt": record.attempt,
        "owner": record.owner,
        "pool": record.pool,
        "project": spec.project,
        "gpus": sum(len(grant.gpus) for grant in grants),
        "hosts": [grant.host for grant in grants],
        "reason": record.reason[:MOST_REASON_CHARS],
        "exit_code": record.exit_code,
        "failed_rank": failure.rank if failure else None,
        "failed_host": failure.host if failure else None,
        "submitted_s": record.submitted_s,
        "started_s": record.started_s,
        "ended_s": record.ended_s,
        "time_s": now_s,
        "head": head,
        "text": _sentence(events, record, grants),
    }


def _sentence(events: tuple[NotifyEvent, ...], record: JobRecord, grants: tuple[Grant, ...]) -> str:
    what = _WORDS.get(events[0]) or ("failed" if "failure" in events else "ended")
    if "failure" in events and not record.state.ended:
        what = _WORDS["retry"]
    elif "end" in events:
        what = {"SUCCEEDED": "succeeded", "TIMED_OUT": "reached its time limit", "CANCELLED": "was cancelled"}.get(
            record.state.value, "failed"
        )
    gpus = sum(len(grant.gpus) for grant in grants)
    where = f" on {count(len(grants), 'host')}" if grants else ""
    reason = f": {record.reason[:MOST_REASON_CHARS]}" if record.reason and events[0] != "start" else ""
    return _one_line(f"gpurun job {record.id} ({record.name}), {count(gpus, 'GPU')}{where}, {what}{reason}")


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def slack(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document that Slack's incoming webhooks take. Nothing in it is markup, and it mentions nobody.

    Source: "Formatting text for app surfaces", api.slack.com: ``&``, ``<`` and ``>`` are the only characters to escape.
    """
    text = document["text"].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": text, "mrkdwn": False, "link_names": False, "unfurl_links": False}


def mail(document: Mapping[str, Any], address: str) -> bytes:
    """A mail. Text of a job cannot add a header or another receiver."""
    message = EmailMessage()
    message["To"] = address
    # Python decodes an encoded word (RFC 2047) in a subject, and a newline in one would begin another header.
    message["Subject"] = document["text"][:SUBJECT_CHARS].replace("=?", "= ?")
    message["Auto-Submitted"] = "auto-generated"  # RFC 3834: no vacation answers
    lines = [document["text"], ""]
    lines += [
        f"{key}: {_shown(value)}" for key, value in document.items() if key != "text" and value not in (None, "", [])
    ]
    message.set_content("\n".join(lines))
    return message.as_bytes()


def _shown(value: object) -> str:
    return _one_line(", ".join(map(str, value)) if isinstance(value, list) else str(value))
