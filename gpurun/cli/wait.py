"""``gpurun wait``: wait until jobs have ended."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gpurun.cli.jobs import POLL_S, open_store
from gpurun.cli.options import JobsArgument, JsonOption
from gpurun.cli.patience import Patience, jobs_in_words
from gpurun.cli.printing import job_json, print_json, printable, say
from gpurun.cli.values import TIME_OR_0
from gpurun.head.caretaker import Caretaker

TIMED_OUT = 124
"""The exit code after `--timeout`, the same as timeout(1) uses."""


def wait(
    jobs: JobsArgument,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            click_type=TIME_OR_0,
            help="Stop waiting after this time, such as 10m. The exit code is then 124.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until all named jobs have ended. The exit code is 0, or the exit code of the first job that failed.

    gpurun wait @last && gpurun outputs @last --to results
    """
    store = open_store()
    folders = [store.find(job) for job in jobs]
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    caretaker, patience = Caretaker(), Patience()
    while not all(folder.record().state.ended for folder in folders):
        if deadline is not None and time.monotonic() > deadline:
            say(f"--timeout is over: {printable(jobs_in_words(folders))}")
            raise typer.Exit(TIMED_OUT)
        caretaker.look(folders)
        patience.tell(lambda: jobs_in_words(folders))
        time.sleep(POLL_S)
    records = [folder.record() for folder in folders]
    if as_json:
        print_json({"jobs": [job_json(record) for record in records]})
    else:
        for record in records:
            typer.echo(f"{record.id} {record.state.value}{' ' if record.reason else ''}{printable(record.reason)}")
    raise typer.Exit(next((int(record.code or 0) for record in records if record.code), 0))
