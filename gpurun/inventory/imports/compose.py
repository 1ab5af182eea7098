"""Write a draft as a readable inventory file: defaults first, equal hosts folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.hostset import expand, fold
from gpurun.inventory.imports.draft import Draft
from gpurun.inventory.settings import HostSetting, parse
from gpurun.inventory.tree import InventoryTree

_COMMON = ("generation", "gpus", "user", "port", "gpu_model", "gpu_memory_mib")


def compose(draft: Draft, given: Mapping[str, str], fabric: Mapping[str, str]) -> str:
    """Return the text of an inventory.

    Args:
        given: the user's values for hosts without a value in the source: ``gpus``, ``generation``, …
        fabric: the keys of the single fabric as YAML: ``kind``, ``interface``, ``hcas``.
    If a required value is in neither, gpurun guesses it and adds a note to the draft.
    """
    racks = draft.guess_racks()
    defaults = _defaults(draft, given)
    names = _fabric_names(draft, str(fabric["kind"]), defaults)
    wires = f"{{{', '.join(f'{key}: {value}' for key, value in fabric.items())}}}"
    lines = [
        f"# Imported from {draft.source.encode('unicode_escape').decode()} by gpurun inventory import.",
        *(f"# Guessed: {guess}" for guess in draft.guessed),
        "version: 1",
        f"defaults: {{{', '.join(f'{key}: {text}' for key, text in defaults.items())}}}",
        "fabrics:",
        *(f"  {name}: {wires}" for name in names),
    ]
    if draft.ssh_config:
        lines.append(f"ssh_config: {_quoted(draft.ssh_config)}")
    tree = InventoryTree("\n".join([*lines, "racks:", ""]))
    for rack in dict.fromkeys(racks.values()):
        members = [host for host in draft.values if racks[host] == rack]
        for hosts, settings in grouped(draft, members, defaults):
            tree.add(hosts, rack, settings)
    return tree.merged()


def _fabric_names(draft: Draft, kind: str, defaults: dict[str, str]) -> list[str]:
    """Return the fabrics that hosts name, or one fabric named by its kind. Adds the most common one to `defaults`."""
    named = Counter(values["fabric"].text for values in draft.values.values() if "fabric" in values)
    if not named:
        return [kind]
    draft.guess(f"kind {kind} for every fabric: {', '.join(named)}")
    if named.total() < len(draft.values):
        named[kind] += len(draft.values)
    defaults["fabric"] = written("fabric", named.most_common(1)[0][0])
    return list(named)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _defaults(draft: Draft, given: Mapping[str, str]) -> dict[str, str]:
    """Return the values of most hosts, and the required values for hosts without a value in the source."""
    defaults = dict(given)
    for key in _COMMON:
        texts = Counter(values[key].text for values in draft.values.values() if key in values)
        missing = [name for name, values in draft.values.items() if key not in values]
        if key in defaults:
            continue
        if texts and (not missing or key in ("gpus", "generation")):
            defaults[key] = texts.most_common(1)[0][0]
            if missing:
                draft.guess(f"{key} {defaults[key]} for {fold(missing)}, as most others have")
        elif key in ("gpus", "generation"):
            defaults[key] = {"gpus": "1", "generation": "unknown"}[key]
            draft.guess(f"{key} {defaults[key]} for every host: the source does not say")
    return {key: written(key, text) for key, text in defaults.items()}


def written(key: str, text: str) -> str:
    """Return a value as YAML has it."""
    (setting,) = parse([f"{key}={text}"])
    plain = isinstance(setting.value, int) or text.replace("-", "").replace("_", "").isalpha()
    return text if plain else _quoted(text)


def grouped(
    draft: Draft, hosts: Sequence[str], defaults: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], tuple[HostSetting, ...]]]:
    """Group equal hosts of a rack; fold their addresses if they follow the order of the names."""
    alike: dict[tuple[tuple[HostSetting, ...], tuple[str, ...]], list[str]] = {}
    for host in hosts:
        own = draft.values[host]
        kept = tuple(s for key, s in own.items() if key not in PER_HOST and defaults.get(key) != _written_own(key, s))
        alike.setdefault((kept, tuple(key for key in PER_HOST if key in own)), []).append(host)
    for (settings, addressed), names in alike.items():
        ordered = expand(fold(names))
        folded = _folded_addresses(draft, ordered)
        if folded is not None:
            yield ordered, (*settings, *folded)
            continue
        for name in names:
            own = draft.values[name]
            yield (name,), (*settings, *(own[key] for key in addressed))


def _written_own(key: str, setting: HostSetting) -> str:
    return "" if key.startswith("labels.") else written(key, setting.text)


def _folded_addresses(draft: Draft, names: Sequence[str]) -> tuple[HostSetting, ...] | None:
    """Return the hosts' addresses as ranges; None if they do not form a range."""
    settings: list[HostSetting] = []
    for key in PER_HOST:
        texts = [draft.values[name][key].text for name in names if key in draft.values[name]]
        if not texts:
            continue
        if len(texts) < len(names) or any(":" in text for text in texts):
            return None
        folded = fold(texts) if len(texts) > 1 else texts[0]
        if len(texts) > 1 and list(expand(folded)) != texts:
            return None
        settings.extend(parse([f"{key}={folded}"]))
    return tuple(settings)
