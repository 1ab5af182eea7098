"""``gpurun``: the command line. Parse, call, render; what fails is said once, with the right exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import typer

from gpurun import __version__, faults
from gpurun.cli.lazy import Place, lazy_group
from gpurun.cli.printing import printable
from gpurun.errors import GpurunError

INTERRUPTED = 130
TAKES_COMMAND = ("submit", "exec", "sweep")
"""Commands whose words after ``--`` are a program's argv, kept byte for byte."""

COMMANDS = {
    "submit": Place("gpurun.cli.submit:submit", "Run a recipe or a command on a gang of GPUs"),
    "sweep": Place("gpurun.cli.sweep:app", "One recipe over a set of parameters"),
    "status": Place("gpurun.cli.jobs:status", "Hosts and jobs"),
    "queue": Place("gpurun.cli.why:queue", "What waits, in order"),
    "why": Place("gpurun.cli.why:why", "Why a job waits"),
    "logs": Place("gpurun.cli.jobs:logs", "What a job's ranks have printed"),
    "cancel": Place("gpurun.cli.cancel:cancel", "End jobs and free their GPUs"),
    "wait": Place("gpurun.cli.jobs:wait", "Wait until jobs have ended"),
    "outputs": Place("gpurun.cli.outputs:outputs", "What a job has left behind"),
    "tensorboard": Place("gpurun.cli.tensorboard:tensorboard", "The curves of jobs and sweeps in a browser"),
    "show": Place("gpurun.cli.show:show", "Everything that made a job"),
    "rerun": Place("gpurun.cli.show:rerun", "Run exactly what a job ran"),
    "diff": Place("gpurun.cli.show:diff", "What two jobs differ in"),
    "du": Place("gpurun.cli.du:du", "What jobs take of the head's disk"),
    "prune": Place("gpurun.cli.prune:prune", "Remove jobs that have ended, or their outputs"),
    "exec": Place("gpurun.cli.exec:exec_", "A command in a job's container"),
    "doctor": Place("gpurun.cli.doctor:doctor", "What is wrong, and what mends it"),
    "bench": Place("gpurun.cli.bench:bench", "Latency and bandwidth between hosts"),
    "ship": Place("gpurun.cli.ship:ship", "Bring an image to hosts"),
    "images": Place("gpurun.cli.ship:images", "What gpurun put on hosts; --prune"),
    "simulate": Place("gpurun.cli.simulate:simulate", "Replay a trace of jobs"),
    "recover": Place("gpurun.cli.recover:recover", "Pick up what a crash left"),
    "audit": Place("gpurun.cli.audit:audit", "Who did what"),
    "init": Place("gpurun.cli.audit:init", "A state directory for several users"),
    "inventory": Place("gpurun.cli.inventory:app", "Show, check and change the inventory"),
    "lab": Place("gpurun.cli.lab:app", "A cluster on this machine, for tests"),
}

app = typer.Typer(
    cls=lazy_group(COMMANDS),
    name="gpurun",
    help="Gang-scheduled distributed training on bare-metal GPU hosts, over SSH.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich and its Markdown parser would be half of what `--help` costs
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Gang-scheduled distributed training on bare-metal GPU hosts, over SSH."""
    if version:
        typer.echo(f"gpurun {__version__}")
        raise typer.Exit


def split_command(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...] | None]:
    """An argv without what follows ``--`` of a command that takes a program, and that; None if there is no ``--``."""
    words = [word for word in argv if not word.startswith("-")]
    if not words or words[0] not in TAKES_COMMAND or "--" not in argv:
        return list(argv), None
    at = argv.index("--")
    return list(argv[:at]), tuple(argv[at + 1 :])


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code: see the table of exit codes in the README."""
    faults.arm("command")
    args, command = split_command(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args=args, prog_name="gpurun", obj=command, standalone_mode=False)
    except GpurunError as error:
        print_error(error)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe went away: nobody is left to be told
        sys.stdout = None
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def print_error(error: GpurunError) -> None:
    """What failed, where and why; then what to do next. Names of files and hosts in it may be anybody's."""
    for line in f"gpurun: {error}".split("\n"):
        typer.echo(printable(line), err=True)
    if error.hint:
        typer.echo(f"  → {printable(error.hint)}", err=True)


if __name__ == "__main__":
    main()
