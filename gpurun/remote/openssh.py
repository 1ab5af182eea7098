"""OpenSSH's own word on its configuration: what ``ssh -G`` prints for one host.

gpurun does not read ssh_config(5) itself: `Match`, `Include`, canonical names and every later keyword mean what the
installed ``ssh`` takes them for.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpurun.errors import BadInput

PROCESSES_AT_ONCE = 2 * (os.cpu_count() or 1)
LIMIT_S = 10.0

_KEYWORDS = (
    "addressfamily", "bindaddress", "canonicalizehostname", "canonicalizepermittedcnames", "certificatefile",
    "globalknownhostsfile", "hostkeyalias", "hostname", "identitiesonly", "identityagent", "identityfile", "port",
    "proxycommand", "proxyjump", "proxyusefdpass", "user", "userknownhostsfile",
)  # fmt: skip
_READ = re.compile(r"^debug1: Reading configuration data (.*)$", re.MULTILINE)
_UNMATCHED = re.compile(r"^debug1: .* line \d+: include (.*) matched no files$", re.MULTILINE)
_ESCAPED = re.compile(rb"\\(\\|[0-7]{3})")
_NOISE = re.compile(r"debug\d: |OpenSSH_")

Options = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Question:
    """One call of ``ssh -G``. What is None is left to the configuration.

    Attributes:
        config: the configuration file; None = the user's and the system's.
        jumps: the hosts to go through, as ``ssh -J`` takes them.
    """

    name: str
    config: str | None = None
    address: str | None = None
    port: int | None = None
    user: str | None = None
    jumps: str | None = None

    def arguments(self) -> tuple[str, ...]:
        """The arguments of ``ssh -G``."""
        given = {"-F": self.config, "-p": self.port, "-l": self.user, "-J": self.jumps}
        words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
        if self.address is not None:
            words += ["-o", "HostName=" + self.address.replace("%", "%%")]
        return (*words, "--", self.name)


@dataclass(frozen=True)
class ConfigAnswer:
    """What ``ssh -G`` said.

    Attributes:
        text: the lines with keywords that gpurun uses, as ``ssh`` printed them.
        read: the files that ``ssh`` read.
        unmatched: patterns of ``Include`` that named no file.
        repeatable: False if a command or a name server had a say, besides these files.
    """

    text: bytes
    read: frozenset[str]
    unmatched: frozenset[str]
    repeatable: bool


def options(text: bytes) -> Options:
    """The values of each keyword, in order."""
    found: dict[str, tuple[str, ...]] = {}
    for line in os.fsdecode(text).split("\n"):
        key, _, value = line.partition(" ")
        found[key.lower()] = (*found.get(key.lower(), ()), value)
    return found


def ask_all(questions: Collection[Question]) -> Mapping[Question, ConfigAnswer | BadInput]:
    """Ask ``ssh`` once for each question, a few at a time.

    A configuration that keeps ``ssh`` from ending costs `LIMIT_S`, not `LIMIT_S` for each host: when as many as run
    at once did not end, the rest is not asked.
    """
    stuck: list[Question] = []

    def answer(question: Question) -> ConfigAnswer | BadInput:
        if len(stuck) >= PROCESSES_AT_ONCE:
            return _no_end(question)
        try:
            return _ask(question)
        except BadInput as error:
            return error
        except subprocess.TimeoutExpired:
            stuck.append(question)
            return _no_end(question)

    with ThreadPoolExecutor(max_workers=PROCESSES_AT_ONCE) as pool:
        try:
            return dict(zip(questions, pool.map(answer, questions), strict=True))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _ask(question: Question) -> ConfigAnswer:
    argv = ["ssh", "-v", "-T", "-G", *question.arguments()]
    pipe = subprocess.PIPE
    try:
        # A session of its own: a command of `Match exec` that does not end is killed with ssh.
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
    except (OSError, ValueError) as error:
        hint = "install the OpenSSH client: gpurun asks `ssh -G` how to reach a host"
        raise BadInput(f"cannot run ssh: {error}", host=question.name, hint=hint) from None
    with process:
        try:
            printed, said = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
    stderr = os.fsdecode(_ESCAPED.sub(_unescaped, said)).replace("\r\n", "\n")
    if process.returncode != 0:
        raise BadInput(_complaint(stderr), host=question.name, where=question.config, hint="`ssh -G` must work for it")
    found = _answer(printed, stderr)
    values = options(found.text)
    if not {"hostname", "port", "user"} <= values.keys() or not values["port"][0].isdigit():
        raise BadInput("`ssh -G` does not say how to reach it", host=question.name, hint="is `ssh` OpenSSH's own?")
    return found


def _unescaped(match: re.Match[bytes]) -> bytes:
    """The byte that ``ssh`` wrote as ``\\\\`` or ``\\ooo``."""
    return match[1] if match[1] == b"\\" else bytes([int(match[1], 8) & 0xFF])


def _answer(printed: bytes, stderr: str) -> ConfigAnswer:
    lines = printed.split(b"\n")
    text = b"\n".join(line for line in lines if line.partition(b" ")[0].decode(errors="replace").lower() in _KEYWORDS)
    said = options(text)
    looked_up = said.get("canonicalizehostname", ("no",))[0] not in ("no", "false")
    followed = said.get("canonicalizepermittedcnames", ("none",)) != ("none",)
    return ConfigAnswer(
        text=text,
        read=frozenset(_READ.findall(stderr)),
        unmatched=frozenset(_UNMATCHED.findall(stderr)),
        repeatable=not (looked_up or followed or "Executing command: " in stderr),
    )


def _complaint(stderr: str) -> str:
    lines = [line.strip() for line in stderr.split("\n") if line.strip() and not _NOISE.match(line)]
    text = "; ".join(lines[-3:])[:500]
    return "".join(letter if letter.isprintable() else "?" for letter in text) or "ssh -G fails and does not say why"


def _no_end(question: Question) -> BadInput:
    return BadInput(
        f"`ssh -G` does not end within {LIMIT_S:g} s",
        host=question.name,
        where=question.config,
        hint="look for a pipe named by Include, and for a command of `Match exec` that does not end",
    )
