"""Start process 1 of new namespaces. Its record exists before it does anything."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpurun.lab.errors import LabFailed
from gpurun.lab.process import ProcessId

_RECORD_TIMEOUT_S = 20.0


def spawn_init(
    module: str, arguments: Sequence[str], *, record: Path, log: Path, netns: Path | None = None
) -> ProcessId:
    """Start ``python -m MODULE RECORD TELLER GATE ARGUMENTS…`` as process 1 of its own namespaces.

    The process always has its own mount and PID namespace. With `netns`, it also has its own UTS and IPC namespaces,
    inside that network namespace. It is not a child of the caller, and outlives it after its record exists.

    Args:
        record: file to which the process writes its `ProcessId` before anything else.
        log: file to which its own messages are appended.
        netns: file of the network namespace to enter; None = the machine's.

    Raises:
        LabFailed: the process ended before it wrote its record.
    """
    record.unlink(missing_ok=True)
    enter = ["nsenter", f"--net={netns}"] if netns else []
    own_names = ["--uts", "--ipc"] if netns else []
    heard, teller = os.pipe()
    gate, opener = os.pipe()
    try:
        with log.open("ab") as said:
            subprocess.run(
                [
                    *("setsid", "--fork"),
                    *enter,
                    *("unshare", "--mount", "--propagation=slave", "--pid", "--fork", "--kill-child", *own_names),
                    *(sys.executable, "-m", module, str(record), str(teller), str(gate), *arguments),
                ],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=(teller, gate),
                check=True,
            )
        os.close(teller)
        told = select.select([heard], [], [], _RECORD_TIMEOUT_S)[0] and os.read(heard, 1)
        init = ProcessId.load(record)
        if not told or init is None:
            raise LabFailed(f"a namespace did not start: {_last_line(log)}", hint=f"read the end of the log {log}")
        os.write(opener, b"!")
    except (OSError, subprocess.CalledProcessError) as error:
        raise LabFailed(f"a namespace did not start: {error}", hint=f"read the end of the log {log}") from error
    finally:
        for end in (heard, gate, opener):
            os.close(end)
    return init


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the command printed no message"
