"""A cluster of real sshd and dockerd hosts on one machine."""

from gpurun.lab.lab import Lab
from gpurun.lab.spec import LabSpec

__all__ = ["Lab", "LabSpec"]
