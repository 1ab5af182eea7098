"""SSH sessions, agents on hosts, and bounded parallel calls to many hosts.

`Fleet.open` returns an `Agent` for every `Target` that answers, and a typed failure for every other target.

fleet, opening       many hosts in parallel
agent, operation, answers
                     one host: calls, streams, and the check of every answer
bootstrap            the agent's code, sent over stdin
ssh_config, openssh, target, transport
                     how a host is reached, in OpenSSH's own words
session, paramiko…, jumps, proxy, keys
                     Paramiko's sessions
system_ssh, ssh_argv, ssh_said, masters
                     the machine's own ssh
host_key, known_hosts, trust
                     host keys: verified, never trusted by chance
"""

from gpurun.remote.agent import Agent, RemoteOpFailed, Reply
from gpurun.remote.fleet import Fleet, Results
from gpurun.remote.target import Target

__all__ = ["Agent", "Fleet", "RemoteOpFailed", "Reply", "Results", "Target"]
