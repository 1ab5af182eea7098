"""``gpurun validate``: check a recipe without an inventory; print the JSON Schema of recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.options import JsonOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import BadInput

if TYPE_CHECKING:
    from gpurun.documents.problems import Problem

NEEDED = ("image", "gpus", "command")


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
        from gpurun.jobs.recipe_schema import schema as made

        print_json(made())
        return
    from gpurun.jobs.recipe import RECIPE_FILE

    file = recipe / RECIPE_FILE if recipe.is_dir() else recipe
    missing, problems = _checked(recipe)
    if as_json:
        told = [{**vars(each), "allowed": list(each.allowed)} for each in problems]
        print_json({"recipe": str(file), "valid": not problems, "problems": told, "missing": missing})
    for problem in () if as_json else problems:
        typer.echo(printable(str(problem)))
    if problems:
        raise typer.Exit(BadInput.exit_code)
    rest = f"; give {' and '.join(missing)} on the command line" if missing else ""
    say(printable(f"{file}: valid{rest}"))


def _checked(recipe: Path) -> tuple[list[str], tuple[Problem, ...]]:
    """Return what a recipe leaves to flags, and its problems, as ``gpurun submit`` finds them."""
    from gpurun.documents.problems import DocumentError
    from gpurun.head.wish import spec_of
    from gpurun.jobs.recipe import lines_of, read
    from gpurun.sweeps.wish import Wish

    missing = list[str]()
    try:
        found = read(recipe)
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
