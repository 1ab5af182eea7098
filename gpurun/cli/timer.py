"""``gpurun timer``: systemd runs ``gpurun recover`` at boot and every minute."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli.lazy import Place, lazy_group

COMMANDS = {
    "install": Place("gpurun.cli.timer:install", "Write and enable the systemd units of the timer"),
    "remove": Place("gpurun.cli.timer:remove", "Disable and remove the systemd units of the timer"),
}
app = typer.Typer(cls=lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _timer() -> None:
    """Let systemd run `gpurun recover` at boot and every minute. Root's timer recovers the jobs of all users."""


def install(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the systemd units that gpurun would install.")
    ] = False,
) -> None:
    """Write and enable the systemd units that run `gpurun recover`."""
    from gpurun.cli import recover_timer

    recover_timer.install(dry_run=dry_run)


def remove(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what gpurun would remove.")] = False,
) -> None:
    """Disable and remove the systemd units that run `gpurun recover`. Jobs continue."""
    from gpurun.cli import recover_timer

    recover_timer.uninstall(dry_run=dry_run)
