"""All keys of an inventory, with type and description. The loader, ``set`` and the schema use this module."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from gpurun.documents.convert import json_schema as schema_of
from gpurun.documents.convert import keys_of, kind_of, mapping_schema, written
from gpurun.inventory.hostset import is_host_name
from gpurun.inventory.model import FabricKind, IdleAction
from gpurun.quantities import duration_s, size_mib

MOST_GPUS = 1024
_LONGEST_WORD = 4096
_MIB = re.compile(r"\d{1,9}\Z", re.ASCII)
_SIZE_PATTERN = r"^\d+(\.\d+)?\s*([kKmMgGtTpP]([iI]?[bB]?))$"
_INDEX_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?\Z", re.ASCII)
LABEL_PATTERN = r"^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z"


def _memory_mib(text: str) -> int:
    return int(text) if _MIB.match(text) else size_mib(text)


def _gpu_indices(text: str) -> tuple[int, ...]:
    """Parse GPU indices such as ``0-3,6``. Raises ValueError."""
    indices: list[int] = []
    for part in text.replace(" ", "").split(","):
        found = _INDEX_RANGE.match(part)
        if not found:
            raise ValueError
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"counts down; write {last}-{first}")
        indices.extend(range(first, last + 1))
        if len(indices) > MOST_GPUS:
            raise ValueError(f"names more than {MOST_GPUS} GPUs")
    return tuple(indices)


def is_address(text: str) -> bool:
    """Return True if a text is a host name or an IP address."""
    if is_host_name(text):
        return True
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _address(text: str) -> str:
    """Check an address, or a range of addresses, which `gpurun.inventory.validate` distributes over hosts."""
    if is_address(text) or "[" in text:
        return text
    raise ValueError


def _program(text: str) -> tuple[str, ...]:
    """Return a program without arguments. Raises ValueError for several words, because no shell would split them."""
    if text.split() != [text] or not text.isprintable() or len(text) > _LONGEST_WORD:
        raise ValueError("has several words: write the program and its arguments as a list")
    return (text,)


def _printable(longest: int, *types: str) -> Meta:
    """One line of printable text; `types` are the other JSON types that the user may write."""

    def check(text: str) -> str:
        if text.strip() and text.isprintable() and len(text) <= longest:
            return text
        raise ValueError

    schema = {"type": ["string", *types] if types else "string", "minLength": 1, "maxLength": longest}
    return written(check, f"a printable text of 1 to {longest} characters", schema=schema)


Name = Annotated[str, Meta(pattern=LABEL_PATTERN, title="a name (letters, digits, '.', '_', '-')")]
Label = Annotated[str, Meta(pattern=LABEL_PATTERN, title="a label name (letters, digits, '.', '_', '-')")]
LabelText = Annotated[str, _printable(200, "number", "boolean")]
Text = Annotated[str, _printable(200)]
Path = Annotated[str, _printable(4096)]
User = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?\Z", title="a user name")]
Interface = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,14}\Z", title="a network interface")]
HcaName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}(?::[1-9][0-9]{0,2})?\Z", title="an HCA such as mlx5_0 or mlx5_0:1"),
]
DockerHost = Annotated[
    str,
    Meta(
        pattern=r"^(?:unix:///|tcp://|ssh://)[\x21-\x7e]+\Z", title="a Docker address such as unix:///run/docker.sock"
    ),
]
HostDocker = Annotated[
    str,
    Meta(pattern=r"^unix:///[A-Za-z0-9_./@+-]+\Z", title="a Docker socket such as unix:///run/user/1000/docker.sock"),
]
Interpreter = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_./+-]{1,255}\Z", title="a Python such as python3.9 or /opt/python/bin/python3")
]
HookWord = Annotated[str, _printable(_LONGEST_WORD, "integer", "number")]
HookProgram = Annotated[
    tuple[HookWord, ...],
    Meta(max_length=256),
    written(
        _program,
        "a program with its arguments",
        "a list such as [/usr/local/bin/check, --fast]",
        schema={
            "oneOf": [
                {"type": "array", "items": {"type": ["string", "integer", "number"]}, "maxItems": 256},
                {"type": "string", "pattern": r"^\S+$"},
            ]
        },
    ),
]
"""A program of the site's with its arguments. No shell reads it."""
HostFolder = Annotated[str, Meta(pattern=r"^/[A-Za-z0-9_./@+-]{1,255}\Z", title="a folder such as /local")]
Address = Annotated[
    str,
    written(
        _address,
        "a host name or an IP address",
        schema={"type": "string", "pattern": r"^[A-Za-z0-9:\[][A-Za-z0-9.:_,\[\]-]*$"},
    ),
]
Memory = Annotated[
    int,
    Meta(ge=1),
    written(
        _memory_mib,
        "an amount of memory",
        "a whole number of MiB, or a size such as 80GiB",
        schema={"type": ["integer", "string"], "minimum": 1, "pattern": rf"^\d{{1,9}}$|{_SIZE_PATTERN}"},
    ),
]
"""For keys whose names end in ``_mib``."""
Size = Annotated[
    int,
    Meta(ge=1),
    written(size_mib, "a size such as 512MiB or 16GiB", schema={"type": "string", "pattern": _SIZE_PATTERN}),
]
Time = Annotated[
    float, written(duration_s, "a time such as 30m, 1h30m or 2d", schema={"type": "string", "pattern": r"^\d"})
]
GpuIndex = Annotated[int, Meta(ge=0, le=MOST_GPUS - 1)]
GpuIndices = Annotated[
    tuple[GpuIndex, ...],
    written(
        _gpu_indices,
        "GPU indices",
        "such as 0-3,6",
        schema={
            "oneOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MOST_GPUS - 1}},
                {"type": "string", "pattern": r"^\d+(-\d+)?(,\d+(-\d+)?)*$"},
                {"type": "integer", "minimum": 0},
            ]
        },
    ),
]


class HostKeys(TypedDict, total=False):
    """The keys of a host, and of `defaults`."""

    gpus: Annotated[int, Meta(ge=0, le=128, description="Number of GPUs of the host")]
    generation: Annotated[Name, Meta(description="GPU family, such as pascal; a job never mixes generations")]
    fabric: Annotated[Name, Meta(description="Name of the fabric that the host's ranks use")]
    gpu_model: Annotated[Text, Meta(description="GPU model as NVML names it, such as Tesla P100-SXM2-16GB")]
    gpu_memory_mib: Annotated[Memory, Meta(description="Memory of each GPU: a number in MiB, or a size such as 80GiB")]
    nvlink: Annotated[
        tuple[GpuIndices, ...], Meta(description="Groups of GPU indices that NVLink connects: [[0, 1, 2, 3], 4-7]")
    ]
    near_hca: Annotated[
        GpuIndices, Meta(description="Indices of the GPUs that share a PCI root or a NUMA node with the HCA")
    ]
    user: Annotated[User, Meta(description="User name for SSH logins; default: the user in ~/.ssh/config")]
    address: Annotated[
        Address,
        Meta(description="Address for SSH, or a range of addresses for a range of hosts; default: the host's name"),
    ]
    port: Annotated[int, Meta(ge=1, le=65535, description="SSH port")]
    fabric_address: Annotated[
        Address,
        Meta(
            description="Address that ranks on other hosts connect to; default: the address of the fabric's interface"
        ),
    ]
    python: Annotated[
        Interpreter, Meta(description="The host's Python, 3.8 or newer: a name or a path; default: python3")
    ]
    docker_host: Annotated[
        HostDocker, Meta(description="The host's Docker socket; default: the SSH user's DOCKER_HOST or context")
    ]
    folder: Annotated[
        HostFolder,
        Meta(description="A local folder for gpurun's files, if hosts share home folders; default: ~"),
    ]
    system_memory_mib: Annotated[
        Memory,
        Meta(description="Memory of the host that jobs may not use, such as 16GiB; default: 5 %, at least 1GiB"),
    ]
    data_quota_mib: Annotated[
        Memory,
        Meta(description="Disk space for data sets, such as 500GiB; default: a quarter of the disk"),
    ]
    cache_quota_mib: Annotated[
        Memory,
        Meta(description="Disk space for each user's caches of models and kernels, such as 50GiB; default: no caches"),
    ]
    health: Annotated[
        HookProgram,
        Meta(description="Health check program, [PATH, ARGUMENT…]; while the program fails, no job starts on the host"),
    ]
    burn_in: Annotated[
        int,
        Meta(ge=1, le=100, description="Passed checks in a row that bring the host back if it was out; default: 2"),
    ]
    prolog: Annotated[
        HookProgram,
        Meta(
            description="Program that the host runs before a job's containers; if the program fails, gpurun moves the "
            "job"
        ),
    ]
    epilog: Annotated[
        HookProgram,
        Meta(description="Program that the host runs after a job's containers, before gpurun frees the job's GPUs"),
    ]
    ssh: Annotated[
        Literal["paramiko", "system"],
        Meta(description="SSH client: paramiko, or system for the head's ssh program; default: gpurun chooses"),
    ]
    labels: Annotated[
        dict[Label, LabelText], Meta(description="Your own labels; @label:KEY=VALUE selects hosts by label")
    ]


class FabricKeys(TypedDict, total=False):
    """The keys of a fabric."""

    kind: Annotated[FabricKind, Meta(description="Kind of network between ranks on different hosts")]
    interface: Annotated[Interface, Meta(description="Network interface for sockets, such as ens1f0")]
    hcas: Annotated[tuple[HcaName, ...], Meta(description="RDMA devices that ranks use")]
    traffic_class: Annotated[
        Annotated[int, Meta(ge=0, le=255)] | None,
        Meta(description="Value of NCCL_IB_TC, which is DSCP << 2 plus ECN bits"),
    ]
    service_level: Annotated[Annotated[int, Meta(ge=0, le=15)] | None, Meta(description="Value of NCCL_IB_SL")]
    gid_index: Annotated[
        Annotated[int, Meta(ge=0, le=255)] | None,
        Meta(description="Value of NCCL_IB_GID_INDEX; default: gpurun finds the value for each host"),
    ]
    host_to_host: Annotated[
        bool, Meta(description="Whether hosts may open connections to each other for image transfer")
    ]
    chains: Annotated[
        int,
        Meta(ge=1, le=64, description="Number of parallel chains in which hosts pass image layers from host to host"),
    ]


class PoolKeys(TypedDict, total=False):
    """The keys of a pool."""

    parent: Annotated[Name, Meta(description="The pool that contains this pool")]
    reservation: Annotated[int, Meta(ge=0, le=10_000_000, description="Number of GPUs that always belong to the pool")]
    limit: Annotated[
        Annotated[int, Meta(ge=0, le=10_000_000)] | None,
        Meta(description="Largest number of GPUs that the pool may use at once; null means no limit"),
    ]
    share: Annotated[
        float,
        Meta(
            gt=0,
            title="a number above 0",
            description="The pool's weight when pools share GPUs beyond their reservations",
        ),
    ]
    idle_timeout: Annotated[
        Time,
        Meta(
            description="Tell the owner of a job when all its GPUs were less than 5 % busy for this long, such as 1h; "
            "default: as in the parent"
        ),
    ]
    idle_grace: Annotated[Time, Meta(description="How long after that message `idle_action` follows; default: 10m")]
    idle_action: Annotated[
        IdleAction,
        Meta(description="What happens to an idle job: end, preempt (queue the job again), or tell (only the message)"),
    ]
    idle_longer: Annotated[
        bool, Meta(description="Whether a job's own `idle_timeout` may be longer than the pool's; default: false")
    ]


class HeadKeys(TypedDict, total=False):
    """The keys of the head node."""

    docker_host: Annotated[DockerHost, Meta(description="Address of the head's Docker, in the form of DOCKER_HOST")]
    outputs_limit: Annotated[
        Size, Meta(description="Largest size of a job's outputs that gpurun copies to the head, such as 200GiB")
    ]


HOST, FABRIC, POOL, HEAD = keys_of(HostKeys), keys_of(FabricKeys), keys_of(PoolKeys), keys_of(HeadKeys)
PER_HOST = ("address", "fabric_address")  # each host has its own
FABRIC_NEEDS = ("kind", "interface")
NAME, LABEL, LABEL_TEXT = kind_of(Name), kind_of(Label), kind_of(LabelText)
SSH_CONFIG = kind_of(
    Annotated[Path, Meta(description="OpenSSH client configuration; a relative path starts at the inventory's folder")]
)
VERSION = kind_of(Annotated[Literal["1"], Meta(description="Format of this file")])
TOP = ("version", "defaults", "fabrics", "racks", "pools", "ssh_config", "head")
RACK = ("hosts", "defaults")


# The JSON Schema of inventories, for editors that check while the user types.


_NAME = "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
_HOSTS = r"^[A-Za-z0-9][A-Za-z0-9_.\[\],/-]*$"


def inventory_schema() -> dict[str, Any]:
    """Return the schema, draft 2020-12. It describes single values; ``validate`` also checks consistency."""
    shared = mapping_schema({key: kind for key, kind in HOST.items() if key not in PER_HOST})
    rack = {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {"defaults": shared, "hosts": _named(mapping_schema(HOST), _HOSTS)},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpurun inventory",
        "type": "object",
        "required": ["version"],
        "additionalProperties": False,
        "patternProperties": {"^x-": {"description": "Any value, which gpurun ignores, such as a place for anchors"}},
        "properties": {
            "version": {"const": 1, "description": VERSION.about},
            "defaults": shared,
            "fabrics": _named(mapping_schema(FABRIC, FABRIC_NEEDS)),
            "racks": _named(rack),
            "pools": _named(mapping_schema(POOL)),
            "ssh_config": schema_of(SSH_CONFIG),
            "head": mapping_schema(HEAD),
        },
    }


def _named(value: dict[str, Any], names: str = _NAME) -> dict[str, Any]:
    return {"type": ["object", "null"], "propertyNames": {"pattern": names}, "additionalProperties": value}
