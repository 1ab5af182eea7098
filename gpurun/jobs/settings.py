"""How a key of a recipe is written on the command line: the flag, its group in the help, and the words for its value.

The tables of `gpurun.jobs.recipe_keys` declare each setting of a job once: its type, what it means, examples, and its
`KeyFlag`. Everything else is made from them: the reader of recipes, the options of ``gpurun submit``, ``sweep run`` and
``scale run`` (`gpurun.cli.job_options`), the arguments of ``gpurun.submit(…)`` in Python, docs/reference/recipes.md,
and the JSON Schema (`gpurun.documents.convert.schema` of a `JobSetting.kind`).
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import Meta

from gpurun.documents.convert import Kind, kind_of

Words = Literal[
    "data_sources", "files", "folders", "generations", "gpu_models", "hosts", "images", "launchers", "pools", "projects"
]
"""What a shell offers for a value: a function of `gpurun.cli.completion`. Shells offer files and folders themselves."""
_KEY = re.compile(r"`([a-z_]+)`")


@dataclass(frozen=True)
class KeyFlag:
    """How people give a setting on the command line.

    Attributes:
        group: the heading that the option has in the help.
        value: the word for its value in the help, such as ``FILE``; empty for a switch or a choice.
        names: the option's names, if they are not ``--`` and the key.
        complete: the words that a shell offers; None = the choices, if the setting has choices.
        more: a sentence of the help, after what the key means.
        only: the commands that have this flag; the others have a flag of that name with another meaning, or cannot
            have it.
        why: why the others cannot have it.
    """

    group: str
    value: str = ""
    names: tuple[str, ...] = ()
    complete: Words | None = None
    more: str = ""
    only: tuple[str, ...] = ("submit", "sweep run", "scale run")
    why: str = ""


@dataclass(frozen=True)
class JobSetting:
    """One setting of a job.

    Attributes:
        key: its key in a recipe, and the name of its argument in Python.
        kind: its type, what it means, and examples as a recipe writes them.
        flag: None = only recipes have it, and `no_flag` says why.
        help: the option's help: the first sentence of what the key means, with keys as the flags they are here.
    """

    key: str
    kind: Kind
    flag: KeyFlag | None
    no_flag: str = ""
    help: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the option's names; the last one is the long one."""
        named = self.flag.names if self.flag is not None else ()
        return named or (f"--{self.key.replace('_', '-')}",)

    @property
    def is_switch(self) -> bool:
        """Return whether the option has no value, but an opposite: ``--nvlink/--not-nvlink``."""
        return self.kind.options == ("true", "false")

    @property
    def is_named(self) -> bool:
        """Return whether each value is ``NAME=VALUE``."""
        return self.kind.key is not None

    @property
    def is_many(self) -> bool:
        """Return whether the option may be repeated."""
        return self.is_named or (self.kind.item is not None and not self.kind.spelled)

    @property
    def value(self) -> str | None:
        """Return the word for the option's value; None for a switch."""
        if self.is_switch or self.flag is None:
            return None
        return self.flag.value or "|".join(self.kind.options)


def means(meaning: str, *examples: str, default: str = "", more: str = "", flag: KeyFlag | str | None = None) -> Meta:
    """What a key means, and values of it as people write them.

    Args:
        meaning: the first sentence. It is the help of the flag, too, with the default.
        more: further sentences, for the documentation.
        flag: the key's flag, or why it has none; None for a key below another one that has no flags.
    """
    first = ". Default: ".join(filter(None, (meaning, default)))
    about = ". ".join(filter(None, (first, more)))
    return Meta(description=about, examples=list(examples), extra={"means": first, "flag": flag})


def settings_of(*tables: type) -> dict[str, JobSetting]:
    """Return the settings that TypedDicts of keys declare with `means`, in their order."""
    found, said = {}, {}
    for table in tables:
        for key, hint in typing.get_type_hints(table, include_extras=True).items():
            said[key] = _said(hint)
            flag = said[key]["flag"]
            has = isinstance(flag, KeyFlag)
            found[key] = JobSetting(key, kind_of(hint), flag if has else None, "" if has else flag or "")
    names = {key: setting.names[-1] for key, setting in found.items() if setting.flag is not None}
    return {key: replace(setting, help=_help(setting, said[key]["means"], names)) for key, setting in found.items()}


def _said(hint: Any) -> Mapping[str, Any]:
    """Return what `means` said in a type hint."""
    metas = (meta.extra or {} for meta in hint.__metadata__ if isinstance(meta, Meta))
    return next(extra for extra in metas if "means" in extra)


def _help(setting: JobSetting, meaning: str, names: Mapping[str, str]) -> str:
    text = _KEY.sub(lambda found: names.get(found[1], found[0]), meaning)
    more = setting.flag.more if setting.flag is not None else ""
    example = f"Example: {setting.kind.examples[0]}" if setting.value in ("TIME", "SIZE") else ""
    repeated = f"You can repeat {setting.names[-1]}" if setting.is_many else ""
    return ". ".join(filter(None, (text[:1].upper() + text[1:], more, example, repeated))) + "."
