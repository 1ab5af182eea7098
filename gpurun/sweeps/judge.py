"""What the end of a trial's job means for the trial. Pure."""

from __future__ import annotations

from collections.abc import Collection

from gpurun.jobs.record import JobRecord
from gpurun.jobs.states import State
from gpurun.sweeps.plan import Metric
from gpurun.sweeps.trials import Outcome, Trial


def outcome_of(trial: Trial, record: JobRecord, metric: Metric | None, others: Collection[str] = ()
) -> tuple[Outcome, str]:  # fmt: skip
    """The outcome of a trial whose job has ended, and why.

    Args:
        others: names of other metrics that it reported.
    """
    if trial.stopping:
        return "pruned", trial.stopping
    if record.state is not State.SUCCEEDED:
        return "cancelled" if record.state is State.CANCELLED else "failed", record.reason
    if metric is None:
        return "complete", ""
    if trial.step is None:
        told = f"; it reported {', '.join(sorted(others))}" if others else ""
        return "failed", f"it ended with 0 and never reported {metric.name}{told}"
    if trial.value is None:
        return "failed", f"{metric.name} is not a number at step {trial.step}"
    return "complete", ""
