"""Hosts without SSH: agents as child processes, each with its own home, connected by pipes."""

from __future__ import annotations

import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import forked
from waiting import LIMIT_S

from gpurun.node.agent import frames
from gpurun.remote import Agent, Fleet, Target, agent


class PipeChannel:
    """A process's stdin and stdout as the channel of an Agent."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._timeout: float | None = None
        self._closed = False

    def sendall(self, data: bytes) -> None:
        assert self.process.stdin
        if self._closed:
            raise OSError("closed")
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def recv(self, size: int) -> bytes:
        assert self.process.stdout
        ready = select.poll()  # unlike `select`, it takes any descriptor
        ready.register(self.process.stdout, select.POLLIN)
        if not ready.poll(None if self._timeout is None else 1000 * self._timeout):
            raise TimeoutError
        return os.read(self.process.stdout.fileno(), size)

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            assert self.process.stdin
            self.process.stdin.close()


@dataclass
class Hosts:
    """Agents as child processes."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    fleets: list[Fleet] = field(default_factory=list)

    def fleet(self, *names: str, **env: str) -> Fleet:
        """A fleet of new hosts. `env` is added to each one's environment."""
        fleet = Fleet({name: self._start(name, env) for name in names}, {}, dead_after_s=LIMIT_S)
        self.fleets.append(fleet)
        return fleet

    def home(self, name: str) -> Path:
        return self.folder / name

    def spool(self, name: str) -> Path:
        return self.home(name) / ".cache/gpurun/spool"

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def stop(self, name: str) -> None:
        """Let a host hang for longer than its fleet waits. May be called again while answers still arrive."""
        self.processes[name].send_signal(signal.SIGSTOP)
        for fleet in self.fleets:
            if name in fleet.agents:
                fleet.agents[name].last_heard_s = float("-inf")

    def _start(self, name: str, env: dict[str, str]) -> Agent:
        self.home(name).mkdir(exist_ok=True)
        code, nonce = agent.agent_zip(), secrets.token_hex(8)
        command = agent.command(len(code), nonce, 600.0, Target("local", python=sys.executable))
        words = [sys.executable, "-c", shlex.split(command)[-1]] if forked.are_used() else ["sh", "-c", command]
        usual = {
            name: value for name, value in os.environ.items() if name.startswith(("PATH", *forked.OF_THE_INTERPRETER))
        }
        process = forked.PopenOfCode(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**usual, "HOME": str(self.home(name)), **env},
        )
        self.processes[name] = process
        channel = PipeChannel(process)
        channel.sendall(code)
        decoder, noise = frames.Decoder(), b""
        magic = frames.MAGIC + nonce.encode()
        while magic not in noise:
            noise += channel.recv(1 << 16)
        hello = next(iter(decoder.feed(noise.split(magic, 1)[1])))
        return Agent(name, channel, hello, decoder, ping_after_s=1.0)

    def close(self) -> None:
        for fleet in self.fleets:
            fleet.close()
        for process in self.processes.values():
            try:
                process.send_signal(signal.SIGCONT)
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(LIMIT_S)
