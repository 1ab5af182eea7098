"""``gpurun inventory``: the commands and their modules."""

from __future__ import annotations

import typer

from gpurun.cli.lazy import Place, lazy_group

COMMANDS = {
    "list": Place("gpurun.cli.inventory_reading:list_hosts", "List hosts with their state"),
    "show": Place("gpurun.cli.inventory_reading:show", "Show all values of hosts"),
    "validate": Place("gpurun.cli.inventory_reading:validate", "Check an inventory for problems"),
    "schema": Place("gpurun.cli.inventory_reading:schema", "Print the JSON Schema of inventories, for editors"),
    "probe": Place("gpurun.cli.probe:probe", "Detect the hosts' hardware"),
    "add": Place("gpurun.cli.inventory_editing:add", "Add hosts to a rack"),
    "set": Place("gpurun.cli.inventory_editing:set_values", "Set values of hosts, such as gpus=8"),
    "label": Place("gpurun.cli.inventory_editing:label", "Set labels of hosts"),
    "remove": Place("gpurun.cli.inventory_editing:remove", "Remove hosts"),
    "edit": Place("gpurun.cli.inventory_editing:edit", "Open the inventory in an editor"),
    "diff": Place("gpurun.cli.inventory_editing:diff", "Show a change of the inventory"),
    "undo": Place("gpurun.cli.inventory_editing:undo", "Undo the latest change of the inventory"),
    "cordon": Place("gpurun.cli.inventory_state:cordon", "Stop new jobs from starting on hosts"),
    "drain": Place("gpurun.cli.inventory_state:drain", "Move jobs from hosts that need maintenance"),
    "uncordon": Place("gpurun.cli.inventory_state:uncordon", "Let new jobs start on hosts again"),
    "trust": Place("gpurun.cli.inventory_trust:trust", "Show and trust host keys"),
    "connect": Place("gpurun.cli.inventory_connect:connect", "Log in to hosts that ask for a second factor"),
    "import": Place("gpurun.cli.inventory_exchange:import_", "Make an inventory from another tool's list of hosts"),
    "export": Place("gpurun.cli.inventory_exchange:export", "Print the inventory for another tool"),
}

app = typer.Typer(cls=lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _inventory() -> None:
    """Show, check and change the inventory."""
