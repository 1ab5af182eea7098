"""Choose gang sizes from measured runs: ``submit --gpus auto:80%``, and the smaller gang that ``why`` suggests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpurun.cli.printing import duration, say
from gpurun.errors import BadInput, GpurunError, NeverFits
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.head.wish import Flags
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.recipe import Recipe
    from gpurun.jobs.spec import JobSpec
    from gpurun.scaling.choice import SmallerGang
    from gpurun.scaling.model import ScalingModel
    from gpurun.scheduler.explain import Explanation
    from gpurun.scheduler.model import Snapshot


def chosen_gpus(text: str, recipe: Recipe | None, inventory: Inventory, flags: Flags) -> str:
    """Return the value of ``--gpus``, with ``auto:80%`` replaced by a number of GPUs.

    Raises:
        BadInput: the value is malformed, no run was measured, or no size is efficient enough.
        NeverFits: the job does not fit even if all GPUs are free.
    """
    from gpurun.head.wish import spec_of
    from gpurun.scaling.choice import in_words, least_efficiency, most_gpus, sizes

    least = least_efficiency(text)
    if least is None:
        return text

    def spec_with(gpus: int) -> JobSpec:
        return spec_of(recipe, inventory, {**flags, "--gpus": ("gpus", str(gpus))})[0]

    tried = sizes(inventory)
    first = _first(spec_with, tried)
    model = _model(first, first.name if recipe is None else str(recipe.given["name"]), inventory)
    choice = most_gpus(model, inventory, least, spec_with, tried)
    say(f"--gpus {text}: {in_words(choice, least)}")
    return str(choice.prediction.ranks)


def _first(spec_with: Callable[[int], JobSpec], tried: Sequence[int]) -> JobSpec:
    """Return the job at the first of these sizes that is valid for it."""
    refusal: GpurunError = BadInput("the inventory has no GPUs")
    for gpus in tried:
        try:
            return spec_with(gpus)
        except (BadInput, NeverFits) as error:
            refusal = error
    raise refusal


def _model(spec: JobSpec, campaign: str, inventory: Inventory) -> ScalingModel:
    from gpurun.scaling.measured import campaign_samples
    from gpurun.state.home import home

    samples = campaign_samples(home(os.environ), campaign, spec.launcher)
    if not samples:
        raise BadInput(
            f"gpurun cannot choose the number of GPUs: "
            f"there is no measured run of {campaign!r} with launcher {spec.launcher}",
            hint="first measure some numbers of GPUs: gpurun scale RECIPE --gpus 1,2,4",
        )
    from gpurun.doctor.bench_history import read
    from gpurun.scaling.model import fit  # after all checks that can fail: this import is slow
    from gpurun.scaling.pairs import pair_figures

    links = [link for run in read(home(os.environ)) for link in run.links]
    return fit(samples, pair_figures(links, {host.name: host.rack for host in inventory.hosts}))


def smaller_gang_of(folder: JobFolder, snapshot: Snapshot, explanation: Explanation) -> SmallerGang | None:
    """Predict a smaller gang that would start now instead of the waiting gang. None if no prediction is possible."""
    from gpurun.scaling.choice import predicted, smaller_gang

    fewer = next((int(change.value) for change in explanation.changes if change.what == "gpus"), None)
    if fewer is None:
        return None
    try:
        spec = folder.spec()
        model = _model(spec, spec.name, snapshot.inventory)
        smaller = predicted(model, replace(spec, gpus=fewer, min_gpus=None), snapshot.inventory)
        whole = predicted(model, spec, snapshot.inventory)
    except GpurunError:  # no run was measured, or none on such links
        return None
    if smaller is None or whole is None:
        return None
    start_s = explanation.expected_start_s
    return smaller_gang(smaller, whole, start_s and max(0.0, start_s - snapshot.now_s), spec.time_limit_s)


def smaller_in_words(smaller: SmallerGang, gpus: int) -> str:
    """Describe a smaller gang in one sentence."""
    more = count(gpus, "GPU")
    text = f"{count(smaller.gpus, 'GPU')} would start now, and reach {smaller.rate:.0%} of the images/s of {more}"
    if smaller.is_sooner:
        return f"{text}; the job with fewer GPUs would end sooner"
    if smaller.sooner_below_s is None:
        return text
    need = count(gpus, "GPU needs", "GPUs need")
    below = duration(smaller.sooner_below_s)
    return f"{text}; the job with fewer GPUs would end sooner if {need} less than {below} for the job"
