"""``gpurun inventory``: the commands, and where each is."""

from __future__ import annotations

import typer

from gpurun.cli.lazy import Place, lazy_group

COMMANDS = {
    "list": Place("gpurun.cli.inventory_reading:list_hosts"),
    "show": Place("gpurun.cli.inventory_reading:show"),
    "validate": Place("gpurun.cli.inventory_reading:validate"),
    "schema": Place("gpurun.cli.inventory_reading:schema"),
    "probe": Place("gpurun.cli.probe:probe"),
    "add": Place("gpurun.cli.inventory_editing:add"),
    "set": Place("gpurun.cli.inventory_editing:set_values"),
    "label": Place("gpurun.cli.inventory_editing:label"),
    "remove": Place("gpurun.cli.inventory_editing:remove"),
    "edit": Place("gpurun.cli.inventory_editing:edit"),
    "diff": Place("gpurun.cli.inventory_editing:diff"),
    "undo": Place("gpurun.cli.inventory_editing:undo"),
    "cordon": Place("gpurun.cli.inventory_state:cordon"),
    "drain": Place("gpurun.cli.inventory_state:drain"),
    "uncordon": Place("gpurun.cli.inventory_state:uncordon"),
    "trust": Place("gpurun.cli.inventory_trust:trust"),
    "connect": Place("gpurun.cli.inventory_connect:connect"),
    "import": Place("gpurun.cli.inventory_exchange:import_"),
    "export": Place("gpurun.cli.inventory_exchange:export"),
}

app = typer.Typer(cls=lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _inventory() -> None:
    """Show, check and change the inventory."""
