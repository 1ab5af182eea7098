"""``gpurun init``: make an inventory from a list of hosts, and check it against the hosts."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.options import YesOption
from gpurun.cli.printing import say
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, GpurunError, HostFailure
from gpurun.quantities import count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpurun.doctor.survey import Survey
    from gpurun.facts import Hardware
    from gpurun.inventory.imports.draft import Draft

EXAMPLE = Path("recipes/fashion-mnist")
GUESSED_INTERFACE = "eth0"
PLACES = ("inventory.ini", "hosts", "hosts.yml", "hosts.ini", "/etc/ansible/hosts", "/etc/slurm", "~/.ssh/config")
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "tun", "tap")


def init(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="Names of hosts, such as 'gpu-[01-16]', or a file that lists hosts (Ansible, OpenSSH, Slurm, MPI or "
            "CSV).",
            show_default=False,
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="User name for SSH logins to the hosts.")
    ] = None,
    inventory: Annotated[
        str | None,
        typer.Option(
            "--inventory",
            "-i",
            metavar="FILE",
            help="Path of the new inventory file.",
            show_default="./inventory.yaml",
        ),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Create your first inventory: find hosts, trust their SSH host keys, detect their GPUs, and suggest next steps.

    `gpurun init` runs `inventory import`, `inventory trust` and `inventory probe`. The exit code is 4 if a host did not
    answer. The inventory also lists hosts that did not answer. If you stop `gpurun init` before it has detected the
    GPUs, run `gpurun init` again. gpurun then continues with your inventory and keeps your edits.

    gpurun init 'gpu-r1-[01-16]' --user train
    """
    from gpurun.inventory.read import is_there

    target = Path(inventory or "inventory.yaml").absolute()
    is_continued = is_there(target)
    if is_continued:
        _check_unfinished(target, source, user)
    else:
        draft = _read(source if source is not None else _asked())
        _step(1, count(len(draft.values), "host"))
        _write(draft, target, user)
    try:
        _step(2, "host keys")
        _trust(target, yes=yes)
        _step(3, "what the hosts have")
        failed = _probe(target, yes=yes, keep=is_continued)
    except BadInput as error:
        again = "run `gpurun init` again to continue"
        error.hint = f"{error.hint}; then {again}" if error.hint else again
        raise
    _say_next(target, failed)
    if failed:
        raise typer.Exit(HostFailure.exit_code)


def _check_unfinished(target: Path, source: str | None, user: str | None) -> None:
    """Check that a second `init` may continue with an inventory: it was imported, and its hosts have not told all.

    Raises:
        BadInput: the inventory is none of an unfinished `init`, or the arguments do not fit it.
    """
    from gpurun.inventory.imports.again import guesses, is_imported
    from gpurun.inventory.read import parse_inventory, read_inventory_bytes

    data = read_inventory_bytes(target)
    found, text = parse_inventory(data, target), data.decode()
    was_probed = any(host.gpu_model is not None for host in found.hosts)
    if not guesses(text) and (was_probed or not is_imported(text)):
        raise BadInput(
            "the inventory already exists", where=str(target),
            hint="`gpurun doctor` checks the hosts\n"
            "    `gpurun inventory trust @all` and `gpurun inventory probe --write` compare the inventory with "
            "the hosts\n"
            "    `gpurun init -i FILE` writes another inventory",
        )  # fmt: skip
    if source is not None and set(_read(source).values) != set(found.by_name):
        raise BadInput(
            "the inventory already exists, but has other hosts than the command names", where=str(target),
            hint="`gpurun init` without hosts continues with this inventory; `gpurun init -i FILE` writes another "
            "inventory",
        )  # fmt: skip
    if user is not None and any(host.user != user for host in found.hosts):
        raise BadInput(
            f"a host of the inventory has an SSH user other than {user!r}", where=str(target),
            hint=f"run: gpurun inventory set @all user={user}",
        )  # fmt: skip
    say(printable(f"{target}: gpurun init continues with this inventory and its {count(len(found.hosts), 'host')}"))


def _step(number: int, what: str) -> None:
    say(f"\n[{number}/3] {what}")


def _asked() -> str:
    """Ask the person for hosts, and show the files on this machine that list hosts."""
    if not sys.stdin.isatty():
        raise BadInput(
            "the command names no hosts", where="init", hint="run: gpurun init 'gpu-[01-16]', or: gpurun init FILE"
        )
    for place in found_sources():
        say(f"  {place}")
    answer = typer.prompt("Which hosts? (names such as gpu-[01-16], or a file)", err=True)
    return str(answer).strip()


def found_sources() -> list[str]:
    """Return the files on this machine that often list hosts."""
    return [place for place in PLACES if os.access(Path(place).expanduser(), os.R_OK)]


def _read(source: str) -> Draft:
    """Read the hosts from a file or a host set.

    Raises:
        BadInput: the text is neither a file that lists hosts nor a host set.
    """
    from gpurun.inventory.hostset import expand
    from gpurun.inventory.imports import source as files
    from gpurun.inventory.imports.draft import Draft

    path = Path(source).expanduser()
    if "/" in source or path.exists():
        return files.read_source(path)
    draft = Draft("the command line")
    for name in expand(source):
        draft.host(name, "the command line")
    if draft.left:
        raise BadInput(draft.left[0], hint="give names such as 'gpu-[01-16]', or a file")
    return draft


def _write(draft: Draft, target: Path, user: str | None) -> None:
    from gpurun.cli.inventory_edit import create_inventory

    stated = {} if user is None else {"user": user}
    draft.guess(f"interface {GUESSED_INTERFACE} for every fabric")
    create_inventory(draft, target, stated, {"kind": "tcp", "interface": GUESSED_INTERFACE})


def _trust(target: Path, *, yes: bool) -> None:
    """Show host keys, and trust those that the person accepts. The probe reports hosts without a trusted key."""
    from gpurun.cli.inventory_hosts import trust

    try:
        trust("@all", inventory=str(target), yes=yes)
    except typer.Exit:
        say("gpurun does not probe hosts that have no trusted host key")


def _probe(target: Path, *, yes: bool, keep: bool) -> dict[str, GpurunError]:
    """Probe the hosts and write the results into the inventory. Returns the error of each host that did not answer.

    Args:
        keep: replace only guesses, and add missing values: a person may have edited the others.
    """
    from gpurun.cli.inventory_edit import change_file, differing, with_answers
    from gpurun.cli.probe import survey_of
    from gpurun.inventory.imports.again import with_interface
    from gpurun.inventory.read import load_inventory

    found = load_inventory(target)
    survey = survey_of(found, [host.name for host in found.hosts], 15.0)
    interface = interface_of(survey.hardware.values())

    def rewrite(text: bytes) -> bytes:
        if interface is not None:
            text = with_interface(text.decode(), interface).encode()
        return with_answers(text, target, survey, keep=keep, guess_rest=True)

    change_file(target, rewrite, yes=yes)
    for host, left in differing(load_inventory(target), survey).items():
        for one in left:
            say(
                printable(
                    f"{host}: {one.key} is {one.found}; the inventory says {one.stated}, and gpurun keeps this value"
                )
            )
    return _said(survey)


def _said(survey: Survey) -> dict[str, GpurunError]:
    for host, error in survey.failures.items():
        say(printable(f"{host}: {error.message}"))
    for host, hardware in survey.hardware.items():
        if hardware.gpu_problem or hardware.docker.problem:
            say(printable(f"{host}: {hardware.gpu_problem or hardware.docker.problem}"))
    return dict(survey.failures)


def interface_of(machines: Iterable[Hardware]) -> str | None:
    """Return the interface for ranks: the interface that is on most hosts the fastest that is up and has an address.

    None if no host has such an interface.
    """
    named: Counter[str] = Counter()
    for machine in machines:
        usable = [
            nic for nic in machine.nics
            if nic.state == "up" and nic.addresses and not nic.name.startswith(_VIRTUAL)
        ]  # fmt: skip
        if usable:
            named[max(usable, key=lambda nic: nic.speed_mbit or 0).name] += 1
    return named.most_common(1)[0][0] if named else None


def _say_next(target: Path, failed: dict[str, GpurunError]) -> None:
    from gpurun.inventory.read import load_inventory

    found = load_inventory(target)
    gpus, racks = count(found.total_gpus, "GPU"), count(len(found.racks), "rack")
    say(f"\n{target}: {count(len(found.hosts), 'host')}, {gpus}, {racks}")
    if len(found.racks) == 1 and len(found.hosts) > 1:
        say(
            "All hosts are in one rack of the inventory. If you have several racks, edit `racks:`. "
            "gpurun prefers hosts of one rack for a job."
        )
    if failed:
        hosts = count(len(failed), "host")
        say(f"{hosts} did not answer: `gpurun doctor` shows why; `gpurun inventory remove` removes hosts.")
    steps = [
        ("gpurun doctor", "check hosts, links and drivers"),
        ("gpurun submit -n 2 --image IMAGE --follow -- nvidia-smi", "a first job; IMAGE must be on this machine"),
    ]
    if EXAMPLE.is_dir():  # the wheel has no recipes
        steps.append((f"gpurun submit {EXAMPLE} --follow", "an example; copy its recipe for your job"))
    say("Next:")
    for command, why in steps:
        say(f"  $ {command:58} # {why}")
