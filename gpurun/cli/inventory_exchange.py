"""``gpurun inventory import|export``: convert between inventories and other tools' lists of hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.inventory_options import cluster, state_home
from gpurun.cli.options import InventoryOption, SomeHostsArgument, YesOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import BadInput
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpurun.inventory.history import Imported
    from gpurun.inventory.imports.again import Merged
    from gpurun.inventory.imports.draft import Draft

EXPORTS = ("ansible", "hostfile", "deepspeed", "json")
_NOTES_SHOWN = 20


def import_(
    source: Annotated[Path, typer.Argument(help="File to import, or a folder such as /etc/slurm.")],
    kind: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="Format of SOURCE: ansible, ssh-config, slurm, hostfile, csv, skypilot, dstack or etc-hosts.",
        ),
    ] = None,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only print the new inventory, or how the existing inventory would change."),
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add the hosts to an existing inventory that has hosts from other sources.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(metavar="GPUS", help="Number of GPUs of each host for which SOURCE gives no number.")
    ] = None,
    generation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="GPU generation of each host for which SOURCE gives no generation."),
    ] = None,
    user: Annotated[str | None, typer.Option(metavar="USER", help="User name for SSH logins to the hosts.")] = None,
    fabric: Annotated[
        str, typer.Option(metavar="KIND", help="Network between the ranks of different hosts: tcp, roce or infiniband.")
    ] = "tcp",
    interface: Annotated[str | None, typer.Option(metavar="NAME", help="Network interface that ranks use.")] = None,
    hca: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE", help="RDMA device of the hosts, such as mlx5_0. You can repeat --hca."),
    ] = None,
    racks: Annotated[
        str | None, typer.Option(metavar="GLOB", help="From Ansible, import the groups that match GLOB as racks.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(metavar="GLOB", help="From Ansible, import only hosts of groups that match GLOB.")
    ] = None,
) -> None:
    """Make an inventory from another tool's list of hosts, or merge the list's changes since its last import.

    The list may be an Ansible inventory, ssh config, a Slurm configuration, a hostfile, CSV, SkyPilot's SSH node pools,
    dstack's SSH fleets or /etc/hosts. If the inventory exists, gpurun shows the difference and asks for confirmation.

    gpurun inventory import /etc/slurm/slurm.conf --dry-run
    """
    from gpurun.inventory.imports.ansible import Meant
    from gpurun.inventory.imports.compose import compose
    from gpurun.inventory.imports.source import FORMATS, read
    from gpurun.inventory.load import parse
    from gpurun.inventory.locate import is_there

    if kind is not None and kind not in FORMATS:
        raise BadInput(f"--from {kind!r} is unknown (allowed: {', '.join(FORMATS)})")
    stated = _checked({"gpus": gpus, "generation": generation, "user": user})
    wires = _wires(fabric, interface, hca or [])
    target = Path(inventory or "inventory.yaml").absolute()
    exists = is_there(target)
    if exists and source.exists() and not dry_run and not merge and not _was_imported(target, source):
        raise BadInput(
            "the inventory already exists, but gpurun did not import the inventory from this source", where=str(target),
            hint="--merge adds the source's hosts to this inventory; -i FILE writes another inventory",
        )  # fmt: skip
    draft = read(source, kind, Meant(racks, groups))
    if exists and (merge or _was_imported(target, Path(draft.source))):
        _merge(draft, target, stated, yes=yes, dry_run=dry_run)
        return
    if interface is None:
        draft.guess("interface eth0 (`gpurun inventory probe` shows the interfaces of the hosts)")
    if dry_run:
        text = compose(draft, stated, wires)
        parse(text.encode(), target)
        _notes(draft, most=None)
        typer.echo(text, nl=False)
        return
    create_inventory(draft, target, stated, wires)


def _checked(given: Mapping[str, object]) -> dict[str, str]:
    """Return the options for hosts as text. Raises BadInput that names the option of a wrong value."""
    from gpurun.inventory.settings import parse

    stated = {key: str(value) for key, value in given.items() if value is not None}
    for key, text in stated.items():
        try:
            parse([f"{key}={text}"])
        except BadInput as error:
            raise BadInput(f"--{error.message}") from error
    return stated


def _wires(fabric: str, interface: str | None, hcas: Sequence[str]) -> dict[str, str]:
    """Return the keys of the only fabric. Raises BadInput that names the option of a wrong value."""
    from gpurun.documents.convert import convert
    from gpurun.inventory.fields import FABRIC

    convert(fabric, FABRIC["kind"], "--fabric")
    convert(interface or "eth0", FABRIC["interface"], "--interface")
    if hcas and fabric == "tcp":
        raise BadInput(
            "--hca names RDMA devices, and --fabric tcp uses no RDMA device",
            hint="give --fabric roce or --fabric infiniband, or leave out --hca",
        )
    wires = {"kind": fabric, "interface": interface or "eth0"}
    if hcas:
        wires["hcas"] = f"[{', '.join(hcas)}]"
    return wires


def _was_imported(target: Path, source: Path) -> bool:
    """Return whether an inventory was imported from a source: as its history says, or its first lines."""
    from gpurun.cli.inventory_editing import inventory_file
    from gpurun.inventory.imports.guesses import imported_from
    from gpurun.inventory.imports.source import file_of
    from gpurun.inventory.load import read

    file = file_of(source)
    if inventory_file(target).history.last_said(str(file.absolute())) is not None:
        return True
    named = imported_from(read(target).decode("utf-8", "replace"))
    return named is not None and Path(named).absolute() == file.absolute()


def _merge(draft: Draft, target: Path, stated: Mapping[str, str], *, yes: bool, dry_run: bool) -> None:
    """Merge a source into an inventory: say what the source changed, show the difference, ask, and write it."""
    from gpurun.cli.inventory_editing import change_file, inventory_file
    from gpurun.inventory.history import Imported
    from gpurun.inventory.imports.again import merge
    from gpurun.inventory.load import read

    source = str(Path(draft.source).absolute())
    last = inventory_file(target).history.last_said(source)
    now = read(target)
    results: dict[bytes, Merged] = {now: merge(now, target, draft, last, stated)}
    latest = [now]

    def rewrite(data: bytes) -> bytes:
        latest[0] = data
        if data not in results:
            results[data] = merge(data, target, draft, last, stated)
        return results[data].after

    _notes(draft, most=None if dry_run else _NOTES_SHOWN)
    for note in results[now].notes:
        say(printable(note))
    change_file(target, rewrite, yes=yes, dry_run=dry_run, imported=lambda: Imported(source, results[latest[0]].said))


def create_inventory(draft: Draft, target: Path, stated: Mapping[str, str], wires: Mapping[str, str]) -> None:
    """Write a draft as an inventory, and print which values were guessed.

    Args:
        stated: values for hosts whose source does not say.
        wires: the keys of the inventory's only fabric.

    Raises:
        BadInput: the file exists, or the draft is not a valid inventory.
    """
    from gpurun.inventory.history import Imported
    from gpurun.inventory.imports.again import said_by
    from gpurun.inventory.imports.compose import compose
    from gpurun.inventory.load import parse

    text = compose(draft, stated, wires)
    found = parse(text.encode(), target)
    _notes(draft, most=_NOTES_SHOWN)
    _create(target, text, Imported(str(Path(draft.source).absolute()), said_by(draft)))
    gpus, racks = count(found.total_gpus, "GPU"), count(len(found.racks), "rack")
    say(f"wrote {target}: {count(len(found.hosts), 'host')}, {gpus}, {racks}")


def export(
    kind: Annotated[
        str, typer.Argument(metavar="FORMAT", help="Format of the output: ansible, hostfile, deepspeed or json.")
    ],
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
        raise BadInput(f"there is no format {kind!r} (allowed: {', '.join(EXPORTS)})", where="FORMAT")
    found = cluster(inventory)
    chosen = found.choose(hosts)
    if kind == "json":
        print_json(document(found.inventory, chosen))
        return
    sys.stdout.write({"ansible": ansible, "hostfile": openmpi, "deepspeed": deepspeed}[kind](chosen))


def _create(target: Path, text: str, imported: Imported) -> None:
    from gpurun.cli.inventory_editing import author
    from gpurun.inventory.change import InventoryFile

    try:
        InventoryFile(target, state_home()).create(text.encode(), author(), imported)
    except FileExistsError as error:
        raise BadInput(
            "the inventory already exists", where=str(target), hint="-i FILE writes another inventory"
        ) from error


def _notes(draft: Draft, *, most: int | None) -> None:
    """Print at most `most` notes each about values taken, guessed and not mapped; None = all."""
    for title, notes in (("took", draft.took), ("guessed", draft.guessed), ("not mapped", draft.left)):
        for note in notes[:most]:
            say(f"{title}: {printable(note)}")
        if most is not None and len(notes) > most:
            say(f"{title}: {len(notes) - most} more; --dry-run prints all notes")
