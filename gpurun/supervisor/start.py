"""PREPARING and STARTING: ready hosts, data, containers and the job's own sshd, then rank 0's launcher, if any."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from gpurun.content.data import DataFolder, Pins
from gpurun.content.ship import ShipEvent, ship
from gpurun.content.staging import DIRECT_BYTES, DataUser, Staging, stage, stage_code
from gpurun.content.tree import unreadable
from gpurun.content.workdir import Code
from gpurun.doctor.findings import one_line
from gpurun.doctor.host_checks import described, foreign_on
from gpurun.doctor.survey import Preflight, preflight
from gpurun.errors import OUTLIVED, BadInput, GpurunError, HostFailure, HostNotReady, StateError, words_of
from gpurun.facts import GpuProcess, Hardware, printable
from gpurun.head.looking import look_at, note_survey
from gpurun.inventory.model import Inventory
from gpurun.jobs.record import GpuHolder, State
from gpurun.jobs.spec import DataSource
from gpurun.launch import jobssh
from gpurun.launch.plan import HostPlan, Plan
from gpurun.leases.allocate import Allocator
from gpurun.leases.look import look
from gpurun.node.job.parts import CARDS_FILE
from gpurun.node.transfer.sets import CODE
from gpurun.remote import Agent, Fleet
from gpurun.remote.agent import RemoteOpFailed
from gpurun.remote.fleet import Results
from gpurun.remote.route import target_of
from gpurun.state import durable
from gpurun.state.hosts import Out
from gpurun.supervisor.hosts import (
    ask_accounts,
    claim,
    claim_of,
    connect_hosts,
    raise_first,
    refused_end,
    report_refusals,
)
from gpurun.supervisor.job import SupervisedJob
from gpurun.supervisor.outputs.outputs import send_outputs
from gpurun.supervisor.stop import run_prologs
from gpurun.supervisor.verdict import causes
from gpurun.supervisor.verdict.ends import End, GangEnd, failed

# An attempt could not start because of its hosts: check these hosts, and place the job elsewhere, or end it.


POLL_S = 0.3


def settled(job: SupervisedJob, end: End) -> tuple[End, Mapping[str, Any]]:
    """Return the end of an attempt that could not start, and the changes of the job's record that belong to it."""
    looks = check_hosts(job, sorted(filter(None, end.by_host)))
    found = causes.after(
        job.record, end, looks, _able(job, looks), hosts=job.hosts, now_s=job.clock()
    )  # fmt: skip
    return found.end, {"start_failures": found.failures, "placements": found.placements}


def check_hosts(job: SupervisedJob, hosts: Sequence[str]) -> Mapping[str, Out | None]:
    """Check hosts with the check that depends on no job. Returns host → why it is out; None = nothing is wrong with it.

    Returns early, without hosts, if the gang must stop meanwhile, or if the check itself fails.
    """
    found: dict[str, Out | None] = {}

    def work() -> None:
        try:
            found.update(look_at(job.home, job.inventory, hosts))
        except OUTLIVED as error:
            job.note(f"gpurun could not check {', '.join(hosts)}: {words_of(error)}")

    thread = threading.Thread(target=work, name="check", daemon=True)
    thread.start()
    while thread.is_alive() and job.request() is None:
        thread.join(POLL_S)
    looks = dict(found) if not thread.is_alive() else {}
    for host, out in looks.items():
        if out is not None:
            job.events.emit("host", host=host, state="out", reason=out.reason)
    return looks


def _able(job: SupervisedJob, looks: Mapping[str, Out | None]) -> frozenset[str]:
    """Return the hosts that could hold the gang now; none if that cannot be known."""
    try:
        view = look(job.home, now_s=job.clock())
    except GpurunError:
        return frozenset()
    unusable = {*view.unusable(job.inventory), *(host for host, out in looks.items() if out is not None)}
    return causes.able_hosts(job.inventory, job.spec, unusable)


# Before a gang starts: probe its hosts, let them connect to each other, and check that they have what the job needs.


MOST_NAMED = 2
"""So many processes on a GPU are named; the others are counted."""


def examine(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Probe new hosts, keep the results for the plan, and refuse hosts that would make the gang fail.

    Raises:
        GangEnd: something would make it fail or hang. If only processes are in the way, the gang waits for them as for
            another job's claims.
    """
    new = {
        grant.host: grant.gpus for grant in job.lease.grants if grant.host in hosts and grant.host not in job.hardware
    }
    if not new:
        return
    begun_s = time.time()
    alone = len(job.lease.grants) == 1 and not job.spec.is_live_elastic
    members = [grant.host for grant in job.lease.grants if grant.host in job.hardware]
    found = preflight(job.links.fleet, job.inventory, new, is_alone=alone, members=members)
    job.hardware = {**job.hardware, **found.hardware}
    # Who waits for GPUs need not ask these hosts again, and knows which machines they are.
    note_survey(job.home, job.inventory, [job.inventory.by_name[host] for host in new], found.survey, begun_s)
    for finding in found.other:
        job.note(f"{', '.join(finding.hosts)}: {finding.evidence} (→ {finding.remedy})")
    if not found.blocking:
        return
    refused = {
        host: _processes_on(found.hardware[host], {*range(job.inventory.by_name[host].gpus), *new[host]})
        for host in sorted(found.strangers)
    }
    report_refusals(job, refused)
    others = found.without_strangers
    raise GangEnd(replace(_end_by(others), refused=refused) if others.blocking else refused_end(refused))


def _end_by(found: Preflight) -> End:
    """Return the end by bad hosts."""
    worst, bad = found.blocking[0], sorted(found.bad_hosts)
    failures = {host: HostFailure(found.bad_hosts[host], kind="preflight", host=host) for host in bad}
    error = HostFailure(
        f"{worst.check}: {worst.evidence}", kind="preflight", host=bad[0] if bad else None, hint=worst.remedy
    )
    end = failed(error).end
    return replace(end, suspects=tuple(bad), by_host=failures) if bad else end


def _processes_on(found: Hardware, gpus: set[int]) -> tuple[GpuHolder, ...]:
    """Return the processes on a host's GPUs that no gpurun job started. Those on several GPUs are named once."""
    held: dict[tuple[int, ...], tuple[list[GpuProcess], set[int]]] = {}
    for gpu in found.gpus:
        if gpu.index in gpus and (foreign := foreign_on(gpu)):
            held.setdefault(tuple(each.pid for each in foreign), (foreign, set()))[1].add(gpu.index)
    return tuple(_holder(processes, on) for processes, on in held.values())


def _holder(processes: Sequence[GpuProcess], gpus: set[int]) -> GpuHolder:
    more = f" and {len(processes) - MOST_NAMED} more" if len(processes) > MOST_NAMED else ""
    # without the memory: on each of several GPUs, a process uses another amount
    named = ", ".join(described(replace(each, memory_mib=None)) for each in processes[:MOST_NAMED])
    return GpuHolder(
        tuple(sorted(gpus)), user=printable(processes[0].user), why="no gpurun job started this process",
        process=printable(named + more),
    )  # fmt: skip


# PREPARING: copy the job's data sets to every host of the gang, host to host, and check that the hosts' own folders
# exist.


NO_FOLDER = frozenset({os.strerror(errno.ENOENT), os.strerror(errno.ENOTDIR)})
"""What hosts say of a folder that they do not have. All else may be a file server that does not answer just now."""


class StagingCancelled(GpurunError):
    """The gang must stop, so the copy was cancelled."""


def send_data(job: SupervisedJob, hosts: Sequence[str], *, cancelled: Callable[[], bool]) -> None:
    """Copy the submitted data sets to connected hosts. Idempotent.

    Raises:
        GangEnd: a host failed or lacks a folder, the data changed since the submit and no host has them, or it was
            cancelled.
    """
    _look_for_folders(job, hosts)
    by_digest = {source.digest: (name, source) for name, source in job.spec.data.items() if source.digest is not None}
    for name, source in by_digest.values():
        try:
            _send(job, hosts, name, source, cancelled)
        except GpurunError as error:
            raise failed(error) from error


def _look_for_folders(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Check that hosts have the folders that containers will mount."""
    names = {source.path: name for name, source in job.spec.data.items() if source.kind == "host"}
    if not names:
        return

    def look(agent: Agent) -> None:
        for path, why in agent.call("data.folders", paths=list(names)).value.items():
            raise HostNotReady(
                f"the data set {names.get(path, '?')!r} cannot be mounted: {path}: {why}",
                kind="no-mount" if why in NO_FOLDER else None, host=agent.host,
                hint="put the data set's folder on each host that the job may get; --host limits the job to some hosts",
            )  # fmt: skip

    raise_first(job.links.each(look, hosts).failed)


def _send(
    job: SupervisedJob, hosts: Sequence[str], name: str, source: DataSource, cancelled: Callable[[], bool]
) -> None:
    def check() -> None:
        if cancelled():
            raise StagingCancelled("staging the data was cancelled")

    def told(event: ShipEvent) -> None:
        job.sending.told("stage", event, name)

    assert source.digest is not None
    how = Staging(
        job.links.fleet, job.inventory, DataUser(job.lease.job, job.lease.attempt), quotas_of(job.inventory),
        Pins(job.home).wanted_digests(), lambda names: reach(job.inventory, names), told, check,
    )  # fmt: skip
    why = "the files have changed since the submit"
    try:
        tree = Pins(job.home).as_pinned(source)
    except HostNotReady as away:
        tree, why = None, str(away)
    if tree is None:
        job.note(f"the head cannot send the data set {name!r}: {why}; a host that has the data set sends it")
    try:
        report = stage(
            source.digest, tree, hosts, how, neighbours=[host for host in job.members if job.links.is_open(host)]
        )
    except BadInput as gone:
        raise _away(source, job.home) or gone from None
    for host, error in report.bad_copies.items():
        job.note(f"the copy of the data set {name!r} on {host} could not be used: {error.message}")
    raise_first(report.failed)


def _away(source: DataSource, home: Path) -> HostNotReady | None:
    """Return why the head cannot give a data set at the moment; None if the set has really changed, or is gone."""
    try:
        is_back = Pins(home).as_pinned(source) is not None
    except HostNotReady as error:
        return error
    return (
        HostNotReady("gpurun could not read the data on the head for a moment", where=source.path) if is_back else None
    )


def quotas_of(inventory: Inventory) -> dict[str, int]:
    """Return host → bytes that its data sets may take, if the inventory says."""
    return {host.name: host.data_quota_mib << 20 for host in inventory.hosts if host.data_quota_mib is not None}


def reach(inventory: Inventory, names: Sequence[str]) -> Fleet:
    """Connect to those of these hosts that the inventory knows."""
    return Fleet.open([target_of(inventory.by_name[name], inventory) for name in names if name in inventory.by_name])


# PREPARING: send the image, data, code and secrets to every host of the gang, to all hosts at the same time.


PREPARE_LIMIT_S = 6 * 3600.0


def prepare(job: SupervisedJob, is_asked: Callable[[], bool]) -> State:
    """Prepare everything that the containers will need. Idempotent: does not send again what is there.

    Args:
        is_asked: returns whether the gang must stop.

    Raises:
        GangEnd: a host failed or refused its GPUs, or the image is not on the head.
    """
    connect_hosts(job)
    job.reach("files")
    ask_accounts(job)
    examine(job, job.hosts)
    raise_first(claim(job, job.hosts))
    bring(job, job.hosts, cancelled=is_asked)
    send_outputs(job)
    return job.move(State.STARTING)


def bring(job: SupervisedJob, hosts: Sequence[str], *, cancelled: Callable[[], bool]) -> None:
    """Run the prolog of connected hosts that have reported about themselves; send them image, data, code and secrets.

    Raises:
        GangEnd: a host failed, the image is not on the head, or it was cancelled.
    """
    raise_first(run_prologs(job.links, job.inventory, job.lease, hosts))
    ship_image(job, hosts, cancelled=cancelled)
    send_data(job, hosts, cancelled=cancelled)
    _send_workdir(job, hosts, cancelled)
    _send_secrets(job, hosts)


def ship_image(job: SupervisedJob, hosts: Sequence[str], *, cancelled: Callable[[], bool]) -> None:
    """Ship the submitted image to hosts, even if its name now means another, and record its ID on each.

    Raises:
        GangEnd: a host failed, the image is not on the head, or it was cancelled.
    """

    def told(event: ShipEvent) -> None:
        job.sending.told("ship", event)

    try:
        report = ship(
            job.spec.image, job.links.fleet, inventory=job.inventory, hosts=hosts,
            docker_host=job.inventory.docker_host, ident=job.spec.image_id, progress=told,
            cancelled=cancelled, deadline_s=PREPARE_LIMIT_S,
        )  # fmt: skip
    except GpurunError as error:
        raise failed(error) from error
    raise_first(report.failed)
    job.image_ids.update({host.host: host.local for host in report.hosts})


def _send_workdir(job: SupervisedJob, hosts: Sequence[str], cancelled: Callable[[], bool]) -> None:
    if job.spec.workdir is None:
        return

    def check() -> None:
        if cancelled():
            raise StagingCancelled("sending the code was cancelled")

    def told(event: ShipEvent) -> None:
        if event.total > DIRECT_BYTES:  # a person does not wait for less
            job.sending.told("workdir", event)

    try:
        code = Code(job.folder.code, job.spec.code) if job.spec.code else DataFolder.of_workdir(Path(job.spec.workdir))
        how = Staging(
            job.links.fleet, job.inventory, DataUser(job.lease.job, job.lease.attempt), progress=told, check=check,
            store=CODE,
        )  # fmt: skip
        report = stage_code(code, hosts, how, neighbours=[host for host in job.members if job.links.is_open(host)])
    except FileNotFoundError:
        raise failed(
            StateError("the job's copy of its code is missing", where=str(job.folder.code), hint="submit the job again")
        ) from None
    except GpurunError as error:
        raise failed(error) from error
    raise_first(report.failed)


def _send_secrets(job: SupervisedJob, hosts: Sequence[str]) -> None:
    """Send secrets through the agent's channel into files of mode 0400: never into an argv, a log or the plan."""
    for name, file in job.spec.secret_files.items():
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            raise failed(unreadable(error, Path(file), f"the secret {name!r} cannot be read")) from error
        raise_first(
            job.links.each(
                lambda agent, name=name, content=content: agent.call(  # type: ignore[misc]
                    "gang.put",
                    job=job.lease.job,
                    attempt=job.lease.attempt,
                    name=f"secrets/{name}",
                    mode=0o400,
                    payload=content,
                ),
                hosts,
            ).failed
        )


PORT_TRIES = 5
KNOWN_HOSTS_FILE = "launch/ssh/known_hosts"
SSH_CONFIG_FILE = "launch/ssh/config"
START_TIMEOUT_S = 180.0
RUNTIME = {
    f"launch/python/{name}": ((resources.files("gpurun.runtime") / name).read_text(), 0o644)
    for name in ("gpurun_runtime.py", "sitecustomize.py")
}
"""What user code may import inside the container, and what Python imports there by itself."""


def start(job: SupervisedJob, is_asked: Callable[[], bool]) -> State:
    """Create every container and start it; the launcher's last, or all at the same time without a launcher.

    If a supervisor dies during this, it leaves either a running launcher, which the next supervisor adopts, or parts,
    which it removes and makes again.

    Args:
        is_asked: returns whether the gang must stop.

    Raises:
        GangEnd: names the host that failed.
    """
    connect_hosts(job)
    ask_accounts(job, [host for host in job.hosts if host not in job.accounts])
    if _is_launched(job):
        return _running(job)
    examine(job, job.hosts)
    if unknown := [host for host in job.hosts if host not in job.image_ids]:  # an earlier supervisor prepared them
        ship_image(job, unknown, cancelled=is_asked)
    job.reach("containers")
    plan = _create_all(job)
    durable.write_record(job.folder.path / "plan.json", plan)
    first, others = plan.first.host, [host.host for host in plan.hosts[1:]]
    for hosts in (
        [others, [first]] if plan.has_launcher else [[first, *others]]
    ):  # a launcher reaches the others at once
        raise_first(_explained(job, go(job, plan, hosts)).failed)
    return _running(job)


def _running(job: SupervisedJob) -> State:
    return job.move(State.RUNNING, started_s=job.clock(), uncut=(), placements=0, start_failures=())


def _is_launched(job: SupervisedJob) -> bool:
    """Return True if this attempt's launcher, or all scripts of its ranks, were started before; else remove all
    parts.
    """
    results = job.links.each(lambda agent: agent.call("gang.inspect", job=job.lease.job).value)
    raise_first(results.failed)
    last = job.hosts if job.launcher.argv is None else job.hosts[:1]
    if all(any(_was_started(job, container) for container in results.ok[host]) for host in last):
        return True
    remains = [host for host, containers in results.ok.items() if containers]
    _remove_parts(job, remains)
    return False


def _was_started(job: SupervisedJob, container: Mapping[str, Any]) -> bool:
    return container["attempt"] == str(job.lease.attempt) and container["status"] not in ("created", "dead")


def _remove_parts(job: SupervisedJob, hosts: Sequence[str]) -> None:
    ident, attempt = job.lease.job, job.lease.attempt
    fenced = job.links.each(
        lambda agent: agent.call("gang.fence", job=ident, attempt=attempt, files=False), hosts
    )  # fmt: skip
    raise_first(fenced.failed)


def _create_all(job: SupervisedJob) -> Plan:
    """Create files, sshd and container on every host; choose other ports if another program uses ours."""
    taken: list[RemoteOpFailed] = []
    for _ in range(PORT_TRIES):
        plan = job.plan
        results = job.links.each(lambda agent, plan=plan: create_container(job, agent, plan))  # type: ignore[misc]
        taken = [e for e in results.failed.values() if isinstance(e, RemoteOpFailed) and e.kind == "port-in-use"]
        if not taken:
            raise_first(_explained(job, results).failed)
            return plan
        job.note(f"port {job.lease.ssh_port} is in use on {taken[0].host}, so gpurun chooses another port")
        _remove_parts(job, job.hosts)
        job.lease, job.lock = Allocator(job.home).move_ports((job.lease, job.lock))
    why = f"gpurun found no free port for the job in {PORT_TRIES} tries"
    raise failed(HostFailure(why, kind="port-in-use", host=taken[0].host, job=job.lease.job))


def create_container(job: SupervisedJob, agent: Agent, plan: Plan) -> None:
    """Write a host's files, start its sshd and create its container."""
    host = next(host for host in plan.hosts if host.host == agent.host)
    first = host is plan.first
    texts = {**host.files, **_key_files(job, host, plan), **RUNTIME}
    texts[CARDS_FILE] = (_cards(job, agent.host), 0o600)
    files = {name: [text, mode] for name, (text, mode) in texts.items()}
    made = agent.call(
        "gang.create", job=job.lease.job, attempt=job.lease.attempt, files=files, run=list(host.run),
        sshd=None if first or not plan.has_launcher else job.accounts[agent.host].sshd,
        ports=list(host.ports),
        claim=claim_of(job, agent.host), layered=job.spec.writes_beside, timeout_s=START_TIMEOUT_S,
    ).value  # fmt: skip
    if isinstance(made, dict) and (why := one_line(str(made.get("copied") or ""))):
        job.note(f"{agent.host} cannot mount an overlay above the code, so each attempt gets a copy of the code: {why}")


def go(job: SupervisedJob, plan: Plan, hosts: Sequence[str]) -> Results[None]:
    """Start the containers that `create` made on `hosts`."""
    container = plan.first.container

    def start_one(agent: Agent) -> None:
        agent.call("gang.start", container=container, claim=claim_of(job, agent.host), timeout_s=START_TIMEOUT_S)

    return job.links.each(start_one, hosts)


def _cards(job: SupervisedJob, host: str) -> str:
    """Return the host's GPUs by UUID and PCI address, so that it finds them again at the job's end and in the kernel's
    log.
    """
    hardware = job.hardware.get(host)
    gpus = hardware.gpus if hardware is not None else ()
    return json.dumps({str(gpu.index): {"uuid": gpu.uuid, "pci_bus": gpu.pci_bus} for gpu in gpus})


def _key_files(job: SupervisedJob, host: HostPlan, plan: Plan) -> dict[str, tuple[str, int]]:
    """Return the files with public keys, which exist only after the hosts have made the keys."""
    if not plan.has_launcher:
        return {}
    if host is plan.first:
        return {KNOWN_HOSTS_FILE: (known_hosts_of(job, plan), 0o644)}
    return {"sshd/authorized_keys": (jobssh.authorized_keys(job.public_keys[plan.first.host]), 0o600)}


def known_hosts_of(job: SupervisedJob, plan: Plan) -> str:
    """Return the host keys of all hosts that the launcher may reach."""
    return jobssh.known_hosts_lines([(other.host, job.public_keys[other.host]) for other in plan.hosts[1:]])


def _explained(job: SupervisedJob, results: Results[None]) -> Results[None]:
    """Turn the agents' errors into errors that tell a person what to do."""
    return Results(results.ok, {host: _meant(job, error) for host, error in results.failed.items()})


def _meant(job: SupervisedJob, error: GpurunError) -> GpurunError:
    kind = error.kind if isinstance(error, RemoteOpFailed) else None
    if kind == "no-command":
        meant = HostFailure(
            f"the image {job.spec.image} cannot start {job.launcher.program}: {error.message}", kind=kind,
            hint=f"the image needs {job.launcher.needs}",
        )  # fmt: skip
        meant.exit_code = 2
        return meant
    if kind == "docker" and "could not select device driver" in error.message:
        error.hint = "install the NVIDIA container toolkit on the host; `gpurun doctor` checks it"
    return error
