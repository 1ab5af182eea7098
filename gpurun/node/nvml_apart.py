"""Use NVML in a separate, newly started process: a hanging driver must not hang the agent.

It is not a fork of the agent, which has threads: the child could wait for ever for a lock that one of them held. One
process answers many questions: it starts while its caller does other things, so that the start of Python and NVML costs
no time. It ends when its caller closes the pipe. If it waits in a broken driver it cannot be killed, and is left
behind.

A question is one line of JSON. So is the answer; ``{"error": text}`` if NVML refuses, ``{"missing": text}`` if there is
no driver:

``{"what": "facts"}``: `gpurun.node.nvml.read_nvml`
``{"what": "sample"}``: ``{"gpus": gpurun.node.nvml.sample_gpus}``
``{"what": "cards", "gpus": [[index, uuid]…], "wait_ms"}``::

    {"gpus": [{"index", "pids": [pid…] | null, "draws": [pid…], "lost": text, "ecc": count | null,
               "xids": [number…], "use": percent | null, "memory_mib": used | null, "sm_mhz": clock | null,
               "throttle": [text…], "pcie_width", "pcie_max_width", "pcie_generation", "pcie_max_generation"}…]}
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from typing import Any, Dict, Iterable, List, Optional, Tuple

from gpurun.node.claim_rules import Card
from gpurun.node.nvml import (
    BUSY_PERCENT,
    FUNCTION_NOT_FOUND,
    MEMORY_V2,
    MOST_MHZ,
    NO_PERMISSION,
    NOT_SUPPORTED,
    SM_CLOCK,
    Device,
    link_of,
    open_devices,
    read_nvml,
    sample_gpus,
    throttle_in,
)

ANSWER_S = 10.0
"""A healthy driver answers in milliseconds; one without persistence mode that starts up, in seconds."""

DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 9, 12
XID_EVENT = 8  # nvmlEventTypeXidCriticalError
_UNCORRECTED, _VOLATILE = 1, 0

_START = (
    "import json,sys;"
    "sys.path[:]=json.loads(sys.argv[1]);"
    "from gpurun.node.nvml_apart import serve;"
    "serve(sys.stdin,sys.stdout)"
)


def is_reader(command: List[str]) -> bool:
    """Return whether a command line is that of a process of gpurun that asks NVML: an agent, or the process below.

    NVML opens ``/dev/nvidiaN`` to read from it, which holds nothing of the GPU.
    """
    return command[1:2] == ["-ISc"] and "from gpurun.node." in "".join(command[2:3])


class NoAnswer(Exception):
    """NVML hangs or refuses, or its process has died; the message says which."""


class Nvml:
    """A process that answers questions about GPUs. A context manager; one question at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=list(_imported_from()),
        )

    def ask(self, cards: Iterable[Card], wait_ms: int = 0, timeout_s: float = ANSWER_S) -> Dict[str, Any]:
        """Return NVML's report about GPUs, now or at the first Xid within `wait_ms`.

        Raises:
            NoAnswer: not within `timeout_s` (plus the wait).
        """
        return self._answer({"what": "cards", "gpus": list(cards), "wait_ms": wait_ms}, timeout_s)

    def ask_host(self, what: str, timeout_s: float = ANSWER_S) -> Dict[str, Any]:
        """Return the ``"facts"`` of this host, or a ``"sample"`` of its GPUs.

        Raises:
            NoAnswer: not within `timeout_s`, or there is no driver.
        """
        found = self._answer({"what": what, "wait_ms": 0}, timeout_s)
        if "missing" in found:
            raise NoAnswer(found["missing"])
        return found

    def _answer(self, question: Dict[str, Any], timeout_s: float) -> Dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        deadline = time.monotonic() + question["wait_ms"] / 1000 + timeout_s
        answer = b""
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            while not answer.endswith(b"\n"):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                    raise NoAnswer("the NVIDIA driver hangs: NVML did not answer within %g s" % timeout_s)
                data = os.read(stdout.fileno(), 1 << 16)
                if not data:
                    raise NoAnswer("NVML's process died")
                answer += data
            found: Dict[str, Any] = json.loads(answer.decode())
        except (OSError, ValueError) as error:
            raise NoAnswer("NVML's process died: %s" % error) from None
        if "error" in found:
            raise NoAnswer(found["error"])
        return found

    def close(self) -> None:
        """End the process, or leave it behind if the driver holds it."""
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass  # a question that was never taken
        self._process.kill()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _imported_from() -> Iterable[int]:
    """Yield the memory file that the agent's modules come from, if there is one."""
    for place in sys.path:
        folder, _, number = place.rpartition("/")
        if folder == "/proc/self/fd" and number.isdigit():
            yield int(number)


# -- the other process ------------------------------------------------------------------------------------


def serve(questions: Any, answers: Any) -> None:
    """Answer until the questions end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = _apart_from_prints(answers)
    nvml, problem = _open()
    asked = _Asked(nvml)
    for line in questions:
        question = json.loads(line)
        if nvml is None:
            time.sleep(question["wait_ms"] / 1000)
        try:
            answer = json.dumps(problem if nvml is None else asked.answer(question))
        except Exception as error:  # noqa: BLE001 - told to the other process, which is all that can be done here
            answer = json.dumps(_failed(error))
        answers.write(answer + "\n")
        answers.flush()


def _apart_from_prints(answers: Any) -> Any:
    """Return a stream to where `answers` leads, which is nowhere then: what a library prints is no answer."""
    own = os.fdopen(os.dup(answers.fileno()), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, answers.fileno())
    os.close(null)
    return own


def _open() -> Tuple[Any, Dict[str, Any]]:
    """Return the initialised module pynvml; or None, and the answer to every question."""
    try:
        import pynvml  # noqa: PLC0415 - 330 kB of source, needed only in this process
    except ImportError as error:
        return None, {"missing": "reading NVML failed: %s" % error}
    except Exception as error:  # noqa: BLE001 - a damaged or foreign module
        return None, _failed(error)
    try:
        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - the answer to each question
        return None, _failed(error)
    return pynvml, {}


def _failed(error: Exception) -> Dict[str, Any]:
    """Return the answer to a question at which NVML, or the code here, raised an exception."""
    value = getattr(error, "value", None)
    if value in (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND):
        return {"missing": "no NVIDIA driver: %s" % error}
    if value is not None:
        return {"error": "NVML: %s" % error}
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = "%s:%s" % (os.path.basename(where.filename), where.lineno)
    return {"error": "reading NVML failed: %s: %s (%s)" % (type(error).__name__, error, place)}


class _Asked:
    """Answers questions; keeps what NVML need not be asked for twice."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._listener: Optional[_Listener] = None
        self._devices: Optional[List[Device]] = None

    def answer(self, question: Dict[str, Any]) -> Dict[str, Any]:
        """Return the answer to one question. Raises what NVML raises."""
        if question["what"] == "facts":
            return read_nvml(self._nvml)
        if question["what"] == "sample":
            self._devices = self._devices or open_devices(self._nvml)
            return {"gpus": sample_gpus(self._devices)}
        cards = [(int(index), str(uuid)) for index, uuid in question["gpus"]]
        if question["wait_ms"] and self._listener is None:
            self._listener = _Listener(self._nvml, cards)
        xids = self._listener.wait(question["wait_ms"]) if self._listener is not None else {}
        return {"gpus": [dict(_card(self._nvml, card), xids=xids.get(card[0], [])) for card in cards]}


def _handle(nvml: Any, card: Card) -> Any:
    index, uuid = card
    return nvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else nvml.nvmlDeviceGetHandleByIndex(index)


def _card(nvml: Any, card: Card) -> Dict[str, Any]:
    """Return one GPU's present state; `lost` says why nothing is known about it."""
    found: Dict[str, Any] = {"index": card[0], "pids": None, "draws": [], "lost": "", "ecc": None}
    found.update(use=None, memory_mib=None, sm_mhz=None, throttle=[])
    try:
        handle = _handle(nvml, card)
        found["pids"], found["draws"] = _pids(nvml, handle)
        found["ecc"] = _supported(nvml, lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE)))
        found["use"] = _supported(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        found["memory_mib"] = _memory_mib(nvml, handle)
        found.update(_speed(nvml, handle, found["use"]))
    except nvml.NVMLError as error:
        found["lost"] = "NVML: %s" % error
    return found


def _speed(nvml: Any, handle: Any, use: Optional[int]) -> Dict[str, Any]:
    """Return what can make a GPU slow: its clock, faults that hold the clock down, and its PCIe link."""

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return int(getattr(nvml, function)(handle, *arguments))
        except (AttributeError, nvml.NVMLError):  # an older pynvml; whatever the driver refuses, the GPU is not lost
            return None

    link = link_of(ask, use is not None and use >= BUSY_PERCENT)
    mask = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    clock = ask("nvmlDeviceGetClockInfo", SM_CLOCK)
    sane = clock if clock is not None and 0 <= clock <= MOST_MHZ else None
    return {"sm_mhz": sane, "throttle": throttle_in(mask), **link}


def _memory_mib(nvml: Any, handle: Any) -> Optional[int]:
    """Return the memory in use, without what the driver keeps for itself if it says so; None if it says nothing."""
    for version in ((MEMORY_V2,), ()):
        found = _supported(nvml, lambda version=version: nvml.nvmlDeviceGetMemoryInfo(handle, *version))
        if found is not None:
            return int(found.used) >> 20
    return None


def _pids(nvml: Any, handle: Any) -> Tuple[Optional[List[int]], List[int]]:
    """Return the processes that compute on the GPU, None if the driver does not say, and those that only draw."""
    lists = []
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        lists.append(_supported(nvml, lambda function=function: getattr(nvml, function)(handle)))
    compute, graphics = lists
    computing = {int(process.pid) for process in compute or ()}
    drawing = {int(process.pid) for process in graphics or ()} - computing
    return None if compute is None else sorted(computing), sorted(drawing)


def _supported(nvml: Any, ask: Any) -> Any:
    """Return NVML's answer; None if this GPU or driver does not support the question."""
    try:
        return ask()
    except nvml.NVMLError as error:
        if error.value in (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND):
            return None
        raise


class _Listener:
    """Waits for Xid errors from NVML, which works also without access to the kernel's log."""

    def __init__(self, nvml: Any, cards: Iterable[Card]) -> None:
        self._nvml = nvml
        self._index: Dict[str, int] = {}
        self._events: Any = None
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        for card in cards:
            try:
                handle = _handle(nvml, card)
                self._index[_uuid(nvml, handle)] = card[0]
                nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._events)
            except nvml.NVMLError:
                continue  # lost, or too old for events: its state says so

    def wait(self, wait_ms: int) -> Dict[int, List[int]]:
        """Return Xids by GPU as soon as one occurs; none after `wait_ms`."""
        deadline = time.monotonic() + wait_ms / 1000
        found: Dict[int, List[int]] = {}
        while True:
            left_ms = 0 if found else max(0, int((deadline - time.monotonic()) * 1000))
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, left_ms)
                index = self._index.get(_uuid(self._nvml, event.device))
            except (self._nvml.NVMLError, AttributeError):
                if not found:
                    time.sleep(max(0.0, deadline - time.monotonic()))
                return found
            if index is not None and event.eventType == XID_EVENT:
                found.setdefault(index, []).append(int(event.eventData))


def _uuid(nvml: Any, handle: Any) -> str:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)
