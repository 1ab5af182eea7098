"""SSH sessions, agents on hosts, and bounded parallel calls to many hosts.

`Fleet.open` returns an `Agent` for every `Target` that answers, and a typed failure for every other target.

fleet, opening       many hosts in parallel
agent, answers       one host: the agent's code, calls, streams, and the check of every answer
route                how a host is reached, in OpenSSH's own words
session              Paramiko's sessions
system_ssh, program  the machine's own ssh
known_hosts, trust   host keys: verified, never trusted by chance
"""

from gpurun.remote.agent import Agent, RemoteOpFailed, Reply
from gpurun.remote.fleet import Fleet, Results
from gpurun.remote.route import Target

__all__ = ["Agent", "Fleet", "RemoteOpFailed", "Reply", "Results", "Target"]
