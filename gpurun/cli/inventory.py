"""``gpurun inventory``: what is in the inventory, and whether it is right."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gpurun.inventory.model import Host, Inventory

app = typer.Typer(name="inventory", help="Show, check and change the inventory.", no_args_is_help=True)

InventoryOption = Annotated[
    str | None, typer.Option("--inventory", "-i", metavar="FILE", help="Inventory file.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
HostsArgument = Annotated[
    str | None,
    typer.Argument(metavar="[HOSTS]", help="Host set, such as gpu-r1-[01-16] or @rack:r1.", show_default=False),
]


@app.command("list")
def list_hosts(hosts: HostsArgument = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """List hosts; alike ones of a rack folded into one line."""
    found = _load(inventory)
    chosen = _chosen(found, hosts)
    if as_json:
        _print_json({"inventory": found.source, "hosts": [_host_json(host) for host in chosen]})
        return
    _print_table(found, chosen)


@app.command()
def show(hosts: HostsArgument = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Show everything the inventory says about hosts, defaults applied; without HOSTS, about the cluster."""
    found = _load(inventory)
    document: dict[str, Any] = _cluster_json(found)
    if hosts is not None:
        document = {"inventory": found.source, "hosts": [_host_json(host) for host in _chosen(found, hosts)]}
    if as_json:
        _print_json(document)
        return
    _print_indented(document)


@app.command()
def validate(
    file: Annotated[str | None, typer.Argument(metavar="[FILE]", help="Inventory file.", show_default=False)] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check an inventory; print FILE:LINE:COL: what is wrong, and exit 2, if anything is."""
    from gpurun.inventory.load import load
    from gpurun.inventory.locate import find
    from gpurun.inventory.problems import InventoryError

    path = find(file or inventory, os.environ)
    shown_as = file or inventory or str(path)
    problems: tuple[Any, ...] = ()
    found: Inventory | None = None
    try:
        found = load(shown_as if Path(shown_as).absolute() == path else path)
    except InventoryError as error:
        problems = error.problems
    if as_json:
        listed = [
            {
                "line": p.line,
                "column": p.column,
                "message": p.message,
                "value": p.value,
                "allowed": list(p.allowed),
            }
            for p in problems
        ]
        _print_json({"inventory": str(path), "valid": not problems, "problems": listed})
    else:
        for problem in problems:
            typer.echo(str(problem))
        if found is not None:
            typer.echo(f"{shown_as}: valid; {_sum(found)}", err=True)
    if problems:
        raise typer.Exit(2)


def _load(explicit: str | None) -> Inventory:
    from gpurun.inventory.load import load
    from gpurun.inventory.locate import find

    return load(find(explicit, os.environ))


def _chosen(inventory: Inventory, selection: str | None) -> tuple[Host, ...]:
    if selection is None:
        return inventory.hosts
    from gpurun.inventory.hostset import select

    return tuple(inventory.by_name[name] for name in select(inventory, selection))


def _print_json(document: object) -> None:
    json.dump(document, sys.stdout, indent=2 if sys.stdout.isatty() else None, default=list)
    sys.stdout.write("\n")


def _host_json(host: Host) -> dict[str, Any]:
    return {**vars(host), "labels": dict(host.labels)}


def _cluster_json(inventory: Inventory) -> dict[str, Any]:
    from gpurun.inventory.hostset import fold

    return {
        "inventory": inventory.source,
        "hosts": len(inventory.hosts),
        "gpus": inventory.total_gpus,
        "generations": {
            generation: {
                "hosts": fold(h.name for h in inventory.hosts if h.generation == generation),
                "gpus": sum(h.gpus for h in inventory.hosts if h.generation == generation),
            }
            for generation in inventory.generations
        },
        "racks": {rack.name: fold(rack.hosts) for rack in inventory.racks},
        "fabrics": {name: {**vars(f), "kind": f.kind.value} for name, f in inventory.fabrics.items()},
        "pools": {pool.name: vars(pool) for pool in inventory.pools},
        "ssh_config": inventory.ssh_config,
        "docker_host": inventory.docker_host,
    }


def _sum(inventory: Inventory) -> str:
    return f"{len(inventory.hosts)} hosts, {inventory.total_gpus} GPUs, {len(inventory.racks)} racks"


def _print_table(inventory: Inventory, chosen: tuple[Host, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    from gpurun.inventory.hostset import fold

    rows: dict[tuple[str, ...], list[str]] = {}
    for host in chosen:
        labels = " ".join(f"{key}={value}" for key, value in host.labels.items())
        row = (host.rack, host.generation, str(host.gpus), host.fabric, labels)
        rows.setdefault(row, []).append(host.name)
    table = Table("RACK", "HOSTS", "GENERATION", "GPUS EACH", "FABRIC", "LABELS", box=None, pad_edge=False)
    for (rack, *rest), names in rows.items():
        table.add_row(rack, fold(names), *rest)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    console.print(table)
    typer.echo(f"{_sum(inventory)} in {inventory.source}", err=True)


def _print_indented(value: dict[str, Any], indent: str = "") -> None:
    """A document for people: YAML-like, empty values left out."""
    for key, item in value.items():
        if item in (None, "", (), {}, []):
            continue
        if isinstance(item, dict):
            typer.echo(f"{indent}{key}:")
            _print_indented(item, indent + "  ")
        elif key == "hosts" and isinstance(item, list):
            for host in item:
                typer.echo(f"{host.pop('name')}:")
                _print_indented(host, "  ")
        else:
            typer.echo(f"{indent}{key}: {item}")
