"""``gpurun share``: a state directory for several users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.printing import say
from gpurun.errors import BadInput

MOST_DIGITS, NOBODY = 10, 2**32 - 1
"""A group's number has at most so many digits, and is below this one: chown takes it for "do not change"."""


def share(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The state directory, such as /var/lib/gpurun.")],
    group: Annotated[
        str, typer.Option("--group", metavar="GROUP", help="Name or number of the group that may use the directory.")
    ],
) -> None:
    """Make a state directory for several users, or repair the directory's file modes. Run `gpurun share` once, as root.

    gpurun share /var/lib/gpurun --group gpu-users
    """
    from gpurun.state.shared import make_shared

    kept = make_shared(folder.absolute(), _gid(group))
    say(f"{folder} is shared by group {group}")
    if not kept:
        say(f"gpurun could not make {folder}/audit.jsonl append-only (chattr +a), so members can change this file")
    say(f"  → for all users: export GPURUN_HOME={folder.absolute()} (not needed for /var/lib/gpurun)")


def _gid(group: str) -> int:
    import grp

    if group.isascii() and group.isdigit() and len(group) <= MOST_DIGITS and int(group) < NOBODY:
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        hint = f"create the group: groupadd {group}" if group.isidentifier() else "`getent group` lists groups"
        raise BadInput(f"there is no group {group[:40]!r}", hint=hint) from None
