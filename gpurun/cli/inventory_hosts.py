"""``gpurun inventory cordon | drain | uncordon | trust | connect``: the state of hosts, and the way to them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import typer

from gpurun.cli.cancel import Patience, agree, jobs_in_words
from gpurun.cli.options import TIME, HostsArgument, InventoryOption, JsonOption, YesOption
from gpurun.cli.printing import print_json, say
from gpurun.cli.stores import cluster
from gpurun.documents.plain import printable
from gpurun.errors import AuthenticationFailed, BadInput, HostFailure, NotYours, StateError
from gpurun.head.caretaker import Caretaker
from gpurun.quantities import count
from gpurun.state import clock

if TYPE_CHECKING:
    from pathlib import Path

    from gpurun.leases.look import Cluster
    from gpurun.leases.occupancy import View
    from gpurun.remote.route import Route, Target
    from gpurun.remote.trust import KeyState, Offer, OfferedKey
    from gpurun.scheduler.explain import Departure, Fate


# ``gpurun inventory drain``: report what happens to the gangs on the hosts, and wait until the hosts are empty.


POLL_S = 0.5
PASS_EVERY_S = 5.0


def refuse_deadline(home: Path) -> None:
    """Raise NotYours if several users share the state directory: the deadline would stop other users' jobs."""
    from gpurun.state.sharing import StateDirectory

    if StateDirectory(home).is_shared() and os.getuid() != 0:
        raise NotYours(
            "several users share the state directory, so only root may set a deadline, which stops other users' jobs",
            hint="leave out --deadline: gpurun then moves the jobs that can move, and waits for the other jobs",
        )


def report_drain(found: Cluster, names: Sequence[str], changed: Sequence[str], *, as_json: bool) -> None:
    """Print which jobs leave the hosts, which jobs the drain waits for, and why."""
    view, leaving = _look(found, names)
    if as_json:
        print_json(_document(found, view, names, changed, leaving))
    else:
        _say(leaving, view.now_s)


def wait_until_empty(found: Cluster, names: Sequence[str], changed: Sequence[str], *, as_json: bool) -> None:
    """Wait until no job holds GPUs of the hosts. Restarts supervisors that died meanwhile.

    Raises:
        StateError: a host is lost, or somebody uncordoned a host meanwhile.
    """
    from gpurun.jobs.store import JobStore

    store, caretaker, told, pass_s = JobStore(found.home), Caretaker(), set[tuple[str, str]](), 0.0
    patience = Patience()
    while True:
        view, leaving = _look(found, names)
        states = _states(found, view, names)
        if states == {"drained"}:
            break
        if other := states - {"draining", "drained"}:
            raise StateError(
                f"gpurun does not drain all named hosts any more: a host is {', '.join(sorted(other))}",
                hint="run `gpurun status` to see the state of each host. gpurun cannot drain a lost host",
            )
        _say([each for each in leaving if (each.gang, each.fate) not in told], view.now_s)
        told.update((each.gang, each.fate) for each in leaving)
        folders = [store.get(each.gang) for each in leaving if each.gang in view.jobs]
        if any(each.fate == "ends" for each in leaving) and time.monotonic() >= pass_s:
            _have_them_ended(found.home)
            pass_s = time.monotonic() + PASS_EVERY_S
        caretaker.look(folders)
        patience.tell(partial(jobs_in_words, folders))
        time.sleep(POLL_S)
    if as_json:
        print_json(_document(found, view, names, changed, ()))
    else:
        from gpurun.inventory.folding import fold

        say(f"{fold(names)}: drained")


def _have_them_ended(home: Path) -> None:
    """Run a scheduling pass, which stops jobs at the deadline. In a shared state directory only root's pass does so."""
    from gpurun.head.spawn import Head

    Head(home).run_pass(now_s=clock.now_s())


def _look(found: Cluster, names: Sequence[str]) -> tuple[View, tuple[Departure, ...]]:
    from gpurun.leases.look import Cluster, look

    view = look(found.home, now_s=clock.now_s())
    return view, Cluster(found.inventory, found.home).departures(view, names)


def _states(found: Cluster, view: View, names: Sequence[str]) -> set[str]:
    from gpurun.leases.look import Cluster

    rows = Cluster(found.inventory, found.home).rows(view)
    return {row.state for row in rows if row.host.name in names}


def _say(leaving: Sequence[Departure], now_s: float) -> None:
    from gpurun.scheduler.explain import in_words

    for each in leaving:
        say(printable(f"  {each.gang} {in_words(each, now_s)}"))


class LeavingShape(TypedDict):
    """A job on a host that is drained.

    Attributes:
        fate: what the drain does to the job.
        why: for `waits` and `ends`: why the job does not move.
        until_s: for `waits`: when gpurun stops the job; null: never.
    """

    job: str
    hosts: tuple[str, ...]
    fate: Fate
    why: str
    until_s: float | None


class DrainShape(TypedDict):
    """A drain.

    Attributes:
        state: `draining` or `drained`.
    """

    hosts: Sequence[str]
    changed: Sequence[str]
    state: str
    jobs: list[LeavingShape]


def _document(
    found: Cluster, view: View, names: Sequence[str], changed: Sequence[str], leaving: Sequence[Departure]
) -> DrainShape:
    states = _states(found, view, names)
    state = "drained" if states == {"drained"} else "draining"
    jobs: list[LeavingShape] = [
        {"job": each.gang, "hosts": each.hosts, "fate": each.fate, "why": each.why, "until_s": each.until_s}
        for each in leaving
    ]
    return {"hosts": names, "changed": changed, "state": state, "jobs": jobs}


# ``gpurun inventory cordon|drain|uncordon``: keep gangs off hosts. Writes only state, never the inventory file.


ReasonOption = Annotated[
    str,
    typer.Option("--reason", "-r", metavar="TEXT", help="Reason for the cordon or drain. All users see the reason."),
]


def cordon(
    hosts: HostsArgument, reason: ReasonOption = "", inventory: InventoryOption = None, as_json: JsonOption = False
) -> None:
    """Stop new jobs from starting on hosts. Jobs that already run on the hosts continue.

    gpurun inventory cordon gpu-r1-01 --reason 'fan is broken'
    """
    _put(hosts, "cordoned", reason, inventory, as_json)


def drain(
    hosts: HostsArgument,
    reason: ReasonOption = "",
    deadline_s: Annotated[
        float | None,
        typer.Option(
            "--deadline", click_type=TIME, help="Stop jobs that still run on the hosts after this time, such as 2h."
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until no job holds GPUs of the hosts.")] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop new jobs from starting on hosts, and move running jobs to other hosts.

    A job moves if its recipe sets max_restarts or preemptible, and if other hosts can run the job. When a job moves,
    its ranks get SIGTERM and have the grace period to end. The job then waits in the queue and continues from its
    checkpoint. A move does not count as one of the job's max_restarts. An elastic job whose other hosts are enough
    continues on its other hosts. The drain waits for jobs that cannot move. At the deadline, gpurun stops jobs that
    cannot move, and these jobs end as CANCELLED. `gpurun inventory uncordon` ends the drain.

    gpurun inventory drain @rack:r1 --reason 'new switch' --deadline 2h --wait
    """
    from gpurun.errors import BadInput

    found = cluster(inventory)
    if deadline_s is not None:
        refuse_deadline(found.home)
    until_s = None if deadline_s is None else clock.now_s() + deadline_s
    names = [host.name for host in found.choose(hosts)]
    if not names:
        raise BadInput(f"no host matches {hosts!r}", hint="`gpurun inventory list` shows all hosts")
    changed = _cordon(found, names, "draining", reason, until_s)
    if not as_json:
        _report(names, changed, "draining", as_json=False)
    _say_lost(found, names)
    _start_what_fits(found.home)
    show = wait_until_empty if wait else report_drain
    show(found, names, changed, as_json=as_json)


def uncordon(hosts: HostsArgument, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """End cordons and drains, so that new jobs can start on the hosts again.

    gpurun inventory uncordon gpu-r1-01
    """
    from gpurun.state.hosts import Cordons, lift_cordons

    found = cluster(inventory)
    names = [host.name for host in found.choose(hosts)]
    with Cordons(found.home).changing() as cordons:
        lifted = [name for name in names if lift_cordons(cordons, found.known[name])]
    _report(names, lifted, "ok", as_json)
    for name in names if not as_json else ():
        if (out := found.outs.get(name)) is not None:
            say(
                printable(
                    f"{name}: {out.words}; the host gets jobs again when a check passes. "
                    f"`gpurun doctor {name}` checks the host now"
                )
            )
    if lifted:
        _start_what_fits(found.home)


def _put(
    selection: str, state: Literal["cordoned", "draining"], reason: str, inventory: str | None, as_json: bool
) -> None:
    found = cluster(inventory)
    names = [host.name for host in found.choose(selection)]
    _report(names, _cordon(found, names, state, reason), state, as_json)


def _cordon(
    found: Cluster,
    names: Sequence[str],
    state: Literal["cordoned", "draining"],
    reason: str,
    until_s: float | None = None,
) -> list[str]:
    """Cordon hosts. Returns those for which this changes something."""
    from gpurun.errors import BadInput
    from gpurun.state.hosts import Cordon, Cordons, put_cordon
    from gpurun.state.paths import myself

    if not reason.isprintable():
        raise BadInput("--reason must be one line of printable text")
    cordon = Cordon(state, myself(), time.time(), reason, until_s=until_s)
    with Cordons(found.home).changing() as cordons:
        return [name for name in names if put_cordon(cordons, found.known[name], cordon)]


def _say_lost(found: Cluster, names: Sequence[str]) -> None:
    """Report the hosts that are lost: a drain does not change them."""
    from gpurun.inventory.folding import fold
    from gpurun.state.hosts import Cordons, cordons_on

    cordons = cordons_on(Cordons(found.home).read(), [found.known[name] for name in names])
    if lost := [name for name, cordon in cordons.items() if cordon.state == "lost"]:
        say(f"{fold(lost)}: lost; no job starts on a lost host until gpurun has proof that the host's GPUs are free")


class CordonShape(TypedDict):
    """Hosts whose state changed.

    Attributes:
        hosts: the named hosts.
        changed: the named hosts that had another state before.
    """

    hosts: Sequence[str]
    changed: Sequence[str]
    state: str


def _report(names: Sequence[str], changed: Sequence[str], state: str, as_json: bool) -> None:
    from gpurun.inventory.folding import fold

    if as_json:
        print_json(CordonShape(hosts=names, changed=changed, state=state))
    elif changed:
        say(f"{fold(changed)}: {state}")
    else:
        say("nothing to change")


def _start_what_fits(home: Path) -> None:
    """Run a scheduling pass: jobs that waited for these hosts may start."""
    from gpurun.head.spawn import Head

    if (home / "live").is_dir():
        Head(home).run_pass(now_s=clock.now_s())


# ``gpurun inventory trust``: show host keys and known_hosts entries, and trust a key only if a person agrees.


REFUSED = HostFailure.exit_code


def trust(
    hosts: HostsArgument,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also trust keys that differ from the keys in known_hosts.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", click_type=TIME, help="How long gpurun waits for a host's answer.", show_default="5s"
        ),
    ] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Fetch host keys, show fingerprints, and write new keys to known_hosts. The exit code is 4 if a key is refused.

    On the way to a host, gpurun first fetches the keys of the jump hosts. HOSTS may also name a jump host that is not
    in the inventory.

    gpurun inventory trust @rack:r1
    """
    from gpurun.remote.trust import accept, known_as, offers, rounds

    found = cluster(inventory)
    offered: list[Offer] = []
    behind: list[str] = []
    untrusted: set[str] = set()
    written = 0
    for some in rounds(_routes(found, hosts)):
        ways = {route.name: [hop.name for hop in route.hops[:-1] if known_as(hop) in untrusted] for route in some}
        behind += [
            f"{name}: gpurun did not ask for the host key, because the jump host {way[0]} is not trusted"
            for name, way in ways.items()
            if way
        ]
        asked = [route for route in some if not ways[route.name]]
        now = offers(asked, ssh_config=found.inventory.ssh_config, timeout_s=timeout_s)
        if not as_json:
            for offer in now:
                _print(offer)
        wanted = [offer for offer in now if _to_write(offer, replace)]
        if wanted and not yes:
            _ask(wanted)
        written += accept(wanted, replace=replace)
        offered += now
        untrusted |= {offer.name for offer in now if _refused(offer, replace)}
        untrusted |= {known_as(route) for route in some if ways[route.name]}
    refused = [offer for offer in offered if _refused(offer, replace)]
    if as_json:
        print_json(TrustShape(hosts=[_json(offer) for offer in offered], keys_written=written))
    _report_of_inventory_trust(written, offered, refused)
    for text in behind:
        say(printable(text))
    if refused or behind:
        raise typer.Exit(REFUSED)


def _routes(found: Cluster, hosts: str) -> list[Route]:
    """Return the ways to the chosen hosts.

    Raises:
        BadInput: the text names neither hosts of the inventory nor jump hosts on the ways to them; or the OpenSSH
            configuration is wrong.
    """
    from gpurun.remote.route import resolve_all, target_of

    try:
        chosen = [target_of(host, found.inventory) for host in found.choose(hosts)]
    except BadInput:
        ways = resolve_all([target_of(host, found.inventory) for host in found.inventory.hosts]).values()
        hops = {hop.name: hop for way in ways if not isinstance(way, BadInput) for hop in way.hops}
        if not all(name in hops for name in hosts.split(",")):
            raise
        return [hops[name] for name in dict.fromkeys(hosts.split(","))]
    routes = []
    for route in resolve_all(chosen).values():
        if isinstance(route, BadInput):
            raise route
        routes.append(route)
    return routes


def _ask(wanted: Sequence[Offer]) -> None:
    from gpurun.inventory.folding import fold

    names = fold(offer.host for offer in wanted)
    agree(
        f"Trust {names}?",
        "gpurun cannot ask you whether the fingerprints are right, because stdin is not a terminal",
        "--yes trusts the keys without a question",
    )


def _to_write(offer: Offer, replace: bool) -> bool:
    """Return whether a yes would write a key of this host."""
    if _refused(offer, replace):
        return False
    return any(key.state in ("new", "changed") for key in offer.keys)


def _refused(offer: Offer, replace: bool) -> bool:
    return offer.state in ("revoked", "unreachable") or (offer.state == "changed" and not replace)


def _print(offer: Offer) -> None:
    if not offer.keys:
        typer.echo(f"{offer.host} ({offer.name}): no answer")
    for key in offer.keys:
        typer.echo(printable(f"{offer.host} ({offer.name}): {key.kind} {key.fingerprint} {_said(key)}"))


def _said(key: OfferedKey) -> str:
    if key.state == "changed":
        return f"CHANGED: known_hosts has {' and '.join(key.known)}"
    return key.state


class KeyShape(TypedDict):
    """A host key.

    Attributes:
        known: fingerprints in known_hosts, if they differ.
    """

    type: str
    fingerprint: str
    state: KeyState
    known: tuple[str, ...]


class TrustedHostShape(TypedDict):
    """The keys of one host.

    Attributes:
        name: the host's name in known_hosts.
        state: `known`, `new`, `changed`, `revoked` or `unreachable`.
    """

    host: str
    name: str
    known_hosts: str
    state: str
    keys: list[KeyShape]


class TrustShape(TypedDict):
    """Host keys."""

    hosts: list[TrustedHostShape]
    keys_written: int


def _json(offer: Offer) -> TrustedHostShape:
    keys: list[KeyShape] = [
        {"type": k.kind, "fingerprint": k.fingerprint, "state": k.state, "known": k.known} for k in offer.keys
    ]
    return {"host": offer.host, "name": offer.name, "known_hosts": str(offer.file), "state": offer.state, "keys": keys}


def _report_of_inventory_trust(written: int, offered: Sequence[Offer], refused: Sequence[Offer]) -> None:
    from gpurun.inventory.folding import fold

    if written:
        files = sorted({str(offer.file) for offer in offered})
        say(f"{count(written, 'key')} written to {', '.join(files)}")
    elif not refused:
        say("known_hosts already has every key")
    hints = {
        "changed": "its key differs from the key in known_hosts; if you know why, --replace trusts the new key",
        "revoked": "its key is marked as revoked in known_hosts",
        "unreachable": "no answer",
    }
    for state, hint in hints.items():
        names = [offer.host for offer in refused if offer.state == state]
        if names:
            say(f"{fold(names)}: not trusted: {hint}")


def connect(
    hosts: HostsArgument,
    inventory: InventoryOption = None,
    idle_s: Annotated[
        float,
        typer.Option(
            "--idle", click_type=TIME, help="Close a connection after this time without use.", show_default="12h"
        ),
    ] = 12 * 3600.0,
    close: Annotated[bool, typer.Option("--close", help="Close the connections of these hosts.")] = False,
) -> None:
    """Log in to hosts that ask for a second factor, and keep the connection open. The exit code is 4 if a login fails.

    ssh asks its questions on your terminal. If a host asks no question, gpurun opens no shared connection to that host.

    gpurun inventory connect @rack:r1
    """
    from gpurun.remote.route import resolve, target_of
    from gpurun.remote.system_ssh import close_own

    found = cluster(inventory)
    targets = [target_of(host, found.inventory) for host in found.choose(hosts)]
    if close:
        closed = sum(close_own(resolve(target)) for target in targets)
        say(f"{count(closed, 'connection')} closed")
        return
    failures = [error for target in targets if (error := _connect(target, max(1, round(idle_s))))]
    for error in failures:
        say(f"{error}" + (f"\n  {error.hint}" if error.hint else ""))
    if failures:
        raise typer.Exit(HostFailure.exit_code)


def _connect(target: Target, keep_s: int) -> HostFailure | None:
    """Open the missing connections to a host, hop by hop. Returns the error if the host is still unreachable."""
    from gpurun.remote.route import resolve
    from gpurun.remote.system_ssh import live, open_for_a_person

    if target.ssh == "paramiko":
        hint = f"to let gpurun choose how to connect: gpurun inventory set {target.name} ssh="
        raise BadInput(
            "the inventory says `ssh: paramiko`, and paramiko cannot share a connection", host=target.name, hint=hint
        )
    route = resolve(target)
    error = _refusal(target)
    for hop in route.hops:
        if not isinstance(error, AuthenticationFailed):
            break
        if hop not in live(hop):
            _ask_on_the_terminal(route)
            say(f"{hop.name}: ssh asks:")
            if not open_for_a_person(hop, keep_s):
                return AuthenticationFailed(f"{hop.name} refused the login", host=target.name, hint=error.hint)
            error = _refusal(target)
    if error is None:
        shared = [hop.name for hop in live(route)]
        say(f"{target.name}: connected" + (f" (shared: {', '.join(shared)})" if shared else "; the host asked nothing"))
    return error


def _refusal(target: Target) -> HostFailure | None:
    """Return why gpurun cannot start its agent on the host; None if it can."""
    from gpurun.remote.fleet import Fleet

    with Fleet.open([target]) as fleet:
        return fleet.failures.get(target.name)


def _ask_on_the_terminal(route: Route) -> None:
    if not sys.stdin.isatty():
        hint = f"run this command in a terminal: gpurun inventory connect {route.name}"
        raise BadInput("the host asks for input at login, but stdin is not a terminal", host=route.name, hint=hint)
