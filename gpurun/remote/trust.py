"""Fetch unknown host keys, compare them with known_hosts, and write them only after a user accepts them.

``ssh-keyscan`` fetches the keys of all hosts in parallel. For a host behind a jump host or a proxy command, ``ssh``
itself fetches the key, with a separate empty known_hosts file. It gets only the one key that both sides negotiate.
ssh reaches such a host only if the keys of the jump hosts are trusted, so these come first (`rounds`).
"""

from __future__ import annotations

import base64
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from gpurun.errors import BadInput
from gpurun.inventory import change
from gpurun.remote import known_hosts, system_ssh
from gpurun.remote.known_hosts import KnownHost
from gpurun.remote.route import Route, Target
from gpurun.remote.system_ssh import live

KeyState = Literal["known", "new", "changed", "revoked"]


@dataclass(frozen=True)
class OfferedKey:
    """A key that a host presents.

    Attributes:
        known: fingerprints in known_hosts for this type, if they differ from this key's.
    """

    kind: str
    blob: bytes
    state: KeyState
    known: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The fingerprint in the format of ``ssh-keygen -lf``."""
        return known_hosts.fingerprint(self.blob)


@dataclass(frozen=True)
class Offer:
    """The keys of one host.

    Attributes:
        name: the host's name in known_hosts.
        file: the known_hosts file for a new key.
        keys: empty if the host did not answer.
    """

    host: str
    name: str
    file: Path
    keys: tuple[OfferedKey, ...]

    @property
    def state(self) -> Literal["known", "new", "changed", "revoked", "unreachable"]:
        """The worst state of its keys; a host with a known key and other, unknown keys is known."""
        states = {key.state for key in self.keys}
        for state in ("revoked", "changed", "known", "new"):
            if state in states:
                return state
        return "unreachable"


def rounds(routes: Iterable[Route]) -> list[list[Route]]:
    """Return these hosts, and the jump hosts on their ways without a known key, in the order in which to ask them.

    A host answers only after the jump hosts before it, in earlier rounds, are trusted.
    """
    wanted = list(routes)
    named = {known_as(route) for route in wanted}
    for hop in [hop for route in wanted for hop in route.hops[:-1]]:
        if known_as(hop) not in named and not _is_known(hop):
            named.add(known_as(hop))
            wanted.append(hop)
    by_depth: dict[int, list[Route]] = {}
    for route in wanted:
        by_depth.setdefault(len(route.hops), []).append(route)
    return [by_depth[depth] for depth in sorted(by_depth)]


def offers(routes: Sequence[Route], *, ssh_config: str | None = None, timeout_s: float = 5.0) -> tuple[Offer, ...]:
    """Return the hosts' keys and their states, in the given order. Never raises for one host.

    Args:
        ssh_config: the OpenSSH configuration of the routes.
    """
    scanned = _scan([route for route in routes if not _is_indirect(route)], timeout_s)
    with ThreadPoolExecutor(max_workers=32) as pool:
        indirect = [route for route in routes if _is_indirect(route)]
        through = pool.map(partial(_through, ssh_config=ssh_config, timeout_s=timeout_s), indirect)
        scanned.update(zip((route.target for route in indirect), through, strict=True))
    return tuple(_offer(route, scanned.get(route.target, ())) for route in routes)


def accept(offered: Iterable[Offer], *, replace: bool = False) -> int:
    """Write the new keys of hosts to their known_hosts files. Returns the number of keys.

    Args:
        replace: also write the keys of hosts whose key changed, and remove their old keys. Otherwise skip these hosts.
    Raises BadInput: a file is not writable, or an old key is on a line that also applies to other hosts.
    """
    by_file: dict[Path, list[Offer]] = {}
    for offer in offered:
        if offer.state in ("new", "known") or (replace and offer.state == "changed"):
            by_file.setdefault(offer.file, []).append(offer)
    count = 0
    for file, chosen in by_file.items():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with change.locked(file) as real:
            before = real.read_text(errors="surrogateescape") if real.exists() else ""
            after = before
            for offer in chosen:
                after = _with(after, offer, str(file))
                count += sum(key.state in ("new", "changed") for key in offer.keys)
            if after != before:
                change.replace(real, after.encode(errors="surrogateescape"))
    return count


def _is_indirect(route: Route) -> bool:
    return route.jump is not None or route.proxy_command is not None


def known_as(route: Route) -> str:
    """Return a host's name in known_hosts."""
    return route.host_key_alias or known_hosts.lookup_name(route.hostname, route.port)


def _is_known(route: Route) -> bool:
    entries = known_hosts.load_known_hosts(route.known_hosts)
    found = known_hosts.find_entries(entries, route.hostname, route.port, route.host_key_alias)
    return any(entry.marker == "" for entry in found)


def _scan(routes: Sequence[Route], timeout_s: float) -> dict[Target, tuple[KnownHost, ...]]:
    """Return keys by host. Runs one ssh-keyscan per port; passes names over stdin, so that no name is an option."""
    found: dict[Target, tuple[KnownHost, ...]] = {}
    for port in dict.fromkeys(route.port for route in routes):
        there = [route for route in routes if route.port == port]
        names = "".join(f"{route.hostname}\n" for route in there if not any(c.isspace() for c in route.hostname))
        argv = ["ssh-keyscan", "-T", str(max(1, round(timeout_s))), "-p", str(port), "-f", "-"]
        entries = known_hosts.parse_known_hosts(_output(argv, names, timeout_s * 2 + len(there)), "ssh-keyscan")
        for route in there:
            name = known_hosts.lookup_name(route.hostname, port)
            found[route.target] = tuple(entry for entry in entries if entry.names.lower() == name)
    return found


def _through(route: Route, ssh_config: str | None, timeout_s: float) -> tuple[KnownHost, ...]:
    """Return the key that a host presents to ssh. Jump hosts on the way must already be trusted."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "known_hosts"
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(max(1, round(timeout_s))),
            "GlobalKnownHostsFile": "/dev/null",
            "HashKnownHosts": "no",
            "HostKeyAlias": "asked",
            "PreferredAuthentications": "none",
            "StrictHostKeyChecking": "accept-new",  # into a separate file, which is deleted
            "UpdateHostKeys": "no",
            "UserKnownHostsFile": str(file),
            "HostName": route.hostname.replace("%", "%%"),
            "Port": str(route.port),
        }
        if route.jump is not None:
            options["ProxyCommand"] = system_ssh.through(route.jump, route, live(route), batch=True)
        argv = ["ssh", *(["-F", ssh_config] if ssh_config else [])]
        for key, value in options.items():
            argv += ["-o", f"{key}={value}"]
        _output([*argv, "--", route.name, "true"], "", timeout_s * 3)
        return known_hosts.parse_known_hosts(file.read_text(errors="replace") if file.exists() else "", str(file))


def _output(argv: Sequence[str], stdin: str, timeout_s: float) -> str:
    try:
        done = subprocess.run(argv, input=stdin.encode(), capture_output=True, timeout=timeout_s, check=False)
    except OSError as error:
        raise BadInput(f"cannot run {argv[0]}: {error.strerror}", hint="install the OpenSSH client") from error
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace")
    return done.stdout.decode(errors="replace")


def _offer(route: Route, shown: Sequence[KnownHost]) -> Offer:
    entries = known_hosts.load_known_hosts(route.known_hosts)
    known = known_hosts.find_entries(entries, route.hostname, route.port, route.host_key_alias)
    ours = {entry.blob for entry in known if entry.marker == ""}
    # A known host that presents no known key counts as changed, whatever the types of its keys.
    strange = bool(ours) and not any(entry.blob in ours for entry in shown)
    keys = tuple(_judged(entry, known, strange) for entry in sorted(shown, key=lambda entry: entry.kind))
    return Offer(route.name, known_as(route), Path(route.known_hosts[0]), keys)


def _judged(entry: KnownHost, known: Sequence[KnownHost], strange: bool) -> OfferedKey:
    same_kind = [other for other in known if other.kind == entry.kind and other.marker == ""]
    state: KeyState = "new"
    if any(other.marker == "@revoked" and other.blob == entry.blob for other in known):
        state = "revoked"
    elif any(other.blob == entry.blob for other in same_kind):
        state = "known"
    elif same_kind or strange:
        state = "changed"
    others = same_kind or [other for other in known if other.marker == ""]
    return OfferedKey(entry.kind, entry.blob, state, tuple(o.fingerprint for o in others) if state == "changed" else ())


def _with(text: str, offer: Offer, file: str) -> str:
    """Add an offer's new keys to a known_hosts text. If a key changed, remove the host's other keys."""
    shown = {key.blob for key in offer.keys}
    old: dict[int, KnownHost] = {}
    if any(key.state == "changed" for key in offer.keys):
        entries = known_hosts.parse_known_hosts(text, file)
        old = {e.line: e for e in entries if e.marker == "" and e.blob not in shown and e.matches(offer.name)}
    lines = text.splitlines(keepends=True)
    kept = [_without(line, old[number], offer.name) if number in old else line for number, line in enumerate(lines, 1)]
    if kept and kept[-1] and not kept[-1].endswith("\n"):
        kept.append("\n")
    for key in offer.keys:
        if key.state in ("new", "changed"):
            kept.append(f"{offer.name} {key.kind} {base64.b64encode(key.blob).decode()}\n")
    return "".join(kept)


def _without(line: str, entry: KnownHost, name: str) -> str:
    """Return a line without one of its names; empty if that was the only name."""
    names = entry.names.split(",")
    left = [other for other in names if other.lower() != name.lower()]
    if entry.names.startswith("|1|") or not left:
        return ""
    if len(left) == len(names):
        raise BadInput(
            f"the old key of {name} is in a line with a host pattern; gpurun does not change the line: edit it by hand",
            where=entry.where,
        )
    return line.replace(entry.names, ",".join(left), 1)
