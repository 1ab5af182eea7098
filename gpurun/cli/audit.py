"""``gpurun audit`` and ``gpurun init``: who did what in a state directory, and making one for several users."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import BadInput

COMMON = ("time_s", "what", "user", "uid", "sudo_user", "host", "pid", "command", "job")


def audit(
    job: Annotated[
        str | None, typer.Option("--job", "-j", metavar="JOB", help="Only this job: its id or the beginning of it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Who did what: jobs submitted, granted, preempted, cancelled, ended; hosts cordoned; the inventory changed."""
    from gpurun.state.audit import read
    from gpurun.state.home import home

    entries = [entry for entry in read(home(os.environ)) if job is None or _is_about(entry, job)]
    if as_json:
        print_json({"entries": entries})
        return
    for entry in entries:
        typer.echo(printable(_line(entry)))


def init(
    shared: Annotated[Path, typer.Option("--shared", metavar="DIR", help="The folder, such as /var/lib/gpurun.")],
    group: Annotated[str, typer.Option("--group", metavar="G", help="Name or number of the group that may use it.")],
) -> None:
    """Make a state directory for several users, or mend the modes of one. As root, once."""
    from gpurun.state.shared import make_shared

    kept = make_shared(shared.absolute(), _gid(group))
    say(f"{shared} is shared by group {group}")
    if not kept:
        say("its audit.jsonl could not be made append-only (chattr +a): a member of the group could rewrite it")
    say(f"  → export GPURUN_HOME={shared.absolute()}, for every user (not needed for /var/lib/gpurun)")


def _gid(group: str) -> int:
    import grp

    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise BadInput(f"there is no group {group!r}", hint=f"groupadd {group}") from None


def _is_about(entry: Mapping[str, Any], job: str) -> bool:
    about = entry.get("job")
    return isinstance(about, str) and bool(job) and about.startswith((job, f"j-{job}"))


def _line(entry: Mapping[str, Any]) -> str:
    try:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(entry["time_s"])))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        when = f"{'?':19}"
    behind = f"{entry['sudo_user']} as " if entry.get("sudo_user") else ""
    rest = " ".join(f"{key}={value}" for key, value in entry.items() if key not in COMMON and value != "")
    who = f"{behind}{entry.get('user', '?')}"
    return f"{when}  {who:12} {entry.get('what', '?')!s:10} {entry.get('job') or '':10}  {rest}".rstrip()
