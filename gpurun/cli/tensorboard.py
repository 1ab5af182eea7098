"""``gpurun tensorboard``: serve the curves of running and ended jobs and sweeps to a browser."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli import completion
from gpurun.cli.options import IdleOption
from gpurun.cli.printing import duration, printable, say
from gpurun.cli.serving import say_url, told_to_end
from gpurun.errors import BadInput
from gpurun.quantities.counts import count

if TYPE_CHECKING:
    from gpurun.tensorboard.shown import ShownRun

LOOK_S = 5.0
HOUR_S = 3600.0
FOLDER = "gpurun-tensorboard-"


def tensorboard(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB|SWEEP...",
            help="Jobs or sweeps, each by its id, the beginning of its id, or its name.",
            show_default=False,
            autocompletion=completion.jobs_and_sweeps,
        ),
    ],
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            min=1024,
            max=65535,
            help="Port of the server on 127.0.0.1.",
            show_default="6006 or a free one",
        ),
    ] = None,
    idle_s: IdleOption = HOUR_S,
) -> None:
    """Serve TensorBoard until Ctrl-C, for the outputs of jobs or sweeps on this machine.

    While a job runs, gpurun copies new outputs to this machine. The recipe's `outputs_every` sets how often.

    gpurun tensorboard @last
    """
    from gpurun.tensorboard.shown import Shown

    runs = _runs(names)
    try:
        from gpurun.tensorboard.server import serve
    except ModuleNotFoundError as error:
        raise BadInput(
            f"TensorBoard is not installed here ({error.name})",
            hint="install TensorBoard: pip install 'gpurun[tensorboard]'",
        ) from error
    with _folder() as folder, told_to_end() as end:
        shown = Shown(folder, runs)
        events = shown.refresh()
        token = secrets.token_urlsafe(24)
        board = serve(shown, token, port=port, title="gpurun: " + ", ".join(printable(name) for name in names))
        _say_where(board.port, token, events, len(shown.traces))
        while not end.wait(LOOK_S) and time.monotonic() - board.guard.asked_s < idle_s:
            shown.refresh()
    if not end.is_set():
        say(f"no request for {duration(idle_s)}: TensorBoard ended")


def _say_where(port: int, token: str, events: int, traces: int) -> None:
    say_url(port, token)
    if not events:
        say("the head has no event file yet; TensorBoard shows each file when it arrives")
    if traces:
        kinds = f"{count(traces, 'trace')} (Horovod's timeline, PyTorch's profile)"
        say(f"{kinds}: open the URL above, then http://127.0.0.1:{port}/traces")
    say("Ctrl-C ends TensorBoard")


def _runs(names: Sequence[str]) -> list[ShownRun]:
    """Return the runs to show: one for each job, and one for each started trial of a sweep.

    Raises:
        BadInput: a name matches no job or sweep, or several; or it has no outputs to show.
    """
    from gpurun.cli.jobs import open_store
    from gpurun.jobs.meant import Ambiguous
    from gpurun.sweeps.store import SweepStore
    from gpurun.tensorboard.shown import ShownRun, run_name

    store = open_store()
    sweeps, found = SweepStore(store.home), dict[str, ShownRun]()
    for text in names:
        try:
            folder = store.find(text)
        except BadInput as no_job:
            try:
                sweep = sweeps.find(text)
            except Ambiguous:
                raise
            except BadInput:
                raise no_job from None
            for trial in sweep.trials().by_number.values():
                if trial.job:
                    point = ",".join(f"{name}={value}" for name, value in trial.parameters.items())
                    name = run_name(f"{sweep.id}-{trial.number:04d}-{point}")
                    found[name] = ShownRun(name, store.get(trial.job).outputs)
            continue
        if not folder.spec().keeps_outputs:
            raise BadInput(
                "the job keeps no outputs",
                job=folder.id,
                hint="write 'outputs: /DIR' into the recipe, or submit the job with --outputs",
            )
        name = run_name(f"{folder.record().name}-{folder.id}")
        found[name] = ShownRun(name, folder.outputs)
    if not found:
        raise BadInput("no trial of the sweep has started yet", hint="`gpurun sweep status` shows the progress")
    return list(found.values())


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield a temporary folder. Also removes folders that killed processes left behind."""
    top = Path(tempfile.gettempdir())
    for older in top.glob(f"{FOLDER}*"):
        with suppress(OSError, ValueError):
            pid = int(older.name.removeprefix(FOLDER).partition("-")[0])
            if older.lstat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(older)
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
