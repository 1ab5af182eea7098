"""Pin data sets at submit: record the digest of each, and find on the head the content with this digest later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gpurun.data.folder import DataFolder, hashes_of, read_folder
from gpurun.errors import BadInput
from gpurun.jobs.spec import DataSource
from gpurun.jobs.store import JobStore
from gpurun.state import data_sites


def pin(sources: Iterable[DataSource], home: Path) -> dict[DataSource, DataSource]:
    """Return each source, and the same source with the digest of its current content.

    Computes and caches here everything that later steps need of the contents, so that no GPU waits for it.

    Raises:
        BadInput: a source is missing, cannot be read, or changes while gpurun reads it.
    """
    return {source: _pinned(source, home) for source in dict.fromkeys(sources)}


def _pinned(source: DataSource, home: Path) -> DataSource:
    if source.kind == "host":
        return source
    tree = read_folder(folder_of(source, home))
    hashes_of(tree)
    path = source.path
    if source.kind == "job":
        job, _, below = path.partition(":")
        path = f"{JobStore(home).find(job).id}:{below}"
    data_sites.note(tree.digest, source=path)
    return replace(source, path=path, digest=tree.digest, size_bytes=tree.size)


def folder_of(source: DataSource, home: Path) -> Path:
    """Return the folder of the head that a source names.

    Raises:
        BadInput: it names a job that has not ended, or a path that is not in the job's outputs.
    """
    if source.kind != "job":
        return Path(source.path)
    job, _, below = source.path.partition(":")
    folder = JobStore(home).find(job)
    if not folder.record().state.ended:
        raise BadInput(
            "the job has not ended, so its outputs can still change",
            job=folder.id,
            hint=f"wait for the job with: gpurun wait {folder.id}",
        )
    top = folder.outputs.parent.resolve() / folder.outputs.name  # not followed if it is a link
    meant = (top / below.removeprefix("outputs").strip("/")).resolve()
    if not meant.is_relative_to(top):  # by a link that the job's program or owner has made
        raise BadInput("the path leads to a place outside the job's outputs", where=source.path)
    if not meant.is_dir():
        raise BadInput(
            "the job's outputs on the head have no folder with this path",
            where=source.path,
            hint=f"copy the outputs to the head with: gpurun outputs {folder.id}",
        )
    return meant


def as_pinned(source: DataSource, home: Path) -> DataFolder | None:
    """Return the folder of the head if its content is still the one pinned at submit; else None."""
    try:
        tree = read_folder(folder_of(source, home))
    except BadInput:
        return None
    return tree if tree.digest == source.digest else None
