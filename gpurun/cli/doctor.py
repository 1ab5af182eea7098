"""``gpurun doctor``: check hosts, links and drivers; show evidence and suggest fixes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.options import InventoryOption, JsonOption, SomeHostsArgument
from gpurun.cli.printing import print_json, printable, say
from gpurun.cli.values import TIME
from gpurun.errors import BadInput
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpurun.doctor.findings import Finding
    from gpurun.doctor.survey import Survey
    from gpurun.inventory.model import Inventory

UNHEALTHY = 4


def doctor(
    hosts: SomeHostsArgument = None,
    inventory: InventoryOption = None,
    cordon: Annotated[
        bool, typer.Option("--cordon", help="Cordon hosts that have errors, so that no new job starts on these hosts.")
    ] = False,
    notes: Annotated[bool, typer.Option("--notes", help="Also print remarks that are not problems.")] = False,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", click_type=TIME, help="How long gpurun waits for a host's answer over SSH.", show_default="15s"
        ),
    ] = 15.0,
    as_json: JsonOption = False,
) -> None:
    """Check hosts, links and drivers, show evidence and suggest fixes. The exit code is 4 if doctor finds a problem.

    gpurun doctor @rack:r1 --cordon
    """
    started = time.monotonic()
    found, chosen = load_chosen(inventory, hosts)
    findings = examine(found, chosen, timeout_s)
    from gpurun.doctor.claims import ALWAYS_SHOWN
    from gpurun.doctor.findings import unhealthy

    bad = unhealthy(findings)
    cordoned = _cordon(findings, found) if cordon else ()
    elapsed_s = round(time.monotonic() - started, 3)
    if as_json:
        print_json(
            {
                "inventory": found.source,
                "healthy": [host for host in chosen if host not in bad],
                "unhealthy": [host for host in chosen if host in bad],
                "cordoned": cordoned,
                "findings": [finding_json(finding) for finding in findings if finding.is_fault],
                "notes": [finding_json(finding) for finding in findings if not finding.is_fault],
                "elapsed_s": elapsed_s,
            }
        )
    else:
        shown = [finding for finding in findings if finding.is_fault or notes or finding.check in ALWAYS_SHOWN]
        _print(shown, chosen, bad)
        say(f"{len(chosen) - len(bad)} of {count(len(chosen), 'host')} healthy, in {elapsed_s:.1f} s")
        if cordoned:
            from gpurun.inventory.hostset import fold, quoted

            say(f"cordoned {fold(cordoned)}; undo with: gpurun inventory uncordon {quoted(cordoned)}")
    if bad:
        raise typer.Exit(UNHEALTHY)


def load_chosen(inventory: str | None, hosts: str | None) -> tuple[Inventory, tuple[str, ...]]:
    """Return the inventory and the names of the chosen hosts; without a choice, of all hosts.

    Raises:
        BadInput: no host matches. A check of zero hosts would report no problem.
    """
    from gpurun.cli.inventory_options import cluster

    found = cluster(inventory)
    chosen = tuple(host.name for host in found.choose(hosts))
    if not chosen:
        raise BadInput(
            f"no host is {hosts} now" if hosts else "the inventory has no hosts",
            hint="`gpurun inventory list` shows all hosts",
        )
    return found.inventory, chosen


def examine(inventory: Inventory, hosts: Sequence[str], timeout_s: float) -> tuple[Finding, ...]:
    """Probe the hosts and check the results, and the history of `gpurun bench`."""
    from gpurun.doctor import bench_history, claims
    from gpurun.doctor.diagnosis import diagnose
    from gpurun.doctor.findings import merged
    from gpurun.doctor.mesh import SYSTEM_PORTS, spread
    from gpurun.doctor.survey import survey
    from gpurun.leases.allocate import SSH_PORTS
    from gpurun.remote.fleet import Fleet
    from gpurun.remote.target import target_of
    from gpurun.state.home import home
    from gpurun.state.identity import known_id

    state = home(os.environ)
    carried = _carried(state)
    targets = [target_of(inventory.by_name[name], inventory) for name in hosts]
    ports = (*spread(SSH_PORTS.start, SSH_PORTS.stop - 1), *SYSTEM_PORTS)
    begun_s = time.time()
    with Fleet.open(targets, timeout_s=timeout_s) as fleet:
        seen = survey(fleet, inventory, hosts, ports=ports)
        held = claims.ask(fleet, seen.hardware).ok
    carried |= _carried(state)
    note_seen(state, inventory, hosts, seen, timeout_s, begun_s)
    findings = [
        *diagnose(inventory, seen),
        *claims.check(held, state=known_id(state), uid=os.getuid(), carried=carried),
    ]
    since_s = time.time() - bench_history.FRESH_S
    return merged([*findings, *bench_history.slower(bench_history.read(state), hosts, since_s=since_s)])


def note_seen(
    state: Path, inventory: Inventory, hosts: Sequence[str], seen: Survey, timeout_s: float, begun_s: float
) -> None:
    """Note which hosts are out, as a waiter's look does, so that a repaired host returns at once.

    Args:
        timeout_s: how long a host had to answer. With less time than a look gives, a host may be slow, and not broken:
            then nothing is noted.
        begun_s: as for `note_survey`.
    """
    from contextlib import suppress

    from gpurun.errors import StateError
    from gpurun.head.looking import LOOK_TIMEOUT_S, note_survey
    from gpurun.state.shared import enter

    with suppress(StateError, OSError):
        if state.is_dir() and timeout_s >= LOOK_TIMEOUT_S:
            enter(state)
            note_survey(state, inventory, [inventory.by_name[name] for name in hosts], seen, begun_s)


def _carried(state: Path) -> set[tuple[str, int]]:
    """Return the attempts that have a lease in this state directory. Other commands report damaged leases."""
    from gpurun.leases.look import look

    view = look(state, now_s=time.time(), despite_damage=True)
    return {(lease.job, lease.attempt) for lease in view.leases}


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as ``--json`` shows it."""
    return {
        "check": finding.check,
        "severity": finding.severity.value,
        "hosts": list(finding.hosts),
        "evidence": finding.evidence,
        "remedy": finding.remedy,
        "gpus": {host: list(gpus) for host, gpus in finding.gpus.items()},
        "links": [list(link) for link in finding.links],
    }


STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


def _print(findings: Sequence[Finding], chosen: Sequence[str], bad: frozenset[str]) -> None:
    from rich.text import Text

    from gpurun.cli.tables import console
    from gpurun.inventory.hostset import fold

    healthy = [host for host in chosen if host not in bad]
    if healthy:
        console(soft_wrap=True).print(Text.assemble(fold(healthy), ": ", ("ok", "green")))
    print_findings(findings)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding: hosts, severity, check and evidence; below it the remedy."""
    from rich.text import Text

    from gpurun.cli.tables import console
    from gpurun.inventory.hostset import fold

    out = console(soft_wrap=True)
    for finding in findings:
        severity = finding.severity.value
        place = fold(finding.hosts) if finding.hosts else "the fabric"
        out.print(
            Text.assemble(
                f"{place}: ",
                (f"{severity} {finding.check}", STYLES[severity]),
                f"  {printable(finding.evidence)}",
            )
        )
        if finding.remedy:
            out.print(Text(f"    → {printable(finding.remedy)}", style="dim"))


def _cordon(findings: Sequence[Finding], inventory: Inventory) -> list[str]:
    """Cordon every host with an error, unless it has a cordon. Returns the newly cordoned hosts."""
    from gpurun.doctor.findings import Severity
    from gpurun.leases.cluster import Cluster
    from gpurun.state.cordons import Cordon, changing_cordons, cordons_on, put_cordon
    from gpurun.state.home import home
    from gpurun.state.people import myself

    changed = []
    found = Cluster(inventory, home(os.environ))
    with changing_cordons(found.home) as cordons:
        for finding in findings:
            for host in finding.hosts if finding.severity is Severity.ERROR else ():
                if not cordons_on(cordons, [found.known[host]]):
                    cordon = Cordon("cordoned", myself(), time.time(), f"doctor: {finding.check}", finding.evidence)
                    put_cordon(cordons, found.known[host], cordon)
                    changed.append(host)
    return sorted(changed)
