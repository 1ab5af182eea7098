"""Options and arguments that several commands share: each is defined here, once."""

from __future__ import annotations

from typing import Annotated

import typer

from gpurun.cli import completion
from gpurun.cli.values import TIME

HOST_SET = "Host set, such as @rack:r1 or 'gpu-r1-[01-16]&!@cordoned'. Quote a host set that contains [ ] & ! * or ?."
JOB = "JOB is a job's id, the beginning of the id, the job's name, or @last for the job that you submitted last."

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
InventoryOption = Annotated[
    str | None,
    typer.Option(
        "--inventory",
        "-i",
        metavar="FILE",
        help="Use this inventory file. `gpurun config` shows the default file.",
        show_default=False,
    ),
]
IdleOption = Annotated[
    float,
    typer.Option(
        "--idle", click_type=TIME, help="Stop the server after this time without a request.", show_default="1h"
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help=JOB, autocompletion=completion.jobs)]
JobsArgument = Annotated[list[str], typer.Argument(metavar="JOB…", help=JOB, autocompletion=completion.jobs)]
SomeJobsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB…]", help=JOB, show_default=False, autocompletion=completion.jobs),
]
HostsArgument = Annotated[str, typer.Argument(metavar="HOSTS", help=HOST_SET, autocompletion=completion.hosts)]
HostArgument = Annotated[
    str, typer.Argument(metavar="HOST", help="Host of the inventory.", autocompletion=completion.hosts)
]
OnlyHostsOption = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="HOSTS", help="With --caches, select only the caches on these hosts.", show_default=False,
        autocompletion=completion.hosts,
    ),
]  # fmt: skip
SomeHostsArgument = Annotated[
    str | None,
    typer.Argument(metavar="[HOSTS]", help=HOST_SET, show_default=False, autocompletion=completion.hosts),
]
