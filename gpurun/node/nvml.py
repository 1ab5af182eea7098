"""NVML's report about this host's GPUs. `nvml` is the module pynvml, or in tests a recorded document with its names.

The probe guesses nothing: what NVML does not support is None, what it refuses is in the GPU's ``problem``.
"""

from __future__ import annotations

import os
import pwd
from typing import Any, Callable, Dict, Iterable, List, Optional

from gpurun.node.agent.processes import container_of

# nvmlDeviceGetArchitecture, as of nvidia-ml-py 13 (NVML_DEVICE_ARCH_*).
ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}
# For drivers older than that call (before 455): compute capability, from the CUDA C++ programming guide.
CAPABILITIES = {(3,): "kepler", (5,): "maxwell", (6,): "pascal", (7, 0): "volta", (7, 2): "volta", (7, 5): "turing",
                (8, 9): "ada", (8,): "ampere", (9,): "hopper", (10,): "blackwell", (12,): "blackwell"}  # fmt: skip

# Reasons why clocks are held down that point at a fault; idle, a power cap and user settings do not.
THROTTLE = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
SM_CLOCK = 1  # NVML_CLOCK_SM
BUSY_PERCENT = 50
"""An idle GPU lowers the generation of its PCIe link, so it is not reported then."""
MAX_NVLINKS = 18
MOST_LANES = 64
MOST_MHZ = 100_000
SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
MIB = 1 << 20
MEMORY_V2 = 0x02000028
"""nvmlMemory_v2: its ``used`` leaves out what the driver keeps for itself, as nvidia-smi does (615 MiB of an H200).
Drivers before 510 do not have it."""

# NVML return codes that mean "this GPU or driver does not have that", not a fault.
INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND = 2, 3, 4, 6, 13
HARMLESS = (INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND)


class Device:
    """One GPU: asks NVML and records refusals."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self.index = index
        self.problem = ""
        self.handle: Any = None
        self.handle = self.ask("nvmlDeviceGetHandleByIndex", index, plain=True)

    def ask(self, function: str, *arguments: Any, plain: bool = False) -> Any:
        """Return the answer of an NVML function; None if it is not supported, or refused (then `problem` says why)."""
        if self.handle is None and not plain:
            return None
        try:
            call: Callable[..., Any] = getattr(self._nvml, function)
            return call(*arguments) if plain else call(self.handle, *arguments)
        except AttributeError:
            return None  # an older pynvml
        except self._nvml.NVMLLibraryMismatchError:
            return None  # an older driver
        except self._nvml.NVMLError as error:
            if error.value not in HARMLESS:
                self.problem = self.problem or "%s: %s" % (function, error)
            return None


def _memory(device: Device) -> Any:
    """Return a GPU's memory, in bytes; None if the driver does not say."""
    found = device.ask("nvmlDeviceGetMemoryInfo", MEMORY_V2)
    return device.ask("nvmlDeviceGetMemoryInfo") if found is None else found


def read_nvml(nvml: Any) -> Dict[str, Any]:
    """Return driver, CUDA version and every GPU, with the names of `gpurun.facts`.

    Raises:
        nvml.NVMLError: the library or driver cannot be used at all.
    """
    nvml.nvmlInit()
    try:
        devices = open_devices(nvml)
        gpus = [_gpu(device) for device in devices]
        _links(nvml, devices, gpus)
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return {"driver": driver, "cuda": "%d.%d" % (cuda // 1000, cuda % 1000 // 10), "gpus": gpus}
    finally:
        nvml.nvmlShutdown()


def open_devices(nvml: Any) -> List[Device]:
    """Return the GPUs, for `sample_gpus`. NVML is initialised."""
    return [Device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def sample_gpus(devices: Iterable[Device]) -> List[Dict[str, Any]]:
    """Return load, memory, temperature and power of every GPU, now."""
    return [_sample(device) for device in devices]


def _sample(device: Device) -> Dict[str, Any]:
    device.problem = "" if device.handle is not None else device.problem
    use = device.ask("nvmlDeviceGetUtilizationRates")
    memory = _memory(device)
    power_mw = device.ask("nvmlDeviceGetPowerUsage")
    return {
        "index": device.index,
        "utilization_percent": None if use is None else int(use.gpu),
        "memory_used_mib": None if memory is None else int(memory.used) // MIB,
        "memory_mib": None if memory is None else int(memory.total) // MIB,
        "temperature_c": device.ask("nvmlDeviceGetTemperature", 0),
        "power_w": None if power_mw is None else round(power_mw / 1000, 1),
        "throttle": _throttle(device),
        "problem": device.problem,
    }


def _gpu(device: Device) -> Dict[str, Any]:
    memory = _memory(device)
    pci = device.ask("nvmlDeviceGetPciInfo")
    ecc = device.ask("nvmlDeviceGetEccMode")
    retired, pending = _retired(device)
    rows = device.ask("nvmlDeviceGetRemappedRows")
    return {
        "index": device.index,
        "model": _text(device.ask("nvmlDeviceGetName")),
        "generation": _generation(device),
        "memory_mib": None if memory is None else int(memory.total) // MIB,
        "uuid": _text(device.ask("nvmlDeviceGetUUID")),
        "pci_bus": "" if pci is None else pci_address(_text(pci.busId)),
        "nvlink_peers": [],
        "nvlink_inactive": [],
        "ecc": None if ecc is None else bool(ecc[0]),
        # Errors since the driver was loaded, not over the board's life: those were dealt with.
        "ecc_uncorrected": device.ask("nvmlDeviceGetTotalEccErrors", 1, 0) if ecc and ecc[0] else None,
        "retired_pages": retired,
        "retirement_pending": pending,
        "remap_failed": None if rows is None else bool(rows[3]),
        **_link(device),
        "throttle": _throttle(device),
        "processes": _processes(device),
        "problem": device.problem,
    }


def _link(device: Device) -> Dict[str, Any]:
    use, before = device.ask("nvmlDeviceGetUtilizationRates"), device.problem
    found = link_of(device.ask, use is not None and int(use.gpu) >= BUSY_PERCENT)
    device.problem = before  # a GPU whose link is not known is not lost
    return found


def link_of(ask: Callable[[str], Any], is_busy: bool) -> Dict[str, Any]:
    """Return the lanes and the generation of a GPU's PCIe link, and the most that the GPU and its slot allow.

    Args:
        ask: returns the answer of an NVML function; None if the GPU or driver does not support the function.
    """
    said = {
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_max_width": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration") if is_busy else None,
        "pcie_max_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
    }
    # A virtual GPU has no link of its own: drivers say 0 or the largest number then.
    return {key: value if value is not None and 0 < value <= MOST_LANES else None for key, value in said.items()}


def pci_address(bus_id: str) -> str:
    """Convert NVML's ``00000000:17:00.0`` to the kernel's ``0000:17:00.0``."""
    domain, _, rest = bus_id.lower().partition(":")
    return "%s:%s" % (domain[-4:], rest)


def _generation(device: Device) -> str:
    architecture = device.ask("nvmlDeviceGetArchitecture")
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    capability = tuple(device.ask("nvmlDeviceGetCudaComputeCapability") or ())
    return CAPABILITIES.get(capability) or CAPABILITIES.get(capability[:1]) or ""


def _retired(device: Device) -> "tuple[Optional[int], Optional[bool]]":
    """Return retired pages (before Ampere) or remapped rows (since), and whether some wait for a GPU reset."""
    rows = device.ask("nvmlDeviceGetRemappedRows")
    if rows is not None:
        return int(rows[0]) + int(rows[1]), bool(rows[2])
    pages = [device.ask("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    known = [page for page in pages if page is not None]
    if not known:
        return None, None
    pending = device.ask("nvmlDeviceGetRetiredPagesPendingStatus")
    return sum(len(page) for page in known), None if pending is None else bool(pending)


def _throttle(device: Device) -> List[str]:
    return throttle_in(device.ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0)


def throttle_in(mask: int) -> List[str]:
    """Return the faults in NVML's mask of reasons why clocks are held down."""
    return [name for bit, name in THROTTLE.items() if mask & bit]


def _processes(device: Device) -> List[Dict[str, Any]]:
    found = device.ask("nvmlDeviceGetComputeRunningProcesses")
    if found is None:
        found = device.ask("nvmlDeviceGetComputeRunningProcesses_v2") or []
    used = [getattr(process, "usedGpuMemory", None) for process in found]
    return [
        {"pid": int(process.pid), "memory_mib": None if size is None else int(size) // MIB}
        for process, size in zip(found, used)
    ]


def _links(nvml: Any, devices: List[Device], gpus: List[Dict[str, Any]]) -> None:
    """Add which GPUs each GPU reaches over active NVLinks; a switch leads to all GPUs on switches."""
    by_bus = {gpu["pci_bus"]: gpu["index"] for gpu in gpus if gpu["pci_bus"]}
    on_switch = []
    for device, gpu in zip(devices, gpus):
        peers = set()
        for link in range(MAX_NVLINKS):
            state = device.ask("nvmlDeviceGetNvLinkState", link)
            if state is None:
                continue
            if not state:
                gpu["nvlink_inactive"].append(link)
            elif device.ask("nvmlDeviceGetNvLinkRemoteDeviceType", link) == SWITCH:
                on_switch.append(gpu["index"])
                break
            else:
                remote = device.ask("nvmlDeviceGetNvLinkRemotePciInfo", link)
                if remote is not None:
                    peers.add(by_bus.get(pci_address(_text(remote.busId))))
        gpu["nvlink_peers"] = sorted(peer for peer in peers if peer not in (None, gpu["index"]))
        if gpu["nvlink_inactive"] and not peers and gpu["index"] not in on_switch:
            gpu["nvlink_inactive"] = []  # no bridge fitted: nothing is wrong with links that lead nowhere
    for gpu in gpus:
        if gpu["index"] in on_switch:
            gpu["nvlink_peers"] = [index for index in on_switch if index != gpu["index"]]


def name_processes(gpus: List[Dict[str, Any]], proc: str, jobs: Dict[str, str]) -> None:
    """Add owner, command, container and gpurun job to the processes of each GPU.

    Args:
        proc: the proc file system.
        jobs: container id → gpurun job id, of the containers with its label.
    """
    for gpu in gpus:
        for process in gpu["processes"]:
            folder = os.path.join(proc, str(process["pid"]))
            container = container_of(process["pid"], proc)
            process.update(
                user=_owner(folder),
                command=_command(folder),
                container=container[:12],
                job=jobs.get(container, ""),
            )


def _owner(folder: str) -> str:
    try:
        uid = os.stat(folder).st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _command(folder: str) -> str:
    try:
        with open(os.path.join(folder, "cmdline"), "rb") as stream:
            return stream.read(256).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
