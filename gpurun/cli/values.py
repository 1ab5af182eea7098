"""The types of options whose values are times, moments, sizes or rates: each is read in one way, whatever the command.

The name of a type is the word for its value in the help.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click

from gpurun.documents.problems import shown
from gpurun.quantities.local_time import now
from gpurun.quantities.moments import moment
from gpurun.quantities.rates import rate_bps
from gpurun.quantities.sizes import size_mib
from gpurun.quantities.times import duration_s


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
