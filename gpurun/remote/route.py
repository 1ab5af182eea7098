"""How a host is reached: the target, OpenSSH's configuration of it, and the transport.

Paramiko offers only keys from files and from the ssh-agent. The machine's own ``ssh`` can also use an open shared
connection, Kerberos tickets, FIDO keys and PKCS#11 tokens.
"""

from __future__ import annotations

import hashlib
import math
import os
import pwd
import re
import shlex
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from gpurun.errors import BadInput
from gpurun.inventory.model import Host, Inventory
from gpurun.msgspec_types import ready
from gpurun.state import caches
from gpurun.state.paths import has_account

# The inventory's connection settings of one host.


TransportName = Literal["paramiko", "system"]
"""The SSH implementation: the library inside gpurun, or the ``ssh`` program of this machine."""


@dataclass(frozen=True)
class Target:
    """Connection settings of one host, as arguments of ``ssh``; all others come from the OpenSSH configuration.

    Attributes:
        name: the inventory's name of the host; ``Host`` patterns of the configuration match it.
        address: the address to connect to; overrides the configuration's ``HostName``. None = that, else `name`.
        port: overrides the configuration's ``Port``.
        user: overrides the configuration's ``User``.
        ssh_config: the OpenSSH client configuration, ``ssh -F``; None = ``~/.ssh/config`` and the system's.
        jumps: the jump hosts in the format of ``ssh -J``; None = those of the configuration.
        python, docker_host, folder: settings for the agent, as in `gpurun.inventory.model.Host`.
        ssh: the transport; None = gpurun chooses (`gpurun.remote.route`).
    """

    name: str
    address: str | None = None
    port: int | None = None
    user: str | None = None
    ssh_config: str | None = None
    jumps: str | None = None
    python: str | None = None
    docker_host: str | None = None
    folder: str | None = None
    ssh: TransportName | None = None

    def arguments(self) -> tuple[str, ...]:
        """The arguments of ``ssh``."""
        given = {"-F": self.ssh_config, "-p": self.port, "-l": self.user, "-J": self.jumps}
        words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
        if self.address is not None:
            words += ["-o", "HostName=" + self.address.replace("%", "%%")]
        return (*words, "--", self.name)


def target_of(host: Host, inventory: Inventory) -> Target:
    """Return how to reach an inventory's host."""
    return Target(
        name=host.name, address=host.address, port=host.port, user=host.user, ssh_config=inventory.ssh_config,
        python=host.python, docker_host=host.docker_host, folder=host.folder, ssh=host.ssh,
    )  # fmt: skip


@dataclass(frozen=True)
class Contact:
    """The time-out for a connection to a host, and callbacks that record the result. Any thread may call them.

    Attributes:
        connect_s: how long a host may take to accept a connection. A kernel accepts connections even on a busy host.
        asks: called with a host's name before gpurun asks it for a connection. Not called for a host behind a jump host
            or a program, because the head cannot see whether that host answers.
        answered: called with a host's name when the host has accepted or refused. Not called for such hosts either.
    """

    connect_s: float = math.inf
    asks: Callable[[str], object] = lambda _: None
    answered: Callable[[str], object] = lambda _: None


# OpenSSH's view of its configuration: the output of ``ssh -G`` for one host.


PROCESSES_AT_ONCE = 2 * (os.cpu_count() or 1)
LIMIT_S = 10.0

_KEYWORDS = frozenset(
    b"addressfamily bindaddress canonicalizehostname canonicalizepermittedcnames certificatefile ciphers"
    b" controlpath forkafterauthentication globalknownhostsfile gssapiauthentication hostbasedauthentication"
    b" hostkeyalias hostname identitiesonly identityagent identityfile knownhostscommand pkcs11provider port"
    b" proxycommand proxyjump proxyusefdpass pubkeyauthentication sessiontype stdinnull stricthostkeychecking"
    b" user userknownhostsfile".split()
)
_READ = re.compile(rb"^debug1: Reading configuration data (.*?)\r?$", re.MULTILINE)
_ESCAPED = re.compile(rb"\\(\\|[0-7]{3})")
_NOISE = re.compile(r"debug\d: |OpenSSH_|.*: terminating, \d+ bad configuration options")

Options = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class ConfigAnswer:
    """The output of ``ssh -G``.

    Attributes:
        text: the lines with keywords that gpurun uses, as ``ssh`` printed them.
        version: the version that ``ssh`` reports.
        read: the files that ``ssh`` read.
        repeatable: False if the answer also depends on a command or a name server, not only on these files.
    """

    text: bytes
    version: bytes
    read: frozenset[bytes]
    repeatable: bool


def options(text: bytes) -> Options:
    """Return the values of each keyword, in order."""
    found: dict[str, tuple[str, ...]] = {}
    for line in os.fsdecode(text).split("\n"):
        key, _, value = line.partition(" ")
        found[key.lower()] = (*found.get(key.lower(), ()), value)
    return found


def ask_all(targets: Collection[Target]) -> Mapping[Target, ConfigAnswer | BadInput]:
    """Run ``ssh -G`` for each target, a few at a time.

    If a configuration prevents ``ssh`` from ending, this costs `LIMIT_S` in total, not per host: after
    `PROCESSES_AT_ONCE` processes that did not end, the remaining targets fail without a process.
    """
    stuck: list[Target] = []

    def answer(target: Target) -> ConfigAnswer | BadInput:
        if len(stuck) >= PROCESSES_AT_ONCE:
            return _no_end(target)
        try:
            return _ask(target)
        except BadInput as error:
            return error
        except subprocess.TimeoutExpired:
            stuck.append(target)
            return _no_end(target)

    if not has_account(os.getuid()):
        return {target: _no_account(target) for target in targets}
    with ThreadPoolExecutor(max_workers=PROCESSES_AT_ONCE) as pool:
        try:
            return dict(zip(targets, pool.map(answer, targets), strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _ask(target: Target) -> ConfigAnswer:
    argv = ["ssh", "-v", "-T", "-G", *target.arguments()]
    pipe = subprocess.PIPE
    try:
        # A separate session: if ssh does not end, its `Match exec` command is killed with it.
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
    except (OSError, ValueError) as error:
        hint = "install the OpenSSH client: gpurun asks `ssh -G` how to reach a host"
        raise BadInput(f"cannot run ssh: {error}", host=target.name, hint=hint) from error
    with process:
        try:
            printed, said = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
    if process.returncode != 0:
        raise _refused(target, _complaint(said))
    found = _answer(printed, said)
    values = options(found.text)
    if not {"hostname", "port", "user"} <= values.keys() or not values["port"][0].isdigit():
        raise BadInput(
            "`ssh -G` does not say how to reach the host", host=target.name, hint="check that `ssh` is OpenSSH's own"
        )
    return found


def _answer(printed: bytes, said: bytes) -> ConfigAnswer:
    text = b"\n".join(line for line in printed.split(b"\n") if line.partition(b" ")[0].lower() in _KEYWORDS)
    values = options(text)
    looked_up = values.get("canonicalizehostname", ("no",))[0] not in ("no", "false")
    followed = values.get("canonicalizepermittedcnames", ("none",)) != ("none",)
    return ConfigAnswer(
        text=text,
        version=said.partition(b"\n")[0],
        read=frozenset(_unescaped(file) for file in _READ.findall(said)),
        repeatable=not (looked_up or followed or b"Executing command: " in said),
    )


def _unescaped(said: bytes) -> bytes:
    """Decode the bytes that ``ssh`` wrote as ``\\\\`` or ``\\ooo``."""
    return _ESCAPED.sub(lambda match: b"\\" if match[1] == b"\\" else bytes([int(match[1], 8) & 0xFF]), said)


def _complaint(said: bytes) -> str:
    lines = [line.strip() for line in os.fsdecode(_unescaped(said)).split("\n")]
    text = "; ".join([line for line in lines if line and not _NOISE.match(line)][-3:])[:500]
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "ssh -G fails and does not say why"


def _refused(target: Target, complaint: str) -> BadInput:
    """The hint is the same for all hosts, so that views show it once."""
    file = target.ssh_config
    where = None if file is None or complaint.startswith(file) else file
    trial = shlex.join(["ssh", *(() if file is None else ("-F", file)), "-G", "HOST"])
    hint = f"repair ssh's configuration: `{trial}` must work"
    return BadInput(complaint, host=target.name, where=where, hint=hint)


def _no_end(target: Target) -> BadInput:
    return BadInput(
        f"`ssh -G` does not end within {LIMIT_S:g} s",
        host=target.name,
        where=target.ssh_config,
        hint="check ssh's configuration for an Include of a pipe, and for a `Match exec` command that does not end",
    )


def _no_account(target: Target) -> BadInput:
    return BadInput(
        f"uid {os.getuid()} has no account on this machine, but OpenSSH requires an account",
        host=target.name,
        hint="give the user an account, or install the NSS module that knows the user",
    )


# A cache of answers of ``ssh -G``, in the user's own cache folder. An answer is valid while its inputs are unchanged.


CODE = caches.code_stamp(Path(__file__).parent)
"""Of the code that this process runs, which pip may have replaced since."""
_VARIABLE = re.compile(rb"\$\{?(\w+)")
_KEPT = msgspec.msgpack.Decoder(ready(tuple[str, dict[bytes, bytes]]))
"""A digest of all inputs of the answers, and the text of each answer by the arguments of `ssh`."""


def answers(targets: Collection[Target]) -> Mapping[Target, Options | BadInput]:
    """Return the output of ``ssh -G`` for each target. Runs one process per configuration and per unknown answer."""
    found: dict[Target, Options | BadInput] = {}
    for config in {target.ssh_config for target in targets}:
        found.update(_of_one_configuration([target for target in targets if target.ssh_config == config]))
    return found


def _of_one_configuration(targets: Collection[Target]) -> Mapping[Target, Options | BadInput]:
    first, *others = dict.fromkeys(targets)
    config = first.ssh_config
    said = dict(ask_all([first]))
    state = _state(said[first]) if others else None
    texts = _kept(config, state)
    missing = [target for target in others if _key(target) not in texts]
    said |= ask_all(missing)
    # A file that changed in the meantime may have been read before and after the change.
    if missing and state is not None and _state(said[first]) == state:
        _keep(config, state, {**texts, **_lasting(missing, said, first)})
    found: dict[Target, Options | BadInput] = {}
    for target in targets:
        answer = said.get(target)
        text = answer.text if isinstance(answer, ConfigAnswer) else texts.get(_key(target), b"")
        found[target] = answer if isinstance(answer, BadInput) else options(text)
    return found


def _lasting(
    asked: Collection[Target], said: Mapping[Target, ConfigAnswer | BadInput], first: Target
) -> Mapping[bytes, bytes]:
    """Return the answers that depend only on the files of the first answer."""
    read = getattr(said[first], "read", None)
    lasting = {}
    for target in asked:
        answer = said[target]
        if isinstance(answer, ConfigAnswer) and answer.repeatable and answer.read == read:
            lasting[_key(target)] = answer.text
    return lasting


def _key(target: Target) -> bytes:
    return os.fsencode("\0".join(target.arguments()))


def _state(answer: ConfigAnswer | BadInput) -> str | None:
    """Return a digest of all inputs of a configuration's answers, from one answer; None if gpurun cannot know them."""
    if isinstance(answer, BadInput):
        return None
    digest = hashlib.sha256(CODE.encode())
    try:
        me = tuple(pwd.getpwuid(os.getuid()))
        contents = [(file, _content(file)) for file in sorted(answer.read)]
    except (OSError, KeyError):
        return None
    if any(b"localnetwork" in content.lower() for _, content in contents):
        return None
    names = sorted({name for _, content in contents for name in _VARIABLE.findall(content)})
    values = [os.environb.get(name) for name in names]
    digest.update(repr((answer.version, me, socket.gethostname(), contents, names, values)).encode())
    return digest.hexdigest()


def _content(file: bytes) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PermissionError(file)
        return opened.read()


def _place(config: str | None) -> Path | None:
    folder = caches.cache_room(os.environ, "ssh")
    return caches.cache_file(folder, config or "") if folder is not None else None


def _kept(config: str | None, state: str | None) -> Mapping[bytes, bytes]:
    place = _place(config)
    payload = caches.read_cache(place) if place is not None and state is not None else None
    with suppress(msgspec.MsgspecError):
        then, texts = _KEPT.decode(payload or b"")
        return texts if then == state else {}
    return {}


def _keep(config: str | None, state: str, texts: Mapping[bytes, bytes]) -> None:
    place = _place(config)
    if place is not None:
        caches.keep_cache(place, msgspec.msgpack.encode((state, texts)))


# The connection settings of a host, from the inventory and from ``ssh -G``: a Route.


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
        said.update({target: error for target in wave if (error := _refused_of_ssh_config(target))})
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


def _refused_of_ssh_config(target: Target) -> BadInput | None:
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


_METHODS = {"gssapiauthentication": "gssapi-with-mic", "hostbasedauthentication": "hostbased"}
"""Keyword of ssh_config → the authentication method that it enables for ``ssh`` (RFC 4462, RFC 4252)."""


@dataclass(frozen=True)
class Proofs:
    """The available credentials for the hops to one host.

    Attributes:
        masters: hops with an open shared connection, and its socket.
        plain: Paramiko has a key to offer to each hop without a shared connection.
        hardware: a key file stands for a FIDO key.
        certified: known_hosts has a certificate authority for some hop, and no key.
    """

    masters: Mapping[Route, str]
    plain: bool
    hardware: bool
    certified: bool = False


@dataclass(frozen=True)
class Choice:
    """The transports for a host.

    Attributes:
        first: the transport to try first.
        then: authentication methods for which gpurun also tries ``ssh``, if the host asks for one of them and refused
            the keys; ``publickey`` stands for keys that only ``ssh`` can use.
    """

    first: TransportName
    then: frozenset[str] = frozenset()

    def asks_ssh(self, wanted: Collection[str]) -> bool:
        """Return True if ``ssh`` may succeed after a host refused Paramiko and asked for these methods."""
        return bool(self.then & set(wanted))


def choose_transport(route: Route, proofs: Proofs) -> Choice:
    """Choose the inventory's transport, else ``ssh`` for a shared connection or a host's certificate, else Paramiko if
    it has a key.
    """
    if route.target.ssh is not None:
        return Choice(route.target.ssh)
    if proofs.masters or proofs.certified:
        return Choice("system")
    keywords = {keyword for hop in route.hops for keyword in hop.beyond_keys}
    others = {_METHODS.get(keyword, "publickey") for keyword in keywords}
    if proofs.hardware:
        others.add("publickey")
    if others and not (proofs.plain and all(hop.public_keys for hop in route.hops)):
        return Choice("system")
    return Choice("paramiko", frozenset(others))
