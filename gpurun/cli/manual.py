"""Write a command's manual page in roff, in the macros of man(7), which groff and mandoc both know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gpurun.cli.config import VARIABLES
from gpurun.cli.tree import CommandPage
from gpurun.errors import EXIT_CODES

_CODE = re.compile(r"`([^`]+)`")
_SPECIAL = {
    "\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti", '"': r"\(dq",
}  # fmt: skip
"""Characters that roff would print as other characters (groff_char(7))."""


def manual_page(page: CommandPage, version: str) -> str:
    """Return the page. It has no date, so that the same gpurun version always writes the same bytes."""
    title = "-".join(page.words)
    lines = [f'.TH "{_text(title.upper())}" "1" "" "gpurun {version}" "gpurun manual"']
    lines += [".nh", ".ad l"]
    lines += [".SH NAME", rf"{_text(title)} \- {_text(page.summary)}"]
    lines += [".SH SYNOPSIS", f".B {_text(page.name)}", _line(page.usage)]
    lines += [".SH DESCRIPTION", *_paragraphs(page.about)]
    lines += _section("ARGUMENTS", page.arguments)
    lines += _options({title: entries for title, entries in page.groups.items() if title != "Arguments"})
    lines += _section("COMMANDS", ((f"{page.name} {name}", summary) for name, summary in page.commands))
    lines += _examples(page.examples)
    if len(page.words) == 1:
        lines += _section("ENVIRONMENT", VARIABLES.items())
    lines += _section("EXIT STATUS", _exit_codes(EXIT_CODES))
    lines += [".SH SEE ALSO", _line(_see_also(page))]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Escape a text so that roff prints every character as it is. The result is ASCII; a minus stays a minus."""
    return "".join(_SPECIAL.get(one) or (one if one.isascii() else f"\\[u{ord(one):04X}]") for one in text)


def _line(text: str) -> str:
    """Return a line of text, with words in backquotes in bold. Escapes a leading dot, which would start a macro."""
    parts = _CODE.split(" ".join(text.split()))
    made = "".join(rf"\fB{_text(part)}\fR" if at % 2 else _text(part) for at, part in enumerate(parts))
    return rf"\&{made}" if made.startswith((".", "\\(aq")) else made


def _paragraphs(texts: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        lines += [".PP", _line(text)] if lines else [_line(text)]
    return lines


def _options(groups: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    if list(groups) == ["Options"]:
        return _section("OPTIONS", groups["Options"])
    return [
        ".SH OPTIONS",
        *(line for title, some in groups.items() for line in (f".SS {_text(title)}", *_entries(some))),
    ]


def _section(title: str, entries: Iterable[tuple[str, str]]) -> list[str]:
    lines = _entries(entries)
    return [f".SH {title}", *lines] if lines else []


def _entries(entries: Iterable[tuple[str, str]]) -> list[str]:
    return [part for name, text in entries for part in (".TP", rf"\fB{_text(name)}\fR", _line(text))]


def _examples(examples: Iterable[str]) -> list[str]:
    lines = [part for example in examples for part in (".PP", ".RS 4", ".nf", _line(example), ".fi", ".RE")]
    return [".SH EXAMPLES", *lines[1:]] if lines else []


def _exit_codes(codes: Mapping[int, str]) -> Iterable[tuple[str, str]]:
    return ((str(code), meaning) for code, meaning in codes.items())


def _see_also(page: CommandPage) -> str:
    names = ["-".join((*page.words, name)) for name, _ in page.commands] or ["-".join(page.words[:-1])]
    return ", ".join(f"`{name}`(1)" for name in names)
