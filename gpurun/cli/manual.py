"""Manual pages of all commands, in roff's macros of man(7), which groff and mandoc both know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.main import get_command

from gpurun.cli.config import VARIABLES
from gpurun.cli.main import EXAMPLE, parameters_of
from gpurun.cli.printing import say
from gpurun.documents.plain import printable
from gpurun.errors import EXIT_CODES, BadInput

# The help of every command as data, for `gpurun man` and the reference pages.


@dataclass(frozen=True)
class CommandPage:
    """The help of a command.

    Attributes:
        words: the command, such as ``("gpurun", "inventory", "set")``.
        summary: one line, as in the list of its group.
        usage: what follows `words`.
        about: the paragraphs of its help, examples left out.
        examples: the commands in its help.
        groups: by heading, each argument or option as written, and its help.
        commands: for a group, each command's name and summary.
    """

    words: tuple[str, ...]
    summary: str
    usage: str
    about: tuple[str, ...]
    examples: tuple[str, ...]
    groups: Mapping[str, Sequence[tuple[str, str]]]
    commands: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """The command as people type it."""
        return " ".join(self.words)

    @property
    def arguments(self) -> Sequence[tuple[str, str]]:
        """Each argument as written, and its help."""
        return self.groups.get("Arguments", ())

    @property
    def options(self) -> Sequence[tuple[str, str]]:
        """Each option as written, and its help."""
        return [one for title, entries in self.groups.items() if title != "Arguments" for one in entries]


def pages() -> tuple[CommandPage, ...]:
    """Return one page for `gpurun` and one for each command below it. A group comes before its commands."""
    from gpurun.cli.main import app

    return tuple(_page(context) for context in contexts("gpurun", get_command(app)))


def contexts(name: str, command: click.Command, parent: click.Context | None = None) -> Iterator[click.Context]:
    """Yield the contexts of a command and of the commands below it, in the order of the help."""
    context = command.context_class(command, info_name=name, parent=parent, **command.context_settings)
    yield context
    for below, child in _children(context):
        yield from contexts(below, child, context)


def _children(context: click.Context) -> Iterator[tuple[str, click.Command]]:
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield name, child


def _page(context: click.Context) -> CommandPage:
    command = context.command
    paragraphs = [" ".join(text.split()) for text in (command.help or "").split("\n\n")]
    return CommandPage(
        words=tuple(context.command_path.split()),
        summary=_summary(command),
        usage=" ".join(command.collect_usage_pieces(context)),
        about=tuple(text for text in paragraphs if text and not text.startswith(EXAMPLE)),
        examples=tuple(text for text in paragraphs if text.startswith(EXAMPLE)),
        groups=parameters_of(command, context),
        commands=tuple((name, _summary(child)) for name, child in _children(context)),
    )


def _summary(command: click.Command) -> str:
    return (command.short_help or (command.help or "").strip().split("\n\n")[0].replace("\n", " ")).rstrip(".")


_CODE = re.compile(r"`([^`]+)`")
_SPECIAL = {
    "\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti", '"': r"\(dq",
}  # fmt: skip
"""Characters that roff would print as other characters (groff_char(7))."""


def manual_page(page: CommandPage, version: str) -> str:
    """Return the page. It has no date, so that the same gpurun version always writes the same bytes."""
    title = "-".join(page.words)
    lines = [f'.TH "{_text(title.upper())}" "1" "" "gpurun {version}" "gpurun manual"']
    lines += [".nh", ".ad l"]
    lines += [".SH NAME", rf"{_text(title)} \- {_text(page.summary)}"]
    lines += [".SH SYNOPSIS", f".B {_text(page.name)}", _line(page.usage)]
    lines += [".SH DESCRIPTION", *_paragraphs(page.about)]
    lines += _section("ARGUMENTS", page.arguments)
    lines += _options({title: entries for title, entries in page.groups.items() if title != "Arguments"})
    lines += _section("COMMANDS", ((f"{page.name} {name}", summary) for name, summary in page.commands))
    lines += _examples(page.examples)
    if len(page.words) == 1:
        lines += _section("ENVIRONMENT", VARIABLES.items())
    lines += _section("EXIT STATUS", _exit_codes(EXIT_CODES))
    lines += [".SH SEE ALSO", _line(_see_also(page))]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Escape a text so that roff prints every character as it is. The result is ASCII; a minus stays a minus."""
    return "".join(_SPECIAL.get(one) or (one if one.isascii() else f"\\[u{ord(one):04X}]") for one in text)


def _line(text: str) -> str:
    """Return a line of text, with words in backquotes in bold. Escapes a leading dot, which would start a macro."""
    parts = _CODE.split(" ".join(text.split()))
    made = "".join(rf"\fB{_text(part)}\fR" if at % 2 else _text(part) for at, part in enumerate(parts))
    return rf"\&{made}" if made.startswith((".", "\\(aq")) else made


def _paragraphs(texts: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        lines += [".PP", _line(text)] if lines else [_line(text)]
    return lines


def _options(groups: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    if list(groups) == ["Options"]:
        return _section("OPTIONS", groups["Options"])
    return [
        ".SH OPTIONS",
        *(line for title, some in groups.items() for line in (f".SS {_text(title)}", *_entries(some))),
    ]


def _section(title: str, entries: Iterable[tuple[str, str]]) -> list[str]:
    lines = _entries(entries)
    return [f".SH {title}", *lines] if lines else []


def _entries(entries: Iterable[tuple[str, str]]) -> list[str]:
    return [part for name, text in entries for part in (".TP", rf"\fB{_text(name)}\fR", _line(text))]


def _examples(examples: Iterable[str]) -> list[str]:
    lines = [part for example in examples for part in (".PP", ".RS 4", ".nf", _line(example), ".fi", ".RE")]
    return [".SH EXAMPLES", *lines[1:]] if lines else []


def _exit_codes(codes: Mapping[int, str]) -> Iterable[tuple[str, str]]:
    return ((str(code), meaning) for code, meaning in codes.items())


def _see_also(page: CommandPage) -> str:
    names = ["-".join((*page.words, name)) for name, _ in page.commands] or ["-".join(page.words[:-1])]
    return ", ".join(f"`{name}`(1)" for name in names)


# ``gpurun man``: the manual pages.


def man(
    to: Annotated[
        Path,
        typer.Option("--to", metavar="DIR", help="Write the pages into this folder, such as ~/.local/share/man/man1."),
    ],
) -> None:
    """Write a manual page for each command.

    gpurun man --to ~/.local/share/man/man1

    For example, `man gpurun-submit` then shows the page of `gpurun submit`.
    """
    from gpurun import __version__

    found = pages()
    try:
        to.mkdir(parents=True, exist_ok=True)
        for page in found:
            (to / f"{'-'.join(page.words)}.1").write_text(manual_page(page, __version__), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"the manual pages cannot be written: {error.strerror}", where=str(to)) from error
    say(printable(f"wrote {len(found)} pages to {to}"))
