#!/usr/bin/env python3
"""Record README.md's terminal session on a lab of four hosts: an SVG that plays by itself.

    .venv/bin/python .ci/recording.py [FILE]     FILE: docs/recording.svg unless given

Runs the commands of `SESSION` in a pseudo-terminal, keeps what they print as an asciicast (version 2,
https://docs.asciinema.org/manual/asciicast/v2/), and has svg-term-cli from the npm registry draw it. Pauses are cut to
`PAUSE_S`; nothing else is changed. The hosts have the image already. Needs root, Docker's packages, npm, and the image
gpurun/train:tf2.15.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP))

from gpurun.lab import Lab, LabSpec

SESSION = (
    "gpurun status",
    "gpurun submit recipes/fashion-mnist --gpus-per-host 1 --follow",
    "gpurun outputs @last",
)
WARM = "gpurun submit --image gpurun/train:tf2.15 --launcher horovod --gpus 4 --gpus-per-host 1 --follow -- true"
COLUMNS, ROWS = 128, 30
KEY_S, PAUSE_S, READ_S = 0.04, 1.0, 2.5
"""Seconds for a typed character, at most between two prints, and to read what a command has printed."""
FRAME_S = 0.25
"""Prints of so many seconds are one frame of the picture."""
SVG_TERM = "svg-term-cli@2.1.1"

Event = tuple[float, str]


def printed(command: str, environ: dict[str, str]) -> Iterator[Event]:
    """Run a command in a terminal of its own. Yields when it printed what, in seconds from its start."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began = time.monotonic()
    with subprocess.Popen(
        shlex.split(command), stdin=theirs, stdout=theirs, stderr=theirs, env=environ, cwd=TOP, start_new_session=True
    ) as process:
        os.close(theirs)
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # Linux returns EIO after the last writer has closed the terminal
                break
            yield time.monotonic() - began, data.decode("utf-8", "replace")
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"{command}: exit code {process.returncode}")


def session(environ: dict[str, str]) -> Iterator[Event]:
    """Yield all that appears: each command as if a person typed it, and what it prints."""
    at_s = 0.5
    for command in SESSION:
        yield at_s, "\x1b[32m$\x1b[0m "
        for key in command:
            at_s += KEY_S
            yield at_s, key
        at_s += PAUSE_S / 2
        yield at_s, "\r\n"
        last_s = 0.0
        for since_s, text in printed(command, environ):
            at_s += min(since_s - last_s, PAUSE_S)
            last_s = since_s
            yield at_s, text
        at_s += READ_S
    yield at_s, "\x1b[32m$\x1b[0m "
    yield at_s + 2 * READ_S, ""


def frames(events: Iterator[Event]) -> Iterator[Event]:
    """Join what appears within `FRAME_S`; typed characters stay apart."""
    begun_s, held = 0.0, ""
    for at_s, text in events:
        if held and (len(text) == 1 or at_s - begun_s > FRAME_S):
            yield begun_s, held
            held = ""
        if not held:
            begun_s = at_s
        held += text
    yield begun_s, held


def main() -> None:
    """Make the recording."""
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TOP / "docs" / "recording.svg"
    lab = Lab("recording")
    try:
        lab.up(LabSpec("recording", racks=2, hosts=2, gpus=4))
        with tempfile.TemporaryDirectory() as name:
            environ = {
                **os.environ, "GPURUN_HOME": f"{name}/state", "GPURUN_INVENTORY": str(lab.inventory),
                "TERM": "xterm-256color", "PATH": f"{TOP / '.venv/bin'}:{os.environ['PATH']}",
            }  # fmt: skip
            environ.pop("NO_COLOR", None)
            for _ in printed(WARM, environ):  # the image is on the hosts then, as on every day but the first
                pass
            cast = Path(name) / "session.cast"
            lines: list[object] = [{"version": 2, "width": COLUMNS, "height": ROWS}]
            lines += [(at_s, "o", text) for at_s, text in frames(session(environ))]
            cast.write_text("\n".join(map(json.dumps, lines)) + "\n")
            subprocess.run(
                ["npx", "--yes", SVG_TERM, "--in", str(cast), "--out", str(target), "--window", "--no-cursor"],
                check=True, cwd=name,
            )  # fmt: skip
    finally:
        lab.down(purge=True)
    print(target)


if __name__ == "__main__":
    main()
