"""Find jump hosts in arguments of ``ssh``: ``-J``, ``ProxyJump``, and a ``ProxyCommand`` that runs ``ssh``. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

IS_JUMP = "left out, because SSH reaches other hosts through this jump host"
_WITH_VALUE = frozenset("bBcDEeFIiJLlmOoPpQRSWw")
"""Options of ``ssh`` with a value of their own; source: ssh(1)."""
_MOST_DEPTH = 4


def jumps_of(arguments: str) -> set[str]:
    """Return the jump hosts in arguments of ``ssh``, such as Ansible's ``ansible_ssh_common_args``."""
    return set(_of_options(_words(arguments), 0))


def jumps_of_command(command: str) -> set[str]:
    """Return the jump hosts of a ``ProxyCommand``; an empty set for commands that do not run ``ssh``."""
    return set(_of_command(_words(command), 0))


def hops(value: str) -> Iterator[str]:
    """Return the hosts of a ``ProxyJump``."""
    for hop in value.split(","):
        bare = _host(hop)
        if bare and bare.lower() != "none":
            yield bare


def _of_command(words: list[str], depth: int) -> Iterator[str]:
    if depth > _MOST_DEPTH:
        return
    at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in ("ssh", "ssh.exe")), None)
    if at is None:
        for word in words:  # sh -c 'ssh …'
            if " " in word:
                yield from _of_command(_words(word), depth + 1)
        return
    rest = words[at + 1 :]
    yield from _of_options(rest, depth)
    target = _target(rest)
    if target is not None:
        yield _host(target)


def _of_options(words: list[str], depth: int) -> Iterator[str]:
    for at, word in enumerate(words):
        flag, value = word[:2], word[2:] or (words[at + 1] if at + 1 < len(words) else "")
        if flag == "-J":
            yield from hops(value)
        elif flag == "-o":
            key, _, setting = re.sub(r"\s*=\s*|\s+", "=", value.strip(), count=1).partition("=")
            if key.lower() == "proxyjump":
                yield from hops(setting)
            elif key.lower() == "proxycommand":
                yield from _of_command(_words(setting), depth + 1)


def _target(words: list[str]) -> str | None:
    """Return the first word of an ``ssh`` command that is neither an option nor the value of one."""
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word.startswith("-"):
            letters = word[1:]
            first = next((at for at, letter in enumerate(letters) if letter in _WITH_VALUE), None)
            is_value = first is not None and first == len(letters) - 1
        else:
            return word
    return None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _host(text: str) -> str:
    return re.sub(r":\d+\Z", "", text.strip().removeprefix("ssh://").rpartition("@")[2]).strip("[]")
