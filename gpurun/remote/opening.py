"""Open agents on many hosts in parallel: SSH session, one exec, the agent's zip over its stdin, its hello."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

from gpurun.errors import BadInput, GpurunError, HostFailure, HostNotReady, HostUnreachable
from gpurun.node.agent import frames
from gpurun.remote import agent, known_hosts, session, system_ssh
from gpurun.remote.agent import SEND_BYTES, Agent
from gpurun.remote.answers import words
from gpurun.remote.program import RemoteCommand
from gpurun.remote.route import Contact, Proofs, Route, Target, choose_transport, resolve_all
from gpurun.remote.session import Attempt, Jumps, KeysRefused, has_hardware, has_plain, run_over_paramiko
from gpurun.remote.system_ssh import live

# Limit for the output of a login shell's start files before the agent's hello.
MAX_NOISE = 1 << 20
# The agent ends itself after this long without a message from the head; the head pings every few seconds.
AGENT_SILENCE_LIMIT_S = 90.0


AGENT = agent.agent_zip()
"""The agent's code, read together with the code that talks to it: pip may replace both while this process runs."""
JUMPS = Jumps()
"""This process's connections to jump hosts: a host that is opened again shares them with hosts that stayed open."""
ONLY_SSH: dict[str, Route] = {}
"""Hosts that refused Paramiko's keys and accepted ``ssh``: gpurun uses ``ssh`` for them immediately."""


@dataclass
class _Opening:
    """The state of one `open_agents`: waiting hosts, running attempts, and outcomes."""

    timeout_s: float
    ping_after_s: float
    waiting: deque[Target]
    contact: Contact
    routes: Mapping[Target, Route | BadInput]
    under_way: dict[str, Attempt] = field(default_factory=dict)
    outcomes: dict[str, Agent | HostFailure] = field(default_factory=dict)
    arrived: SimpleQueue[tuple[str, Agent | HostFailure | BaseException]] = field(default_factory=SimpleQueue)

    def start_some(self, limit: int) -> None:
        while self.waiting and len(self.under_way) < limit:
            target = self.waiting.popleft()
            attempt = Attempt(time.monotonic() + self.timeout_s)
            attempt.connect_s = self.contact.connect_s
            attempt.asks = partial(self.contact.asks, target.name)
            attempt.answered = partial(self.contact.answered, target.name)
            self.under_way[target.name] = attempt
            Thread(target=self._work, args=(target, attempt), name=f"open {target.name}", daemon=True).start()

    def _work(self, target: Target, attempt: Attempt) -> None:
        try:
            outcome: Agent | HostFailure | BaseException = open_agent(
                target, self._route(target), attempt, self.ping_after_s
            )
        except HostFailure as error:
            outcome = _about(target.name, error)
        except GpurunError as error:
            short = session.head_short(error.__cause__, target.name)
            outcome = short or HostFailure(error.message, host=target.name, where=error.where, hint=error.hint)
        except Exception as error:  # noqa: BLE001 - Paramiko raises anything if a host speaks SSH wrongly
            outcome = session.as_host_failure(error, target.name)
        except BaseException as error:  # noqa: BLE001 - raised in the opening thread
            outcome = error
        self.arrived.put((target.name, outcome))

    def _route(self, target: Target) -> Route:
        route = self.routes[target]
        if isinstance(route, BadInput):
            raise route
        return route

    def collect(self) -> None:
        """Take one outcome, or give up the hosts whose time is over."""
        deadline = min(attempt.deadline_s for attempt in self.under_way.values())
        try:
            name, outcome = self.arrived.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            self._give_up_late_ones()
            return
        if self.under_way.pop(name, None) is None:
            if isinstance(outcome, Agent):
                outcome.close()  # it came too late
        elif isinstance(outcome, Agent | HostFailure):
            self.outcomes[name] = outcome
        else:
            raise outcome

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        for name, attempt in list(self.under_way.items()):
            if attempt.deadline_s <= now:
                del self.under_way[name]
                message = f"the host did not answer within {self.timeout_s:g} s (stage: {attempt.stage})"
                self.outcomes[name] = HostUnreachable(message, host=name)
                Thread(target=attempt.abort, daemon=True).start()


def _about(host: str, error: HostFailure) -> HostFailure:
    """Return the failure as a failure of `host`, even if a jump host on the way failed."""
    if error.host == host:
        return error
    message = f"{error.host}, the jump host on the way: {error.message}"
    return type(error)(message, host=host, where=error.where, hint=error.hint)


def open_agents(
    targets: Sequence[Target], *, limit: int, timeout_s: float, ping_after_s: float, contact: Contact
) -> tuple[dict[str, Agent], dict[str, HostFailure]]:
    """Return agents and failures, both in the order of `targets`."""
    waiting = deque({target.name: target for target in targets}.values())
    opening = _Opening(timeout_s, ping_after_s, waiting, contact, resolve_all(waiting))
    try:
        opening.start_some(limit)
        while opening.under_way:
            opening.collect()
            opening.start_some(limit)
    except BaseException:
        _abandon(opening)
        raise
    outcomes = {target.name: opening.outcomes[target.name] for target in targets}
    agents = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Agent)}
    failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, HostFailure)}
    return agents, failures


def _abandon(opening: _Opening) -> None:
    """Close all sessions after Ctrl-C during the opening."""
    for attempt in opening.under_way.values():
        Thread(target=attempt.abort, daemon=True).start()
    for outcome in opening.outcomes.values():
        if isinstance(outcome, Agent):
            outcome.close()


def open_agent(target: Target, route: Route, attempt: Attempt, ping_after_s: float) -> Agent:
    """Open a session to a host and start its agent.

    Raises:
        HostFailure: one of the kinds that `Fleet.failures` describes.
    """
    nonce, code = secrets.token_hex(16), AGENT
    running = run_remote_command(route, attempt, agent.command(len(code), nonce, AGENT_SILENCE_LIMIT_S, target))
    try:
        return _start_agent(target, running, code, nonce, attempt.left_s, ping_after_s)
    except BaseException:
        running.close()
        raise


def run_remote_command(route: Route, attempt: Attempt, command: str) -> RemoteCommand:
    """Run a command on a host, over the suitable transport.

    Raises:
        HostFailure: the host is unreachable, has an unexpected key, or refuses the login.
    """
    masters = live(route)
    plain = all(has_plain(hop) for hop in route.hops if hop not in masters)
    certified = any(known_hosts.needs_certificate(hop) for hop in route.hops)
    choice = choose_transport(route, Proofs(masters, plain, any(has_hardware(hop) for hop in route.hops), certified))
    if choice.first == "system" or ONLY_SSH.get(route.name) == route:
        return system_ssh.run_over_ssh(route, attempt, masters, command)
    try:
        return run_over_paramiko(route, attempt, JUMPS, command)
    except KeysRefused as refused:
        if not choice.asks_ssh(refused.wanted):
            raise
        running = system_ssh.run_over_ssh(route, attempt, masters, command)
        ONLY_SSH[route.name] = route
        return running


def _start_agent(
    target: Target, running: RemoteCommand, code: bytes, nonce: str, timeout_s: float, ping_after_s: float
) -> Agent:
    """Start the agent: send its zip, and wait for its hello.

    Raises:
        HostNotReady: its Python is missing or too old, or the login shell ended before the agent started.
        HostUnreachable: no hello in time.
    """
    running.settimeout(timeout_s)
    try:
        for start in range(0, len(code), SEND_BYTES):
            running.sendall(code[start : start + SEND_BYTES])
    except OSError:
        pass  # it has already ended; its exit code and stderr show the reason
    hello, decoder = _await_hello(target, running, frames.MAGIC + nonce.encode())
    running.discard_stderr()
    return Agent(target.name, running, hello, decoder, ping_after_s)


def _await_hello(target: Target, running: RemoteCommand, magic: bytes) -> tuple[frames.Frame, frames.Decoder]:
    """Skip the output of start files up to the magic. Returns the next frame, and the decoder for the rest."""
    noise = bytearray()
    decoder: frames.Decoder | None = None
    while True:
        try:
            data = running.recv(1 << 16)
        except TimeoutError:
            raise HostUnreachable(
                f"the host's login shell started, but no agent started in time{_excerpt(noise)}", host=target.name
            ) from None
        if not data:
            raise _no_agent(target, running, noise)
        if decoder is None:
            noise += data
            position = noise.find(magic)
            if position < 0:
                if len(noise) > MAX_NOISE:
                    raise HostNotReady(f"the host's login shell prints without end{_excerpt(noise)}", host=target.name)
                continue
            decoder, data = frames.Decoder(), bytes(noise[position + len(magic) :])
        for frame in decoder.feed(data):
            return frame, decoder


def _no_agent(target: Target, running: RemoteCommand, noise: bytearray) -> HostFailure:
    """Return the reason why the login shell ended without an agent."""
    ending = running.ending(within_s=2.0)
    said, code = ending.said, ending.code
    host, python = target.name, target.python or agent.PYTHON
    name_it = f"or name another Python of the host: gpurun inventory set {host} python=python3.9"
    if said.startswith("gpurun needs Python"):
        return HostNotReady(said, host=host, hint=f"install Python 3.8 or newer on the host, {name_it}")
    if code in (126, 127) or f"{python}: not found" in said or f"{python}: command not found" in said:
        hint = f"install python3 (3.8 or newer) on the host, {name_it}"
        return HostNotReady(f"{python} cannot be started{_excerpt(said)}", host=host, hint=hint)
    for name, remedy in _FOLDER_REMEDIES.items():
        if name in said:
            hint = f"{remedy}, or choose another folder: gpurun inventory set {host} folder=DIR"
            why = words(said.partition(name)[2].strip().partition("\n")[0])
            return HostNotReady(why, kind="folder", host=host, hint=hint)
    ended = "the login shell ended" if code is None else f"the login shell ended with code {code}"
    return HostNotReady(f"the agent did not start: {ended}{_excerpt(said or noise)}", host=host)


_FOLDER_REMEDIES = {
    "NotOwn: ": "remove the other user's folder on the host",
    "NotUsable: ": "let the SSH user create files in the host's folder for gpurun",
}
"""How an agent reports that it cannot use its folder → what to do."""


def _excerpt(said: str | bytes | bytearray) -> str:
    """Return the last line of an output, shortened, to append to a message."""
    text = said if isinstance(said, str) else bytes(said).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f" ({lines[-1][:200]!r})" if lines else ""
