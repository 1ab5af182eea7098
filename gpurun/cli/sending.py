"""Progress of a job's image, data sets and workdir to hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gpurun.cli.printing import duration, size_text
from gpurun.jobs.sending import Sent
from gpurun.quantities.counts import count


def going_out(event: Mapping[str, Any]) -> str | None:
    """Return what an event reports progress of: the image, a data set or the workdir; None for other events."""
    return {"ship": "image", "workdir": "workdir", "stage": f"data {event.get('data')}"}.get(str(event.get("kind")))


def sending(sent: Iterable[Sent]) -> list[str]:
    """Describe the progress of the image, each data set and the workdir."""
    by_what: dict[str, list[Sent]] = {}
    for each in sent:
        if (what := going_out(asdict(each))) is not None:
            by_what.setdefault(what, []).append(each)
    return [_told(what, found) for what, found in by_what.items()]


def _told(what: str, sent: list[Sent]) -> str:
    done, total = sum(each.bytes for each in sent), sum(each.total for each in sent)
    left_s = max(each.eta_s or 0.0 for each in sent)
    left = f", {duration(left_s)} left" if left_s else ""
    return f"{what}: {size_text(done)} of {size_text(total)} on {count(len(sent), 'host')}{left}"
