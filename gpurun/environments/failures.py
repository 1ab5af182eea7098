"""Turn pip's error messages into the error that the user sees. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gpurun.environments.inside import NO_PIP, NO_VENV
from gpurun.errors import BadInput, GpurunError, HostNotReady

MOST_LINES, MOST_CHARS = 4, 300
ASKED, PASSWORD = (
    "docs/environments.md",
    "put the password into a netrc file, and write the file's path into the recipe: `python: {secret: FILE}`",
)
_FULL = ("No space left on device", "Disk quota exceeded")
_NETWORK = (
    "Retrying (Retry(", "NewConnectionError", "Connection refused", "Temporary failure in name resolution",
    "ReadTimeout", "ConnectTimeout", "SSLError", "CERTIFICATE_VERIFY_FAILED", "Connection broken", "ProxyError",
    "Network is unreachable",
)  # fmt: skip
_REFUSED = re.compile(r"[^\n]{0,200}\b40[13] (?:Client )?Error\b[^\n]{0,80}|\bUser for \S+:[^\n]{0,80}")
_NOT_FOUND = re.compile(r"No matching distribution found for (.+)")
_UNREAD = re.compile(r"((?:Invalid requirement|InvalidMarker|InvalidSpecifier|UndefinedEnvironmentName): .{0,200})")
_CONFLICT = ("ResolutionImpossible", "conflicting dependencies")
_HASHES = ("DO NOT MATCH THE HASHES", "Hashes are required in --require-hashes mode")
_BUILD = ("subprocess-exited-with-error", "Failed building wheel", "Failed to build", "metadata-generation-failed")


def failure_of(code: int, log: str, base: str, secrets: Iterable[str] = (), details: str = "") -> GpurunError:
    """Return the error for an exit code of `gpurun.environments.inside` and its output.

    Args:
        base: the base image of the environment.
        secrets: texts that no message may show.
        details: pip's own log: only this log says which index refused to answer.
    """
    text = hidden(log, secrets)
    said = tail(text)
    if code == NO_PIP:
        return BadInput(
            f"neither the image {base} nor the head has pip",
            hint="install pip in the image or on the head: `python3 -m pip` must work",
        )
    if code == NO_VENV:
        return BadInput(f"the image {base} must have Python 3.8 or newer with the module venv: {said}")
    if _any(_FULL, text):
        return HostNotReady(
            "the head's disk is full: pip cannot install the packages",
            hint="`gpurun prune` frees space; "
            "`docker image prune --all --filter label=gpurun.environment` removes the packages of earlier jobs",
        )
    if code == 137:
        return HostNotReady(
            "the build was killed: the head ran out of memory, or somebody removed the container of the build"
        )
    refused = _REFUSED.search(hidden(details, secrets)) or _REFUSED.search(text)
    return _of_pip(text, said, base, refused[0].strip() if refused else "")


def _of_pip(text: str, said: str, base: str, refused: str) -> GpurunError:
    found = _NOT_FOUND.search(text)
    missing = found[1].strip()[:MOST_CHARS] if found else ""
    if not refused and _any(_NETWORK, text):
        line = next(line for line in text.splitlines() if _any(_NETWORK, line)).strip()
        return HostNotReady(
            f"pip cannot reach the package index: {line[:MOST_CHARS]}", hint=f"{ASKED} says which indexes pip uses"
        )
    unread = _UNREAD.search(text)
    kinds = (
        (refused, f"the package index wants a password, or refused the password: {refused}", PASSWORD),
        (_any(_CONFLICT, text), f"no set of versions satisfies these requirements: {_conflict(text) or said}", None),
        (missing, f"no package index has {missing} for the Python of {base}", "check the package's name and version"),
        (unread, f"a requirement cannot be read: {unread[1] if unread else ''}", None),
        (
            _any(_HASHES, text),
            f"the hash of a package differs from the hash in the lock file: {_forged(text) or said}",
            "lock the packages again",
        ),
        (
            _any(_BUILD, text),
            f"a package could not be built in {base}: {said}",
            "name a version of the package that has a wheel",
        ),
        (True, f"pip could not install the packages: {said or 'pip printed no message'}", None),
    )
    message, hint = next((message, hint) for is_so, message, hint in kinds if is_so)
    return BadInput(message, hint=hint)


def _any(words: Iterable[str], text: str) -> bool:
    return any(word in text for word in words)


def _forged(text: str) -> str:
    """Return the package with another hash, as pip names it below its warning."""
    found = re.search(r"DO NOT MATCH THE HASHES[^\n]*\n\s+(\S+)", text)
    return found[1][:MOST_CHARS] if found else ""


def _conflict(text: str) -> str:
    """Return pip's description of the conflict."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if "because these package versions have conflicting dependencies" in line:
            found = [each.strip() for each in lines[number + 1 : number + 8]]
            return "; ".join(
                each for each in found if each and not each.startswith(("To fix", "1. ", "2. ", "The conflict is"))
            )
    return ""


def tail(text: str) -> str:
    """Return the end of a text as one line."""
    errors = "\n".join(line for line in text.splitlines() if line.startswith("ERROR: "))
    text = errors or text
    lines: Sequence[str] = [line.strip()[:MOST_CHARS] for line in text.splitlines() if line.strip()]
    shown = [line for line in lines[-MOST_LINES:] if not line.startswith("[notice]")]
    return " | ".join(line.removeprefix("ERROR: ") for line in shown)[-1500:]


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Return the text without these secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) > 3:
            text = text.replace(secret, "***")
    return text
