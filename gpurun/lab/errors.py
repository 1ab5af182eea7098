"""Errors of a lab, except wrong options."""

from __future__ import annotations

from gpurun.errors import BadInput, HostFailure


class LabFailed(HostFailure):
    """The machine refused an operation that the lab needs, or a host of the lab did not start."""


class NotInstalled(BadInput):
    """The machine lacks programs or privileges for a lab; the lab started nothing."""


class NoSuchLab(BadInput):
    """No running lab, or no running host in it, has this name."""
