"""One host of a lab, from the machine's side: keys, disk, fake hardware; start and stop it, and run commands in it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address
from pathlib import Path

from gpurun.lab import network
from gpurun.lab.gpus import FILE, HOOK, HOOK_TEXT, StandIn, healthy, save
from gpurun.lab.inside.init import Boot, Copy, File, Service
from gpurun.lab.process import (
    SYSTEM_PATH,
    Cgroup,
    LabFailed,
    NoSuchLab,
    NotInstalled,
    ProcessId,
    answers,
    find_program,
    run_command,
    spawn_init,
)
from gpurun.lab.spec import (
    HEAD,
    MODELS,
    USERS,
    HostFolder,
    LabHost,
    LabSpec,
    environment_file,
    group_file,
    hosts_file,
    machine_id,
    numa_node,
    pam_sshd,
    passwd_file,
    pci_address,
    shadow,
    sshd_config,
)

# Keys of a lab: one for the users on the head, and one for each host. They live as long as the disks.


def make_key(path: Path, comment: str) -> str:
    """Create an ed25519 key pair at `path` and ``PATH.pub`` unless it exists. Returns the public key line.

    The key is created elsewhere and then renamed, so that no later call takes half a key for a complete one.
    """
    public = path.with_name(f"{path.name}.pub")
    if not (path.exists() and public.exists()):
        draft = path.with_name(f".{path.name}.draft")
        draft.unlink(missing_ok=True)
        draft_public = draft.with_name(f"{draft.name}.pub")
        run_command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(draft)])
        draft.rename(path)
        draft_public.rename(public)
    return public.read_text().strip()


# The RDMA stand-in: the part of sysfs for a RoCE HCA and for the places of GPUs, as a tree of regular files.


HCA = "mlx5_0"
UVERBS = "uverbs0"
_HCA_PCI = "0000:0f:00.0"
_INTERFACE = "eth0"
_MLX5_CHARACTER_DEVICE = "231:192"  # IB_UVERBS_MAJOR:IB_UVERBS_BASE_MINOR
_GID_TABLE = 8  # entries here; real tables have 256 entries, nearly all empty
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_GPU_CLASS, _HCA_CLASS = "0x030200", "0x020700"
_PEERMEM_VERSION = "535.183.06"


def write_sysfs(root: Path, host: LabHost) -> None:
    """Write a host's tree: its HCA, its GPUs as PCI devices, and ``nvidia_peermem`` as a loaded module."""
    device = root / "devices/pci0000:00" / _HCA_PCI
    _pci_device(device, vendor="0x15b3", kind=_HCA_CLASS, numa=0)
    infiniband = device / "infiniband" / HCA
    _write(infiniband, {"node_type": "1: CA", "fw_ver": "22.36.1010", "hca_type": "MT4125"})
    _write(infiniband, {"node_guid": _guid(host), "sys_image_guid": _guid(host), "board_id": "MT_0000000436"})
    _link(infiniband / "device", device)
    _port(infiniband / "ports/1", host)
    uverbs = device / "infiniband_verbs" / UVERBS
    _write(uverbs, {"ibdev": HCA, "dev": _MLX5_CHARACTER_DEVICE, "abi_version": "1"})
    _link(uverbs / "device", device)
    _write(device / "net" / _INTERFACE, {"address": _mac(host), "addr_assign_type": "0"})
    _link(device / "net" / _INTERFACE / "device", device)
    _link(root / "class/net" / _INTERFACE, device / "net" / _INTERFACE)
    _link(root / "class/infiniband" / HCA, infiniband)
    _link(root / "class/infiniband_verbs" / UVERBS, uverbs)
    _link(root / "bus/pci/devices" / _HCA_PCI, device)
    _gpus(root, host)
    _write(root / "module/nvidia_peermem", {"version": _PEERMEM_VERSION})


def _port(port: Path, host: LabHost) -> None:
    _write(
        port,
        {
            "state": "4: ACTIVE",
            "phys_state": "5: LinkUp",
            "link_layer": "Ethernet",
            "rate": "25 Gb/sec (1X EDR)",
            "lid": "0x0",
            "sm_lid": "0x0",
        },
    )
    mapped = IPv6Address(f"::ffff:{host.address}")
    local = IPv6Address(int(IPv6Address("fe80::")) + int.from_bytes(_interface_id(host), "big"))
    table = {
        0: (local, "IB/RoCE v1"),
        1: (local, "RoCE v2"),
        2: (mapped, "IB/RoCE v1"),
        3: (mapped, "RoCE v2"),
    }
    for index in range(_GID_TABLE):
        address, kind = table.get(index, (None, ""))
        _write(port / "gids", {str(index): address.exploded if address else _EMPTY_GID})
        if address:
            _write(port / "gid_attrs/types", {str(index): kind})
            _write(port / "gid_attrs/ndevs", {str(index): _INTERFACE})
    counters = ("symbol_error", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
    _write(port / "counters", dict.fromkeys(counters, "0"))
    _write(port / "hw_counters", dict.fromkeys(("out_of_sequence", "np_cnp_sent", "packet_seq_err"), "0"))


def _gpus(root: Path, host: LabHost) -> None:
    model = MODELS[host.generation]
    for index in range(host.gpus):
        address = pci_address(index)
        numa = numa_node(model, index, host.gpus)
        bridge = "pci0000:00" if numa == 0 else "pci0000:80"
        device = root / "devices" / bridge / address
        _pci_device(device, vendor="0x10de", kind=_GPU_CLASS, numa=numa)
        _link(root / "bus/pci/devices" / address, device)


def _pci_device(device: Path, *, vendor: str, kind: str, numa: int) -> None:
    facts = {"vendor": vendor, "class": kind, "numa_node": str(numa)}
    _write(device, {**facts, "current_link_speed": "16.0 GT/s PCIe", "current_link_width": "16"})


def _interface_id(host: LabHost) -> bytes:
    """Return the EUI-64 of a Mellanox MAC address that ends in the host's number."""
    return bytes((0x0E, 0x42, 0xA1, 0xFF, 0xFE)) + host.number.to_bytes(3, "big")


def _mac(host: LabHost) -> str:
    return "0c:42:a1:" + ":".join(f"{byte:02x}" for byte in host.number.to_bytes(3, "big"))


def _guid(host: LabHost) -> str:
    digits = _interface_id(host).hex()
    return ":".join(digits[place : place + 4] for place in range(0, 16, 4))


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def _link(link: Path, target: Path) -> None:
    """Create a relative link, as in sysfs, because the tree may be mounted anywhere."""
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(_relative(target, link.parent))


def _relative(target: Path, start: Path) -> str:
    common = next(parent for parent in (start, *start.parents) if target.is_relative_to(parent))
    ups = len(start.relative_to(common).parts)
    return str(Path(*[".."] * ups, target.relative_to(common)))


# The simulated hardware of a host: its GPUs, its HCA, and its kernel log, in one folder that the host sees.


INSIDE = Path("/run/gpurun-lab")
SYSFS = "sys"
KERNEL_LOG = "kmsg"


def write_hardware(folder: Path, lab: str, host: LabHost) -> None:
    """Create the folder again: a host starts with healthy hardware."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    save(healthy(lab, host), folder / FILE)
    write_sysfs(folder / SYSFS, host)
    (folder / KERNEL_LOG).touch()
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


def devices(host: LabHost) -> tuple[str, ...]:
    """Return the device nodes below ``/dev`` that Docker's ``--device`` and users of the NVIDIA driver need."""
    gpus = [f"nvidia{index}" for index in range(host.gpus)]
    return (*gpus, "nvidiactl", "nvidia-uvm", f"infiniband/{UVERBS}", "infiniband/rdma_cm")


# A host's disk: a folder in the machine's file system, or an ext4 image if the disk has a size.


_UNMOUNT_TIMEOUT_S = 10.0


def make(place: HostFolder, size_mib: int | None) -> None:
    """Create the disk if there is none. Its content survives everything except ``down --purge``."""
    place.disk.mkdir(parents=True, exist_ok=True)
    if size_mib and not place.image.exists():
        draft = place.image.with_suffix(".draft")
        run_command(["mkfs.ext4", "-q", "-F", str(draft), f"{size_mib}M"])
        draft.rename(place.image)


def wait_unmounted(place: HostFolder) -> None:
    """Wait until the kernel releases the image. It unmounts the image shortly after the last process has ended.

    Raises:
        LabFailed: the image is still mounted; then the caller must not mount it again.
    """
    deadline = time.monotonic() + _UNMOUNT_TIMEOUT_S
    while _is_attached(place.image):
        if time.monotonic() > deadline:
            raise LabFailed(
                f"the kernel has not released the disk image {place.image} yet", hint="try again in a moment"
            )
        time.sleep(0.02)


def _is_attached(image: Path) -> bool:
    """Return True if a loop device uses this file (sysfs: ``block/loopN/loop/backing_file``)."""
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if entry.read_text().rstrip("\n") == str(image):
                return True
        except OSError:
            continue
    return False


# The boot instructions of a host: all its own files, and its two services.


ALL_LABS = Cgroup("gpurun-lab")

_SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server")
_DOCKER_SHUTDOWN_S = 3
_SERVICE_ENV = {"PATH": SYSTEM_PATH, "HOME": "/root", "LC_ALL": "C.UTF-8"}


def cgroup(lab: str, host: str | None = None) -> Cgroup:
    """Return the cgroup for the containers of a lab, or of one host of it."""
    return Cgroup("/".join(filter(None, (ALL_LABS.name, lab, host))))


def boot_machine(
    spec: LabSpec,
    subnet: IPv4Network,
    hosts: Sequence[LabHost],
    host: LabHost,
    *,
    folder: HostFolder,
    people_key: str,
    stand_in: StandIn,
) -> Boot:
    """Return the instructions for the next start of one host.

    Args:
        hosts: all hosts of the lab, for ``/etc/hosts``.
        people_key: public key that all accounts of the lab's users accept.
    """
    addresses = {HEAD: subnet[1], **{each.name: each.address for each in hosts}}
    texts = {
        **_accounts(),
        "/etc/hosts": hosts_file(host.name, addresses, resolve_names=spec.resolve_names),
        "/etc/hostname": f"{host.name}\n",
        "/etc/machine-id": machine_id(spec.name, host.name),
        "/etc/resolv.conf": "# no name server in a lab\n",
        "/etc/environment": environment_file({"GPURUN_SYSFS": str(INSIDE / SYSFS)}),
        "/etc/ssh/sshd_config": sshd_config(_sftp_server(), has_penalties=_openssh_version() >= (9, 8)),
        "/etc/pam.d/sshd": pam_sshd(),
    }
    return Boot(
        name=host.name,
        disk=str(folder.disk),
        image=str(folder.image) if spec.disk_mib else None,
        hardware=str(folder.hardware),
        files=(
            *(File(path, text) for path, text in texts.items()),
            File("/etc/shadow", shadow(Path("/etc/passwd").read_text()), mode=0o640),
            File("/etc/ssh/ssh_host_ed25519_key", folder.key.read_text(), mode=0o600),
            File("/etc/docker/daemon.json", "{}\n", keep=True),
            File(f"/usr/bin/{HOOK}", HOOK_TEXT, mode=0o755),
        ),
        authorized_key=people_key,
        copies=(Copy(str(stand_in.library), stand_in.library_in_host),),
        devices=devices(host),
        homes={user.name: user.uid for user in USERS},
        services=_services(cgroup(spec.name, host.name)),
    )


def _accounts() -> Mapping[str, str]:
    return {
        "/etc/passwd": passwd_file(Path("/etc/passwd").read_text()),
        "/etc/group": group_file(Path("/etc/group").read_text()),
    }


def _services(group: Cgroup) -> tuple[Service, ...]:
    dockerd = (
        _daemon("dockerd"),
        "--host=unix:///run/docker.sock",
        "--group=docker",
        f"--cgroup-parent={group.path}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        f"--shutdown-timeout={_DOCKER_SHUTDOWN_S}",
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
    )
    stale = ("/run/docker.pid", "/run/docker/containerd/containerd.pid")
    return (
        Service("sshd", (_daemon("sshd"), "-D", "-e"), "/var/log/sshd.log", _SERVICE_ENV),
        Service("dockerd", dockerd, "/var/log/dockerd.log", _SERVICE_ENV, stale),
    )


def _daemon(program: str) -> str:
    """Return the path of a program, which must be below /usr, because the hosts see only that part of the machine."""
    path = find_program(program)
    if path is None or not str(Path(path).resolve()).startswith("/usr/"):
        raise NotInstalled(
            f"a lab needs {program} below /usr, not at {path}", hint=f"install {program} from your distribution"
        )
    return path


def _openssh_version() -> tuple[int, int]:
    """Return the version from ``OpenSSH_9.2p1 Debian-2+deb12u10``. Client and server come from one source package."""
    said = run_command(["ssh", "-V"], merge_stderr=True)
    match = re.match(r"OpenSSH_(\d+)\.(\d+)", said)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _sftp_server() -> str:
    return next((path for path in _SFTP_SERVERS if Path(path).exists()), "internal-sftp")


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


def start_host(host: LabHost, boot_file: Path, *, record: Path, log: Path) -> ProcessId:
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
    return answers(Path(f"/proc/{init.pid}/root/run/docker.sock")) and listens(init, _SSH_PORT)


def listens(init: ProcessId, port: int) -> bool:
    """Return True if a process in the host listens on this TCP port (``/proc/PID/net/tcp``: state 0A)."""
    try:
        rows = Path(f"/proc/{init.pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    return any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows)


def stop_host(record: Path, netns: str) -> None:
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


def run_on_host(
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
