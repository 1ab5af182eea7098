"""The host's Docker engine over its Unix socket: plain HTTP, no docker command, no shell.

Most callers need only `docker.request`; `docker.logs` and `docker.wait` are separate operations because they last long.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import socket
import struct
import time
import urllib.parse
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from gpurun.node.agent import processes
from gpurun.node.agent.frames import Call, OpError, OpReply

DEFAULT_SOCKET = "/var/run/docker.sock"
# No version in the path: an engine then answers in its own. Any fixed one is too new for 20.10 or too old for 29.
API = ""


class Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: Optional[float]) -> None:
        super().__init__("docker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:  # noqa: D102 - of HTTPConnection
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def abort(self) -> None:
        """Interrupt a blocked read in another thread."""
        if self.sock is not None:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def socket_path(docker_host: Optional[str] = None) -> str:
    """Return the socket of the engine that the user's ``docker`` would use.

    Args:
        docker_host: as in ``DOCKER_HOST``; None = the environment's; else the user's context; else the system's engine,
            or the user's rootless engine if there is no other (docs.docker.com, "rootless", "context").

    Raises:
        OpError: ``bad-request`` if it is anything but a Unix socket.
    """
    host = docker_host or os.environ.get("DOCKER_HOST") or _host_of_context() or "unix://" + _usual_socket()
    if not host.startswith("unix://"):
        raise OpError("bad-request", "only unix:// Docker sockets are supported, not %r" % host)
    return host[len("unix://") :]


def _host_of_context() -> Optional[str]:
    """Return the endpoint of the user's context; None = no context, or a missing one."""
    folder = os.environ.get("DOCKER_CONFIG") or os.path.join(os.path.expanduser("~"), ".docker")
    try:
        name = os.environ.get("DOCKER_CONTEXT") or _document(folder, "config.json")["currentContext"]
        known = hashlib.sha256(name.encode()).hexdigest()
        host = _document(folder, "contexts", "meta", known, "meta.json")["Endpoints"]["docker"]["Host"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return host if isinstance(host, str) else None


def _document(*parts: str) -> Any:
    with open(os.path.join(*parts), "rb") as stream:
        return json.loads(stream.read(1 << 20))


def _usual_socket() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR") or "/run/user/%d" % os.getuid()
    rootless = os.path.join(runtime, "docker.sock")
    return rootless if not os.path.exists(DEFAULT_SOCKET) and os.path.exists(rootless) else DEFAULT_SOCKET


def open_engine(
    call: Optional[Call] = None, docker_host: Optional[str] = None, timeout_s: Optional[float] = 60.0
) -> Connection:
    """Return an open connection; cancelling the call closes it.

    Raises:
        OpError: ``no-docker`` with the reason if the engine does not answer on its socket.
    """
    path = socket_path(docker_host)
    connection = Connection(path, timeout_s)
    try:
        connection.connect()
    except OSError as error:
        raise OpError("no-docker", "Docker does not answer on %s: %s" % (path, error.strerror or error)) from None
    if call is not None:
        call.on_cancel(connection.abort)
    return connection


def request(
    call: Call,
    method: str,
    path: str,
    json: Any = None,
    time_limit_s: float = 60.0,
) -> OpReply:
    """Send one API request, such as ``GET /containers/json?all=1``; the path has no version.

    The request body is `json`, or the call's payload if there is one (``application/x-tar``).

    Returns:
        ``{"status", "json"}``; ``json`` is the parsed answer, or None with the raw answer as payload.

    Raises:
        OpError: ``no-docker``; ``timeout``. A status of 400 and above is *returned*, not raised, because callers know
            which ones they expect.
    """
    payload = call.payload
    if not path.startswith("/") or any(ord(letter) < 0x21 or ord(letter) > 0x7E for letter in path):
        raise OpError("bad-request", "%r is not a URL path" % path)
    connection = open_engine(call, timeout_s=time_limit_s)
    try:
        status, answer = exchange(connection, method, path, json, payload)
    except socket.timeout:
        raise OpError("timeout", "Docker did not answer %s %s within %g s" % (method, path, time_limit_s)) from None
    except http.client.HTTPException as error:
        call.check()
        raise OpError("no-docker", "Docker closed the connection during %s %s: %r" % (method, path, error)) from None
    finally:
        connection.close()
    call.check()
    parsed = parse_answer(answer)
    return OpReply({"status": status, "json": parsed}, b"" if parsed is not None else answer)


def exchange(connection: Connection, method: str, path: str, body: Any = None, tar: bytes = b"") -> Tuple[int, bytes]:
    """Send one request on an open connection; return the status and the whole answer."""
    headers = {}
    data: Optional[bytes] = None
    if body is not None:
        data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    elif tar:
        data, headers["Content-Type"] = tar, "application/x-tar"
    connection.request(method, API + path, body=data, headers=headers)
    response = connection.getresponse()
    return response.status, response.read()


def parse_answer(answer: bytes) -> Any:
    """Parse JSON; return None if it is not JSON."""
    try:
        return json.loads(answer)
    except ValueError:
        return None


def failure(status: int, answer: bytes, what: str) -> OpError:
    """Return the error for an unexpected status: ``not-found`` for 404, ``conflict`` for 409, else ``docker``."""
    parsed = parse_answer(answer)
    message = parsed.get("message") if isinstance(parsed, dict) else None
    kind = {404: "not-found", 409: "conflict"}.get(status, "docker")
    return OpError(kind, "%s: %s" % (what, message or "Docker answered %d" % status), status=status)


def logs(
    call: Call,
    container: str,
    follow: bool = True,
    since: Optional[str] = None,
    tail: str = "all",
    timestamps: bool = True,
) -> Iterator[OpReply]:
    """Stream a container's output in pieces; each item's value is ``{"stream": "stdout" | "stderr"}``.

    Args:
        since: Docker's timestamp (``seconds.nanoseconds``) to resume from.

    Raises:
        OpError: ``not-found`` if there is no such container.
    """
    query = "stdout=1&stderr=1&follow=%d&timestamps=%d&tail=%s" % (follow, timestamps, tail)
    if since is not None:
        query += "&since=%s" % since
    connection = open_engine(call, timeout_s=None)
    try:
        connection.request("GET", "%s/containers/%s/logs?%s" % (API, checked_name(container), query))
        response = connection.getresponse()
        if response.status != 200:
            raise failure(response.status, response.read(), "logs of %s" % container)
        multiplexed = response.getheader("Content-Type") != "application/vnd.docker.raw-stream" and not _is_tty(
            call, container
        )
        yield from _frames(response) if multiplexed else _raw(response)
    finally:
        connection.close()


def _is_tty(call: Call, container: str) -> bool:
    """Return whether the stream is not multiplexed. Engines before 23 do not say so in the header, but in the
    configuration.
    """
    connection = open_engine(call)
    try:
        status, answer = exchange(connection, "GET", "/containers/%s/json" % checked_name(container))
    finally:
        connection.close()
    parsed = parse_answer(answer) if status == 200 else None
    return bool(parsed and parsed["Config"]["Tty"])


def _frames(response: http.client.HTTPResponse) -> Iterator[OpReply]:
    while True:
        header = response.read(8)
        if len(header) < 8:
            return
        stream, size = struct.unpack("!BxxxI", header)
        name = {1: "stdout", 2: "stderr"}.get(stream, "stdout")
        while size:
            piece = response.read(min(size, 1 << 16))
            if not piece:
                return
            size -= len(piece)
            yield OpReply({"stream": name}, piece)


def _raw(response: http.client.HTTPResponse) -> Iterator[OpReply]:
    while True:
        piece = response.read1(1 << 16)
        if not piece:
            return
        yield OpReply({"stream": "stdout"}, piece)


def wait(call: Call, container: str) -> Dict[str, Any]:
    """Wait until a container is not running; return its exit code. A cancelled call stops waiting immediately.

    Returns:
        ``{"code", "error"}``: ``error`` is Docker's message, usually None.

    Raises:
        OpError: ``not-found``, also if the container is removed meanwhile.
    """
    connection = open_engine(call, timeout_s=None)
    try:
        status, answer = exchange(connection, "POST", "/containers/%s/wait" % checked_name(container))
    except http.client.HTTPException as error:
        call.check()
        raise OpError("no-docker", "Docker closed the connection during the wait: %r" % error) from None
    finally:
        connection.close()
    parsed = parse_answer(answer)
    if status != 200 or not isinstance(parsed, dict):
        raise failure(status, answer, "wait for %s" % container)
    return {"code": parsed.get("StatusCode"), "error": (parsed.get("Error") or {}).get("Message")}


def checked_name(container: str) -> str:
    """Return a container's name or id after a check, because it becomes part of a URL."""
    if not container or not all((letter.isalnum() and letter.isascii()) or letter in "_.-" for letter in container):
        raise OpError("bad-request", "%r is not a container's name" % container)
    return container


OPS = {"request": request, "logs": logs, "wait": wait}


# What Docker's words mean: the kind of a failure to load an image, or to create or start a container. Pure.


_NO_ENGINE = re.compile(r"cannot connect to the docker daemon|error during connect|deadline exceeded", re.IGNORECASE)
_NO_MOUNT = re.compile(r"bind source path does not exist", re.IGNORECASE)
_NO_COMMAND = re.compile(
    r"executable file .*not found|\bexec:? [\"'`]?/?[^\"'`:]+[\"'`]?: (?:[^:]*: )*no such file", re.IGNORECASE
)
_FULL = re.compile(r"no space left|quota exceeded", re.IGNORECASE)
# Of the host alone: its disk and memory, its engine and runtime, its driver. No job brings them about.
_OF_HOST = re.compile(
    r"no space left|quota exceeded|read-only file system|input/output error|structure needs cleaning|host is down"
    r"|stale (?:nfs )?file handle|transport endpoint is not connected|too many (?:open files|levels of symbolic links)"
    r"|cannot allocate memory|resource temporarily unavailable|device or resource busy|overlay mount"
    r"|mount(?:ing)? overlay|layer does not exist|layer not found|failed to (?:get|register) (?:read )?layer"
    r"|cgroup|message bus|\bdbus\b|org\.freedesktop|apparmor|keycreate"
    r"|containerd\.sock|ttrpc|transport is closing|connection (?:refused|reset)|broken pipe|context canceled"
    r"|start(?:ing)? shim|containerd-shim|shim socket|signal: killed|fork/exec|unable to retrieve oci runtime error"
    r"|exec:? [\"'`]?(?:[^\"'`\s:]*/)?(?:runc|crun|runsc|youki|kata-[\w-]+|docker-[\w-]+|containerd[\w-]*)\b"
    r"|runtime name|no such runtime|could not select device driver|cdi devices?\b|logging driver|create endpoint"
    r"|iptables|nvidia-c(?:ontainer|tk)[\w.-]*[\"']?: (?!requirement)|libnvidia|library version mismatch",
    re.IGNORECASE,
)
# Words of the host's that a mount, a memory limit or the image's own demands bring about.
_OF_JOB = re.compile(r"mountpoint|requirement error|container init was oom-killed", re.IGNORECASE)


def of_create(message: str) -> str:
    """Return the kind of what ``docker create`` said: ``no-docker``, ``engine``, ``no-image``, ``no-mount`` or
    ``docker``. ``engine`` is the host's failure, ``docker`` may be the job's.
    """
    if "No such image" in message:
        return "no-image"
    return "no-mount" if _NO_MOUNT.search(message) else _of(message)


def of_start(message: str) -> str:
    """Return the kind of what Docker said of a start: ``no-docker``, ``engine``, ``no-command`` or ``docker``.

    It is ``no-command`` only if the image lacks the main process's program, and never if the host's runtime fails.
    """
    kind = _of(message)
    return "no-command" if kind == "docker" and _NO_COMMAND.search(message) else kind


def of_load(message: str) -> str:
    """Return the kind of what ``docker load`` said: ``no-space``, ``no-docker``, ``engine`` or ``load-failed``."""
    if _FULL.search(message):
        return "no-space"
    kind = _of(message)
    return "load-failed" if kind == "docker" else kind


def _of(message: str) -> str:
    if _NO_ENGINE.search(message):
        return "no-docker"
    return "engine" if _OF_HOST.search(message) and not _OF_JOB.search(message) else "docker"


# Read a plan's ``docker run`` argv, and keep values of variables out of the host's process list.


_OF_THE_CLIENT = frozenset(
    (
        "HOME", "PATH", "GLIBC_TUNABLES", "GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GOTRACEBACK",
        "DOCKER_API_VERSION", "DOCKER_CERT_PATH", "DOCKER_CONFIG", "DOCKER_CONTENT_TRUST",
        "DOCKER_CONTENT_TRUST_SERVER", "DOCKER_CONTEXT", "DOCKER_CUSTOM_HEADERS", "DOCKER_DEFAULT_PLATFORM",
        "DOCKER_HOST", "DOCKER_TLS", "DOCKER_TLS_VERIFY",
    )
)  # fmt: skip
"""Docker's client, Go and the loader read these variables themselves: a job's values would change the client. They are
no secrets (docs.docker.com, "docker", "Environment variables"; pkg.go.dev/runtime). So are all that begin with ``LD_``.
"""


def container_name(run: List[str]) -> str:
    """Return the name that the argv gives to its container."""
    return run[run.index("--name") + 1]


def create_argv(run: List[str]) -> Tuple[List[str], Dict[str, str]]:
    """Return the ``docker create`` argv without the values of variables, and the environment to run it in.

    Docker's client takes the value of ``--env NAME`` from its own environment. The words after ``--entrypoint`` are the
    job's command, and stay as they are.
    """
    end = run.index("--entrypoint") if "--entrypoint" in run else len(run)
    argv, values = ["docker", "create"], {}  # type: List[str], Dict[str, str]
    options = iter(run[3:end])
    for word in options:
        argv.append(word)
        if word == "--env":
            setting = next(options)
            name, separator, value = setting.partition("=")
            if not separator or name in _OF_THE_CLIENT or name.startswith("LD_"):
                argv.append(setting)
            else:
                argv.append(name)
                values[name] = value
    return [*argv, *run[end:]], values


# Identify the Docker engine of this host: the process behind its socket, and whether it is the one that started a
# job.


CONTAINERD_ROOT, CONTAINERD_CONFIG = "/var/lib/containerd", "/etc/containerd/config.toml"
FILE = "engine.json"
"""In a job's folder: the engine that its container was created by."""
ANSWER_S = 20.0
"""How long an engine may take to answer: while it restarts, systemd holds the socket and requests wait."""
LIVES_S = 2.0
"""The same while the engine process of the job's start lives. A stopping engine refuses requests; this one is slow."""
_LARGEST_GROUP = (1 << 31) - 1
"""Docker refuses larger numbers in ``--group-add``."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (man 7 unix)


class NoEngine(Exception):
    """Nothing answers on the socket, although an engine did when the job started."""


class SilentEngine(NoEngine):
    """Something accepts connections, but does not answer."""


def is_rootless(info: Any) -> bool:
    """Return whether the engine runs as a user. Uid 0 in a container is then that user (docs.docker.com, "rootless").

    Args:
        info: the answer of ``docker info``.
    """
    options = info.get("SecurityOptions") if isinstance(info, dict) else None
    return any(str(option).startswith("name=rootless") for option in options or ())


def is_containerd(info: Any) -> bool:
    """Return whether an engine (by its ``docker info``) keeps images in the containerd image store."""
    kinds = dict(item for item in info.get("DriverStatus") or [] if len(item) == 2)
    return str(kinds.get("driver-type", "")).startswith("io.containerd.snapshotter")


def image_root(info: Dict[str, Any], config: str = "") -> str:
    """Return the folder on whose disk images and containers lie; "" if the engine does not say.

    With the containerd image store, that is containerd's own folder, which ``DockerRootDir`` does not move
    (docs.docker.com, "containerd image store"). Only a containerd that dockerd itself has started lies below it.
    """
    root = str(info.get("DockerRootDir") or "")
    said = info.get("Containerd")
    address = str(said.get("Address") if isinstance(said, dict) else "")
    if not is_containerd(info) or not address.startswith("/") or "/docker/" in address:
        return root
    try:
        with open(config or CONTAINERD_CONFIG, encoding="utf-8", errors="replace") as stream:
            before_tables = re.split(r"^\s*\[", stream.read(1 << 16), maxsplit=1, flags=re.MULTILINE)[0]
    except OSError:
        before_tables = ""
    moved = re.search(r"^\s*root\s*=\s*[\"'](/[^\"'\n]*)[\"']", before_tables, re.MULTILINE)
    return moved.group(1) if moved else CONTAINERD_ROOT


def container_user(call: Call) -> "tuple[int, int, List[int]]":
    """Return uid, gid and supplementary groups of this user's processes in a container.

    Assumes an ordinary engine if it is silent. In a container of a rootless engine, other numbers mean other groups.
    """
    try:
        answer = request(call, "GET", "/info").value["json"]
    except (OSError, OpError):
        answer = None
    if is_rootless(answer):
        return 0, 0, []
    others = set(os.getgroups()) - {os.getgid()}
    return os.getuid(), os.getgid(), sorted(gid for gid in others if gid <= _LARGEST_GROUP)


def note_engine(call: Call, folder: str) -> None:
    """Write into a job's folder which engine serves now. Leaves out what cannot be known."""
    try:
        engine = serving(socket_path(), call)
    except (OSError, NoEngine):
        engine = None
    processes.note_process(os.path.join(folder, FILE), engine)


def compare(call: Call, folder: str) -> Dict[str, Any]:
    """Compare the present engine with the one that `note` saw.

    Returns:
        ``{"state", "up_s", "why"}``: ``state`` is ``same``, ``restarted`` (with the seconds since the present engine
        started), ``gone`` (with the reason), or ``unknown``: /proc does not show it, or there is no note.
    """
    noted = processes.noted(os.path.join(folder, FILE))
    process = None if noted is None else processes.read_process(noted[0])
    lives = process is not None and (process.pid, process.started) == noted
    try:
        engine = serving(socket_path(), call, LIVES_S if lives else ANSWER_S)
    except NoEngine as error:
        frozen = lives and isinstance(error, SilentEngine)
        return {"state": "same" if frozen else "gone", "up_s": None, "why": str(error)}
    except OSError as error:  # no leave to ask, say
        return {"state": "unknown", "up_s": None, "why": str(error)}
    if engine is None or noted is None:
        return {"state": "unknown", "up_s": None, "why": "no process that serves Docker's socket is known"}
    if noted == (engine.pid, engine.started):
        return {"state": "same", "up_s": None, "why": ""}
    up_s = _since_boot_s() - engine.started / os.sysconf("SC_CLK_TCK")
    return {
        "state": "restarted",
        "up_s": up_s,
        "why": "dockerd restarted: its pid was %d and is now %d" % (noted[0], engine.pid),
    }


def serving(path: str, call: Optional[Call] = None, answer_s: float = ANSWER_S) -> Optional[processes.Process]:
    """Return the process of the engine that answers on a socket; None if it cannot be seen.

    Raises:
        NoEngine: none answers within `answer_s`. OSError: the socket may not be used.
    """
    connection = Connection(path, answer_s)
    try:
        connection.connect()
        if call is not None:
            call.on_cancel(connection.abort)
        size = _CREDENTIALS.size
        pid = _CREDENTIALS.unpack(connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]
        exchange(connection, "GET", "/_ping")
    except (FileNotFoundError, ConnectionError, socket.timeout, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        kind = SilentEngine if isinstance(error, socket.timeout) else NoEngine
        raise kind("Docker does not answer on %s: %s" % (path, reason)) from None
    finally:
        connection.close()
    process = processes.read_process(pid) if pid > 1 else None
    # For a socket that systemd made, the kernel names systemd.
    return process if process is not None and _name(process) != "systemd" else _only_dockerd()


def _only_dockerd() -> Optional[processes.Process]:
    found = [process for process in processes.list_processes() if _name(process) == "dockerd"]
    return found[0] if len(found) == 1 else None


def _name(process: processes.Process) -> str:
    return os.path.basename(process.command.split(" ")[0])


def _since_boot_s() -> float:
    """Return the seconds since boot, on the clock of a process's start time (man proc_pid_stat: CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# Tell the containers of jobs from those of images that somebody made of a job's container.


_JOB, _ATTEMPT = "gpurun.job", "gpurun.attempt"  # as `gpurun.node.claim_rules` writes them
Get = Callable[[str], Tuple[int, bytes]]
"""Asks the engine for a path; returns status and answer."""


def of_jobs(listed: List[Dict[str, Any]], get: Get) -> List[Dict[str, Any]]:
    """Return the containers, of those that Docker lists with a job's label, that are a job's."""
    return [each for each in listed if not _is_inherited(each, get)]


def _is_inherited(listed: Dict[str, Any], get: Get) -> bool:
    """Return whether a container has a job's labels from its image alone.

    One with a job's name has not. Without an answer about the image, a container counts as the job's.
    """
    labels = listed.get("Labels") or {}
    prefix = "/gpurun-%s-" % labels.get(_JOB)
    if any(str(name).startswith(prefix) for name in listed.get("Names") or ()):
        return False
    status, answer = get("/images/%s/json" % urllib.parse.quote(str(listed.get("ImageID")), safe=":"))
    image = parse_answer(answer) if status == 200 else None
    config = image.get("Config") if isinstance(image, dict) else None
    given = config.get("Labels") if isinstance(config, dict) else None
    return isinstance(given, dict) and all(given.get(name) == labels.get(name) for name in (_JOB, _ATTEMPT))
