"""Groups of commands that import a command's module only when the command runs.

Importing all commands and reading their signatures takes longer than most commands take to run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from gpurun.cli import printing

EXAMPLE = "gpurun "
"""A paragraph of a command's help that begins with this is an example command."""
HELP = ("-h", "--help")


class Place(NamedTuple):
    """The place of a command.

    Attributes:
        where: ``module:name`` of the function, or of the Typer application of a group.
        short_help: its line in the group's help. Without it, the help imports the command and shows its first line.
        takes_command: words after ``--`` are a program's argv.
    """

    where: str
    short_help: str | None = None
    takes_command: bool = False


def lazy_group(
    places: Mapping[str, Place],
    *,
    sections: Mapping[str, Mapping[str, Place]] | None = None,
    default: str | None = None,
) -> type[TyperGroup]:
    """Return the class of a group with these commands, in this order.

    Args:
        sections: the same commands below headings, for the help.
        default: the command that runs where the first word is not a command's name.
    """
    of_group = {"places": places, "sections": sections or {"Commands": places}, "default": default}
    return type("LazyGroup", (_LazyGroup,), of_group)


class _Examples(click.Command):
    """A command whose help shows example commands as they are pasted: whole, behind ``$``."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's API
        for paragraph in (self.help or "").split("\n\n"):
            text = " ".join(paragraph.split())
            if text.startswith(EXAMPLE):
                formatter.write(f"\n  $ {text}\n")
            elif text:
                formatter.write_paragraph()
                with formatter.indentation():
                    formatter.write_text(text)


class _LazyGroup(_Examples, TyperGroup):
    places: Mapping[str, Place]
    sections: Mapping[str, Mapping[str, Place]]
    default: str | None

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands.update({name: click.Command(name) for name in self.places})  # for completion

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's API
        return _load(cmd_name, self.places[cmd_name]) if cmd_name in self.places else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((word for word in args if word not in SHARED), None)
        if self.default is not None and not ctx.resilient_parsing:
            stands_alone = first is None and not self.no_args_is_help
            if stands_alone or (first is not None and not self._is_command(ctx, first)):
                args = [self.default, *args]
        return super().parse_args(ctx, args)

    def _is_command(self, ctx: click.Context, word: str) -> bool:
        """Return whether a word is a command's name, or means one. A file or folder of the second kind is a recipe."""
        return word in (*self.places, *HELP) or not (Path(word).exists() or self._meant(ctx, word) is None)

    def _meant(self, ctx: click.Context, word: str) -> str | None:
        from gpurun.cli.foreign import meant  # only a wrong word needs it

        return meant(ctx.command_path, word, tuple(self.places))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.places or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        meant = self._meant(ctx, args[0])
        more = "" if meant is None else f" Did you mean `{meant}`?"
        raise click.UsageError(f"No such command {args[0]!r}.{more}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not all(place.short_help for place in self.places.values()):
            super().format_commands(ctx, formatter)
            return
        widest = max(map(len, self.places))
        for title, some in self.sections.items():
            with formatter.section(title):
                lines = [(name.ljust(widest), place.short_help or "") for name, place in some.items()]
                formatter.write_dl(lines)


def parameters_of(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return the arguments and options of a command as its help shows them: by heading, each with its text.

    ``--help`` stands in the last group of options.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        line = parameter.get_help_record(ctx)
        last = next(reversed(groups), "Arguments")
        other = "Arguments" if isinstance(parameter, click.Argument) else last if last != "Arguments" else "Options"
        if line is not None:
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or other, []).append(line)
    return groups


class _Command(_Examples, TyperCommand):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, lines in parameters_of(self, ctx).items():
            with formatter.section(title):
                formatter.write_dl(lines)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            given = ctx.params.get(parameter.name or "")
            for text in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(text, str) and not _is_text(text):
                    raise click.BadParameter(f"{text!r} is not valid UTF-8.", ctx, parameter)
        return rest


def _is_text(text: str) -> bool:
    """Return whether a word has no bytes that could not be decoded: Python gives them as halves of surrogates."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


class _TakesCommand(_Command):
    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND…]"]


SHARED = ("-q", "--quiet", "--no-color")
"""Options of `gpurun` itself that may also follow a command's name."""


def shared_options() -> list[click.Parameter]:
    """Return those options for a command. Its help does not repeat them."""

    def set_quiet(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        printing.quiet = printing.quiet or value

    def set_no_color(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            os.environ["NO_COLOR"] = "1"

    flag: dict[str, Any] = {"is_flag": True, "expose_value": False, "hidden": True}
    return [
        click.Option(["--quiet", "-q"], callback=set_quiet, **flag),
        click.Option(["--no-color"], callback=set_no_color, **flag),
    ]


@cache
def _load(name: str, place: Place) -> click.Command:
    module, _, attribute = place.where.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        one.command(name, cls=_TakesCommand if place.takes_command else _Command)(found)
        found = one
    command = get_command(found)
    command.params += shared_options()
    command.name, command.short_help = name, place.short_help
    return command
