"""``gpurun top``: jobs, queue and GPUs, live, with the log of a job and keys to act."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.jobs import open_store
from gpurun.cli.options import InventoryOption
from gpurun.cli.printing import duration, say
from gpurun.errors import BadInput
from gpurun.state import clock

if TYPE_CHECKING:
    from gpurun.jobs.store import JobStore
    from gpurun.leases.cluster import Cluster
    from gpurun.top.feed import Feed

PLAIN_EVERY_S = 5.0
FIRST_SAMPLES_S = 10.0


def top(
    inventory: InventoryOption = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Print plain lines for screen readers and pipes. gpurun prints all jobs and hosts once, and later "
            "only changes.",
        ),
    ] = False,
) -> None:
    """Show a live view of jobs, the queue, the use of each GPU that a job holds, and the log of the selected job.

    Keys: 1 shows jobs, 2 the queue, 3 hosts; f follows the log, c cancels the job, o cordons the host, s sorts, /
    filters, q quits.
    """
    from gpurun.cli.inventory_options import cluster
    from gpurun.top.feed import Feed

    if not plain:
        _check_screen()
    cluster(inventory)  # report a broken inventory before the full-screen view starts
    store = open_store()
    if plain:
        with Feed(store, lambda: cluster(inventory)) as feed:
            _print_lines(feed)
        return
    from gpurun.top.app import Actions, TopApp

    with Feed(store, lambda: cluster(inventory)) as feed:
        actions = Actions(cancel=lambda job: _cancel(store, job), cordon=lambda host: _cordon(cluster(inventory), host))
        TopApp(feed, actions, duration).run()


def _check_screen() -> None:
    """Check that the full-screen view can start, before reading anything. Textual draws on stderr.

    Raises:
        BadInput: Textual is not installed, or there is no terminal.
    """
    try:
        import textual  # noqa: F401
    except ModuleNotFoundError as error:
        raise BadInput(
            f"Textual is not installed here ({error.name})", hint="install Textual: pip install 'gpurun[top]'"
        ) from error
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise BadInput(
            "gpurun top needs a terminal",
            hint="use `gpurun top --plain` to print lines, or `gpurun status` to print once",
        )


def _print_lines(feed: Feed) -> None:
    """Print until Ctrl-C or until the reader of the output exits."""
    from gpurun.top.plain import changed_lines, first_lines
    from gpurun.top.rows import leased_hosts

    moment = feed.latest()
    deadline = time.monotonic() + FIRST_SAMPLES_S
    while set(leased_hosts(moment.picture)) - moment.samples.keys() and time.monotonic() < deadline:
        threading.Event().wait(0.1)
        moment = feed.latest()
    lines = list(first_lines(moment, duration))
    try:
        while True:
            if lines:
                sys.stdout.write("\n".join(lines) + "\n")
                sys.stdout.flush()
            threading.Event().wait(PLAIN_EVERY_S)
            before, moment = moment, feed.latest()
            lines = list(changed_lines(before, moment, duration))
    except KeyboardInterrupt:
        say("")


def _cancel(store: JobStore, job: str) -> str:
    from gpurun.cli.follow import cancel_job

    folder = store.find(job)
    if folder.record().state.ended:
        return f"{job} has ended already"
    cancel_job(folder, reason="gpurun top")
    return f"gpurun cancels {job}; the job's GPUs are free when no process of the job is left"


def _cordon(found: Cluster, host: str) -> str:
    """Cordon a host, or remove its cordon. Refuses lost and draining hosts: other commands change those."""
    from gpurun.head.spawn import run_pass_and_start
    from gpurun.state.cordons import Cordon, changing_cordons, cordons_on, lift_cordons, put_cordon
    from gpurun.state.people import myself

    home, known = found.home, found.known.get(host)
    if known is None:
        raise BadInput(f"{host} is not in the inventory any more", where=found.inventory.source)
    with changing_cordons(home) as cordons:
        old = cordons_on(cordons, [known]).get(host)
        if old is not None and old.state != "cordoned":
            raise BadInput(
                f"{host} is {old.state}, so `gpurun top` cannot remove the cordon",
                hint=f"`gpurun inventory uncordon {host}` ends a drain, `gpurun recover` frees a lost host",
            )
        if old is None:
            put_cordon(cordons, known, Cordon("cordoned", myself(), time.time(), "gpurun top"))
        else:
            lift_cordons(cordons, known)
    if old is None:
        return f"{host} is cordoned: no new job starts on the host"
    if (home / "live").is_dir():
        run_pass_and_start(home, now_s=clock.now_s(), environ=os.environ)
    return f"new jobs can start on {host} again"
