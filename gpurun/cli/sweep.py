"""``gpurun sweep``: the commands and their modules. ``gpurun sweep RECIPE …`` is ``gpurun sweep run RECIPE …``."""

from __future__ import annotations

import typer

from gpurun.cli.lazy import Place, lazy_group

COMMANDS = {
    "run": Place("gpurun.cli.sweep_run:run", "Run a recipe with many combinations of parameters", takes_command=True),
    "status": Place("gpurun.cli.sweep_reading:status", "Show the progress of sweeps and their best trials"),
    "best": Place("gpurun.cli.sweep_reading:best", "Print the best trial"),
    "table": Place("gpurun.cli.sweep_reading:table", "Print all trials as a table or as CSV"),
    "plot": Place("gpurun.cli.sweep_reading:plot", "Draw parameters and curves of all trials"),
    "stop": Place("gpurun.cli.sweep_run:stop", "Stop a sweep and cancel its jobs"),
    "resume": Place("gpurun.cli.sweep_run:resume", "Continue a stopped sweep"),
}


app = typer.Typer(
    cls=lazy_group(COMMANDS, default="run"), no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@app.callback()
def _sweep() -> None:
    """Run one recipe with many combinations of parameters.

    gpurun sweep recipes/fashion-mnist --grid lr=0.1,0.01 --metric accuracy:max
    """
