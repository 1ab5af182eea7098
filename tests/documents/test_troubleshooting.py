"""What the guides show as output, gpurun prints: each constant part of a message is in its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpurun

TOP = Path(__file__).parents[2]
PAGE = TOP / "docs/troubleshooting.md"
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^\s*\$ (?=\S)", re.MULTILINE)
ITEM = re.compile(r"^- ((?:`[^`]+`(?:, )?)+)", re.MULTILINE)
JOINED = re.compile(r"""["']\s*(?:\+\s*)?\n\s*f?["']""")
VARIABLE = re.compile(
    r"python3 of bob \(pid 4711\)|gpu-r1-[\w\[\]-]*\w\]?|\bj-\w+|me/\S+|\b(?:llm|big|bob|timm|torchrun|mpirun|head-2)\b"
    r"|\b(?:FAILED|Docker's disk|does not fit(?=:)|SIGBUS: usually|exit code|time limits end|error ssh|out for)\b"
    r"|\ball_reduce\b|and 1 more host"
    r"|\bwaits:(?= the job)|ssh says:.*|^gpurun:|^the job hangs|^python:|free GPUs are on hosts"
    r"|(?:\bin )?\b\d+(?:[hm]\w*| GiB| GPUs?| hosts?| processes)?\b|\bGPUs?(?= \d)"
)
"""What messages name, and what they are put together from."""


def quotes(text):
    """The messages in a page: the first words of list items, and what blocks show below commands."""
    found = [quote for item in ITEM.findall(FENCED.sub("", text)) for quote in re.findall("`([^`]+)`", item)]
    for body in FENCED.findall(text):
        found += [line for line in body.splitlines() if not line.startswith("$ ")]
    return found


def shown(text):
    """What blocks with a prompt show below the commands, also of several columns."""
    bodies = [body for body in FENCED.findall(text.replace("\\\n", " ")) if PROMPT.search(body)]
    lines = [line for body in bodies for line in body.splitlines() if line.lstrip()[:2] not in ("$ ", "# ")]
    return [column for line in lines for column in re.split("  +", line.strip())]


def constant_parts(quote):
    """The parts of at least two words that no value replaces."""
    parts = (part.strip(" :;,.()→…!") for part in VARIABLE.sub("\0", quote.strip()).split("\0"))
    return [part for part in parts if " " in part]


@pytest.fixture(scope="module")
def printed():
    code = "\n".join(path.read_text() for path in Path(gpurun.__file__).parent.rglob("*.py"))
    return " ".join(JOINED.sub("", code).split())


def test_what_the_guide_quotes_is_printed(printed):
    parts = [part for quote in quotes(PAGE.read_text()) for part in constant_parts(quote)]
    assert len(parts) > 30
    assert [part for part in parts if part not in printed] == []


def test_what_other_guides_show_is_printed(printed):
    pages = [page for page in (TOP / "README.md", *TOP.glob("docs/*.md")) if page != PAGE]
    parts = [(page.name, part) for page in pages for line in shown(page.read_text()) for part in constant_parts(line)]
    assert len(parts) > 5
    assert [(page, part) for page, part in parts if part not in printed] == []


def test_an_invented_output_is_seen(printed):
    (line, _) = shown("```console\n$ gpurun x \\\n  --flag with words\nthe GPU is on holiday  7 GPUs\n```\n")
    assert constant_parts(line) == ["the GPU is on holiday"] and line not in printed


def test_an_invented_message_is_seen(printed):
    quote = quotes("- `gpu-r1-02 is rather unwell today`: repair it.\n")[0]
    assert constant_parts(quote) == ["is rather unwell today"]
    assert constant_parts(quote)[0] not in printed
