"""A gang's part on this host: its folder, keys, private sshd and container.

Everything started here is detached and outlives the agent, so that training continues without the head. It has the
job's label or path, so that `fence` finds it without a record of who started it.
"""

from __future__ import annotations

import calendar
import fcntl
import getpass
import grp
import http.client
import ipaddress
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from gpurun.node import docker
from gpurun.node.agent import processes, serve
from gpurun.node.agent.frames import Call, OpError, OpReply
from gpurun.node.claim_rules import Card, Claimant, Container, holds
from gpurun.node.docker import compare, container_name, container_user, create_argv, note_engine, of_create, of_start
from gpurun.node.folder import below, contents
from gpurun.node.gpus import Users, find_holders, of_job
from gpurun.node.job import caches as shared_caches
from gpurun.node.job import claims, hooks, layer, parts
from gpurun.node.job.claims import show_life
from gpurun.node.job.layer import written_folder
from gpurun.node.job.parts import AGENT_FILE, CARDS_FILE
from gpurun.node.job.rank_processes import progress, signal
from gpurun.node.nvml_apart import Nvml
from gpurun.node.probe.probe import why_unwritable

# Find out whether Docker may still be creating a container for a killed client.


NOTE = "creating.json"
_FAILED = 500


def note_creating(job: str, attempt: int, name: str) -> None:
    """Note that a container of this name is about to be created. The caller holds the job's lock."""
    with open(_path(job), "w", encoding="utf-8") as stream:
        json.dump({"attempt": attempt, "name": name}, stream)


def end(job: str) -> None:
    """Remove the note after Docker has answered. Idempotent."""
    try:
        os.unlink(_path(job))
    except FileNotFoundError:
        pass


def unsure_containers(connection: docker.Connection, job: str, attempt: int) -> List[str]:
    """Return the names that Docker may still be creating for this or an earlier attempt. The caller holds the lock.

    Raises:
        OpError: Docker does not answer.
    """
    noted = _noted(job)
    if noted is None or noted[0] > attempt:
        return []
    if not _is_decided(connection, job, *noted):
        return [noted[1]]
    end(job)
    return []


def _is_decided(connection: docker.Connection, job: str, attempt: int, name: str) -> bool:
    """Return whether a container of this name is listed, or none is being created, because its name is available."""
    if any("/" + name in (each.get("Names") or ()) for each in parts.containers_of(connection, job)):
        return True
    status, answer = docker.exchange(connection, "GET", "/images/json")
    images = docker.parse_answer(answer)
    if status != 200 or not isinstance(images, list):
        raise docker.failure(status, answer, "listing images")
    if not images:
        return True  # without an image no container is created
    labels = {parts.LABEL: job, "gpurun.attempt": str(attempt)}
    body: Dict[str, Any] = {"Image": images[0]["Id"], "Cmd": ["true"], "Labels": labels}
    status, answer = docker.exchange(connection, "POST", "/containers/create?name=" + name, body)
    if status == 409:  # listed by now, or soon
        return False
    if status == 201:
        docker.exchange(connection, "DELETE", "/containers/%s?force=1&v=1" % docker.parse_answer(answer)["Id"])
    elif status < _FAILED:
        raise docker.failure(status, answer, "reserving the container name %s" % name)
    return True  # we had the name, if only for a moment: a disk may be full


def _path(job: str) -> str:
    return os.path.join(parts.job_folder(job), NOTE)


def _noted(job: str) -> Optional[Tuple[int, str]]:
    """Return the attempt and the name in the note; None if there is none."""
    try:
        with open(_path(job), encoding="utf-8") as stream:
            found = json.load(stream)
        return int(found["attempt"]), docker.checked_name(str(found["name"]))
    except (OSError, ValueError, TypeError, KeyError, OpError):
        return None


# Names of other machines that only this host's ``/etc/hosts`` knows.


MOST = 256
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\Z")


def known(path: str = "/etc/hosts") -> List[List[str]]:
    """Return name and address of other machines in the file, in its order, at most `MOST`.

    A container on the host's network has the host's file, but not if Docker gets any ``--add-host``.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 20).splitlines()
    except OSError:
        return []
    found: List[List[str]] = []
    for line in lines:
        address, *names = line.partition("#")[0].split() or [""]
        if _is_other(address):
            found += [[name, address] for name in names if _NAME.match(name)]
    return found[:MOST]


def _is_other(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    is_own = parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast or parsed.is_link_local
    return not is_own and "%" not in address


# The fence on a host: end and remove everything of a job, and check that its GPUs are free.


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
        [holder of a GPU, as in `gpurun.node.gpus.Users`…], "gpu_problem": why a GPU could not be checked,
        "claims": [name of a volume…]}``. The host is fenced only if all are empty. If the epilog failed, ``"epilog"``
        says why; that keeps no GPU.

    Raises:
        OpError: ``no-docker``: nothing is known about containers.
    """
    started = time.monotonic()
    seen: Set[str] = set()
    me = None if claimant is None else Claimant(**claimant)
    if me is not None:
        show_life(me)  # no other gpurun takes over the GPUs before the proof is complete
    said = {}  # type: Dict[str, str]
    nvml = Nvml() if gpus else None  # starts while the containers are being removed
    try:
        while True:
            with parts.hold_job(call, job, required=False):  # what is being created is there, or never will be
                left_containers = _remove_containers(call, job, attempt, containers, seen)
                is_last = parts.owner(job) <= attempt
                left = processes.end(_left_processes(job), grace_s=0.5) if is_last else []
            ended = not left_containers and not left
            users = Users([], "")
            if nvml is not None and ended:
                users = _free_gpus(call, nvml, (job, attempt), parts.cards_of_gpus(job, gpus or []), seen)
            held = bool(users.holders or users.problem)
            if epilog is not None and ended and not held and files and is_last:
                said.update(hooks.run_epilog(call, **epilog))
            with parts.hold_job(call, job, required=False):
                is_last = parts.owner(job) <= attempt
                if ended and files and is_last:
                    _remove_files(job, outputs, keep_cards=held)
                has_folder = files and is_last and not held and os.path.lexists(parts.job_folder(job))
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
    found = [*parts.processes_of(job), *hooks.left_of(job, ("prolog",))]
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


def _free_gpus(call: Call, nvml: Nvml, fenced: Tuple[str, int], cards: List[Card], containers: Set[str]) -> Users:
    """End the attempt's processes on its GPUs, with SIGTERM, then SIGKILL; return who still holds a GPU."""
    job, attempt = fenced
    since = parts.began(job)
    users = find_holders(nvml, cards, since=since)
    others: List[Container] = []
    if any(holder["container"] for holder in users.holders):
        others = claims.of_others(call, job, attempt)
    ours = [of_job(one, job, containers) for one in users.holders if not _is_in(others, one)]
    if any(ours):
        processes.end([process for process in ours if process is not None], grace_s=0.5)
        users = find_holders(nvml, cards, since=since)
    return Users([one for one in users.holders if not _is_of(others, one, cards)], users.problem)


def _is_in(containers: List[Container], holder: Dict[str, Any]) -> bool:
    return any(bool(holder["container"]) and one.id.startswith(holder["container"]) for one in containers)


def _is_of(others: List[Container], holder: Dict[str, Any], cards: List[Card]) -> bool:
    """Return whether a GPU's holder is in a container of another gpurun job or attempt that has this GPU."""
    held = [card for card in cards if card[0] == holder["gpu"]]
    return any(_is_in([one], holder) and holds(one.cards, card) for one in others for card in held)


def _remove_files(job: str, outputs: bool, keep_cards: bool) -> None:
    """Remove the job's folder, but keep the list of its GPUs, and since when it had them, while these are needed."""
    folder = parts.job_folder(job)
    layer.free_work(job)
    layer.keep_code(job)
    if not keep_cards:
        _remove(folder)
    elif os.path.isdir(folder):
        for name in set(os.listdir(folder)) - {CARDS_FILE, AGENT_FILE}:
            _remove(os.path.join(folder, name))
    if outputs:
        _remove(parts.outputs_folder(job))
        _remove(parts.kept_layer(job))


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
        connection = docker.open_engine(call)
    except OpError:
        if required:
            raise
        return []
    try:
        unsure = unsure_containers(connection, job, attempt)
        for container in parts.containers_of(connection, job, attempt):
            seen.add(container["Id"])
            docker.exchange(connection, "DELETE", "/containers/%s?force=1&v=1" % container["Id"])
        layer.remove_volumes(connection, job, attempt)
        return [*unsure, *(container["Id"] for container in parts.containers_of(connection, job, attempt))]
    finally:
        connection.close()


_SIOCGIFADDR = 0x8915
_RUN_LIMIT_S = 120.0
_GROUP_NAME = re.compile(r"[^\x00-\x1f\x7f:,]{1,256}\Z")
_NO_CONFIG = "no-docker-config"
"""A folder that does not exist: with ``proxies`` in the user's own, Docker's client sets proxies in each container."""


def prepare(
    call: Call,
    job: str,
    attempt: int,
    interface: str,
    first: bool,
    outputs: bool,
    beside: bool = False,
    caches: Optional[Dict[str, Any]] = None,
) -> Dict[str, Any]:
    """Create the job's folder and ephemeral keys; report facts about this host. Idempotent.

    Args:
        attempt: from now on the folder is this attempt's, and no fence of an earlier one removes it.
        interface: the fabric's network interface; "" = its address is not needed.
        first: this host runs the launcher, and gets the client key; every other host gets a host key.
        outputs: also create the folder for the job's outputs.
        beside: what ranks write beside their code is a part of them.
        caches: the arguments of `caches.join`, if the user's caches are among the mounts. They become smaller before
            image and data need the disk.

    Returns:
        ``{"uid", "gid", "groups": [[gid, name]…], "user", "folder", "hostname", "address", "names": [[name, address]…],
        "sshd", "docker_host", "public_key"}``; ``address`` is None if the interface has none.

    Raises:
        OpError: ``no-tool`` if OpenSSH is not installed; errors of the file system.
    """
    folder = parts.job_folder(job)
    key = folder + ("/launch/ssh/id" if first else "/sshd/host_key")
    with parts.hold_job(call, job):
        for name in ("launch/bin", "launch/ssh", "launch/python", "sshd", "run"):
            os.makedirs(os.path.join(folder, name), mode=0o700, exist_ok=True)
        if outputs:
            os.makedirs(parts.outputs_folder(job), mode=0o700, exist_ok=True)
        if beside:
            os.makedirs(written_folder(job), mode=0o700, exist_ok=True)
        parts.own(job, attempt)
        public_key = _make_key(key, "gpurun " + job)
        if caches is not None:
            shared_caches.join(call, job, **caches)
    uid, gid, groups = container_user(call)
    return {
        "uid": str(uid),
        "gid": str(gid),
        "groups": [[str(group), _group_name(group)] for group in groups],
        "user": getpass.getuser(),
        "folder": serve.root(),
        "hostname": socket.gethostname(),
        "address": _address(interface),
        "names": known(),
        "sshd": _tool("sshd"),
        "docker_host": _docker_host(),
        "public_key": public_key,
    }


def create(
    call: Call,
    job: str,
    attempt: int,
    files: Dict[str, List[Any]],
    run: List[str],
    sshd: Optional[str],
    claim: Optional[Dict[str, Any]] = None,
    ports: Sequence[int] = (),
    layered: bool = False,
) -> Dict[str, Any]:
    """Write the job's files, start its private sshd if this host has one, and create its container.

    Args:
        files: path below the job's folder → [text, mode].
        run: the plan's ``docker run`` argv, from which the container is created; `start` starts it.
        sshd: absolute path of the OpenSSH server, None if no rank is started from outside.
        ports: TCP ports on which ranks will listen here.
        claim: the arguments of `claims.take_here`; None from a supervisor of an older gpurun, which makes no claims.
        layered: ranks may write beside their code: `layer.volume_name` is among the mounts.

    Returns:
        ``{"container", "copied"}``: its id; why each rank's writable code is a copy, "" if it is not.

    Raises:
        OpError: ``claimed`` if another gang holds one of the GPUs; ``fenced`` if the folder is no longer this
            attempt's; ``port-in-use`` if the sshd, or the rank, cannot bind; ``timeout``; else a kind of
            `kinds.of_create` with Docker's message.
    """
    if run[:3] != ["docker", "run", "--detach"] or "--name" not in run[:-1]:
        raise OpError("bad-request", "the argv is not a `docker run --detach --name`")
    folder = parts.job_folder(job)
    with parts.hold_job(call, job) as held:
        if parts.owner(job) != attempt:
            raise OpError(
                "fenced", "gpurun has already ended (fenced) this attempt on the host, or a later attempt has begun"
            )
        if claim is not None:
            claims.take_here(call, **claim)
        for name, (text, mode) in files.items():
            _write(os.path.join(folder, name), text, int(mode))
        if sshd is not None:
            _start_sshd(sshd, folder)
        for port in ports:
            _check_port(port)

        def container() -> str:
            return _create(job, attempt, run, held)

        made, copied = layer.create_layer(call, job, attempt, container) if layered else (container(), "")
        note_engine(call, folder)
    return {"container": made, "copied": copied}


def _create(job: str, attempt: int, run: List[str], held: parts.Held) -> str:
    note_creating(job, attempt, container_name(run))
    argv, values = create_argv(run)
    done = _run(argv, keeps=held.descriptor, environment=values)
    if done.returncode:  # the command may have been killed, and Docker may go on: the note stays
        message = _last_line(done.stderr)
        raise OpError(of_create(message), message)
    end(job)
    return done.stdout.strip()


def put(call: Call, job: str, attempt: int, name: str, mode: int) -> Dict[str, Any]:
    """Write the payload to a file of the job's folder, completely or not at all; `name` is its path there.

    Raises:
        OpError: ``fenced`` if the folder is no longer this attempt's; ``refused`` for a name that leads out of it.
    """
    path = os.path.join(os.fsencode(parts.job_folder(job)), *below.parts_of(name))
    content = call.payload
    with parts.held_by(call, job, attempt):
        return {"bytes": contents.replace(os.fsdecode(path), [content], mode)}


def start(call: Call, container: str, claim: Optional[Dict[str, Any]] = None) -> None:
    """Start a created container, and record its main process.

    Checks the claims again, now that everybody can see the container: this keeps a second gang's container for the same
    GPU from starting.

    Args:
        claim: as for `create`.

    Raises:
        OpError: ``claimed`` if another gang holds one of the GPUs; ``no-docker`` or ``timeout`` if the engine does
            not answer; else a kind of `kinds.of_start`.
    """
    if claim is not None:
        claims.take_here(call, **claim)
    connection = docker.open_engine(call, timeout_s=120.0)
    try:
        status, answer = _asked(call, connection, "POST", "/containers/%s/start" % container)
        if status in (204, 304):
            _note_main(call, connection, container)
            return
    finally:
        connection.close()
    error = docker.failure(status, answer, "starting the container")
    raise OpError(of_start(error.message), error.message)


def _asked(call: Call, connection: docker.Connection, method: str, path: str) -> Tuple[int, bytes]:
    """Send a request to the engine. Raises OpError: ``no-docker`` if it broke off; ``timeout``."""
    try:
        return docker.exchange(connection, method, path)
    except socket.timeout:
        raise OpError("timeout", "Docker did not answer %s %s" % (method, path)) from None
    except (http.client.HTTPException, OSError) as error:
        call.check()
        raise OpError("no-docker", "Docker closed the connection during %s %s: %r" % (method, path, error)) from None


def _note_main(call: Call, connection: docker.Connection, container: str) -> None:
    """Record the main process if it is visible here: an engine in another PID namespace reports foreign numbers."""
    status, answer = _asked(call, connection, "GET", "/containers/%s/json" % container)
    found = docker.parse_answer(answer) if status == 200 else None
    if found:
        pid, folder = found["State"]["Pid"], parts.job_folder(found["Config"]["Labels"][parts.LABEL])
        main = processes.read_process(pid) if processes.container_of(pid) == found["Id"] else None
        processes.note_process(os.path.join(folder, parts.MAIN_FILE), main)


def has_ended(call: Call, job: str) -> bool:
    """Return `job_parts.has_ended`: whether the container's main process is gone."""
    return parts.has_job_ended(job)


def inspect(call: Call, job: str) -> List[Dict[str, Any]]:
    """Return the job's containers on this host and their states.

    Returns:
        A list of ``{"id", "name", "attempt", "status", "code", "oom", "memory_bytes", "error", "started", "finished",
        "ended_ago_s", "unwritable"}``: ``memory_bytes`` is the limit of its memory, None if it has none; ``status`` is
        Docker's word (created, running, exited, …); times are Docker's own text; ``ended_ago_s`` is by this host's
        clock, None if it has not ended; ``unwritable`` says, of one that has ended with a failure, why nothing can be
        written to the job's folder, "" if that is possible.
    """
    connection = docker.open_engine(call)
    try:
        found = [_inspected(connection, job, each["Id"]) for each in parts.containers_of(connection, job)]
        return [container for container in found if container is not None]
    finally:
        connection.close()


def engine_now(call: Call, job: str) -> Dict[str, Any]:
    """Compare the Docker engine with the one that created the job's container: `engine.compare`."""
    return compare(call, parts.job_folder(job))


def run_file(call: Call, job: str, name: str) -> OpReply:
    """Return up to 4 MiB of a file in the job's `run` folder, which the ranks wrote. Does not follow a link."""
    if "/" in name:
        raise OpError("bad-request", "%r is not a file's name" % name)
    return contents.read_file(call, os.path.join(parts.job_folder(job), "run", name), max_bytes=4 << 20)


def _inspected(connection: docker.Connection, job: str, ident: str) -> Optional[Dict[str, Any]]:
    status, answer = docker.exchange(connection, "GET", "/containers/%s/json" % ident)
    if status == 404:  # removed since it was listed
        return None
    if status != 200:
        raise docker.failure(status, answer, "inspecting a container")
    found = docker.parse_answer(answer)
    state = found["State"]
    has_ended = state["Status"] in ("exited", "dead")
    has_failed = has_ended and state["ExitCode"] != 0
    return {
        "id": found["Id"],
        "name": found["Name"].lstrip("/"),
        "attempt": found["Config"]["Labels"].get("gpurun.attempt"),
        "status": state["Status"],
        "code": state["ExitCode"],
        "oom": state["OOMKilled"],
        "memory_bytes": found["HostConfig"].get("Memory") or None,
        "error": state["Error"],
        "started": state["StartedAt"],
        "finished": state["FinishedAt"],
        "ended_ago_s": _ago_s(state["FinishedAt"]) if has_ended else None,
        "unwritable": why_unwritable(os.path.join(parts.job_folder(job), "run")) if has_failed else "",
    }


def _ago_s(stamp: str) -> Optional[float]:
    """Return the seconds since a time in Docker's format, without trailing zeros:
    ``2026-01-02T03:04:05.123456789Z``.
    """
    try:
        second_s = calendar.timegm(time.strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S"))
        return time.time() - second_s - float("0%s0" % stamp[19:].rstrip("Z"))
    except ValueError:
        return None


def _start_sshd(sshd: str, folder: str) -> None:
    """Start the private sshd, which detaches itself. A second start after a crash finds the first one running."""
    if _is_serving(folder):
        return
    done = _run([sshd, "-f", folder + "/sshd/config", "-E", folder + "/sshd/log"])
    if done.returncode:
        try:
            with open(folder + "/sshd/log") as log:
                message = log.read().strip() or done.stderr.strip()
        except OSError:
            message = done.stderr.strip()
        kind = "port-in-use" if "Address already in use" in message else "sshd"
        raise OpError(kind, "the job's sshd does not start: %s" % message)


def _check_port(port: int) -> None:
    """Raise OpError if no program can listen on a TCP port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
            trial.listen(1)
        except OSError as error:
            raise OpError("port-in-use", "port %d: %s" % (port, error.strerror)) from error


def _is_serving(folder: str) -> bool:
    try:
        with open(folder + "/sshd/pid") as file:
            process = processes.read_process(int(file.read()))
    except (OSError, ValueError):
        return False
    return process is not None and folder in process.command


def _make_key(path: str, comment: str) -> str:
    if not os.path.exists(path + ".pub"):
        if os.path.exists(path):
            os.unlink(path)
        done = _run([_tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path])
        if done.returncode:
            raise OpError("no-tool", "ssh-keygen failed: %s" % _last_line(done.stderr))
    with open(path + ".pub") as public:
        return " ".join(public.read().split()[:2])


def _group_name(gid: int) -> str:
    """Return a group's name for ``/etc/group``, or a made-up one if it has none or one with strange characters."""
    try:
        name = grp.getgrgid(gid).gr_name
    except KeyError:
        name = ""
    return name if _GROUP_NAME.match(name) else "group-%d" % gid


def _address(interface: str) -> Optional[str]:
    """The interface's first IPv4 address (ioctl SIOCGIFADDR, man netdevice), None if it has none."""
    if not interface:
        return None
    name = os.fsencode(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _tool(name: str) -> str:
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin:/sbin")
    if path is None:
        raise OpError("no-tool", "%s is not installed" % name)
    return os.path.abspath(path)


def _write(path: str, text: str, mode: int) -> None:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        os.fchmod(stream.fileno(), mode)
        stream.write(text)


def _run(
    argv: List[str], keeps: int = -1, environment: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.CompletedProcess[str]":
    """Run a short command.

    Args:
        keeps: a descriptor that the command inherits, so that a lock lasts as long as the command.
        environment: added to the agent's own.
    """
    of_docker = {"DOCKER_HOST": _docker_host(), "DOCKER_CONFIG": os.path.join(serve.root(), _NO_CONFIG)}
    try:
        return subprocess.run(
            argv,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            errors="surrogateescape",
            timeout=_RUN_LIMIT_S,
            pass_fds=(keeps,) if keeps >= 0 else (),
            env={**os.environ, **environment, **of_docker},
        )
    except FileNotFoundError:
        raise OpError("no-tool", "%s is not installed" % argv[0]) from None
    except subprocess.TimeoutExpired:
        raise OpError("timeout", "%s did not end within %g s" % (" ".join(argv[:2]), _RUN_LIMIT_S)) from None


def _docker_host() -> str:
    return "unix://" + docker.socket_path()


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line and not line.startswith(("See 'docker", "Run 'docker"))]
    return lines[-1] if lines else "no message"


OPS = {
    "prepare": prepare,
    "create": create,
    "put": put,
    "start": start,
    "inspect": inspect,
    "engine": engine_now,
    "has_ended": has_ended,
    "signal": signal,
    "fence": fence,
    "run_file": run_file,
    "progress": progress,
}
