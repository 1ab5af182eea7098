"""One host of a lab, from the machine's side: start and stop it, and run commands in it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpurun.lab import docker_socket, network
from gpurun.lab.errors import LabFailed, NoSuchLab
from gpurun.lab.process import ProcessId
from gpurun.lab.requirements import SYSTEM_PATH
from gpurun.lab.spawn import spawn_init
from gpurun.lab.spec import LabHost

_READY_TIMEOUT_S = 90.0
_STOP_GRACE_S = 8.0
_GONE_TIMEOUT_S = 10.0
_POLL_S = 0.03
_SSH_PORT = 22


@dataclass(frozen=True)
class RunResult:
    """The result of a command in a host. Output is bytes, because a host may print anything."""

    code: int
    stdout: bytes
    stderr: bytes


def start(host: LabHost, boot_file: Path, *, record: Path, log: Path) -> ProcessId:
    """Start a host. Returns its process 1 immediately. Its network namespace must exist."""
    return spawn_init(
        "gpurun.lab.inside.host",
        [str(boot_file)],
        record=record,
        log=log,
        netns=network.NETNS_FOLDER / host.netns,
    )


def wait_ready(host: LabHost, init: ProcessId, log: Path) -> None:
    """Wait until the host's sshd and dockerd answer.

    Raises:
        LabFailed: they did not answer in time, or the host ended.
    """
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not is_ready(init):
        if not init.alive():
            raise LabFailed("the host stopped during its start", host=host.name, hint=f"read the end of the log {log}")
        if time.monotonic() > deadline:
            raise LabFailed(
                f"sshd and dockerd did not answer within {_READY_TIMEOUT_S:.0f} s",
                host=host.name,
                hint=f"`gpurun lab run {host.name} -- tail /var/log/sshd.log /var/log/dockerd.log` shows why",
            )
        time.sleep(_POLL_S)


def is_ready(init: ProcessId) -> bool:
    """Return True if both services of a running host answer. Checks from inside, because the network may be cut."""
    return docker_socket.answers(Path(f"/proc/{init.pid}/root/run/docker.sock")) and listens(init, _SSH_PORT)


def listens(init: ProcessId, port: int) -> bool:
    """Return True if a process in the host listens on this TCP port (``/proc/PID/net/tcp``: state 0A)."""
    try:
        rows = Path(f"/proc/{init.pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    return any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows)


def stop(record: Path, netns: str) -> None:
    """Shut a host down: first its services, then all other processes. No process is left on return."""
    init = ProcessId.load(record)
    if init is not None:
        init.send(signal.SIGTERM)
        init.wait(_STOP_GRACE_S)
    kill(record, netns)


def kill(record: Path, netns: str) -> None:
    """Kill all processes of a host: its process 1, and every process in its network namespace.

    If the starting command was killed, its process may not be in the namespace or in the record yet. So `kill` also
    looks for the record's path in the arguments of processes.

    Raises:
        LabFailed: a process did not end. SIGKILL fails only for processes stuck in the kernel.
    """
    init = ProcessId.load(record)
    if init is not None:
        init.send(signal.SIGKILL)
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while living := _living(init, netns, record):
        for process in living:
            process.send(signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabFailed(f"processes do not end after SIGKILL: {[process.pid for process in living]}", where=netns)
        time.sleep(_POLL_S)
    record.unlink(missing_ok=True)


def processes(netns: str, record: Path | None = None) -> list[ProcessId]:
    """Return every process in a host's network namespace. Processes in nested namespaces die with the host's process 1.

    Args:
        record: also return the processes with which `spawn_init` starts the host of this record.
    """
    place = network.NETNS_FOLDER / netns
    inode = place.stat().st_ino if place.exists() else None
    found = []
    for entry in Path("/proc").iterdir():
        try:
            wanted = entry.name.isdigit() and ((entry / "ns/net").stat().st_ino == inode or _starts(entry, record))
        except OSError:  # the process has ended
            continue
        if wanted and (process := ProcessId.of(int(entry.name))):
            found.append(process)
    return found


def _starts(entry: Path, record: Path | None) -> bool:
    return record is not None and os.fsencode(record) in (entry / "cmdline").read_bytes().split(b"\0")


def _living(init: ProcessId | None, netns: str, record: Path) -> list[ProcessId]:
    found = processes(netns, record)
    return [*found, init] if init and init.alive() else found


def enter_argv(init: ProcessId, argv: Sequence[str], *, user: str = "root") -> list[str]:
    """Return the command line that runs `argv` inside a host, with the environment of a login."""
    become = [] if user == "root" else ["runuser", "--user", user, "--"]
    home = "/root" if user == "root" else f"/home/{user}"
    variables = {"PATH": SYSTEM_PATH, "HOME": home, "USER": user, "LOGNAME": user, "LC_ALL": "C.UTF-8"}
    variables.update(_environment_file(init))
    return [
        *("nsenter", "--target", str(init.pid)),
        *("--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"),
        *("env", "--ignore-environment", *(f"{name}={value}" for name, value in variables.items())),
        *become,
        *argv,
    ]


def run(
    init: ProcessId, argv: Sequence[str], *, user: str = "root", stdin: bytes = b"", timeout_s: float | None = None
) -> RunResult:
    """Run a command inside a host to its end.

    Raises:
        LabFailed: it ran past `timeout_s`.
    """
    try:
        done = subprocess.run(
            enter_argv(init, argv, user=user), input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LabFailed(f"{argv[0]} still runs after {timeout_s} s") from error
    return RunResult(done.returncode, done.stdout, done.stderr)


def memory_mib(netns: str) -> float:
    """Return the memory of this host's processes in MiB: private memory plus their part of shared memory (PSS)."""
    return sum(_pss_kib(process.pid) for process in processes(netns)) / 1024


def _pss_kib(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)


def _environment_file(init: ProcessId) -> Mapping[str, str]:
    try:
        text = Path(os.fsdecode(f"/proc/{init.pid}/root/etc/environment")).read_text()
    except OSError as error:
        raise NoSuchLab("the host is off", hint="`gpurun lab boot HOST` switches the host on") from error
    return {
        name: value.strip('"') for name, _equals, value in (line.partition("=") for line in text.splitlines()) if name
    }
