"""What a person means by the name of a job or of a sweep: one rule for both. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpurun.errors import BadInput

MOST_NAMED = 5
"""So many jobs or sweeps of one name are listed in an error."""


@dataclass(frozen=True)
class Living:
    """A job or a sweep that has not ended."""

    id: str
    state: str
    since_s: float
    is_mine: bool


class Ambiguous(BadInput):
    """A name, or the beginning of an id, means several jobs or sweeps."""


def meant(
    text: str, things: str, ids: Iterable[str], living: Sequence[Living], newest: Callable[[bool], str | None]
) -> str | None:
    """Return the id that `text` means: an unambiguous beginning of it, or a name. None if nothing matches.

    A name means what has this name and has not ended, else what has it and began last. This user's come before all
    others, so no other user chooses what a name means.

    Args:
        things: ``jobs`` or ``sweeps``, for errors.
        living: those of this name that have not ended.
        newest: returns the newest of this name; with True, the newest of this user's.

    Raises:
        Ambiguous: several match, such as two jobs of one name that have not ended.
    """
    return (
        _the_only(text, things, [each for each in living if each.is_mine])
        or _beginning_with(text, ids)
        or newest(True)
        or _the_only(text, things, living)
        or newest(False)
    )


def _beginning_with(text: str, ids: Iterable[str]) -> str | None:
    """Return the id that begins so, with or without its letter and dash."""
    begins = [each for each in ids if text and (each.startswith(text) or each.startswith(text, 2))]
    if len(begins) > 1:
        raise Ambiguous(
            f"{text!r} is the beginning of several ids: {', '.join(begins[:MOST_NAMED])}",
            hint="give more characters of the id",
        )
    return begins[0] if begins else None


def _the_only(name: str, things: str, living: Sequence[Living]) -> str | None:
    if len(living) > 1:
        each = sorted(living, key=lambda one: one.since_s, reverse=True)
        shown = ", ".join(f"{one.id} ({one.state})" for one in each[:MOST_NAMED])
        more = f" and {len(each) - MOST_NAMED} more" if len(each) > MOST_NAMED else ""
        raise Ambiguous(
            f"{name!r} is the name of {len(each)} {things} that have not ended: {shown}{more}",
            hint="give the id instead of the name",
        )
    return living[0].id if living else None
