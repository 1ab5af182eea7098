"""What makes a lab's host a machine of its own: its users, names, keys and the configuration of its sshd.

Pure text in, pure text out. `gpurun.lab.inside.root` writes it onto the host's own disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address

_FIRST_PERSON = 1000  # UID_MIN in login.defs(5)
_NOBODY = 65534


@dataclass(frozen=True)
class User:
    """A person on every host of the lab, in the group that may talk to Docker."""

    name: str
    uid: int


USERS = (User("train", 1500), User("alice", 1501), User("bob", 1502))
DOCKER_GID = 1490


def passwd(machine: str) -> str:
    """``/etc/passwd``: the machine's system accounts (sshd needs one) and the lab's users."""
    people = (f"{user.name}:x:{user.uid}:{user.uid}::/home/{user.name}:/bin/bash" for user in USERS)
    return _lines(*_system_entries(machine), *people)


def group(machine: str) -> str:
    """``/etc/group``, likewise; the group ``docker`` is the host's own."""
    system = (line for line in _system_entries(machine) if not line.startswith("docker:"))
    members = ",".join(user.name for user in USERS)
    return _lines(*system, f"docker:x:{DOCKER_GID}:{members}", *(f"{user.name}:x:{user.uid}:" for user in USERS))


def shadow(machine_passwd: str) -> str:
    """``/etc/shadow``: no password opens any account, and none is locked for keys."""
    names = [line.split(":")[0] for line in _system_entries(machine_passwd)] + [user.name for user in USERS]
    return _lines(*(f"{name}:*:19000:0:99999:7:::" for name in names))


def hosts(own_name: str, addresses: Mapping[str, IPv4Address], *, resolve_names: bool) -> str:
    """``/etc/hosts``: every name of the lab, or (a fault that doctor should find) only the host's own.

    Without the others, the own name is 127.0.1.1, as Debian's installer leaves it.
    """
    known = [f"{address} {name}" for name, address in addresses.items()]
    return _lines("127.0.0.1 localhost", *(known if resolve_names else [f"127.0.1.1 {own_name}"]))


def sshd_config(sftp_server: str, *, has_penalties: bool) -> str:
    """``/etc/ssh/sshd_config``: keys only, and room for a fleet of sessions at once (sshd_config(5)).

    Args:
        has_penalties: this sshd shuts out addresses that failed to log in (OpenSSH 9.8 and later); in a lab all
            people come from one address, and some are there to fail.
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
    """``/etc/pam.d/sshd``: ``/etc/environment`` and ``limits.conf`` hold, as on a Debian host.

    Debian's own file also wants ``pam_loginuid``, which fails where the machine itself is a container.
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
    """``/etc/environment`` (pam_env(8)): what every session on the host has set."""
    return _lines(*(f'{name}="{value}"' for name, value in variables.items()))


def _system_entries(database: str) -> list[str]:
    """Lines of a passwd(5) or group(5) file whose number belongs to no person."""
    entries = []
    for line in database.splitlines():
        fields = line.split(":")
        if len(fields) >= 4 and fields[2].isdigit() and not _FIRST_PERSON <= int(fields[2]) < _NOBODY:
            entries.append(line)
    return entries


def _lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)
