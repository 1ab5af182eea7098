"""Hostfiles: Open MPI's and DeepSpeed's, both with a slot for each GPU."""

from __future__ import annotations

from collections.abc import Iterable

from gpurun.inventory.model import Host


def openmpi(hosts: Iterable[Host]) -> str:
    """``HOST slots=N max_slots=N`` a line. Source: Open MPI's mpirun(1)."""
    return "".join(f"{host.name} slots={host.gpus} max_slots={host.gpus}\n" for host in hosts if host.gpus)


def deepspeed(hosts: Iterable[Host]) -> str:
    """``HOST slots=N`` a line. Source: DeepSpeed's "Resource Configuration (multi-node)"."""
    return "".join(f"{host.name} slots={host.gpus}\n" for host in hosts if host.gpus)
