"""The help of every command as data, for `gpurun man` and the reference pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
from typer.main import get_command

from gpurun.cli.lazy import EXAMPLE, parameters_of


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
