"""``gpurun metrics``: the cluster for Prometheus."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from gpurun.cli.options import InventoryOption
from gpurun.cli.printing import say
from gpurun.errors import BadInput
from gpurun.state import clock


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
    from gpurun.metrics.publish import write_textfile

    write_textfile(textfile, text)


def _text(inventory: str | None) -> str:
    from gpurun.cli.inventory_options import cluster
    from gpurun.metrics.exposition import exposition
    from gpurun.metrics.measures import measure_all

    return exposition(measure_all(cluster(inventory), now_s=clock.now_s(), wall_s=time.time()))


def _serve(address: str, inventory: str | None) -> None:
    from gpurun.metrics.publish import Scraped, address_of, server

    with server(address_of(address), Scraped(lambda: _text(inventory))) as made:
        host, port = made.server_address[:2]
        host = host.decode() if isinstance(host, bytes) else host
        say(f"the metrics are at http://{f'[{host}]' if ':' in host else host}:{port}/metrics; Ctrl-C ends the server")
        with suppress(KeyboardInterrupt):
            made.serve_forever()
