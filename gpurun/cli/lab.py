"""``gpurun lab``: a cluster of real hosts on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="A cluster of real sshd and dockerd hosts on this machine.", no_args_is_help=True)


@app.callback()
def _lab() -> None:
    """A cluster of real sshd and dockerd hosts on this machine, for tests, demos and learning."""


@app.command()
def engine(
    stop: Annotated[bool, typer.Option("--stop", help="Stop the one the lab started.")] = False,
) -> None:
    """Print the DOCKER_HOST of the head's Docker engine, starting one where none answers."""
    from gpurun.lab import engine as engines

    if stop:
        typer.echo("stopped" if engines.stop() else "not running", err=True)
    else:
        typer.echo(engines.ensure())


def main() -> None:
    """Run as ``python -m gpurun.cli.lab``."""
    import sys

    from gpurun.errors import GpurunError

    try:
        app()
    except GpurunError as error:
        typer.echo(f"gpurun: {error}" + (f"\n  {error.hint}" if error.hint else ""), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
