"""Parse notification targets as people write them: ``mail:alice@example.com``, ``failure=slack:FILE``. Pure."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

NotifyKind = Literal["mail", "slack", "webhook", "command"]
NotifyEvent = Literal["start", "end", "failure", "preemption"]
KINDS: tuple[NotifyKind, ...] = get_args(NotifyKind)
EVENTS: tuple[NotifyEvent, ...] = get_args(NotifyEvent)
MOST_CHARS = 4096
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True)
class NotifyWish:
    """One target.

    Attributes:
        target: a mail address; a file that holds a URL; a URL without secrets; or a command line.
        on: events that gpurun reports to the target.
    """

    kind: NotifyKind
    target: str
    on: tuple[NotifyEvent, ...] = ("start", "end", "failure", "preemption")

    @property
    def is_file(self) -> bool:
        """Return whether `target` is a file that holds the URL."""
        return self.kind in ("slack", "webhook") and not is_url(self.target)


def is_url(text: str) -> bool:
    """Return whether a text looks like a URL."""
    return text.startswith(("http://", "https://"))


def checked_url(text: str) -> str:
    """Return a valid URL. The ValueError does not repeat the URL, which may be a secret."""
    if is_url(text) and text.isascii() and text.isprintable() and " " not in text:
        with suppress(ValueError):  # what urlsplit says repeats parts of the URL
            if urlsplit(text).hostname:
                return text
    raise ValueError("is not an http or https URL")


def notify_wish(text: str) -> NotifyWish:
    """Parse ``[EVENT,…=]KIND:TARGET``. Raises ValueError."""
    head, colon, target = text.partition(":")
    on, equals, kind = head.rpartition("=")
    events = tuple(on.split(",")) if equals else EVENTS
    found = next((each for each in KINDS if each == kind), None)
    if found is None or not colon or not target.strip() or len(text) > MOST_CHARS or not text.isprintable():
        raise ValueError
    if wrong := [event for event in events if event not in EVENTS]:
        raise ValueError(f"names an unknown event {wrong[0]!r}; the events are {', '.join(EVENTS)}")
    _check_target(found, target)
    return NotifyWish(found, target, tuple(event for event in EVENTS if event in events))


def _check_target(kind: NotifyKind, target: str) -> None:
    if kind == "mail" and not _ADDRESS.fullmatch(target):
        raise ValueError("has no plain mail address such as alice@example.com")
    if kind == "command":
        shlex.split(target)
    if kind == "slack" and is_url(target):
        raise ValueError(
            "must not have a Slack URL, because this URL is a secret: write the URL into a file, and give slack:FILE"
        )
    if kind == "webhook" and is_url(target):
        parts = urlsplit(checked_url(target))
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "must not have a URL with a user, password, query or fragment, which may be a secret: "
                "write the URL into a file, and give webhook:FILE"
            )
