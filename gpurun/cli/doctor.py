"""``gpurun doctor`` and ``gpurun bench``: check hosts and links; show evidence and suggest fixes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from gpurun.cli.completion import ENGINES
from gpurun.cli.options import TIME, InventoryOption, JsonOption, SomeHostsArgument
from gpurun.cli.printing import print_json, say
from gpurun.documents.plain import printable
from gpurun.errors import BadInput, JobFailed
from gpurun.quantities import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpurun.doctor.findings import BenchResult, Finding
    from gpurun.doctor.survey import Survey
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.spec import JobSpec


UNHEALTHY = 4
MOST_AGAIN = 4
"""doctor makes so many checks of a burn-in itself; waiters make the others."""


class DoctorShape(TypedDict):
    """Problems on hosts and links.

    Attributes:
        cordoned: the hosts that `--cordon` cordoned.
        findings: errors and warnings.
    """

    inventory: str
    healthy: list[str]
    unhealthy: list[str]
    cordoned: Sequence[str]
    findings: list[Finding]
    notes: list[Finding]
    elapsed_s: float


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
    from gpurun.doctor.findings import unhealthy
    from gpurun.doctor.survey import ALWAYS_SHOWN

    bad = unhealthy(findings)
    cordoned = _cordon(findings, found) if cordon else ()
    elapsed_s = round(time.monotonic() - started, 3)
    if as_json:
        document: DoctorShape = {
            "inventory": found.source,
            "healthy": [host for host in chosen if host not in bad],
            "unhealthy": [host for host in chosen if host in bad],
            "cordoned": cordoned,
            "findings": [finding for finding in findings if finding.is_fault],
            "notes": [finding for finding in findings if not finding.is_fault],
            "elapsed_s": elapsed_s,
        }
        print_json(document)
    else:
        shown = [finding for finding in findings if finding.is_fault or notes or finding.check in ALWAYS_SHOWN]
        _print(shown, chosen, bad)
        say(f"{len(chosen) - len(bad)} of {count(len(chosen), 'host')} healthy, in {elapsed_s:.1f} s")
        if cordoned:
            from gpurun.inventory.folding import fold
            from gpurun.inventory.hostset import quoted

            say(f"cordoned {fold(cordoned)}; undo with: gpurun inventory uncordon {quoted(cordoned)}")
    if bad:
        raise typer.Exit(UNHEALTHY)


def load_chosen(inventory: str | None, hosts: str | None) -> tuple[Inventory, tuple[str, ...]]:
    """Return the inventory and the names of the chosen hosts; without a choice, of all hosts.

    Raises:
        BadInput: no host matches. A check of zero hosts would report no problem.
    """
    from gpurun.cli.stores import cluster

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
    from gpurun.doctor import bench
    from gpurun.doctor.findings import merged
    from gpurun.doctor.gang_checks import SYSTEM_PORTS, spread
    from gpurun.doctor.host_checks import check_named_slow
    from gpurun.doctor.survey import ask_claims, check_claims, diagnose, survey
    from gpurun.leases.allocate import SSH_PORTS
    from gpurun.remote.fleet import Fleet
    from gpurun.remote.route import target_of
    from gpurun.state.hosts import Machines
    from gpurun.state.paths import home
    from gpurun.state.sharing import StateDirectory

    state = home(os.environ)
    carried = _carried(state)
    targets = [target_of(inventory.by_name[name], inventory) for name in hosts]
    ports = (*spread(SSH_PORTS.start, SSH_PORTS.stop - 1), *SYSTEM_PORTS)
    begun_s = time.time()
    with Fleet.open(targets, timeout_s=timeout_s) as fleet:
        seen = survey(fleet, inventory, hosts, ports=ports)
        held = ask_claims(fleet, seen.hardware).ok
    carried |= _carried(state)
    note_seen(state, inventory, hosts, seen, timeout_s, begun_s)
    machines, now_s = Machines(state).read(os.getuid()), time.time()
    chosen = [inventory.by_name[name] for name in hosts]
    findings = [
        *diagnose(inventory, seen),
        *(each for host in chosen for each in check_named_slow(host, machines.get(host.machine), now_s)),
        *check_claims(held, state=StateDirectory(state).known_id(), uid=os.getuid(), carried=carried),
    ]
    since_s = time.time() - bench.FRESH_S
    return merged([*findings, *bench.slower(bench.BenchHistory(state).read(), hosts, since_s=since_s)])


def note_seen(
    state: Path, inventory: Inventory, hosts: Sequence[str], seen: Survey, timeout_s: float, begun_s: float
) -> None:
    """Note which hosts are out, as a waiter's look does.

    Looks again at repaired hosts until their burn-in is over, if that is short, so that they return at once.

    Args:
        timeout_s: how long a host had to answer. With less time than a look gives, a host may be slow, and not broken:
            then nothing is noted.
        begun_s: as for `note_survey`.
    """
    from contextlib import suppress

    from gpurun.errors import StateError
    from gpurun.head.looking import LOOK_TIMEOUT_S, look_at, note_survey
    from gpurun.state.hosts import BURN_IN_GAP_S
    from gpurun.state.sharing import StateDirectory

    with suppress(StateError, OSError):
        if state.is_dir() and timeout_s >= LOOK_TIMEOUT_S:
            StateDirectory(state).enter()
            outs = note_survey(state, inventory, [inventory.by_name[name] for name in hosts], seen, begun_s)
            for _ in range(2 * MOST_AGAIN):
                burning = [name for name, out in outs.items() if out and 0 < out.needed - out.passed <= MOST_AGAIN]
                if not burning:
                    return
                time.sleep(BURN_IN_GAP_S)
                outs = look_at(state, inventory, burning)


def _carried(state: Path) -> set[tuple[str, int]]:
    """Return the attempts that have a lease in this state directory. Other commands report damaged leases."""
    from gpurun.leases.look import look

    view = look(state, now_s=time.time(), despite_damage=True)
    return {(lease.job, lease.attempt) for lease in view.leases}


MARKS = {"error": "bad", "warning": "wait", "note": "dim"}


def _print(findings: Sequence[Finding], chosen: Sequence[str], bad: frozenset[str]) -> None:
    from gpurun.cli.tables import print_lines
    from gpurun.inventory.folding import fold

    healthy = [host for host in chosen if host not in bad]
    if healthy:
        print_lines([[(f"{fold(healthy)}: ", ""), ("ok", "good")]])
    print_findings(findings)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding: hosts, severity, check and evidence; below it the remedy."""
    from gpurun.cli.tables import print_lines
    from gpurun.inventory.folding import fold

    for finding in findings:
        severity = finding.severity.value
        place = fold(finding.hosts) if finding.hosts else "the fabric"
        print_lines([[
            (f"{place}: ", ""), (f"{severity} {finding.check}", MARKS[severity]),
            (f"  {printable(finding.evidence)}", ""),
        ]])  # fmt: skip
        if finding.remedy:
            print_lines([[(f"    → {printable(finding.remedy)}", "dim")]])


def _cordon(findings: Sequence[Finding], inventory: Inventory) -> list[str]:
    """Cordon every host with an error, unless it has a cordon. Returns the newly cordoned hosts."""
    from gpurun.doctor.findings import Severity
    from gpurun.leases.look import Cluster
    from gpurun.state.hosts import Cordon, Cordons, cordons_on, put_cordon
    from gpurun.state.paths import home, myself

    changed = []
    found = Cluster(inventory, home(os.environ))
    with Cordons(found.home).changing() as cordons:
        for finding in findings:
            for host in finding.hosts if finding.severity is Severity.ERROR else ():
                if not cordons_on(cordons, [found.known[host]]):
                    cordon = Cordon("cordoned", myself(), time.time(), f"doctor: {finding.check}", finding.evidence)
                    put_cordon(cordons, found.known[host], cordon)
                    changed.append(host)
    return sorted(changed)


# ``gpurun bench``: measure the links between hosts and find slow links.


IMAGE = "gpurun/train:tf2.15"
OUTPUTS = "/outputs"
RESULT = "bench.json"
ALONE_UP_TO_HOSTS = 12
"""Up to this many hosts, one pair measures at a time: n·(n−1) steps. Beyond, disjoint pairs do so at once: 2·(n−1)."""

SIZES = "8,1024,65536,1048576,8388608,67108864"


def bench(
    hosts: SomeHostsArgument = None,
    inventory: InventoryOption = None,
    image: Annotated[
        str,
        typer.Option(metavar="IMAGE", help="Docker image with mpi4py. To measure GPUs, the image also needs Horovod."),
    ] = IMAGE,
    gpus_per_host: Annotated[
        int, typer.Option(min=1, metavar="GPUS", help="Number of ranks on each host in the allreduce test.")
    ] = 1,
    seconds: Annotated[
        float,
        typer.Option(
            "--time", click_type=TIME, help="Run each measurement for this long, after a warm-up.", show_default="0.5s"
        ),
    ] = 0.5,
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="Sizes of the allreduce messages in bytes, separated by commas.")
    ] = SIZES,
    engine: Annotated[
        str, typer.Option(metavar="ENGINE", help="Engine for allreduce: auto, mpi (host memory) or horovod.")
    ] = "auto",
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg",
            "--to",
            metavar="FILE",
            help="Write a heat map of the measured bandwidths to this SVG file.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a job that measures latency, bandwidth and allreduce between hosts. The exit code is 4 if a link is slow.

    gpurun bench @rack:r1 --image gpurun/tiny:1 --svg links.svg
    """
    found, chosen = load_chosen(inventory, hosts)
    spec = spec_of(found, chosen, image=image, gpus_per_host=gpus_per_host, seconds=seconds, sizes=sizes, engine=engine)
    rates = _rates(found, chosen)
    result = _measure(spec, found)
    findings = _judge(found, result, rates)
    if svg is not None:
        from gpurun.doctor.bench import svg as drawn

        svg.write_text(drawn(result, f"gpurun bench, {count(len(result.hosts), 'host')}"), encoding="utf-8")
    if as_json:
        print_json(_document(found, result, findings, rates))
    else:
        _print_of_bench(result, findings, rates)
        if svg is not None:
            say(f"heat map: {svg}")
    if findings:
        raise typer.Exit(UNHEALTHY)


def spec_of(
    inventory: Inventory,
    hosts: Sequence[str],
    *,
    image: str,
    gpus_per_host: int,
    seconds: float,
    sizes: str,
    engine: str,
) -> JobSpec:
    """Return the benchmark as a job.

    Raises:
        BadInput: fewer than two hosts, several GPU generations (a gang has one), or sizes that are not numbers.
    """
    from gpurun.doctor import bench_job
    from gpurun.jobs.spec import Constraints, JobSpec

    generations = {inventory.by_name[name].generation for name in hosts}
    if len(hosts) < 2:
        raise BadInput("a benchmark needs at least two hosts", hint="name more hosts")
    if len(generations) > 1:
        hint = f"name hosts of one generation only: {', '.join(sorted(generations))}"
        raise BadInput(
            f"a benchmark needs GPUs of one generation, but the hosts have {len(generations)} generations", hint=hint
        )
    if engine not in ENGINES:
        raise BadInput(f"--engine is {engine!r}, but must be auto, mpi or horovod")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes.split(",")):
        raise BadInput(f"--sizes is {sizes!r}, but must be numbers of bytes, separated by commas, such as 8,1024")
    racks = json.dumps({name: inventory.by_name[name].rack for name in hosts})
    leaders = ",".join(str(at * gpus_per_host) for at in range(len(hosts)))
    command = ["python3", "bench.py", "--output", f"{OUTPUTS}/{RESULT}", "--leaders", leaders, "--racks", racks]
    command += ["--seconds", f"{seconds:g}", "--sizes", sizes, "--engine", engine]
    if len(hosts) > ALONE_UP_TO_HOSTS:
        command.append("--at-once")
    return JobSpec(
        name="bench",
        image=image,
        gpus=len(hosts) * gpus_per_host,
        command=tuple(command),
        workdir=str(Path(bench_job.__file__).parent),
        outputs=OUTPUTS,
        # Waiting ranks yield the core to the two that measure. No effect if each rank has its own core.
        env={"OMPI_MCA_mpi_yield_when_idle": "1"},
        constraints=Constraints(hosts=tuple(hosts), gpus_per_host=gpus_per_host),
        controller="mpi",
    )


def _rates(inventory: Inventory, hosts: Sequence[str]) -> Mapping[str, float]:
    """Return each host's fabric interface rate, Gbit/s. Omits virtual interfaces: they report a meaningless rate."""
    from gpurun.doctor.survey import probe
    from gpurun.remote.fleet import Fleet
    from gpurun.remote.route import target_of

    with Fleet.open([target_of(inventory.by_name[name], inventory) for name in hosts]) as fleet:
        hardware = probe(fleet, inventory, hosts).hardware
    rates = {}
    for name, found in hardware.items():
        nic = found.nic(inventory.fabric_of(inventory.by_name[name]).interface)
        if nic and nic.speed_mbit and nic.driver:
            rates[name] = nic.speed_mbit / 1000
    return rates


def _measure(spec: JobSpec, inventory: Inventory) -> BenchResult:
    """Run the job and read its result. Raises JobFailed."""
    from gpurun.cli.follow import follow_job
    from gpurun.doctor.findings import result_from_document

    folder = _start(spec, inventory)
    code = follow_job(folder, lines_to_stderr=True, cancel_on_interrupt=True)
    if code:
        raise JobFailed(
            f"the benchmark ended with exit code {code}", job=folder.id, hint=f"run: gpurun logs {folder.id}"
        )
    try:
        document = json.loads((folder.outputs / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise JobFailed(
            f"gpurun cannot read the result of the benchmark: {error}",
            job=folder.id,
            hint=f"run: gpurun logs {folder.id}",
        ) from None
    grants = folder.record().granted
    host_of = [grant.host for grant in grants for _ in grant.gpus]
    return result_from_document(document, [grant.host for grant in grants], host_of)


def _start(spec: JobSpec, inventory: Inventory) -> JobFolder:
    """Queue the job as `gpurun submit` does."""
    from gpurun.head.submit import submit_jobs
    from gpurun.state.paths import home

    submission = submit_jobs([spec], inventory, home(os.environ), os.environ)
    if submission.problem is not None:
        say(f"gpurun: {submission.problem}; {submission.folders[0].id} stays in the queue and will start later")
    return submission.folders[0]


def _judge(inventory: Inventory, result: BenchResult, rates: Mapping[str, float]) -> tuple[Finding, ...]:
    """Find links that are slow, or slower than in earlier runs. Adds this run to the history."""
    from gpurun.doctor import bench
    from gpurun.doctor.findings import merged, slow_links
    from gpurun.state.paths import home

    racks = {name: inventory.by_name[name].rack for name in result.hosts}
    state = home(os.environ)
    bench.BenchHistory(state).append(bench.Run(time.time(), result.links))
    slower = bench.slower(bench.BenchHistory(state).read(), result.hosts)
    return merged([*slow_links(result, racks, rates), *slower])


LinkShape = TypedDict(
    "LinkShape",
    {"from": str, "to": str, "gbit_per_s": float, "latency_us": float, "rate_gbit_per_s": "float | None"},
)
LinkShape.__doc__ = """One link between two hosts, in one direction.

    Attributes:
        rate_gbit_per_s: the nominal rate; null: unknown.
    """


class CollectiveShape(TypedDict):
    """One allreduce of all ranks.

    Attributes:
        algbw_gbyte_per_s: bytes divided by time.
        busbw_gbyte_per_s: the bus bandwidth, as nccl-tests define it.
    """

    engine: str
    ranks: int
    bytes: int
    time_us: float
    algbw_gbyte_per_s: float
    busbw_gbyte_per_s: float


class BenchShape(TypedDict):
    """Latency and bandwidth between hosts.

    Attributes:
        skipped: engines that were not measured, with the reason.
    """

    inventory: str
    hosts: tuple[str, ...]
    mpi: str
    links: list[LinkShape]
    allreduce: list[CollectiveShape]
    skipped: Mapping[str, str]
    findings: Sequence[Finding]


def _document(
    inventory: Inventory, result: BenchResult, findings: Sequence[Finding], rates: Mapping[str, float]
) -> BenchShape:
    return {
        "inventory": inventory.source,
        "hosts": result.hosts,
        "mpi": result.mpi,
        "links": [
            {
                "from": link.source,
                "to": link.target,
                "gbit_per_s": round(link.gbit_per_s, 4),
                "latency_us": round(link.latency_us, 2),
                "rate_gbit_per_s": min(
                    (rates[end] for end in (link.source, link.target) if end in rates), default=None
                ),
            }
            for link in result.links
        ],
        "allreduce": [
            {
                "engine": one.engine,
                "ranks": one.ranks,
                "bytes": one.size_bytes,
                "time_us": round(one.time_us, 2),
                "algbw_gbyte_per_s": round(one.algorithm_gbyte_per_s, 4),
                "busbw_gbyte_per_s": round(one.bus_gbyte_per_s, 4),
            }
            for one in result.collectives
        ],
        "skipped": result.skipped,
        "findings": findings,
    }


def _print_of_bench(result: BenchResult, findings: Sequence[Finding], rates: Mapping[str, float]) -> None:
    from gpurun.cli import tables

    console = tables.console()
    _print_heat_map(console, result)
    rows = [
        (
            f"{one.engine}, {count(one.ranks, 'rank')}", str(one.size_bytes), f"{one.time_us:.1f}",
            f"{one.algorithm_gbyte_per_s:.3f}", f"{one.bus_gbyte_per_s:.3f}",
        )
        for one in result.collectives
    ]  # fmt: skip
    heads = ("allreduce", "bytes", "time µs", "algbw GB/s", "busbw GB/s")
    tables.print_table(heads, rows, figures=len(heads) - 1)
    for engine, why in result.skipped.items():
        say(f"{engine} not measured: {printable(why)}")
    if rates:
        say(f"nominal rate of the hosts' network interfaces: {min(rates.values()):g} to {max(rates.values()):g} Gbit/s")
    print_findings(findings)


def _print_heat_map(console: Any, result: BenchResult) -> None:
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    from gpurun.doctor.bench import matrix, short
    from gpurun.drawing import viridis

    figures = matrix(result)
    best = max(figures.values(), default=0.0) or 1.0
    numbers = len(result.hosts) * 5 + 20 <= console.width
    table = Table("Gbit/s from ↓ to →", box=None, pad_edge=False, padding=(0, 0 if not numbers else 1, 0, 0))
    for at, _ in enumerate(result.hosts):
        table.add_column(str(at) if numbers else "", justify="right")
    for at, source in enumerate(result.hosts):
        cells = []
        for target in result.hosts:
            figure = figures.get((source, target))
            if figure is None:
                cells.append(Text("·" if numbers else "  "))
                continue
            red, green, blue = viridis(figure / best)
            ink = "black" if figure / best > 0.55 else "white"
            style = Style(color=ink, bgcolor=f"rgb({red},{green},{blue})")
            cells.append(Text(short(figure) if numbers else "  ", style=style))
        table.add_row(f"{at} {source}", *cells)
    console.print(table)
