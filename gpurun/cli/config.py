"""``gpurun config | version | share | validate``: files that commands use, and the check of a recipe."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from gpurun import __version__
from gpurun.cli.main import Place, lazy_group
from gpurun.cli.options import JsonOption
from gpurun.cli.printing import print_json, say
from gpurun.documents.plain import printable
from gpurun.errors import BadInput

if TYPE_CHECKING:
    from gpurun.documents.plain import Problem


SHOWN = ("paramiko", "ClusterShell", "typer", "rich", "nvidia-ml-py", "msgspec", "optuna", "textual", "tensorboard")
VARIABLES: Mapping[str, str] = {
    "GPURUN_HOME": "The state directory: jobs, leases and history.",
    "GPURUN_INVENTORY": "The inventory file, if you do not give `--inventory`.",
    "XDG_STATE_HOME": "Without GPURUN_HOME, the state directory is `$XDG_STATE_HOME/gpurun`.",
    "XDG_CONFIG_HOME": "Without GPURUN_INVENTORY, gpurun looks for `$XDG_CONFIG_HOME/gpurun/inventory.yaml`.",
    "XDG_CACHE_HOME": "gpurun's caches are in `$XDG_CACHE_HOME/gpurun`. You can delete this folder of caches.",
    "NO_COLOR": "If set, gpurun prints without colours.",
}

COMMANDS = {"view": Place("gpurun.cli.config:view", "Show which files and variables gpurun uses, and why")}
app = typer.Typer(cls=lazy_group(COMMANDS, default="view"), add_completion=False, rich_markup_mode=None)


@app.callback()
def _config() -> None:
    """Show which files and environment variables gpurun uses."""


@dataclass(frozen=True)
class Used:
    """A file or variable that commands use, and why commands use it."""

    name: str
    value: str
    why: str


class PythonShape(TypedDict):
    """The Python that runs gpurun."""

    version: str
    implementation: str


class VersionShape(TypedDict):
    """Versions.

    Attributes:
        packages: null: the package is not installed.
    """

    version: str
    python: PythonShape
    packages: dict[str, str | None]


def version(as_json: JsonOption = False) -> None:
    """Print the versions of gpurun, Python and the packages that gpurun uses."""
    packages = {name: _installed(name) for name in SHOWN}
    if as_json:
        python = PythonShape(version=platform.python_version(), implementation=platform.python_implementation())
        print_json(VersionShape(version=__version__, python=python, packages=packages))
        return
    typer.echo(f"gpurun {__version__}, Python {platform.python_version()}")
    for name, found in packages.items():
        typer.echo(f"  {name} {found or 'is not installed'}")


class ConfigShape(TypedDict):
    """Files and variables that commands use."""

    settings: list[Used]


def view(as_json: JsonOption = False) -> None:
    """Show which state directory, inventory and environment variables gpurun uses, and why."""
    settings = [_home(), _inventory(), *_variables()]
    if as_json:
        print_json(ConfigShape(settings=settings))
        return
    for setting in settings:
        typer.echo(printable(f"{setting.name:>16}  {setting.value or 'none'}  ({setting.why})"))


def _home() -> Used:
    from gpurun.state.paths import SYSTEM_HOME, home
    from gpurun.state.sharing import StateDirectory

    found = home(os.environ)
    if os.environ.get("GPURUN_HOME"):
        why = "$GPURUN_HOME"
    else:
        why = (
            f"{SYSTEM_HOME} exists"
            if found == SYSTEM_HOME
            else "your own state directory; set $GPURUN_HOME to use another one"
        )
    return Used(
        "state directory", str(found), f"{why}; {'shared' if StateDirectory(found).is_shared() else 'one user'}"
    )


def _inventory() -> Used:
    from gpurun.errors import BadInput
    from gpurun.inventory.read import find_inventory

    try:
        found: Path | None = find_inventory(None, os.environ)
    except BadInput as error:
        return Used("inventory", "", error.message.split("\n")[0])
    why = "$GPURUN_INVENTORY" if os.environ.get("GPURUN_INVENTORY") else "the first inventory that gpurun finds"
    return Used("inventory", str(found), why)


def _variables() -> list[Used]:
    return [Used(name, os.environ[name], "environment") for name in VARIABLES if name in os.environ]


def _installed(name: str) -> Any:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# ``gpurun share``: a state directory for several users.


MOST_DIGITS, NOBODY = 10, 2**32 - 1
"""A group's number has at most so many digits, and is below this one: chown takes it for "do not change"."""


def share(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The state directory, such as /var/lib/gpurun.")],
    group: Annotated[
        str, typer.Option("--group", metavar="GROUP", help="Name or number of the group that may use the directory.")
    ],
) -> None:
    """Make a state directory for several users, or repair the directory's file modes. Run `gpurun share` once, as root.

    gpurun share /var/lib/gpurun --group gpu-users
    """
    from gpurun.state.sharing import StateDirectory

    kept = StateDirectory(folder.absolute()).make_shared(_gid(group))
    say(f"{folder} is shared by group {group}")
    if not kept:
        say(f"gpurun could not make {folder}/audit.jsonl append-only (chattr +a), so members can change this file")
    say(f"  → for all users: export GPURUN_HOME={folder.absolute()} (not needed for /var/lib/gpurun)")


def _gid(group: str) -> int:
    import grp

    if group.isascii() and group.isdigit() and len(group) <= MOST_DIGITS and int(group) < NOBODY:
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        hint = f"create the group: groupadd {group}" if group.isidentifier() else "`getent group` lists groups"
        raise BadInput(f"there is no group {group[:40]!r}", hint=hint) from None


# ``gpurun validate``: check a recipe without an inventory; print the JSON Schema of recipes.


NEEDED = ("image", "gpus", "command")


class RecipeCheckShape(TypedDict):
    """The problems of a recipe.

    Attributes:
        missing: keys that the command line must give.
    """

    recipe: str
    valid: bool
    problems: tuple[Problem, ...]
    missing: list[str]


def validate(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECIPE]", help="A recipe file, or a folder that contains a recipe.yaml.", show_default=False
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors that check while you type.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a recipe, and print each problem as FILE:LINE:COL: problem. The exit code is 2 if there is a problem.

    `gpurun validate` needs no inventory. `gpurun submit --dry-run` also checks that the hosts can run the job.

    gpurun validate recipes/fashion-mnist
    """
    if schema == (recipe is not None):
        raise BadInput("give either a recipe or --schema", where="validate", hint="run: gpurun validate recipe.yaml")
    if recipe is None:
        from gpurun.jobs.recipe_keys import recipe_schema as made

        print_json(made())
        return
    from gpurun.jobs.recipe import RECIPE_FILE

    file = recipe / RECIPE_FILE if recipe.is_dir() else recipe
    missing, problems = _checked(recipe)
    if as_json:
        print_json(RecipeCheckShape(recipe=str(file), valid=not problems, problems=problems, missing=missing))
    for problem in () if as_json else problems:
        typer.echo(printable(str(problem)))
    if problems:
        raise typer.Exit(BadInput.exit_code)
    rest = f"; give {' and '.join(missing)} on the command line" if missing else ""
    say(printable(f"{file}: valid{rest}"))


def _checked(recipe: Path) -> tuple[list[str], tuple[Problem, ...]]:
    """Return what a recipe leaves to flags, and its problems, as ``gpurun submit`` finds them."""
    from gpurun.documents.plain import DocumentError
    from gpurun.head.submit import spec_of
    from gpurun.jobs.recipe import lines_of, read_recipe
    from gpurun.studies.sweep_plan import Wish

    missing = list[str]()
    try:
        found = read_recipe(recipe)
        missing = [name for name in NEEDED if name not in found.given]
        if not missing:
            spec, _ = spec_of(found, None, {}, is_plan=True)
            wish = Wish.of_recipe(found.sweep)
            with lines_of(found, {}).named("sweep"):
                if wish.grid or wish.space:  # else flags give the parameters
                    wish.plan(spec, "", 0.0)
    except DocumentError as error:
        hint = f" → {error.hint}" if error.hint else ""
        return missing, tuple(replace(each, message=each.message + hint) for each in error.problems)
    return missing, ()
