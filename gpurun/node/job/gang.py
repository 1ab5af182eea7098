"""A gang's part on this host: its folder, keys, private sshd and container.

Everything started here is detached and outlives the agent, so that training continues without the head. It has the
job's label or path, so that `fence` finds it without a record of who started it.
"""

import calendar
import fcntl
import getpass
import grp
import http.client
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from gpurun.node import docker
from gpurun.node.agent import place, processes
from gpurun.node.agent.call import Call, OpError, OpReply
from gpurun.node.docker import engine, kinds, run_argv
from gpurun.node.folder import below, files
from gpurun.node.job import caches as shared_caches
from gpurun.node.job import claims, creating, job_lock, job_parts, layer, machines
from gpurun.node.job.fence import fence
from gpurun.node.job.rank_processes import signal
from gpurun.node.job.rank_progress import progress
from gpurun.node.job.written import written_folder
from gpurun.node.probe import folder_facts

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
    folder = job_parts.folder(job)
    key = folder + ("/launch/ssh/id" if first else "/sshd/host_key")
    with job_lock.held(call, job):
        for name in ("launch/bin", "launch/ssh", "launch/python", "sshd", "run"):
            os.makedirs(os.path.join(folder, name), mode=0o700, exist_ok=True)
        if outputs:
            os.makedirs(job_parts.outputs_folder(job), mode=0o700, exist_ok=True)
        if beside:
            os.makedirs(written_folder(job), mode=0o700, exist_ok=True)
        job_lock.own(job, attempt)
        public_key = _make_key(key, "gpurun " + job)
        if caches is not None:
            shared_caches.join(call, job, **caches)
    uid, gid, groups = engine.container_user(call)
    return {
        "uid": str(uid),
        "gid": str(gid),
        "groups": [[str(group), _group_name(group)] for group in groups],
        "user": getpass.getuser(),
        "folder": place.root(),
        "hostname": socket.gethostname(),
        "address": _address(interface),
        "names": machines.known(),
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
    folder = job_parts.folder(job)
    with job_lock.held(call, job) as held:
        if job_lock.owner(job) != attempt:
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

        made, copied = layer.create(call, job, attempt, container) if layered else (container(), "")
        engine.note(call, folder)
    return {"container": made, "copied": copied}


def _create(job: str, attempt: int, run: List[str], held: job_lock.Held) -> str:
    creating.begin(job, attempt, run_argv.container_name(run))
    argv, values = run_argv.create_argv(run)
    done = _run(argv, keeps=held.descriptor, environment=values)
    if done.returncode:  # the command may have been killed, and Docker may go on: the note stays
        message = _last_line(done.stderr)
        raise OpError(kinds.of_create(message), message)
    creating.end(job)
    return done.stdout.strip()


def put(call: Call, job: str, attempt: int, name: str, mode: int) -> Dict[str, Any]:
    """Write the payload to a file of the job's folder, completely or not at all; `name` is its path there.

    Raises:
        OpError: ``fenced`` if the folder is no longer this attempt's; ``refused`` for a name that leads out of it.
    """
    path = os.path.join(os.fsencode(job_parts.folder(job)), *below.parts_of(name))
    content = call.payload
    with job_lock.held_by(call, job, attempt):
        return {"bytes": files.replace(os.fsdecode(path), [content], mode)}


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
    connection = docker.connect(call, timeout_s=120.0)
    try:
        status, answer = _asked(call, connection, "POST", "/containers/%s/start" % container)
        if status in (204, 304):
            _note_main(call, connection, container)
            return
    finally:
        connection.close()
    error = docker.failure(status, answer, "starting the container")
    raise OpError(kinds.of_start(error.message), error.message)


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
    found = docker.parse(answer) if status == 200 else None
    if found:
        pid, folder = found["State"]["Pid"], job_parts.folder(found["Config"]["Labels"][job_parts.LABEL])
        main = processes.read_process(pid) if processes.container_of(pid) == found["Id"] else None
        processes.note(os.path.join(folder, job_parts.MAIN_FILE), main)


def has_ended(call: Call, job: str) -> bool:
    """Return `job_parts.has_ended`: whether the container's main process is gone."""
    return job_parts.has_ended(job)


def inspect(call: Call, job: str) -> List[Dict[str, Any]]:
    """Return the job's containers on this host and their states.

    Returns:
        A list of ``{"id", "name", "attempt", "status", "code", "oom", "memory_bytes", "error", "started", "finished",
        "ended_ago_s", "unwritable"}``: ``memory_bytes`` is the limit of its memory, None if it has none; ``status`` is
        Docker's word (created, running, exited, …); times are Docker's own text; ``ended_ago_s`` is by this host's
        clock, None if it has not ended; ``unwritable`` says, of one that has ended with a failure, why nothing can be
        written to the job's folder, "" if that is possible.
    """
    connection = docker.connect(call)
    try:
        found = [_inspected(connection, job, each["Id"]) for each in job_parts.containers_of(connection, job)]
        return [container for container in found if container is not None]
    finally:
        connection.close()


def engine_now(call: Call, job: str) -> Dict[str, Any]:
    """Compare the Docker engine with the one that created the job's container: `engine.compare`."""
    return engine.compare(call, job_parts.folder(job))


def run_file(call: Call, job: str, name: str) -> OpReply:
    """Return up to 4 MiB of a file in the job's `run` folder, which the ranks wrote. Does not follow a link."""
    if "/" in name:
        raise OpError("bad-request", "%r is not a file's name" % name)
    return files.read(call, os.path.join(job_parts.folder(job), "run", name), max_bytes=4 << 20)


def _inspected(connection: docker.Connection, job: str, ident: str) -> Optional[Dict[str, Any]]:
    status, answer = docker.exchange(connection, "GET", "/containers/%s/json" % ident)
    if status == 404:  # removed since it was listed
        return None
    if status != 200:
        raise docker.failure(status, answer, "inspecting a container")
    found = docker.parse(answer)
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
        "unwritable": folder_facts.why_unwritable(os.path.join(job_parts.folder(job), "run")) if has_failed else "",
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
    of_docker = {"DOCKER_HOST": _docker_host(), "DOCKER_CONFIG": os.path.join(place.root(), _NO_CONFIG)}
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
