"""``gpurun``: the command line. Parse, call, render; what fails is said once, with the right exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import typer

from gpurun import __version__, faults
from gpurun.cli import audit, bench, doctor, inventory, jobs, lab, recover, ship, simulate, submit, why
from gpurun.cli import exec as exec_command
from gpurun.cli.printing import printable
from gpurun.errors import GpurunError

INTERRUPTED = 130
TAKES_COMMAND = ("submit", "exec")
"""Commands whose words after ``--`` are a program's argv, kept byte for byte."""

app = typer.Typer(
    name="gpurun",
    help="Gang-scheduled distributed training on bare-metal GPU hosts, over SSH.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich and its Markdown parser would be half of what `--help` costs
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("submit", short_help="Run a recipe or a command on a gang of GPUs")(submit.submit)
app.command("status", short_help="Hosts and jobs")(jobs.status)
app.command("queue", short_help="What waits, in order")(why.queue)
app.command("why", short_help="Why a job waits")(why.why)
app.command("logs", short_help="What a job's ranks have printed")(jobs.logs)
app.command("cancel", short_help="End jobs and free their GPUs")(jobs.cancel)
app.command("wait", short_help="Wait until jobs have ended")(jobs.wait)
app.command("exec", short_help="A command in a job's container")(exec_command.exec_)
app.command("doctor", short_help="What is wrong, and what mends it")(doctor.doctor)
app.command("bench", short_help="Latency and bandwidth between hosts")(bench.bench)
app.command("ship", short_help="Bring an image to hosts")(ship.ship)
app.command("images", short_help="What gpurun put on hosts; --prune")(ship.images)
app.command("simulate", short_help="Replay a trace of jobs")(simulate.simulate)
app.command("recover", short_help="Pick up what a crash left")(recover.recover)
app.command("audit", short_help="Who did what")(audit.audit)
app.command("init", short_help="A state directory for several users")(audit.init)
app.add_typer(inventory.app, name="inventory", short_help="Show, check and change the inventory")
app.add_typer(lab.app, name="lab", short_help="A cluster on this machine, for tests")


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
