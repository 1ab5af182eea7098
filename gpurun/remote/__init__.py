"""SSH sessions, agents on hosts, bounded fan-out.

`Fleet.open` gives an `Agent` for every `Target` that answers and a typed failure for every other.
"""

from gpurun.remote.agent import Agent, RemoteOpFailed, Reply
from gpurun.remote.fleet import Fleet, Results
from gpurun.remote.target import Target

__all__ = ["Agent", "Fleet", "RemoteOpFailed", "Reply", "Results", "Target"]
