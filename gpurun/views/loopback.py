"""A server of WSGI applications: pages on 127.0.0.1, protected by a token in the URL, and metrics for Prometheus."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from socketserver import ThreadingMixIn
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, quote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from gpurun.errors import BadInput, GpurunError

# Protect a page by a token in its URL, so that other users of the machine cannot see it. WSGI (PEP 3333).


Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]

OUR_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


class Door:
    """An application behind a token.

    Args:
        command: the command that printed the URL, to remind people who have lost it.

    Attributes:
        asked_s: the last request with the token; `time.monotonic`.
    """

    def __init__(self, inner: App, token: str, command: str) -> None:
        self._inner, self._token, self._command = inner, token, command
        # Cookies know no ports: two calls on one machine must not have one name.
        self._cookie = f"gpurun_{sha256(token.encode()).hexdigest()[:12]}"
        self.asked_s = time.monotonic()

    def __call__(self, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        path = environ.get("PATH_INFO", "/")
        if _host_of(environ) not in OUR_NAMES:  # another site's name that now means 127.0.0.1
            return say(start, "403 Forbidden", "gpurun: this server answers only at 127.0.0.1 or localhost.\n")
        if self._is_ours(parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]):
            self.asked_s = time.monotonic()
            cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            start("303 See Other", [("Location", _here(path)), ("Set-Cookie", cookie), ("Content-Length", "0")])
            return []
        if not self._is_ours(_cookies(environ).get(self._cookie, "")):
            return say(start, "403 Forbidden", f"gpurun: open the whole URL that `{self._command}` has printed.\n")
        self.asked_s = time.monotonic()
        environ.pop("HTTP_COOKIE", None)
        return self._inner(environ, start)

    def _is_ours(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), self._token.encode())


def say(
    start: StartResponse,
    status: str,
    text: str,
    *,
    kind: str = "text/plain; charset=utf-8",
    style: str = "'unsafe-inline'",
) -> Iterable[bytes]:
    """Answer with a text or a page that runs no script and loads nothing.

    Args:
        style: allowed styles, as in Content-Security-Policy's ``style-src``.
    """
    body = text.encode("utf-8", "replace")
    policy = f"default-src 'none'; style-src {style}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    start(status, [
        ("Content-Type", kind), ("Content-Length", str(len(body))), ("X-Content-Type-Options", "nosniff"),
        ("Content-Security-Policy", policy), ("Referrer-Policy", "no-referrer"), ("Cache-Control", "no-store"),
        ("Server", "gpurun"),
    ])  # fmt: skip
    return [body]


def _here(path: str) -> str:
    """Return a path on this server for a header: ``//evil.example/`` would lead to another server."""
    return "/" + quote(path.lstrip("/\\"), encoding="latin-1")


def _host_of(environ: Environ) -> str:
    host = str(environ.get("HTTP_HOST", ""))
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def _cookies(environ: Environ) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(environ.get("HTTP_COOKIE", "")).items()}
    except CookieError:
        return {}


# Values that several requests share, and metrics.


T = TypeVar("T")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Remade(Generic[T]):
    """A value that is computed again on use when it is older than `for_s` seconds. Thread-safe."""

    def __init__(self, make: Callable[[], T], for_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._for_s, self._clock = make, for_s, clock
        self._lock = threading.Lock()
        self._made: tuple[float, T] | None = None

    def get(self) -> T:
        """The value."""
        with self._lock:
            if self._made is None or self._clock() - self._made[0] > self._for_s:
                value = self._make()
                self._made = self._clock(), value
            return self._made[1]


def scrapes(text: Remade[str]) -> App:
    """Return an application that answers only GET and HEAD of ``/metrics``."""

    def answer(environ: Environ, start: StartResponse) -> Iterable[bytes]:
        method = environ.get("REQUEST_METHOD", "GET")
        if method not in ("GET", "HEAD"):
            return say(start, "405 Method Not Allowed", "gpurun: the metrics can only be read\n")
        answered = told(environ, start)
        return [] if method == "HEAD" else answered

    def told(environ: Environ, start: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/metrics":
            return say(start, "404 Not Found", "gpurun: the metrics are at /metrics\n")
        try:
            return say(start, "200 OK", text.get(), kind=METRICS_TYPE)
        except GpurunError as error:
            return say(start, "500 Internal Server Error", f"gpurun: {error.message}\n")

    return answer


# The standard library's WSGI server, with a thread for each request.


SILENT_S = 30.0
"""A connection on which nothing comes for so long is closed: anybody on the machine can open one."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], app: App) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Request)
        self.set_app(app)

    def handle_error(self, *_: object) -> None:
        """Ignore a browser that disconnected, or a malformed request."""


class _Request(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, *_: object) -> None:
        """Log nothing, because nobody reads it."""

    def address_string(self) -> str:
        return "127.0.0.1"


def server(address: tuple[str, int], app: App) -> WSGIServer:
    """Return a server, which does not serve yet.

    Raises:
        BadInput: gpurun cannot listen on this address.
    """
    try:
        return _Server(address, app)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            f"cannot listen at {address[0]}:{address[1]}: {why}", hint="choose another address or port"
        ) from error


def serve(door: Door, port: int | None) -> int:
    """Start to serve, in threads that end with the process. Returns the port.

    Args:
        port: None = any free port.

    Raises:
        BadInput: the port is in use.
    """
    try:
        made = _Server(("127.0.0.1", port or 0), door)
    except OSError as error:
        raise BadInput(
            f"gpurun cannot use port {port} of 127.0.0.1: {error.strerror}",
            hint="leave out --port: gpurun then finds a free port",
        ) from error
    threading.Thread(target=made.serve_forever, name="web", daemon=True).start()
    return int(made.server_address[1])
