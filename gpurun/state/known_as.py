"""By what gpurun knows a machine: the name of a host, the address, and the id that the machine itself gives. Pure.

Inventories differ between users and change with time: two names may mean one machine, and one name two machines. So
what belongs to a machine, such as a cordon, is compared by the id. If one of the two ids is unknown, the name or the
address must be equal: rather one cordon too many than a job on a broken host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownAs:
    """What is known of the machine behind a host of an inventory.

    Attributes:
        host: its name in the inventory.
        machine: the address that SSH connects to (`gpurun.inventory.model.Host.machine`); "" = unknown.
        id: what the machine calls itself; "" = unknown.
    """

    host: str
    machine: str = ""
    id: str = ""


class KnownMachines:
    """Machines by key, to be found by any name of theirs.

    Args:
        machines: pairs of a key and a machine.
    """

    def __init__(self, machines: Iterable[tuple[str, KnownAs]]) -> None:
        self._known: dict[str, KnownAs] = dict(machines)
        self._by_id: dict[str, list[str]] = {}
        self._by_machine: dict[str, list[str]] = {}
        self._by_host: dict[str, list[str]] = {}
        for key, known in self._known.items():
            self._by_id.setdefault(known.id, []).append(key)
            self._by_machine.setdefault(known.machine, []).append(key)
            self._by_host.setdefault(known.host, []).append(key)

    def same(self, known: KnownAs, *, by_name: bool = True) -> Iterator[str]:
        """Yield the keys of the entries that are this machine, the surest first; perhaps one twice.

        Args:
            by_name: an equal name is enough while one of the ids is unknown.
        """
        if known.id:
            yield from self._by_id.get(known.id, ())
        candidates = [*(self._by_machine.get(known.machine, ()) if known.machine else ())]
        candidates += self._by_host.get(known.host, ()) if by_name else ()
        for key in candidates:
            if not (known.id and self._known[key].id):
                yield key
