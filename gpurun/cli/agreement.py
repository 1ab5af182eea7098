"""Ask a person before a command changes or removes something."""

from __future__ import annotations

import sys

import typer

from gpurun.errors import BadInput

DECLINED = 1
"""The exit code of a command that a person declined."""


def agree(question: str, nobody: str, hint: str) -> None:
    """Ask a question on stderr; return only after yes.

    Args:
        nobody: the error without a terminal.

    Raises:
        BadInput: nobody is there to be asked.
        typer.Exit: the person declined; exit code 1. Ctrl-C is 130, as everywhere.
    """
    if not sys.stdin.isatty():
        raise BadInput(nobody, hint=hint)
    if not typer.confirm(question, err=True):
        raise typer.Exit(DECLINED)
