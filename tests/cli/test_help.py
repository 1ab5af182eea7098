"""Every page of help: each argument and option is explained, each command says what it does."""

from __future__ import annotations

import re

import click
import pytest
from typer.main import get_command

from gpurun.cli.main import TAKES_COMMAND, app


def pages():
    """Every command below `gpurun`: its words, and itself."""
    found, left = [], [(("gpurun",), get_command(app))]
    while left:
        words, command = left.pop()
        found.append((words, command))
        if isinstance(command, click.Group):
            context = click.Context(command, help_option_names=["-h", "--help"])
            left += [((*words, name), command.get_command(context, name)) for name in command.list_commands(context)]
    return sorted(found, key=lambda page: page[0])


PAGES = pages()


@pytest.mark.parametrize(("words", "command"), PAGES, ids=[" ".join(words) for words, _ in PAGES])
def test_help_explains_every_argument_and_option(words, command):
    context = click.Context(
        command, info_name=" ".join(words), help_option_names=["-h", "--help"]
    )  # a command keeps it
    page = command.get_help(context)
    flat = " ".join(page.split())
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion") or getattr(parameter, "hidden", False):
            continue
        help_text = getattr(parameter, "help", None)
        assert help_text, f"{words}: {parameter.name} has no help"
        assert help_text[0].isupper() and help_text.rstrip(")")[-1] in ".?", f"{words}: {parameter.name}: {help_text!r}"
        assert re.sub(r"\s", "", help_text) in re.sub(r"\s", "", flat), f"{words}: {parameter.name} is not shown"
    assert command.help and command.help[0].isupper(), words
    assert re.search(r"[.:]$", command.help.strip().split("\n\n")[0]) or words[0] == "gpurun", words


def test_help_says_what_ctrl_c_does_to_the_job():
    helps = {" ".join(words): command for words, command in PAGES}
    (follow,) = (one for one in helps["gpurun submit"].params if one.name == "follow")
    assert "Ctrl-C cancels it" in follow.help
    assert "Ctrl-C ends the view; the job continues." in helps["gpurun follow"].help


def test_usage_shows_where_a_program_goes():
    for words, command in PAGES:
        takes = words[1:] and words[1] in TAKES_COMMAND and not isinstance(command, click.Group)
        if takes and words[-1] in ("submit", "exec", "ssh", "run"):
            assert "[-- COMMAND…]" in command.get_usage(click.Context(command)), words


def test_a_group_shows_one_whole_line_for_each_command():
    for words, command in PAGES:
        if isinstance(command, click.Group):
            context = click.Context(
                command, info_name=" ".join(words), help_option_names=["-h", "--help"]
            )  # a command keeps it
            assert "..." not in command.get_help(context).split("Commands:")[1], words


@pytest.mark.parametrize(("words", "command"), PAGES, ids=[" ".join(words) for words, _ in PAGES])
def test_one_option_has_one_meaning_in_all_commands(words, command):
    shared = {"--json": "as_json", "--inventory": "inventory", "--yes": "yes"}
    for parameter in command.params:
        for name in parameter.opts:
            assert shared.get(name, parameter.name) == parameter.name, words
