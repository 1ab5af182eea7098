"""gpurun: gang-scheduled distributed training on bare-metal GPU hosts, over SSH.

import gpurun

job = gpurun.submit(train, kwargs={"lr": 0.1}, gpus=8, image="me/train:1")
job.result()
"""

from __future__ import annotations

__version__ = "0.2.0.dev0"
_PLACES = {
    "cancel": "api.asking", "job": "api.asking", "map": "api.asking", "submit": "api.asking", "jobs": "jobs",
    "Job": "api.job", "RemoteError": "api.job", "NoResult": "api.job",
}  # fmt: skip
__all__ = ["Job", "NoResult", "RemoteError", "cancel", "job", "jobs", "map", "submit"]


def __getattr__(name: str) -> object:
    """Return a part of the Python API. Loads it only when used, because every command imports this package.

    ``gpurun.jobs`` is the package of that name, which can be called.
    """
    if name not in _PLACES:
        raise AttributeError(f"module 'gpurun' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  lazy, like the module it imports

    module = import_module(f"gpurun.{_PLACES[name]}")
    return module if name == "jobs" else getattr(module, name)


def __dir__() -> list[str]:
    """Return the Python API, which notebooks complete."""
    return [*__all__, "__version__"]
