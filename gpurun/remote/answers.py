"""The valid answers of each operation of a host's agent. The head checks every answer here on arrival.

A host may be hostile or broken. Its answers become lines of configuration files, words of command lines, paths, and
numbers in calculations, on the head and on other hosts. So this module defines the types of each operation's answers,
with patterns and bounds. If an answer has another shape, the head rejects it and names the host; the operation counts
as failed there. An operation without types must return nothing. The caller checks everything that depends on the
request, such as a digest that the head did not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict, get_args

import msgspec
from msgspec import Meta, Struct

from gpurun.facts import HostSample
from gpurun.msgspec_types import ready

_MOST = 1 << 62
_MOST_WORDS = 4000
_MOST_GROUPS = 1 << 16
_MOST_NAMES = 256
MOST_SETS = 10_000
"""No host has more data sets."""

Count = Annotated[int, Meta(ge=0, le=_MOST)]
Code = Annotated[int, Meta(ge=-(1 << 31), le=1 << 32)]
ExitCode = Annotated[int, Meta(ge=0, le=255)]
Index = Annotated[int, Meta(ge=0, le=1 << 20)]
Small = Annotated[int, Meta(ge=0, le=100_000)]
ThrottleReason = Literal["hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake"]
"""The values of `gpurun.node.nvml.THROTTLE`."""
RankNumber = Annotated[int, Meta(ge=0, le=1 << 20)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Digits = Annotated[str, Meta(pattern=r"\A[0-9]{1,10}\Z")]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,256}\Z")]
Digest = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
Path = Annotated[str, Meta(pattern=r"\A/[^\x00-\x1f\x7f]{0,4095}\Z")]
Address = Annotated[str, Meta(pattern=r"\A[0-9A-Fa-f.:]{2,45}(%[A-Za-z0-9_.-]{1,15})?\Z")]
PlainAddress = Annotated[str, Meta(pattern=r"\A[0-9A-Fa-f.:]{2,45}\Z")]
UserName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.][A-Za-z0-9_.@+\\-]{0,255}\$?\Z")]
GroupName = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f:,]{1,256}\Z")]
HostName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?\Z")]
PublicKey = Annotated[str, Meta(pattern=r"\Assh-ed25519 [A-Za-z0-9+/]{60,100}={0,2}\Z")]


class Account(TypedDict):
    """``gang.prepare``: values for the launcher's ssh configuration, for ``known_hosts`` and for passwd."""

    uid: Digits
    gid: Digits
    groups: Annotated[list[tuple[Digits, GroupName]], Meta(max_length=_MOST_GROUPS)]
    user: UserName
    folder: Path
    hostname: HostName
    address: Annotated[str, Meta(pattern=r"\A[0-9]{1,3}(\.[0-9]{1,3}){3}\Z")] | None
    names: Annotated[list[tuple[HostName, PlainAddress]], Meta(max_length=_MOST_NAMES)]
    sshd: Path
    docker_host: Annotated[str, Meta(pattern=r"\Aunix:///[\x21-\x7e]{1,200}\Z")]
    public_key: PublicKey


class Inspected(TypedDict):
    """One container of ``gang.inspect``."""

    id: Name
    name: Name
    attempt: Text | None
    status: Name
    code: Code
    oom: bool
    error: Text
    started: Text
    finished: Text
    ended_ago_s: Seconds | None
    memory_bytes: NotRequired[Count | None]
    unwritable: NotRequired[Text]


class EngineSame(Struct, tag_field="state", tag="same"):
    """``gang.engine``: the engine that created the container answers."""

    why: Text = ""


class EngineGone(Struct, tag_field="state", tag="gone"):
    """No engine answers."""

    why: Text = ""


class EngineUnknown(Struct, tag_field="state", tag="unknown"):
    """The state of the engine is unknown."""

    why: Text = ""


class EngineRestarted(Struct, tag_field="state", tag="restarted"):
    """Another engine answers; `up_s` is its uptime."""

    up_s: Seconds
    why: Text = ""


class HoldingProcess(TypedDict):
    """A process that holds a GPU of a fenced attempt."""

    gpu: Index
    pid: Count
    user: Text | None
    command: str
    container: Text | None


class Rest(TypedDict):
    """``gang.fence``: everything that prevents the fence of the host; and why the epilog failed, if it did."""

    containers: list[Text]
    processes: list[str]
    folder: bool
    users: list[HoldingProcess]
    gpu_problem: Text
    claims: list[Text]
    epilog: NotRequired[Text]


class ToldProgress(TypedDict):
    """``gang.progress``: the values of a rank come from its program, and may be anything."""

    age_s: Seconds | None
    checkpoint_age_s: Seconds | None
    ranks: dict[Annotated[str, Meta(pattern=r"\A[0-9]{1,7}\Z")], dict[Literal["progress", "checkpoint"], Any]]


class MemoryUsed(Struct):
    """The memory that a container may use and the most that it has used, None = no limit or not known; and whether it
    has reached its own limit.
    """

    limit_bytes: Count | None = None
    peak_bytes: Count | None = None
    is_own_limit: bool = True


class KernelNews(Struct, tag_field="kind", tag="kernel", omit_defaults=True):
    """``health``: a line of the kernel's log."""

    line: Text
    rank: RankNumber | None
    cards: dict[Annotated[str, Meta(pattern=r"\A[0-9]{1,6}\Z")], Text]
    age_s: Seconds = 0.0
    memory: MemoryUsed | None = None


class XidNews(Struct, tag_field="kind", tag="xid"):
    """``health``: NVML reports an Xid."""

    gpu: Index
    xid: Index


class LostNews(Struct, tag_field="kind", tag="lost"):
    """``health``: NVML can no longer reach a GPU."""

    gpu: Index
    text: Text


class EccNews(Struct, tag_field="kind", tag="ecc"):
    """``health``: a GPU has counted memory errors."""

    gpu: Index
    count: Count
    before: Count


class DiskNews(Struct, tag_field="kind", tag="disk"):
    """``health``: a disk is full."""

    what: Text
    path: Text
    free_bytes: Count


class MemoryNews(MemoryUsed, tag_field="kind", tag="memory", kw_only=True):
    """``health``: the kernel has killed processes of the container because its memory, or the host's, ran out."""

    kills: Count


class PidsNews(Struct, tag_field="kind", tag="pids"):
    """``health``: the container has reached the limit of its processes."""

    refused: Count
    most: Count | None = None


class LinkNews(Struct, tag_field="kind", tag="link"):
    """``health``: a port of an RDMA device was active, and is not any more."""

    device: Text
    state: Text


class FilledNews(Struct, tag_field="kind", tag="filled"):
    """``health``: the container filled a disk and was killed."""

    what: Text
    path: Text
    free_bytes: Count
    written_bytes: Count


class NvmlNews(Struct, tag_field="kind", tag="nvml"):
    """``health``: NVML does not answer."""

    text: Text


class UseOfGpu(Struct, omit_defaults=True):
    """The utilization of one GPU, in percent, its memory, in MiB, and what can make it slow."""

    index: Index
    uuid: Text
    samples: Count
    mean: Annotated[float, Meta(ge=0, le=100)]
    most: Annotated[int, Meta(ge=0, le=100)]
    memory_mib: Count
    sm_mhz: Small | None = None
    throttle: Annotated[list[ThrottleReason], Meta(max_length=8)] = []
    pcie_width: Small | None = None
    pcie_max_width: Small | None = None
    pcie_generation: Small | None = None
    pcie_max_generation: Small | None = None


class UseNews(Struct, tag_field="kind", tag="use"):
    """``health``: the utilization of the job's GPUs (`gpurun.node.gpus`)."""

    gpus: list[UseOfGpu]


Health = list[
    KernelNews | XidNews | LostNews | EccNews | DiskNews | MemoryNews | PidsNews | LinkNews | FilledNews | NvmlNews |
    UseNews
]  # fmt: skip


class RankStart(Struct, tag_field="kind", tag="start"):
    """``ranks.follow``: a rank has started."""

    id: Name
    rank: RankNumber
    age_s: Seconds


class RankOutput(Struct, tag_field="kind", tag="output"):
    """``ranks.follow``: a rank has printed the payload."""

    id: Name
    rank: RankNumber
    stream: Literal["o", "e", "m"]
    end: Count


class RankEnd(Struct, tag_field="kind", tag="end", omit_defaults=True):
    """``ranks.follow``: a rank has ended."""

    id: Name
    rank: RankNumber
    age_s: Seconds
    code: ExitCode
    killed: bool = False
    container: bool = False
    more: bool = False


class ImageAnswer(TypedDict):
    """``images.ask``."""

    local: Digest | None
    named: bool
    store: Literal["graph", "containerd"]
    have: list[Digest]
    root: Text | None
    free_bytes: Count | None
    spool_free_bytes: Count | None
    one_disk: bool


class PlacedImage(TypedDict):
    """One image of ``images.listing``; ``images.prune`` adds ``freed``."""

    id: Text
    names: list[Text]
    present: bool
    temporary: bool
    shipped_s: Seconds | None
    size_bytes: Count
    used_by: list[Text]
    freed: NotRequired[bool]


class ListedOutputs(TypedDict):
    """``outputs.list``."""

    present: bool
    declared: NotRequired[tuple[Annotated[int, Meta(ge=-_MOST, le=_MOST)], Count] | None]


class HeldSet(TypedDict):
    """One data set of ``data.list``."""

    digest: Digest
    bytes: Count
    files: Count
    used_s: Seconds
    jobs: list[Name]


class Connected(TypedDict):
    """One outcome of ``probe.connect``."""

    ok: bool
    error: Text | None


class ListedRank(TypedDict):
    """One rank of ``ranks.list``."""

    id: Name
    rank: Annotated[int, Meta(ge=0, le=10**7)]
    code: ExitCode | None
    age_s: Seconds


class RankStarter(TypedDict):
    """A rank of ``ranks.starters``, and which of the programs it has started."""

    rank: Annotated[int, Meta(ge=0, le=10**7)]
    which: Annotated[int, Meta(ge=0, le=10**4)]


class RanksMeeting(TypedDict):
    """What ``ranks.look`` has seen: the ranks that run there, the ports where they meet, whether they have met."""

    ranks: Annotated[list[Annotated[int, Meta(ge=0, le=10**7)]], Meta(max_length=1 << 13)]
    ports: Annotated[list[Annotated[int, Meta(ge=1, le=65535)]], Meta(max_length=1 << 6)]
    met: bool


_Short = Annotated[str, Meta(max_length=300)]
_Frames = Annotated[list[tuple[_Short, Annotated[int, Meta(ge=0, le=10**9)], _Short]], Meta(max_length=40)]


class ToldStack(TypedDict):
    """Where a process of a rank stands; its program may have made it up."""

    rank: RankNumber
    inner: RankNumber | None
    pid: Count
    frames: _Frames
    threads: Count
    state: Annotated[str, Meta(max_length=1)]


class ToldGroup(TypedDict):
    """The last collective of a rank in one process group."""

    group: _Short
    entered: Count
    done: Count
    name: _Short
    state: _Short
    frames: _Frames


class ToldRecorder(TypedDict):
    """What a rank's flight recorder says."""

    rank: RankNumber
    groups: Annotated[list[ToldGroup], Meta(max_length=64)]
    problem: _Short


class ToldHang(TypedDict):
    """``hang.look``: where the ranks of a host stand."""

    stacks: Annotated[list[ToldStack], Meta(max_length=256)]
    recorder: Annotated[list[ToldRecorder], Meta(max_length=256)]
    ras: Text


def fields(**types: Any) -> Any:
    """Return the type of a JSON object with these keys; a key whose value may be None is optional."""
    optional = [(name, kind, None) for name, kind in types.items() if _may_be_none(kind)]
    return msgspec.defstruct("Fields", [*((n, k) for n, k in types.items() if not _may_be_none(k)), *optional])


def _may_be_none(kind: Any) -> bool:
    return type(None) in get_args(kind)


class AnswerTypes(NamedTuple):
    """The types of one operation's answers.

    Attributes:
        end: the type of the return value.
        item: the type of each item, if the operation is a stream.
    """

    end: Any = None
    item: Any = None


RECEIVED = fields(bytes=Count, digest=Digest | None)
FILE = fields(
    kind=Literal["file", "dir", "link", "other"], size=Count, mode=Count, uid=Count, gid=Count, mtime_s=Seconds
)
CONVERTED_BY_FACTS = Any
"""`gpurun.facts` defines the type and converts the answer before any other code reads it."""

ANSWERS: Mapping[str, AnswerTypes] = {
    "blobs.open": AnswerTypes(fields(address=Address, port=Port, head=Address)),
    "blobs.expect": AnswerTypes(fields(have_bytes=Count)),
    "blobs.grant": AnswerTypes(),
    "blobs.missing": AnswerTypes(list[tuple[Digest, list[tuple[Count, Count]]]]),
    "blobs.fetch": AnswerTypes(RECEIVED, RECEIVED),
    "blobs.feed": AnswerTypes(RECEIVED, RECEIVED),
    "blobs.status": AnswerTypes(fields(blobs=dict[Digest, Count], sent_bytes=Count)),
    "blobs.close": AnswerTypes(),
    "caches.list": AnswerTypes(fields(bytes=Count, entries=Count, jobs=list[Name])),
    "caches.trim": AnswerTypes(fields(freed_bytes=Count, bytes=Count, jobs=list[Name], stuck=list[Text])),
    "claims.take": AnswerTypes(),
    "claims.list": AnswerTypes(CONVERTED_BY_FACTS),
    "data.use": AnswerTypes(list[Digest]),
    "data.begin": AnswerTypes(list[Digest] | None),
    "data.put": AnswerTypes(fields(bytes=Count)),
    "data.expect": AnswerTypes(),
    "data.finish": AnswerTypes(),
    "data.drop": AnswerTypes(),
    "data.manifest": AnswerTypes(),
    "data.verify": AnswerTypes(None, Count),
    "data.list": AnswerTypes(fields(sets=Annotated[list[HeldSet], Meta(max_length=MOST_SETS)])),
    "data.evict": AnswerTypes(dict[Digest, Text]),
    "data.folders": AnswerTypes(dict[Text, Text]),
    "docker.request": AnswerTypes(fields(status=Annotated[int, Meta(ge=100, le=999)], json=Any)),
    "docker.logs": AnswerTypes(None, fields(stream=Literal["stdout", "stderr"])),
    "docker.wait": AnswerTypes(fields(code=Code | None, error=Text | None)),
    "files.write": AnswerTypes(fields(bytes=Count)),
    "files.read": AnswerTypes(fields(size=Count)),
    "files.mkdir": AnswerTypes(),
    "files.rmtree": AnswerTypes(fields(removed=bool)),
    "files.stat": AnswerTypes(FILE | None),
    "files.listdir": AnswerTypes(list[str]),
    "files.df": AnswerTypes(fields(free_bytes=Count, total_bytes=Count, free_inodes=Count)),
    "gang.prepare": AnswerTypes(Account),
    "gang.create": AnswerTypes(fields(container=Text, copied=Text | None)),
    "gang.put": AnswerTypes(fields(bytes=Count)),
    "gang.start": AnswerTypes(),
    "gang.inspect": AnswerTypes(list[Inspected]),
    "gang.engine": AnswerTypes(EngineSame | EngineGone | EngineUnknown | EngineRestarted),
    "gang.has_ended": AnswerTypes(bool),
    "gang.signal": AnswerTypes(Count),
    "gang.fence": AnswerTypes(Rest),
    "gang.run_file": AnswerTypes(fields(size=Count)),
    "gang.progress": AnswerTypes(ToldProgress),
    "hang.look": AnswerTypes(ToldHang),
    "hang.written": AnswerTypes(fields(age_s=Seconds | None)),
    "health.watch": AnswerTypes(None, Health),
    "health.recent": AnswerTypes(Health),
    "hooks.health": AnswerTypes(fields(said=Text)),
    "hooks.prolog": AnswerTypes(),
    "images.ask": AnswerTypes(ImageAnswer),
    "images.name": AnswerTypes(),
    "images.install": AnswerTypes(
        fields(local=Digest), fields(state=Literal["receiving", "loading"], layer=Index, layers=Index)
    ),
    "images.listing": AnswerTypes(list[PlacedImage]),
    "images.prune": AnswerTypes(list[PlacedImage]),
    "outputs.list": AnswerTypes(ListedOutputs),
    "outputs.read": AnswerTypes(),
    "outputs.sums": AnswerTypes(),
    "outputs.write": AnswerTypes(fields(files=Count)),
    "outputs.remove": AnswerTypes(),
    "probe.facts": AnswerTypes(CONVERTED_BY_FACTS),
    "probe.clock": AnswerTypes(fields(clock_s=Seconds)),
    "probe.sample": AnswerTypes(None, HostSample),
    "probe.signs": AnswerTypes(list[Text]),
    "probe.listen": AnswerTypes(fields(accepted=Count), fields(ports=list[Port])),
    "probe.connect": AnswerTypes(list[Connected]),
    "probe.resolve": AnswerTypes(dict[Text, list[Text] | None]),
    "proc.run": AnswerTypes(fields(code=Code, stdout=str, stderr=str, truncated=bool)),
    "ranks.count": AnswerTypes(Count),
    "ranks.cut": AnswerTypes(fields(cut=Count, refused=Count)),
    "ranks.follow": AnswerTypes(None, RankStart | RankOutput | RankEnd),
    "ranks.release": AnswerTypes(fields(bytes=Count)),
    "ranks.list": AnswerTypes(list[ListedRank]),
    "ranks.look": AnswerTypes(RanksMeeting),
    "ranks.starters": AnswerTypes(list[RankStarter]),
}


class NotAnAnswer(ValueError):
    """An answer is not valid for its operation. The message contains the place of the error."""


def checked_answer(op: str, said: object, *, item: bool = False) -> Any:
    """Return a host's answer, as JSON values, if it is valid for this operation. Drops unknown keys.

    Args:
        item: the answer is an item of a stream, not the operation's final answer.

    Raises:
        NotAnAnswer: the answer is not valid.
    """
    types = ANSWERS.get(op, AnswerTypes())
    kind = types.item if item else types.end
    if kind is Any or (kind is None and said is None):
        return said
    try:
        return msgspec.to_builtins(msgspec.convert(said, ready(kind)))
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # a lone surrogate raises ValueError
        raise NotAnAnswer(f"{op}: {error}") from None


def words(said: object) -> str:
    """Return a host's text for display: limited in length, and without control characters except line breaks."""
    lines = str(said)[:_MOST_WORDS].splitlines()
    return "\n".join("".join(letter if letter.isprintable() else "?" for letter in line) for line in lines)
