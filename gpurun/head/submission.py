"""Turn specs into jobs: store them, run a pass, and start a waiter."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpurun import faults
from gpurun.data.pinning import pin as pin_data
from gpurun.environments.build import ensure
from gpurun.environments.log import Report
from gpurun.errors import OUTLIVED, GpurunError, StateError, words_of
from gpurun.head.origin import origin_of
from gpurun.head.spawn import ensure_waiter, run_pass_and_start
from gpurun.images.code import write_code
from gpurun.images.engine import Engine
from gpurun.images.tree import scan
from gpurun.inventory.model import Inventory
from gpurun.jobs.drafts import AddCode
from gpurun.jobs.folder import JobFolder
from gpurun.jobs.origin import Origin
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.states import State
from gpurun.jobs.store import JobStore
from gpurun.leases.allocator import allocator_lock
from gpurun.leases.look import refuse_while_damaged
from gpurun.leases.store import LeaseStore
from gpurun.state import audit, clock
from gpurun.state.shared import enter


@dataclass(frozen=True)
class Submission:
    """Stored jobs. They will run, even if `problem` names an error.

    Attributes:
        folders: in the order of the specs.
        problem: what failed after the jobs were stored: the pass, or the start of a supervisor or waiter.
    """

    folders: tuple[JobFolder, ...]
    problem: GpurunError | None = None


def submit_jobs(
    specs: Sequence[JobSpec],
    inventory: Inventory,
    home: Path,
    environ: Mapping[str, str],
    *,
    on_stored: Callable[[Sequence[JobFolder]], object] = lambda _: None,
    on_build: Report = lambda *_: None,
) -> Submission:
    """Queue all of these jobs or none, and start those that fit.

    After an exception the caller may submit again. After a Submission it must not, because the jobs are stored.

    Args:
        on_stored: called when the jobs are stored. A pass follows, which may wait for the allocator lock.
        on_build: receives the progress of an environment's build, before the jobs are stored.

    Raises:
        BadInput: an image is not on this machine, or a workdir or data cannot be read. Checked before GPUs become free.
        HostNotReady: an environment cannot be built.
        StateError: a lease is damaged, so the pass granted nothing; or the jobs cannot be stored.
        UnsafeState: the state directory does not protect its users from each other.
    """
    enter(home)
    pinned, codes = pin(specs, inventory, home, environ, on_build)
    origins = {top: origin_of(None if top is None else Path(top)) for top in {spec.workdir for spec in pinned}}
    return queue_jobs(
        pinned, Path(inventory.source), home, environ, codes=codes, on_stored=on_stored,
        origins=[origins[spec.workdir] for spec in pinned],
    )  # fmt: skip


def pin(
    specs: Sequence[JobSpec],
    inventory: Inventory,
    home: Path,
    environ: Mapping[str, str],
    on_build: Report = lambda *_: None,
) -> tuple[list[JobSpec], Mapping[str, AddCode]]:
    """Return specs with the current image of each name, and the current code and data of each folder.

    Returns:
        The specs; and for each digest of code, a function that writes the code.

    Builds environments that the head does not have.

    Raises:
        BadInput: an image is not on this machine; a workdir, data or what an environment is made of cannot be used.
        HostNotReady: an environment cannot be built.
    """
    engine = Engine(inventory.docker_host)
    specs = _with_environments(specs, engine, environ, on_build)
    ids = {image: engine.image(image).id for image in dict.fromkeys(spec.image for spec in specs)}
    trees = {top: scan(Path(top)) for top in dict.fromkeys(spec.workdir for spec in specs) if top is not None}
    code = {top: tree.digest for top, tree in trees.items()}
    data = pin_data((source for spec in specs for source in spec.data.values()), home)
    pinned = [
        replace(
            spec, image_id=ids[spec.image], code=code.get(spec.workdir or "", ""),
            left_out=trees[spec.workdir].left_out if spec.workdir is not None else (),
            outputs_limit_mib=_lower(spec.outputs_limit_mib, inventory.outputs_limit_mib),
            data={name: data[source] for name, source in spec.data.items()},
        )
        for spec in specs
    ]  # fmt: skip
    return pinned, {code[top]: partial(write_code, tree=tree) for top, tree in trees.items()}


def _with_environments(
    specs: Sequence[JobSpec], engine: Engine, environ: Mapping[str, str], on_build: Report
) -> list[JobSpec]:
    wanted = {(spec.image, spec.python): spec.python for spec in specs}
    built = {key: ensure(python, key[0], engine, environ, on_build) for key, python in wanted.items() if python}
    return [
        replace(spec, image=built[spec.image, spec.python][0].reference, python=built[spec.image, spec.python][1])
        if spec.python
        else spec
        for spec in specs
    ]


def queue_jobs(
    specs: Sequence[JobSpec],
    inventory: Path,
    home: Path,
    environ: Mapping[str, str],
    *,
    codes: Mapping[str, AddCode],
    ids: Sequence[str] = (),
    origins: Sequence[Origin] = (),
    on_stored: Callable[[Sequence[JobFolder]], object] = lambda _: None,
) -> Submission:
    """Queue jobs of pinned specs, as `submit_jobs` does.

    Args:
        inventory: the file that they are submitted against.
        codes, ids, origins: as for `JobStore.create_many`.

    Raises:
        StateError: as `submit_jobs`.
    """
    refuse_while_damaged(LeaseStore(home).read_all())
    store = JobStore(home)
    store.sweep(now_s=time.time())
    alone = partial(allocator_lock, home) if len(specs) > 1 else None
    folders = store.create_many(
        specs, inventory=inventory, now_s=clock.now_s(), alone=alone, codes=codes, ids=ids, origins=origins
    )
    for folder, spec in zip(folders, specs, strict=True):
        audit.note(home, "submit", job=folder.id, name=spec.name, gpus=spec.gpus)
    on_stored(folders)
    faults.point()
    return Submission(folders, _start(home, folders, environ))


def _lower(*limits: int | None) -> int | None:
    """Return the lower limit: a recipe cannot raise the inventory's limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def _start(home: Path, folders: Sequence[JobFolder], environ: Mapping[str, str]) -> GpurunError | None:
    """Run a pass, and start a waiter for jobs that must wait. Returns the error, if any; the jobs are stored anyway."""
    problem: GpurunError | None = None
    try:
        run_pass_and_start(home, now_s=clock.now_s(), environ=environ)
    except OUTLIVED as error:
        problem = _told(error)
    try:
        if any(folder.record().state is State.QUEUED for folder in folders):
            ensure_waiter(home, environ)
    except OUTLIVED as error:
        problem = problem or _told(error)
    return problem


def _told(error: Exception) -> GpurunError:
    if isinstance(error, GpurunError):
        return error
    why = getattr(error, "strerror", None) or words_of(error)
    return StateError(f"gpurun could not start a process: {why}", hint="run `gpurun recover` to try again")
