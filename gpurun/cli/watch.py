"""``gpurun status --watch``: show the use of every leased GPU, live, over one SSH session per host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.table import Table
    from rich.text import Text

    from gpurun.facts.samples import GpuSample, HostSample
    from gpurun.inventory.model import Inventory

REFRESH_S = 0.5
HOT_C, FULL = 85, 0.95


def watch(inventory: Inventory, leased: Callable[[], Mapping[str, Mapping[int, str]]], interval_s: float = 2.0) -> None:
    """Show leased GPUs until Ctrl-C, also on hosts that get a lease later. Retries hosts that fail.

    Args:
        leased: returns host → GPU → job; called at every refresh.
    """
    from rich.live import Live

    from gpurun.cli.tables import console
    from gpurun.remote.fleet import Fleet
    from gpurun.remote.target import target_of
    from gpurun.top.sampling import Sampling

    now = leased()

    def opened(hosts: Iterable[str]) -> Fleet:
        return Fleet.open([target_of(inventory.by_name[host], inventory) for host in hosts])

    sampling = Sampling(opened, lambda: list(now), interval_s)
    sampling.start()
    try:
        with Live(console=console(), auto_refresh=False, screen=False) as live:
            while True:
                live.update(table(now, sampling.latest()), refresh=True)
                time.sleep(REFRESH_S)
                now = leased()
    except KeyboardInterrupt:
        return
    finally:
        sampling.close()


def table(leased: Mapping[str, Mapping[int, str]], samples: Mapping[str, HostSample]) -> Table:
    """Return one line per leased GPU. A host that does not answer has one line with the reason."""
    from rich.text import Text

    from gpurun.cli.printing import printable
    from gpurun.cli.tables import table_of

    found = table_of("HOST", "GPU", "JOB", "USE", "MEMORY", "TEMP", "POWER", "")
    for host, gpus in leased.items():
        sample = samples.get(host)
        if sample is None or sample.problem:
            why = sample.problem if sample else "connecting"
            found.add_row(
                host, _indices(gpus), "", "", "", "", "", Text(printable(why), style="red" if sample else "dim")
            )
            continue
        by_index = {gpu.index: gpu for gpu in sample.gpus}
        for index, job in sorted(gpus.items()):
            gpu = by_index.get(index)
            if gpu is None:
                found.add_row(host, str(index), job, "", "", "", "", Text("does not answer", style="red"))
            else:
                found.add_row(host, str(index), job, *_figures(gpu))
    return found


def _figures(gpu: GpuSample) -> tuple[str | Text, ...]:
    from rich.text import Text

    from gpurun.cli.printing import printable

    use = "–" if gpu.utilization_percent is None else f"{gpu.utilization_percent} %"
    memory, style = "–", ""
    if gpu.memory_used_mib is not None and gpu.memory_mib:
        memory = f"{gpu.memory_used_mib / 1024:.1f} of {gpu.memory_mib / 1024:.1f} GiB"
        style = "yellow" if gpu.memory_used_mib > gpu.memory_mib * FULL else ""
    hot = gpu.temperature_c is not None and gpu.temperature_c >= HOT_C
    temperature = "–" if gpu.temperature_c is None else f"{gpu.temperature_c} °C"
    power = "–" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
    trouble = gpu.problem or ", ".join(gpu.throttle)
    return (
        Text(use),
        Text(memory, style=style),
        Text(temperature, style="red" if hot else ""),
        power,
        Text(printable(trouble), style="red"),
    )


def _indices(gpus: Mapping[int, str]) -> str:
    return ",".join(map(str, sorted(gpus)))
