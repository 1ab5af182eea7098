"""``gpurun share``: a state directory for several users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.printing import say
from gpurun.errors import BadInput


def share(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The state directory, such as /var/lib/gpurun.")],
    group: Annotated[str, typer.Option("--group", metavar="G", help="Name or number of the group that may use it.")],
) -> None:
    """Make a state directory for several users, or repair the modes of one. Run it once, as root.

    gpurun share /var/lib/gpurun --group gpu-users
    """
    from gpurun.state.shared import make_shared

    kept = make_shared(folder.absolute(), _gid(group))
    say(f"{folder} is shared by group {group}")
    if not kept:
        say("its audit.jsonl could not be made append-only (chattr +a): a member of the group could rewrite it")
    say(f"  → export GPURUN_HOME={folder.absolute()}, for every user (not needed for /var/lib/gpurun)")


def _gid(group: str) -> int:
    import grp

    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise BadInput(f"there is no group {group!r}", hint=f"groupadd {group}") from None
