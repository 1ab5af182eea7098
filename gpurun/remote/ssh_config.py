"""The connection settings of a host, from the inventory and from ``ssh -G``: a Route."""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gpurun.errors import BadInput
from gpurun.remote.openssh import Options
from gpurun.remote.ssh_config_cache import answers
from gpurun.remote.target import Target

MAX_JUMPS = 8
# OpenSSH 9.6 and later refuse these characters too: they reach the shell that runs a ProxyCommand.
_UNSAFE = re.compile(r"""^-|[\s'"`$\\;&<>|(){}\0-\x1f\x7f]""")
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@\s]+)@)?(?P<host>\[[^\]]+\]|[^:@/\s\[\]]+)(?::(?P<port>\d+))?/?")
_TOKEN = re.compile(r"%(.?)", re.DOTALL)
_TOKEN_OR_VARIABLE = re.compile(r"%(.?)|\$\{(\w*)\}", re.DOTALL)
_UNLIKE_KEYS = ("gssapiauthentication", "hostbasedauthentication", "pkcs11provider")
_LATER_KEYWORDS = {
    "forkafterauthentication": "no",
    "knownhostscommand": "none",
    "sessiontype": "default",
    "stdinnull": "no",
}
_UNCHECKED = (None, ("no",), ("off",), ("false",))
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}

Said = Mapping[Target, Options | BadInput]


@dataclass(frozen=True)
class Route:
    """Everything needed to open an SSH session to one host.

    Attributes:
        name: the inventory's name, for messages.
        identity_files: private keys to offer, in order; missing files are skipped.
        certificate_files: certificates for these keys.
        identities_only: do not offer further keys of the ssh-agent.
        identity_agent: the ssh-agent's socket; None = there is none.
        known_hosts: files with host keys; the first is the user's own.
        target: the target for which gpurun ran ``ssh -G``.
        host_key_alias: the host's name in known_hosts.
        jump: the jump host.
        proxy_command: a command for the user's shell; its stdin and stdout lead to the host's sshd.
        control_path: the socket of the user's own shared `ssh` connection, if the configuration checks host keys.
        beyond_keys: enabled keywords for authentication without a key file or the ssh-agent.
        public_keys: the configuration allows keys.
        ciphers: the ciphers that ``ssh`` may use, in the order of the configuration.
        resets: options for a plain session, for keywords that only newer versions of ``ssh`` know.
    """

    name: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    known_hosts: tuple[str, ...]
    target: Target
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    host_key_alias: str | None = None
    jump: Route | None = None
    proxy_command: str | None = None
    bind_address: str | None = None
    family: int = socket.AF_UNSPEC
    control_path: str | None = None
    beyond_keys: tuple[str, ...] = ()
    public_keys: bool = True
    resets: tuple[str, ...] = ()
    ciphers: tuple[str, ...] = ()

    @property
    def hops(self) -> tuple[Route, ...]:
        """The jump hosts on the way, nearest first, and the host itself."""
        return (*(self.jump.hops if self.jump else ()), self)


def resolve(target: Target) -> Route:
    """Return the route to a target.

    Raises:
        BadInput: the configuration is unreadable or wrong, its jump hosts form a loop, or there is no ``ssh``.
    """
    route = resolve_all([target])[target]
    if isinstance(route, BadInput):
        raise route
    return route


def resolve_all(targets: Collection[Target]) -> Mapping[Target, Route | BadInput]:
    """Return the routes to many targets. Runs ``ssh -G`` once for each unknown host, including jump hosts."""
    said: dict[Target, Options | BadInput] = {}
    wave = list(targets)
    for _ in range(MAX_JUMPS + 1):
        said.update({target: error for target in wave if (error := _refused(target))})
        new = answers([target for target in wave if target not in said])
        said.update(new)
        wave = [hop for target, found in new.items() for hop in _hops(target, found) if hop not in said]
    routes: dict[Target, Route | BadInput] = {}
    for target in targets:
        try:
            routes[target] = _route(target, said)
        except BadInput as error:
            routes[target] = error
    return routes


def _refused(target: Target) -> BadInput | None:
    for what, value in (("host name", target.name), ("address", target.address), ("user", target.user)):
        if value is not None and (not value or _UNSAFE.search(value)):
            return BadInput(f"{value!r} is not a valid {what}", host=target.name)
    if "@" in target.name or "/" in target.name:
        return BadInput(f"{target.name!r} is not a host name", host=target.name)
    return None


def _hops(target: Target, found: Options | BadInput) -> Iterator[Target]:
    if not isinstance(found, BadInput) and (jumps := _one(found, "proxyjump")):
        with suppress(BadInput):  # `_route` reports it
            yield _last_hop(jumps, target)


def _last_hop(jumps: str, target: Target) -> Target:
    """Return the last of ``[user@]host[:port],…``, with the others as its jump hosts: as ``ssh -J BEFORE LAST``."""
    before, _, last = jumps.rpartition(",")
    match = _JUMP.fullmatch(last)
    if not match:
        raise BadInput(f"ProxyJump {jumps!r} is not [user@]host[:port]", host=target.name)
    port = int(match["port"]) if match["port"] else None
    return Target(match["host"].strip("[]"), None, port, match["user"], target.ssh_config, before or None)


def _route(target: Target, said: Said, depth: int = 0) -> Route:
    if depth > MAX_JUMPS:
        raise BadInput(f"ProxyJump goes through more than {MAX_JUMPS} hosts, perhaps in a loop", host=target.name)
    found = said[target]
    if isinstance(found, BadInput):
        raise found
    name, jumps, command = target.name, _one(found, "proxyjump"), _one(found, "proxycommand")
    if command and _one(found, "proxyusefdpass") == "yes":
        raise BadInput(
            "gpurun cannot use ProxyUseFdpass",
            host=name,
            hint="use a ProxyCommand that passes data through stdin and stdout",
        )
    hostname, port, user = found["hostname"][0], int(found["port"][0]), found["user"][0]
    alias = _one(found, "hostkeyalias")
    host = {"%": "%", "h": hostname, "k": alias or name, "n": name, "p": str(port), "r": user}
    tokens = {**host, **_local_tokens()}
    files = [*_files(found, "userknownhostsfile"), *_files(found, "globalknownhostsfile")]
    return Route(
        name=name,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=_paths(found, "identityfile", tokens, name),
        certificate_files=_paths(found, "certificatefile", tokens, name),
        identities_only=_one(found, "identitiesonly") == "yes",
        identity_agent=_agent_socket(found, tokens, name),
        known_hosts=tuple(files),
        host_key_alias=alias,
        jump=_route(_last_hop(jumps, target), said, depth + 1) if jumps else None,
        proxy_command=_expand(command, host, name, _TOKEN) if command and not jumps else None,
        bind_address=_one(found, "bindaddress"),
        family=_FAMILIES.get(_one(found, "addressfamily") or "", socket.AF_UNSPEC),
        target=target,
        control_path=_one(found, "controlpath") if found.get("stricthostkeychecking") not in _UNCHECKED else None,
        beyond_keys=tuple(key for key in _UNLIKE_KEYS if (_one(found, key) or "no") not in ("no", "false")),
        public_keys=_one(found, "pubkeyauthentication") not in ("no", "false"),
        ciphers=tuple(cipher for cipher in (_one(found, "ciphers") or "").split(",") if cipher),
        resets=tuple(
            f"{key}={value}" for key, value in _LATER_KEYWORDS.items() if found.get(key, (value,)) != (value,)
        ),
    )


def _one(found: Options, key: str) -> str | None:
    value = found.get(key, ("none",))[0]
    return None if value == "none" else value


def _files(found: Options, key: str) -> list[str]:
    """Return the files of a list from ``ssh -G``, which has no quotes: a word that is no path continues the last."""
    line = _one(found, key) or ""
    return [_home(file) for file in re.split(r" (?=[/~])", line) if file]


def _paths(found: Options, key: str, tokens: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the files that ``ssh -G`` prints as written."""
    return tuple(_home(_expand(value, tokens, name)) for value in found.get(key, ()) if value != "none")


def _agent_socket(found: Options, tokens: Mapping[str, str], name: str) -> str | None:
    value = found.get("identityagent", ("SSH_AUTH_SOCK",))[0]
    if value == "none":
        return None
    if value == "SSH_AUTH_SOCK" or value.startswith("$"):
        return os.environ.get(value.strip("${}"))
    # `ssh -G` of OpenSSH before 8.4 prints the value as written; later versions print the path.
    return _home(_expand(value, tokens, name)) if value.startswith("~") else value


def _home(path: str) -> str:
    """Expand ``~`` like ``ssh``: from the password database, not from the environment."""
    own = path == "~" or path.startswith("~/")
    return _me().pw_dir + path[1:] if own else os.path.expanduser(path)  # noqa: PTH111


def _me() -> pwd.struct_passwd:
    """Raises BadInput if the directory service is away; `ssh` itself may have answered before."""
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        raise BadInput(
            f"uid {os.getuid()} has no account at the moment", hint="check the account with: getent passwd $(id -u)"
        ) from None


def _expand(value: str, tokens: Mapping[str, str], host: str, references: re.Pattern[str] = _TOKEN_OR_VARIABLE) -> str:
    """Replace ``%`` tokens and environment variables, which only paths may contain."""

    def meaning(match: re.Match[str]) -> str:
        found = tokens.get(match[1]) if match[1] is not None else os.environ.get(match[2])
        if found is None:
            raise BadInput(
                f"ssh's configuration has {value!r}, but {match[0]!r} has no value here",
                host=host,
                hint=f"replace {match[0]} by its value in ssh's configuration",
            )
        return found

    return references.sub(meaning, value)


def _local_tokens() -> Mapping[str, str]:
    local, me = socket.gethostname(), _me()
    return {"d": me.pw_dir, "i": str(os.getuid()), "L": local.partition(".")[0], "l": local, "u": me.pw_name}
