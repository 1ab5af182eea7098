"""``gpurun timer``: systemd runs ``gpurun recover`` at boot and every minute."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.lazy import Place, lazy_group

COMMANDS = {
    "install": Place("gpurun.cli.timer:install", "Write and enable the units"),
    "remove": Place("gpurun.cli.timer:remove", "Disable and remove the units"),
}
app = typer.Typer(cls=lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _timer() -> None:
    """Have systemd run `gpurun recover` at boot and every minute. Root's timer recovers everybody's jobs."""


def install(dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the units.")] = False) -> None:
    """Write and enable the units."""
    from gpurun.cli import recover_timer

    recover_timer.install(dry_run=dry_run)


def remove(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Disable and remove the units. Jobs continue."""
    from gpurun.cli import recover_timer

    recover_timer.uninstall(dry_run=dry_run)
