"""``gpurun scale``: the commands and their modules. ``gpurun scale RECIPE …`` is ``gpurun scale run RECIPE …``."""

from __future__ import annotations

import typer

from gpurun.cli.lazy import Place, lazy_group

COMMANDS = {
    "run": Place(
        "gpurun.cli.scale_run:run", "Measure how fast a recipe trains on 1, 2, 4 or more GPUs", takes_command=True
    ),
    "list": Place("gpurun.cli.scale_reading:list_", "List campaigns, which are series of measurements"),
    "show": Place("gpurun.cli.scale_reading:show", "Show a campaign's rate on each number of GPUs"),
    "report": Place("gpurun.cli.scale_reading:report", "Write a campaign's results as HTML, JSON and CSV"),
}


app = typer.Typer(
    cls=lazy_group(COMMANDS, default="run"), no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@app.callback()
def _scale() -> None:
    """Measure how a recipe's training rate grows with the number of GPUs.

    gpurun scale recipes/fashion-mnist --gpus 1,2,4,8
    """
