"""A cache of answers of ``ssh -G``, in the user's own cache folder. An answer is valid while its inputs are unchanged.

gpurun runs ``ssh -G`` for one host each time. ``ssh`` then reports which files it reads. If their contents are
unchanged, the cached answers for all other hosts are still valid. gpurun does not cache an answer that depends on a
command, a name server or the network.
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

CODE = own_cache.code_stamp(Path(__file__).parent)
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
    said = dict(openssh.ask_all([first]))
    state = _state(said[first]) if others else None
    texts = _kept(config, state)
    missing = [target for target in others if _key(target) not in texts]
    said |= openssh.ask_all(missing)
    # A file that changed in the meantime may have been read before and after the change.
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
