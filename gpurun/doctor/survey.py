"""Probe every host at the same time, judge the answers, and decide which hosts are out."""

from __future__ import annotations

import io
import threading
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpurun.doctor import gang_checks, host_checks
from gpurun.doctor.findings import Finding, Severity, merged, one_line
from gpurun.doctor.gang_checks import check_clocks, check_gang, check_shared_folders
from gpurun.doctor.host_checks import (
    ask_health,
    check_docker,
    check_folder,
    check_gpus,
    check_health,
    check_host,
    strangers,
)
from gpurun.errors import AuthenticationFailed, GpurunError, HostKeyMismatch, HostNotReady
from gpurun.facts import Hardware, HeldGpus, HostSample, hardware_from_document, held, sample_from_document
from gpurun.inventory.model import Inventory
from gpurun.launch.fabric import for_gang
from gpurun.quantities import count, plural
from gpurun.remote.agent import Agent, agent_zip
from gpurun.remote.fleet import Fleet, Results

# Check claims on GPUs that do not match a lease of this state directory: other users', stale or forgotten claims.


ALWAYS_SHOWN = frozenset({"gpu-claimed", "claim-stale", "named-slow"})
"""No faults, but people ask why a GPU is not theirs, or why a job is slow."""

Carried = Collection[tuple[str, int]]
"""The attempts, as job and number, that this state directory has a lease for."""


def ask_claims(fleet: Fleet, hosts: Iterable[str]) -> Results[tuple[HeldGpus, ...]]:
    """Ask each host who holds its GPUs."""

    def one(agent: Agent) -> tuple[HeldGpus, ...]:
        return held(agent.host, agent.call("claims.list").value)

    return fleet.map(one, hosts)


def check_claims(
    found: Mapping[str, tuple[HeldGpus, ...]], *, state: str | None, uid: int, carried: Carried
) -> Iterator[Finding]:
    """Report problems with the hosts' claims. Pure.

    Args:
        found: host → who holds its GPUs.
        state: the id of this state directory; None if it has none yet.
        uid: the current user.
        carried: read before and after the hosts were asked, because an attempt may begin or end in between.
    """
    for host, holders in found.items():
        for one in holders:
            if state is None or one.claimant.state != state:
                yield _stale(host, one) if not one.why else _foreign(host, one)
            elif (one.claimant.job, one.claimant.attempt) not in carried:
                yield _forgotten(host, one, mine=one.claimant.uid == uid)


def _foreign(host: str, one: HeldGpus) -> Finding:
    who = one.claimant
    remedy = (
        f"jobs of this head wait for the GPUs; `gpurun status` on {who.head or 'the other head node'} "
        f"shows the job. If the head node is gone for good, free the GPUs by hand: {_by_hand(host, one)}"
    )
    return _finding("gpu-claimed", Severity.NOTE, host, one, f"{_whose(one)} holds {_gpus(one)}: {one.why}", remedy)


def _stale(host: str, one: HeldGpus) -> Finding:
    evidence = f"{_claimed(one)}, but the job has no process on the host and no connection to the host"
    return _finding(
        "claim-stale", Severity.NOTE, host, one, evidence, "no action is needed: the next job can use the GPUs"
    )


def _forgotten(host: str, one: HeldGpus, *, mine: bool) -> Finding:
    evidence = f"{_claimed(one)}, but this head has no lease for the job: {one.why or 'no process of the job runs'}"
    owner = one.claimant.user or f"uid {one.claimant.uid}"
    remedy = "gpurun recover --claims" if mine else f"let {owner} or root run: gpurun recover --claims"
    return _finding("claim-forgotten", Severity.WARNING, host, one, evidence, remedy)


def _finding(check: str, severity: Severity, host: str, one: HeldGpus, evidence: str, remedy: str) -> Finding:
    return Finding(check, severity, (host,), evidence, remedy, {host: one.gpus})


def _whose(one: HeldGpus) -> str:
    who = one.claimant
    owner = f" of {who.user}" if who.user else ""
    return f"{f'job {who.job}' if who.job else 'an unknown job'}{owner}{f' on {who.head}' if who.head else ''}"


def _claimed(one: HeldGpus) -> str:
    return f"{_gpus(one)} {plural(len(one.gpus), 'is', 'are')} reserved (claimed) for {_whose(one)}"


def _gpus(one: HeldGpus) -> str:
    return f"{plural(len(one.gpus), 'GPU')} {', '.join(map(str, one.gpus)) or '?'}"


def _by_hand(host: str, one: HeldGpus) -> str:
    containers = f"docker rm -f {' '.join(each[:12] for each in one.containers)}; " if one.containers else ""
    return f"ssh {host} '{containers}docker volume rm {' '.join(one.volumes)}'".replace("; docker volume rm '", "'")


PROBE_TIMEOUT_S = 40.0
"""Above the node's own limit for a driver that hangs, so that such a host is described and not lost."""

CLOCK_TRIES = 3


@dataclass(frozen=True)
class Survey:
    """The answers of all hosts.

    Attributes:
        hardware: host → what its probe found.
        failures: host → why there is no probe.
        health: host → why the site's own check failed there, for hosts where it did.
        begun_s: host → when its probe began, seconds since the epoch; missing for a host without a session.
        attempts: fabric → attempts to connect on it.
        addresses: host → its address on its fabric.
        lookups: host → name → addresses.
        signs: host of the same gang that was probed earlier → the signs in its folder after this probe.
    """

    hardware: Mapping[str, Hardware]
    failures: Mapping[str, GpurunError]
    attempts: Mapping[str, tuple[gang_checks.ReachAttempt, ...]] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    lookups: host_checks.Lookups = field(default_factory=dict)
    health: Mapping[str, str] = field(default_factory=dict)
    begun_s: Mapping[str, float] = field(default_factory=dict)
    signs: Mapping[str, Sequence[str]] = field(default_factory=dict)


def probe(fleet: Fleet, inventory: Inventory, hosts: Iterable[str] | None = None) -> Survey:
    """Return every host's hardware, with its clock's offset, and what the site's ``health`` program says there.

    A failing host is data, never an exception.
    """
    interfaces = sorted({fabric.interface for fabric in inventory.fabrics.values()})
    begun_s: dict[str, float] = {}

    def one(agent: Agent) -> tuple[Hardware, str]:
        begun_s[agent.host] = time.time()
        reply = agent.call("probe.facts", timeout_s=PROBE_TIMEOUT_S, interfaces=interfaces)
        found = hardware_from_document(agent.host, reply.value)
        offset_s, error_s = clock_offset(agent)
        said = ask_health(agent, inventory.by_name[agent.host])
        return replace(found, clock_offset_s=offset_s, clock_error_s=error_s), said

    results = fleet.map(one, hosts)
    hardware = {host: found for host, (found, _) in results.ok.items()}
    health = {host: said for host, (_, said) in results.ok.items() if said}
    return Survey(hardware, results.failed, health=health, begun_s=begun_s)


def joined(surveys: Iterable[Survey]) -> Survey:
    """Return what probes of different hosts have found as one survey. Pure."""
    hardware: dict[str, Hardware] = {}
    failures: dict[str, GpurunError] = {}
    health: dict[str, str] = {}
    begun_s: dict[str, float] = {}
    for each in surveys:
        hardware |= each.hardware
        failures |= each.failures
        health |= each.health
        begun_s |= each.begun_s
    return Survey(hardware, failures, health=health, begun_s=begun_s)


def survey(
    fleet: Fleet,
    inventory: Inventory,
    hosts: Iterable[str] | None = None,
    *,
    ports: gang_checks.Ports = gang_checks.SYSTEM_PORTS,
    look_up: bool = True,
) -> Survey:
    """Collect everything that doctor needs: hardware, then connections between hosts, and name lookups.

    Args:
        ports: ranges of ports that jobs use between hosts; tries one port of each.
        look_up: also look up the other hosts' names.
    """
    found = probe(fleet, inventory, hosts)
    attempts, addresses = gang_checks.try_all(fleet, inventory, found.hardware, ports)
    lookups = _look_up(fleet, inventory, list(found.hardware)) if look_up else {}
    return replace(found, attempts=attempts, addresses=addresses, lookups=lookups)


def signs_at(fleet: Fleet, hosts: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Return the signs in the folders of hosts that were probed earlier; nothing of a host that does not answer."""
    return fleet.map(lambda agent: agent.call("probe.signs", timeout_s=PROBE_TIMEOUT_S).value, hosts).ok


def clock_offset(agent: Agent, tries: int = CLOCK_TRIES) -> tuple[float, float]:
    """Return (host's clock minus this machine's clock, possible error) in seconds, from the quickest of some round
    trips.
    """
    best: tuple[float, float] | None = None
    for _ in range(tries):
        started = time.monotonic()
        before_s = time.time()
        host_s = float(agent.call("probe.clock").value["clock_s"])
        round_trip_s = time.monotonic() - started
        if best is None or round_trip_s / 2 < best[1]:
            best = host_s - (before_s + round_trip_s / 2), round_trip_s / 2
    assert best is not None
    return best


def _look_up(fleet: Fleet, inventory: Inventory, hosts: list[str]) -> host_checks.Lookups:
    found: dict[str, Mapping[str, list[str] | None]] = {}
    for group in gang_checks.by_fabric(inventory, hosts).values():
        wanted = host_checks.wanted(group)
        results = fleet.map(
            lambda agent, wanted=wanted: agent.call("probe.resolve", names=list(wanted[agent.host])).value,  # type: ignore[misc]
            [host for host in group if wanted[host]],
        )
        found.update(results.ok)
    return found


# Run every check on a survey and collect the findings. Pure.


def diagnose(inventory: Inventory, survey: Survey) -> tuple[Finding, ...]:
    """Return all findings, the worst first. Equal findings of several hosts become one."""
    return merged(_all(inventory, survey))


def _all(inventory: Inventory, survey: Survey) -> Iterator[Finding]:
    for name, error in survey.failures.items():
        yield unreachable(name, error)
    for name, found in survey.hardware.items():
        host = inventory.by_name[name]
        yield from check_gpus(host, found)
        yield from check_host(host, inventory.fabric_of(host), found)
        yield from check_health(host, survey.health.get(name))
    yield from check_gang(inventory, survey.hardware)
    yield from check_shared_folders(survey.hardware, survey.signs)
    for fabric, attempts in survey.attempts.items():
        interface = inventory.fabrics[fabric].interface
        yield from gang_checks.judge(attempts, interface, survey.addresses)
        lookups = {host: found for host, found in survey.lookups.items() if inventory.by_name[host].fabric == fabric}
        yield from host_checks.judge(lookups, survey.hardware, interface)


def unreachable(host: str, error: GpurunError) -> Finding:
    """Return the finding for a host that gpurun could not probe."""
    remedy = error.hint or _REMEDIES.get(type(error)) or f"check power, network and sshd: ssh {host} true"
    check = "folder" if isinstance(error, HostNotReady) and error.kind == "folder" else "ssh"
    return Finding(check, Severity.ERROR, (host,), error.message, remedy)


_REMEDIES: dict[type[GpurunError], str] = {
    HostKeyMismatch: "compare the fingerprint with the key on the host's console, then: gpurun inventory trust HOST",
    AuthenticationFailed: "add your public key to the host's authorized_keys",
    HostNotReady: "install python3 (3.8 or newer) on the host, because gpurun needs Python there",
}


# Decide which hosts are out: broken for every job, whatever it needs. Pure.


CHECKS = (
    "ssh", "folder", "shared-folder", "docker", "docker-space", "docker-gpu", "gpu-driver", "gpu-count", "gpu-lost",
    "health", "clock",
)  # fmt: skip
"""Checks whose errors make a host out. The first of them is named: a host without Docker may lack much else."""


RETURN_CHECKS = ("gpu-ecc", "gpu-throttle", "gpu-pcie", "gpu-nvlink")
"""Checks that also keep a host out that was out because of its GPUs: a reset or a reseat may leave such faults."""


def soundness(inventory: Inventory, survey: Survey, returning: Collection[str] = ()) -> Mapping[str, Finding]:
    """Return each host that is out, with the finding to name. A surveyed host without an entry is sound.

    Args:
        returning: hosts in a burn-in that were out because of their GPUs.
    """
    found: dict[str, list[Finding]] = {}
    for finding in _all_of_soundness(inventory, survey):
        for host in finding.hosts:
            if makes_out(finding) or (host in returning and finding.is_fault and finding.check in RETURN_CHECKS):
                found.setdefault(host, []).append(finding)
    return {host: _worst(findings) for host, findings in found.items()}


def makes_out(finding: Finding) -> bool:
    """Return whether a finding makes its hosts out."""
    return finding.severity is Severity.ERROR and finding.check in CHECKS


def _all_of_soundness(inventory: Inventory, survey: Survey) -> Iterator[Finding]:
    for name, error in survey.failures.items():
        yield unreachable(name, error)
    known = {name: found for name, found in survey.hardware.items() if name in inventory.by_name}
    for name, found in known.items():
        host = inventory.by_name[name]
        yield from check_gpus(host, found)
        yield from check_folder(host, found)
        yield from check_docker(host, found)
        yield from check_health(host, survey.health.get(name))
    yield from check_clocks(known)


def _worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding whose check comes first, with its remedy complete, and words that are fit to be stored."""
    (worst,) = merged([min(findings, key=lambda finding: (*CHECKS, *RETURN_CHECKS).index(finding.check))])
    return replace(worst, evidence=one_line(worst.evidence), remedy=one_line(worst.remedy))


# The checks before a gang starts: only its hosts, only its GPUs, only problems that would make it fail or hang.


STRANGER = "gpu-stranger"
BLOCKING = frozenset(
    {"address", "clock", "docker", "docker-gpu", "docker-network", "docker-space", "firewall", "folder", "gpu-driver",
     "gpu-lost", "gpu-missing", STRANGER, "hca", "hca-link-layer", "hca-node", "hca-port", "health", "interface",
     "ipv6-only", "memlock", "mtu", "path", "roce-gid", "shared-folder", "ssh"}
)  # fmt: skip
"""Checks whose errors make a gang fail or hang. A slow link or old memory errors only deserve a word."""


@dataclass(frozen=True)
class Preflight:
    """The findings before a gang's start.

    Attributes:
        blocking: findings that would make this gang fail or hang.
        other: all other findings.
        hardware: each host's probe, for `gpurun.launch.fabric.fabric_settings`.
        survey: everything that the hosts answered.
    """

    blocking: tuple[Finding, ...]
    other: tuple[Finding, ...]
    hardware: Mapping[str, Hardware]
    survey: Survey

    @property
    def bad_hosts(self) -> Mapping[str, str]:
        """Return host → why gpurun should place the gang on other hosts."""
        return {host: f"{one.check}: {one.evidence}" for one in reversed(self.blocking) for host in one.hosts}

    @property
    def strangers(self) -> frozenset[str]:
        """Return the hosts where a process that no gpurun job started holds a granted GPU."""
        return frozenset(host for one in self.blocking if one.check == STRANGER for host in one.hosts)

    @property
    def without_strangers(self) -> Preflight:
        """Return the other findings: a process ends, but a bad host stays bad."""
        return replace(self, blocking=tuple(one for one in self.blocking if one.check != STRANGER))


def preflight(
    fleet: Fleet, inventory: Inventory, grants: Mapping[str, tuple[int, ...]], *, is_alone: bool | None = None,
    ports: gang_checks.Ports = gang_checks.SYSTEM_PORTS, members: Collection[str] = (),
) -> Preflight:  # fmt: skip
    """Probe a gang's hosts and let them connect to each other. A failing host is a finding, never an exception.

    Args:
        fleet: open agents; a host that failed to open is a finding.
        grants: host → granted GPU indices.
        is_alone: the gang is on one host and will not grow; None = it has the hosts of `grants`.
        ports: ranges of ports that the job will use between hosts.
        members: hosts that the gang has had for longer: they have no folder in common with the new ones.
    """
    found = probe(fleet, inventory, list(grants))
    if members:
        found = replace(found, signs=signs_at(fleet, members))
    attempts, addresses = gang_checks.try_all(fleet, inventory, found.hardware, ports)
    return judge(inventory, replace(found, attempts=attempts, addresses=addresses), grants, is_alone=is_alone)


def judge(
    inventory: Inventory, survey: Survey, grants: Mapping[str, tuple[int, ...]], *, is_alone: bool | None = None
) -> Preflight:
    """Split the findings about this gang into those that block it and the others. Pure."""
    alone = len(grants) == 1 if is_alone is None else is_alone
    fabrics = {name: for_gang(fabric, is_alone=alone) for name, fabric in inventory.fabrics.items()}
    found = diagnose(replace(inventory, fabrics=fabrics), survey)
    findings = [one for one in found if one.is_fault and _concerns(one, grants, is_alone=alone)]
    findings = [one for one in findings if one.check != STRANGER]
    for name, hardware in survey.hardware.items():
        findings += strangers(inventory.by_name[name], hardware, frozenset(grants[name]), Severity.ERROR)
        findings += _missing(name, hardware, grants[name])
    blocks = [one.severity is Severity.ERROR and one.check in BLOCKING for one in findings]
    return Preflight(
        tuple(one for one, blocking in zip(findings, blocks, strict=True) if blocking),
        tuple(one for one, blocking in zip(findings, blocks, strict=True) if not blocking),
        survey.hardware,
        survey,
    )


def _concerns(finding: Finding, grants: Mapping[str, tuple[int, ...]], *, is_alone: bool) -> bool:
    """Return whether a finding concerns granted GPUs, or a network that the gang needs."""
    if finding.check == "docker-network":
        return not is_alone
    if not finding.gpus:
        return True
    return any(set(gpus) & set(grants.get(host, ())) for host, gpus in finding.gpus.items())


def _missing(host: str, found: Hardware, granted: tuple[int, ...]) -> list[Finding]:
    if found.gpu_problem:
        return []
    missing = tuple(sorted(set(granted) - {gpu.index for gpu in found.gpus}))
    if not missing:
        return []
    others = count(len(found.gpus), "other GPU answers", "other GPUs answer")
    evidence = f"GPU {', '.join(map(str, missing))} of the job does not answer; {others}"
    remedy = "look for a GPU that fell off the bus: sudo dmesg | grep -i xid"
    return [Finding("gpu-missing", Severity.ERROR, (host,), evidence, remedy, {host: missing})]


# Sample the use of every GPU, over one agent per host that stays open.


class Watch:
    """The latest samples of many hosts. A context manager; leaving it stops sampling on the hosts."""

    def __init__(self, fleet: Fleet, hosts: Iterable[str], interval_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._latest: dict[str, HostSample] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.changed = threading.Event()
        for host in hosts:
            agent = fleet.agents.get(host)
            if agent is None:
                failure = fleet.failures.get(host)
                self._put(host, HostSample(problem=failure.message if failure else "no connection"))
                continue
            threading.Thread(target=self._follow, args=(agent,), name=f"watch {host}", daemon=True).start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest(self) -> Mapping[str, HostSample]:
        """Return the newest sample of each host that has sent one."""
        with self._lock:
            return dict(self._latest)

    def close(self) -> None:
        """Stop sampling. Each host's stream ends with its next sample. Idempotent."""
        self._closed.set()

    def _put(self, host: str, sample: HostSample) -> None:
        with self._lock:
            self._latest[host] = sample
        self.changed.set()

    def _follow(self, agent: Agent) -> None:
        try:
            stream = agent.stream("probe.sample", interval_s=self._interval_s)
            try:
                for reply in stream:
                    if self._closed.is_set():
                        return
                    if reply.value is not None:
                        sample = sample_from_document(agent.host, reply.value, time.monotonic())
                        self._put(agent.host, sample)
            finally:
                with suppress(AttributeError):
                    stream.close()
        except GpurunError as error:
            self._put(agent.host, HostSample(problem=error.message, heard_s=time.monotonic()))


# Build the probe as one file: ``python3 probe.pyz`` prints a host's document.


_MAIN = "from gpurun.node.probe.probe import main\n\nmain()\n"


def probe_pyz() -> bytes:
    """Return a zipapp (PEP 441) with the agent's own modules and pynvml. The same code gives the same bytes."""
    archive = io.BytesIO(b"#!/usr/bin/env python3\n" + agent_zip())
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as out:
        out.writestr(zipfile.ZipInfo("__main__.py"), _MAIN)
    return archive.getvalue()
