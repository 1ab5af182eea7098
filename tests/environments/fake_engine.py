"""Docker as a build sees it, without Docker."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from gpurun.content import build
from gpurun.content.images import Engine

BASE = "me/base:1"
CONF = {"PIP_CONFIG_FILE": "/dev/null"}


class FakeEngine(Engine):
    """Docker as a build sees it. `pip` is called with the folders that are mounted, by their place in the container."""

    def __init__(self, pip=None, code=0):
        super().__init__(None)
        self.pip, self.code = pip or (lambda folders: None), code
        self.made, self.containers, self.refuse, self.bodies = {}, {}, {}, []
        self.layers, self.created_s = {}, {}  # by container
        self.builds, self.commits, self.rootless = 0, 0, False
        self._add(BASE, "sha256:" + "b" * 64, ["sha256:l0"], {"Cmd": ["/bin/sh"], "Env": ["PATH=/base/bin", "A=b"]})

    def _add(self, name, ident, layers, config):
        self.made[name] = {
            "Id": ident, "RootFS": {"Layers": layers}, "Size": 1, "RepoTags": [name], "Config": config,
            "Architecture": "amd64", "Os": "linux",
        }  # fmt: skip

    def info(self):
        return {"SecurityOptions": ["name=rootless"] if self.rootless else []}

    def upload(self, path, tar):
        self.layers[path.split("/")[2]] = hashlib.sha256(b"".join(tar)).hexdigest()
        return self.refuse.get("upload", (200, None))

    def exchange(self, method, path, body=None, timeout_s=60.0):
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        parts = url.path.strip("/").split("/")
        if parts[0] == "images":
            found = self.made.get(unquote("/".join(parts[1:-1])))
            return (200, found) if found else (404, {"message": "no such image"})
        if parts[-1] == "create":
            if "create" in self.refuse:
                return self.refuse["create"]
            if query["name"] in self.containers:
                return 409, {"message": "the name is in use"}
            self.containers[query["name"]] = body
            self.bodies.append(body)
            return 201, {"Id": query["name"]}
        if parts == ["containers", "json"]:
            (prefix,) = json.loads(query["filters"])["name"]
            return 200, [
                {"Names": [f"/{name}"], "Created": self.created_s.get(name, time.time())}
                for name in self.containers if name.startswith(prefix)
            ]  # fmt: skip
        if parts[-1] == "start":
            return self.refuse.get("start") or self._run(self.containers[parts[1]])
        if parts[-1] == "json":
            state = {"Running": False, "ExitCode": self.code}
            return (200, {"State": state}) if parts[1] in self.containers else (404, None)
        if method == "DELETE":
            if "delete" in self.refuse and (answer := self.refuse["delete"](parts[1])):
                return answer
            self.layers.pop(parts[1], None)
            return (404, {}) if self.containers.pop(parts[1], self) is self else (204, None)
        assert parts == ["commit"], path
        self.commits += 1
        config, layer = self.containers[query["container"]], self.layers[query["container"]]
        ident = "sha256:" + hashlib.sha256(layer.encode()).hexdigest()
        self._add(f"{query['repo']}:{query['tag']}", ident, ["sha256:l0", layer], config)
        return 201, {"Id": ident}

    def _run(self, body):
        self.builds += 1
        folders = {each["Target"]: Path(each["Source"]) for each in body["HostConfig"]["Mounts"]}
        scratch = folders["/run/gpurun-build/scratch"]
        (scratch / "packages.json").write_text('["tinyone==1.0"]')
        (folders["/opt/gpurun/environment"] / "tinyone.py").write_text("1")
        self.pip(folders)
        return 204, None


def ensure(wanted, engine, image=BASE, environ=CONF, report=lambda *_: None):
    return build.ensure(wanted, image, engine, environ, report)
