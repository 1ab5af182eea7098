"""``gpurun inventory``: the commands, and where each is."""

from __future__ import annotations

import typer

from gpurun.cli import inventory_editing, inventory_exchange, inventory_reading, inventory_state, inventory_trust, probe

app = typer.Typer(name="inventory", help="Show, check and change the inventory.", no_args_is_help=True)

app.command("list")(inventory_reading.list_hosts)
app.command("show")(inventory_reading.show)
app.command("validate")(inventory_reading.validate)
app.command("schema")(inventory_reading.schema)
app.command("probe")(probe.probe)

app.command("add")(inventory_editing.add)
app.command("set")(inventory_editing.set_values)
app.command("label")(inventory_editing.label)
app.command("remove")(inventory_editing.remove)
app.command("edit")(inventory_editing.edit)
app.command("diff")(inventory_editing.diff)
app.command("undo")(inventory_editing.undo)

app.command("cordon")(inventory_state.cordon)
app.command("drain")(inventory_state.drain)
app.command("uncordon")(inventory_state.uncordon)

app.command("trust")(inventory_trust.trust)

app.command("import")(inventory_exchange.import_)
app.command("export")(inventory_exchange.export)
