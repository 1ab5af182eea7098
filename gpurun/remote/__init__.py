"""SSH sessions, agents on hosts, and bounded parallel calls to many hosts.

`Fleet.open` returns an `Agent` for every `Target` that answers, and a typed failure for every other target.
"""

from gpurun.remote.agent import Agent, RemoteOpFailed, Reply
from gpurun.remote.fleet import Fleet, Results
from gpurun.remote.target import Target

__all__ = ["Agent", "Fleet", "RemoteOpFailed", "Reply", "Results", "Target"]
