"""``gpurun show | diff | rerun | logs | outputs | exec``: what one job is, prints and leaves; ``gpurun ssh``."""

from __future__ import annotations

import difflib
import errno
import filecmp
import json
import os
import re
import shlex
import shutil
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypedDict

import typer

from gpurun.cli import completion
from gpurun.cli.jobs import LOOK_S, beside_text
from gpurun.cli.options import WHEN, HostArgument, InventoryOption, JobArgument, JsonOption
from gpurun.cli.printing import JobShape, SubmittedShape, job_json, print_json, ran_text, say, say_problem
from gpurun.cli.stores import find_job
from gpurun.documents.plain import printable, printed
from gpurun.errors import BadInput, GpurunError, StateError
from gpurun.head.caretaker import Caretaker
from gpurun.jobs.record import State
from gpurun.moments import of_log
from gpurun.quantities import count
from gpurun.state import clock

if TYPE_CHECKING:
    from gpurun.content.workdir import Code
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.record import JobRecord, Origin, OutputsLeft
    from gpurun.jobs.spec import JobSpec
    from gpurun.leases.lease import Lease
    from gpurun.supervisor.lines import LoggedLine


# ``gpurun show``, ``rerun``, ``diff``: show a job's inputs and results, run it again, compare two jobs.


LEFT_OUT = ("name",)
"""Fields of a spec that do not affect what runs."""
MOST_SHOWN_BYTES = 64 << 10
"""The largest file whose lines `diff` compares."""


@dataclass(frozen=True)
class _Told:
    """The facts that `show` and `diff` read about a job.

    Attributes:
        inputs: path of a field, such as ``constraints.locality`` → value; only fields that are set.
        metrics: name → the last value from the rank whose metrics count (`gpurun.supervisor.lines.Speaker`).
    """

    folder: JobFolder
    inputs: Mapping[str, Any]
    code: Code | None
    metrics: Mapping[str, float]


class ShowShape(TypedDict):
    """A job's inputs and results.

    Attributes:
        inputs: settings that differ from their defaults, by path, such as `constraints.locality`.
        metrics: the last value of each metric.
        code_files: files and folders of the workdir; null: the job has none.
        placements: the hosts and GPUs of each attempt.
    """

    job: JobShape
    inputs: Mapping[str, Any]
    origin: Origin
    metrics: Mapping[str, float]
    code_files: int | None
    placements: list[str]


def show(job: JobArgument, as_json: JsonOption = False) -> None:
    """Show a job's image, code, commit, settings, placement and results.

    gpurun show @last
    """
    from gpurun.cli.shares import lines as share_lines
    from gpurun.cli.shares import shares_of

    told = _told(find_job(job))
    folder, record, origin = told.folder, told.folder.record(), told.folder.origin()
    ran_on = [_placement(event) for event in _events(folder) if event.get("kind") == "placement"]
    files = None if told.code is None else len(told.code.entries)
    if as_json:
        job_and_results = ShowShape(
            job=job_json(record), inputs=told.inputs, origin=origin, metrics=told.metrics, code_files=files,
            placements=ran_on,
        )  # fmt: skip
        print_json(job_and_results)
        return
    said = "; ".join(filter(None, (record.state.value, printable(record.story(clock.now_s())))))
    lines = [("job", f"{record.id}  {printable(record.name)}"), ("state", said)]
    lines.append(("ran", ran_text(folder, record, clock.now_s())))
    lines += [(f"last {printable(name)}", f"{value:.6g}") for name, value in told.metrics.items()]
    lines += [(name, printable(_text(value))) for name, value in told.inputs.items()]
    lines += [("code holds", f"{count(files, 'file or folder', 'files and folders')}")] if files is not None else []
    lines += [(name, printable(_text(value))) for name, value in vars(origin).items() if name != "diff" and value]
    if origin.diff:
        changed = count(origin.diff.count("\n"), "line")
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
    from gpurun.content.images import Engine
    from gpurun.content.workdir import kept_code
    from gpurun.head.submit import queue_jobs
    from gpurun.inventory.read import load_inventory

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
    inventory = load_inventory(path)
    Engine(inventory.docker_host).image(spec.image, spec.image_id)
    if missing := [file for file in spec.secret_files.values() if not Path(file).is_file()]:
        raise BadInput(
            f"the secret file {missing[0]} does not exist any more", job=folder.id, hint="create the file again"
        )
    if spec.code:
        _code(folder, spec.code)  # raises if the stored code is missing or damaged
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
        print_json(SubmittedShape(job=job_json(new.record())))
        return
    typer.echo(new.id)
    say_what_happens(new.record(), again, inventory, is_decided=made.problem is None)


def _inventory_for(record: JobRecord) -> Path:
    """Return the inventory with which a job runs again: its own; for another user's job, this user's.

    An inventory names an ``ssh_config``, which can run commands.
    """
    from gpurun.inventory.read import find_inventory

    return Path(record.inventory) if record.owner_uid == os.getuid() else find_inventory(None, os.environ)


def _look_for_data(folder: JobFolder, spec: JobSpec) -> None:
    """Refuse a job with a data set that neither its source nor any host has any more.

    Raises:
        BadInput: names the missing data set.
    """
    from gpurun.content.data import Pins
    from gpurun.state import caches

    for name, source in spec.data.items():
        if source.digest is None or Pins(folder.path.home).as_pinned(source) is not None:
            continue
        known = caches.hosts_of(source.digest)
        where = f"the data set {name!r} ({source.digest[7:19]}) is no longer in {source.path}"
        if not known:
            raise BadInput(f"{where}, and gpurun knows no host with a copy", job=folder.id, hint="submit the job again")
        say(f"{where}; gpurun copies it from {', '.join(sorted(known)[:3])}")


class DiffShape(TypedDict):
    """How two jobs differ.

    Attributes:
        differs: by setting: the value in the first job and in the second.
        files: files of the workdir that differ.
    """

    differs: dict[str, tuple[Any, Any]]
    files: list[str]


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
    origins = [vars(job.folder.origin()) for job in (first, second)]
    fields = {**_differing(first.inputs, second.inputs), **_differing(*origins)}
    fields |= _differing(first.metrics, second.metrics) | _differing(_outcome(first), _outcome(second))
    fields.pop("diff", None)
    files = _differing(_digests(first.code), _digests(second.code))
    if as_json:
        print_json(DiffShape(differs=fields, files=sorted(files)))
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
    from gpurun.supervisor.lines import LogTail, Speaker

    spec = msgspec.to_builtins(folder.spec())
    unset = dict(_flat(msgspec.to_builtins(JobSpec(name="", image="", gpus=0, command=()))))
    inputs = {path: value for path, value in _flat(spec) if path not in LEFT_OUT and value != unset.get(path)}
    metrics: dict[str, float] = {}
    speakers: defaultdict[str, Speaker] = defaultdict(Speaker)
    for report in LogTail(folder.log).new_reports():
        metrics |= {name: value for name, value in report.metrics.items() if speakers[name].counts(report)}
    return _Told(folder, inputs, _code(folder, spec["code"]) if spec["code"] else None, metrics)


def _code(folder: JobFolder, digest: str) -> Code:
    from gpurun.content.workdir import Code

    try:
        return Code(folder.code, digest)
    except FileNotFoundError as error:
        raise StateError(
            "the job's copy of its code does not exist any more", job=folder.id, where=str(folder.code)
        ) from error


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


# ``gpurun logs``: print the output of a job's ranks.


def logs(
    job: JobArgument,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, metavar="RANK", help="Print only the lines of this rank.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, metavar="LINES", help="Begin with the last LINES lines.")
    ] = None,
    since_s: Annotated[
        float | None,
        typer.Option(
            "--since", click_type=WHEN, help="Print lines since this time, such as 10m, 08:00 or '2026-11-25 08:00'."
        ),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option("--grep", metavar="PATTERN", help="Print only lines that match this regular expression."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Print the local time before each line.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on each line.")] = False,
) -> None:
    """Print the output of a job's ranks.

    If the job failed, gpurun also prints on stderr which rank failed first.

    gpurun logs @last --rank 0 --tail 50

    gpurun logs @last --follow --grep loss
    """
    from gpurun.supervisor.lines import LogTail

    folder = find_job(job)
    wanted = _Wanted(_checked_rank(folder, rank), _since(since_s), _pattern(grep))
    lines, caretaker, printed_some = LogTail(folder.log), Caretaker(), False
    if tail is not None:
        lines.skip_to_last(tail, wanted.has)
    while True:
        record = folder.record()
        for logged in lines.new():
            if wanted.has(logged):
                printed_some = True
                sys.stdout.write(_json(logged) if as_json else _text_of_logs(logged, rank, timestamps=timestamps))
        sys.stdout.flush()
        if record.state.ended or not follow:
            break
        caretaker.look([folder])
        time.sleep(LOOK_S)
    if record.state.ended:
        _say_first_failure(record)
    if not printed_some:
        _say_why_nothing(folder, record)


@dataclass(frozen=True)
class _Wanted:
    """The filters for lines."""

    rank: int | None
    since: str
    pattern: re.Pattern[str] | None

    def has(self, logged: LoggedLine) -> bool:
        return (
            (self.rank is None or logged.line.rank == self.rank)
            and logged.time >= self.since
            and (self.pattern is None or self.pattern.search(logged.line.text) is not None)
        )


def _checked_rank(folder: JobFolder, rank: int | None) -> int | None:
    """Return the rank. Raises BadInput if no attempt of the job can have it."""
    if rank is None:
        return None
    spec = folder.spec()
    ranks = spec.gpus + (spec.roles.without_gpu if spec.roles is not None else 0)
    if spec.one_per_host and spec.min_gpus is None:
        record = folder.record()
        ranks = len(record.granted) if record.granted and record.attempt == 1 else ranks
    if rank >= ranks:
        raise BadInput(f"the job has no rank {rank}", job=folder.id, hint=f"the job's ranks are 0 to {ranks - 1}")
    return rank


def _since(when_s: float | None) -> str:
    """Return the value of ``--since`` in the log's time format (RFC 3339, UTC); "" for the whole log."""
    return "" if when_s is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when_s))


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadInput(
            f"--grep {text[:40]!r} is not a regular expression: {error}" if text else f"--grep: {error}"
        ) from None


def _text_of_logs(logged: LoggedLine, rank: int | None, *, timestamps: bool) -> str:
    who = "" if rank is not None else f"{logged.who} "
    return f"{of_log(logged.time) + ' ' if timestamps else ''}{who}{printed(logged.line.text)}\n"


class LogLineShape(TypedDict):
    """One line of a log. The command prints one such object a line.

    Attributes:
        time: when gpurun read the line: UTC, as RFC 3339 writes it.
        rank: null: the launcher printed it.
        stream: `stdout` or `stderr`.
    """

    time: str
    rank: int | None
    stream: str
    text: str


def _json(logged: LoggedLine) -> str:
    line = logged.line
    return json.dumps(LogLineShape(time=logged.time, rank=line.rank, stream=line.stream, text=line.text)) + "\n"


def _say_why_nothing(folder: JobFolder, record: JobRecord) -> None:
    """Say why no line is printed: the job waits, its ranks have not printed, or no line matches."""
    if folder.log.exists() and folder.log.stat().st_size:
        say(f"no line of {record.id}'s log matches the options")
    elif record.state is State.QUEUED:
        say(f"{record.id} has printed nothing: the job waits in the queue; `gpurun why {record.id}` explains why")
    else:
        say(f"{record.id} has printed nothing{'' if record.state.ended else ' yet'}: the job is {record.state.value}")


def _say_first_failure(record: JobRecord) -> None:
    """Print the first rank to fail and its last lines: a launcher prints many lines after them."""
    failure = record.first_failure
    if failure is None:
        return
    say(printable(f"{record.id} {record.state.value}: {record.reason or failure.reason}"))
    for text in failure.excerpt:
        say(f"        | {printed(text)}")


# ``gpurun outputs``: show where a job's outputs are and which are still on hosts; copy them.


HOSTS_FAILED = 4
MOST_NAMED = 3


def outputs(
    job: JobArgument,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="DIR", help="Copy the outputs into this folder. The folder may contain other files."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the folder of a job's outputs. If the job has ended, gpurun first copies outputs that are still on hosts.

    The exit code is 4 if a host has outputs that the head does not have.

    gpurun outputs @last --to results
    """
    folder = find_job(job)
    record = _with_what_was_left(folder)
    if to is not None:
        _copy(folder, to)
    files, size = _measured(folder.outputs)
    if as_json:
        print_json(_document(folder, record, files, size))
    else:
        _print(folder, record, files, size)
    if record.outputs_left is not None and record.outputs_left.hosts:
        raise typer.Exit(HOSTS_FAILED)


def _with_what_was_left(folder: JobFolder) -> JobRecord:
    """Return the job's record. For the owner of an ended job, first copy outputs left on hosts to the head."""
    from gpurun.supervisor.links import Links, last_known
    from gpurun.supervisor.outputs.outputs import bring_left

    record = folder.record()
    left = record.outputs_left
    if left is None or not left.hosts or not record.state.ended or os.getuid() != record.owner_uid:
        return record
    say(f"gpurun asks {', '.join(left.hosts)} for outputs that the head does not have")
    inventory = last_known(folder)
    links = Links(inventory, [host for host in left.hosts if host in inventory.by_name])
    try:
        links.open()
        bring_left(folder, record.attempt, links, list(links.targets))
    finally:
        links.close()
    return folder.record()


def _copy(folder: JobFolder, to: Path) -> None:
    """Copy the outputs that the head has. Keeps symbolic links, modes, times and holes.

    Adds to a folder that exists. Leaves alone what is there: the same files stay, and others are a reason to refuse.

    Raises:
        BadInput: something else of one of the names is there, the target cannot be written, or the head has no outputs.
        StateError: a link is in the place of the outputs.
        GpurunError: some files could not be copied.
    """
    try:
        source = (folder.path / "outputs").open_folder()
    except FileNotFoundError:
        raise BadInput(
            "the job has no outputs on the head", job=folder.id,
            hint="gpurun copies files that ranks write below `--outputs PATH` and, with --workdir, below /workspace",
        ) from None  # fmt: skip
    try:  # the open folder: newer outputs may replace its path during the copy
        top, to = Path(f"/proc/self/fd/{source}"), to.resolve() if to.is_dir() else to
        if others := list(islice(_others(top, to), MOST_NAMED + 1)):
            named = ", ".join(map(str, others[:MOST_NAMED])) + (" and more" if len(others) > MOST_NAMED else "")
            raise BadInput(
                f"the folder already has different files with these names: {named}", where=str(to),
                hint="copy the outputs into a new folder: --to DIR",
            )  # fmt: skip
        _add(top, to)
    except FileExistsError as error:
        raise BadInput(
            "another program created the file while gpurun copied the outputs",
            where=str(error.filename2 or error.filename),
            hint="copy the outputs again, into a new folder",
        ) from None
    except shutil.Error as error:
        first = error.args[0][0]
        what = f"{first[0]}: {first[2]}" if len(error.args[0]) == 1 else f"{len(error.args[0])} files, first {first[0]}"
        raise GpurunError(
            f"gpurun could not copy all outputs: {what}", where=str(to), job=folder.id,
            hint="" if folder.record().state.ended else "the job still writes outputs: try again",
        ) from None  # fmt: skip
    except OSError as error:
        raise BadInput(f"gpurun cannot write the file: {error.strerror}", where=str(error.filename or to)) from None
    finally:
        os.close(source)


def _others(source: Path, to: Path) -> Iterator[Path]:
    """Yield what is in the way of a copy of a folder: what has one of its names, and is something else."""
    if not os.path.lexists(to):
        return
    if not stat.S_ISDIR(to.lstat().st_mode):
        yield to
        return
    for entry in os.scandir(source):
        target = to / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _others(Path(entry.path), target)
        elif os.path.lexists(target) and not _is_same(Path(entry.path), target):
            yield target


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two files have the same content, or two links the same target."""
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    ours, theirs = one.stat(), other.stat()
    if not (stat.S_ISREG(theirs.st_mode) and ours.st_size == theirs.st_size):
        return False
    return ours.st_mtime_ns == theirs.st_mtime_ns or filecmp.cmp(one, other, shallow=False)


def _add(source: Path, to: Path) -> None:
    """Copy a folder; of a folder that exists, what it lacks. Its own mode and times stay."""
    if not os.path.lexists(to):
        shutil.copytree(source, to, symlinks=True, copy_function=_copy_file)
        return
    for entry in os.scandir(source):
        target = to / entry.name
        if entry.is_dir(follow_symlinks=False):
            _add(Path(entry.path), target)
        elif os.path.lexists(target):
            continue
        elif entry.is_symlink():
            target.symlink_to(Path(entry.path).readlink())
        else:
            _copy_file(entry.path, str(target))


def _copy_file(source: str, to: str) -> None:
    """Copy a file as `shutil.copy2` does, and keep its holes."""
    from gpurun.node.folder.contents import extents, stored_of, write_all

    status = Path(source).stat()
    if not stat.S_ISREG(status.st_mode) or stored_of(status) < 0:
        shutil.copy2(source, to)
        return
    with Path(source).open("rb") as old, Path(to).open("xb") as new:
        position = 0
        for hole, piece in extents(old.fileno(), 0, status.st_size, sparse=True):
            write_all(new.fileno(), piece, position)
            position += hole + len(piece)
        os.ftruncate(new.fileno(), position)
    shutil.copystat(source, to)


def _measured(top: Path) -> tuple[int, int]:
    """Return the number of files and their total size in bytes."""
    files = size = 0
    for above, _, names in os.walk(top):
        for name in names:
            files, size = files + 1, size + (Path(above) / name).lstat().st_size
    return files, size


class OutputsShape(TypedDict):
    """A job's outputs on the head.

    Attributes:
        path: null: there are none.
        left: null: all outputs are on the head.
    """

    job: str
    path: str | None
    files: int
    bytes: int
    left: OutputsLeft | None


def _document(folder: JobFolder, record: JobRecord, files: int, size: int) -> OutputsShape:
    path = str(folder.outputs) if folder.outputs.is_dir() else None
    return {"job": record.id, "path": path, "files": files, "bytes": size, "left": record.outputs_left}


def _print(folder: JobFolder, record: JobRecord, files: int, size: int) -> None:
    if folder.outputs.is_dir():
        typer.echo(f"{folder.outputs}  {count(files, 'file')}, {size / (1 << 20):.1f} MiB")
    else:
        typer.echo(f"{record.id} has no outputs on the head{'' if record.state.ended else ' yet'}")
    if record.outputs_left is not None:
        typer.echo(printable(record.outputs_left.words(record.id, is_over=record.state.ended)))


# ``gpurun exec``: run a command inside a running job's container.


def exec_(
    context: typer.Context,
    job: JobArgument,
    rank: Annotated[
        int, typer.Option("--rank", min=0, metavar="RANK", help="Run the command in the container of this rank.")
    ] = 0,
) -> None:
    """Run a command in the container of a job's rank. The command uses your terminal.

    gpurun exec @last --rank 1 -- nvidia-smi
    """
    from gpurun.head.spawn import refuse_others
    from gpurun.launch.container import container_name
    from gpurun.leases.store import LeaseStore
    from gpurun.remote import system_ssh
    from gpurun.remote.route import resolve
    from gpurun.remote.system_ssh import live
    from gpurun.state.audit import AuditLog
    from gpurun.supervisor.links import Links
    from gpurun.supervisor.ranks import Seating, ask_places, host_of

    command = context.obj or ("sh",)
    folder = find_job(job)
    refuse_others(folder, "exec", "run commands in its container")
    record = folder.record()
    if record.started_s is None or record.state.ended:
        raise BadInput(f"the job is {record.state.value}, so the job has no running container", job=record.id)
    lease = LeaseStore(folder.path.home).read(record.id)
    if lease is None:
        raise StateError(
            "the job's lease, the file that reserves its GPUs, does not exist",
            job=record.id,
            hint="run `gpurun recover` to restore the lease",
        )
    spec, links = folder.spec(), Links(_inventory(folder, record, lease), [grant.host for grant in lease.members])
    seating = Seating.of(lease.members, spec)
    try:
        places, silent = ask_places(links, record.id, record.attempt, seating)
    finally:
        links.close()
    target = links.targets[host_of(record.id, rank, places, silent, seating)]
    tty = sys.stdin.isatty()
    engine = ["--host", target.docker_host] if target.docker_host else []
    inside = [
        "docker",
        *engine,
        "exec",
        "-i",
        *(["-t"] if tty else []),
        container_name(record.id, record.attempt),
        *command,
    ]
    route = resolve(target)
    AuditLog(folder.path.home).note("exec", job=record.id, owner=record.owner, rank=rank, program=command[0])
    become(system_ssh.terminal(route, live(route), shlex.join(inside), tty=tty))


def _inventory(folder: JobFolder, record: JobRecord, lease: Lease) -> Inventory:
    """Return the job's inventory, with the gang's hosts as they were when the job got its GPUs.

    Raises:
        BadInput: root runs this for another user's job, and users other than root can change the inventory.
        StateUnavailable: the inventory cannot be loaded, and no supervisor has stored a copy.
    """
    from gpurun.head.spawn import check_inventory
    from gpurun.inventory.read import load_inventory
    from gpurun.leases.lease import as_granted
    from gpurun.supervisor.links import cluster_of

    if os.getuid() == record.owner_uid:
        return cluster_of(folder, lease)[0]
    inventory = load_inventory(Path(record.inventory))
    check_inventory(inventory)
    return as_granted(inventory, lease)


def ssh(context: typer.Context, host: HostArgument, inventory: InventoryOption = None) -> None:
    """Open a shell on a host, or run a command on a host.

    The login uses the same user, key, jump hosts and host key check as all gpurun commands.

    gpurun ssh gpu-r1-01 -- nvidia-smi
    """
    from gpurun.cli.stores import cluster
    from gpurun.remote import system_ssh
    from gpurun.remote.route import resolve, target_of
    from gpurun.remote.system_ssh import live

    found = cluster(inventory)
    names = found.choose(host)
    if len(names) != 1:
        raise BadInput(
            f"{host!r} names {len(names)} hosts, but gpurun ssh opens a shell on only one host",
            hint="name one host, or use `pdsh` or Ansible for several hosts",
        )
    route = resolve(target_of(names[0], found.inventory))
    command = context.obj or ()
    tty = sys.stdin.isatty() and not command
    become(system_ssh.terminal(route, live(route), shlex.join(command), tty=tty))


def become(argv: list[str]) -> NoReturn:
    """Replace this process by a program.

    Raises:
        BadInput: the program is not installed, or an argument is too long: Linux allows 128 KiB (execve(2)).
    """
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        hint = "the command is too long: put a part of the command into a file" if error.errno == errno.E2BIG else None
        raise BadInput(f"{argv[0]} cannot start: {error.strerror}", hint=hint) from error
