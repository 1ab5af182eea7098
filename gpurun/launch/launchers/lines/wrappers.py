"""The programs that people put in front of a launcher. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpurun.errors import BadInput
from gpurun.launch.launchers.lines.shell import RESERVED, SHELLS, simple_commands

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
SPLITS = re.compile(r"-v?S|--split-string(=|$)")
"""The flag of ``env`` whose value is a text of several words, as in the first line of a script."""
EXPANDS = re.compile(r"[$`*?\[\]{}~#!\\]")

WRAPPERS: Mapping[str, tuple[str, int]] = {
    "nohup": ("", 0),
    "setsid": ("-c -f -w --fork --wait", 0),
    "time": ("-p -v -f= -o= -a --portability --verbose --format= --output= --append", 0),
    "xvfb-run": ("-a -s= -n= -l --auto-servernum --server-args= --server-num=", 0),
    "nice": ("-n= --adjustment=", 0),
    "ionice": ("-c= -n= -t --class= --classdata= --ignore", 0),
    "stdbuf": ("-i= -o= -e= --input= --output= --error=", 0),
    "unbuffer": ("-p", 0),
    "timeout": ("-k= -s= -v --kill-after= --signal= --foreground --preserve-status --verbose", 1),
    "taskset": ("-a -c --all-tasks --cpu-list", 1),
    "numactl": (
        "-N= -m= -C= -i= -l --cpunodebind= --membind= --physcpubind= --interleave= --localalloc --preferred= "
        "-a --all -w= --weighted-interleave= -b --balancing",
        0,
    ),
    "uv run": (
        "-p= --python= --with= --with-editable= --with-requirements= --extra= --group= --only-group= --no-group= "
        "--env-file= --directory= --project= --package= --index= --index-url= --extra-index-url= -i= --cache-dir= "
        "-q --quiet -v --verbose -n --no-cache --no-sync --frozen --locked --isolated --active --exact --offline "
        "--all-extras --all-groups --all-packages --no-dev --dev --only-dev --no-project --no-env-file --no-config "
        "--refresh -U --upgrade --native-tls --no-progress --managed-python --no-managed-python",
        0,
    ),
    "poetry run": ("-C= --directory= -q --quiet -n --no-interaction", 0),
    "pdm run": ("-p= --project= -s --site-packages", 0),
    "pipenv run": ("", 0),
    "rye run": ("", 0),
    "hatch run": ("", 0),
    "pixi run": ("-e= --environment= --manifest-path= --frozen --locked", 0),
    "conda run": ("-n= --name= -p= --prefix= --cwd= --no-capture-output --live-stream -v --verbose", 0),
    "mamba run": ("-n= --name= -p= --prefix= --cwd= --no-capture-output --live-stream -v --verbose", 0),
    "micromamba run": ("-n= --name= -p= --prefix= --cwd= -a= --attach=", 0),
}
"""Each starts another program and changes nothing of its words: flags, and how many words stand before the program."""


class Inner(NamedTuple):
    """What a wrapper runs.

    Attributes:
        words: the command within.
        around: the wrapper's words, which stay in front of the command of each rank.
        env: the variables that the wrapper sets.
    """

    words: tuple[str, ...]
    around: tuple[str, ...] = ()
    env: Mapping[str, str] = {}


def name_of(words: tuple[str, ...]) -> str:
    """Return the program's name, without its folder."""
    return words[0].rpartition("/")[2] if words else ""


def look_through(words: tuple[str, ...]) -> Inner | None:
    """Return what the wrapper at the beginning runs; None if there is no wrapper, or gpurun cannot read it."""
    if not words:
        return None
    if ASSIGNMENT.fullmatch(words[0]):
        return _assignments(words)
    program = name_of(words)
    if program in READERS:
        return READERS[program](words)
    for name, (options, operands) in WRAPPERS.items():
        head = (program, *words[1:])[: len(name.split())]
        if head == tuple(name.split()):
            return _behind(words, len(head), options, operands)
    return None


def shell_text(words: tuple[str, ...]) -> str | None:
    """Return the text that a shell runs, as in ``bash -lc TEXT``, or ``env -S``; None if `words` is no such command."""
    if name_of(words) == "env":
        at = next((at for at, word in enumerate(words) if SPLITS.match(word)), None)
        return None if at is None else " ".join((SPLITS.sub("", words[at]), *words[at + 1 :]))
    at = _text_at(words) if name_of(words) in SHELLS else None
    return None if at is None else words[at]


def _assignments(words: tuple[str, ...]) -> Inner:
    env, rest = dict[str, str](), list(words)
    while rest and (found := ASSIGNMENT.fullmatch(rest[0])):
        env[found[1]] = found[2]
        del rest[0]
    return Inner(tuple(rest), (), env)


def _split(words: list[str]) -> list[str] | None:
    """Return the words that ``env`` makes of its flag ``-S``; None if its text has more than words and quotes."""
    text, rest = SPLITS.sub("", words[0]), words[1:]
    if not text and rest:
        text = rest.pop(0)
    try:
        return None if re.search(r"[\\$#]", text) else [*shlex.split(text), *rest]
    except ValueError:
        return None


def _env(words: tuple[str, ...]) -> Inner | None:
    """Read ``env``: assignments, ``-u NAME``, ``-C DIR`` and ``-S TEXT``. ``-i`` would hide what gpurun tells ranks."""
    around, rest = list[str](), list(words[1:])
    while rest and rest[0].startswith("-"):
        if SPLITS.match(rest[0]):
            if (split := _split(rest)) is None:
                return None
            rest = split
            continue
        word = rest.pop(0)
        if word == "--":
            break
        if word in ("-i", "-", "--ignore-environment"):
            return None
        takes = word in ("-u", "--unset", "-C", "--chdir")
        if not (takes and rest) and not re.match(r"-[uC].|--(unset|chdir)=", word):
            return None
        around += [word, rest.pop(0)] if takes else [word]
    inner = _assignments(tuple(rest))
    return inner._replace(around=(words[0], *around) if around else ()) if inner.words else None


def _text_at(words: tuple[str, ...]) -> int | None:
    at, is_text = 1, False
    while at < len(words) and words[at].startswith(("-", "+")):
        letters = words[at].lstrip("-+")
        if words[at].startswith("--"):
            return None
        is_text = is_text or "c" in letters
        at += 2 if letters.endswith("o") else 1
    return at if is_text and at < len(words) else None


def _shell(words: tuple[str, ...]) -> Inner | None:
    at = _text_at(words)
    if at is None or at + 1 != len(words) or EXPANDS.search(words[at]):
        return None
    commands = list(simple_commands(words[at]))
    try:
        whole = tuple(shlex.split(words[at]))
    except ValueError:
        return None
    if len(commands) != 1 or commands[0] not in (whole, whole[1:]) or whole[0] in RESERVED - {"exec"}:
        return None
    plain = words[1:at] == ("-c",)
    return Inner(whole, () if plain else (*words[:at], 'exec "$@"', words[0]))


def _behind(words: tuple[str, ...], at: int, options: str, operands: int) -> Inner | None:
    with_value = {word.rstrip("=") for word in options.split() if word.endswith("=")}
    known = with_value | set(options.split())
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word == "--":
            at += 1
            break
        if word in ("-m", "--module") and name_of(words) == "uv":
            return Inner(("python", "-m", *words[at + 1 :]), words[:at])
        name, equals, _ = word.partition("=")
        is_short = len(word) > 2 and word[1] != "-" and word[:2] in with_value
        if name not in known and not is_short:
            return None
        at += 2 if name in with_value and not equals and not (is_short and name not in with_value) else 1
    at += operands
    return Inner(words[at:], words[:at]) if at < len(words) else None


def _exec(words: tuple[str, ...]) -> Inner | None:
    """Read a shell's ``exec`` and ``command``: the command takes the shell's place."""
    return Inner(words[1:]) if words[0] in ("exec", "command") and words[1:] and not words[1].startswith("-") else None


READERS: Mapping[str, Callable[[tuple[str, ...]], Inner | None]] = {
    "env": _env, "exec": _exec, "command": _exec, **dict.fromkeys(SHELLS, _shell),
}  # fmt: skip
"""The wrappers that set variables, or have a text instead of words."""


def refuse_names(env: Mapping[str, str]) -> None:
    """Refuse variables that would give a rank another number or job than gpurun does."""
    if wrong := sorted(name for name in env if name.startswith("GPURUN_")):
        raise BadInput(f"gpurun itself sets {', '.join(wrong)}", hint=f"remove {', '.join(wrong)} from the command")
