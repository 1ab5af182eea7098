"""The fence on a host: end and remove everything of a job, and check that its GPUs are free."""

import os
import time
from typing import Any, Dict, List, Optional, Set, Tuple

from gpurun.node import docker
from gpurun.node.agent import processes
from gpurun.node.agent.call import Call, OpError
from gpurun.node.folder import below
from gpurun.node.gpu import holders
from gpurun.node.gpu.claim_rules import Card, Claimant, Container, holds
from gpurun.node.gpu.nvml_apart import Nvml
from gpurun.node.job import claim_store, claims, creating, hooks, job_lock, job_parts, layer
from gpurun.node.job.job_parts import AGENT_FILE, CARDS_FILE

STRANGER_S = 2.0
"""How long a fence waits for a GPU that somebody else holds; who asked asks again."""


def fence(
    call: Call,
    job: str,
    attempt: int,
    files: bool = True,
    containers: bool = True,
    outputs: bool = False,
    gpus: Optional[List[int]] = None,
    timeout_s: float = 30.0,
    claimant: Optional[Dict[str, Any]] = None,
    epilog: Optional[Dict[str, Any]] = None,
) -> Dict[str, Any]:
    """End and remove everything of this and earlier attempts of a job on this host, and check the result. Idempotent.

    A later attempt on this host keeps its containers, its processes, and the job's folder and outputs.

    Args:
        attempt: its number.
        files: False keeps the job's folder, for another start on this host.
        containers: False if no container was ever made here: then Docker need not answer.
        outputs: remove the job's outputs, too.
        gpus: its GPUs here: no process may hold one. Ends the job's processes, and names others. Ignores a process in
            another gpurun job's container, which holds and claims the GPU for that job, and one from before the job.
        claimant: the fields of a `Claimant`: releases the attempt's claims last. None releases nothing, because the
            attempt continues here, or no claim was made.
        epilog: the arguments of `hooks.epilog`. It runs once the containers are gone and nothing uses the GPUs.

    Returns:
        What is still there after `timeout_s`: ``{"containers": [id…], "processes": [command…], "folder": bool, "users":
        [holder of a GPU, as in `gpurun.node.gpu.holders.Users`…], "gpu_problem": why a GPU could not be checked,
        "claims": [name of a volume…]}``. The host is fenced only if all are empty. If the epilog failed, ``"epilog"``
        says why; that keeps no GPU.

    Raises:
        OpError: ``no-docker``: nothing is known about containers.
    """
    started = time.monotonic()
    seen: Set[str] = set()
    me = None if claimant is None else Claimant(**claimant)
    if me is not None:
        claim_store.show_life(me)  # no other gpurun takes over the GPUs before the proof is complete
    said = {}  # type: Dict[str, str]
    nvml = Nvml() if gpus else None  # starts while the containers are being removed
    try:
        while True:
            with job_lock.held(call, job, required=False):  # what is being created is there, or never will be
                left_containers = _remove_containers(call, job, attempt, containers, seen)
                is_last = job_lock.owner(job) <= attempt
                left = processes.end(_left_processes(job), grace_s=0.5) if is_last else []
            ended = not left_containers and not left
            users = holders.Users([], "")
            if nvml is not None and ended:
                users = _free_gpus(call, nvml, (job, attempt), job_parts.cards(job, gpus or []), seen)
            held = bool(users.holders or users.problem)
            if epilog is not None and ended and not held and files and is_last:
                said.update(hooks.epilog(call, **epilog))
            with job_lock.held(call, job, required=False):
                is_last = job_lock.owner(job) <= attempt
                if ended and files and is_last:
                    _remove_files(job, outputs, keep_cards=held)
                has_folder = files and is_last and not held and os.path.lexists(job_parts.folder(job))
            rest = {
                "containers": left_containers,
                "processes": [p.command for p in left],
                "folder": has_folder,
                "users": users.holders,
                "gpu_problem": users.problem,
                "claims": [],
            }
            if me is not None and not any(rest.values()):
                rest["claims"] = _release(call, me, containers)
            # A stranger may keep a GPU for days, and a driver that hangs does so for good.
            limit_s = min(timeout_s, STRANGER_S) if held else timeout_s
            if not any(rest.values()) or time.monotonic() - started >= limit_s:
                return {**rest, **said}
            call.wait(0.2)
    finally:
        if nvml is not None:
            nvml.close()


def _left_processes(job: str) -> List[processes.Process]:
    """Return what runs of a job here, but for an epilog: another fence may be waiting for it."""
    found = [*job_parts.processes_of(job), *hooks.left_of(job, ("prolog",))]
    return list({process.pid: process for process in found}.values())


def _release(call: Call, me: Claimant, required: bool) -> List[str]:
    """Release an attempt's claims; return the names of those that are still there.

    If no container was ever made, Docker need not answer: without a container and a connected agent a claim counts as
    stale, and the next gang takes it over.
    """
    try:
        return claims.release_here(call, me)
    except OpError:
        if required:
            raise
        return []


def _free_gpus(
    call: Call, nvml: Nvml, fenced: Tuple[str, int], cards: List[Card], containers: Set[str]
) -> holders.Users:
    """End the attempt's processes on its GPUs, with SIGTERM, then SIGKILL; return who still holds a GPU."""
    job, attempt = fenced
    since = job_parts.began(job)
    users = holders.find(nvml, cards, since=since)
    others: List[Container] = []
    if any(holder["container"] for holder in users.holders):
        others = claims.of_others(call, job, attempt)
    ours = [holders.of_job(one, job, containers) for one in users.holders if not _is_in(others, one)]
    if any(ours):
        processes.end([process for process in ours if process is not None], grace_s=0.5)
        users = holders.find(nvml, cards, since=since)
    return holders.Users([one for one in users.holders if not _is_of(others, one, cards)], users.problem)


def _is_in(containers: List[Container], holder: Dict[str, Any]) -> bool:
    return any(bool(holder["container"]) and one.id.startswith(holder["container"]) for one in containers)


def _is_of(others: List[Container], holder: Dict[str, Any], cards: List[Card]) -> bool:
    """Return whether a GPU's holder is in a container of another gpurun job or attempt that has this GPU."""
    held = [card for card in cards if card[0] == holder["gpu"]]
    return any(_is_in([one], holder) and holds(one.cards, card) for one in others for card in held)


def _remove_files(job: str, outputs: bool, keep_cards: bool) -> None:
    """Remove the job's folder, but keep the list of its GPUs, and since when it had them, while these are needed."""
    folder = job_parts.folder(job)
    layer.free_work(job)
    layer.keep_code(job)
    if not keep_cards:
        _remove(folder)
    elif os.path.isdir(folder):
        for name in set(os.listdir(folder)) - {CARDS_FILE, AGENT_FILE}:
            _remove(os.path.join(folder, name))
    if outputs:
        _remove(job_parts.outputs_folder(job))
        _remove(job_parts.kept_layer(job))


def _remove(path: str) -> None:
    """Remove as much as possible; the caller checks what is left."""
    try:
        below.remove_path(path)
    except OSError:
        pass


def _remove_containers(call: Call, job: str, attempt: int, required: bool, seen: Set[str]) -> List[str]:
    """Kill and remove the containers of this and earlier attempts; return the ids of those that are still there.

    Args:
        seen: receives all ids.
    """
    try:
        connection = docker.connect(call)
    except OpError:
        if required:
            raise
        return []
    try:
        unsure = creating.unsure(connection, job, attempt)
        for container in job_parts.containers_of(connection, job, attempt):
            seen.add(container["Id"])
            docker.exchange(connection, "DELETE", "/containers/%s?force=1&v=1" % container["Id"])
        layer.remove(connection, job, attempt)
        return [*unsure, *(container["Id"] for container in job_parts.containers_of(connection, job, attempt))]
    finally:
        connection.close()
