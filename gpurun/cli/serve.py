"""``gpurun top | web | tensorboard | metrics``: views that stay open."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli import completion
from gpurun.cli.options import IdleOption, InventoryOption
from gpurun.cli.printing import say
from gpurun.cli.stores import open_store
from gpurun.documents.plain import printable
from gpurun.errors import BadInput
from gpurun.quantities import count, duration
from gpurun.state import clock

if TYPE_CHECKING:
    from types import FrameType

    from gpurun.jobs.store import JobStore
    from gpurun.leases.look import Cluster
    from gpurun.views.feed import Feed
    from gpurun.views.tensorboard import ShownRun


# Commands that serve web pages: print the URL, and stop on a signal.


def say_url(port: int, token: str) -> None:
    """Print the URL with the token, and how to open it from another machine."""
    typer.echo(f"http://127.0.0.1:{port}/?token={token}")
    if "SSH_CONNECTION" in os.environ:
        say(f"on your own machine, run: ssh -L {port}:127.0.0.1:{port} THIS_HOST, then open the URL above")


@contextmanager
def told_to_end() -> Iterator[threading.Event]:
    """Yield an event that SIGINT (Ctrl-C), SIGTERM and SIGHUP (closed terminal) set."""
    end = threading.Event()

    def tell(_number: int, _frame: FrameType | None) -> None:
        end.set()

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ``gpurun tensorboard``: serve the curves of running and ended jobs and sweeps to a browser.


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
    from gpurun.views.tensorboard import Shown

    runs = _runs(names)
    try:
        from gpurun.views.board import serve
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
    from gpurun.cli.stores import open_store
    from gpurun.jobs.record import Ambiguous
    from gpurun.studies.store import SweepStore
    from gpurun.views.tensorboard import ShownRun, run_name

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


# ``gpurun web``: hosts, jobs, the queue, logs and curves in a browser, read-only.


def web(
    inventory: InventoryOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="PORT",
            min=1024,
            max=65535,
            help="Port of the server on 127.0.0.1.",
            show_default="a free one",
        ),
    ] = None,
    idle_s: IdleOption = HOUR_S,
) -> None:
    """Serve a web page with hosts, jobs and the queue until Ctrl-C. The page is read-only.

    Only people who have the printed URL can see the page.
    """
    from gpurun.cli.stores import cluster
    from gpurun.views.loopback import Door, serve
    from gpurun.views.web import Pages

    cluster(inventory)  # report a broken inventory here, not in the browser
    token = secrets.token_urlsafe(24)
    door = Door(Pages(open_store(), lambda: cluster(inventory), duration), token, "gpurun web")
    with told_to_end() as end:
        say_url(serve(door, port), token)
        say("Ctrl-C ends the server")
        while not end.wait(LOOK_S) and time.monotonic() - door.asked_s < idle_s:
            pass
    if not end.is_set():
        say(f"no request for {duration(idle_s)}: the server ended")


# ``gpurun metrics``: the cluster for Prometheus.


FRESH_S = 5.0
"""Scrapes within this time get the same text: several of them cost no more than one."""


def metrics(
    textfile: Annotated[
        Path | None,
        typer.Option(
            "--textfile", "--to", metavar="FILE", help="Write the metrics to this .prom file, for node_exporter."
        ),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            "--serve", metavar="ADDRESS", help="Serve /metrics at [HOST:]PORT. The default HOST is 127.0.0.1."
        ),
    ] = None,
    inventory: InventoryOption = None,
) -> None:
    """Print metrics of hosts, GPUs, the queue, jobs and past attempts in Prometheus's text format.

    gpurun metrics --serve 9836

    gpurun metrics --textfile /var/lib/prometheus/node-exporter/gpurun.prom
    """
    if textfile is not None and serve is not None:
        raise BadInput("give either --textfile or --serve, not both")
    if serve is not None:
        _serve(serve, inventory)
        return
    text = _text(inventory)
    if textfile is None:
        sys.stdout.write(text)
        return
    from gpurun.metrics import write_textfile

    write_textfile(textfile, text)


def _text(inventory: str | None) -> str:
    from gpurun.cli.stores import cluster
    from gpurun.metrics import measure_all

    return measure_all(cluster(inventory), now_s=clock.now_s(), wall_s=time.time()).text()


def address_of(text: str) -> tuple[str, int]:
    """``9836``, ``:9836`` or ``HOST:9836``; loopback unless a host is named. Raises BadInput."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise BadInput(f"--serve: {text!r} is not an address", hint="give a port, or HOST:PORT such as 10.0.0.1:9836")
    return host.strip("[]") or "127.0.0.1", int(port)


def _serve(address: str, inventory: str | None) -> None:
    from gpurun.views.loopback import Remade, scrapes, server

    with server(address_of(address), scrapes(Remade(lambda: _text(inventory), FRESH_S))) as made:
        host, port = made.server_address[:2]
        host = host.decode() if isinstance(host, bytes) else host
        say(f"the metrics are at http://{f'[{host}]' if ':' in host else host}:{port}/metrics; Ctrl-C ends the server")
        with suppress(KeyboardInterrupt):
            made.serve_forever()


PLAIN_EVERY_S = 5.0
FIRST_SAMPLES_S = 10.0
REDRAW_S, REDRAW_SHARE = 0.5, 0.05
"""The least pause between pictures, and the share of a core for drawing: a large cluster is drawn less often."""


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
    from gpurun.cli.stores import cluster
    from gpurun.views.feed import Feed

    if not plain:
        _check_screen()
    cluster(inventory)  # report a broken inventory before the full-screen view starts
    store = open_store()
    if plain:
        with Feed(store, lambda: cluster(inventory)) as feed:
            _print_changes(feed)
        return
    from gpurun.views.app import Actions, TopApp

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


def watch_cluster(store: JobStore, inventory: str | None) -> None:
    """Show what `gpurun top` shows until Ctrl-C: tables that are drawn again; in a pipe, lines for changes."""
    from gpurun.cli.stores import cluster
    from gpurun.cli.tables import redrawn, terminal_columns
    from gpurun.views.feed import Feed
    from gpurun.views.rows import moment_lines

    with Feed(store, lambda: cluster(inventory)) as feed:
        if not sys.stdout.isatty():
            _print_changes(feed)
            return
        drawn = None
        with suppress(KeyboardInterrupt), redrawn() as draw:
            while True:
                began_s = time.thread_time()
                if (moment := feed.latest()) != drawn:
                    draw(moment_lines(moment, duration, terminal_columns()))
                    drawn = moment
                time.sleep(max(REDRAW_S, (time.thread_time() - began_s) / REDRAW_SHARE))


def _print_changes(feed: Feed) -> None:
    """Print until Ctrl-C or until the reader of the output exits."""
    from gpurun.views.rows import changed_lines, first_lines, leased_hosts

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
    from gpurun.head.spawn import Head
    from gpurun.state.hosts import Cordon, Cordons, cordons_on, lift_cordons, put_cordon
    from gpurun.state.paths import myself

    home, known = found.home, found.known.get(host)
    if known is None:
        raise BadInput(f"{host} is not in the inventory any more", where=found.inventory.source)
    with Cordons(home).changing() as cordons:
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
        Head(home).run_pass(now_s=clock.now_s())
    return f"new jobs can start on {host} again"
