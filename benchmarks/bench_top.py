"""Measure the CPU use of `gpurun top` on a full cluster whose hosts answer.

    python benchmarks/bench_top.py [--hosts 100] [--jobs 150] [--seconds 60] [--tab jobs|queue|hosts]

A separate process simulates the hosts: each has an agent's channel, a socket, on which it sends samples of 8 GPUs at
the requested interval. The app runs in another process, in a pseudo-terminal of 160 × 48 that is read continuously.
The result is the CPU seconds of the app's process, including its reading of the state directory and samples, and its
screen. SSH's cost is not included, because the channel is a socket.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from bench_state import State

from gpurun.cli.stores import cluster
from gpurun.jobs.store import JobStore
from gpurun.node.agent import frames
from gpurun.quantities import duration
from gpurun.remote.agent import Agent
from gpurun.remote.fleet import Fleet
from gpurun.state.paths import home
from gpurun.views.app import Actions, TopApp
from gpurun.views.feed import Feed

TARGET_PERCENT = 3.0


def simulate_hosts(path: Path) -> None:
    """Accept connections. On each, answer the head's requests, and send samples while `probe.sample` runs."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(512)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    streams: dict[socket.socket, tuple[frames.Decoder, int | None, float, float]] = {}
    rng = random.Random(1)
    while True:
        for key, _ in selector.select(timeout=0.1):
            if key.fileobj is listener:
                one, _ = listener.accept()
                selector.register(one, selectors.EVENT_READ)
                streams[one] = (frames.Decoder(), None, 0.0, 0.0)
            else:
                _hear(key.fileobj, streams, selector, rng)
        now = time.monotonic()
        for one, (decoder, asked, due, every_s) in list(streams.items()):
            if asked is not None and now >= due:
                gpus = [
                    {"index": at, "utilization_percent": rng.randrange(80, 100), "memory_mib": 81_920,
                     "memory_used_mib": rng.randrange(70_000), "temperature_c": rng.randrange(50, 80),
                     "power_w": rng.random() * 700, "throttle": [], "problem": ""}
                    for at in range(8)
                ]  # fmt: skip
                one.sendall(frames.encode({"t": "out", "id": asked, "v": {"gpus": gpus, "clock_s": time.time()}}))
                streams[one] = (decoder, asked, now + every_s, every_s)


def _hear(one, streams, selector, rng) -> None:
    data = one.recv(1 << 16)
    if not data:
        selector.unregister(one)
        del streams[one]
        return
    decoder, asked, due, every_s = streams[one]
    for frame in decoder.feed(data):
        if frame.header["t"] == "req":
            asked, every_s = frame.header["id"], frame.header["params"]["interval_s"]
            due = time.monotonic() + rng.random() * every_s
        elif frame.header["t"] == "ping":
            one.sendall(frames.encode({"t": "pong"}))
    streams[one] = (decoder, asked, due, every_s)


def run_app(path: str, tab: str) -> None:
    """Run the app as the command does, but with simulated agents."""

    def open_agent(host: str) -> Agent:
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(path)
        return Agent(host, channel, frames.Frame({"t": "hello"}, b""), frames.Decoder())  # type: ignore[arg-type]

    class Simulated(Feed):
        def _open_fleet(self, hosts):
            return Fleet({host: open_agent(host) for host in hosts}, {})

    with Simulated(JobStore(home(os.environ)), lambda: cluster(None)) as feed:
        app = TopApp(feed, Actions(str, str), duration)
        app.call_later(app.action_show, tab)
        app.run()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, options: argparse.Namespace) -> float:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 48, 160, 0, 0))
    argv = [sys.executable, __file__, "--app", str(folder / "hosts.sock"), "--tab", options.tab]
    environ = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    seen = bytearray()

    def drain() -> None:
        try:
            while data := os.read(ours, 1 << 16):
                seen.extend(data)
        except OSError:
            return

    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True) as app:
        os.close(theirs)
        threading.Thread(target=drain, daemon=True).start()
        try:
            time.sleep(options.warm)
            before_s, began_s = cpu_s(app.pid), time.monotonic()
            written = len(seen)
            time.sleep(options.seconds)
            used, took = cpu_s(app.pid) - before_s, time.monotonic() - began_s
            assert app.poll() is None, seen[-3000:].decode(errors="replace")
            print(f"{options.tab}: wrote {(len(seen) - written) / took / 1000:.1f} kB/s to the terminal")
        finally:
            app.terminate()
    assert b"no answer" not in seen or options.tab == "hosts"
    return 100 * used / took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm", type=float, default=20)
    parser.add_argument("--tab", choices=("jobs", "queue", "hosts"), default="jobs")
    parser.add_argument("--app", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.app:
        run_app(options.app, options.tab)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = State(folder, options.hosts)
        state.fill(options.jobs, seed=1)
        state.run_pass()
        hosts = {grant["host"] for lease in (state.home / "leases").glob("*.json")
                 for grant in json.loads(lease.read_text())["grants"]}  # fmt: skip
        simulator = os.fork()
        if simulator == 0:
            simulate_hosts(folder / "hosts.sock")
        try:
            time.sleep(1)
            percent = measure(folder, options)
        finally:
            os.kill(simulator, 9)
            os.waitpid(simulator, 0)
    verdict = "" if percent <= TARGET_PERCENT else ": MISSED"
    print(
        f"{options.tab}: {percent:.2f} % of a core, {len(hosts)} hosts with leases; target {TARGET_PERCENT} %{verdict}"
    )
    if options.json:
        options.json.write_text(json.dumps({"percent": percent, "hosts": len(hosts)}))
    return int(percent > TARGET_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
