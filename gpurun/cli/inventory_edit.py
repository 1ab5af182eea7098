"""``gpurun inventory add | set | label | remove | edit | diff | undo | import | export``: change the file."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from gpurun.cli.cancel import agree
from gpurun.cli.options import DryRunOption, HostsArgument, InventoryOption, JsonOption, SomeHostsArgument, YesOption
from gpurun.cli.printing import print_json, say, wants_colour
from gpurun.cli.stores import cluster, inventory_file, located, state_home
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.inventory.exports import EXPORTS
from gpurun.moments import date_time
from gpurun.quantities import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpurun.doctor.host_checks import Difference
    from gpurun.doctor.survey import Survey
    from gpurun.inventory.change import Author, Imported, Preview, RecordedChange
    from gpurun.inventory.edit import Edit
    from gpurun.inventory.imports.again import Merged
    from gpurun.inventory.imports.draft import Draft
    from gpurun.inventory.model import Inventory


# Write what hosts have told a probe into an inventory: for `gpurun inventory probe --write` and `gpurun init`.


def differing(inventory: Inventory, survey: Survey) -> dict[str, tuple[Difference, ...]]:
    """Return the differences between the inventory and each host."""
    from gpurun.doctor.host_checks import differences

    found = {}
    for name, hardware in survey.hardware.items():
        host = inventory.by_name[name]
        found[name] = tuple(differences(host, inventory.fabric_of(host), hardware))
    return found


def with_answers(text: bytes, source: Path, survey: Survey, *, keep: bool = False, guess_rest: bool = False) -> bytes:
    """Return an inventory's text with what the hosts have told. A guess that they have answered is none any more.

    Args:
        source: the inventory's file, for messages.
        keep: replace only guesses, and add missing values: a person may have edited the others.
        guess_rest: hosts that have not told probably are as most others. Otherwise their guess stays, and with it the
            guess of all.

    Raises:
        BadInput: a host told something that no inventory can have.
    """
    from gpurun.inventory.imports.again import guessed_hosts, guesses, settled
    from gpurun.inventory.read import parse_inventory

    now, told = text.decode(), _told(parse_inventory(text, source), survey)
    guessed: dict[str, tuple[str, ...]] = {}
    for guess in guesses(now):
        hosts = guessed[guess.key] = guessed_hosts(now, guess, source)
        values = {host: told[host][guess.key] for host in hosts if told.get(host, {}).get(guess.key) is not None}
        unknown = [host for host in hosts if host not in values]
        if values and (guess_rest or not unknown):
            ((most, _),) = Counter(map(str, values.values())).most_common(1)
            now = settled(now, guess, most, unknown)
    differences = differing(parse_inventory(now.encode(), source), survey)
    if keep:
        differences = {
            host: tuple(one for one in found if one.stated in (None, ()) or host in guessed.get(one.key, ()))
            for host, found in differences.items()
        }
    return _rewritten(now.encode(), source, differences)


def _told(inventory: Inventory, survey: Survey) -> dict[str, Mapping[str, object]]:
    """Return host → key → the value that the host has."""
    from gpurun.doctor.host_checks import detected

    hosts = ((inventory.by_name[name], hardware) for name, hardware in survey.hardware.items())
    return {host.name: detected(inventory.fabric_of(host), hardware) for host, hardware in hosts}


def _rewritten(text: bytes, source: Path, differences: Mapping[str, tuple[Difference, ...]]) -> bytes:
    from gpurun.inventory.edit import SetFields, apply, from_mapping

    for values, names in _grouped(differences):
        text = apply(text, source, SetFields(tuple(names), from_mapping(values)))
    return text


def _grouped(
    differences: Mapping[str, tuple[Difference, ...]],
) -> Iterable[tuple[dict[str, object], list[str]]]:
    """Return pairs of values and the hosts that have exactly these differences."""
    groups: dict[tuple[tuple[str, object], ...], list[str]] = {}
    for name, found in differences.items():
        if found:
            groups.setdefault(tuple((one.key, one.found) for one in found), []).append(name)
    return [(dict(values), names) for values, names in groups.items()]


# ``gpurun inventory add|set|label|remove|edit|diff|undo``: change the inventory file, and keep comments and layout.


SettingsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY=VALUE…", help="Values to set, such as gpus=8 or labels.team=vision; KEY= removes a value."
    ),
]


def add(
    hosts: Annotated[str, typer.Argument(metavar="HOSTS", help="New hosts, such as 'gpu-r3-[01-16]', in quotes.")],
    settings: Annotated[
        list[str],
        typer.Argument(metavar="rack=RACK KEY=VALUE…", help="Values of the new hosts, such as rack=r3 gpus=8."),
    ],
    inventory: InventoryOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Add hosts to a rack. If the rack does not exist, gpurun creates the rack.

    gpurun inventory add 'gpu-r2-[01-08]' rack=r2 gpus=8 generation=volta
    """
    from gpurun.inventory.edit import AddHosts, parse_settings
    from gpurun.inventory.hostset import expand

    parsed = parse_settings(settings)
    racks = [setting.text for setting in parsed if setting.field == "rack"]
    if not racks:
        raise BadInput("new hosts need a rack", hint=f"run: gpurun inventory add {shlex.quote(hosts)} rack=RACK …")
    edit = AddHosts(expand(hosts), racks[0], tuple(s for s in parsed if s.field != "rack"))
    change(inventory, lambda _: edit, yes=yes, dry_run=dry_run)


def set_values(
    hosts: HostsArgument,
    settings: SettingsArgument,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Set values of hosts. KEY=VALUE sets a value, KEY= removes a value, and rack=R moves the hosts to rack R.

    gpurun inventory set @rack:r2 gpus=8 user=train
    """
    from gpurun.inventory.edit import SetFields, parse_settings

    parsed = parse_settings(settings)
    change(inventory, lambda now: SetFields(_choose(now, hosts), parsed), yes=yes, dry_run=dry_run)


def label(
    hosts: HostsArgument,
    labels: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE…", help="NAME=VALUE sets a label, and NAME- removes a label.")
    ],
    inventory: InventoryOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Set labels of hosts. NAME=VALUE sets a label, and NAME- removes a label.

    gpurun inventory label gpu-r1-01 owner=vision
    """
    from gpurun.inventory.edit import SetFields, parse_labels

    parsed = parse_labels(labels)
    change(inventory, lambda now: SetFields(_choose(now, hosts), parsed), yes=yes, dry_run=dry_run)


def remove(
    hosts: HostsArgument, inventory: InventoryOption = None, yes: YesOption = False, dry_run: DryRunOption = False
) -> None:
    """Remove hosts from the inventory.

    gpurun inventory remove gpu-r2-08 --dry-run
    """
    from gpurun.inventory.edit import RemoveHosts

    change(inventory, lambda now: RemoveHosts(_choose(now, hosts)), yes=yes, dry_run=dry_run)


def edit(
    inventory: InventoryOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Edit this file, which an earlier `gpurun inventory edit` saved.", show_default=False
        ),
    ] = None,
) -> None:
    """Open the inventory in $VISUAL or $EDITOR. gpurun refuses an invalid text, but saves the text for `--resume`."""
    from gpurun.inventory.read import read_inventory_bytes

    path = located(inventory)
    before = read_inventory_bytes(path)
    draft = _draft(path, before if resume is None else read_inventory_bytes(resume))
    try:
        _run_editor(draft)
        after = read_inventory_bytes(draft)
        if after == before:
            say("nothing to change")
        else:
            file = inventory_file(path)
            _report(file.commit(_unless_changed(before, after, draft), author()))
    except GpurunError as error:
        if read_inventory_bytes(draft) == before:
            draft.unlink()
            raise
        error.hint = f"gpurun saved your text. To continue: gpurun inventory edit --resume {shlex.quote(str(draft))}"
        raise
    draft.unlink()


class ChangesShape(TypedDict):
    """Changes of an inventory, the newest last."""

    inventory: str
    changes: list[RecordedChange]


def diff(
    number: Annotated[
        int | None,
        typer.Argument(
            metavar="[NUMBER]", help="Number of the change, from `gpurun inventory diff --all`.", show_default=False
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List all changes.")] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a change of the inventory, its author and its command. Without NUMBER, show the latest change.

    gpurun inventory diff --all
    """
    from gpurun.inventory.change import RecordedChange

    changes = inventory_file(located(inventory)).history.changes()
    if not every:
        changes = tuple(c for c in changes if c.number == number) if number is not None else changes[-1:]
        if number is not None and not changes:
            raise BadInput(f"there is no change {number}", hint="`gpurun inventory diff --all` lists the changes")
    if as_json:
        shown = [RecordedChange(*(getattr(one, each.name) for each in fields(RecordedChange))) for one in changes]
        print_json(ChangesShape(inventory=str(located(inventory)), changes=shown))
        return
    for change_ in changes:
        typer.echo(_headline(change_))
        if not every:
            typer.echo(_coloured(change_.diff, wants_colour(sys.stdout)))
    if not changes:
        say("the inventory has no recorded change")


def undo(inventory: InventoryOption = None, yes: YesOption = False, dry_run: DryRunOption = False) -> None:
    """Undo the latest change of the inventory. If you repeat the command, gpurun undoes the next older change."""
    file, by = inventory_file(located(inventory)), author()
    target, preview = file.preview_undo(by)
    say(f"undoes change {_headline(target)}")
    if dry_run:
        typer.echo(_coloured(preview.diff, coloured=False))
        return
    _agreed(preview, yes, lambda shown: file.undo(by, shown=shown, agreed=yes))


def change(
    inventory: str | None, edit_of: Callable[[Inventory], Edit], *, yes: bool = False, dry_run: bool = False
) -> None:
    """Show what an edit changes, ask, and make the change. Computes the edit again from the text that it replaces."""
    from gpurun.inventory.edit import apply
    from gpurun.inventory.read import parse_inventory

    path = located(inventory)
    change_file(path, lambda data: apply(data, path, edit_of(parse_inventory(data, path))), yes=yes, dry_run=dry_run)


def change_file(
    path: Path,
    rewrite: Callable[[bytes], bytes],
    *,
    yes: bool = False,
    dry_run: bool = False,
    imported: Callable[[], Imported] | None = None,
) -> None:
    """Like `change`, but with any function that rewrites the text. May call it again if others change the file.

    Args:
        imported: returns what the latest call of `rewrite` imported, to record it.
    """
    file, by = inventory_file(path), author()
    preview = file.preview(rewrite)
    if preview.after == preview.before:
        if imported is not None and not dry_run:
            file.commit(rewrite, by, shown=preview, imported=imported)
        say("nothing to change")
    elif dry_run:
        typer.echo(_coloured(preview.diff, coloured=False))
    else:
        _agreed(preview, yes, lambda shown: file.commit(rewrite, by, shown=shown, agreed=yes, imported=imported))


def _agreed(preview: Preview, yes: bool, carry_out: Callable[[Preview], RecordedChange | None]) -> None:
    """Make a change after a person agrees. If the file changed meanwhile, show the new change and ask again."""
    from gpurun.inventory.change import Conflict

    while True:
        say(_coloured(preview.diff, wants_colour(sys.stderr)))
        if not yes:
            agree(
                "Change the inventory?",
                "gpurun did not change the inventory, because stdin is not a terminal, so gpurun cannot ask you",
                "--yes makes the change without a question; --dry-run only shows the change",
            )
        try:
            _report(carry_out(preview))
        except Conflict as conflict:
            say("another user changed the inventory at the same time. Your change is now:")
            preview = conflict.preview
        else:
            return


def _report(change_: RecordedChange | None) -> None:
    from gpurun.state.audit import AuditLog

    if change_ is not None:
        AuditLog(state_home()).note("inventory", change=change_.number, undoes=change_.undoes)
    if change_ is None:
        say("nothing to change")
    elif change_.undoes is not None:
        say(f"change {change_.undoes} is undone")
    else:
        say(f"change {change_.number} made; `gpurun inventory undo` undoes the change")


def author() -> Author:
    """Return the user, the command line and the time."""
    from gpurun.inventory.change import Author
    from gpurun.state.paths import myself

    who = myself()
    behind = os.environ.get("SUDO_USER")
    return Author(f"{behind} as {who}" if behind else who, shlex.join(["gpurun", *sys.argv[1:]]), time.time())


def _choose(inventory: Inventory, hosts: str) -> tuple[str, ...]:
    from gpurun.leases.look import Cluster

    chosen = tuple(host.name for host in Cluster(inventory, state_home()).choose(hosts))
    if not chosen:
        raise BadInput(f"no host matches {hosts!r}", hint="`gpurun inventory list` shows all hosts")
    return chosen


def _draft(path: Path, text: bytes) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".yaml")
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    return Path(name)


def _run_editor(draft: Path) -> None:
    chosen = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not chosen and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadInput(
            "inventory edit needs a terminal",
            hint="`gpurun inventory set HOSTS KEY=VALUE` changes values without an editor",
        )
    words = shlex.split(chosen or "vi")
    try:
        code = subprocess.run([*words, str(draft)], check=False).returncode
    except OSError as error:
        raise BadInput(
            f"cannot start the editor {words[0]!r}: {error.strerror}", hint="set $EDITOR to another editor"
        ) from error
    if code != 0:
        raise BadInput(f"the editor {words[0]!r} ended with exit code {code}; gpurun changed nothing")


def _unless_changed(before: bytes, after: bytes, draft: Path) -> Callable[[bytes], bytes]:
    from gpurun.inventory.read import parse_inventory

    def rewrite(now: bytes) -> bytes:
        if now != before:
            raise StateError(
                "somebody else changed the inventory while you edited the text, so gpurun did not write your text"
            )
        parse_inventory(after, draft)
        return after

    return rewrite


def _headline(change_: RecordedChange) -> str:
    when = date_time(change_.when_s)
    undoes = f" (undoes {change_.undoes})" if change_.undoes is not None else ""
    return printable(f"{change_.number}  {when}  {change_.who}  {change_.command}{undoes}")


def _coloured(text: str, coloured: bool) -> str:
    """Return a diff for people. What an inventory holds cannot control a terminal."""
    colours: dict[str, Any] = {"+": "green", "-": "red", "@": "cyan"} if coloured else {}
    lines = [printable(line) for line in text.rstrip("\n").split("\n")]
    return "\n".join(typer.style(line, fg=colours[line[0]]) if line[:1] in colours else line for line in lines)


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
    from gpurun.inventory.imports.again import compose_inventory
    from gpurun.inventory.imports.ansible import Meant
    from gpurun.inventory.imports.source import FORMATS, read_source
    from gpurun.inventory.read import is_there, parse_inventory

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
    draft = read_source(source, kind, Meant(racks, groups))
    if exists and (merge or _was_imported(target, Path(draft.source))):
        _merge(draft, target, stated, yes=yes, dry_run=dry_run)
        return
    if interface is None:
        draft.guess("interface eth0 (`gpurun inventory probe` shows the interfaces of the hosts)")
    if dry_run:
        text = compose_inventory(draft, stated, wires)
        parse_inventory(text.encode(), target)
        _notes(draft, most=None)
        typer.echo(text, nl=False)
        return
    create_inventory(draft, target, stated, wires)


def _checked(given: Mapping[str, object]) -> dict[str, str]:
    """Return the options for hosts as text. Raises BadInput that names the option of a wrong value."""
    from gpurun.inventory.edit import parse_settings

    stated = {key: str(value) for key, value in given.items() if value is not None}
    for key, text in stated.items():
        try:
            parse_settings([f"{key}={text}"])
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
    from gpurun.inventory.imports.again import imported_from
    from gpurun.inventory.imports.source import file_of
    from gpurun.inventory.read import read_inventory_bytes

    file = file_of(source)
    if inventory_file(target).history.last_said(str(file.absolute())) is not None:
        return True
    named = imported_from(read_inventory_bytes(target).decode("utf-8", "replace"))
    return named is not None and Path(named).absolute() == file.absolute()


def _merge(draft: Draft, target: Path, stated: Mapping[str, str], *, yes: bool, dry_run: bool) -> None:
    """Merge a source into an inventory: say what the source changed, show the difference, ask, and write it."""
    from gpurun.inventory.change import Imported
    from gpurun.inventory.imports.again import merge
    from gpurun.inventory.read import read_inventory_bytes

    source = str(Path(draft.source).absolute())
    last = inventory_file(target).history.last_said(source)
    now = read_inventory_bytes(target)
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
    from gpurun.inventory.change import Imported
    from gpurun.inventory.imports.again import compose_inventory, said_by
    from gpurun.inventory.read import parse_inventory

    text = compose_inventory(draft, stated, wires)
    found = parse_inventory(text.encode(), target)
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
    from gpurun.inventory.exports import ansible, deepspeed, inventory_document, openmpi

    if kind not in EXPORTS:
        raise BadInput(f"there is no format {kind!r} (allowed: {', '.join(EXPORTS)})", where="FORMAT")
    found = cluster(inventory)
    chosen = found.choose(hosts)
    if kind == "json":
        print_json(inventory_document(found.inventory, chosen))
        return
    sys.stdout.write({"ansible": ansible, "hostfile": openmpi, "deepspeed": deepspeed}[kind](chosen))


def _create(target: Path, text: str, imported: Imported) -> None:
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
