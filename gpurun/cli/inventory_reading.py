"""``gpurun inventory list|show|validate|schema``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.options import InventoryOption, JsonOption, SomeHostsArgument
from gpurun.cli.printing import print_json, say
from gpurun.cli.stores import cluster
from gpurun.documents.plain import printable
from gpurun.quantities import count
from gpurun.state import clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpurun.inventory.model import Host, Inventory
    from gpurun.leases.look import Cluster


def list_hosts(hosts: SomeHostsArgument = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """List hosts with their state. Hosts of one rack share a line if only their names differ.

    gpurun inventory list @rack:r1
    """
    found = cluster(inventory)
    chosen = found.choose(hosts)
    if as_json:
        states = _states(found)
        listed = [_host_json(host, found, states) for host in chosen]
        print_json({"inventory": found.inventory.source, "hosts": listed})
        return
    _print_table(found, chosen)


def show(hosts: SomeHostsArgument = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Show all values of hosts, including values from `defaults`. Without HOSTS, show a summary of the cluster.

    gpurun inventory show gpu-r1-01
    """
    found = cluster(inventory)
    document = _cluster_json(found.inventory)
    if hosts is not None:
        states = _states(found)
        listed = [_host_json(host, found, states) for host in found.choose(hosts)]
        document = {"inventory": found.inventory.source, "hosts": listed}
    if as_json:
        print_json(document)
    elif hosts is None:
        _print_indented(document)
    else:
        for names, host in _alike(document["hosts"]):
            typer.echo(f"{names}:")
            _print_indented(host, "  ")


def _alike(hosts: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is known of hosts; those that differ in nothing but their names are one entry."""
    from gpurun.inventory.folding import fold

    groups: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for host in hosts:
        rest = {key: value for key, value in host.items() if key != "name"}
        groups.setdefault(repr(rest), ([], rest))[0].append(host["name"])
    for names, rest in groups.values():
        yield fold(names), rest


def validate(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="The inventory file to check.", show_default=False)
    ] = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check an inventory, and print each problem as FILE:LINE:COL: problem. The exit code is 2 if there is a problem.

    gpurun inventory validate inventory.yaml
    """
    from gpurun.documents.plain import DocumentError, Problem
    from gpurun.inventory.read import find_inventory, load_inventory

    named = file or inventory
    path = find_inventory(named, os.environ)
    shown_as = named if named and Path(named).absolute() == path else str(path)
    problems: tuple[Problem, ...] = ()
    try:
        found = load_inventory(shown_as)
    except DocumentError as error:
        problems = error.problems
    if as_json:
        print_json({"inventory": str(path), "valid": not problems, "problems": [_problem_json(p) for p in problems]})
    for problem in () if as_json else problems:
        typer.echo(str(problem))
    if problems:
        raise typer.Exit(DocumentError.exit_code)
    say(f"{shown_as}: valid; {_sum(found)}")


def schema() -> None:
    """Print the JSON Schema of inventories, for editors that check while you type."""
    from gpurun.inventory.fields import inventory_schema as made

    print_json(made())


def _problem_json(problem: Any) -> dict[str, Any]:
    return {**vars(problem), "allowed": list(problem.allowed)}


def _states(found: Cluster) -> dict[str, tuple[str, str]]:
    """Return the state of each draining or drained host: a word for scripts, and a text for people."""
    if not found.groups["draining"]:
        return {}

    from gpurun.leases.look import look

    rows = found.rows(look(found.home, now_s=clock.now_s(), despite_damage=True))
    return {
        row.host.name: (row.state, row.shown.removesuffix(", out"))
        for row in rows
        if row.state == "drained" or (row.state == "draining" and row.shown != row.state)
    }


def _host_json(host: Host, found: Cluster, states: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    cordon, out = found.cordons.get(host.name), found.outs.get(host.name)
    state, shown = states.get(host.name, (cordon.state if cordon else "out" if out else "ok", ""))
    return {
        **vars(host),
        "labels": dict(host.labels),
        "state": state,
        **({"drain": shown} if shown else {}),
        "cordon": vars(cordon) if cordon else None,
        **({"out": vars(out)} if out else {}),
    }


def _cluster_json(inventory: Inventory) -> dict[str, Any]:
    from gpurun.inventory.folding import fold

    generations = {}
    for generation in inventory.generations:
        hosts = [host for host in inventory.hosts if host.generation == generation]
        generations[generation] = {
            "hosts": fold(h.name for h in hosts),
            "gpus": sum(h.gpus for h in hosts),
        }
    return {
        "inventory": inventory.source,
        "hosts": len(inventory.hosts),
        "gpus": inventory.total_gpus,
        "generations": generations,
        "racks": {rack.name: fold(rack.hosts) for rack in inventory.racks},
        "fabrics": {name: {**vars(f), "kind": f.kind.value} for name, f in inventory.fabrics.items()},
        "pools": {pool.name: vars(pool) for pool in inventory.pools},
        "ssh_config": inventory.ssh_config,
        "docker_host": inventory.docker_host,
    }


def _sum(inventory: Inventory) -> str:
    counts = {"host": len(inventory.hosts), "GPU": inventory.total_gpus, "rack": len(inventory.racks)}
    return ", ".join(count(number, thing) for thing, number in counts.items())


def _print_table(found: Cluster, chosen: tuple[Host, ...]) -> None:
    from gpurun.cli.tables import print_table
    from gpurun.inventory.folding import fold

    rows: dict[tuple[str, ...], list[str]] = {}
    states = _states(found)
    for host in chosen:
        labels = " ".join(f"{key}={value}" for key, value in host.labels.items())
        row = (host.rack, host.generation, str(host.gpus), host.fabric, _state(found, host, states), labels)
        rows.setdefault(row, []).append(host.name)
    cells = [(rack, fold(names), *rest) for (rack, *rest), names in rows.items()]
    print_table(
        ("rack", "hosts", "generation", "GPUs", "fabric", "state", "labels"),
        [([*map(printable, row)], "") for row in cells],
    )
    say(f"{_sum(found.inventory)} in {found.inventory.source}")


def _state(found: Cluster, host: Host, states: Mapping[str, tuple[str, str]]) -> str:
    cordon, out = found.cordons.get(host.name), found.outs.get(host.name)
    said = []
    if cordon is not None:
        who = f"by {cordon.by}" + (f": {cordon.reason}" if cordon.reason else "")
        _, shown = states.get(host.name, (cordon.state, cordon.state))
        said.append(f"{shown}, {who}" if ":" in shown else f"{shown} {who}")
    if out is not None:
        said.append(out.words)
    return printable("; ".join(said)) or "ok"


def _print_indented(document: dict[str, Any], indent: str = "") -> None:
    """Print a document for people, like YAML. Leaves out empty values."""
    for key, item in document.items():
        if item in (None, "", (), {}, []):
            continue
        if isinstance(item, dict):
            typer.echo(f"{indent}{key}:")
            _print_indented(item, indent + "  ")
        else:
            typer.echo(f"{indent}{key}: {printable(_plain(item))}")


def _plain(item: object) -> str:
    return f"[{', '.join(_plain(part) for part in item)}]" if isinstance(item, tuple) else str(item)
