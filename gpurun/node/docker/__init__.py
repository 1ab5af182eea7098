"""The host's Docker engine over its Unix socket: plain HTTP, no docker command, no shell.

Most callers need only `docker.request`; `docker.logs` and `docker.wait` are separate operations because they last long.
"""

import hashlib
import http.client
import json
import os
import socket
import struct
from typing import Any, Dict, Iterator, Optional, Tuple

from gpurun.node.agent.call import Call, OpError, OpReply

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


def connect(
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
    connection = connect(call, timeout_s=time_limit_s)
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
    parsed = parse(answer)
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


def parse(answer: bytes) -> Any:
    """Parse JSON; return None if it is not JSON."""
    try:
        return json.loads(answer)
    except ValueError:
        return None


def failure(status: int, answer: bytes, what: str) -> OpError:
    """Return the error for an unexpected status: ``not-found`` for 404, ``conflict`` for 409, else ``docker``."""
    parsed = parse(answer)
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
    connection = connect(call, timeout_s=None)
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
    connection = connect(call)
    try:
        status, answer = exchange(connection, "GET", "/containers/%s/json" % checked_name(container))
    finally:
        connection.close()
    parsed = parse(answer) if status == 200 else None
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
    connection = connect(call, timeout_s=None)
    try:
        status, answer = exchange(connection, "POST", "/containers/%s/wait" % checked_name(container))
    except http.client.HTTPException as error:
        call.check()
        raise OpError("no-docker", "Docker closed the connection during the wait: %r" % error) from None
    finally:
        connection.close()
    parsed = parse(answer)
    if status != 200 or not isinstance(parsed, dict):
        raise failure(status, answer, "wait for %s" % container)
    return {"code": parsed.get("StatusCode"), "error": (parsed.get("Error") or {}).get("Message")}


def checked_name(container: str) -> str:
    """Return a container's name or id after a check, because it becomes part of a URL."""
    if not container or not all((letter.isalnum() and letter.isascii()) or letter in "_.-" for letter in container):
        raise OpError("bad-request", "%r is not a container's name" % container)
    return container


OPS = {"request": request, "logs": logs, "wait": wait}
