"""gpurun: gang-scheduled distributed training on bare-metal GPU hosts, over SSH.

import gpurun

job = gpurun.submit(train, kwargs={"lr": 0.1}, gpus=8, image="me/train:1")
job.result()
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
_PLACES = {
    "job": "asking", "map": "asking", "submit": "asking", "Job": "job", "RemoteError": "results", "NoResult": "results",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return a part of the Python API. Loads it only when used, because every command imports this package."""
    if name not in _PLACES:
        raise AttributeError(f"module 'gpurun' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  lazy, like the module it imports

    return getattr(import_module(f"gpurun.api.{_PLACES[name]}"), name)
