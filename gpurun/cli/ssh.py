"""``gpurun ssh``: open a shell on a host over gpurun's own connection."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from typing import NoReturn

import typer

from gpurun.cli.options import HostArgument, InventoryOption
from gpurun.errors import BadInput


def ssh(context: typer.Context, host: HostArgument, inventory: InventoryOption = None) -> None:
    """Open a shell on a host, or run a command on a host.

    The login uses the same user, key, jump hosts and host key check as all gpurun commands.

    gpurun ssh gpu-r1-01 -- nvidia-smi
    """
    from gpurun.cli.inventory_options import cluster
    from gpurun.remote import ssh_argv
    from gpurun.remote.masters import live
    from gpurun.remote.ssh_config import resolve
    from gpurun.remote.target import target_of

    found = cluster(inventory)
    names = found.choose(host)
    if len(names) != 1:
        raise BadInput(
            f"{host!r} names {len(names)} hosts, but gpurun ssh opens a shell on only one host",
            hint="name one host, or use `pdsh` or Ansible for several hosts",
        )
    route = resolve(target_of(names[0], found.inventory))
    command = context.obj or ()
    tty = sys.stdin.isatty() and not command
    become(ssh_argv.terminal(route, live(route), shlex.join(command), tty=tty))


def become(argv: list[str]) -> NoReturn:
    """Replace this process by a program.

    Raises:
        BadInput: the program is not installed, or an argument is too long: Linux allows 128 KiB (execve(2)).
    """
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        hint = "the command is too long: put a part of the command into a file" if error.errno == errno.E2BIG else None
        raise BadInput(f"{argv[0]} cannot start: {error.strerror}", hint=hint) from error
