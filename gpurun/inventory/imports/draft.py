"""The result of an import: hosts with values, and notes about imported, guessed and skipped values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from gpurun.documents.plain import shown
from gpurun.errors import BadInput
from gpurun.inventory.edit import HostSetting, parse_settings
from gpurun.inventory.fields import LABEL_PATTERN, PER_HOST, is_address
from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import MAX_HOSTS, is_host_name
from gpurun.inventory.model import SSH_PORT, machine_at
from gpurun.quantities import count

# GPU generations by model, such as ``v100`` or ``Tesla P100-SXM2-16GB``.


FAMILIES = ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell")

_MODELS = {
    "kepler": ("k10", "k20", "k20x", "k40", "k80"),
    "maxwell": ("m4", "m10", "m40", "m60"),
    "pascal": ("p4", "p6", "p40", "p100", "gp100", "1080", "1080ti", "titanx", "titanxp"),
    "volta": ("v100", "v100s", "gv100", "titanv"),
    "turing": ("t4", "t40", "2080", "2080ti", "rtx6000", "rtx8000", "titanrtx"),
    "ampere": ("a2", "a10", "a10g", "a16", "a30", "a40", "a100", "a800", "a4000", "a5000", "a6000", "3090", "3090ti"),
    "ada": ("l4", "l20", "l40", "l40s", "4090", "ada"),
    "hopper": ("h20", "h100", "h200", "h800", "gh200"),
    "blackwell": ("b100", "b200", "b300", "gb200", "gb300", "5090"),
}
_BY_MODEL = {model: family for family, models in _MODELS.items() for model in models}
_SLICE = re.compile(r"(?:\A|[^a-z0-9])(?:mig|\d+g[._-]\d+gb)(?:\Z|[^a-z0-9])", re.IGNORECASE)
"""A profile of a Multi-Instance GPU, such as 1g.5gb, a100_3g.20gb, mig-1g.10gb+me."""


def is_slice(kind: str) -> bool:
    """Return whether a GPU type is a slice of a GPU (MIG)."""
    return _SLICE.search(kind) is not None


def generation_of(text: str) -> str | None:
    """Return the generation of a GPU model, or of a name that contains a model; None if there is none."""
    words = [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word]
    for family in FAMILIES:
        if family in words:
            return family
    pairs = [first + second for first, second in pairwise(words)]
    bare = [re.sub(r"^(gtx|rtx|tesla|gpu)", "", word) for word in words]
    return next((_BY_MODEL[word] for word in (*pairs, *words, *bare) if word in _BY_MODEL), None)


_NUMBER = re.compile(r"[-_]?\d+\Z")
_RACK_IN_NAME = re.compile(r"(?:^|[-_.])(r(?:ack)?[-_]?\d+)(?=[-_.]|n|$)", re.IGNORECASE)
_GPU_NAME = re.compile(r"(?<!no)(?<!non)(?<!no[-_])(?<!non[-_])gpu|dgx|hgx|cuda|nvidia", re.IGNORECASE)
_TELLS_OF_GPUS = ("gpus", "gpu_model", "gpu_memory_mib", "nvlink", "near_hca", "labels.gpu_type")
NO_WORKERS = re.compile(
    r"(?:.*[-_.])?(?:login|head|front-?end|cache|metrics?|controllers?|ctrl|control[-_]?plane|calico[-_]rr|mgmt|management|"
    r"monitor|monitoring|admin|maas|cpu|no[-_]?gpu|nfs|storage|backup|etcd|registry|masters?|lb|haproxy|proxy|dns|ntp|ldap|nas|"
    r"slurmctld|slurmdbd)(?:[-_.]?(?:nodes?|hosts?|servers?))?\Z",
    re.IGNORECASE,
)
"""Groups whose hosts run no jobs, unless they are in another group, too; and names of such hosts, without numbers."""
A_SLICE = "a slice of a GPU (MIG); gpurun gives jobs only whole GPUs"
_NOT_LABEL = re.compile(r"[^A-Za-z0-9._-]+")

_NVML_NAME = re.compile(r"[A-Z].*[ -].*\d")
"""Such as Tesla V100-SXM2-16GB, A100-SXM4-40GB: never a single word, never only lower-case letters."""


@dataclass
class Draft:
    """An unfinished inventory.

    Attributes:
        racks: host → rack, for hosts whose rack is in the source.
        values: host → field (or ``labels.NAME``) → setting, in the source's order.
        ssh_config: the OpenSSH configuration for connections to the hosts.
        with_gpus: hosts that have GPUs as the source says, without a number or a type that is a value.
        sliced: hosts whose GPUs are slices, as the source says.
        out: notes about hosts that were left out, each also in `left`.
        took, guessed: notes about imported and guessed values, one sentence each.
    """

    source: str
    racks: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, HostSetting]] = field(default_factory=dict)
    ssh_config: str | None = None
    with_gpus: set[str] = field(default_factory=set)
    sliced: set[str] = field(default_factory=set)
    took: list[str] = field(default_factory=list)
    guessed: list[str] = field(default_factory=list)
    out: list[str] = field(default_factory=list)
    _left: dict[tuple[str, str], dict[str, None]] = field(default_factory=dict)  # (place, what) → hosts

    @property
    def left(self) -> list[str]:
        """Notes about skipped values, one sentence each, with the place and the hosts."""
        return [f"{where}: {f'{fold(hosts)}: ' if hosts else ''}{what}" for (where, what), hosts in self._left.items()]

    def host(self, name: str, where: str) -> bool:
        """Add a host; False, and a note, if the name is not a valid host name. Idempotent."""
        if name in self.values:
            return True
        if not is_host_name(name):
            self.leave(f"{shown(name)} is not a host name", where)
            return False
        if len(self.values) >= MAX_HOSTS:
            raise BadInput(f"the source names more than {MAX_HOSTS} hosts", where=where)
        self.values[name] = {}
        return True

    def put(self, host: str, key: str, text: str, where: str) -> bool:
        """Set a value of a host; False, and a note, if the value is not valid in an inventory."""
        try:
            (setting,) = parse_settings([f"{key}={text}"])
        except BadInput as error:
            self.leave(error.message, where, host)
            return False
        if key in PER_HOST and text and not is_address(text):
            self.leave(f"{key}: {shown(text)} is not a host name or an IP address of one host", where, host)
            return False
        if setting.field == "rack":
            self.racks[host] = text
        elif setting.value is not None:
            self.values[host][key] = setting
        return True

    def label(self, host: str, name: str, text: str, where: str) -> bool:
        """Set a label of a host. Replaces characters that label names cannot have."""
        fitting = _NOT_LABEL.sub("-", name).strip("-._")
        if not re.match(LABEL_PATTERN, fitting):
            self.leave(f"{shown(name)} is not a label name", where, host)
            return False
        return self.put(host, f"labels.{fitting}", text, where)

    def gpu_type(self, host: str, kind: str, where: str) -> None:
        """Set a GPU's type. An NVML name is the model; a scheduler's name, such as v100, becomes a label.

        A slice of a GPU is no GPU: gpurun gives jobs whole GPUs.
        """
        if is_slice(kind):
            self.sliced.add(host)
            self.leave(f"{shown(kind)} is {A_SLICE}", where, host)
        elif _NVML_NAME.search(kind):
            self.gpu_model(host, kind, where)
        else:
            self.put(host, "labels.gpu_type", kind, where)
            self._generation(host, kind, where)

    def gpu_model(self, host: str, model: str, where: str) -> None:
        """Set a GPU's model, and the generation of that model."""
        self.put(host, "gpu_model", model, where)
        self._generation(host, model, where)

    def _generation(self, host: str, kind: str, where: str) -> None:
        generation = generation_of(kind)
        if generation is None:
            generation = _NOT_LABEL.sub("-", kind.lower()).strip("-._")
            self.guess(f"generation {generation}, named after the unknown GPU type {kind}")
        self.put(host, "generation", generation, where)

    def leave(self, what: str, where: str, host: str | None = None) -> None:
        """Add a note about a skipped value, once; with all hosts for which it was skipped."""
        hosts = self._left.setdefault((where, what), {})
        if host is not None:
            hosts[host] = None

    def leave_out(self, hosts: Collection[str], why: str, where: str) -> None:
        """Remove hosts, with a note that says why."""
        if hosts:
            note = f"{fold(hosts)}: {why}"
            self.leave(note, where)
            self.out.append(f"{where}: {note}")
        for host in hosts:
            del self.values[host]
            self.racks.pop(host, None)

    def leave_out_sliced(self, where: str) -> None:
        """Remove the hosts whose GPUs are slices."""
        self.leave_out(
            [host for host in self.values if host in self.sliced], "left out, because all GPUs are slices (MIG)", where
        )

    def leave_out_by_name(self, where: str) -> None:
        """Remove the hosts whose names say that they run no jobs, such as login01, if others have other names."""
        idle = [host for host in self.values if NO_WORKERS.match(_NUMBER.sub("", host.partition(".")[0]))]
        if len(idle) < len(self.values):
            why = "left out, because the name suggests no GPUs; to add the host: `gpurun inventory add`"
            self.leave_out([host for host in idle if not says_gpu(host)], why, where)

    def leave_out_twins(self, where: str) -> None:
        """Remove hosts that are other names of a machine that is a host already: its GPUs would count twice."""
        first: dict[str, str] = {}
        for host, values in list(self.values.items()):
            address, port = (values[key].text if key in values else "" for key in ("address", "port"))
            machine = machine_at(address or host, int(port or SSH_PORT))
            if machine in first:
                self.leave_out(
                    [host], f"left out, because this is the same machine as {first[machine]}: {machine}", where
                )
            first.setdefault(machine, host)

    def telling(self) -> set[str]:
        """Return the hosts of which the source says that they have GPUs."""
        return {
            host
            for host, values in self.values.items()
            if host in self.with_gpus or any(key in values for key in _TELLS_OF_GPUS)
        }

    def leave_out_without_gpus(self, where: str, hint: str = "", *, names_tell: bool = True) -> None:
        """Remove the hosts of which the source says no GPUs, if it says GPUs of others: login nodes, CPU nodes.

        Args:
            names_tell: a host whose name says GPUs has some.
        """
        telling = self.telling()
        others = [host for host in self.values if host not in telling] if telling else []
        without = [host for host in others if not (names_tell and says_gpu(host))]
        self.leave_out(without, f"left out, because the source has no GPUs for the host{hint}", where)

    def guess(self, what: str) -> None:
        """Add a note about a guessed value, once."""
        if what not in self.guessed:
            self.guessed.append(what)

    def guess_racks(self, hosts: Collection[str] | None = None) -> Mapping[str, str]:
        """Return the racks of hosts, default all: from the source, otherwise from the host's name, otherwise ``r1``."""
        racks: dict[str, str] = {}
        by_name: list[str] = []
        others: list[str] = []
        for host in self.values if hosts is None else hosts:
            if host in self.racks:
                racks[host] = self.racks[host]
            else:
                found = _RACK_IN_NAME.search(host)
                racks[host] = found.group(1).lower() if found else "r1"
                (by_name if found else others).append(host)
        if by_name:
            self.guess(f"the racks of {count(len(by_name), 'host')}, from their names")
        if others:
            self.guess(f"rack r1 for {count(len(others), 'host')}")
        return racks


def says_gpu(name: str) -> bool:
    """Return whether the name of a host or a group says that there are GPUs: ``gpu-01``, ``dgx_nodes``, ``v100``."""
    return _GPU_NAME.search(name) is not None or generation_of(name) is not None


# Find jump hosts in arguments of ``ssh``: ``-J``, ``ProxyJump``, and a ``ProxyCommand`` that runs ``ssh``. Pure.


IS_JUMP = "left out, because SSH reaches other hosts through this jump host"
_WITH_VALUE = frozenset("bBcDEeFIiJLlmOoPpQRSWw")
"""Options of ``ssh`` with a value of their own; source: ssh(1)."""
_MOST_DEPTH = 4


def jumps_of(arguments: str) -> set[str]:
    """Return the jump hosts in arguments of ``ssh``, such as Ansible's ``ansible_ssh_common_args``."""
    return set(_of_options(_words(arguments), 0))


def jumps_of_command(command: str) -> set[str]:
    """Return the jump hosts of a ``ProxyCommand``; an empty set for commands that do not run ``ssh``."""
    return set(_of_command(_words(command), 0))


def hops(value: str) -> Iterator[str]:
    """Return the hosts of a ``ProxyJump``."""
    for hop in value.split(","):
        bare = _host(hop)
        if bare and bare.lower() != "none":
            yield bare


def _of_command(words: list[str], depth: int) -> Iterator[str]:
    if depth > _MOST_DEPTH:
        return
    at = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in ("ssh", "ssh.exe")), None)
    if at is None:
        for word in words:  # sh -c 'ssh …'
            if " " in word:
                yield from _of_command(_words(word), depth + 1)
        return
    rest = words[at + 1 :]
    yield from _of_options(rest, depth)
    target = _target(rest)
    if target is not None:
        yield _host(target)


def _of_options(words: list[str], depth: int) -> Iterator[str]:
    for at, word in enumerate(words):
        flag, value = word[:2], word[2:] or (words[at + 1] if at + 1 < len(words) else "")
        if flag == "-J":
            yield from hops(value)
        elif flag == "-o":
            key, _, setting = re.sub(r"\s*=\s*|\s+", "=", value.strip(), count=1).partition("=")
            if key.lower() == "proxyjump":
                yield from hops(setting)
            elif key.lower() == "proxycommand":
                yield from _of_command(_words(setting), depth + 1)


def _target(words: list[str]) -> str | None:
    """Return the first word of an ``ssh`` command that is neither an option nor the value of one."""
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word.startswith("-"):
            letters = word[1:]
            first = next((at for at, letter in enumerate(letters) if letter in _WITH_VALUE), None)
            is_value = first is not None and first == len(letters) - 1
        else:
            return word
    return None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _host(text: str) -> str:
    return re.sub(r":\d+\Z", "", text.strip().removeprefix("ssh://").rpartition("@")[2]).strip("[]")
