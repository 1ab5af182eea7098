"""Write a campaign's report: one HTML file that needs no network, and the same as JSON and CSV. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import msgspec

from gpurun.documents.plain import csv_text
from gpurun.markup import element, page, table
from gpurun.moments import date_minute
from gpurun.quantities import count
from gpurun.scaling.model import LinkRates, Sample
from gpurun.studies.campaign_pictures import CurvePoint, PredictedPoint, curve_of, svg_of
from gpurun.studies.campaign_plan import DONE, CampaignPlan, RefusedSize, RunRecord

COLUMNS = (
    "launcher", "gpus", "run", "outcome", "rate", "low", "high", "hosts", "racks", "gpu_hours", "step_s", "compute_s",
    "exchange_s", "fabric_bytes", "job", "placement", "reason",
)  # fmt: skip


class CampaignRowShape(TypedDict):
    """One campaign."""

    campaign: str
    created_s: float
    done: bool
    unit: str
    runs_in_all: int
    gpu_hours: float


class RunShape(TypedDict):
    """One run of a campaign.

    Attributes:
        run: the number of the repetition.
        rate: the median rate; null: not measured.
        windows: the rate in each window of the measurement.
        placement: GPU indices by host.
        sample: the run's data for the cost model; null: no data.
    """

    launcher: str
    gpus: int
    run: int
    outcome: str
    reason: str
    job: str
    rate: float | None
    low: float | None
    high: float | None
    windows: tuple[float, ...] | None
    hosts: int
    racks: int
    placement: dict[str, tuple[int, ...]]
    gpu_hours: float
    held_s: float
    metrics: Mapping[str, float]
    sample: Sample | None


class VersionsShape(TypedDict):
    """Versions of a campaign's software."""

    gpurun: str
    python: str
    commit: str


class CampaignShape(TypedDict):
    """A campaign, which measures how a recipe's rate grows with the number of GPUs.

    Attributes:
        unit: unit of the rate.
        predicted: the rates that the cost model predicts.
        refused: sizes that cannot run.
        settings: the settings of each job.
    """

    campaign: str
    created_s: float
    done: bool
    unit: str
    runs_in_all: int
    curve: Sequence[CurvePoint]
    predicted: Sequence[PredictedPoint]
    refused: tuple[RefusedSize, ...]
    runs: list[RunShape]
    gpu_hours: float
    settings: list[dict[str, Any]]
    rates_bit_per_s: LinkRates
    inventory: str
    repeat: int
    versions: VersionsShape
    head: str


@dataclass(frozen=True)
class CampaignReport:
    """The content of a campaign's report."""

    plan: CampaignPlan
    records: Sequence[RunRecord]
    predicted: Sequence[PredictedPoint] = ()

    @property
    def curve(self) -> list[CurvePoint]:
        """Return the points of the curve."""
        return curve_of(self.records, dict(self.plan.racks))

    @property
    def unit(self) -> str:
        """Return the unit of the rate: ``images/s`` for ``images_per_s``."""
        name = next((record.rate.name for record in self.records if record.rate is not None), self.plan.rate or "rate")
        return name.removesuffix("_per_s") + "/s" if name.endswith("_per_s") else name

    @property
    def is_done(self) -> bool:
        """Return whether every run was measured."""
        return sum(record.outcome in DONE for record in self.records) == self.plan.trials

    def row(self) -> CampaignRowShape:
        """Return the campaign for a list."""
        return {
            "campaign": self.plan.name, "created_s": self.plan.created_s, "done": self.is_done, "unit": self.unit,
            "runs_in_all": self.plan.trials,
            "gpu_hours": sum(record.gpu_hours for record in self.records),
        }  # fmt: skip

    def document(self) -> CampaignShape:
        """Return the JSON document for scripts."""
        plan, row = self.plan, self.row()
        return {
            "campaign": row["campaign"], "created_s": row["created_s"], "done": row["done"], "unit": row["unit"],
            "runs_in_all": row["runs_in_all"],
            "curve": self.curve, "predicted": self.predicted, "refused": plan.refused,
            "runs": [self._run(record) for record in self.records],
            "gpu_hours": row["gpu_hours"],
            "settings": [self._settings(spec) for spec in msgspec.to_builtins(plan.jobs)],
            "rates_bit_per_s": plan.rates, "inventory": plan.inventory, "repeat": plan.repeat,
            "versions": {"gpurun": plan.origin.gpurun, "python": plan.origin.python, "commit": plan.origin.commit},
            "head": plan.origin.head,
        }  # fmt: skip

    def _run(self, record: RunRecord) -> RunShape:
        rate = record.rate
        return {
            "launcher": record.launcher, "gpus": record.gpus, "run": record.number, "outcome": record.outcome,
            "reason": record.reason, "job": record.job, "rate": rate.value if rate else None,
            "low": rate.low if rate else None, "high": rate.high if rate else None,
            "windows": rate.windows if rate else None, "hosts": record.hosts,
            "racks": len({self.plan.racks.get(grant.host, "") for grant in record.grants}),
            "placement": {grant.host: grant.gpus for grant in record.grants}, "gpu_hours": record.gpu_hours,
            "held_s": record.held_s, "metrics": record.metrics, "sample": record.sample,
        }  # fmt: skip

    @staticmethod
    def _settings(spec: dict[str, Any]) -> dict[str, Any]:
        """Return the job's settings without the names of the user's own files."""
        left_out = ("name", "secret_files", "workdir")
        return {key: value for key, value in spec.items() if key not in left_out and value not in (None, "", [], {})}

    def csv(self) -> str:
        """Return one CSV line for each run."""
        rows = []
        for run in self.document()["runs"]:
            placed = " ".join(f"{host}:{'+'.join(map(str, gpus))}" for host, gpus in run["placement"].items())
            row = {**run["metrics"], **run, "placement": placed}
            rows.append([row.get(key) for key in COLUMNS])
        return csv_text(COLUMNS, rows)

    def html(self) -> str:
        """Return the HTML page."""
        told = self.document()
        began = date_minute(self.plan.created_s)
        runs = [
            [run["launcher"], run["gpus"], run["run"], run["outcome"], _number(run["rate"]), _number(run["low"]),
             _number(run["high"]), ", ".join(f"{h} {list(gpus)}" for h, gpus in run["placement"].items()),
             f"{run['gpu_hours']:.4f}", run["job"], run["reason"]]
            for run in told["runs"]
        ]  # fmt: skip
        parts = [
            element("h1", self.plan.name),
            element("p", f"Begun {began} on {told['head']}; {len(runs)} of {count(told['runs_in_all'], 'run')}; "
                         f"{told['gpu_hours']:.4f} GPU hours."),
            svg_of(self.plan.name, self.unit, self.curve, self.predicted),
            element("h2", "Curve"), table(CURVE_HEADS, map(curve_row, self.curve)),
        ]  # fmt: skip
        if self.predicted:
            rows = [tuple(map(_number, vars(each).values())) for each in self.predicted]
            parts += [element("h2", "Predicted"), table([each.name for each in fields(PredictedPoint)], rows)]
        if self.plan.refused:
            refused = [(each.launcher, each.gpus, each.reason) for each in self.plan.refused]
            parts += [element("h2", "Sizes that cannot run"), table(("launcher", "GPUs", "why"), refused)]
        heads = ("launcher", "GPUs", "run", "outcome", self.unit, "10th percentile", "90th", "placement", "GPU hours",
                 "job", "reason")  # fmt: skip
        settings = table(("what", "value"), self._facts(told))
        return page(
            self.plan.name, *parts, element("h2", "Runs"), table(heads, runs), element("h2", "Settings"), settings
        )

    def _facts(self, told: CampaignShape) -> Iterable[Sequence[object]]:
        yield from told["versions"].items()
        yield from ((f"link: {name}, bit/s", rate) for name, rate in vars(told["rates_bit_per_s"]).items() if rate)
        yield "inventory", told["inventory"]
        for settings in told["settings"]:
            shown = "; ".join(f"{key}: {value}" for key, value in settings.items() if key not in ("launcher", "gpus"))
            yield f"{settings['launcher']}, {count(settings['gpus'], 'GPU')}", shown


CURVE_HEADS = (
    "launcher", "GPUs", "hosts", "racks", "runs", "rate", "least", "most", "of linear", "of one host", "GPU hours",
    "step s", "compute s", "exchange s", "MB sent a step",
)  # fmt: skip


def curve_row(point: CurvePoint) -> list[str]:
    """Return a point's cells, for a table with the headings `CURVE_HEADS`."""
    shares = [f"{share:.1%}" if share is not None else "" for share in (point.efficiency, point.host_efficiency)]
    sent = None if point.fabric_bytes is None else point.fabric_bytes / 1e6
    return [
        point.launcher, str(point.gpus), str(point.hosts), str(point.racks), str(point.runs), _number(point.rate),
        _number(point.low), _number(point.high), *shares, f"{point.gpu_hours:.4f}", _number(point.step_s),
        _number(point.compute_s), _number(point.exchange_s), _number(sent),
    ]  # fmt: skip


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
