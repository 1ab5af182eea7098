"""Programs of the site on this host: ``health``, and ``prolog`` and ``epilog`` around each attempt of a job.

They run as the SSH user, from an argv, never through a shell. When the time of a hook is over, or nobody waits for it,
its whole session is killed. Of its output, only the last lines are kept, printable.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

from gpurun.node.agent import processes
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.agent.processes import run
from gpurun.node.job import parts

MOST_BYTES = 16 << 10
MOST_LINES, MOST_LETTERS = 5, 300
"""Of its output: the last lines, each shortened."""
EXEC_S = 1.0
"""The longest wait for processes that are in the middle of an exec, where the kernel shows no environment."""
CLAIMED_FILE, PROLOG_FILE, EPILOG_FILE = "claimed", "prolog", "epilog"
"""In a job's folder: the attempt that has held its GPUs here, whose prolog has succeeded, or whose epilog has ended."""


class ForJob(NamedTuple):
    """The attempt that a prolog or epilog runs for, as its environment names it.

    Attributes:
        gpus: the indices of its GPUs on this host.
    """

    job: str
    attempt: int
    user: str
    gpus: List[int]

    def environment(self, hook: str) -> Dict[str, str]:
        """Return the variables for a hook."""
        return {
            "GPURUN_HOOK": hook,
            "GPURUN_JOB": self.job,
            "GPURUN_ATTEMPT": str(self.attempt),
            "GPURUN_USER": self.user,
            "GPURUN_GPUS": ",".join(map(str, self.gpus)),
        }


def health(call: Call, argv: List[str], limit_s: float) -> Dict[str, str]:
    """Run the site's check of this host, and end what it leaves, also outside of its session.

    Returns:
        ``{"said"}``: why it failed, empty if it exited with 0.
    """
    mine = {"GPURUN_HOOK": "health", "GPURUN_HOOK_RUN": os.urandom(8).hex()}
    try:
        return {"said": _run(call, argv, mine, limit_s)}
    finally:
        processes.end(_begun_with(lambda found: found.get("GPURUN_HOOK_RUN") == mine["GPURUN_HOOK_RUN"]), grace_s=0.5)


def prolog(call: Call, argv: List[str], limit_s: float, **job: Any) -> None:
    """Run the site's prolog for an attempt, unless it has succeeded here before. `job` is a `ForJob`.

    If the agent ends meanwhile, it ends the prolog, and the next supervisor runs it again.

    Raises:
        OpError: ``prolog`` if it fails; ``fenced`` if the job's folder is no longer this attempt's.
    """
    me = ForJob(**job)
    path = os.path.join(parts.job_folder(me.job), PROLOG_FILE)
    with parts.held_by(call, me.job, me.attempt):
        if _number_in(path) == me.attempt:
            return
    said = _run(call, argv, me.environment("prolog"), limit_s)
    if said:
        raise OpError("prolog", said)
    with parts.held_by(call, me.job, me.attempt):
        _write_number(path, me.attempt)


def begin_hooks(job: str, attempt: int) -> None:
    """Note that an attempt holds its GPUs here: from now on, its end has an epilog."""
    try:
        _write_number(os.path.join(parts.job_folder(job), CLAIMED_FILE), attempt)
    except OSError:
        pass  # fenced, or a full disk, on which no container starts


def run_epilog(call: Call, argv: List[str], limit_s: float, **job: Any) -> Dict[str, str]:
    """Run the site's epilog after an attempt, unless it has ended here before. `job` is a `ForJob`.

    An attempt that never held its GPUs has none: they may be another job's. If the agent ends meanwhile, it ends the
    epilog, and the next fence runs it again. Before and after, ends what the job's hooks left: a killed agent could
    not, and a daemon leaves its session.

    Returns:
        ``{"epilog"}``: why it failed; nothing if it exited with 0.
    """
    me = ForJob(**job)
    folder = parts.job_folder(me.job)
    path = os.path.join(folder, EPILOG_FILE)
    if _number_in(os.path.join(folder, CLAIMED_FILE)) != me.attempt or _number_in(path) == me.attempt:
        return {}
    processes.end(left_of(me.job), grace_s=0.5)
    said = _run(call, argv, me.environment("epilog"), limit_s)
    processes.end(left_of(me.job), grace_s=0.5)
    try:
        _write_number(path, me.attempt)
    except OSError:
        pass  # a full disk: it may run again
    return {"epilog": said} if said else {}


def left_of(job: str, hooks: Sequence[str] = ("prolog", "epilog")) -> List[processes.Process]:
    """Return this user's processes that these hooks of the job started, and that still run."""
    return _begun_with(lambda found: found.get("GPURUN_JOB") == job and found.get("GPURUN_HOOK") in hooks)


def _begun_with(is_meant: Callable[[Dict[str, str]], bool]) -> List[processes.Process]:
    """Return this user's processes that began with such an environment."""
    until = time.monotonic() + EXEC_S
    return [
        process
        for process in processes.list_processes()
        if process.uid == os.getuid() and process.pid != os.getpid()
        if is_meant(processes.environment_once_begun(process, until))
    ]


def _run(call: Call, argv: List[str], env: Dict[str, str], limit_s: float) -> str:
    """Run a hook; return why it failed, in words, "" if it exited with 0."""
    try:
        done = run(call, argv, env=env, cwd="/", time_limit_s=limit_s, max_output_bytes=MOST_BYTES)
    except OSError as error:
        return "%s cannot be started: %s" % (argv[0], error.strerror or error)
    except OpError as error:
        if error.kind != "timeout":
            raise
        last = _last_lines(error.detail.get("stdout", ""), error.detail.get("stderr", ""))
        end = (
            "cannot be ended, because the program runs as another user" if error.detail.get("goes_on") else "was ended"
        )
        return "%s did not end within %g s and %s%s" % (argv[0], limit_s, end, last)
    last = _last_lines(done["stdout"], done["stderr"])
    if done["code"] < 0:
        return "%s was killed by %s%s" % (argv[0], _signal(-done["code"]), last)
    return "%s exited with code %d%s" % (argv[0], done["code"], last) if done["code"] else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def _last_lines(*outputs: str) -> str:
    """Return the last lines of some outputs, to append to a message."""
    lines = [_printable(line) for output in outputs for line in output.splitlines() if line.strip()]
    return ": " + "; ".join(lines[-MOST_LINES:]) if lines else ""


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in line.strip())[:MOST_LETTERS]


def _number_in(path: str) -> int:
    try:
        with open(path, encoding="ascii") as stream:
            return int(stream.read(20))
    except (OSError, ValueError):
        return 0


def _write_number(path: str, number: int) -> None:
    with open(path, "w", encoding="ascii") as stream:
        stream.write("%d\n" % number)


OPS = {"health": health, "prolog": prolog}
