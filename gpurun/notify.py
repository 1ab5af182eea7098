"""Messages to people and programs when a job starts, ends, fails, is preempted, is idle or has a slow rank."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from gpurun.documents.plain import printable
from gpurun.jobs.record import JobRecord
from gpurun.jobs.spec import Grant, JobSpec, NotifyEvent, NotifyWish, checked_url
from gpurun.quantities import count

# Messages about a job: one document for programs, one line for people. Pure.


MOST_REASON_CHARS = 1000
SUBJECT_CHARS = 150
_WORDS = {
    "start": "started", "preemption": "was preempted and waits again", "retry": "failed and starts again",
    "idle": "is idle", "slow": "has a slow rank",
}  # fmt: skip


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


# Sends one message to one target: quickly, a few times, and without a word of what is secret in errors.


TIMEOUT_S = 5.0
TRIES = 3
PAUSES_S = (1.0, 3.0)
MOST_URL_BYTES = 4096
SENDMAIL_FOLDERS = "/usr/sbin:/usr/lib:/usr/local/sbin:/usr/bin"


class NotSent(Exception):
    """A message did not arrive; the text says why, and holds no secret."""


def send(wish: NotifyWish, document: Mapping[str, Any], *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Tell one target, three times at most.

    Raises:
        NotSent: the last try failed.
    """
    for attempt in range(TRIES):
        try:
            _SENDERS[wish.kind](wish, document)
        except NotSent:
            if attempt == TRIES - 1:
                raise
            sleep(PAUSES_S[attempt])
        else:
            return


def _webhook(wish: NotifyWish, document: Mapping[str, Any]) -> None:
    _post(_url(wish), document)


def _slack(wish: NotifyWish, document: Mapping[str, Any]) -> None:
    _post(_url(wish), slack(document))


def _url(wish: NotifyWish) -> str:
    if not wish.is_file:
        return wish.target
    try:
        with Path(wish.target).open("rb") as file:
            text = file.read(MOST_URL_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise NotSent(f"gpurun cannot read the file with the URL, {wish.target}: {_why(error)}") from None
    try:
        return checked_url(text)
    except ValueError as error:
        raise NotSent(f"the text in {wish.target} {error}") from None


class _NoRedirect(HTTPRedirectHandler):
    """A redirect would send the message, and a token in its URL, elsewhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _post(url: str, document: Mapping[str, Any]) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "gpurun"}
    request = Request(url, json.dumps(document).encode(), headers, method="POST")  # noqa: S310 - checked_url
    try:
        with build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(1)
    except HTTPError as error:
        error.close()
        raise NotSent(f"the server answered {error.code}") from None
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise NotSent(f"the server cannot be reached: {_why(error)}") from None


def _why(error: Exception) -> str:
    """What went wrong, in words that cannot hold the URL."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLError):
        return (
            "the server's certificate is not valid"
            if isinstance(reason, ssl.SSLCertVerificationError)
            else "TLS failed"
        )
    if isinstance(reason, TimeoutError):
        return f"the server did not answer within {TIMEOUT_S:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__


def _mail(wish: NotifyWish, document: Mapping[str, Any]) -> None:
    program = shutil.which("sendmail", path=f"{os.environ.get('PATH', '')}:{SENDMAIL_FOLDERS}")
    if program is None:
        raise NotSent("this machine has no sendmail")
    _run([program, "-i", "--", wish.target], mail(document, wish.target))


def _command(wish: NotifyWish, document: Mapping[str, Any]) -> None:
    _run(shlex.split(wish.target), json.dumps(document).encode() + b"\n")


def _run(argv: list[str], data: bytes) -> None:
    name = Path(argv[0]).name
    try:
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                process.communicate(data, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise NotSent(f"{name} did not end within {TIMEOUT_S:g} s") from None
    except (OSError, ValueError) as error:
        raise NotSent(f"{name} cannot be run: {_why(error)}") from None
    if process.returncode:
        raise NotSent(f"{name} ended with exit code {process.returncode}")


_SENDERS = {"mail": _mail, "slack": _slack, "webhook": _webhook, "command": _command}
