"""``gpurun``: the command line. Parse arguments, run the command, print an error once and exit with its code."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import click
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from gpurun import __version__, faults
from gpurun.cli import printing, shell_words
from gpurun.cli.printing import disk_problem, open_closed_streams, output_written, shortage
from gpurun.documents.plain import printable
from gpurun.errors import GpurunError

# Groups of commands that import a command's module only when the command runs.


EXAMPLE = "gpurun "
"""A paragraph of a command's help that begins with this is an example command."""
HELP = ("-h", "--help")


class Place(NamedTuple):
    """The place of a command.

    Attributes:
        where: ``module:name`` of the function, or of the Typer application of a group.
        short_help: its line in the group's help. Without it, the help imports the command and shows its first line.
        takes_command: words after ``--`` are a program's argv.
    """

    where: str
    short_help: str | None = None
    takes_command: bool = False


def lazy_group(
    places: Mapping[str, Place],
    *,
    sections: Mapping[str, Mapping[str, Place]] | None = None,
    default: str | None = None,
) -> type[TyperGroup]:
    """Return the class of a group with these commands, in this order.

    Args:
        sections: the same commands below headings, for the help.
        default: the command that runs where the first word is not a command's name.
    """
    of_group = {"places": places, "sections": sections or {"Commands": places}, "default": default}
    return type("LazyGroup", (_LazyGroup,), of_group)


class _Examples(click.Command):
    """A command whose help shows example commands as they are pasted: whole, behind ``$``."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's API
        for paragraph in (self.help or "").split("\n\n"):
            text = " ".join(paragraph.split())
            if text.startswith(EXAMPLE):
                formatter.write(f"\n  $ {text}\n")
            elif text:
                formatter.write_paragraph()
                with formatter.indentation():
                    formatter.write_text(text)


class _LazyGroup(_Examples, TyperGroup):
    places: Mapping[str, Place]
    sections: Mapping[str, Mapping[str, Place]]
    default: str | None

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands.update({name: click.Command(name) for name in self.places})  # for completion

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's API
        return _load(cmd_name, self.places[cmd_name]) if cmd_name in self.places else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = next((word for word in args if word not in SHARED), None)
        if self.default is not None and not ctx.resilient_parsing:
            stands_alone = first is None and not self.no_args_is_help
            if stands_alone or (first is not None and not self._is_command(ctx, first)):
                args = [self.default, *args]
        return super().parse_args(ctx, args)

    def _is_command(self, ctx: click.Context, word: str) -> bool:
        """Return whether a word is a command's name, or means one. A file or folder of the second kind is a recipe."""
        return word in (*self.places, *HELP) or not (Path(word).exists() or self._meant(ctx, word) is None)

    def _meant(self, ctx: click.Context, word: str) -> str | None:
        from gpurun.cli.foreign import meant  # only a wrong word needs it

        return meant(ctx.command_path, word, tuple(self.places))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.places or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        meant = self._meant(ctx, args[0])
        more = "" if meant is None else f" Did you mean `{meant}`?"
        raise click.UsageError(f"No such command {args[0]!r}.{more}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not all(place.short_help for place in self.places.values()):
            super().format_commands(ctx, formatter)
            return
        widest = max(map(len, self.places))
        for title, some in self.sections.items():
            with formatter.section(title):
                lines = [(name.ljust(widest), place.short_help or "") for name, place in some.items()]
                formatter.write_dl(lines)


def parameters_of(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return the arguments and options of a command as its help shows them: by heading, each with its text.

    ``--help`` stands in the last group of options.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        line = parameter.get_help_record(ctx)
        last = next(reversed(groups), "Arguments")
        other = "Arguments" if isinstance(parameter, click.Argument) else last if last != "Arguments" else "Options"
        if line is not None:
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or other, []).append(line)
    return groups


class _Command(_Examples, TyperCommand):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, lines in parameters_of(self, ctx).items():
            with formatter.section(title):
                formatter.write_dl(lines)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            given = ctx.params.get(parameter.name or "")
            for text in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(text, str) and not _is_text(text):
                    raise click.BadParameter(f"{text!r} is not valid UTF-8.", ctx, parameter)
        return rest


def _is_text(text: str) -> bool:
    """Return whether a word has no bytes that could not be decoded: Python gives them as halves of surrogates."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


class _TakesCommand(_Command):
    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND…]"]


SHARED = ("-q", "--quiet", "--no-color")
"""Options of `gpurun` itself that may also follow a command's name."""


def shared_options() -> list[click.Parameter]:
    """Return those options for a command. Its help does not repeat them."""

    def set_quiet(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        printing.quiet = printing.quiet or value

    def set_no_color(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            os.environ["NO_COLOR"] = "1"

    flag: dict[str, Any] = {"is_flag": True, "expose_value": False, "hidden": True}
    return [
        click.Option(["--quiet", "-q"], callback=set_quiet, **flag),
        click.Option(["--no-color"], callback=set_no_color, **flag),
    ]


@cache
def _load(name: str, place: Place) -> click.Command:
    module, _, attribute = place.where.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        one.command(name, cls=_TakesCommand if place.takes_command else _Command)(found)
        found = one
    command = get_command(found)
    command.params += shared_options()
    command.name, command.short_help = name, place.short_help
    return command


INTERRUPTED = 130
TAKES_COMMAND = ("submit", "exec", "ssh", "sweep", "scale")
"""Commands whose words after ``--`` are a program's argv, kept byte for byte."""

SECTIONS = {
    "Start": {
        "init": Place("gpurun.cli.init:init", "Create your first inventory, the list of your hosts"),
        "submit": Place(
            "gpurun.cli.submit:submit", "Run a recipe or a command on GPUs of the cluster", takes_command=True
        ),
        "validate": Place("gpurun.cli.config:validate", "Check a recipe, or print the JSON Schema of recipes"),
        "sweep": Place("gpurun.cli.groups:sweep_app", "Run one recipe with many combinations of parameters"),
        "scale": Place("gpurun.cli.groups:scale_app", "Measure how fast a recipe trains on 1, 2, 4 or more GPUs"),
    },
    "Jobs": {
        "status": Place("gpurun.cli.jobs:status", "Show hosts and jobs"),
        "queue": Place("gpurun.cli.why:queue", "List waiting jobs in start order, and why each job waits"),
        "why": Place("gpurun.cli.why:why", "Explain why a job waits"),
        "follow": Place("gpurun.cli.follow:follow", "Show a job live until the job ends"),
        "logs": Place("gpurun.cli.one_job:logs", "Print the output of a job's ranks"),
        "events": Place("gpurun.cli.follow:events", "Print a job's changes of state, its hosts and its problems"),
        "exec": Place("gpurun.cli.one_job:exec_", "Run a command in a job's container", takes_command=True),
        "cancel": Place("gpurun.cli.cancel:cancel", "Stop jobs and free their GPUs"),
        "requeue": Place("gpurun.cli.cancel:requeue", "Put running jobs back into the queue"),
        "wait": Place("gpurun.cli.cancel:wait", "Wait until jobs have ended"),
        "outputs": Place("gpurun.cli.one_job:outputs", "Show or copy a job's outputs"),
        "tensorboard": Place("gpurun.cli.serve:tensorboard", "Show curves of jobs and sweeps in a browser"),
        "show": Place("gpurun.cli.one_job:show", "Show a job's code, settings and results"),
        "diff": Place("gpurun.cli.one_job:diff", "Show how two jobs differ"),
        "rerun": Place("gpurun.cli.one_job:rerun", "Run a job again, exactly as before"),
    },
    "Watch": {
        "top": Place("gpurun.cli.serve:top", "Show jobs, the queue and GPUs live"),
        "web": Place("gpurun.cli.serve:web", "Show hosts, jobs and logs in a browser"),
        "history": Place("gpurun.cli.history:history", "Show ended attempts, with GPU use and outcome"),
        "report": Place("gpurun.cli.history:report", "Summarise GPU use, waiting times and failures"),
        "metrics": Place("gpurun.cli.serve:metrics", "Print or serve metrics for Prometheus"),
    },
    "Hosts": {
        "inventory": Place("gpurun.cli.groups:inventory_app", "Show, check and change the inventory"),
        "doctor": Place("gpurun.cli.doctor:doctor", "Check hosts, links and drivers; suggest fixes"),
        "bench": Place("gpurun.cli.doctor:bench", "Measure latency and bandwidth between hosts"),
        "ssh": Place("gpurun.cli.one_job:ssh", "Open a shell on a host", takes_command=True),
        "ship": Place("gpurun.cli.content:ship", "Copy an image to hosts"),
        "images": Place("gpurun.cli.content:images", "List or prune the images that gpurun put on hosts"),
        "data": Place("gpurun.cli.content:app", "List, copy and remove data sets on hosts"),
    },
    "Housekeeping": {
        "du": Place("gpurun.cli.disk:du", "Show how much disk space each job uses on the head"),
        "prune": Place("gpurun.cli.disk:prune", "Remove jobs that have ended, or their outputs"),
        "recover": Place("gpurun.cli.recover:recover", "Restart the control processes of jobs after a crash"),
        "timer": Place("gpurun.cli.recover:app", "Let systemd run `gpurun recover` every minute"),
        "audit": Place("gpurun.cli.history:audit", "Show the audit log: which user did what"),
        "share": Place("gpurun.cli.config:share", "Make a state directory for several users"),
        "config": Place("gpurun.cli.config:app", "Show which files and environment variables gpurun uses"),
        "version": Place("gpurun.cli.config:version", "Print the versions of gpurun and of its packages"),
        "man": Place("gpurun.cli.manual:man", "Write a manual page for each command"),
    },
    "Try out": {
        "lab": Place("gpurun.cli.lab:app", "Run a test cluster on this machine"),
        "simulate": Place("gpurun.cli.lab:simulate", "Replay a trace of jobs through the scheduler"),
    },
}
"""The commands, as the help lists them."""
COMMANDS = {name: place for some in SECTIONS.values() for name, place in some.items()}

DOCS = (
    "`gpurun COMMAND --help` shows examples. `gpurun man --to DIR` writes manual pages. "
    "The guides are in the folder docs of gpurun's repository: begin with docs/tutorial.md."
)

app = typer.Typer(
    cls=lazy_group(COMMANDS, sections=SECTIONS),
    name="gpurun",
    help="Run distributed training on bare-metal GPU hosts over SSH. All GPUs of a job start together.",
    epilog=DOCS,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich and its Markdown parser would take half the time of `--help`
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Print only results and errors. --quiet works before and after the command's name."
        ),
    ] = False,
    no_color: Annotated[
        bool,
        typer.Option(
            "--no-color",
            help="Print without colours, as with NO_COLOR=1. --no-color works before and after the command's name.",
        ),
    ] = False,
) -> None:
    """Run distributed training on bare-metal GPU hosts over SSH. All GPUs of a job start together."""
    if no_color:
        os.environ["NO_COLOR"] = "1"
    printing.quiet = quiet
    if version:
        typer.echo(f"gpurun {__version__}")
        raise typer.Exit


def split_command(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...] | None]:
    """Split an argv at ``--`` into gpurun's part and the program's argv.

    The second is None if there is no ``--``, or the command takes no program.
    """
    words = [word for word in argv if not word.startswith("-")]
    if not words or words[0] not in TAKES_COMMAND or "--" not in argv:
        return list(argv), None
    at = argv.index("--")
    return list(argv[:at]), tuple(argv[at + 1 :])


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code: see the table of exit codes in the README."""
    faults.arm_fault("command")
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # of whoever started it: exit codes would be lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    open_closed_streams()
    if (shell := shell_words.asked_by(os.environ)) is not None:
        shell_words.answer(shell, get_command(app), os.environ)
        sys.exit(0)
    shell_words.use_scripts()
    args, command = split_command(sys.argv[1:] if argv is None else argv)
    with output_written():
        code = _run(args, command)
    sys.exit(code)


def _run(args: list[str], command: tuple[str, ...] | None) -> int:
    """Run a command and return its exit code. Prints a GpurunError or a usage error once."""
    try:
        code = app(args=args, prog_name="gpurun", obj=command, standalone_mode=False)
    except GpurunError as error:
        printing.say_problem(error)
        code = error.exit_code
    except click.ClickException as error:
        meant = _option_meant(error)
        _told(error, meant).show()
        if isinstance(error, click.UsageError) and command is None:
            _say_where_a_program_goes(error, args, meant)
            _say_how_hosts_are_named(error)
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):  # an Abort is a RuntimeError
        code = INTERRUPTED
    except (OSError, MemoryError, RuntimeError) as error:
        problem = disk_problem(error) or shortage(error)
        if problem is None:
            raise
        printing.say_problem(problem)
        code = problem.exit_code
    return code if isinstance(code, int) else 0


PROGRAMS = {"ssh": "HOST -- ls -l", "exec": "JOB -- nvidia-smi"}
"""Commands that take a program, and an example that is better than training."""


_PROGRAM = re.compile(
    r"(.*/)?(python[0-9.]*|(ba)?sh|torchrun|accelerate|deepspeed|mpirun|horovodrun|.*\.(py|sh))", re.DOTALL
)


def _option_meant(error: click.ClickException) -> str | None:
    """Return the option that a wrong one means; None if none is near, or the error is another one."""
    from gpurun.cli.foreign import meant_option

    return meant_option(error.option_name, _options_of(error)) if isinstance(error, click.NoSuchOption) else None


def _told(error: click.ClickException, meant: str | None) -> click.ClickException:
    """Return the error as a person sees it: a wrong option with the one that it means, not with all that are near."""
    from gpurun.cli.foreign import HOSTS

    if not isinstance(error, click.NoSuchOption):
        return error
    more = f" Did you mean {meant!r}?" if meant else ""
    counts = "\n  → gpurun counts GPUs, not hosts: `-n 8 --gpus-per-host 4` takes two hosts"
    more += counts if meant and error.option_name in HOSTS else ""
    return click.UsageError(f"No such option {error.option_name!r}.{more}", error.ctx)


def _options_of(error: click.UsageError) -> list[str]:
    """Return all options of the command whose usage was wrong."""
    parameters = error.ctx.command.params if error.ctx is not None else ()
    return [name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts) if name[0] == "-"]


def _say_how_hosts_are_named(error: click.UsageError) -> None:
    """Say it where a command got several words for its hosts."""
    parameters = error.ctx.command.params if error.ctx is not None else ()
    has_hosts = any(
        "HOSTS" in str(parameter.metavar) for parameter in parameters if parameter.param_type_name == "argument"
    )
    if has_hosts and "unexpected extra argument" in error.message:
        typer.echo("  → write all hosts as one word, such as gpu-01,gpu-02 or gpu-[01-16] or @rack:r1", err=True)


def _say_where_a_program_goes(error: click.UsageError, args: Sequence[str], meant: str | None) -> None:
    """Say it where a word or an option was too many behind the words of a command that takes a program."""
    words = [word for word in args if not word.startswith("-")]
    has_program = meant is None or any(map(_PROGRAM.fullmatch, words))
    is_program = isinstance(error, click.NoSuchOption) and len(words) > 1 and has_program
    if words and words[0] in TAKES_COMMAND and (is_program or "unexpected extra argument" in error.message):
        line = PROGRAMS.get(words[0], "… -- python3 train.py")
        at = next((at for at, word in enumerate(args) if _PROGRAM.fullmatch(word)), 0)
        behind = {word.partition("=")[0] for word in args[at:]}
        is_whole = at > 0 and words[0] not in PROGRAMS and not behind & {*_options_of(error)}
        line = shlex.join([*args[:at], "--", *args[at:]]) if is_whole else f"{words[0]} {line}"
        typer.echo(printable(f"  → write a program and its arguments after --: gpurun {line}"), err=True)


if __name__ == "__main__":
    main()
