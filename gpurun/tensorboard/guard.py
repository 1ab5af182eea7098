"""Who may see a TensorBoard: whoever has the URL with the token, and nobody else on the machine. WSGI (PEP 3333).

TensorBoard knows no users, and any user of the head can connect to its loopback. The token is in the URL once; the
answer puts it into a cookie, which no script can read and no other site can make a browser send.
"""

from __future__ import annotations

import hmac
import html
import os
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie
from typing import Any, BinaryIO
from urllib.parse import parse_qs

from gpurun.errors import GpurunError
from gpurun.node.below import Cursor, open_regular, open_top
from gpurun.tensorboard.shown import Shown, Trace

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]

TRACES = "/traces"
OUR_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
CHUNK_BYTES = 1 << 18


class Guard:
    """TensorBoard's application behind a token, and a page with the traces among the outputs beside it.

    Attributes:
        asked_s: when somebody with the token last asked for something; `time.monotonic`.
    """

    def __init__(self, inner: App, shown: Shown, token: str) -> None:
        self._inner, self._shown, self._token = inner, shown, token
        # Cookies know no ports: two calls on one machine must not have one name.
        self._cookie = f"gpurun_{sha256(token.encode()).hexdigest()[:12]}"
        self.asked_s = time.monotonic()

    def __call__(self, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        path = environ.get("PATH_INFO", "/")
        if _host_of(environ) not in OUR_NAMES:  # another site's name that now means 127.0.0.1
            return _text(start, "403 Forbidden", "gpurun: this server is reached as 127.0.0.1 or localhost only.\n")
        if self._is_ours(parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]):
            self.asked_s = time.monotonic()
            cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            start("303 See Other", [("Location", path), ("Set-Cookie", cookie), ("Content-Length", "0")])
            return []
        if not self._is_ours(_cookies(environ).get(self._cookie, "")):
            return _text(start, "403 Forbidden", "gpurun: open the whole URL that `gpurun tensorboard` has printed.\n")
        self.asked_s = time.monotonic()
        environ.pop("HTTP_COOKIE", None)
        if path == TRACES:
            return self._list(start)
        if path.startswith(f"{TRACES}/"):
            return self._send(path.rpartition("/")[2], start)
        return self._inner(environ, start)

    def _is_ours(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), self._token.encode())

    def _list(self, start: StartResponse) -> Iterable[bytes]:
        rows = "".join(
            f'<li><a href="{TRACES}/{number}" download>{html.escape(trace.name)}</a> ({trace.size:,} bytes)</li>'
            for number, trace in enumerate(self._shown.traces)
        )
        page = (
            '<!doctype html><meta charset="utf-8"><title>Traces</title><h1>Traces</h1>'
            f"<ul>{rows or '<li>none</li>'}</ul>"
            "<p>Open a downloaded file in Perfetto's viewer, or in Chrome at chrome://tracing.</p>"
        )
        return _text(start, "200 OK", page, kind="text/html; charset=utf-8")

    def _send(self, number: str, start: StartResponse) -> Iterable[bytes]:
        traces = self._shown.traces
        if not number.isascii() or not number.isdigit() or int(number[:9]) >= len(traces):
            return _text(start, "404 Not Found", "gpurun: there is no such trace.\n")
        trace = traces[int(number[:9])]
        try:
            file = _opened(trace)
        except (OSError, GpurunError) as error:
            return _text(start, "404 Not Found", f"gpurun: it cannot be read: {error.__class__.__name__}\n")
        name = trace.parts[-1].decode("ascii", "replace").replace("\ufffd", "_").replace('"', "_")
        start("200 OK", [
            ("Content-Type", "application/octet-stream"), ("X-Content-Type-Options", "nosniff"),
            ("Content-Length", str(os.fstat(file.fileno()).st_size)),
            ("Content-Disposition", f'attachment; filename="{_printable(name)}"'),
        ])  # fmt: skip
        return _chunks(file)


def _host_of(environ: Environ) -> str:
    host = str(environ.get("HTTP_HOST", ""))
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def _cookies(environ: Environ) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(environ.get("HTTP_COOKIE", "")).items()}
    except CookieError:
        return {}


def _text(start: StartResponse, status: str, text: str, *, kind: str = "text/plain; charset=utf-8") -> Iterable[bytes]:
    body = text.encode("utf-8", "replace")
    start(status, [
        ("Content-Type", kind), ("Content-Length", str(len(body))), ("X-Content-Type-Options", "nosniff"),
        ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"), ("Cache-Control", "no-store"),
    ])  # fmt: skip
    return [body]


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "_" for letter in name)


def _opened(trace: Trace) -> BinaryIO:
    """The trace's file, reached without following a link, whatever has become of the outputs since they were listed."""
    top = open_top(str(trace.run.outputs))
    try:
        with Cursor(top) as cursor:
            descriptor, _ = open_regular(cursor.at(trace.parts[:-1]), trace.parts[-1])
    finally:
        os.close(top)
    return os.fdopen(descriptor, "rb")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    left = os.fstat(file.fileno()).st_size  # as was said: it may grow
    with file:
        while left > 0 and (chunk := file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
