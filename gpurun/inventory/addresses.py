"""Ranges of addresses for ranges of hosts: distribute, split and fold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ruamel.yaml.comments import CommentedMap

from gpurun.documents.problems import shown
from gpurun.errors import BadInput
from gpurun.inventory import roundtrip
from gpurun.inventory.fields import PER_HOST
from gpurun.inventory.hostset import expand, fold
from gpurun.inventory.settings import HostSetting
from gpurun.quantities.counts import count


def shares(setting: HostSetting, hosts: Sequence[str]) -> Mapping[str, str]:
    """Map each host to its address from a range. Raises BadInput if the numbers of addresses and hosts differ."""
    if setting.value is None:
        return {}
    addresses = expand(setting.text) if "[" in setting.text else (setting.text,)
    if len(addresses) != len(hosts):
        given = count(len(addresses), "address", "addresses")
        raise BadInput(
            f"{setting.field} {shown(setting.text)} gives {given} for {count(len(hosts), 'host')}",
            hint="give one address for each host, such as 10.0.1.[1-16]",
        )
    return dict(zip(hosts, addresses, strict=True))


def folded_share(share: Mapping[str, str], hosts: Sequence[str]) -> str:
    """Return the addresses of some of the hosts, as one range. Raises BadInput if a range would change their order."""
    addresses = tuple(share[name] for name in hosts)
    if len(addresses) == 1:
        return addresses[0]
    folded = fold(addresses)
    if expand(folded) != addresses:
        raise BadInput(
            f"the addresses of {fold(hosts)} do not follow the order of the hosts; set each address separately"
        )
    return folded


def with_part(value: CommentedMap, names: tuple[str, ...], chosen: tuple[str, ...]) -> CommentedMap:
    """Reduce an entry's ranges of addresses to those of the chosen hosts. Changes `value`."""
    for field in PER_HOST:
        addresses = expand(str(value[field])) if "[" in str(value.get(field) or "") else ()
        if len(addresses) == len(names):
            part = [at for name, at in zip(names, addresses, strict=True) if name in set(chosen)]
            value[field] = roundtrip.styled_like(fold(part), value[field])
    return value
