"""Read the types of JSON documents: as Markdown for the reference, and as a check for tests.

`SHAPES` maps each command to its documents. A shape is the type hint of what a command gives to `print_json`. Its
objects are TypedDicts and dataclasses; their docstrings say what keys mean.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal

from gpurun.cli import (
    config,
    content,
    disk,
    doctor,
    dry_run,
    follow,
    history,
    inventory_edit,
    inventory_hosts,
    inventory_reading,
    one_job,
    printing,
    probe,
    recover,
    scale_commands,
    sweep_commands,
    why,
)
from gpurun.content import ship, staging
from gpurun.history.report import Accounts
from gpurun.lab.lab import LabStatus
from gpurun.simulate.report import Report
from gpurun.studies import campaign_report

NAMES = {
    str: "text", int: "integer", float: "number", bool: "`true` or `false`", Path: "text", object: "anything",
    Any: "anything", type(None): "`null`",
}  # fmt: skip
_ATTRIBUTE = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", re.MULTILINE)


@cache
def names_in(module: str) -> Mapping[str, Any]:
    """What a module's names mean to a type checker: also those below `if TYPE_CHECKING:`."""
    found = dict(vars(importlib.import_module(module)))
    for node in ast.parse(inspect.getsource(importlib.import_module(module))).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), module, "exec"), found)
    return found


INVENTORY_LIST = inventory_reading.InventoryListShape
SHAPES: Mapping[str, tuple[Any, ...]] = {
    "submit": (printing.SubmittedShape, dry_run.DryRunShape),
    "validate": (config.RecipeCheckShape,),
    "sweep run": (sweep_commands.SweepStartedShape, dry_run.DryRunShape),
    "sweep status": (sweep_commands.SweepsShape, sweep_commands.SweepShape),
    "sweep best": (sweep_commands.BestTrialShape,),
    "sweep table": (sweep_commands.SweepShape,),
    "sweep stop": (sweep_commands.SweepShape,),
    "sweep resume": (sweep_commands.SweepShape,),
    "scale run": (campaign_report.CampaignShape, dry_run.DryRunShape),
    "scale list": (scale_commands.CampaignsShape,),
    "scale show": (campaign_report.CampaignShape,),
    "scale report": (scale_commands.CampaignFilesShape,),
    "status": (printing.StatusShape,),
    "queue": (why.QueueShape,),
    "why": (why.WhyShape,),
    "logs": (one_job.LogLineShape,),
    "events": (follow.EventShape,),
    "cancel": (printing.JobsShape,),
    "requeue": (printing.JobsShape,),
    "wait": (printing.JobsShape,),
    "outputs": (one_job.OutputsShape,),
    "show": (one_job.ShowShape,),
    "rerun": (printing.SubmittedShape,),
    "diff": (one_job.DiffShape,),
    "history": (history.HistoryShape,),
    "report": (Accounts,),
    "du": (disk.DiskShape, disk.CachesSizeShape),
    "prune": (disk.PruneShape, disk.CachesPruneShape),
    "doctor": (doctor.DoctorShape,),
    "bench": (doctor.BenchShape,),
    "ship": (ship.ShipShape, ship.ShipPlanShape),
    "images": (content.ImagesShape,),
    "data list": (content.DataListShape,),
    "data stage": (staging.StageShape,),
    "data evict": (content.EvictShape,),
    "simulate": (Report,),
    "inventory list": (INVENTORY_LIST,),
    "inventory show": (inventory_reading.InventoryShape, INVENTORY_LIST),
    "inventory validate": (inventory_reading.ValidateShape,),
    "inventory probe": (probe.ProbeShape,),
    "inventory diff": (inventory_edit.ChangesShape,),
    "inventory cordon": (inventory_hosts.CordonShape,),
    "inventory drain": (inventory_hosts.DrainShape,),
    "inventory uncordon": (inventory_hosts.CordonShape,),
    "inventory trust": (inventory_hosts.TrustShape,),
    "recover": (recover.RecoverShape,),
    "audit": (history.AuditShape,),
    "config view": (config.ConfigShape,),
    "version": (config.VersionShape,),
    "lab status": (LabStatus,),
}
"""Command → the documents that it may print, the usual one first."""


@dataclass(frozen=True)
class Member:
    """One key of an object."""

    hint: Any
    about: str
    is_optional: bool


def is_object(hint: Any) -> bool:
    """Whether JSON has an object for a type, with known keys."""
    return isinstance(hint, type) and (typing.is_typeddict(hint) or is_dataclass(hint))


def members(shape: type) -> Mapping[str, Member]:
    """The keys of an object."""
    about: dict[str, str] = {}
    names: dict[str, Any] = {}
    for one in lineage(shape):
        names |= {} if one.__module__ == "builtins" else names_in(one.__module__)
        for keys, text in _ATTRIBUTE.findall(inspect.cleandoc(one.__doc__ or "")):
            about |= dict.fromkeys(keys.split(", "), " ".join(text.split()).replace("``", "`"))
    marked = typing.get_type_hints(shape, localns=names, include_extras=True)
    optional = {key for key, hint in marked.items() if typing.get_origin(hint) is typing.NotRequired}
    optional |= getattr(shape, "__optional_keys__", frozenset())
    hints = typing.get_type_hints(shape, localns=names)
    return {key: Member(hint, about.get(key, ""), key in optional) for key, hint in hints.items()}


def lineage(shape: type) -> list[type]:
    """The classes whose keys an object has, itself last. Python 3.11's TypedDicts forget the ones that they extend."""
    if not typing.is_typeddict(shape):
        return list(reversed(shape.__mro__))
    try:
        (source,) = ast.parse(inspect.getsource(shape)).body
    except OSError:  # TypedDict("Name", {…})
        return [shape]
    assert isinstance(source, ast.ClassDef)
    above = [ast.unparse(base) for base in source.bases]
    named = [names_in(shape.__module__)[name] for name in above if name != "TypedDict"]
    return [*(one for each in named for one in lineage(each)), shape]


def summary(shape: type) -> str:
    """What an object is."""
    text = re.split(r"\n +(?:Attributes|Raises):\n", shape.__doc__ or "")[0].strip().replace("``", "`")
    return "" if text.startswith(f"{shape.__name__}(") else re.sub(r"\s*\n\s*", " ", text)


def name(shape: type) -> str:
    """What the reference calls an object."""
    return shape.__name__.removesuffix("Shape")


def parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a hint is made of: `list`, `dict`, `types.UnionType`, `Literal` or the type itself, and its arguments."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return types.UnionType, arguments
    if origin is Literal or origin is None:
        return origin or hint, arguments
    if issubclass(origin, Mapping):
        return dict, arguments
    return list, arguments


def objects(hint: Any) -> Iterator[type]:
    """The objects that a hint names, itself included, each before those in it."""
    if is_object(hint):
        yield hint
        for member in members(hint).values():
            yield from objects(member.hint)
    else:
        for one in parts(hint)[1]:
            yield from objects(one)


def words(hint: Any) -> str:
    """A type in words, as Markdown; objects are links to their sections."""
    kind, arguments = parts(hint)
    if is_object(hint):
        return f"[{name(hint)}](#{name(hint).lower()})"
    if kind in (types.UnionType, Literal):
        return " or ".join(f"`{one}`" if kind is Literal else words(one) for one in arguments)
    if kind is dict:
        return f"object: name → {words(arguments[1])}"
    if kind is list:
        different = [one for one in dict.fromkeys(arguments) if one is not ...]
        return f"list of {' and '.join(map(words, different))}"
    return _plain_words(hint)


def _plain_words(hint: Any) -> str:
    is_enum = isinstance(hint, type) and issubclass(hint, Enum)
    return " or ".join(f"`{one.value}`" for one in hint) if is_enum else NAMES[hint]


def printed_problems(argv: Sequence[str], out: str) -> list[str]:
    """Where what a command printed differs from all documents that it may print; nothing without ``--json``."""
    options, names = argv[: argv.index("--")] if "--" in argv else argv, [word for word in argv if word[:1] != "-"]
    shapes = SHAPES.get(" ".join(names[:2])) or SHAPES.get(names[0] if names else "")
    if "--json" not in options or not shapes or not out.strip():
        return []
    documents = map(json.loads, out.splitlines()) if names[0] in ("logs", "events") else [json.loads(out)]
    found = [min((list(problems(document, shape)) for shape in shapes), key=len) for document in documents]
    return [problem for each in found for problem in each]


def problems(value: object, hint: Any, where: str = "$") -> Iterator[str]:
    """Where a JSON value differs from its shape."""
    kind, arguments = parts(hint)
    if is_object(hint):
        yield from _object_problems(value, hint, where)
    elif kind is types.UnionType:
        found = [list(problems(value, one, where)) for one in arguments]
        if all(found):
            yield min(found, key=len)[0]
    elif kind is dict:
        if not isinstance(value, dict):
            yield f"{where}: {value!r} is no object"
        else:
            for key, one in value.items():
                yield from problems(one, arguments[1], f"{where}.{key}")
    elif kind is list:
        yield from _list_problems(value, arguments, where)
    elif not _is(value, kind, arguments):
        yield f"{where}: {value!r} is no {words(hint)}"


def _object_problems(value: object, shape: type, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: {value!r} is no {name(shape)}"
        return
    known = members(shape)
    yield from (f"{where}: {key} is unknown" for key in value if key not in known)
    yield from (f"{where}: no {key}" for key, one in known.items() if key not in value and not one.is_optional)
    for key, one in known.items():
        if key in value:
            yield from problems(value[key], one.hint, f"{where}.{key}")


def _list_problems(value: object, arguments: tuple[Any, ...], where: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{where}: {value!r} is no list"
        return
    is_fixed = len(arguments) > 1 and arguments[-1] is not ...
    if is_fixed and len(value) != len(arguments):
        yield f"{where}: {len(value)} values, not {len(arguments)}"
    for at, one in enumerate(value):
        yield from problems(one, arguments[min(at, len(arguments) - 1)] if is_fixed else arguments[0], f"{where}[{at}]")


def _is(value: object, kind: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether a value that is no list and no object is of a kind."""
    if kind in (Any, object):
        return True
    if kind is Literal:
        return value in arguments
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value in [one.value for one in kind]
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str if kind is Path else kind)
