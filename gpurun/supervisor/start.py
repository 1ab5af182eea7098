"""STARTING: create containers and the job's own sshd on every host, then start rank 0's launcher, if there is one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from gpurun.doctor.findings import one_line
from gpurun.errors import GpurunError, HostFailure
from gpurun.jobs.states import State
from gpurun.launch import jobssh
from gpurun.launch.plan import HostPlan, Plan
from gpurun.leases.members import move_ports
from gpurun.node.job.job_parts import CARDS_FILE
from gpurun.remote.agent import Agent, RemoteOpFailed
from gpurun.remote.fleet import Results
from gpurun.state import durable
from gpurun.supervisor.ends import failed
from gpurun.supervisor.host_claims import claim_of
from gpurun.supervisor.job import SupervisedJob, raise_first
from gpurun.supervisor.preflight import examine
from gpurun.supervisor.prepare import ship_image

PORT_TRIES = 5
KNOWN_HOSTS_FILE = "launch/ssh/known_hosts"
SSH_CONFIG_FILE = "launch/ssh/config"
START_TIMEOUT_S = 180.0
RUNTIME = (resources.files("gpurun.runtime") / "gpurun_runtime.py").read_text()
"""The file that user code may import inside the container."""


def start(job: SupervisedJob, is_asked: Callable[[], bool]) -> State:
    """Create every container and start it; the launcher's last, or all at the same time without a launcher.

    If a supervisor dies during this, it leaves either a running launcher, which the next supervisor adopts, or parts,
    which it removes and makes again.

    Args:
        is_asked: returns whether the gang must stop.

    Raises:
        GangEnd: names the host that failed.
    """
    job.connect()
    job.ask_accounts([host for host in job.hosts if host not in job.accounts])
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
        results = job.links.each(lambda agent, plan=plan: create(job, agent, plan))  # type: ignore[misc]
        taken = [e for e in results.failed.values() if isinstance(e, RemoteOpFailed) and e.kind == "port-in-use"]
        if not taken:
            raise_first(_explained(job, results).failed)
            return plan
        job.note(f"port {job.lease.ssh_port} is in use on {taken[0].host}, so gpurun chooses another port")
        _remove_parts(job, job.hosts)
        job.lease, job.lock = move_ports(job.home, (job.lease, job.lock))
    why = f"gpurun found no free port for the job in {PORT_TRIES} tries"
    raise failed(HostFailure(why, kind="port-in-use", host=taken[0].host, job=job.lease.job))


def create(job: SupervisedJob, agent: Agent, plan: Plan) -> None:
    """Write a host's files, start its sshd and create its container."""
    host = next(host for host in plan.hosts if host.host == agent.host)
    first = host is plan.first
    texts = {**host.files, **_key_files(job, host, plan), "launch/python/gpurun_runtime.py": (RUNTIME, 0o644)}
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
        return {KNOWN_HOSTS_FILE: (known_hosts(job, plan), 0o644)}
    return {"sshd/authorized_keys": (jobssh.authorized_keys(job.public_keys[plan.first.host]), 0o600)}


def known_hosts(job: SupervisedJob, plan: Plan) -> str:
    """Return the host keys of all hosts that the launcher may reach."""
    return jobssh.known_hosts([(other.host, job.public_keys[other.host]) for other in plan.hosts[1:]])


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
