"""``gpurun inventory list|show|validate|schema``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

import typer

from gpurun.cli.options import InventoryOption, JsonOption, SomeHostsArgument
from gpurun.cli.printing import print_json, say
from gpurun.cli.stores import cluster
from gpurun.documents.plain import json_text, printable
from gpurun.quantities import count
from gpurun.state import clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpurun.documents.plain import Problem
    from gpurun.inventory.model import Fabric, Host, Inventory, Pool
    from gpurun.leases.look import Cluster
    from gpurun.state.hosts import Cordon, Out

    class KnownHostShape(Host):
        """A host with its defaults and its state.

        Attributes:
            drain: the progress of the drain in words, during a drain.
            cordon: the host's cordon; null: the host is not cordoned.
            out: why the last check found the host broken; only if the host is out.
            slow: how often your jobs named the host slow; only if a job did.
        """

        __optional_keys__ = frozenset({"drain", "out", "slow"})
        state: str
        drain: str
        cordon: Cordon | None
        out: Out
        slow: NamedSlowShape


class NamedSlowShape(TypedDict):
    """How often your jobs named a host slow.

    Attributes:
        last_s: when last, seconds since 1970.
        why: what the last job said.
    """

    times: int
    last_s: float
    why: str


def list_hosts(hosts: SomeHostsArgument = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """List hosts with their state. Hosts of one rack share a line if only their names differ.

    gpurun inventory list @rack:r1
    """
    found = cluster(inventory)
    chosen = found.choose(hosts)
    if as_json:
        print_json(_hosts_json(found, chosen))
        return
    _print_table(found, chosen)


def show(hosts: SomeHostsArgument = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Show all values of hosts, including values from `defaults`. Without HOSTS, show a summary of the cluster.

    gpurun inventory show gpu-r1-01
    """
    found = cluster(inventory)
    document = _cluster_json(found.inventory) if hosts is None else _hosts_json(found, found.choose(hosts))
    if as_json:
        print_json(document)
        return
    shown = json.loads(json_text(document))
    if hosts is None:
        _print_indented(shown)
    else:
        for names, host in _alike(shown["hosts"]):
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


class ValidateShape(TypedDict):
    """Problems in an inventory."""

    inventory: str
    valid: bool
    problems: tuple[Problem, ...]


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
    from gpurun.documents.plain import DocumentError
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
        print_json(ValidateShape(inventory=str(path), valid=not problems, problems=problems))
    for problem in () if as_json else problems:
        typer.echo(str(problem))
    if problems:
        raise typer.Exit(DocumentError.exit_code)
    say(f"{shown_as}: valid; {_sum(found)}")


def schema() -> None:
    """Print the JSON Schema of inventories, for editors that check while you type."""
    from gpurun.inventory.fields import inventory_schema as made

    print_json(made())


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


class InventoryListShape(TypedDict):
    """Hosts."""

    inventory: str
    hosts: list[KnownHostShape]


def _hosts_json(found: Cluster, hosts: Sequence[Host]) -> InventoryListShape:
    states = _states(found)
    return {"inventory": found.inventory.source, "hosts": [_host_json(host, found, states) for host in hosts]}


def _host_json(host: Host, found: Cluster, states: Mapping[str, tuple[str, str]]) -> KnownHostShape:
    cordon, out = found.cordons.get(host.name), found.outs.get(host.name)
    state, shown = states.get(host.name, (cordon.state if cordon else "out" if out else "ok", ""))
    known = found.machines.get(host.machine)
    slow: NamedSlowShape | None = None
    if known is not None and known.slow_times:
        slow = {"times": known.slow_times, "last_s": known.slow_s, "why": printable(known.slow_why)}
    told = {
        **vars(host), "state": state, **({"drain": shown} if shown else {}), "cordon": cordon,
        **({"out": out} if out else {}), **({"slow": slow} if slow else {}),
    }  # fmt: skip
    return cast("KnownHostShape", told)


class GenerationShape(TypedDict):
    """The hosts of one GPU generation, as a host set."""

    hosts: str
    gpus: int


class InventoryShape(TypedDict):
    """A summary of the cluster. With HOSTS, the command prints the document of `gpurun inventory list`.

    Attributes:
        racks: the hosts of each rack, as a host set.
    """

    inventory: str
    hosts: int
    gpus: int
    generations: dict[str, GenerationShape]
    racks: dict[str, str]
    fabrics: Mapping[str, Fabric]
    pools: dict[str, Pool]
    ssh_config: str | None
    docker_host: str | None


def _cluster_json(inventory: Inventory) -> InventoryShape:
    from gpurun.inventory.folding import fold

    generations: dict[str, GenerationShape] = {}
    for generation in inventory.generations:
        hosts = [host for host in inventory.hosts if host.generation == generation]
        generations[generation] = {"hosts": fold(h.name for h in hosts), "gpus": sum(h.gpus for h in hosts)}
    return {
        "inventory": inventory.source,
        "hosts": len(inventory.hosts),
        "gpus": inventory.total_gpus,
        "generations": generations,
        "racks": {rack.name: fold(rack.hosts) for rack in inventory.racks},
        "fabrics": inventory.fabrics,
        "pools": {pool.name: pool for pool in inventory.pools},
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
    heads = ("rack", "hosts", "generation", "GPUs", "fabric", "state", "labels")
    print_table(heads, [(rack, fold(names), *rest) for (rack, *rest), names in rows.items()])
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
        if item in (None, "", {}, []):
            continue
        if isinstance(item, dict):
            typer.echo(f"{indent}{key}:")
            _print_indented(item, indent + "  ")
        else:
            typer.echo(f"{indent}{key}: {printable(_plain(item))}")


def _plain(item: object) -> str:
    return f"[{', '.join(_plain(part) for part in item)}]" if isinstance(item, list) else str(item)
