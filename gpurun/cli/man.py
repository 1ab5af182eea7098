"""``gpurun man``: the manual pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.printing import printable, say
from gpurun.errors import BadInput


def man(
    to: Annotated[
        Path,
        typer.Option("--to", metavar="DIR", help="Write the pages into this folder, such as ~/.local/share/man/man1."),
    ],
) -> None:
    """Write a manual page for each command.

    gpurun man --to ~/.local/share/man/man1

    For example, `man gpurun-submit` then shows the page of `gpurun submit`.
    """
    from gpurun import __version__
    from gpurun.cli.manual import manual_page
    from gpurun.cli.tree import pages

    found = pages()
    try:
        to.mkdir(parents=True, exist_ok=True)
        for page in found:
            (to / f"{'-'.join(page.words)}.1").write_text(manual_page(page, __version__), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"the manual pages cannot be written: {error.strerror}", where=str(to)) from error
    say(printable(f"wrote {len(found)} pages to {to}"))
