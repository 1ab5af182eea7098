"""``gpurun scale``: the commands and their modules. ``gpurun scale RECIPE …`` is ``gpurun scale run RECIPE …``."""

from __future__ import annotations

import click
import typer

from gpurun.cli.lazy import Place, lazy_group

COMMANDS = {
    "run": Place("gpurun.cli.scale_run:run", "Measure a recipe's rate at several sizes", takes_command=True),
    "list": Place("gpurun.cli.scale_reading:list_", "List campaigns"),
    "show": Place("gpurun.cli.scale_reading:show", "Show a campaign's curve"),
    "report": Place("gpurun.cli.scale_reading:report", "Write a campaign as HTML, JSON and CSV"),
}


class _MeasureByDefault(lazy_group(COMMANDS)):  # type: ignore[misc]
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in COMMANDS and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(cls=_MeasureByDefault, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _scale() -> None:
    """Measure how a recipe's rate grows with its GPUs: gpurun scale RECIPE --gpus 1,2,4,8."""
