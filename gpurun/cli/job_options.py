"""The options of ``submit``, ``sweep run`` and ``scale run``: made from the settings of `gpurun.jobs.recipe_keys`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import OptionInfo

from gpurun.cli import completion
from gpurun.cli.printing import say
from gpurun.errors import BadInput, GpurunError, NeverFits
from gpurun.jobs.recipe_keys import GROUPS, SETTINGS, WHERE
from gpurun.jobs.recipe_values import JobSetting
from gpurun.quantities import count, duration

if TYPE_CHECKING:
    from gpurun.head.submit import Flags
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.folder import JobFolder
    from gpurun.jobs.recipe import Recipe
    from gpurun.jobs.spec import JobSpec
    from gpurun.scaling.choice import SmallerGang
    from gpurun.scaling.model import ScalingModel
    from gpurun.scheduler.explain import Explanation
    from gpurun.scheduler.model import Snapshot


Given = Mapping[str, object]
"""Key of a setting → what its option got: a text, a truth value or a list of texts. Options not given are left out."""
RecipeArgument = Annotated[
    str | None, typer.Argument(metavar="[RECIPE]", help="A recipe file, or a folder that contains a recipe.yaml.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show what gpurun would do.")]
MEASURE, OUTPUT = "What to measure", "Output"
_ORDER = (MEASURE, *GROUPS, OUTPUT)
_NUMBER_AND_KIND = re.compile(r"(\d+)[xX:]([A-Za-z][\w-]*)|([A-Za-z][\w-]*):(\d+)", re.ASCII)
"""How other tools write both: ``8xA100``, ``A100:8``, ``gpu:8``."""
_OWN = {"inventory": WHERE, "follow": OUTPUT, "dry_run": OUTPUT, "as_json": OUTPUT}
"""The group of a command's own options; the others are of `scale run` and say what to measure."""


def settings_for(command: str) -> list[JobSetting]:
    """Return the settings that are options of a command."""
    return [setting for setting in SETTINGS.values() if setting.flag is not None and command in setting.flag.only]


def job_options(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of a job's settings to a command, in groups. The function gets their values as `given`."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        made = {setting.key: _option(setting) for setting in settings_for(command)}
        own = {parameter.name: _grouped(parameter)
               for parameter in inspect.signature(function, eval_str=True).parameters.values()
               if parameter.name != "given"}  # fmt: skip

        def run(**values: Any) -> None:
            given = {key: values.pop(key) for key in made}
            function(**values, given={key: value for key, value in given.items() if value not in (None, [])})

        parameters = sorted([*made.values(), *own.values()], key=_place)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return run

    return add


def _option(setting: JobSetting) -> inspect.Parameter:
    """Return the parameter of a Typer command for a setting."""
    assert setting.flag is not None
    names = setting.names
    kind: Any = list[str] if setting.is_many else str
    if setting.is_switch:
        names, kind = (f"{names[-1]}/--not-{names[-1][2:]}",), bool
    option = typer.Option(
        *names, metavar=setting.value, help=setting.help, show_default=False, rich_help_panel=setting.flag.group,
        autocompletion=_words_of(setting),
    )  # fmt: skip
    return inspect.Parameter(
        setting.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _grouped(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a command's own parameter with its group."""
    parameter = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    info = _info(parameter)
    if not isinstance(info, OptionInfo):
        return parameter
    info = copy(info)
    info.rich_help_panel = _OWN.get(parameter.name, MEASURE)
    return parameter.replace(annotation=Annotated[parameter.annotation.__origin__, info])


def _info(parameter: inspect.Parameter) -> object:
    return next(iter(getattr(parameter.annotation, "__metadata__", ())), None)


def _place(parameter: inspect.Parameter) -> int:
    info = _info(parameter)
    return _ORDER.index(str(info.rich_help_panel)) if isinstance(info, OptionInfo) else -1


def _words_of(setting: JobSetting) -> Callable[[str], list[str]] | None:
    """Return what completes the setting's value in a shell; None = nothing does."""
    offered: Callable[[str], list[str]] | None = getattr(completion, str(setting.flag and setting.flag.complete), None)
    options = setting.kind.options or (setting.kind.item.options if setting.kind.item is not None else ())
    if offered is None and options:
        return lambda incomplete: [option for option in options if option.startswith(incomplete)]
    if offered is None or not setting.is_named:
        return offered

    def after_name(incomplete: str) -> list[str]:
        name, equals, rest = incomplete.partition("=")
        return [f"{name}={word}" for word in offered(rest)] if equals else []

    return after_name


def flags_of(given: Given, command: Sequence[str] | None, recipe: Recipe | None, inventory: Inventory) -> Flags:
    """Return what a person gave, as `gpurun.head.submit.spec_of` reads it.

    Args:
        command: the words after ``--``.

    Raises:
        BadInput: a value has no ``NAME=``, is no host set, or no measured run answers ``auto:80%``; or no word follows
            ``--``.
    """
    flags: dict[str, tuple[str, object]] = {
        SETTINGS[key].names[-1]: (key, _value(SETTINGS[key], value, inventory)) for key, value in given.items()
    }
    if command is not None and not command:
        raise BadInput(
            "no command follows `--`", hint="write the command after `--`: `gpurun submit … -- python3 train.py`"
        )
    if command is not None:
        flags["the command"] = ("command", list(command))
    gpus = given.get("gpus")
    if isinstance(gpus, str) and (found := _NUMBER_AND_KIND.fullmatch(gpus)):
        number, kind = found[1] or found[4], found[2] or found[3]
        like = "" if kind.lower() == "gpu" else f" --gpu-model {kind}; --generation names a family of GPUs"
        raise BadInput(f"--gpus takes a number of GPUs, not {gpus!r}", hint=f"use -n {number}{like}")
    if isinstance(gpus, str) and gpus.startswith("auto"):
        flags["--gpus"] = ("gpus", chosen_gpus(gpus, recipe, inventory, flags))
    return flags


def _value(setting: JobSetting, value: object, inventory: Inventory) -> object:
    """Return an option's value as a recipe would have it."""
    if setting.key in ("hosts", "avoid"):
        from gpurun.inventory.hostset import select

        texts = value if isinstance(value, list) else []
        return list(dict.fromkeys(host for text in texts for host in select(inventory, text)))
    if setting.key == "python":
        return {"requirements": value}
    return _pairs(setting, value) if setting.is_named and isinstance(value, list) else value


def _pairs(setting: JobSetting, texts: Sequence[str]) -> dict[str, str]:
    """Split texts such as ``NAME=VALUE``. Raises BadInput with the flag's name."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadInput(f"{setting.names[-1]} must look like {setting.value}, not {text!r}")
        pairs[name] = value
    return pairs


# Choose gang sizes from measured runs: ``submit --gpus auto:80%``, and the smaller gang that ``why`` suggests.


def chosen_gpus(text: str, recipe: Recipe | None, inventory: Inventory, flags: Flags) -> str:
    """Return the value of ``--gpus``, with ``auto:80%`` replaced by a number of GPUs.

    Raises:
        BadInput: the value is malformed, no run was measured, or no size is efficient enough.
        NeverFits: the job does not fit even if all GPUs are free.
    """
    from gpurun.head.submit import spec_of
    from gpurun.scaling.choice import in_words, least_efficiency, most_gpus, sizes

    least = least_efficiency(text)
    if least is None:
        return text

    def spec_with(gpus: int) -> JobSpec:
        return spec_of(recipe, inventory, {**flags, "--gpus": ("gpus", str(gpus))})[0]

    tried = sizes(inventory)
    first = _first(spec_with, tried)
    model = _model(first, first.name if recipe is None else str(recipe.given["name"]), inventory)
    choice = most_gpus(model, inventory, least, spec_with, tried)
    say(f"--gpus {text}: {in_words(choice, least)}")
    return str(choice.prediction.ranks)


def _first(spec_with: Callable[[int], JobSpec], tried: Sequence[int]) -> JobSpec:
    """Return the job at the first of these sizes that is valid for it."""
    refusal: GpurunError = BadInput("the inventory has no GPUs")
    for gpus in tried:
        try:
            return spec_with(gpus)
        except (BadInput, NeverFits) as error:
            refusal = error
    raise refusal


def _model(spec: JobSpec, campaign: str, inventory: Inventory) -> ScalingModel:
    from gpurun.state.paths import home
    from gpurun.studies.campaigns import campaign_samples

    samples = campaign_samples(home(os.environ), campaign, spec.launcher)
    if not samples:
        raise BadInput(
            f"gpurun cannot choose the number of GPUs: "
            f"there is no measured run of {campaign!r} with launcher {spec.launcher}",
            hint="first measure some numbers of GPUs: gpurun scale RECIPE --gpus 1,2,4",
        )
    from gpurun.doctor.bench import BenchHistory
    from gpurun.scaling.choice import pair_figures
    from gpurun.scaling.model import fit  # after all checks that can fail: this import is slow

    links = [link for run in BenchHistory(home(os.environ)).read() for link in run.links]
    return fit(samples, pair_figures(links, {host.name: host.rack for host in inventory.hosts}))


def smaller_gang_of(folder: JobFolder, snapshot: Snapshot, explanation: Explanation) -> SmallerGang | None:
    """Predict a smaller gang that would start now instead of the waiting gang. None if no prediction is possible."""
    from gpurun.scaling.choice import predicted, smaller_gang

    fewer = next((int(change.value) for change in explanation.changes if change.what == "gpus"), None)
    if fewer is None:
        return None
    try:
        spec = folder.spec()
        model = _model(spec, spec.name, snapshot.inventory)
        smaller = predicted(model, replace(spec, gpus=fewer, min_gpus=None), snapshot.inventory)
        whole = predicted(model, spec, snapshot.inventory)
    except GpurunError:  # no run was measured, or none on such links
        return None
    if smaller is None or whole is None:
        return None
    start_s = explanation.expected_start_s
    return smaller_gang(smaller, whole, start_s and max(0.0, start_s - snapshot.now_s), spec.time_limit_s)


def smaller_in_words(smaller: SmallerGang, gpus: int) -> str:
    """Describe a smaller gang in one sentence."""
    more = count(gpus, "GPU")
    text = f"{count(smaller.gpus, 'GPU')} would start now, and reach {smaller.rate:.0%} of the images/s of {more}"
    if smaller.is_sooner:
        return f"{text}; the job with fewer GPUs would end sooner"
    if smaller.sooner_below_s is None:
        return text
    need = count(gpus, "GPU needs", "GPUs need")
    below = duration(smaller.sooner_below_s)
    return f"{text}; the job with fewer GPUs would end sooner if {need} less than {below} for the job"
