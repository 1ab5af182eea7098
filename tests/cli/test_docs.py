"""Commands in the documentation work when they are pasted into a shell."""

import re
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
PAGES = [TOP / "README.md", *sorted(TOP.glob("docs/**/*.md")), *sorted(TOP.glob("recipes/**/*.md"))]
COMMAND = re.compile(r"^\s*(?:[$#] )?(gpurun .*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\s#.*$")
RANGE = re.compile(r"\w\[[\d,-]+\]|@[\w:]+[&!*?]")


def unquoted_host_sets(text):
    commands = [command for block in FENCED.findall(text) for command in COMMAND.findall(block)]
    return [command for command in commands if RANGE.search(QUOTED.sub("", command))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_host_sets_are_quoted(page):
    """zsh takes ``gpu-r1-[01-04]`` for a pattern of file names: no matches found."""
    assert unquoted_host_sets(page.read_text()) == []


def test_an_unquoted_host_set_is_seen():
    text = (
        "```\n$ gpurun inventory set gpu[1-2] gpus=3\ngpurun drain 'gpu[1-2]'\ngpurun list @rack:r1&!@lost # x\n```\n"
    )
    assert unquoted_host_sets(text) == ["gpurun inventory set gpu[1-2] gpus=3", "gpurun list @rack:r1&!@lost # x"]
