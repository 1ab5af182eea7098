"""The commands of ``gpurun inventory``, ``scale`` and ``sweep``, and the module of each."""

from __future__ import annotations

import typer

from gpurun.cli.main import Place, lazy_group

# ``gpurun inventory``: the commands and their modules.


INVENTORY = {
    "list": Place("gpurun.cli.inventory_reading:list_hosts", "List hosts with their state"),
    "show": Place("gpurun.cli.inventory_reading:show", "Show all values of hosts"),
    "validate": Place("gpurun.cli.inventory_reading:validate", "Check an inventory for problems"),
    "schema": Place("gpurun.cli.inventory_reading:schema", "Print the JSON Schema of inventories, for editors"),
    "probe": Place("gpurun.cli.probe:probe", "Detect the hosts' hardware"),
    "add": Place("gpurun.cli.inventory_edit:add", "Add hosts to a rack"),
    "set": Place("gpurun.cli.inventory_edit:set_values", "Set values of hosts, such as gpus=8"),
    "label": Place("gpurun.cli.inventory_edit:label", "Set labels of hosts"),
    "remove": Place("gpurun.cli.inventory_edit:remove", "Remove hosts"),
    "edit": Place("gpurun.cli.inventory_edit:edit", "Open the inventory in an editor"),
    "diff": Place("gpurun.cli.inventory_edit:diff", "Show a change of the inventory"),
    "undo": Place("gpurun.cli.inventory_edit:undo", "Undo the latest change of the inventory"),
    "cordon": Place("gpurun.cli.inventory_hosts:cordon", "Stop new jobs from starting on hosts"),
    "drain": Place("gpurun.cli.inventory_hosts:drain", "Move jobs from hosts that need maintenance"),
    "uncordon": Place("gpurun.cli.inventory_hosts:uncordon", "Let new jobs start on hosts again"),
    "trust": Place("gpurun.cli.inventory_hosts:trust", "Show and trust host keys"),
    "connect": Place("gpurun.cli.inventory_hosts:connect", "Log in to hosts that ask for a second factor"),
    "import": Place("gpurun.cli.inventory_edit:import_", "Make an inventory from another tool's list of hosts"),
    "export": Place("gpurun.cli.inventory_edit:export", "Print the inventory for another tool"),
}

inventory_app = typer.Typer(
    cls=lazy_group(INVENTORY), no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@inventory_app.callback()
def _inventory() -> None:
    """Show, check and change the inventory."""


# ``gpurun scale``: the commands and their modules. ``gpurun scale RECIPE …`` is ``gpurun scale run RECIPE …``.


SCALE = {
    "run": Place(
        "gpurun.cli.scale_commands:run", "Measure how fast a recipe trains on 1, 2, 4 or more GPUs", takes_command=True
    ),
    "list": Place("gpurun.cli.scale_commands:list_", "List campaigns, which are series of measurements"),
    "show": Place("gpurun.cli.scale_commands:show", "Show a campaign's rate on each number of GPUs"),
    "report": Place("gpurun.cli.scale_commands:report", "Write a campaign's results as HTML, JSON and CSV"),
}


scale_app = typer.Typer(
    cls=lazy_group(SCALE, default="run"), no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@scale_app.callback()
def _scale() -> None:
    """Measure how a recipe's training rate grows with the number of GPUs.

    gpurun scale recipes/fashion-mnist --gpus 1,2,4,8
    """


SWEEP = {
    "run": Place(
        "gpurun.cli.sweep_commands:run", "Run a recipe with many combinations of parameters", takes_command=True
    ),
    "status": Place("gpurun.cli.sweep_commands:status", "Show the progress of sweeps and their best trials"),
    "best": Place("gpurun.cli.sweep_commands:best", "Print the best trial"),
    "table": Place("gpurun.cli.sweep_commands:table", "Print all trials as a table or as CSV"),
    "plot": Place("gpurun.cli.sweep_commands:plot", "Draw parameters and curves of all trials"),
    "stop": Place("gpurun.cli.sweep_commands:stop", "Stop a sweep and cancel its jobs"),
    "resume": Place("gpurun.cli.sweep_commands:resume", "Continue a stopped sweep"),
}


sweep_app = typer.Typer(
    cls=lazy_group(SWEEP, default="run"), no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@sweep_app.callback()
def _sweep() -> None:
    """Run one recipe with many combinations of parameters.

    gpurun sweep recipes/fashion-mnist --grid lr=0.1,0.01 --metric accuracy:max
    """
