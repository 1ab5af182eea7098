"""Options and arguments that several commands share: each is defined here, once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import click
import typer

from gpurun.cli import completion
from gpurun.documents.plain import shown
from gpurun.moments import moment, now
from gpurun.quantities import duration_s, rate_bps, size_mib

# The types of options whose values are times, moments, sizes or rates: each is read in one way, whatever the command.


class Written(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A type whose values people write as a text.

    Args:
        parse: returns the value. A ValueError refuses the text; its message completes "VALUE …".
    """

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Return the value of a text; a default is a value already."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{shown(value)} {error}", param, ctx)


def _when_s(text: str) -> float:
    return moment(text, now()).timestamp()


TIME = Written("TIME", duration_s)
"""Seconds, more than 0."""
TIME_OR_0 = Written("TIME", partial(duration_s, zero=True))
"""Seconds, 0 or more."""
WHEN = Written("WHEN", _when_s)
"""Seconds since the epoch."""
SIZE = Written("SIZE", size_mib)
"""MiB."""
RATE = Written("RATE", rate_bps)
"""Bits per second."""


HOST_SET = "Host set, such as @rack:r1 or 'gpu-r1-[01-16]&!@cordoned'. Quote a host set that contains [ ] & ! * or ?."
JOB = "JOB is a job's id, the beginning of the id, the job's name, or @last for the job that you submitted last."

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
InventoryOption = Annotated[
    str | None,
    typer.Option(
        "--inventory",
        "-i",
        metavar="FILE",
        help="Use this inventory file. `gpurun config` shows the default file.",
        show_default=False,
    ),
]
IdleOption = Annotated[
    float,
    typer.Option(
        "--idle", click_type=TIME, help="Stop the server after this time without a request.", show_default="1h"
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help=JOB, autocompletion=completion.jobs)]
JobsArgument = Annotated[list[str], typer.Argument(metavar="JOB…", help=JOB, autocompletion=completion.jobs)]
SomeJobsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB…]", help=JOB, show_default=False, autocompletion=completion.jobs),
]
HostsArgument = Annotated[str, typer.Argument(metavar="HOSTS", help=HOST_SET, autocompletion=completion.hosts)]
HostArgument = Annotated[
    str, typer.Argument(metavar="HOST", help="Host of the inventory.", autocompletion=completion.hosts)
]
OnlyHostsOption = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="HOSTS", help="With --caches, select only the caches on these hosts.", show_default=False,
        autocompletion=completion.hosts,
    ),
]  # fmt: skip
SomeHostsArgument = Annotated[
    str | None,
    typer.Argument(metavar="[HOSTS]", help=HOST_SET, show_default=False, autocompletion=completion.hosts),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show how the inventory would change.")]
