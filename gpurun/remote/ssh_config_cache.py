"""Answers of ``ssh -G``, kept in the user's own cache for as long as what decides them stays the same.

gpurun asks ``ssh`` about one host each time. ``ssh`` says which files it reads now; if their contents are those of
last time, the kept answers about all other hosts still hold. gpurun does not keep an answer that a command, a name
server or the network has a say in.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import socket
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from gpurun.errors import BadInput
from gpurun.msgspec_types import ready
from gpurun.remote import openssh
from gpurun.remote.openssh import ConfigAnswer, Options
from gpurun.remote.target import Target
from gpurun.state import own_cache

_VARIABLE = re.compile(rb"\$\{?(\w+)")
_KEPT = msgspec.msgpack.Decoder(ready(tuple[str, dict[bytes, bytes]]))
"""The state of all that decides the answers, and the text of each answer by the arguments of `ssh`."""


def answers(targets: Collection[Target]) -> Mapping[Target, Options | BadInput]:
    """What ``ssh -G`` says of each target. Starts one process for each configuration and each unknown answer."""
    found: dict[Target, Options | BadInput] = {}
    for config in {target.ssh_config for target in targets}:
        found.update(_of_one_configuration([target for target in targets if target.ssh_config == config]))
    return found


def _of_one_configuration(targets: Collection[Target]) -> Mapping[Target, Options | BadInput]:
    first, *others = dict.fromkeys(targets)
    config = first.ssh_config
    said = dict(openssh.ask_all([first]))
    state = _state(said[first]) if others else None
    texts = _kept(config, state)
    missing = [target for target in others if _key(target) not in texts]
    said |= openssh.ask_all(missing)
    # A file that changed meanwhile may have been read before and after.
    if missing and state is not None and _state(said[first]) == state:
        _keep(config, state, {**texts, **_lasting(missing, said, first)})
    found: dict[Target, Options | BadInput] = {}
    for target in targets:
        answer = said.get(target)
        text = answer.text if isinstance(answer, ConfigAnswer) else texts.get(_key(target), b"")
        found[target] = answer if isinstance(answer, BadInput) else openssh.options(text)
    return found


def _lasting(
    asked: Collection[Target], said: Mapping[Target, ConfigAnswer | BadInput], first: Target
) -> Mapping[bytes, bytes]:
    """The answers that came from the same files as the first one's, and from nothing else."""
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
    """A digest of what decides answers about a configuration: what an answer says of it. None if gpurun cannot know."""
    if isinstance(answer, BadInput):
        return None
    digest = hashlib.sha256(own_cache.code_stamp(Path(__file__).parent).encode())
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
    folder = own_cache.folder(os.environ, "ssh")
    return own_cache.place(folder, config or "") if folder is not None else None


def _kept(config: str | None, state: str | None) -> Mapping[bytes, bytes]:
    place = _place(config)
    payload = own_cache.read(place) if place is not None and state is not None else None
    with suppress(msgspec.MsgspecError):
        then, texts = _KEPT.decode(payload or b"")
        return texts if then == state else {}
    return {}


def _keep(config: str | None, state: str, texts: Mapping[bytes, bytes]) -> None:
    place = _place(config)
    if place is not None:
        own_cache.keep(place, msgspec.msgpack.encode((state, texts)))
