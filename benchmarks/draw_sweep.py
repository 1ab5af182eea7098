"""Draw the picture in docs/sweeps.md: a sweep of an invented function, with real search and early stops.

No host is needed: eight trials at a time report the function's values; Optuna chooses points and stops bad trials.

    python benchmarks/draw_sweep.py docs/sweeps.svg
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

from gpurun.jobs.spec import JobSpec
from gpurun.studies.search import Searcher
from gpurun.studies.sweep_pictures import curves, picture
from gpurun.studies.sweep_plan import SweepPlan, Wish
from gpurun.studies.trials import JournalEntry, Point, Trials

SPACE = {"lr": ("log:1e-5..1e-1",), "dropout": ("0.1..0.5",), "layers": ("2..8",), "optimizer": ("adam", "sgd")}
TRIALS, STEPS, AT_ONCE, STEP_S = 40, 27, 8, 4.0


def accuracy(point: Point, step: int) -> float:
    """Return a trial's reported value: best near lr=0.003 and with five layers."""
    top = 0.89 - 0.035 * (math.log10(float(point["lr"])) + 2.5) ** 2 - 0.004 * (float(point["layers"]) - 5) ** 2
    top -= 0.12 * abs(float(point["dropout"]) - 0.2) + (0.03 if point["optimizer"] == "sgd" else 0.0)
    return top * (1 - math.exp(-step / 4)) + 0.004 * math.sin(step * (1 + float(point["dropout"])))


def journal(plan: SweepPlan) -> Iterator[JournalEntry]:
    """Return the entries that a real sweep's journal would have."""
    searcher, now_s, asked = Searcher(plan), 0.0, 0
    running: dict[int, tuple[Point, int]] = {}
    while running or asked < plan.trials:
        while len(running) < AT_ONCE and asked < plan.trials:
            entry = JournalEntry("asked", now_s, asked, job=f"j-{asked:08x}", parameters=searcher.next_point(asked))
            searcher.take(entry)
            yield entry
            running[asked], asked = (entry.parameters, 0), asked + 1
        now_s += STEP_S
        for number, (point, step) in list(running.items()):
            told = JournalEntry("reported", now_s, number, step=step + 1, value=accuracy(point, step + 1))
            is_lost = searcher.take(told)
            yield told
            running[number] = point, step + 1
            if is_lost or step + 1 == STEPS:
                outcome = "pruned" if is_lost else "complete"
                ended = JournalEntry("ended", now_s, number, value=told.value, outcome=outcome)
                searcher.take(ended)
                yield ended
                del running[number]


def main() -> None:
    wish = Wish(space=SPACE, tpe=TRIALS, metric="accuracy:max", stop="asha:min=1,factor=3")
    plan = wish.plan(JobSpec(name="made-up", image="none", gpus=1, command=("train",)), "none", 0.0)
    entries = list(journal(plan))
    assert plan.metric is not None
    Path(sys.argv[1]).write_text(picture("s-4f1c9a02", plan, plan.metric, Trials(entries), curves(entries)))


if __name__ == "__main__":
    main()
