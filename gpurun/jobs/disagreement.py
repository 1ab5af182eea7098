"""An error about a setting of a job that depends on more than its own text."""

from __future__ import annotations

from gpurun.errors import BadInput


class Disagreement(BadInput):
    """A setting contradicts another one, or what it names is not there.

    Args:
        key: the recipe's key, below the keys that it belongs to: ``constraints``, ``gpus_per_host``.
    """

    def __init__(self, message: str, *key: str, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, where=where, hint=hint)
        self.key = key
