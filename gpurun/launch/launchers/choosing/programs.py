"""Find the programs that a command or a shell's text starts. Pure."""

from __future__ import annotations

import posixpath
import re
from typing import Literal, NamedTuple

from gpurun.launch.launchers.choosing.profilers import PYTHON, behind_command, behind_module
from gpurun.launch.launchers.lines import wrappers
from gpurun.launch.launchers.lines.line import DEPTH, read_start
from gpurun.launch.launchers.lines.shell import SHELLS, simple_commands

_HARMLESS = (
    "true false : [ test echo printf sleep wait yes seq cat head tail wc tee grep sort uname hostname id whoami date "
    "pwd cd ls find stat du df env printenv export set ulimit umask exit mkdir touch rm cp mv ln chmod tar ps top free "
    "nproc uptime lscpu lspci lsmod dmesg ip ifconfig ping getent curl wget kill trap sync dd nvidia-smi nvcc ibstat "
    "ibv_devinfo ibv_devices ibdev2netdev show_gids rdma"
)
HARMLESS = frozenset(_HARMLESS.split())
"""Programs that train nothing."""
SAY = ("echo", "printf")
"""Programs that only print their words, whatever these name."""
NAMES_PYTHON = re.compile(r"\b(python|pypy)[0-9.]*\b")
TAKES = re.compile(r"-[A-Za-z]*?[XWQ]\Z")
NOT_LITERAL = re.compile(r"[$`*?~\[{\0]")
"""What a shell replaces, so that a word does not say which folder it means."""
MOST_PARTS, MOST_LETTERS = 1000, 1000


class StartedProgram(NamedTuple):
    """A program that a command starts.

    Attributes:
        kind: ``python`` and ``shell``: a file; ``module``: of ``python -m``; ``source``: of ``python -c``;
            ``harmless``: it trains nothing; ``launcher``: it starts processes itself; ``program``: any other;
            ``unread``: words do not show what it runs.
        what: the path, the dotted name, the text, or the program's name.
        in_shell: a shell's text starts it.
        arguments: the words behind a file or a module.
        folder: where the shell's text has gone with ``cd``, as far as words tell; "": it has not.
    """

    kind: Literal["python", "shell", "module", "source", "harmless", "launcher", "program", "unread"]
    what: str
    in_shell: bool = False
    arguments: tuple[str, ...] = ()
    folder: str = ""


def programs_of(words: tuple[str, ...]) -> tuple[StartedProgram, ...]:
    """Return the programs that a command starts, wrappers, profilers and debuggers looked through."""
    for _ in range(DEPTH):
        if (text := wrappers.shell_text(words)) is not None:
            return programs_in(text)
        inner = wrappers.look_through(words)
        if (behind := _profiled(words) if inner is None else inner.words) is None:
            break
        words = behind
    return (_program(words) if words else StartedProgram("harmless", ""),)


def _program(words: tuple[str, ...]) -> StartedProgram:
    name = wrappers.name_of(words)
    if words[0].startswith(("$", "`")):
        return StartedProgram("unread", words[0])
    if PYTHON.match(name):
        return _by_python(words)
    if name in SHELLS:
        at = 1
        while at < len(words) and words[at].startswith(("-", "+")):
            at += 2 if words[at].endswith("o") else 1
        found = StartedProgram("unread", name)
        return found if at >= len(words) else StartedProgram("shell", words[at], arguments=words[at + 1 :])
    if name in HARMLESS:
        return StartedProgram("harmless", name)
    kind: Literal["python", "shell", "program"] = "program"
    if name.endswith((".py", ".sh")):
        kind = "python" if name.endswith(".py") else "shell"
    return StartedProgram(kind, words[0], arguments=words[1:])


def programs_in(text: str, folder: str = "") -> tuple[StartedProgram, ...]:
    """Return the programs that a shell's text starts in a folder, as far as words can tell."""
    found = list[StartedProgram]()
    for command in simple_commands(text):
        if len(found) >= MOST_PARTS:
            found.append(StartedProgram("unread", "a text with so many commands", True))
            break
        if (typed := read_start(command)) is not None:
            found.append(StartedProgram("launcher", typed.name, True))
            continue
        if command[0] == "eval":
            found.append(StartedProgram("unread", command[0], True))
            continue
        if command[0] in (".", "source") and "".join(command[1:2]).startswith("$"):
            continue  # such a file sets variables, as a virtual environment's does
        if command[0] in ("cd", "pushd"):
            folder = _gone(folder, command[1:])
        sourced = command[1:] if command[0] in (".", "source") else command
        hides = any(NAMES_PYTHON.search(word) for word in command)
        for part in programs_of(sourced):
            is_hidden = hides and part.kind in ("program", "harmless") and part.what not in SAY
            inside = part._replace(in_shell=True, folder=_joined(folder, part.folder))
            found.append(StartedProgram("unread", part.what, True) if is_hidden else inside)
    return tuple(found)


def _gone(folder: str, words: tuple[str, ...]) -> str:
    """Return where ``cd`` leads; "" if words do not tell."""
    targets = [word for word in words if not word.startswith("-")]
    if len(targets) != 1 or len(words) > 2 or NOT_LITERAL.search(targets[0]):
        return ""
    return _joined(folder, targets[0])


def _joined(folder: str, path: str) -> str:
    joined = posixpath.normpath(posixpath.join(folder, path or "."))
    return joined if joined != "." and len(joined) <= MOST_LETTERS else ""


def _profiled(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return what a profiler or debugger in front runs; None if there is none."""
    if not PYTHON.match(wrappers.name_of(words)):
        return behind_command(words)
    program = _by_python(words)
    return behind_module((*program.what.split(), *program.arguments)) if program.kind == "module" else None


def _by_python(words: tuple[str, ...]) -> StartedProgram:
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        if word.startswith("--"):
            return (
                StartedProgram("harmless", word) if word in ("--version", "--help") else StartedProgram("unread", word)
            )
        flag = next((letter for letter in word[1:] if letter in "cmVhXWQ"), "-")
        if flag in ("V", "h"):
            return StartedProgram("harmless", word)
        if flag in ("c", "m"):
            inside = word.partition(flag)[2]
            what, *behind = (inside, *words[at + 1 :]) if inside else words[at + 1 :] or ("",)
            return StartedProgram("source" if flag == "c" else "module", what, arguments=tuple(behind))
        at += 2 if TAKES.match(word) else 1
    if at >= len(words) or words[at] == "-":
        return StartedProgram("unread", words[0])
    return StartedProgram("python", words[at])
