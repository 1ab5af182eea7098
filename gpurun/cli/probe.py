"""``gpurun inventory probe``: detect the hosts' hardware and compare it with the inventory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from gpurun.cli.doctor import UNHEALTHY, load_chosen
from gpurun.cli.inventory_edit import differing
from gpurun.cli.options import TIME, InventoryOption, JsonOption, SomeHostsArgument
from gpurun.cli.printing import print_json, say
from gpurun.documents.plain import printable
from gpurun.errors import BadInput
from gpurun.quantities import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpurun.doctor.host_checks import Difference, ProbedHost
    from gpurun.doctor.survey import Survey
    from gpurun.facts import Hardware
    from gpurun.inventory.model import Inventory


def probe(
    hosts: SomeHostsArgument = None,
    inventory: InventoryOption = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Show where the inventory differs from the hosts, then correct the inventory."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With --write, correct the inventory without asking.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", click_type=TIME, help="How long gpurun waits for a host's answer over SSH.", show_default="15s"
        ),
    ] = 15.0,
    zipapp: Annotated[
        Path | None,
        typer.Option(
            "--zipapp",
            "--to",
            metavar="FILE",
            show_default=False,
            help="Write the probe as a Python program to this file, and contact no host.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Detect GPUs, HCAs, interfaces, Docker, limits and clocks of hosts. The exit code is 4 if a host did not answer.

    gpurun inventory probe @rack:r1 --write
    """
    if zipapp is not None:
        from gpurun.doctor.survey import probe_pyz

        try:
            zipapp.write_bytes(probe_pyz())
        except OSError as error:
            raise BadInput(f"the probe cannot be written: {error.strerror}", where=str(zipapp)) from error
        say(printable(f"wrote {zipapp}"))
        return
    started = time.monotonic()
    found, chosen = load_chosen(inventory, hosts)
    survey = survey_of(found, chosen, timeout_s)
    differences = differing(found, survey)
    elapsed_s = round(time.monotonic() - started, 3)
    if as_json:
        print_json(_document(found, survey, differences, elapsed_s))
    else:
        _print(found, survey, differences)
        say(f"{len(survey.hardware)} of {count(len(chosen), 'host')} answered, in {elapsed_s:.1f} s")
    if write:
        _write(Path(found.source), survey, yes)
    if survey.failures:
        raise typer.Exit(UNHEALTHY)


def survey_of(inventory: Inventory, hosts: Sequence[str], timeout_s: float) -> Survey:
    """Probe the hosts' hardware and software, and note what they say of themselves, as `gpurun doctor` does."""
    from gpurun.cli.doctor import note_seen
    from gpurun.doctor.survey import probe as ask
    from gpurun.remote.fleet import Fleet
    from gpurun.remote.route import target_of
    from gpurun.state.paths import home

    targets = [target_of(inventory.by_name[name], inventory) for name in hosts]
    begun_s = time.time()
    with Fleet.open(targets, timeout_s=timeout_s) as fleet:
        seen = ask(fleet, inventory, hosts)
    note_seen(home(os.environ), inventory, hosts, seen, timeout_s, begun_s)
    return seen


class FailedHostShape(TypedDict):
    """A host that did not answer."""

    host: str
    error: str
    hint: str | None


class ProbeShape(TypedDict):
    """The hardware of hosts."""

    inventory: str
    hosts: list[ProbedHost]
    failed: list[FailedHostShape]
    elapsed_s: float


def _document(
    inventory: Inventory, survey: Survey, differences: Mapping[str, tuple[Difference, ...]], elapsed_s: float
) -> ProbeShape:
    from gpurun.doctor.host_checks import ProbedHost

    hosts = [ProbedHost(**vars(found), differences=differences[name]) for name, found in survey.hardware.items()]
    failed: list[FailedHostShape] = [
        {"host": name, "error": error.message, "hint": error.hint} for name, error in survey.failures.items()
    ]
    return {"inventory": inventory.source, "hosts": hosts, "failed": failed, "elapsed_s": elapsed_s}


def _print(inventory: Inventory, survey: Survey, differences: Mapping[str, tuple[Difference, ...]]) -> None:
    from gpurun.cli import tables
    from gpurun.inventory.folding import fold

    rows: dict[tuple[str, ...], list[str]] = {}
    for name, hardware in survey.hardware.items():
        interface = inventory.fabric_of(inventory.by_name[name]).interface
        rows.setdefault(_row(hardware, interface), []).append(name)
    heads = ("hosts", "GPUs", "driver", "fabric", "HCAs", "Docker")
    tables.print_table(heads, [(fold(names), *row) for row, names in rows.items()])
    for name, error in survey.failures.items():
        tables.print_lines([[(f"{name}: {printable(error.message)}", "bad")]])
    folded: dict[tuple[str, str, str], list[str]] = {}
    for name, found in differences.items():
        for one in found:
            folded.setdefault((one.key, _plain(one.stated), _plain(one.found)), []).append(name)
    for (key, stated, actual), names in folded.items():
        text = f"{fold(names)}: {key} is {actual}, but the inventory says {stated}"
        tables.print_lines([[(printable(text), "wait")]])


def _row(hardware: Hardware, interface: str) -> tuple[str, ...]:
    models: dict[str, int] = {}
    for gpu in hardware.gpus:
        models[gpu.model or "?"] = models.get(gpu.model or "?", 0) + 1
    gpus = ", ".join(f"{count} × {model}" for model, count in models.items()) or hardware.gpu_problem or "none"
    nic = hardware.nic(interface)
    speed = f", {nic.speed_mbit / 1000:g} Gbit/s" if nic and nic.speed_mbit else ""
    fabric = f"{interface} {nic.state}, MTU {nic.mtu}{speed}" if nic else f"no {interface}"
    hcas = ", ".join(
        f"{hca.name}:{port.number} {port.state} {port.rate_gbit or 0:g} Gbit/s {port.link_layer}"
        for hca in hardware.hcas
        for port in hca.ports
    )
    docker = hardware.docker
    engine = f"{docker.version} {docker.storage_driver}, GPUs by {docker.gpu_support or 'nothing'}"
    driver = f"{hardware.driver} (CUDA {hardware.cuda})" if hardware.driver else "none"
    return gpus, driver, fabric, hcas or "none", docker.problem or engine


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_plain(item) for item in value) + "]" if value else "nothing"
    return "nothing" if value is None else str(value)


def _write(source: Path, survey: Survey, yes: bool) -> None:
    """Show the change that writes the results into the inventory file, ask, and make it."""
    from gpurun.cli.inventory_edit import change_file, with_answers

    change_file(source, lambda text: with_answers(text, source, survey), yes=yes)
