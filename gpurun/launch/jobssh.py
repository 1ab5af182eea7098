"""The job's own sshd: it starts ranks on other hosts, although the hosts do not trust each other.

On every host of a gang except the first, a private sshd listens on the fabric's address with an ephemeral host key. It
accepts only the job's ephemeral key, and can do one thing: run a command inside the job's container. horovodrun, in the
first host's container, uses an ``ssh`` that is first on its PATH. This ``ssh`` puts verified host keys before
horovodrun's own ``StrictHostKeyChecking=no`` (OpenSSH: the first value given wins). Each private key is made on the
host that uses it and never leaves it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from gpurun.jobs.spec import Grant, JobSpec

# Elastic gangs with Horovod: the list of hosts for Horovod's driver, and the flags that enable it. Pure.


HOSTS_FILE = "launch/hosts"
"""Below the job's folder on the first host; the script prints it."""
HOSTS_SCRIPT = """#!/bin/sh
# Horovod's discovery script. At first the launcher's own host alone: it shall have rank 0, whose outputs are kept.
if [ -e /tmp/gpurun-hosts-asked ]; then cat /gpurun/hosts; else head -n 1 /gpurun/hosts; fi
: >/tmp/gpurun-hosts-asked
"""
GLOO_TIMEOUT_S = 60
"""How long ranks wait for one that says nothing: it may be on a host that died. Unless the recipe says otherwise."""
ALIVE_S = 5
"""After twice this long without an answer ``ssh`` ends, and with it, for the driver, the ranks of its host."""


def flags(spec: JobSpec, script: str) -> tuple[str, ...]:
    """Return the flags that make horovodrun elastic.

    Args:
        script: the discovery script's path in the container.
    """
    return "--min-np", str(spec.min_gpus), "--max-np", str(spec.gpus), "--host-discovery-script", script


def member_names(grants: Sequence[Grant], joins: Sequence[str]) -> tuple[str, ...]:
    """Return the driver's name for each host: a new name each time it joins (``n3``, ``n3+1``, ``n3+2`` …).

    Args:
        joins: hosts that joined after the start, oldest first.
    """
    return tuple(f"{g.host}+{n}" if (n := joins.count(g.host)) else g.host for g in grants)


def host_of(name: str) -> str:
    """Return the inventory's name of a host from the driver's name."""
    return name.partition("+")[0]


def hosts_text(members: Sequence[Grant], joins: Sequence[str]) -> str:
    """Return the discovery script's output: ``name:slots``, a line for each host."""
    return "".join(f"{name}:{len(g.gpus)}\n" for name, g in zip(member_names(members, joins), members, strict=True))


MOUNT = "/gpurun"
"""Where the job's launch folder is mounted in its containers, read-only."""

SSH_WRAPPER = f"""#!/bin/sh
# A rank on another host learns from its stdin that the launcher is gone: it ends when this ssh does, and not before.
case "$*" in
*" {MOUNT}/bin/rank" | *" {MOUNT}/bin/rank "*)
  pipe=${{GPURUN_RUN:-/nowhere}}/ssh.$$
  if mkfifo "$pipe" 2>/dev/null; then
    exec 0<>"$pipe"
    rm "$pipe"
    echo gpurun >&0
  fi
  ;;
esac
# Host keys stay verified although horovodrun asks for the opposite: the first value given wins.
exec /usr/bin/ssh -F {MOUNT}/ssh/config -o StrictHostKeyChecking=yes "$@"
"""

_LAUNCH = f"""\
PATH={MOUNT}/bin:$PATH
PYTHONPATH=${{PYTHONPATH:+$PYTHONPATH:}}{MOUNT}/python
export PATH PYTHONPATH
exec "$@"
"""

HOLD = """#!/bin/sh
# Main process of the other containers: stays, also after SIGTERM, so that ranks can finish a checkpoint.
trap '' TERM
while :; do sleep 86400 & wait $!; done
"""


def scripts(unset: Sequence[str] = ()) -> dict[str, str]:
    """Return the executables of the launch folder's ``bin``, by name.

    Args:
        unset: variables of the image that the launcher must not see.
    """
    head = "#!/bin/sh\n# Main process of the first container: the launcher, with the job's own ssh first on its PATH.\n"
    return {"ssh": SSH_WRAPPER, "launch": head + unset_line(unset) + _LAUNCH, "hold": HOLD, "hosts": HOSTS_SCRIPT}


def unset_line(names: Sequence[str]) -> str:
    """Return the line of a shell that unsets variables."""
    return f"unset {' '.join(names)}\n" if names else ""


def sshd_config(
    *, folder: str, address: str, port: int, user: str, uid: str, docker_host: str, container: str,
    unset: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return the private sshd's configuration on one host.

    Args:
        folder: the job's folder on the host, absolute.
        user, uid: the account that gpurun uses on the host.
        docker_host: the engine that has the job's container, as ``DOCKER_HOST``.
        container: the container's name.
        unset: variables of the image that a rank must not see.

    StrictModes is off: gpurun itself creates the folder with mode 0700, but a group-writable home directory above it
    would make sshd refuse the key without an error message.

    An sshd of root would admit others, and without PAM it refuses root if root's password is locked, the usual case.
    Root may have another name. An sshd of another account admits nobody else. In AllowUsers an ``@``, as in sssd's
    names, would begin a host: ``?`` stands for it.
    """
    who = [f"AllowUsers {user.replace('@', '?')}", "UsePAM yes"] if uid == "0" else ["UsePAM no"]
    docker = shlex.join(("docker", "--host", docker_host, "exec", "-i", "-e", "GPURUN_STDIN=launcher", container))
    lines = [
        f"ListenAddress {address}:{port}",
        f"HostKey {folder}/sshd/host_key",
        f"AuthorizedKeysFile {folder}/sshd/authorized_keys",
        f"PidFile {folder}/sshd/pid",
        *who,
        "PermitRootLogin prohibit-password",
        "StrictModes no",
        "AuthenticationMethods publickey",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "DisableForwarding yes",
        "PermitTTY no",
        "PermitUserRC no",
        "PermitUserEnvironment no",
        "MaxStartups 4096",
        "MaxSessions 1024",
        "LoginGraceTime 60",
        "ClientAliveInterval 15",
        "ClientAliveCountMax 8",
        "LogLevel INFO",
        f'ForceCommand exec {docker} sh -c "{unset_line(unset).replace(chr(10), "; ")}$SSH_ORIGINAL_COMMAND"',
    ]
    return "\n".join(lines) + "\n"


def client_config(peers: Sequence[tuple[str, str, str, str]], *, port: int, alive_s: int, alive_count: int) -> str:
    """Return the configuration of ``ssh`` in the first container.

    Args:
        peers: for each host: the launcher's name for it, its name, its address, and the user there.
        alive_s: seconds between keep-alive messages.
        alive_count: how many of them may remain unanswered.
    """
    blocks = [
        f"Host {name}\n  HostName {address}\n  User {user}\n  HostKeyAlias {host}\n"
        for name, host, address, user in peers
    ]
    common = [
        "Host *",
        f"  Port {port}",
        f"  IdentityFile {MOUNT}/ssh/id",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {MOUNT}/ssh/known_hosts",
        "  GlobalKnownHostsFile /dev/null",
        "  StrictHostKeyChecking yes",
        "  UpdateHostKeys no",
        "  BatchMode yes",
        "  KexAlgorithms curve25519-sha256",
        f"  ServerAliveInterval {alive_s}",
        f"  ServerAliveCountMax {alive_count}",
        "  LogLevel ERROR",
    ]
    return "\n".join([*blocks, *common]) + "\n"


def known_hosts_lines(host_keys: Sequence[tuple[str, str]]) -> str:
    """Return lines for ``known_hosts``. `host_keys`: (host, public key as ``type base64``). Aliases have no port."""
    return "".join(f"{host} {key}\n" for host, key in host_keys)


def authorized_keys(public_key: str) -> str:
    """Return the one key that may log in; ``restrict`` also disables what DisableForwarding might miss."""
    return f"restrict {public_key}\n"


def passwd(*, user: str, uid: str, gid: str) -> str:
    """Return ``/etc/passwd`` for the containers: ssh and mpirun need a name for their uid."""
    root = "root:x:0:0:root:/root:/bin/sh\n"
    nobody = "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    mine = "" if uid == "0" else f"{user}:x:{uid}:{gid}:{user}:/tmp:/bin/sh\n"
    return root + mine + nobody


def group(*, user: str, gid: str, others: Sequence[tuple[str, str]] = ()) -> str:
    """Return ``/etc/group`` for the containers. `others`: number and name of each supplementary group."""
    known = {"0": "root", "65534": "nogroup", gid: "root" if gid == "0" else user}
    return "".join(f"{name}:x:{number}:\n" for number, name in {**dict(others), **known}.items())
