"""``gpurun inventory``: the commands and their modules."""

from __future__ import annotations

import typer

from gpurun.cli.lazy import Place, lazy_group

COMMANDS = {
    "list": Place("gpurun.cli.inventory_reading:list_hosts", "List hosts with their state"),
    "show": Place("gpurun.cli.inventory_reading:show", "Show everything known about hosts"),
    "validate": Place("gpurun.cli.inventory_reading:validate", "Check an inventory for problems"),
    "schema": Place("gpurun.cli.inventory_reading:schema", "Print the JSON Schema, for editors"),
    "probe": Place("gpurun.cli.probe:probe", "Detect the hosts' hardware"),
    "add": Place("gpurun.cli.inventory_editing:add", "Add hosts to a rack"),
    "set": Place("gpurun.cli.inventory_editing:set_values", "Set values of hosts: KEY=VALUE"),
    "label": Place("gpurun.cli.inventory_editing:label", "Set labels of hosts"),
    "remove": Place("gpurun.cli.inventory_editing:remove", "Remove hosts"),
    "edit": Place("gpurun.cli.inventory_editing:edit", "Open the inventory in an editor"),
    "diff": Place("gpurun.cli.inventory_editing:diff", "Show a change of the inventory"),
    "undo": Place("gpurun.cli.inventory_editing:undo", "Undo the latest change"),
    "cordon": Place("gpurun.cli.inventory_state:cordon", "Give hosts no new gangs"),
    "drain": Place("gpurun.cli.inventory_state:drain", "Move gangs away from hosts"),
    "uncordon": Place("gpurun.cli.inventory_state:uncordon", "Give hosts new gangs again"),
    "trust": Place("gpurun.cli.inventory_trust:trust", "Show and trust host keys"),
    "connect": Place("gpurun.cli.inventory_connect:connect", "Log in to hosts with a second factor"),
    "import": Place("gpurun.cli.inventory_exchange:import_", "Make an inventory from another tool's hosts"),
    "export": Place("gpurun.cli.inventory_exchange:export", "Print the inventory for another tool"),
}

app = typer.Typer(cls=lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _inventory() -> None:
    """Show, check and change the inventory."""
