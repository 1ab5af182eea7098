"""What a data set held when its job was submitted: its digest, and where on the head it can still be read."""

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
    """Each source, and the same with the digest of what it holds now.

    All that later steps need of the contents is worked out here, before GPUs are granted, and remembered.

    Raises:
        BadInput: a source is missing, cannot be read, or changes while it is read.
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
    """The folder of the head that a source means.

    Raises:
        BadInput: it means a job that has not ended, or nothing of the job's outputs.
    """
    if source.kind != "job":
        return Path(source.path)
    job, _, below = source.path.partition(":")
    folder = JobStore(home).find(job)
    if not folder.record().state.ended:
        raise BadInput("has not ended: its outputs still change", job=folder.id, hint=f"gpurun wait {folder.id}")
    top = folder.outputs.resolve()
    meant = (top / below.removeprefix("outputs").strip("/")).resolve()
    if not meant.is_relative_to(top):  # a link that the job's program has made
        raise BadInput("leads out of the job's outputs", where=source.path)
    if not meant.is_dir():
        raise BadInput("the job has no such outputs on the head", where=source.path, hint=f"gpurun outputs {folder.id}")
    return meant


def as_pinned(source: DataSource, home: Path) -> DataFolder | None:
    """The folder of the head, if it holds what it held at the submit; None if it does not, or is gone."""
    try:
        tree = read_folder(folder_of(source, home))
    except BadInput:
        return None
    return tree if tree.digest == source.digest else None
