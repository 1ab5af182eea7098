"""``gpurun web``: hosts, jobs, the queue, logs and curves in a browser, read-only."""

from __future__ import annotations

import secrets
import time
from typing import Annotated

import typer

from gpurun.cli.jobs import open_store
from gpurun.cli.options import IdleOption, InventoryOption
from gpurun.cli.printing import duration, say
from gpurun.cli.serving import say_url, told_to_end

LOOK_S = 5.0
HOUR_S = 3600.0


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
    from gpurun.cli.inventory_options import cluster
    from gpurun.loopback.door import Door
    from gpurun.loopback.server import serve
    from gpurun.web.pages import Pages

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
