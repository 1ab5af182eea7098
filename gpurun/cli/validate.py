"""``gpurun validate``: check a recipe without an inventory; print the JSON Schema of recipes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.options import JsonOption
from gpurun.cli.printing import print_json, printable, say
from gpurun.errors import BadInput

if TYPE_CHECKING:
    from gpurun.documents.problems import Problem
    from gpurun.jobs.recipe import Recipe

NEEDED = ("image", "gpus", "command")


def validate(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="Recipe file, or a folder with a recipe.yaml.", show_default=False),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors that check while you type.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a recipe. Prints each problem as FILE:LINE:COL: problem. Exits 2 if there is a problem.

    Needs no inventory: whether the hosts can run the job, `gpurun submit --dry-run` says.

    gpurun validate recipes/fashion-mnist
    """
    if schema == (recipe is not None):
        raise BadInput("name a recipe, or give --schema", where="validate", hint="gpurun validate recipe.yaml")
    if recipe is None:
        from gpurun.jobs.recipe_schema import schema as made

        print_json(made())
        return
    from gpurun.documents.problems import DocumentError
    from gpurun.jobs.disagreement import Disagreement
    from gpurun.jobs.recipe import RECIPE_FILE, read

    file, missing = recipe / RECIPE_FILE if recipe.is_dir() else recipe, list[str]()
    problems: tuple[Problem, ...] = ()
    try:
        found = read(recipe)
        missing = [name for name in NEEDED if name not in found.given]
        problems = () if missing else _disagreements(found)
    except DocumentError as error:
        problems = error.problems
    except Disagreement as error:
        problems = (_placed(error, file),)
    if as_json:
        told = [{**vars(each), "allowed": list(each.allowed)} for each in problems]
        print_json({"recipe": str(file), "valid": not problems, "problems": told, "missing": missing})
    for problem in () if as_json else problems:
        typer.echo(printable(str(problem)))
    if problems:
        raise typer.Exit(BadInput.exit_code)
    rest = f"; it leaves {' and '.join(missing)} to the command line" if missing else ""
    say(printable(f"{file}: valid{rest}"))


def _disagreements(recipe: Recipe) -> tuple[Problem, ...]:
    """Return how values contradict each other, or what is not there that they name."""
    from gpurun.jobs.recipe import build

    try:
        build(recipe, {}, {})
    except BadInput as error:
        return (_placed(error, recipe.source),)
    return ()


def _placed(error: BadInput, file: Path) -> Problem:
    """Return an error of a recipe that can be read as a problem in the line of its key."""
    from gpurun.documents.nodes import compose, place_of
    from gpurun.documents.problems import Problem
    from gpurun.jobs.disagreement import Disagreement

    key = error.key if isinstance(error, Disagreement) else ()
    line, column = place_of(compose(file.read_bytes(), str(file)), key)
    message = str(error) if error.where != str(file) else error.message
    return Problem(str(file), line, column, message + (f" → {error.hint}" if error.hint else ""))
