"""Sends one message to one target: quickly, a few times, and without a word of what is secret in errors."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from gpurun.jobs.notify_wish import NotifyWish, checked_url
from gpurun.notify import message

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
    _post(_url(wish), message.slack(document))


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
    _run([program, "-i", "--", wish.target], message.mail(document, wish.target))


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
