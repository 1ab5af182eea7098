"""A process that builds an environment, with an engine that another process serves.

Usage: building.py SOCKET REQUIREMENTS. Prints what the build reports, then the layers of the image.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path

from fake_engine import FakeEngine, ensure

from gpurun.content.images import Engine
from gpurun.jobs.recipe_values import environment_of


class DistantEngine(Engine):
    """The engine that `serve` serves at this socket."""

    def __init__(self, path: str) -> None:
        super().__init__(None)
        self._path = path

    def info(self):
        return self._asked("info")

    def exchange(self, method, path, body=None, timeout_s=60.0):
        return self._asked("exchange", method, path, body)

    def upload(self, path, tar):
        return self._asked("upload", path, list(tar))

    def _asked(self, *words):
        with Client(self._path, "AF_UNIX") as connection:
            connection.send(words)
            return connection.recv()


def serve(engine: FakeEngine, path: Path) -> Listener:
    """Serve an engine in threads of this process: like Docker, it outlives those that ask it."""
    listener = Listener(str(path), "AF_UNIX")

    def answer(connection):
        with suppress(EOFError, OSError):
            while True:
                name, *words = connection.recv()
                connection.send(getattr(engine, name)(*words))

    def accept():
        with suppress(OSError):  # closed
            while True:
                threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


def main(path: str, requirements: str) -> None:
    """Build it."""
    given = Path(requirements)
    wanted = environment_of({"requirements": given.name, "index": "wheels"}, given.parent)
    image, _ = ensure(wanted, DistantEngine(path), report=lambda stage, _: _say(stage))
    _say(json.dumps(image.layers))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
