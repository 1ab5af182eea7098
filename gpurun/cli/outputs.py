"""``gpurun outputs``: show where a job's outputs are and which are still on hosts; copy them."""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.jobs import find_job
from gpurun.cli.options import JobArgument, JsonOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import BadInput, GpurunError
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord

HOSTS_FAILED = 4
MOST_NAMED = 3


def outputs(
    job: JobArgument,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="DIR", help="Copy the outputs into this folder. The folder may contain other files."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the folder of a job's outputs. If the job has ended, gpurun first copies outputs that are still on hosts.

    The exit code is 4 if a host has outputs that the head does not have.

    gpurun outputs @last --to results
    """
    folder = find_job(job)
    record = _with_what_was_left(folder)
    if to is not None:
        _copy(folder, to)
    files, size = _measured(folder.outputs)
    if as_json:
        print_json(_document(folder, record, files, size))
    else:
        _print(folder, record, files, size)
    if record.outputs_left is not None and record.outputs_left.hosts:
        raise typer.Exit(HOSTS_FAILED)


def _with_what_was_left(folder: JobFolder) -> JobRecord:
    """Return the job's record. For the owner of an ended job, first copy outputs left on hosts to the head."""
    from gpurun.supervisor.frozen import last_known
    from gpurun.supervisor.links import Links
    from gpurun.supervisor.outputs import bring_left

    record = folder.record()
    left = record.outputs_left
    if left is None or not left.hosts or not record.state.ended or os.getuid() != record.owner_uid:
        return record
    say(f"gpurun asks {', '.join(left.hosts)} for outputs that the head does not have")
    inventory = last_known(folder)
    links = Links(inventory, [host for host in left.hosts if host in inventory.by_name])
    try:
        links.open()
        bring_left(folder, record.attempt, links, list(links.targets))
    finally:
        links.close()
    return folder.record()


def _copy(folder: JobFolder, to: Path) -> None:
    """Copy the outputs that the head has. Keeps symbolic links, modes, times and holes.

    Adds to a folder that exists. Leaves alone what is there: the same files stay, and others are a reason to refuse.

    Raises:
        BadInput: something else of one of the names is there, the target cannot be written, or the head has no outputs.
        StateError: a link is in the place of the outputs.
        GpurunError: some files could not be copied.
    """
    try:
        source = (folder.path / "outputs").open_folder()
    except FileNotFoundError:
        raise BadInput(
            "the job has no outputs on the head", job=folder.id,
            hint="gpurun copies files that ranks write below `--outputs PATH` and, with --workdir, below /workspace",
        ) from None  # fmt: skip
    try:  # the open folder: newer outputs may replace its path during the copy
        top, to = Path(f"/proc/self/fd/{source}"), to.resolve() if to.is_dir() else to
        if others := list(islice(_others(top, to), MOST_NAMED + 1)):
            named = ", ".join(map(str, others[:MOST_NAMED])) + (" and more" if len(others) > MOST_NAMED else "")
            raise BadInput(
                f"the folder already has different files with these names: {named}", where=str(to),
                hint="copy the outputs into a new folder: --to DIR",
            )  # fmt: skip
        _add(top, to)
    except FileExistsError as error:
        raise BadInput(
            "another program created the file while gpurun copied the outputs",
            where=str(error.filename2 or error.filename),
            hint="copy the outputs again, into a new folder",
        ) from None
    except shutil.Error as error:
        first = error.args[0][0]
        what = f"{first[0]}: {first[2]}" if len(error.args[0]) == 1 else f"{len(error.args[0])} files, first {first[0]}"
        raise GpurunError(
            f"gpurun could not copy all outputs: {what}", where=str(to), job=folder.id,
            hint="" if folder.record().state.ended else "the job still writes outputs: try again",
        ) from None  # fmt: skip
    except OSError as error:
        raise BadInput(f"gpurun cannot write the file: {error.strerror}", where=str(error.filename or to)) from None
    finally:
        os.close(source)


def _others(source: Path, to: Path) -> Iterator[Path]:
    """Yield what is in the way of a copy of a folder: what has one of its names, and is something else."""
    if not os.path.lexists(to):
        return
    if not stat.S_ISDIR(to.lstat().st_mode):
        yield to
        return
    for entry in os.scandir(source):
        target = to / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _others(Path(entry.path), target)
        elif os.path.lexists(target) and not _is_same(Path(entry.path), target):
            yield target


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two files have the same content, or two links the same target."""
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    ours, theirs = one.stat(), other.stat()
    if not (stat.S_ISREG(theirs.st_mode) and ours.st_size == theirs.st_size):
        return False
    return ours.st_mtime_ns == theirs.st_mtime_ns or filecmp.cmp(one, other, shallow=False)


def _add(source: Path, to: Path) -> None:
    """Copy a folder; of a folder that exists, what it lacks. Its own mode and times stay."""
    if not os.path.lexists(to):
        shutil.copytree(source, to, symlinks=True, copy_function=_copy_file)
        return
    for entry in os.scandir(source):
        target = to / entry.name
        if entry.is_dir(follow_symlinks=False):
            _add(Path(entry.path), target)
        elif os.path.lexists(target):
            continue
        elif entry.is_symlink():
            target.symlink_to(Path(entry.path).readlink())
        else:
            _copy_file(entry.path, str(target))


def _copy_file(source: str, to: str) -> None:
    """Copy a file as `shutil.copy2` does, and keep its holes."""
    from gpurun.node.folder.contents import extents, stored_of, write_all

    status = Path(source).stat()
    if not stat.S_ISREG(status.st_mode) or stored_of(status) < 0:
        shutil.copy2(source, to)
        return
    with Path(source).open("rb") as old, Path(to).open("xb") as new:
        position = 0
        for hole, piece in extents(old.fileno(), 0, status.st_size, sparse=True):
            write_all(new.fileno(), piece, position)
            position += hole + len(piece)
        os.ftruncate(new.fileno(), position)
    shutil.copystat(source, to)


def _measured(top: Path) -> tuple[int, int]:
    """Return the number of files and their total size in bytes."""
    files = size = 0
    for above, _, names in os.walk(top):
        for name in names:
            files, size = files + 1, size + (Path(above) / name).lstat().st_size
    return files, size


def _document(folder: JobFolder, record: JobRecord, files: int, size: int) -> dict[str, Any]:
    left = record.outputs_left
    return {
        "job": record.id,
        "path": str(folder.outputs) if folder.outputs.is_dir() else None,
        "files": files,
        "bytes": size,
        "left": None if left is None else {"count": left.count, "first": list(left.first), "hosts": list(left.hosts)},
    }


def _print(folder: JobFolder, record: JobRecord, files: int, size: int) -> None:
    if folder.outputs.is_dir():
        typer.echo(f"{folder.outputs}  {count(files, 'file')}, {size / (1 << 20):.1f} MiB")
    else:
        typer.echo(f"{record.id} has no outputs on the head{'' if record.state.ended else ' yet'}")
    if record.outputs_left is not None:
        typer.echo(printable(record.outputs_left.words(record.id, is_over=record.state.ended)))
