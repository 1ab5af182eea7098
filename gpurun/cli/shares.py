"""Say what memory and cores a job may use on its hosts (`gpurun.launch.container`), and how far copies to them are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpurun.errors import StateError
from gpurun.inventory.folding import fold
from gpurun.jobs.events import Sent
from gpurun.launch.container import HostShare, alike
from gpurun.quantities import count, duration, size_text

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder


# Progress of a job's image, data sets and workdir to hosts.


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


@dataclass(frozen=True)
class _Host:
    host: str = ""
    share: HostShare | None = None


@dataclass(frozen=True)
class _Planned:
    """The parts of ``plan.json`` that are shown."""

    hosts: tuple[_Host, ...] = ()


def shares_of(folder: JobFolder) -> dict[str, HostShare]:
    """Return host → share in the plan of the job's last attempt; empty if no attempt has come so far."""
    from gpurun.state import durable

    try:
        planned = durable.read_record(folder.path / "plan.json", _Planned)
    except (FileNotFoundError, StateError):
        return {}
    return {each.host: each.share for each in planned.hosts if each.share is not None}


def lines(given: Mapping[str, HostShare]) -> list[str]:
    """Return a line for each different share, with its hosts."""
    return [f"{fold(hosts)}: {words}" for words, hosts in alike(given).items()]
