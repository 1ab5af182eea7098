"""A lab: several hosts on one machine, each with its own network, processes, users, disk, sshd and dockerd."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from gpurun.errors import BadInput
from gpurun.lab import engine, gpus, host, network, spec
from gpurun.lab.host import ALL_LABS, SYSFS, boot_machine, cgroup, make, make_key, wait_unmounted, write_hardware
from gpurun.lab.network import check_neighbours, choose_subnet, taken_subnets
from gpurun.lab.process import PACKAGE_OF, LabFailed, NoSuchLab, ProcessId, require
from gpurun.lab.spec import (
    CLIENT_KEY,
    HEAD,
    INVENTORY,
    KNOWN_HOSTS,
    SSH_CONFIG,
    HostFolder,
    LabHost,
    LabSpec,
    Record,
    all_locked,
    check_name,
    fabric_netns,
    forget,
    hosts_of,
    hosts_with_record,
    init_record,
    lab_folder,
    lab_inventory,
    lab_known_hosts,
    lab_ssh_config,
    labs,
    load_record,
    locked,
    netns_of,
    remove_lock,
)

# The status of a lab, read from the kernel without changes.


State = Literal["up", "starting", "cut", "off"]


@dataclass(frozen=True)
class HostStatus:
    """One host.

    Attributes:
        state: ``up``: sshd and dockerd answer; ``cut``: they answer, but the link is cut; ``starting``: they do not
            answer yet; ``off``: the host has no process.
        pid: of its process 1, as the machine numbers it.
        memory_mib: memory of its own processes, with their part of shared pages (PSS).
        hardware: folder with its GPUs' state, sysfs tree and kernel log, in which to inject faults.
        sysfs: its sysfs tree, as a path on the machine.
        to_bytes, from_bytes: traffic of its link since the host started.
    """

    name: str
    rack: str
    address: str
    state: State
    gpus: int
    generation: str
    pid: int | None
    memory_mib: float
    hardware: str
    sysfs: str
    to_bytes: int
    from_bytes: int


@dataclass(frozen=True)
class LabStatus:
    """A whole lab.

    Attributes:
        state: ``up``, ``half up`` (an ``up`` that did not finish), ``down``.
        head_state: ``up`` or ``cut``.
        uplinks: bytes to and from each rack over its uplink since the lab came up.
    """

    name: str
    state: Literal["up", "half up", "down"]
    folder: str
    inventory: str | None = None
    ssh_config: str | None = None
    subnet: str | None = None
    head_address: str | None = None
    head_state: Literal["up", "cut"] | None = None
    hosts: tuple[HostStatus, ...] = ()
    uplinks: Mapping[str, network.Traffic] | None = None
    head: network.Traffic | None = None

    def to_json(self) -> dict[str, object]:
        """Return the status as plain JSON values."""
        return asdict(self)


def status_of(lab: str) -> LabStatus:
    """Return the status of this lab from the kernel. A lab that is not up is ``down``, which is not an error."""
    known = spec.load_record(lab)
    if known is None or not network.exists(fabric_netns(lab)):
        return LabStatus(name=lab, state="down" if known is None else "half up", folder=str(lab_folder(lab)))
    plugged, bytes_of = network.ports_up(lab), network.traffic(lab)
    hosts = hosts_of(known.spec, known.subnet)
    return LabStatus(
        name=lab,
        state="up" if known.complete else "half up",
        folder=str(known.folder),
        inventory=str(known.folder / spec.INVENTORY),
        ssh_config=str(known.folder / spec.SSH_CONFIG),
        subnet=str(known.subnet),
        head_address=str(known.subnet[1]),
        head_state="up" if HEAD in plugged else "cut",
        hosts=tuple(_host(lab, known.folder, each, plugged, bytes_of) for each in hosts),
        uplinks={rack: bytes_of[f"{rack}-up"] for rack in dict.fromkeys(each.rack for each in hosts)},
        head=bytes_of[HEAD],
    )


def _host(
    lab: str, place: Path, each: LabHost, plugged: frozenset[str], bytes_of: Mapping[str, network.Traffic]
) -> HostStatus:
    init = ProcessId.load(spec.init_record(lab, each.name))
    init = init if init is not None and init.alive() else None
    own = HostFolder(place / "hosts" / each.name).hardware
    traffic = bytes_of.get(each.name, network.Traffic(0, 0))
    return HostStatus(
        name=each.name,
        rack=each.rack,
        address=str(each.address),
        state=_state(init, each, plugged),
        gpus=each.gpus,
        generation=each.generation,
        pid=init.pid if init else None,
        memory_mib=round(host.memory_mib(each.netns), 1),
        hardware=str(own),
        sysfs=str(own / SYSFS),
        to_bytes=traffic.to_bytes,
        from_bytes=traffic.from_bytes,
    )


def _state(init: ProcessId | None, each: LabHost, plugged: frozenset[str]) -> State:
    if init is None:
        return "off"
    if not host.is_ready(init):
        return "starting"
    return "up" if each.name in plugged else "cut"


T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 8


class Lab:
    """One lab, by name. Any process of this machine may call any method at any time.

    Args:
        name: lower-case letters, digits and dashes.
    """

    def __init__(self, name: str = "default") -> None:
        check_name(name)
        self.name = name

    @property
    def folder(self) -> Path:
        """The folder of its inventory, ssh configuration, keys and disks."""
        known = load_record(self.name)
        return known.folder if known else lab_folder(self.name)

    @property
    def inventory(self) -> Path:
        """The inventory that ``up`` wrote."""
        return self.folder / INVENTORY

    @property
    def ssh_config(self) -> Path:
        """The OpenSSH client configuration that ``up`` wrote."""
        return self.folder / SSH_CONFIG

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """Its hosts, rack by rack.

        Raises:
            NoSuchLab: the lab is not up.
        """
        known = self._known()
        return hosts_of(known.spec, known.subnet)

    def up(self, spec: LabSpec | None = None) -> None:
        """Start the lab. If it is already up, start the hosts that are off, and reconnect cut links.

        Idempotent. Removes the remains of an earlier, interrupted ``up`` first. If this one fails, it removes
        everything that it created.

        Raises:
            BadInput: the lab is up with other options.
            NotInstalled: not root, or programs are missing.
            LabFailed: the machine refused an operation, or a host did not start.
        """
        spec = spec or LabSpec(self.name)
        if spec.name != self.name:
            raise BadInput(
                f"the options are for lab {spec.name!r}, but this is lab {self.name!r}",
                hint="use the same name for the lab and for its options",
            )
        require(*PACKAGE_OF)
        with locked(self.name):
            known = load_record(self.name)
            if known is None or not known.complete:
                self._create(spec)
            elif known.spec == spec:
                self._bring_up(known)
            else:
                raise BadInput(
                    f"lab {self.name!r} is already up, with other options",
                    hint=f"run `gpurun lab down --name {self.name}` first, or give another --name",
                )

    def down(self, *, purge: bool = False) -> None:
        """Stop the lab. Removes its processes, namespaces, interfaces, mounts and cgroups. Idempotent.

        Args:
            purge: also remove its folder, with the hosts' disks and all their images.
        """
        require("ip")
        with locked(self.name):
            place = self.folder
            self._tear_down()
            if purge and place.is_dir():
                shutil.rmtree(place)
            remove_lock(self.name)
        _after_the_last()

    def run(
        self, name: str, argv: Sequence[str], *, user: str = "root", stdin: bytes = b"", timeout_s: float | None = None
    ) -> host.RunResult:
        """Run a command inside a host, without its network and its sshd.

        Raises:
            NoSuchLab: the host is off, or no host has this name.
        """
        return host.run_on_host(self.init_of(name), argv, user=user, stdin=stdin, timeout_s=timeout_s)

    def cut(self, name: str) -> None:
        """Cut a host's network link; ``head`` is the machine's own link to the lab."""
        network.set_port(self.name, self._port(name), up=False)

    def heal(self, name: str) -> None:
        """Restore the link."""
        network.set_port(self.name, self._port(name), up=True)

    def shape(self, name: str, rate_bps: int) -> None:
        """Limit the rate of a host's link, or of the head's, until it is switched off. Simulates a bad cable."""
        network.shape_port(self.name, self._port(name), rate_bps)

    def crash(self, name: str) -> None:
        """Cut a host's power: no further packet leaves it, all processes end, its disk keeps its state."""
        with locked(self.name):
            self._power_off(self._host(name))

    def boot(self, name: str) -> None:
        """Start a host again and wait until it answers; does nothing if it is on."""
        with locked(self.name):
            self._switch_on(self._known(), [self._host(name)])

    def status(self) -> LabStatus:
        """Return the present status; a lab that is not up is not an error."""
        return status_of(self.name)

    def init_of(self, name: str) -> ProcessId:
        """Return a running host's process 1, as the machine numbers it.

        Raises:
            NoSuchLab: the host is off, or no host has this name.
        """
        init = self._init(self._host(name))
        if init is None:
            raise NoSuchLab("the host is off", host=name, hint=f"`gpurun lab boot {name}` switches the host on")
        return init

    def _create(self, spec: LabSpec) -> None:
        self._tear_down()
        try:
            self._bring_up(self._reserve(spec))
        except BaseException:
            self._tear_down()
            _after_the_last()
            raise

    def _bring_up(self, known: Record) -> None:
        hosts = hosts_of(known.spec, known.subnet)
        docker_host = engine.ensure(keep=False)
        self._switch_on(known, hosts)
        for port in {HEAD, *(each.name for each in hosts)} - network.ports_up(self.name):
            network.set_port(self.name, port, up=True)
        _write(known.folder / INVENTORY, lab_inventory(known.spec, hosts, docker_host))
        known.completed().save()

    def _reserve(self, spec: LabSpec) -> Record:
        """Choose and reserve addresses, one lab at a time. Saves the record before it creates anything."""
        place = lab_folder(self.name)
        (place / "hosts").mkdir(parents=True, exist_ok=True)
        place.chmod(0o700)
        with all_locked():
            others = [other for other in labs() if other.spec.name != self.name]
            check_neighbours([spec, *(other.spec for other in others)])
            taken = (*taken_subnets(), *(other.subnet for other in others))
            known = Record(spec, choose_subnet(self.name, taken), place)
            known.save()
        network.build_network(spec, known.subnet)
        hosts = hosts_of(spec, known.subnet)

        def furnish(each: LabHost) -> tuple[str, str]:
            make(self._place(each.name), spec.disk_mib)
            return each.name, make_key(self._place(each.name).key, each.name)

        make_key(place / CLIENT_KEY, f"gpurun-lab-{self.name}")
        _write(place / KNOWN_HOSTS, lab_known_hosts(hosts, dict(_all_at_once(furnish, hosts))))
        _write(place / SSH_CONFIG, lab_ssh_config(place, hosts))
        return known

    def _switch_on(self, known: Record, hosts: Sequence[LabHost]) -> None:
        """Start the given hosts that are off, in parallel, and wait until each answers."""
        off = [each for each in hosts if self._init(each) is None]
        everyone = hosts_of(known.spec, known.subnet)
        stand_ins = gpus.build_stand_in()
        people_key = (known.folder / f"{CLIENT_KEY}.pub").read_text().strip()

        def start(each: LabHost) -> None:
            self._power_off(each)
            place = self._place(each.name)
            write_hardware(place.hardware, self.name, each)
            boot_machine(
                known.spec, known.subnet, everyone, each, folder=place, people_key=people_key, stand_in=stand_ins
            ).save(place.boot_file)
            network.attach(known.spec, known.subnet, each)
            own_record = init_record(self.name, each.name)
            init = host.start_host(each, place.boot_file, record=own_record, log=place.log)
            try:
                host.wait_ready(each, init, place.log)
            finally:
                if not init.alive():
                    self._power_off(each)

        _all_at_once(start, off)

    def _power_off(self, each: LabHost) -> None:
        network.unplug(self.name, each.name)
        host.kill(init_record(self.name, each.name), each.netns)
        wait_unmounted(self._place(each.name))
        network.detach(self.name, each.name)
        cgroup(self.name, each.name).remove()

    def _tear_down(self) -> None:
        """Remove all parts of the lab. Finds them in the kernel, because a record may be outdated."""

        def remove(name: str) -> None:
            netns = netns_of(self.name, name)
            host.stop_host(init_record(self.name, name), netns)
            wait_unmounted(self._place(name))
            network.detach(self.name, name)

        found = {*network.hosts_with_netns(self.name), *hosts_with_record(self.name)}
        _all_at_once(remove, sorted(found))
        network.remove_network(self.name)
        left = cgroup(self.name).remove()
        if left:
            raise LabFailed(
                f"processes of the lab still run in {', '.join(map(str, left))}",
                hint="run `gpurun lab down` again in a moment",
            )
        forget(self.name)

    def _known(self) -> Record:
        known = load_record(self.name)
        if known is None:
            raise NoSuchLab(f"no lab {self.name!r} is up", hint=f"`gpurun lab up --name {self.name}` starts this lab")
        return known

    def _host(self, name: str) -> LabHost:
        for each in self.hosts:
            if each.name == name:
                return each
        raise NoSuchLab(
            f"lab {self.name!r} has no host {name!r}",
            hint=f"the hosts of this lab are {', '.join(each.name for each in self.hosts)}",
        )

    def _place(self, host_name: str) -> HostFolder:
        return HostFolder(self.folder / "hosts" / host_name)

    def _port(self, name: str) -> str:
        return HEAD if name == HEAD and self._known() else self._host(name).name

    def _init(self, each: LabHost) -> ProcessId | None:
        init = ProcessId.load(init_record(self.name, each.name))
        return init if init is not None and init.alive() else None


def _all_at_once(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Run the work for all items in parallel. After all have ended, raise the first error.

    No work continues after return, even on Ctrl-C, because the caller may then remove everything.
    """
    pool = ThreadPoolExecutor(max_workers=_AT_ONCE)
    try:
        futures = [pool.submit(work, item) for item in items]
        wait(futures)
    finally:
        pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


def _after_the_last() -> None:
    """If no lab is left on this machine, remove the labs' engine and cgroup."""
    with all_locked():
        if not any(labs()):
            engine.release_engine()
            ALL_LABS.remove()


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.rename(path)
