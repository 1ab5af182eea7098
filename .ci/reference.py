#!/usr/bin/env python3
"""Write the pages of docs/reference, the list of decisions, and the picture of rooms: `make reference`.

tests/documents/test_reference.py compares the pages with the code.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TOP))

import json_shapes
import rooms
from json_shapes import SHAPES

from gpurun.cli.config import VARIABLES
from gpurun.cli.manual import (
    CommandPage,
    pages,
)
from gpurun.documents.convert import Kind
from gpurun.errors import EXIT_CODES
from gpurun.inventory import fields
from gpurun.jobs import recipe_keys, spec
from gpurun.jobs.recipe_values import MAX_GPUS

FOLDER, DECISIONS = TOP / "docs/reference", TOP / "docs/decisions"
MADE = "<!-- `make reference` writes this page from the code. Do not edit it. -->"


def text(plain: str) -> str:
    """A text as Markdown prints it letter for letter; what stands between backquotes stays code."""
    parts = re.split(r"(`[^`]+`)", plain)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<\[\]|])", r"\\\1", part) for part in parts)


def code(plain: str) -> str:
    """A text as code, also in a table."""
    return f"`{plain}`" if "|" not in plain else f"<code>{plain.replace('|', '&#124;').replace('<', '&lt;')}</code>"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of texts that are Markdown."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(title: str, *parts: str) -> str:
    """A whole page. Its paragraphs are wrapped; tables, heads and code cannot be."""
    blocks = re.split(r"(^```.*?^```$)", "\n\n".join(parts), flags=re.MULTILINE | re.DOTALL)
    body = "".join(block if block.startswith("```") else "\n".join(map(wrapped, block.split("\n"))) for block in blocks)
    return f"# {title}\n\n{MADE}\n\n{body}\n"


def wrapped(line: str) -> str:
    """A paragraph in lines that fit an editor."""
    if line.startswith(("|", "#")):
        return line
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False)


VALUES = (
    (
        "`TIME`",
        "A number with its unit: `90s`, `15 min`, `1h30m`, `1h30`, `2d`, `1w`; also `1:30:00` and `1-12:00:00`. "
        "gpurun refuses a number without a unit, and also `1:30`",
    ),
    (
        "`WHEN`",
        "A moment in the past: `10m` (10 minutes ago), `7d`; `today`, `yesterday 18:00`, `08:00`; `2026-11-27`, "
        "`2026-11-27 10:00`, `2026-11-27T10:00:00Z`, `'2026-11-27 10:00 +01:00'`. Without a zone, it is local time",
    ),
    (
        "`SIZE`",
        "`512MiB`, `16GiB`, `500GB`, `1T`. `G` and `GiB` are 1024³ bytes, `GB` is 1000³ bytes, as in `dd` and `du`",
    ),
    ("`RATE`", "Bits per second: `10gbit`, `2.5gbit`, `100mbit`, `25Gb/s`"),
)
"""The words for values that have units, and what a person may write."""


def commands() -> str:
    """Every command, argument and option."""
    found = pages()
    tops = [one for one in found if len(one.words) == 2]
    overview = table(("command", "what it does"), ((link(one), text(one.summary)) for one in tops))
    return page(
        "Commands",
        "This page has the texts of `gpurun COMMAND --help`. `gpurun man --to DIR` writes these texts as manual pages.",
        overview,
        "## Values\n\nOptions, recipes and the inventory accept the values of this table, in upper or lower case. "
        "[Why](../decisions/0061-numbers-have-units.md).\n\n" + table(("word", "what you may write"), VALUES),
        *(command(one) for one in found),
    )


def link(one: CommandPage) -> str:
    """A link to a command's section."""
    return f"[`{one.name}`](#{'-'.join(one.words)})"


def command(one: CommandPage) -> str:
    """One command's section."""
    level = "##" if len(one.words) < 3 else "###"
    parts = [f"{level} {one.name}", *map(text, one.about), f"```text\n{one.name} {one.usage}\n```"]
    if one.examples:
        parts.append("```console\n" + "\n".join(f"$ {example}" for example in one.examples) + "\n```")
    for title, entries in one.groups.items():
        head = {"Arguments": "Argument", "Options": "Option"}.get(title, title)
        parts.append(table((head, "Meaning"), ((code(name), text(help_text)) for name, help_text in entries)))
    if len(one.words) == 2 and one.commands:
        rows = ((f"[`{name}`](#{'-'.join((*one.words, name))})", text(summary)) for name, summary in one.commands)
        parts.append(table(("Command", "What it does"), rows))
    return "\n\n".join(parts)


def inventory() -> str:
    """Every key of an inventory."""
    sections = (
        ("Keys of a host", fields.HOST, f"Except {both(fields.PER_HOST)}, each key may also be in `defaults`."),
        ("Keys of a fabric", fields.FABRIC, f"Each fabric needs {both(fields.FABRIC_NEEDS)}."),
        ("Keys of a pool", fields.POOL, ""),
        ("Keys of the head", fields.HEAD, "The head is the machine on which you run `gpurun`."),
    )
    top = {
        "version": fields.VERSION.about, "defaults": "Keys of a host, for all hosts",
        "fabrics": "Fabrics by name", "racks": "Racks by name; each has `hosts` and may have `defaults`",
        "pools": "Pools by name", "ssh_config": fields.SSH_CONFIG.about, "head": "Keys of the head",
    }  # fmt: skip
    assert tuple(top) == fields.TOP
    return page(
        "Inventory keys",
        "An inventory is one YAML file; [The inventory](../inventory.md) explains it. gpurun ignores keys that begin "
        "with `x-`. `gpurun inventory schema` prints all keys as a JSON Schema.",
        "## Top\n\n" + table(("key", "meaning"), ((f"`{key}`", sentence(about)) for key, about in top.items())),
        *(f"## {title}\n\n" + "\n\n".join(filter(None, (note, keys(kinds)))) for title, kinds, note in sections),
    )


def both(names: Iterable[str]) -> str:
    """Two names in words."""
    return " and ".join(f"`{name}`" for name in names)


def keys(kinds: Mapping[str, Kind]) -> str:
    """The keys of a mapping: what people write, and what it means."""
    rows = ((f"`{key}`", text(written(kind)), sentence(kind.about)) for key, kind in kinds.items())
    return table(("key", "value", "meaning"), rows)


def written(kind: Kind) -> str:
    """What people write for a value."""
    what = kind.expected
    if kind.options:
        *some, last = (f"`{option}`" for option in kind.options)
        what = f"{', '.join(some)} or {last}"
    elif kind.key is not None and kind.item is not None:
        what = f"a mapping; each value is {written(kind.item)}"
    elif kind.keys is not None:
        what = "a mapping"
    elif kind.allowed:
        what = f"{what} ({', '.join(kind.allowed)})"
    if kind.item is not None and kind.key is None and not kind.spelled:
        what = f"a list; each item is {written(kind.item)}"
    return f"{what}, or `null`" if kind.nullable else what


SEE = {
    "python": "environments.md", "min_gpus": "launchers.md", "launcher": "launchers.md",
    "roles": "launchers.md#tensorflow", "data": "data.md",
    "outputs_limit": "disk.md", "notify": "notifications.md", "sweep": "sweeps.md",
}  # fmt: skip
"""Keys of a recipe that a guide explains."""


def recipes() -> str:
    """Every key of a recipe."""
    defaults = {**defaults_of(spec.JobSpec), **defaults_of(spec.Constraints)}
    del defaults["launcher"]  # the program says it; the default is for jobs of an older gpurun
    sections = (
        ("constraints", recipe_keys.CONSTRAINTS, "These keys limit the hosts on which the job may run."),
        (
            "retry",
            recipe_keys.RETRY,
            "`retry: 3` is short for `retry: {times: 3}`. The flags are `--retry NUMBER`, `--retry-on`, "
            "`--retry-only-progress` and `--retry-wait`.",
        ),
        (
            "python",
            recipe_keys.PYTHON,
            "These keys install packages on top of the image. Give exactly one of `requirements`, `lock` and "
            "`project`.",
        ),
        (
            "horovod",
            recipe_keys.HOROVOD,
            "Each key is a flag of `horovodrun`. If you leave out a key, Horovod's default applies.",
        ),
        ("roles", recipe_keys.ROLES, "These keys need the launcher `tensorflow`."),
        ("sweep", recipe_keys.SWEEP, "These keys set the parameters of `gpurun sweep`."),
    )
    return page(
        "Recipe keys",
        "A recipe is one YAML file; [Recipes](../recipes.md) explains it. [Times and sizes](commands.md#values) have "
        "units. `gpurun validate --schema` prints all keys as a JSON Schema. In `gpurun submit`, `sweep run` and "
        "`scale run`, the flag of a key has the key's name, such as `--min-gpus`, unless this page names another flag.",
        recipe_table(recipe_keys.FIELDS, defaults),
        *(
            f"## {name}\n\n{about}{see(name)}\n\n{recipe_table(kinds, defaults if name == 'constraints' else {})}"
            for name, kinds, about in sections
        ),
    )


def recipe_table(kinds: Mapping[str, Kind], defaults: Mapping[str, str]) -> str:
    """The keys of a recipe's mapping, in their order."""
    rows = []
    for key, kind in kinds.items():
        default = f" Default: `{defaults[key]}`." if key in defaults and "Default: " not in kind.about else ""
        inner = f" ([keys](#{key}))" if kind.keys is not None else ""
        meaning = sentence(kind.about) + default + flag_of(key, kind) + see(key)
        rows.append((f"`{key}`", shown(kind) + inner, meaning))
    return table(("key", "value, such as", "meaning"), rows)


def shown(kind: Kind) -> str:
    """A value of a recipe: what may be chosen, or examples with the bounds of a number, if people may meet them."""
    if kind.options and kind.options != ("true", "false"):
        return text(written(kind))
    bounds = (bound for bound in kind.allowed if re.match(r"-?[\d.]+ to ", bound))
    near = (f" ({bound})" for bound in bounds if not bound.endswith(f" {MAX_GPUS}"))
    return " or ".join(map(code, kind.examples)) + "".join(near)


def flag_of(key: str, kind: Kind) -> str:
    """What to know of a key's flag: its name if it is not the key's, or why there is none."""
    setting = recipe_keys.SETTINGS.get(key)
    if setting is None or setting.kind.about != kind.about:
        return ""
    if setting.flag is None:
        return f" `{key}` has no flag: {text(setting.no_flag)}."
    has_own_name = setting.names[-1] == f"--{key.replace('_', '-')}"
    name = "" if has_own_name else f" The flag is {code(setting.names[-1])}."
    lacks = "scale run" not in setting.flag.only and "submit" in setting.flag.only
    return name + (f" {text(setting.flag.why)}." if lacks else "")


def sentence(plain: str) -> str:
    """A meaning as a sentence. Names of programs stay as they are."""
    first = plain if plain.startswith(("gpurun", "horovodrun", "null")) else plain[:1].upper() + plain[1:]
    return text(first + "." * (plain[-1:] not in ("", ".")))


def see(key: str) -> str:
    """A link to the page that explains a key."""
    return f" See [{SEE[key].partition('.')[0]}](../{SEE[key]})." if key in SEE else ""


def defaults_of(kind: type) -> Mapping[str, str]:
    """Key of a recipe → its default, as people write it; without those that are nothing, no or none."""
    of_field = {field.name: field.default for field in dataclasses.fields(kind)}
    fields_of = {key: recipe_keys.FIELD_OF.get(key, key) for key in (*recipe_keys.FIELDS, *recipe_keys.CONSTRAINTS)}
    values = {key: (field, of_field.get(field)) for key, field in fields_of.items()}
    return {
        key: f"{value:g}s" if field.endswith("_s") else f"{value / 1024:g}GiB" if field.endswith("_mib") else str(value)
        for key, (field, value) in values.items()
        if value and isinstance(value, int | float | str) and not isinstance(value, bool)
    }


def exit_codes() -> str:
    """Exit codes, and variables of the environment."""
    return page(
        "Exit codes and variables",
        table(("exit code", "meaning"), ((str(number), text(meaning)) for number, meaning in EXIT_CODES.items())),
        "`gpurun exec`, `gpurun ssh` and `gpurun lab run` exit with the code of the program that they run.",
        "## Variables of the environment",
        table(("variable", "meaning"), ((f"`{name}`", text(meaning)) for name, meaning in VARIABLES.items())),
        "`gpurun config view` shows which variables are set, and which files commands use.",
    )


def json_documents() -> str:
    """What each command prints with `--json`, and the objects in it."""
    shared = {json_shapes.name(one): one for tops in SHAPES.values() for top in tops for one in inner(top)}
    return page(
        "JSON documents",
        "Each command that reads has `--json`. With `--json`, a command prints one document on stdout, and messages "
        "on stderr. New versions may add keys. Keys that end in `_s` are seconds, or a moment in seconds since 1970. "
        "Keys that end in `_bytes` and `_mib` are bytes and MiB.",
        *(f"## gpurun {command}\n\n" + documents_of(command) for command in SHAPES),
        "## Objects",
        *(f"### {title}\n\n{shape(one)}" for title, one in sorted(shared.items())),
    )


def documents_of(command: str) -> str:
    """What a command prints; if another one prints the same, a link to that."""
    first = next(other for other, tops in SHAPES.items() if tops == SHAPES[command])
    if first != command:
        return f"The document is the same as that of [gpurun {first}](#gpurun-{first.replace(' ', '-')})."
    return "\n\n".join(map(shape, SHAPES[command]))


def inner(top: type) -> Iterable[type]:
    """The objects in a document, without itself."""
    return (one for member in json_shapes.members(top).values() for one in json_shapes.objects(member.hint))


def shape(one: type) -> str:
    """An object: what it is, and its keys."""
    rows = (
        (f"`{key}`" + ", if any" * member.is_optional, json_shapes.words(member.hint), sentence(member.about))
        for key, member in json_shapes.members(one).items()
    )
    return "\n\n".join(filter(None, (text(json_shapes.summary(one)), table(("key", "value", "meaning"), rows))))


def decisions() -> str:
    """The list of decisions: each page's title."""
    found = sorted(DECISIONS.glob("[0-9]*.md"))
    titles = [(path, path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")) for path in found]
    rows = ((f"[{path.name[:4]}]({path.name})", text(re.sub(r"^\d+[.:]?\s*", "", title))) for path, title in titles)
    return page(
        "Decisions",
        "Each page says what was chosen, why, and what it costs.",
        table(("number", "decision"), rows),
    )


PAGES: Mapping[Path, Callable[[], str]] = {
    FOLDER / "commands.md": commands,
    FOLDER / "recipes.md": recipes,
    FOLDER / "inventory.md": inventory,
    FOLDER / "json.md": json_documents,
    FOLDER / "exit-codes.md": exit_codes,
    DECISIONS / "README.md": decisions,
    TOP / "docs/rooms.svg": rooms.picture,
}


def write() -> None:
    """Write all pages."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, made in PAGES.items():
        path.write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    write()
