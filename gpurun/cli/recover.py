"""``gpurun recover``: restart supervisors after a crash, and report damage; ``gpurun timer`` lets systemd do it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from gpurun.cli.main import Place, lazy_group
from gpurun.cli.options import InventoryOption, JsonOption
from gpurun.cli.printing import print_json, say
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, HostNotReady, StateError, StateUnavailable
from gpurun.head.waiter import NAME, Recovered, Recovery, kept
from gpurun.state import clock
from gpurun.state.paths import myself

# Install systemd units that run ``gpurun recover`` at boot and every minute.


BOOTED = Path("/run/systemd/system")
"""Exists if systemd is the machine's service manager: sd_booted(3)."""


def recovery() -> Recovery:
    """Return the units' content for the current user."""
    from gpurun.state.paths import home

    argv = (sys.executable, "-m", "gpurun", "recover", "--by-timer")
    return Recovery(argv, kept(os.environ, str(home(os.environ))), everybody=os.getuid() == 0)


def unit_folder() -> Path:
    """Return the folder for the units: for root the system's, otherwise the user's (systemd.unit(5))."""
    if os.getuid() == 0:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def install(*, dry_run: bool) -> None:
    """Write and enable the units; with `dry_run`, print them.

    Raises:
        HostNotReady: systemd does not run here. gpurun has printed equivalent crontab lines.
        StateError: systemd refused the units.
    """
    wanted = recovery()
    if dry_run:
        for name, text in wanted.units().items():
            typer.echo(f"# {unit_folder() / name}\n{text}")
        return
    if not BOOTED.is_dir():
        typer.echo(wanted.crontab(), nl=False)
        raise HostNotReady(
            "systemd does not run here, so gpurun installed no timer",
            hint="add the printed lines to your crontab: `crontab -e`",
        )
    folder = unit_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.units().items():
        (folder / name).write_text(text)
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", f"{NAME}.timer")
    say(f"{folder / NAME}.timer runs `gpurun recover` at boot and every minute")
    if os.getuid() != 0 and subprocess.run(["loginctl", "enable-linger"], check=False).returncode != 0:
        say(
            "  → the timer runs only while you are logged in; to let the timer always run, run as root: "
            f"loginctl enable-linger {os.getuid()}"
        )


def uninstall(*, dry_run: bool) -> None:
    """Disable and remove the units; with `dry_run`, print their paths. What they started continues."""
    folder = unit_folder()
    units = [folder / f"{NAME}.{kind}" for kind in ("timer", "service")]
    if not any(unit.exists() for unit in units):
        say("no timer is installed")
        return
    if dry_run:
        for unit in units:
            typer.echo(f"would remove {unit}")
        return
    if BOOTED.is_dir():
        _systemctl("disable", "--now", f"{NAME}.timer")
    for unit in units:
        unit.unlink(missing_ok=True)
    if BOOTED.is_dir():
        _systemctl("daemon-reload")
    say(f"{NAME} is removed; jobs continue")


def _systemctl(*words: str) -> None:
    argv = ["systemctl", *([] if os.getuid() == 0 else ["--user"]), *words]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise StateError(
            f"`{' '.join(argv)}` failed: {done.stderr.strip()}", hint="`gpurun timer remove` removes the units again"
        )


def recover(
    discard: Annotated[
        str | None,
        typer.Option(
            "--discard",
            metavar="FILE",
            help="Discard this damaged lease, a record of the GPUs that a job holds. Check first that these GPUs are "
            "idle.",
        ),
    ] = None,
    claims: Annotated[
        bool,
        typer.Option(
            "--claims",
            help="Find jobs on all hosts that use GPUs without a lease on the head; stop these jobs and free their "
            "GPUs.",
        ),
    ] = False,
    by_timer: Annotated[
        bool,
        typer.Option(
            "--by-timer",
            help="Also check hosts that failed a check or do not answer. Exit at once if another `recover --by-timer` "
            "runs.",
        ),
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Restart supervisors, the control processes of jobs, after a crash. Start waiting jobs. Report damaged leases.

    gpurun recover --claims
    """
    from gpurun.state.hosts import Machines
    from gpurun.state.paths import home
    from gpurun.state.sharing import StateDirectory

    state = home(os.environ)
    StateDirectory(state).enter()
    if discard is None and not claims and not state.exists():  # the timer must not make one in the place of a mount
        _print(Recovered(myself()), (), (), as_json=as_json)
        return
    with ExitStack() as stack:
        if by_timer:
            try:
                stack.enter_context(Machines(state).own_lock("recover", patience_s=0.0))
            except StateUnavailable as error:
                say(f"another `gpurun recover` runs: {printable(str(error))}")
                return
        _recover(state, discard, inventory, claims=claims, by_timer=by_timer, as_json=as_json)


def _recover(
    state: Path, discard: str | None, inventory: str | None, *, claims: bool, by_timer: bool, as_json: bool
) -> None:
    from gpurun.head.claims import Claims
    from gpurun.head.looks import HostLooks
    from gpurun.head.spawn import Head
    from gpurun.head.waiter import Waiter
    from gpurun.jobs.store import JobStore
    from gpurun.leases.store import LeaseStore
    from gpurun.state.audit import AuditLog

    if discard is not None:
        say(f"moved the lease to {_discard(state, Path(discard).name)}")
    AuditLog(state).bound()
    JobStore(state).sweep(now_s=time.time())
    adopted = Head(state).adopt_orphans()
    if claims:
        adopted += _adopt_claims(state, inventory)
    damaged = LeaseStore(state).read_all().damaged
    forged = tuple(Claims(state).forged_leases())
    waiter = False
    if not damaged:
        Head(state).run_pass(now_s=clock.now_s())
        waiter = Waiter(state).is_needed(os.getuid()) and Head(state).ensure_waiter()
    if by_timer:
        HostLooks(state).look_by_timer()
    options = (*(_claims_options(inventory) if claims else ()), *(("--by-timer",) if by_timer else ()))
    others = _recover_others(state, options)
    _print(Recovered(myself(), adopted, waiter), others, (*damaged, *forged), as_json=as_json)
    if damaged or forged:
        raise typer.Exit(StateError.exit_code)


class DamagedShape(TypedDict):
    """A file that cannot be read."""

    file: str | None
    reason: str


class RestartedShape(TypedDict):
    """The processes that a recovery started for another user.

    Attributes:
        adopted: jobs that have a supervisor again, or the fence of a host that was lost.
        waiter: whether gpurun started the user's waiter.
    """

    user: str
    adopted: tuple[str, ...]
    waiter: bool


class RecoverShape(TypedDict):
    """What a recovery did.

    Attributes:
        adopted: jobs that have a supervisor again, or the fence of a host that was lost.
        waiter: whether gpurun started this user's waiter, the process that starts queued jobs.
        others: the processes that root's recovery started for other users.
    """

    adopted: tuple[str, ...]
    waiter: bool
    others: list[RestartedShape]
    damaged: list[DamagedShape]


def _print(mine: Recovered, others: Sequence[Recovered], damaged: Sequence[StateError], *, as_json: bool) -> None:
    """Print what was restarted and for whom, what was not recovered, and damage that a person must decide about."""
    for problem in filter(None, (each.problem for each in others)):
        say(f"not recovered: {printable(problem)}")
    told = [each for each in others if each.adopted or each.waiter]
    if as_json:
        document: RecoverShape = {
            "adopted": mine.adopted, "waiter": mine.waiter,
            "others": [{"user": each.user, "adopted": each.adopted, "waiter": each.waiter} for each in told],
            "damaged": [{"file": error.where, "reason": error.message} for error in damaged],
        }  # fmt: skip
        print_json(document)
        return
    for each in ([mine] if mine.adopted or mine.waiter else []) + told:
        what = [*(f"the supervisor of {job}" for job in each.adopted), *(["the waiter"] if each.waiter else [])]
        say(f"restarted for {printable(each.user)}: {printable(', '.join(what))}")
    if not (mine.adopted or mine.waiter or told):
        say("gpurun had nothing to restart")
    for error in damaged:
        say(f"damaged: {error}")
        say("  → make sure that the lease's job does not run (`gpurun doctor`, `docker ps` on the hosts), then run")
        say(f"    gpurun recover --discard {Path(error.where or '').name}")


def _adopt_claims(state: Path, inventory: str | None) -> tuple[str, ...]:
    """Start a fence of GPUs that hosts claim for forgotten jobs of this user; return the jobs' ids.

    A forgotten job has a claim on a host, but no lease. Reports hosts that do not answer.
    """
    from gpurun.cli.stores import cluster
    from gpurun.doctor.survey import ask_claims
    from gpurun.head.claims import FoundClaim
    from gpurun.head.spawn import Head
    from gpurun.remote.fleet import Fleet
    from gpurun.remote.route import target_of
    from gpurun.state.sharing import StateDirectory
    from gpurun.supervisor.hosts import holder_of

    found = cluster(inventory).inventory
    with Fleet.open([target_of(host, found) for host in found.hosts]) as fleet:
        asked_s = clock.now_s()
        answers = ask_claims(fleet, [host.name for host in found.hosts])
    for host, error in answers.failed.items():
        say(f"gpurun could not read which jobs hold GPUs of {host}: {error.message}")
    state_id = StateDirectory(state).known_id()
    return Head(state).adopt_found(
        [
            FoundClaim(found.source, host, holder_of(one), asked_s)
            for host, holders in answers.ok.items()
            for one in holders
            if one.claimant.job and one.claimant.state == state_id and _is_mine(one.claimant.uid)
        ]
    )


def _is_mine(uid: int) -> bool:
    """Return whether this user may fence jobs of this uid. Root may also fence jobs of users without an account."""
    from gpurun.state.paths import has_account

    return uid == os.getuid() or (os.getuid() == 0 and uid >= 0 and not has_account(uid))


def _claims_options(inventory: str | None) -> tuple[str, ...]:
    from gpurun.cli.stores import cluster

    return ("--claims", "--inventory", cluster(inventory).inventory.source)


def _recover_others(home: Path, options: tuple[str, ...]) -> list[Recovered]:
    """As root with a shared state directory, recover every user's jobs as that user."""
    from gpurun.head.spawn import Head
    from gpurun.head.waiter import owners, recover_as
    from gpurun.state.sharing import StateDirectory

    if os.getuid() != 0 or not StateDirectory(home).is_shared():
        return []
    ownerless = Head(home).ownerless_jobs()
    gone = [
        Recovered(
            f"uid {uid}",
            problem=f"uid {uid}, the owner of {', '.join(jobs)}, has no account; as root, run "
            f"`gpurun cancel {' '.join(jobs)}` to end these jobs and free their GPUs",
        )
        for uid, jobs in ownerless.items()
    ]
    return gone + [recover_as(uid, home, os.environ, options) for uid in owners(home) if uid not in ownerless]


def _discard(home: Path, name: str) -> Path:
    """Move a damaged lease to ``discarded/``.

    Raises:
        BadInput: no damaged lease has this name.
    """
    from gpurun.head.claims import Claims
    from gpurun.leases.store import AllocatorLock, LeaseStore
    from gpurun.state import durable
    from gpurun.state.audit import AuditLog
    from gpurun.state.paths import StatePath

    with AllocatorLock(home).held():
        store = LeaseStore(home)
        damaged = (*store.read_all().damaged, *Claims(home).forged_leases())
        if not any(Path(error.where or "").name == name for error in damaged):
            raise BadInput(f"{name!r} is not a damaged lease", hint="`gpurun recover` lists the damaged leases")
        kept = StatePath(home) / "discarded"
        durable.make_folder(kept)
        target = kept / f"{time.time_ns()}-{name}"
        (store.folder / name).rename(target)
        durable.sync_folder(kept)
        durable.sync_folder(store.folder)
        AuditLog(home).note("discard", lease=name, kept=str(target))
        return target.plain


# ``gpurun timer``: systemd runs ``gpurun recover`` at boot and every minute.


COMMANDS = {
    "install": Place("gpurun.cli.recover:install_timer", "Write and enable the systemd units of the timer"),
    "remove": Place("gpurun.cli.recover:remove", "Disable and remove the systemd units of the timer"),
}
app = typer.Typer(cls=lazy_group(COMMANDS), no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _timer() -> None:
    """Let systemd run `gpurun recover` at boot and every minute. Root's timer recovers the jobs of all users."""


def install_timer(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the systemd units that gpurun would install.")
    ] = False,
) -> None:
    """Write and enable the systemd units that run `gpurun recover`."""

    install(dry_run=dry_run)


def remove(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what gpurun would remove.")] = False,
) -> None:
    """Disable and remove the systemd units that run `gpurun recover`. Jobs continue."""

    uninstall(dry_run=dry_run)
