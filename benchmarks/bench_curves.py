"""Measure scaling curves on the lab by `gpurun scale`; test the cost model on sizes and links it was not fitted to.

Ring (Horovod) against parameter servers (TensorFlow), one rank per host, then some sizes again on links of half the
rate. The networks are paced: they sleep instead of computing, because the lab's hosts share one machine's cores and
would slow each other down. Sending would, too: 8 hosts that send 1 Gbit/s each keep two cores busy. So links have
250 Mbit/s, and a step takes 4 times as long as on links of 1 Gbit/s. This keeps the ratio to a P100 with 25 Gbit/s
that the recipe's README.md describes. The model is fitted to 1, 2 and 4
hosts on the faster links, and predicts 8 hosts and the slower links.

    python benchmarks/bench_curves.py [--models vgg-like,resnet-like] [--sizes 1,2,4,8] [--repeat 1] [--to DIR]
    python benchmarks/bench_curves.py --models gpt2-tiny --sizes 1,2,4 --launchers horovod --steps 200

The second form trains a real network, whose ranks compete for the machine's cores: its curve shows them, too.
Needs root, Linux, Docker's packages and the image gpurun/train:tf2.15. Takes about forty minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpurun.lab import Lab, LabSpec
from gpurun.scaling.model import Sample, fit
from gpurun.studies.campaigns import campaign_samples

GPURUN = [sys.executable, "-m", "gpurun"]
RECIPE = Path(__file__).parent.parent / "recipes" / "synthetic-benchmark" / "ps.yaml"
LAUNCHERS = ("horovod", "tensorflow")
FAST, SLOW = "250mbit", "125mbit"
LINKS = {FAST: 250_000_000, SLOW: 125_000_000}
SLOWDOWN = 10.0
"""A tenth of the parameters over a hundredth of 25 Gbit/s."""
SEEN_RANKS = 4
AGAIN = "2,4"
"""Sizes that run again on the slower links."""


def scale(lab: Lab, name: str, model: str, sizes: str, link: str, options: argparse.Namespace) -> None:
    """Run one campaign. The output of `gpurun scale` goes to stderr."""
    subprocess.run(
        [
            *GPURUN, "scale", "run", str(RECIPE), "-i", str(lab.inventory), "--gpus", sizes,
            "--launcher", options.launchers, "--repeat", str(options.repeat), "--link", link, "--name", name,
            "--", "python3", "benchmark.py", "--model", model, "--steps", str(options.steps), "--warmup", "2",
            "--slowdown", str(SLOWDOWN),
        ],
        check=True, stdout=sys.stderr,
    )  # fmt: skip


def samples_of(home: Path, name: str) -> Iterator[Sample]:
    """Return all runs of a campaign."""
    for launcher in LAUNCHERS:
        yield from campaign_samples(home, name, launcher)


def show_curves(model: str, link: str, samples: Sequence[Sample]) -> None:
    """Print images/s by size, and efficiency relative to one rank of the same launcher."""
    print(f"{model}, links of {link}: images/s, of linear, bytes of gradients, seconds of exchange")
    for launcher in sorted({sample.launcher for sample in samples}):
        by_ranks: dict[int, list[Sample]] = {}
        for sample in samples:
            if sample.launcher == launcher:
                by_ranks.setdefault(sample.ranks, []).append(sample)
        least = min(by_ranks)
        one = statistics.median(sample.images_per_s for sample in by_ranks[least]) / least
        for ranks, runs in sorted(by_ranks.items()):
            rate = statistics.median(run.images_per_s for run in runs)
            moved = statistics.median(run.exchange_s or 0.0 for run in runs)
            print(
                f"  {launcher:10} {ranks:3} {rate:8.1f} {100 * rate / ranks / one:6.1f} %"
                f" {runs[0].gradient_bytes:11} {moved:7.3f}", flush=True,
            )  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A run outside the fit, with the model's prediction: images/s of all ranks."""

    model: str
    launcher: str
    ranks: int
    mbit_per_s: float
    measured: float
    expected: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.expected / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the run is within the predicted range."""
        return self.low <= self.measured <= self.high


def judge(home: Path, model: str) -> Iterator[Judged]:
    """Fit the model to small sizes on fast links; predict the other runs."""
    runs = [run for link in LINKS for run in samples_of(home, f"{model}-{link}")]
    for launcher in LAUNCHERS:
        own = [run for run in runs if run.launcher == launcher]
        if not own:
            continue
        seen = [run for run in own if run.ranks <= SEEN_RANKS and run.rates.rack == LINKS[FAST]]
        fitted = fit(seen)
        for run in own:
            if run not in seen:
                told = fitted.predict(run.shape).images_per_s
                yield Judged(
                    model, launcher, run.ranks, (run.rates.rack or 0.0) / 1e6, run.images_per_s, told.median,
                    told.low, told.high,
                )  # fmt: skip


def show_judged(found: Sequence[Judged]) -> None:
    """Print each run, and the totals with their goals."""
    for each in found:
        print(
            f"  {each.model:12} {each.launcher:10} {each.ranks:3} ranks, {each.mbit_per_s:.0f} Mbit/s: measured"
            f" {each.measured:7.1f}, expected {each.expected:7.1f} ({each.low:.1f} to {each.high:.1f}),"
            f" {100 * each.error:+.1f} %"
        )
    errors = sorted(abs(each.error) for each in found)
    inside = sum(each.is_inside for each in found) / len(found)
    print(f"{len(found)} unseen runs; goals: median 10 %, worst 20 %, inside 90 %")
    print(f"error: median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}; inside the range {inside:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vgg-like,resnet-like")
    parser.add_argument("--sizes", default="1,2,4,8")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--to", type=Path, help="keep the campaigns and their reports in this folder")
    options = parser.parse_args()
    largest = max(int(size) for size in options.sizes.split(","))
    models = options.models.split(",")
    lab = Lab("curves")
    lab.down(purge=True)
    with tempfile.TemporaryDirectory() as temporary:
        home = options.to or Path(temporary)
        os.environ["GPURUN_HOME"] = str(home)
        try:
            for link, rate in LINKS.items():
                lab.up(LabSpec(lab.name, racks=1, hosts=largest, gpus=1, host_link_bps=rate))
                for model in models:
                    sizes = options.sizes if link == FAST else AGAIN
                    scale(lab, f"{model}-{link}", model, sizes, link, options)
                    show_curves(model, link, list(samples_of(home, f"{model}-{link}")))
                lab.down()
        finally:
            lab.down(purge=True)
        show_judged([each for model in models for each in judge(home, model)])
        for name in [f"{model}-{link}" for model in models for link in LINKS] if options.to else []:
            subprocess.run([*GPURUN, "scale", "report", name, "--to", str(home)], check=True)


if __name__ == "__main__":
    main()
