"""A job's events in words, for ``gpurun events`` and ``gpurun follow``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gpurun.cli.printing import size_text
from gpurun.cli.sending import going_out
from gpurun.quantities.counts import plural


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
    from gpurun.inventory.hostset import fold

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
