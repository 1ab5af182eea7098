"""`gpurun prune`: remove the folders of jobs that have ended, or the head's copy of their outputs.

gpurun checks a job again under two locks: the lock of its outputs, then the allocator lock. Every process that still
needs the folder holds one of them. gpurun then renames the folder to a name that no command reads, syncs the rename,
and removes the files. So after a crash a job is either complete or gone, and the next prune removes leftover files.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gpurun import faults
from gpurun.errors import BadInput, GpurunError, NotYours, StateError, StateUnavailable
from gpurun.history.store import JobHistory
from gpurun.jobs.folder import DOOMED, OUTPUTS, FolderUsage, Freed, JobFolder, history_folder, marked, measure
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.store import JobStore
from gpurun.leases.store import AllocatorLock
from gpurun.node.folder import below
from gpurun.state import durable, locks
from gpurun.state.audit import AuditLog
from gpurun.state.filesystem import mounts_below
from gpurun.state.paths import StatePath, has_account, state_error, user_name


@dataclass(frozen=True)
class PruneWish:
    """What a person wants to remove.

    Attributes:
        jobs: only these, by id; empty = all of this user's jobs. Each named job must be removable.
        states: only jobs with these outcomes; empty = all.
        ended_before_s: only jobs that ended before this moment, seconds since the epoch.
        keep_below_bytes: remove the oldest jobs until this user's jobs take at most this.
        outputs_only: remove the head's copy of the outputs; the job stays.
        also_unbrought: also remove jobs whose hosts have outputs that the head does not have.
    """

    jobs: tuple[str, ...] = ()
    states: frozenset[State] = frozenset()
    ended_before_s: float | None = None
    keep_below_bytes: int | None = None
    outputs_only: bool = False
    also_unbrought: bool = False


@dataclass(frozen=True)
class Prunable:
    """A job that can be removed, and the bytes that its removal frees after the removals before it."""

    record: JobRecord
    usage: FolderUsage
    frees: int


@dataclass(frozen=True)
class PrunePlan:
    """The jobs that a prune would remove, in this order.

    Attributes:
        skipped: jobs that match the wish but must stay, and why.
        kept: remaining bytes, if the wish has a limit.
    """

    going: tuple[Prunable, ...]
    skipped: dict[str, str]
    kept: int | None = None


@dataclass
class Pruned:
    """The result of a prune.

    Attributes:
        failed: errors by job, or by the name of an earlier prune's leftover.
    """

    jobs: list[Prunable] = field(default_factory=list)
    failed: dict[str, GpurunError] = field(default_factory=dict)


def plan_prune(home: Path, wish: PruneWish) -> PrunePlan:
    """Choose the jobs to remove. Reads records and measures folders.

    Raises:
        BadInput: a named job cannot be removed.
    """
    store = JobStore(home)
    skipped: dict[str, str] = {}
    mine: dict[str, FolderUsage] = {}
    found: list[tuple[JobRecord, FolderUsage]] = []
    for job in wish.jobs or store.ids():
        folder = store.get(job)
        try:
            record = folder.record()
        except StateError as error:
            if wish.jobs:
                raise
            with suppress(FileNotFoundError):  # another prune was quicker
                if _is_mine(folder.path.stat().st_uid):
                    is_away = isinstance(error, StateUnavailable)
                    skipped[job] = f"the job's record {'cannot be read now' if is_away else 'is damaged'}: {error}"
            continue
        why = _why_not(folder, record, also_unbrought=wish.also_unbrought)
        if why is not None and wish.jobs:
            raise why
        if not _is_mine(record.owner_uid):
            continue
        matches = _matches(record, wish)
        if matches and why is not None and record.state.ended:
            skipped[job] = why.message
        if wish.keep_below_bytes is not None or (matches and why is None):
            mine[job] = measure(folder.path)
        if matches and why is None:
            found.append((record, mine[job].outputs_alone() if wish.outputs_only else mine[job]))
    found.sort(key=lambda each: (each[0].ended_s or 0.0, each[0].id))
    return _chosen(store, found, mine.values(), wish, skipped)


def _matches(record: JobRecord, wish: PruneWish) -> bool:
    if wish.states and record.state not in wish.states:
        return False
    before_s = wish.ended_before_s
    return before_s is None or (record.ended_s is not None and record.ended_s < before_s)


def _chosen(
    store: JobStore, found: Sequence[tuple[JobRecord, FolderUsage]], mine: Collection[FolderUsage], wish: PruneWish,
    skipped: dict[str, str],
) -> PrunePlan:  # fmt: skip
    freed, going = Freed(), []
    for name in store.codes():
        freed.add(measure(store.folder / name))  # what is stored there goes with the last job that has it
    left = _whole(mine)
    for record, usage in found:
        if wish.keep_below_bytes is not None and left <= wish.keep_below_bytes:
            break
        if wish.outputs_only and not (usage.total or usage.linked):
            continue
        frees = freed.add(usage)
        left -= frees
        going.append(Prunable(record, usage, frees))
    return PrunePlan(tuple(going), skipped, None if wish.keep_below_bytes is None else left)


def _whole(usages: Collection[FolderUsage]) -> int:
    linked = {inode: each.size for usage in usages for inode, each in usage.linked.items()}
    return sum(usage.total for usage in usages) + sum(linked.values())


def _is_mine(uid: int) -> bool:
    return os.getuid() in (uid, 0)


def _why_not(folder: JobFolder, record: JobRecord, *, also_unbrought: bool) -> BadInput | None:
    """Return why a job must stay; None if it can be removed."""
    refused = partial(BadInput, job=folder.id)
    left = record.outputs_left
    if not _is_mine(record.owner_uid):
        return NotYours(
            f"the job belongs to {user_name(record.owner_uid)}; only the owner and root may remove the job",
            job=folder.id,
        )
    if not record.state.ended:
        return refused(
            f"the job has not ended: the job is {record.state.value}", hint=f"run: gpurun cancel {folder.id}"
        )
    leases = StatePath(folder.path.home) / "leases"
    names = leases.names() if leases.exists() else []
    if any(name.startswith(f"{folder.id}.") for name in names) or (folder.path / "lease.json").exists():
        return refused(
            "the job still holds GPUs, because gpurun could not check that the job left nothing on its "
            "hosts (the fence)",
            hint="`gpurun status` shows the hosts without a fence",
        )
    if left is not None and left.hosts and not also_unbrought:
        return refused(
            f"the job's outputs on {', '.join(left.hosts)} have not been copied to the head",
            hint=f"copy the outputs with `gpurun outputs {folder.id}`, or remove the job without a copy with "
            "--also-unbrought",
        )
    top = Path(os.path.realpath(folder.path.home), *folder.path.parts)
    if mounts := mounts_below(top, Path("/proc/self/mountinfo").read_text(errors="surrogateescape")):
        return refused(
            f"gpurun cannot remove the job's folder: {mounts[0]} is a mount point", hint=f"run: umount {mounts[0]}"
        )
    return _why_not_counted(folder, record)


def _why_not_counted(folder: JobFolder, record: JobRecord) -> BadInput | None:
    """Return why a job must stay because the history lacks it: only its owner can write the owner's history."""
    if record.owner_uid == os.getuid() or not has_account(record.owner_uid):
        return None
    marks = history_folder(folder.path.home, record.owner_uid)
    try:
        if all(mark.job != folder.id for mark in marked(marks)):
            return None
    except FileNotFoundError:
        return None
    owner = user_name(record.owner_uid)
    return BadInput(
        "the owner's history does not contain the job yet", job=folder.id, hint=f"run `gpurun history` as {owner}"
    )


def carry_out(home: Path, plan: PrunePlan, wish: PruneWish) -> Pruned:
    """Remove the jobs of a plan, and leftovers of an earlier prune. Keeps jobs that have changed since. Idempotent."""
    done, store = Pruned(), JobStore(home)
    lacking = {} if wish.outputs_only else JobHistory(home).jobs_lacking()  # it keeps what these jobs' folders say
    doomed: list[tuple[Prunable, list[StatePath], int]] = []
    for each in plan.going:
        if (why := lacking.get(each.record.id)) is not None:
            done.failed[each.record.id] = why
            continue
        try:
            doomed.append((each, *_doom(store, each.record, wish)))
        except FileNotFoundError:  # another prune was quicker
            continue
        except GpurunError as error:
            done.failed[each.record.id] = error
    for folder in dict.fromkeys(path.parent for _, paths, _ in doomed for path in paths):
        durable.sync_folder(folder)
    faults.point()
    for each, paths, changed_ns in doomed:
        if not _try(done, each.record.id, paths):
            continue
        done.jobs.append(each)
        what = {"outputs_only": True} if wish.outputs_only else {}
        AuditLog(home).note("prune", job=each.record.id, owner=each.record.owner, bytes=each.frees, **what)
        if wish.outputs_only:
            _set_time(store.get(each.record.id).path, changed_ns)
    for path in _left_over(store):
        _try(done, str(path), [path])
    return done


def _doom(store: JobStore, record: JobRecord, wish: PruneWish) -> tuple[list[StatePath], int]:
    """Rename what to remove to names that nobody reads. Returns these names, and when the job's folder last changed.

    Raises:
        FileNotFoundError: it is gone.
        BadInput: it has changed and must stay.
        StateError: the rename failed, or another process copies the job's outputs at this moment.
    """
    folder = store.get(record.id)
    with _alone(folder), AllocatorLock(store.home).held():
        folder.path.stat()
        why = _why_not(folder, folder.record(), also_unbrought=wish.also_unbrought)
        if why is not None:
            raise why
        changed_ns = folder.path.stat().st_mtime_ns
        if wish.outputs_only:  # `outputs` last: what arrives, or an older copy, must not take its place
            copies = [name for name in reversed(OUTPUTS) if (folder.path / name.decode()).exists()]
            return [_renamed(folder.path / name.decode(), folder.path) for name in copies], changed_ns
        with suppress(StateError):  # another user's mark: it costs a look, no more
            (store.live / record.id).unlink(missing_ok=True)
        faults.point()
        return [_renamed(folder.path, store.folder)], changed_ns


def _renamed(path: StatePath, to: StatePath) -> StatePath:
    doomed = to / f"{DOOMED}{path.name}-{secrets.token_hex(4)}"
    path.rename(doomed)
    faults.point()
    return doomed


@contextmanager
def _alone(folder: JobFolder) -> Iterator[None]:
    """Lock the job's outputs, so that no other process copies them. Without a lock file, no process ever has.

    Raises:
        StateError: another process copies them now.
    """
    try:
        descriptor = (folder.path / "outputs.lock").open_file(os.O_RDWR)
    except FileNotFoundError:
        yield
        return
    try:
        if not locks.try_take(descriptor):
            raise StateError("gpurun is copying the job's outputs to the head", job=folder.id, hint="try again later")
        yield
    finally:
        os.close(descriptor)


def _left_over(store: JobStore) -> Iterator[StatePath]:
    """Yield what interrupted prunes of this user left; for root, of all users."""
    for folder in (store.folder, *(store.get(job).path for job in store.ids())):
        with suppress(FileNotFoundError, StateError):
            for name in folder.names():
                path = folder / name
                if name.startswith(DOOMED) and _is_mine(path.stat().st_uid):
                    yield path


def _set_time(folder: StatePath, changed_ns: int) -> None:
    """Restore the folder's time: `gpurun status` shows recently changed jobs, and a prune of outputs must not count."""
    with suppress(FileNotFoundError, StateError):
        descriptor = folder.open_folder()
        try:
            os.utime(descriptor, ns=(changed_ns, changed_ns))
        finally:
            os.close(descriptor)


def _try(done: Pruned, what: str, paths: Sequence[StatePath]) -> bool:
    for path in paths:
        try:
            remove_tree(path)
        except GpurunError as error:
            done.failed[what] = error
    return what not in done.failed


def remove_tree(path: StatePath) -> None:
    """Remove a file or folder of the state directory with everything in it, whatever a container has put there.
    Idempotent.

    Raises:
        StateError: something in it could not be removed.
    """
    faults.point()
    try:
        above = path.parent.open_folder()
    except FileNotFoundError:
        return
    try:
        below.remove_entry(above, os.fsencode(path.name))
    except FileNotFoundError:  # another prune was quicker
        pass
    except OSError as error:
        raise state_error(error, path, "removed") from error
    finally:
        os.close(above)
    faults.point()
