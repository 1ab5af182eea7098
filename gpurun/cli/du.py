"""``gpurun du``: how much of the head's disk each job takes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.jobs import open_store
from gpurun.cli.options import InventoryOption, JsonOption, OnlyHostsOption
from gpurun.cli.printing import print_json, printable, say, size_text
from gpurun.errors import BadInput, StateError
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.jobs.store import JobStore
    from gpurun.jobs.usage import FolderUsage

COLUMNS = ("outputs", "logs", "other", "total")
UNREAD_SHOWN = 5


def du(
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB…]", help="Show only these jobs.", show_default=False)
    ] = None,
    caches: Annotated[
        bool,
        typer.Option("--caches", help="Instead of jobs, show the sizes of your caches of models and kernels on hosts."),
    ] = False,
    hosts: OnlyHostsOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much disk space each job uses on the head, the machine that runs gpurun. The largest job comes first.

    A file with several hard links counts once. Code that several jobs share counts only for the first of these jobs.

    gpurun du --caches --host @rack:r1
    """
    from gpurun.jobs.usage import each_counted_once, measure

    if caches:
        from gpurun.cli.host_caches import show_caches

        if jobs:
            raise BadInput(
                "caches do not belong to jobs: name no jobs together with --caches",
                where="--caches",
                hint="run: gpurun du --caches --host HOSTS",
            )
        show_caches(hosts, inventory, as_json=as_json)
        return
    store = open_store()
    names = [store.find(job).id for job in dict.fromkeys(jobs)] if jobs else _all_names(store)
    found = [name for name in names if (store.folder / name).exists()]
    usages = each_counted_once([measure(store.folder / name) for name in found])
    rows = [_row(store, name, usage) for name, usage in zip(found, usages, strict=True)]
    rows.sort(key=lambda row: (-row["bytes"]["total"], row["id"]))
    sums = {column: sum(row["bytes"][column] for row in rows) for column in COLUMNS}
    free = shutil.disk_usage(store.home).free if store.home.exists() else None
    if as_json:
        print_json({"jobs": rows, "total": sums, "files": sum(row["files"] for row in rows), "disk_free_bytes": free})
    else:
        _print(rows, sums, free)


def _all_names(store: JobStore) -> list[str]:
    """Return the names of all job folders, and of folders that killed submissions and prunes left behind."""
    return sorted(store.folder.names()) if store.folder.exists() else []


def _row(store: JobStore, name: str, usage: FolderUsage) -> dict[str, Any]:
    from gpurun.jobs.record import ID_PATTERN
    from gpurun.jobs.usage import KINDS
    from gpurun.state.people import user_name

    row: dict[str, Any] = {"id": name, "name": "", "owner": "", "state": "", "ended_s": None}
    try:
        if ID_PATTERN.fullmatch(name):
            record = store.get(name).record()
            row |= {"name": record.name, "owner": record.owner, "state": record.state.value, "ended_s": record.ended_s}
        else:
            row |= {"owner": user_name((store.folder / name).stat().st_uid), "state": "left over"}
    except (StateError, FileNotFoundError):
        row["state"] = "damaged"
    size: dict[str, int] = {kind: usage.sizes[kind] for kind in KINDS} | {"total": usage.total}
    return {**row, "files": usage.files, "bytes": size, "unread": list(usage.unread)}


def _print(rows: list[dict[str, Any]], sums: dict[str, int], free: int | None) -> None:
    from gpurun.cli.tables import print_table

    table = []
    for row in rows:
        sizes = [size_text(row["bytes"][column]) for column in COLUMNS]
        sizes[-1] += "+" if row["unread"] else ""
        table.append(([*(printable(row[key]) for key in ("id", "owner", "name", "state")), *sizes], ""))
    table.append((["sum", "", "", "", *(size_text(sums[column]) for column in COLUMNS)], "head"))
    if rows:
        print_table(["job", "owner", "name", "state", *COLUMNS], table, figures=len(COLUMNS))
    else:
        say("no job uses the head's disk")
    if free is not None:
        say(f"{size_text(free)} free on this disk")
    problems = [f"{row['id']}: {each}" for row in rows for each in row["unread"]]
    for problem in problems[:UNREAD_SHOWN]:
        say(f"not read: {printable(problem)}")
    if problems:
        more = len(problems) - UNREAD_SHOWN
        rest = (
            f"gpurun could not read {count(more, 'more file or folder', 'more files or folders')}. " if more > 0 else ""
        )
        say(f"{rest}The real size may be larger where the table has a +")
