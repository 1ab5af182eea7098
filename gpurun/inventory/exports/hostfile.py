"""Hostfiles of Open MPI and DeepSpeed, with one slot per GPU."""

from __future__ import annotations

from collections.abc import Iterable

from gpurun.inventory.model import Host


def openmpi(hosts: Iterable[Host]) -> str:
    """Return one line ``HOST slots=N max_slots=N`` per host. Source: Open MPI's mpirun(1)."""
    return "".join(f"{host.name} slots={host.gpus} max_slots={host.gpus}\n" for host in hosts if host.gpus)


def deepspeed(hosts: Iterable[Host]) -> str:
    """Return one line ``HOST slots=N`` per host. Source: DeepSpeed's "Resource Configuration (multi-node)"."""
    return "".join(f"{host.name} slots={host.gpus}\n" for host in hosts if host.gpus)
