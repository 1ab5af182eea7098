"""The files that make a lab's host a separate machine: users, names, keys, and the configuration of its sshd.

The functions are pure: text in, text out. `gpurun.lab.inside.root` writes the texts to the host's own disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv4Address

_FIRST_PERSON = 1000  # UID_MIN in login.defs(5)
_NOBODY = 65534


@dataclass(frozen=True)
class User:
    """A user on every host of the lab, in the group that may use Docker."""

    name: str
    uid: int


USERS = (User("train", 1500), User("alice", 1501), User("bob", 1502))
DOCKER_GID = 1490


def passwd(machine: str) -> str:
    """Return ``/etc/passwd``: the machine's system accounts (sshd needs one) and the lab's users."""
    people = (f"{user.name}:x:{user.uid}:{user.uid}::/home/{user.name}:/bin/bash" for user in USERS)
    return _lines(*_system_entries(machine), *people)


def group(machine: str) -> str:
    """Return ``/etc/group`` in the same way; the group ``docker`` is the host's own."""
    system = (line for line in _system_entries(machine) if not line.startswith("docker:"))
    members = ",".join(user.name for user in USERS)
    return _lines(*system, f"docker:x:{DOCKER_GID}:{members}", *(f"{user.name}:x:{user.uid}:" for user in USERS))


def shadow(machine_passwd: str) -> str:
    """Return ``/etc/shadow``: no account has a password, and every account accepts keys."""
    names = [line.split(":")[0] for line in _system_entries(machine_passwd)] + [user.name for user in USERS]
    return _lines(*(f"{name}:*:19000:0:99999:7:::" for name in names))


def hosts(own_name: str, addresses: Mapping[str, IPv4Address], *, resolve_names: bool) -> str:
    """Return ``/etc/hosts``: every name of the lab, or only the host's own name (a fault for doctor to find).

    Without the others, the host's own name is 127.0.1.1, as after Debian's installer.
    """
    known = [f"{address} {name}" for name, address in addresses.items()]
    return _lines("127.0.0.1 localhost", *(known if resolve_names else [f"127.0.1.1 {own_name}"]))


def machine_id(lab: str, host: str) -> str:
    """Return ``/etc/machine-id``: 32 hex digits that are the host's own."""
    return _lines(sha256(f"{lab}/{host}".encode()).hexdigest()[:32])


def sshd_config(sftp_server: str, *, has_penalties: bool) -> str:
    """Return ``/etc/ssh/sshd_config``: keys only, and many sessions at once (sshd_config(5)).

    Args:
        has_penalties: this sshd blocks addresses after failed logins (OpenSSH 9.8 and later). In a lab, all users
            connect from one address, and some tests fail to log in on purpose.
    """
    return _lines(
        *(["PerSourcePenalties no"] if has_penalties else []),
        "HostKey /etc/ssh/ssh_host_ed25519_key",
        "AuthenticationMethods publickey",
        "PermitRootLogin no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM yes",
        "UseDNS no",
        "PrintMotd no",
        "PrintLastLog no",
        "MaxStartups 100:30:300",
        "MaxSessions 100",
        "LogLevel VERBOSE",
        f"Subsystem sftp {sftp_server}",
    )


def pam_sshd() -> str:
    """Return ``/etc/pam.d/sshd``: ``/etc/environment`` and ``limits.conf`` apply, as on a Debian host.

    Debian's own file also requires ``pam_loginuid``, which fails if the machine itself is a container.
    """
    return _lines(
        "auth     required pam_deny.so",
        "account  required pam_unix.so",
        "session  required pam_env.so",
        "session  required pam_limits.so",
        "session  required pam_unix.so",
        "password required pam_deny.so",
    )


def environment(variables: Mapping[str, str]) -> str:
    """Return ``/etc/environment`` (pam_env(8)): the variables of every session on the host."""
    return _lines(*(f'{name}="{value}"' for name, value in variables.items()))


def _system_entries(database: str) -> list[str]:
    """Return the lines of a passwd(5) or group(5) file whose number is not that of a regular user."""
    entries = []
    for line in database.splitlines():
        fields = line.split(":")
        if len(fields) >= 4 and fields[2].isdigit() and not _FIRST_PERSON <= int(fields[2]) < _NOBODY:
            entries.append(line)
    return entries


def _lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)
