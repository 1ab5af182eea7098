"""OpenSSH's client configuration, resolved for one host: a Route.

The common part of ssh_config(5) is read here: ``Host`` blocks with patterns, ``Match all``, ``Include`` at the top
level. A configuration that uses more (conditional ``Match``, ``Include`` inside a block, canonical names) is
resolved by ``ssh -G``, which costs a process per host but is right by definition.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from gpurun.errors import BadInput
from gpurun.remote.target import Target

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
MAX_JUMPS = 8
_LISTS = frozenset({"identityfile", "certificatefile"})
_DEFAULT_IDENTITIES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"

Options = dict[str, list[str]]


class NeedsOpenSsh(Exception):
    """The configuration says something that only ``ssh -G`` evaluates."""


@dataclass(frozen=True)
class Route:
    """Everything needed to open an SSH session to one host.

    Attributes:
        name: the inventory's name, for messages.
        identity_files: private keys to offer, in order; those not there are skipped.
        certificate_files: certificates for these keys.
        identities_only: do not offer further keys of the ssh-agent.
        identity_agent: the ssh-agent's socket; None = there is none.
        known_hosts: files with host keys; the first is the user's own.
        host_key_alias: what the host is called there.
        jump: the host to go through.
        proxy_command: a program whose stdin and stdout reach the host's sshd.
    """

    name: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    known_hosts: tuple[str, ...]
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    host_key_alias: str | None = None
    jump: Route | None = None
    proxy_command: str | None = None
    bind_address: str | None = None
    family: int = socket.AF_UNSPEC


@dataclass(frozen=True)
class _Block:
    """Options that apply to hosts matching `patterns`; None = all."""

    patterns: tuple[str, ...] | None
    options: tuple[tuple[str, str], ...]

    def applies(self, name: str) -> bool:
        if self.patterns is None:
            return True
        if any(p.startswith("!") and fnmatchcase(name, _pattern(p[1:])) for p in self.patterns):
            return False
        return any(not p.startswith("!") and fnmatchcase(name, _pattern(p)) for p in self.patterns)


def _pattern(openssh: str) -> str:
    return openssh.replace("[", "[[]")


def resolve(target: Target, *, depth: int = 0) -> Route:
    """The route to a target.

    Raises:
        BadInput: the configuration cannot be read or is wrong, or its jumps go round in circles.
    """
    if depth > MAX_JUMPS:
        raise BadInput(f"ProxyJump goes through more than {MAX_JUMPS} hosts: a loop?", host=target.name)
    if target.name.startswith("-") or any(letter.isspace() or letter == "\0" for letter in target.name):
        raise BadInput(f"{target.name!r} is no host name")
    options = _options(target.name, target.ssh_config)
    if target.address is not None:
        options["hostname"] = [target.address]
        # As OpenSSH does after canonicalization: read again for the name it became; the first value stays.
        for key, values in _options(target.address, target.ssh_config).items():
            if key == "hostname":
                options[key] = values
            else:
                options.setdefault(key, values)
    return _route(target, options, depth)


def _options(name: str, config: str | None) -> Options:
    files = [config] if config else [str(Path("~/.ssh/config").expanduser()), SYSTEM_CONFIG]
    options: Options = {}
    try:
        for file in files:
            for block in _load(file, required=config is not None):
                if block.applies(name):
                    _collect(options, block.options)
    except NeedsOpenSsh:
        return _ask_openssh(name, config)
    return options


def _collect(options: Options, found: tuple[tuple[str, str], ...]) -> None:
    for key, value in found:
        if key in _LISTS:
            options.setdefault(key, []).append(value)
        else:
            options.setdefault(key, [value])


def _load(file: str, *, required: bool) -> tuple[_Block, ...]:
    path = Path(file).expanduser()
    try:
        status = path.stat()
        return _parse_file(str(path), status.st_mtime_ns, status.st_size)
    except FileNotFoundError:
        if required:
            raise BadInput("there is no such SSH configuration", where=str(path)) from None
        return ()
    except OSError as error:
        raise BadInput(f"cannot be read: {error.strerror}", where=str(path)) from None


@lru_cache(maxsize=64)
def _parse_file(file: str, _mtime_ns: int, _size: int) -> tuple[_Block, ...]:
    return tuple(_blocks(file, depth=0))


def _blocks(file: str, depth: int) -> Iterator[_Block]:
    if depth > 16:
        raise BadInput("Include goes more than 16 files deep: a loop?", where=file)
    patterns: tuple[str, ...] | None = None
    options: list[tuple[str, str]] = []
    for number, line in enumerate(Path(file).read_text(errors="surrogateescape").splitlines(), 1):
        key, value = _keyword(line, file, number)
        if not key:
            continue
        if key not in ("host", "match", "include"):
            options.append((key, value))
            continue
        yield _Block(patterns, tuple(options))
        options = []
        if key == "host":
            patterns = tuple(_words(value, file, number))
        elif key == "match":
            patterns = None
        elif patterns is not None:
            raise NeedsOpenSsh
        else:
            for included in _included(value, file, number):
                yield from _blocks(included, depth + 1)
    yield _Block(patterns, tuple(options))


def _keyword(line: str, file: str, number: int) -> tuple[str, str]:
    text = line.strip()
    if not text or text.startswith("#"):
        return "", ""
    match = re.match(r"([A-Za-z0-9]+)(?:\s*=\s*|\s+)(.+)", text)
    if not match:
        raise BadInput(f"not a keyword and a value: {text!r}", where=f"{file}:{number}")
    key, value = match.group(1).lower(), match.group(2)
    if (key == "match" and value.lower() != "all") or (key == "canonicalizehostname" and value.lower() != "no"):
        raise NeedsOpenSsh
    return key, value


def _words(value: str, file: str = "", number: int = 0) -> list[str]:
    try:
        return shlex.split(value, comments=True)
    except ValueError as error:
        raise BadInput(f"{error}: {value!r}", where=f"{file}:{number}") from None


def _included(value: str, file: str, number: int) -> Iterator[str]:
    # Relative names are below ~/.ssh in a user's configuration and below /etc/ssh in the system's: ssh_config(5).
    base = "/etc/ssh" if file.startswith("/etc/ssh/") else os.path.expanduser("~/.ssh")  # noqa: PTH111
    for word in _words(value, file, number):
        pattern = os.path.join(base, os.path.expanduser(word))  # noqa: PTH111, PTH118 - it may be a glob
        yield from sorted(glob.glob(pattern))  # noqa: PTH207


@lru_cache(maxsize=4096)
def _openssh_output(name: str, config: str | None) -> str:
    argv = ["ssh", *(["-F", config] if config else []), "-G", "--", name]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=10, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"the SSH configuration needs `ssh -G` to be read, and that fails: {error}", host=name) from None
    if done.returncode != 0:
        raise BadInput(done.stderr.decode(errors="replace").strip() or "ssh -G fails", host=name)
    return done.stdout.decode(errors="surrogateescape")


def _ask_openssh(name: str, config: str | None) -> Options:
    options: Options = {}
    for line in _openssh_output(name, config).splitlines():
        key, _, value = line.partition(" ")
        if value and not (key in ("proxyjump", "proxycommand", "identityagent") and value == "none"):
            _collect(options, ((key.lower(), value),))
    return options


def _local_user() -> str:
    """The name of who runs this; its number if it has none, as in a container."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _route(target: Target, options: Options, depth: int) -> Route:
    def one(key: str, default: str = "") -> str:
        return options.get(key, [default])[0].strip()

    local_user = _local_user()
    hostname = _unquote(one("hostname", target.name)).replace("%%", "\0").replace("%h", target.name).replace("\0", "%")
    try:
        port = target.port or int(one("port", "22"))
    except ValueError:
        raise BadInput(f"Port {one('port')!r} is no number", host=target.name) from None
    user = target.user or _unquote(one("user", local_user))
    alias = _unquote(one("hostkeyalias")) or None
    tokens = _tokens(target.name, hostname, port, user, local_user, alias)

    def paths(key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_expand(_unquote(value), tokens) for value in options.get(key, default))

    files = _words(one("userknownhostsfile", _USER_KNOWN_HOSTS)) + _words(
        one("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS)
    )
    route = Route(
        name=target.name,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=paths("identityfile", _DEFAULT_IDENTITIES),
        certificate_files=paths("certificatefile", ()),
        identities_only=one("identitiesonly").lower() == "yes",
        identity_agent=_agent_socket(_unquote(one("identityagent", "SSH_AUTH_SOCK")), tokens),
        known_hosts=tuple(_expand(file, tokens) for file in files if file != "none"),
        host_key_alias=alias,
        bind_address=one("bindaddress") or None,
        family={"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(one("addressfamily").lower(), socket.AF_UNSPEC),
    )
    return _with_proxy(route, target, options, tokens, depth)


def _with_proxy(route: Route, target: Target, options: Options, tokens: Mapping[str, str], depth: int) -> Route:
    # Whichever of the two comes first in the configuration counts; a dict keeps that order.
    kind = next((key for key in options if key in ("proxyjump", "proxycommand")), None)
    value = options[kind][0].strip() if kind else "none"
    if value.lower() == "none":
        return route
    if kind == "proxycommand":
        return replace(route, proxy_command=_substitute(value, tokens))
    return replace(route, jump=_jumps(value, target, depth))


def _jumps(value: str, target: Target, depth: int) -> Route:
    """The last hop of ``[user@]host[:port],…``, reached through those before it."""
    *before, last = (hop.strip() for hop in value.split(","))
    match = re.fullmatch(r"(?:ssh://)?(?:([^@\s]+)@)?(\[[^\]]+\]|[^:@\s\[\]]+)(?::(\d+))?/?", last)
    if not match:
        raise BadInput(f"ProxyJump {value!r} is not [user@]host[:port]", host=target.name)
    user, name, port = match.groups()
    hop = Target(name.strip("[]"), port=int(port) if port else None, user=user, ssh_config=target.ssh_config)
    route = resolve(hop, depth=depth + 1)
    return replace(route, jump=_jumps(",".join(before), target, depth + 1), proxy_command=None) if before else route


def _unquote(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _tokens(name: str, hostname: str, port: int, user: str, local_user: str, alias: str | None) -> Mapping[str, str]:
    local = socket.gethostname()
    digest = hashlib.sha1(f"{local}{hostname}{port}{user}".encode(), usedforsecurity=False).hexdigest()
    return {
        "%": "%",
        "C": digest,
        "d": str(Path.home()),
        "h": hostname,
        "i": str(os.getuid()),
        "k": alias or name,
        "L": local.split(".")[0],
        "l": local,
        "n": name,
        "p": str(port),
        "r": user,
        "u": local_user,
    }


def _substitute(value: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda match: tokens.get(match.group(1), match.group(0)), value)


def _expand(value: str, tokens: Mapping[str, str]) -> str:
    with_environment = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match.group(1), ""), value)
    return os.path.expanduser(_substitute(with_environment, tokens))  # noqa: PTH111


def _agent_socket(value: str, tokens: Mapping[str, str]) -> str | None:
    if value.lower() == "none":
        return None
    if value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK")
    if value.startswith("$"):
        return os.environ.get(value.strip("${}"))
    return _expand(value, tokens)
