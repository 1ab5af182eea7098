"""Groups of commands that import a command's module only when the command runs.

Importing all commands and reading their signatures takes longer than most commands take to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import click
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


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


def lazy_group(places: Mapping[str, Place]) -> type[TyperGroup]:
    """Return the class of a group with these commands, in this order."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attrs: Any) -> None:
            super().__init__(**attrs)
            self.commands.update({name: click.Command(name) for name in places})  # for click's suggestions

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's API
            return _load(cmd_name, places[cmd_name]) if cmd_name in places else None

        def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            lines = [(name, place.short_help) for name, place in places.items() if place.short_help]
            if len(lines) < len(places):
                super().format_commands(ctx, formatter)
                return
            with formatter.section("Commands"):
                formatter.write_dl(lines)

    return LazyGroup


class _TakesCommand(TyperCommand):
    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND…]"]


@cache
def _load(name: str, place: Place) -> click.Command:
    module, _, attribute = place.where.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        one.command(name, cls=_TakesCommand if place.takes_command else None)(found)
        found = one
    command = get_command(found)
    command.name, command.short_help = name, place.short_help
    return command
