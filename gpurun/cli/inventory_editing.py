"""``gpurun inventory add|set|label|remove|edit|diff|undo``: change the inventory file, and keep comments and layout."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.agreement import agree
from gpurun.cli.inventory_options import DryRunOption, Leases, located, state_home
from gpurun.cli.options import HostsArgument, InventoryOption, JsonOption, YesOption
from gpurun.cli.printing import print_json, printable, say, wants_colour
from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.quantities.local_time import date_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpurun.inventory.change import InventoryFile, Preview
    from gpurun.inventory.edit import Edit
    from gpurun.inventory.history import Author, Imported, RecordedChange
    from gpurun.inventory.model import Inventory

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
    from gpurun.inventory.edit import AddHosts
    from gpurun.inventory.hostset import expand
    from gpurun.inventory.settings import parse

    parsed = parse(settings)
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
    from gpurun.inventory.edit import SetFields
    from gpurun.inventory.settings import parse

    parsed = parse(settings)
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
    from gpurun.inventory.edit import SetFields
    from gpurun.inventory.settings import parse_labels

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
    from gpurun.inventory.load import read

    path = located(inventory)
    before = read(path)
    draft = _draft(path, before if resume is None else read(resume))
    try:
        _run_editor(draft)
        after = read(draft)
        if after == before:
            say("nothing to change")
        else:
            file = inventory_file(path)
            _report(file.commit(_unless_changed(before, after, draft), author()))
    except GpurunError as error:
        if read(draft) == before:
            draft.unlink()
            raise
        error.hint = f"gpurun saved your text. To continue: gpurun inventory edit --resume {shlex.quote(str(draft))}"
        raise
    draft.unlink()


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
    changes = inventory_file(located(inventory)).history.changes()
    if not every:
        changes = tuple(c for c in changes if c.number == number) if number is not None else changes[-1:]
        if number is not None and not changes:
            raise BadInput(f"there is no change {number}", hint="`gpurun inventory diff --all` lists the changes")
    if as_json:
        shown = [{key: value for key, value in vars(one).items() if key not in ("source", "said")} for one in changes]
        print_json({"inventory": str(located(inventory)), "changes": shown})
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
    from gpurun.inventory.load import parse

    path = located(inventory)
    change_file(path, lambda data: apply(data, path, edit_of(parse(data, path))), yes=yes, dry_run=dry_run)


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
    from gpurun.state import audit

    if change_ is not None:
        audit.note(state_home(), "inventory", change=change_.number, undoes=change_.undoes)
    if change_ is None:
        say("nothing to change")
    elif change_.undoes is not None:
        say(f"change {change_.undoes} is undone")
    else:
        say(f"change {change_.number} made; `gpurun inventory undo` undoes the change")


def inventory_file(path: Path) -> InventoryFile:
    """Return an inventory's file, with its history and its leases."""
    from gpurun.inventory.change import InventoryFile

    home = state_home()
    return InventoryFile(path, home, Leases(home))


def author() -> Author:
    """Return the user, the command line and the time."""
    from gpurun.inventory.history import Author
    from gpurun.state.people import myself

    who = myself()
    behind = os.environ.get("SUDO_USER")
    return Author(f"{behind} as {who}" if behind else who, shlex.join(["gpurun", *sys.argv[1:]]), time.time())


def _choose(inventory: Inventory, hosts: str) -> tuple[str, ...]:
    from gpurun.leases.cluster import Cluster

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
    from gpurun.inventory.load import parse

    def rewrite(now: bytes) -> bytes:
        if now != before:
            raise StateError(
                "somebody else changed the inventory while you edited the text, so gpurun did not write your text"
            )
        parse(after, draft)
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
