"""What the end of a trial's job means for the trial. Pure."""

from __future__ import annotations

from collections.abc import Collection

from gpurun.jobs.record import JobRecord
from gpurun.jobs.states import State
from gpurun.sweeps.plan import Metric
from gpurun.sweeps.trials import Outcome, Trial


def is_silent(trial: Trial, record: JobRecord, metric: Metric | None) -> bool:
    """Return whether a trial's job succeeded without a report of the metric."""
    is_whole = record.state is State.SUCCEEDED and not trial.stopping
    return metric is not None and is_whole and trial.step is None


def why_all_would_fail(trial: Trial, reason: str, metric: Metric) -> str:
    """Say why a sweep stops at its first trial without the metric, and what the program must do."""
    name = metric.name
    given = f"{name}=…" if name.isidentifier() else f"**{{{name!r}: …}}"
    return (
        f"the sweep stopped itself, because each trial would fail like trial {trial.number}: {reason}. "
        f"Call gpurun.report(step, {given}) in the program, or name a metric that the program reports"
    )


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
    if is_silent(trial, record, metric):
        told = f"; the job reported {', '.join(sorted(others))}" if others else ""
        return "failed", f"the job ended with exit code 0 and never reported {metric.name}{told}"
    if trial.value is None:
        return "failed", f"{metric.name} is not a number at step {trial.step}"
    return "complete", ""
