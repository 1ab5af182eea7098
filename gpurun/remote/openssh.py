"""OpenSSH's view of its configuration: the output of ``ssh -G`` for one host.

gpurun does not parse ssh_config(5) itself. So `Match`, `Include`, canonical names and all newer keywords have exactly
the meaning that they have for the installed ``ssh``.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpurun.errors import BadInput
from gpurun.remote.target import Target
from gpurun.state.people import has_account

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
