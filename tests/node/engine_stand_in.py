"""A Docker engine that creates containers as slowly as a test wants; its API on a Unix socket, and its command."""

from __future__ import annotations

import io
import json
import socketserver
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from waiting import LIMIT_S

COMMAND = """#!{python}
import http.client, json, os, socket, sys
words = sys.argv[1:]
assert words[0] == "create"
labels = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--label")
connection = http.client.HTTPConnection("docker")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect({socket!r})
given = [words[i + 1] for i, word in enumerate(words) if word == "--env"]
given = [word if "=" in word else word + "=" + os.environ[word] for word in given]
body = json.dumps({{"Image": words[-1], "Labels": labels, "Env": given, "argv": sys.argv}})
connection.request("POST", "/containers/create?name=" + words[words.index("--name") + 1], body=body)
answer = connection.getresponse()
said = json.loads(answer.read())
if answer.status != 201:
    sys.exit(said["message"])
print(said["Id"])
"""


class EngineStandIn(socketserver.ThreadingUnixStreamServer):
    """Lists containers only once they are made, and reserves their names before: as Docker does.

    Attributes:
        containers: what is listed, by id.
        image_labels: the labels of images, by id.
        refusals: so many of the next changes are refused.
        asked: the bodies of all requests to create a container; the command adds its argv.
        volumes: what is listed, by name.
        used: names of volumes that a stranger's container has.
        volumes_full: Docker has no room for another volume.
        mount_error: what Docker says when it mounts an overlay; "" if it can.
        may_finish: cleared, no container gets ready that begins with `slow`.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.path = folder / "engine.sock"
        super().__init__(str(self.path), _Handler)
        self.containers: dict[str, dict[str, object]] = {}
        self.names: set[str] = set()
        self.image_labels: dict[str, dict[str, str]] = {}
        self.images = ["sha256:1"]
        self.changes: list[tuple[str, str]] = []
        self.asked: list[dict[str, object]] = []
        self.volumes: dict[str, dict[str, object]] = {}
        self.used: set[str] = set()
        self.mount_error = ""
        self.volumes_full = False
        self.slow = ""
        self.is_full = False
        self.refusals = 0
        self.may_finish = threading.Event()
        self.lock = threading.Lock()
        self.began = threading.Event()
        self.bin = folder / "bin"
        self.bin.mkdir()
        command = self.bin / "docker"
        command.write_text(COMMAND.format(python=sys.executable, socket=str(self.path)))
        command.chmod(0o755)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def make(self, name: str, labels: dict[str, str]) -> str | None:
        """Create a container; its id, or None if the name is taken."""
        with self.lock:
            if name in self.names:
                return None
            self.names.add(name)
        if labels.get("slow") or name == self.slow:
            self.began.set()
            assert self.may_finish.wait(LIMIT_S)
        with self.lock:
            ident = f"{len(self.containers):x}".rjust(64, "c") if name != self.slow else "5" * 64
            self.containers[ident] = {"Id": ident, "Names": [f"/{name}"], "Labels": labels, "State": "created"}
        return ident

    def run(self, labels: dict[str, str], *, written: int = 0) -> str:
        """Add a running container; return its id."""
        ident = self.make(f"c{len(self.names)}", labels)
        assert ident is not None
        self.containers[ident] |= {"HostConfig": {"CpuQuota": 0}, "SizeRw": written}
        return ident

    def change(self, ident: str, how: str, body: dict[str, object]) -> None:
        """Change the limits of a running container, or kill it."""
        self.changes.append((ident, how))
        if how == "kill":
            self.remove(ident)
        elif (found := self.containers.get(ident)) is not None:
            found["HostConfig"] = {**found["HostConfig"], **body}  # type: ignore[dict-item]

    def remove(self, ident: str) -> None:
        with self.lock:
            found = self.containers.pop(ident, None)
            if found is not None:
                self.names.discard(str(found["Names"][0])[1:])  # type: ignore[index]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: EngineStandIn

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return ""

    def _answer(self, status: int, value: object) -> None:
        text = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if asked.path == "/images/json":
            self._answer(200, [{"Id": image} for image in self.server.images])
        elif asked.path.startswith("/images/"):
            found = self.server.image_labels.get(asked.path.split("/")[2])
            self._answer(404 if found is None else 200, {"Config": {"Labels": found}})
        elif asked.path == "/volumes":
            (prefix,) = json.loads(parse_qs(asked.query)["filters"][0])["name"]
            self._answer(200, {"Volumes": [one for name, one in self.server.volumes.items() if prefix in name]})
        elif asked.path != "/containers/json":
            found = self.server.containers.get(asked.path.split("/")[2])
            self._answer(200 if found else 404, found or {"message": "No such container"})
        else:
            (label,) = json.loads(parse_qs(asked.query)["filters"][0])["label"]
            name, _, value = label.partition("=")
            with self.server.lock:
                found = list(self.server.containers.values())
            self._answer(200, [one for one in found if not value or one["Labels"].get(name) == value])  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        asked = urlsplit(self.path)
        if asked.path.endswith(("/update", "/kill")) and self.server.refusals:
            self.server.refusals -= 1
            self._answer(500, {"message": "cannot write cpu.max: device or resource busy"})
            return
        if asked.path.endswith(("/update", "/kill")):
            self.server.change(asked.path.split("/")[2], asked.path.rpartition("/")[2], body)
            self._answer(200, {"Warnings": []})
            return
        if asked.path == "/volumes/create" and self.server.volumes_full:
            self._answer(500, {"message": "mkdir /var/lib/docker/volumes: no space left on device"})
            return
        if asked.path == "/volumes/create":
            self._answer(201, self.server.volumes.setdefault(body["Name"], body))
            return
        self.server.asked.append(body)
        name, labels = parse_qs(asked.query)["name"][0], body.get("Labels") or {}
        ident = None if self.server.is_full else self.server.make(name, labels)
        if self.server.is_full:
            self._answer(500, {"message": "no space left on device"})
        elif ident is None:
            self._answer(409, {"message": "Conflict. The container name is already in use"})
        else:
            self._answer(201, {"Id": ident})

    def do_PUT(self) -> None:
        """Copy files into the upper folder of the only overlay."""
        packed = self.rfile.read(int(self.headers["Content-Length"]))
        given = [one.get("DriverOpts") or {} for one in self.server.volumes.values()]
        (options,) = [one["o"] for one in given if one.get("type") == "overlay"]  # type: ignore[attr-defined]
        if not self.server.mount_error:
            upper = options.partition("upperdir=")[2].partition(",")[0]
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(upper, filter="data")
        self._answer(500 if self.server.mount_error else 200, {"message": self.server.mount_error})

    def do_DELETE(self) -> None:
        path = urlsplit(self.path).path
        name = path.rpartition("/")[2]
        if path.startswith("/volumes/") and name in self.server.used:
            self._answer(409, {"message": "volume is in use"})
            return
        if path.startswith("/volumes/"):
            self.server.volumes.pop(name, None)
        else:
            self.server.remove(name)
        self._answer(204, None)
