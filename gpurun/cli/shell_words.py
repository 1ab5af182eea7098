"""Answer a shell that completes a command line, and the scripts that ask.

Typer's own scripts pass words as the shell has split them. Bash splits at ``@``, ``:`` and ``=``, so it completed
neither ``@last`` nor ``@rack:r1``; zsh took ``a:b`` for a word and its description. These scripts pass the line up to
the cursor. A script that an older gpurun installed still asks Typer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

VARIABLE, LINE, BREAKS = "_GPURUN_COMPLETE", "_GPURUN_LINE", "_GPURUN_BREAKS"
SCRIPTS = {
    "bash": """
%(complete_func)s() {
    mapfile -t COMPREPLY < <(
        env _GPURUN_LINE="${COMP_LINE:0:$COMP_POINT}" _GPURUN_BREAKS="$COMP_WORDBREAKS" \\
            %(autocomplete_var)s=words_bash "$1" 2>/dev/null
    )
    if [[ "${COMPREPLY-}" == *[=:/] ]]; then compopt -o nospace; fi
}

complete -o default -F %(complete_func)s %(prog_name)s
""",
    "zsh": """
#compdef %(prog_name)s

%(complete_func)s() {
  local -a found open
  found=("${(@f)$(env _GPURUN_LINE="${(j: :)words[1,$CURRENT-1]} ${PREFIX}" \\
                  %(autocomplete_var)s=words_zsh %(prog_name)s 2>/dev/null)}")
  found=("${(@)found:#}")
  open=("${(@M)found:#*[=:/]}")
  found=("${(@)found:#*[=:/]}")
  if (( $#open )); then compadd -S '' -a open; fi
  if (( $#found )); then compadd -a found; fi
  if (( ! $#open && ! $#found )); then _files; fi
}

compdef %(complete_func)s %(prog_name)s
""",
    "fish": (
        'complete --command %(prog_name)s --no-files --arguments "(env %(autocomplete_var)s=words_fish '
        '_GPURUN_LINE=(commandline -cp) %(prog_name)s 2>/dev/null)" --condition "env %(autocomplete_var)s=words_fish '
        '_GPURUN_LINE=(commandline -cp) %(prog_name)s 2>/dev/null | string length --quiet"'
    ),
}
"""For each shell, the script that asks: Typer installs it and prints it, and fills in the names."""
_BARE = re.compile(r"([^\w@%+=:,./~-])")


def asked_by(environ: Mapping[str, str]) -> str | None:
    """Return the shell whose script asks for words; None if none does."""
    asks, _, shell = environ.get(VARIABLE, "").partition("_")
    return shell if asks == "words" and shell in SCRIPTS and LINE in environ else None


def use_scripts() -> None:
    """Have Typer print and install these scripts instead of its own. A Typer that has no such table keeps its own."""
    with suppress(ImportError, AttributeError):
        from typer import _completion_shared

        _completion_shared._completion_scripts.update(SCRIPTS)


def answer(shell: str, command: click.Command, environ: Mapping[str, str]) -> None:
    """Print the words that the shell may put in place of the last one, a word a line."""
    line = environ[LINE]
    words = split_arg_string(line)
    incomplete = "" if not words or line.endswith((" ", "\t")) else words.pop()
    if "--" in words:  # a program's own words
        return
    completer = ShellComplete(command, {}, "gpurun", VARIABLE)
    given = _with_default(command, words[1:], incomplete)
    _complete_by_value(command, given)
    found = [item.value for item in completer.get_completions(given, incomplete) if item.type == "plain"]
    before = _option_of(incomplete)
    written = [before + word for word in found if word.isprintable()]
    if shell == "bash" and not _has_open_quote(line):
        cut = _cut(incomplete, environ.get(BREAKS, ""))
        written = [_BARE.sub(r"\\\1", word[cut:]) for word in written]
    sys.stdout.write("".join(f"{word}\n" for word in written))


def _complete_by_value(command: click.Command, words: Sequence[str]) -> None:
    """Let the words for values in a command's help say what completes them (`gpurun.cli.completion.BY_VALUE`)."""
    from gpurun.cli.completion import BY_VALUE

    name = ""
    for word in (word for word in words if not word.startswith("-")):
        below = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
        if below is None:
            break
        command, name = below, word
    for parameter in command.params:
        offered = BY_VALUE.get(f"{name} {parameter.metavar}") or BY_VALUE.get(str(parameter.metavar))
        if offered is not None and not parameter.shell_complete(click.Context(command), ""):
            _offer(parameter, offered)


def _offer(parameter: click.Parameter, offered: Callable[[str], list[str]]) -> None:
    def complete(_context: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in offered(incomplete)]

    vars(parameter)["shell_complete"] = complete  # in place of the method


def _with_default(command: click.Command, words: list[str], incomplete: str) -> list[str]:
    """Return the words with the name of the command that a group runs by itself: ``sweep run`` of ``sweep RECIPE``."""
    group = (
        command.get_command(click.Context(command), words[0]) if words and isinstance(command, click.Group) else None
    )
    default = getattr(group, "default", None)
    is_named = len(words) > 1 and isinstance(group, click.Group) and words[1] in group.commands
    if default is None or is_named or (len(words) == 1 and not incomplete.startswith("-")):
        return words
    return [words[0], default, *words[1:]]


def _option_of(incomplete: str) -> str:
    """Return the ``--host=`` of ``--host=gpu-``; "" of another word."""
    name, equals, _ = incomplete.partition("=")
    return name + equals if equals and name.startswith("-") else ""


def _cut(incomplete: str, breaks: str) -> int:
    """Return how much of a word bash leaves alone: all up to the last character at which it splits words.

    An ``@`` begins a word (readline's `rl_special_prefixes`); other such characters stand before it.
    """
    ends = (incomplete.rfind(each) + (each != "@") for each in breaks if not each.isspace() and each not in "'\"")
    return max(0, *ends, 0)


def _has_open_quote(line: str) -> bool:
    """Return whether a quote is open at the end of a line."""
    quote, skips = "", False
    for character in line:
        if skips:
            skips = False
        elif character == "\\" and quote != "'":
            skips = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
    return bool(quote)
