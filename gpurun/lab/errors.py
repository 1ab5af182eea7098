"""What can go wrong with a lab, beyond wrong options."""

from __future__ import annotations

from gpurun.errors import BadInput, HostFailure


class LabFailed(HostFailure):
    """The machine refused something the lab needs, or a lab's host did not come up."""


class NotInstalled(BadInput):
    """The machine lacks programs or privileges that a lab needs; nothing was started."""


class NoSuchLab(BadInput):
    """No lab, or no host of it, has this name or is up."""
