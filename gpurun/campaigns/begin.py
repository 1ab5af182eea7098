"""Begin a campaign: make a job for each size of each launcher, and store the campaign or find an earlier one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpurun.campaigns.plan import CampaignPlan, RefusedSize, check_name, given_for
from gpurun.campaigns.store import CampaignFolder, CampaignStore
from gpurun.errors import BadInput, GpurunError
from gpurun.head.origin import origin_of
from gpurun.head.submission import pin
from gpurun.head.wish import Flags, spec_of
from gpurun.inventory.model import Inventory
from gpurun.jobs.recipe import Recipe
from gpurun.jobs.spec import DEFAULT_LAUNCHER, JobSpec
from gpurun.launch.launchers import launcher_of
from gpurun.scaling.shape import LinkRates
from gpurun.state import audit
from gpurun.state.shared import enter


def plan_of(
    recipe: Recipe | None, inventory: Inventory, flags: Flags, *, sizes: Sequence[int], launchers: Sequence[str],
    repeat: int, rate: str | None, rates: LinkRates, name: str | None, told: Callable[[str], None] = lambda _text: None,
) -> CampaignPlan:  # fmt: skip
    """Plan a campaign. Stores nothing.

    Args:
        flags: as for `gpurun.head.wish.spec_of`, without the GPUs and the launcher.
        launchers: empty = the recipe's launcher.
        name: None = the recipe's name.
        told: gets each line about how gpurun read the command, once.

    Raises:
        BadInput, NeverFits: no size can run; or something is wrong with the recipe or a flag.
    """
    jobs: list[JobSpec] = []
    refused: list[RefusedSize] = []
    errors: list[GpurunError] = []
    said = dict[str, None]()
    for launcher in launchers or (None,):
        for gpus in sizes:
            try:
                spec, lines = _job(recipe, inventory, flags, launcher, gpus)
                jobs.append(spec)
                said |= dict.fromkeys(lines)
            except GpurunError as error:
                errors.append(error)
                refused.append(RefusedSize(launcher or "", gpus, error.message, error.exit_code))
    if not jobs:
        raise errors[0]
    for text in said:
        told(text)
    chosen = name or jobs[0].name
    check_name(chosen)
    racks = {host.name: host.rack for host in inventory.hosts}
    return CampaignPlan(chosen, tuple(jobs), inventory.source, repeat, time.time(), tuple(refused), rate, rates, racks)


def _job(
    recipe: Recipe | None, inventory: Inventory, flags: Flags, launcher: str | None, gpus: int
) -> tuple[JobSpec, tuple[str, ...]]:
    named = launcher or str((recipe.given if recipe is not None else {}).get("launcher", DEFAULT_LAUNCHER))
    has_roles = launcher_of(JobSpec("", "", 1, ("true",), launcher=named)).with_roles is not None
    if recipe is not None:
        given = given_for(recipe.given, gpus, has_roles=has_roles, has_knobs=named == DEFAULT_LAUNCHER)
        recipe = replace(recipe, given=given)
    sized = {**flags, "--gpus": ("gpus", gpus), "--launcher": ("launcher", launcher)}
    spec, said = spec_of(recipe, inventory, sized)
    if spec.min_gpus is None:
        return spec, said
    told = "  no job of the campaign is elastic, because each job measures one size"
    return replace(spec, min_gpus=None, reforms=False), (*(text for text in said if "is elastic" not in text), told)


def begin(
    plan: CampaignPlan, inventory: Inventory, home: Path, environ: Mapping[str, str]
) -> tuple[CampaignFolder, bool]:
    """Store a campaign with the current image and code; or find the campaign of this name, to continue it.

    Returns:
        The campaign; and whether it began with another image or other code, which it keeps.

    Raises:
        BadInput: the campaign of this name runs something else; or an image is not on this machine, or the workdir
            cannot be read.
        StateUnavailable: another command began a campaign of this name at the same moment.
        StateError: gpurun cannot store the campaign.
    """
    enter(home)
    store = CampaignStore(home)
    found = store.find(plan.name)
    before = None if found is None else found.plan()
    if before is not None and not before.asks_the_same_as(plan):
        raise BadInput(
            f"the campaign {plan.name} exists already, but with another command or other sizes", where="--name",
            hint=f"choose another name; `gpurun scale show {plan.name}` shows the campaign",
        )  # fmt: skip
    pinned, codes = pin(plan.jobs, inventory, home, environ)
    if found is not None and before is not None:
        return found, before.jobs != tuple(pinned)
    top = pinned[0].workdir
    origin = origin_of(None if top is None else Path(top))
    made = store.create(replace(plan, jobs=tuple(pinned), origin=origin), codes.get(pinned[0].code))
    audit.note(home, "scale", campaign=plan.name, sizes=[spec.gpus for spec in pinned])
    return made, False
