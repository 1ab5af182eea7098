"""Ask a person before a command changes or removes something."""

from __future__ import annotations

import sys

import typer

from gpurun.errors import BadInput

DECLINED = 1
"""The exit code after a person declines a command."""


def agree(question: str, nobody: str, hint: str) -> None:
    """Ask a question on stderr. Return only if the person says yes.

    Args:
        nobody: the error message if stdin is not a terminal.

    Raises:
        BadInput: stdin is not a terminal.
        typer.Exit: the person declined; exit code 1. Ctrl-C exits with 130, as in every command.
    """
    if not sys.stdin.isatty():
        raise BadInput(nobody, hint=hint)
    if not typer.confirm(question, err=True):
        raise typer.Exit(DECLINED)
