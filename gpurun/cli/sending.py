"""Progress of a job's image and data sets to hosts, read from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpurun.cli.printing import duration, size_text


def going_out(event: Mapping[str, Any]) -> str | None:
    """Return what an event reports progress of: the image or a data set; None for other events."""
    return {"ship": "image", "stage": f"data {event.get('data')}"}.get(str(event.get("kind")))


def sending(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe the progress of the image and each data set since the job's last change of state."""
    last: dict[str, dict[str, Mapping[str, Any]]] = {}
    for event in events:
        if event.get("kind") == "state":
            last.clear()
        elif (what := going_out(event)) is not None:
            last.setdefault(what, {})[str(event.get("host"))] = event
    return [_told(what, list(by_host.values())) for what, by_host in last.items()]


def _told(what: str, events: list[Mapping[str, Any]]) -> str:
    done, total = (sum(int(event.get(key) or 0) for event in events) for key in ("bytes", "total"))
    left_s = max(float(event.get("eta_s") or 0) for event in events)
    left = f", {duration(left_s)} left" if left_s else ""
    return f"{what}: {size_text(done)} of {size_text(total)} on {len(events)} hosts{left}"
