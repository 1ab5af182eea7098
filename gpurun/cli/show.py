"""``gpurun show``, ``rerun``, ``diff``: show a job's inputs and results, run it again, compare two jobs."""

from __future__ import annotations

import difflib
import os
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli import completion
from gpurun.cli.jobs import beside_text, find_job
from gpurun.cli.options import JobArgument, JsonOption
from gpurun.cli.printing import job_json, print_json, printable, ran_text, say, say_problem
from gpurun.cli.shares import lines as share_lines
from gpurun.cli.shares import shares_of
from gpurun.errors import BadInput, StateError
from gpurun.quantities.counts import count
from gpurun.state import clock

if TYPE_CHECKING:
    from gpurun.images.code import Code
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord
    from gpurun.jobs.spec import JobSpec

LEFT_OUT = ("name",)
"""Fields of a spec that do not affect what runs."""
MOST_SHOWN_BYTES = 64 << 10
"""The largest file whose lines `diff` compares."""


@dataclass(frozen=True)
class _Told:
    """The facts that `show` and `diff` read about a job.

    Attributes:
        inputs: path of a field, such as ``constraints.locality`` → value; only fields that are set.
        metrics: name → the last value from the rank whose metrics count (`gpurun.supervisor.loglines.Speaker`).
    """

    folder: JobFolder
    inputs: Mapping[str, Any]
    code: Code | None
    metrics: Mapping[str, float]


def show(job: JobArgument, as_json: JsonOption = False) -> None:
    """Show a job's image, code, commit, settings, placement and results.

    gpurun show @last
    """
    told = _told(find_job(job))
    folder, record, origin = told.folder, told.folder.record(), _origin(told.folder)
    ran_on = [_placement(event) for event in _events(folder) if event.get("kind") == "placement"]
    files = None if told.code is None else len(told.code.entries)
    if as_json:
        print_json({
            "job": job_json(record), "inputs": told.inputs, "origin": origin, "metrics": told.metrics,
            "code_files": files, "placements": ran_on,
        })  # fmt: skip
        return
    said = "; ".join(filter(None, (record.state.value, printable(record.reason))))
    lines = [("job", f"{record.id}  {printable(record.name)}"), ("state", said)]
    lines.append(("ran", ran_text(folder, record, clock.now_s())))
    lines += [(f"last {printable(name)}", f"{value:.6g}") for name, value in told.metrics.items()]
    lines += [(name, printable(_text(value))) for name, value in told.inputs.items()]
    lines += [("code holds", f"{count(files, 'file or folder', 'files and folders')}")] if files is not None else []
    lines += [(name, printable(_text(value))) for name, value in origin.items() if name != "diff" and value]
    if origin["diff"]:
        changed = count(origin["diff"].count("\n"), "line")
        lines.append(("changed since", f"{changed} of diff, in {folder.path}/origin.json"))
    lines += [("ran on", text) for text in ran_on]
    lines += [("beside the code", printable(written))] if (written := beside_text(folder)) else []
    lines += [("may use", printable(line)) for line in share_lines(shares_of(folder))]
    width = max(len(name) for name, _ in lines)
    typer.echo("\n".join(f"{name:>{width}}  {value}" for name, value in lines))


def rerun(
    job: JobArgument,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the new job.")] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Show the new job until the job ends, and exit with the job's exit code."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a job again with the same image ID, code, data and settings.

    gpurun rerun @last --follow
    """
    from dataclasses import replace

    from gpurun.cli.follow import follow_new
    from gpurun.cli.submit import say_what_happens
    from gpurun.head.submission import queue_jobs
    from gpurun.images.code import kept_code
    from gpurun.images.engine import Engine
    from gpurun.inventory.load import load

    folder = find_job(job)
    spec, record = folder.spec(), folder.record()
    if not spec.image_id or (spec.workdir is not None and not spec.code):
        raise BadInput(
            f"an old version of gpurun ran {folder.id} and did not keep the job's image and code",
            hint="submit the job again",
        )
    if record.owner_uid != os.getuid() and spec.secret_files:
        raise BadInput(
            f"the job of {record.owner} reads secret files; gpurun does not give your files to another user's program",
            job=folder.id, hint="submit the job's recipe with your own secrets",
        )  # fmt: skip
    path = _inventory_for(record)
    inventory = load(path)
    Engine(inventory.docker_host).image(spec.image, spec.image_id)
    if missing := [file for file in spec.secret_files.values() if not Path(file).is_file()]:
        raise BadInput(
            f"the secret file {missing[0]} does not exist any more", job=folder.id, hint="create the file again"
        )
    if spec.code:
        _code(folder)  # raises if the stored code is missing or damaged
    _look_for_data(folder, spec)
    again = spec if name is None else replace(spec, name=name)
    if record.owner_uid != os.getuid():
        again = replace(again, notify=())  # another user's notify targets may be commands, which would run as this user
    codes = {spec.code: kept_code(folder.code)} if spec.code else {}
    made = queue_jobs([again], path, folder.path.home, os.environ, codes=codes, origins=[folder.origin()])
    if made.problem is not None:
        say_problem(made.problem)
    (new,) = made.folders
    if follow:
        follow_new(new, as_json=as_json)
    if as_json:
        print_json({"job": job_json(new.record())})
        return
    typer.echo(new.id)
    say_what_happens(new.record(), again, inventory, is_decided=made.problem is None)


def _inventory_for(record: JobRecord) -> Path:
    """Return the inventory with which a job runs again: its own; for another user's job, this user's.

    An inventory names an ``ssh_config``, which can run commands.
    """
    from gpurun.inventory.locate import find

    return Path(record.inventory) if record.owner_uid == os.getuid() else find(None, os.environ)


def _look_for_data(folder: JobFolder, spec: JobSpec) -> None:
    """Refuse a job with a data set that neither its source nor any host has any more.

    Raises:
        BadInput: names the missing data set.
    """
    from gpurun.data.pinning import as_pinned
    from gpurun.state import data_sites

    for name, source in spec.data.items():
        if source.digest is None or as_pinned(source, folder.path.home) is not None:
            continue
        known = data_sites.hosts_of(source.digest)
        where = f"the data set {name!r} ({source.digest[7:19]}) is no longer in {source.path}"
        if not known:
            raise BadInput(f"{where}, and gpurun knows no host with a copy", job=folder.id, hint="submit the job again")
        say(f"{where}; gpurun copies it from {', '.join(sorted(known)[:3])}")


def diff(
    one: Annotated[str, typer.Argument(metavar="JOB", help="The first job.", autocompletion=completion.jobs)],
    other: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="The second job, which gpurun compares with the first.", autocompletion=completion.jobs
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show how the settings, the image, the lines of code and the results of two jobs differ.

    gpurun diff first second
    """
    first, second = _told(find_job(one)), _told(find_job(other))
    fields = {**_differing(first.inputs, second.inputs), **_differing(_origin(first.folder), _origin(second.folder))}
    fields |= _differing(first.metrics, second.metrics) | _differing(_outcome(first), _outcome(second))
    fields.pop("diff", None)
    files = _differing(_digests(first.code), _digests(second.code))
    if as_json:
        print_json({"differs": fields, "files": sorted(files)})
        return
    for name, (left, right) in fields.items():
        typer.echo(printable(f"{name}: {_text(left)} → {_text(right)}"))
    for path in sorted(files):
        for line in _file_diff(path, first.code, second.code):
            typer.echo(printable(line))
    if not fields and not files:
        say("the jobs are the same")


def _told(folder: JobFolder) -> _Told:
    import msgspec

    from gpurun.jobs.spec import JobSpec
    from gpurun.supervisor.loglines import LogTail, Speaker

    spec = msgspec.to_builtins(folder.spec())
    unset = dict(_flat(msgspec.to_builtins(JobSpec(name="", image="", gpus=0, command=()))))
    inputs = {path: value for path, value in _flat(spec) if path not in LEFT_OUT and value != unset.get(path)}
    metrics: dict[str, float] = {}
    speakers: defaultdict[str, Speaker] = defaultdict(Speaker)
    for report in LogTail(folder.log).new_reports():
        metrics |= {name: value for name, value in report.metrics.items() if speakers[name].counts(report)}
    return _Told(folder, inputs, _code(folder) if spec["code"] else None, metrics)


def _code(folder: JobFolder) -> Code:
    from gpurun.images.code import Code

    try:
        return Code(folder.code)
    except FileNotFoundError as error:
        raise StateError(
            "the job's copy of its code does not exist any more", job=folder.id, where=str(folder.code)
        ) from error


def _origin(folder: JobFolder) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(folder.origin())
    return found


def _outcome(told: _Told) -> dict[str, Any]:
    record = told.folder.record()
    return {"outcome": record.state.value, "exit code": record.exit_code}


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested fields as pairs of path and value."""
    for key, one in value.items():
        if isinstance(one, dict) and one:
            yield from _flat(one, f"{above}{key}.")
        else:
            yield f"{above}{key}", one


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys((*one, *other))
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _digests(code: Code | None) -> dict[str, tuple[str, int, str, str]]:
    entries = () if code is None else code.entries
    return {each.path: (each.kind, each.mode, each.digest, each.target) for each in entries}


def _file_diff(path: str, one: Code | None, other: Code | None) -> Iterator[str]:
    """Yield the changed lines of a file; for a binary or long file, only that it differs."""
    texts = [_lines(path, code) for code in (one, other)]
    if None in texts:
        yield f"{path}: differs"
        return
    shown = list(difflib.unified_diff(texts[0] or [], texts[1] or [], f"a/{path}", f"b/{path}", lineterm=""))
    yield from shown or [f"{path}: differs only in its file mode"]


def _lines(path: str, code: Code | None) -> list[str] | None:
    """Return a file's lines; [] for a missing file, None for a binary or long file."""
    entry = next((each for each in code.entries if each.path == path), None) if code is not None else None
    if entry is None:
        return []
    if code is None or entry.kind != "file" or entry.size > MOST_SHOWN_BYTES:
        return None
    try:
        return b"".join(code.content(entry.digest)).decode().splitlines()
    except UnicodeDecodeError:
        return None


def _events(folder: JobFolder) -> Iterator[dict[str, Any]]:
    from gpurun.jobs.events import EventTail

    yield from EventTail(folder.events).new()


def _placement(event: Mapping[str, Any]) -> str:
    hosts = event.get("hosts") or ()
    return ", ".join(printable(f"{each.get('host')}:{','.join(map(str, each.get('gpus', ())))}") for each in hosts)


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return shlex.join(map(str, value))
    return "-" if value is None else str(value)
