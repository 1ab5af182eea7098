"""``gpurun inventory import|export``: convert between inventories and other tools' lists of hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.inventory_options import cluster, state_home
from gpurun.cli.options import InventoryOption, SomeHostsArgument
from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpurun.inventory.imports.draft import Draft

EXPORTS = ("ansible", "hostfile", "deepspeed", "json")
_NOTES_SHOWN = 20


def import_(
    source: Annotated[Path, typer.Argument(help="What to import: a file, or a folder such as /etc/slurm.")],
    kind: Annotated[
        str | None,
        typer.Option("--from", metavar="FORMAT", help="Format: ansible, ssh-config, slurm, hostfile or csv."),
    ] = None,
    inventory: InventoryOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the inventory, write nothing.")] = False,
    gpus: Annotated[int | None, typer.Option(help="GPUs per host, for hosts whose source does not say.")] = None,
    generation: Annotated[str | None, typer.Option(help="GPU generation of those hosts.")] = None,
    user: Annotated[str | None, typer.Option(help="User that SSH logs in as.")] = None,
    fabric: Annotated[str, typer.Option(help="Fabric of the hosts: tcp, roce or infiniband.")] = "tcp",
    interface: Annotated[str | None, typer.Option(help="Network interface that ranks use.")] = None,
    hca: Annotated[list[str] | None, typer.Option(help="RDMA device, such as mlx5_0; may be repeated.")] = None,
    racks: Annotated[str | None, typer.Option(metavar="GLOB", help="Ansible: which groups are racks.")] = None,
    groups: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Ansible: import only the hosts of these groups.")
    ] = None,
) -> None:
    """Make an inventory from an Ansible inventory, ssh config, Slurm configuration, hostfile or CSV file.

    gpurun inventory import /etc/slurm/slurm.conf --dry-run
    """
    from gpurun.inventory.imports.ansible import Meant
    from gpurun.inventory.imports.compose import compose
    from gpurun.inventory.imports.source import FORMATS, read
    from gpurun.inventory.load import parse
    from gpurun.inventory.locate import is_there

    if kind is not None and kind not in FORMATS:
        raise BadInput(f"--from {kind!r} is unknown (allowed: {', '.join(FORMATS)})")
    target = Path(inventory or "inventory.yaml").absolute()
    if not dry_run and is_there(target):
        raise BadInput("there is an inventory already", where=str(target), hint="-i FILE writes another one")
    draft = read(source, kind, Meant(racks, groups))
    given = {"gpus": gpus, "generation": generation, "user": user}
    stated = {key: str(value) for key, value in given.items() if value is not None}
    if interface is None:
        draft.guess("interface eth0: gpurun inventory probe shows what the hosts have")
    wires = {"kind": fabric, "interface": interface or "eth0"}
    if hca:
        wires["hcas"] = f"[{', '.join(hca)}]"
    if dry_run:
        text = compose(draft, stated, wires)
        parse(text.encode(), target)
        _notes(draft, most=None)
        typer.echo(text, nl=False)
        return
    create_inventory(draft, target, stated, wires)


def create_inventory(draft: Draft, target: Path, stated: Mapping[str, str], wires: Mapping[str, str]) -> None:
    """Write a draft as an inventory, and print which values were guessed.

    Args:
        stated: values for hosts whose source does not say.
        wires: the keys of the inventory's only fabric.

    Raises:
        BadInput: the file exists, or the draft is not a valid inventory.
    """
    from gpurun.inventory.imports.compose import compose
    from gpurun.inventory.load import parse

    text = compose(draft, stated, wires)
    found = parse(text.encode(), target)
    _notes(draft, most=_NOTES_SHOWN)
    _create(target, text)
    say(f"wrote {target}: {len(found.hosts)} hosts, {found.total_gpus} GPUs, {len(found.racks)} racks")


def export(
    kind: Annotated[str, typer.Argument(metavar="FORMAT", help="Format: ansible, hostfile, deepspeed or json.")],
    hosts: SomeHostsArgument = None,
    inventory: InventoryOption = None,
) -> None:
    """Print the inventory in the format of Ansible, Open MPI or DeepSpeed, or as JSON.

    gpurun inventory export ansible @rack:r1 > hosts.ini
    """
    from gpurun.inventory.exports.ansible import ansible
    from gpurun.inventory.exports.document import document
    from gpurun.inventory.exports.hostfile import deepspeed, openmpi

    if kind not in EXPORTS:
        raise BadInput(f"{kind!r} is unknown (allowed: {', '.join(EXPORTS)})")
    found = cluster(inventory)
    chosen = found.choose(hosts)
    if kind == "json":
        print_json(document(found.inventory, chosen))
        return
    sys.stdout.write({"ansible": ansible, "hostfile": openmpi, "deepspeed": deepspeed}[kind](chosen))


def _create(target: Path, text: str) -> None:
    from gpurun.cli.inventory_editing import author
    from gpurun.inventory.change import InventoryFile

    try:
        InventoryFile(target, state_home()).create(text.encode(), author())
    except FileExistsError as error:
        raise BadInput("there is an inventory already", where=str(target)) from error


def _notes(draft: Draft, *, most: int | None) -> None:
    """Print at most `most` notes each about values taken, guessed and not mapped; None = all."""
    for title, notes in (("took", draft.took), ("guessed", draft.guessed), ("not mapped", draft.left)):
        for note in notes[:most]:
            say(f"{title}: {printable(note)}")
        if most is not None and len(notes) > most:
            say(f"{title}: and {len(notes) - most} more; --dry-run prints all of them")
