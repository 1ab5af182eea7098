"""Write what hosts have told a probe into an inventory: for `gpurun inventory probe --write` and `gpurun init`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from gpurun.doctor.compare import Difference
    from gpurun.doctor.survey import Survey
    from gpurun.inventory.model import Inventory


def differing(inventory: Inventory, survey: Survey) -> dict[str, tuple[Difference, ...]]:
    """Return the differences between the inventory and each host."""
    from gpurun.doctor.compare import differences

    found = {}
    for name, hardware in survey.hardware.items():
        host = inventory.by_name[name]
        found[name] = tuple(differences(host, inventory.fabric_of(host), hardware))
    return found


def with_answers(text: bytes, source: Path, survey: Survey, *, keep: bool = False, guess_rest: bool = False) -> bytes:
    """Return an inventory's text with what the hosts have told. A guess that they have answered is none any more.

    Args:
        source: the inventory's file, for messages.
        keep: replace only guesses, and add missing values: a person may have edited the others.
        guess_rest: hosts that have not told probably are as most others. Otherwise their guess stays, and with it the
            guess of all.

    Raises:
        BadInput: a host told something that no inventory can have.
    """
    from gpurun.inventory.imports.guesses import guessed_hosts, guesses, settled
    from gpurun.inventory.load import parse

    now, told = text.decode(), _told(parse(text, source), survey)
    guessed: dict[str, tuple[str, ...]] = {}
    for guess in guesses(now):
        hosts = guessed[guess.key] = guessed_hosts(now, guess, source)
        values = {host: told[host][guess.key] for host in hosts if told.get(host, {}).get(guess.key) is not None}
        unknown = [host for host in hosts if host not in values]
        if values and (guess_rest or not unknown):
            ((most, _),) = Counter(map(str, values.values())).most_common(1)
            now = settled(now, guess, most, unknown)
    differences = differing(parse(now.encode(), source), survey)
    if keep:
        differences = {
            host: tuple(one for one in found if one.stated in (None, ()) or host in guessed.get(one.key, ()))
            for host, found in differences.items()
        }
    return _rewritten(now.encode(), source, differences)


def _told(inventory: Inventory, survey: Survey) -> dict[str, Mapping[str, object]]:
    """Return host → key → the value that the host has."""
    from gpurun.doctor.compare import detected

    hosts = ((inventory.by_name[name], hardware) for name, hardware in survey.hardware.items())
    return {host.name: detected(inventory.fabric_of(host), hardware) for host, hardware in hosts}


def _rewritten(text: bytes, source: Path, differences: Mapping[str, tuple[Difference, ...]]) -> bytes:
    from gpurun.inventory.edit import SetFields, apply
    from gpurun.inventory.settings import from_mapping

    for values, names in _grouped(differences):
        text = apply(text, source, SetFields(tuple(names), from_mapping(values)))
    return text


def _grouped(
    differences: Mapping[str, tuple[Difference, ...]],
) -> Iterable[tuple[dict[str, object], list[str]]]:
    """Return pairs of values and the hosts that have exactly these differences."""
    groups: dict[tuple[tuple[str, object], ...], list[str]] = {}
    for name, found in differences.items():
        if found:
            groups.setdefault(tuple((one.key, one.found) for one in found), []).append(name)
    return [(dict(values), names) for values, names in groups.items()]
