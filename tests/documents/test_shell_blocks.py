"""Commands in the documentation exist and take what they are given. Those that need no host run."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import click
import pytest
from typer.main import get_command

from gpurun.cli.main import app, split_command
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore

TOP = Path(__file__).parents[2]
PAGES = [TOP / name for name in ("README.md", "CONTRIBUTING.md")]
PAGES += [*sorted(TOP.glob("docs/**/*.md")), *sorted(TOP.glob("recipes/**/*.md"))]
FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```\s*$", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "console")
INLINE = re.compile(r"`(gpurun [a-z][^`]*)`")
PROMPT = re.compile(r"^\s*\$ (?=\S)")
ROOT_PROMPT = re.compile(r"^\s*[$#] (?=\S)")
CALL = re.compile(r"gpurun(?: -{1,2}[a-z-]+)* [a-z-]+(?!\S)")
INSIDE = re.compile(r"\$\(\S*?(gpurun [^()]*)\)")
PICTURE = re.compile("[─►▼│┌┐└┘]")
PLACEHOLDER = re.compile(
    r"(?!FAILED|RUNNING)(?:[A-Z]|[A-Z]*(?:JOB|RECIPE|SWEEP|CAMPAIGN|HOSTS?|FILE|DIR|IMAGE|LEASE|SOURCE|TIME|WHEN|SIZE|RATE))…?|…"
)
VALUES = {"TIME": "7h", "WHEN": "7d", "SIZE": "7GiB", "RATE": "7gbit"}
"""Such as JOB, N or JOB…"""


def shell_lines(text):
    """What a person types, of all shell blocks; continued lines are one line. Without a prompt, all lines are typed."""
    for language, body in FENCED.findall(text):
        prompt = ROOT_PROMPT if language == "console" else PROMPT
        if language in SHELL:
            lines = body.replace("\\\n", " ").splitlines()
            typed = [prompt.sub("", line) for line in lines if prompt.match(line)]
            yield from typed or ([] if PICTURE.search(body) else map(str.strip, lines))


def as_typed(line):
    """A line as a person would type it who wants every option: ``[--policy fifo|sjf]`` is ``--policy fifo``."""
    return re.sub(r"(?<=\w)\|[\w|]+", "", re.sub(r"\[(-[^\]]*)\]", r"\1", line))


def commands(line):
    """The simple commands of a line, as words. Raises ValueError for a quote that is left open."""
    lexer = shlex.shlex(re.sub(r" \d?>&\d", "", line), posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    found, is_redirected = [[]], False
    for word in lexer:
        if set(word) <= set(";&|"):
            found.append([])
            is_redirected = False
        elif set(word) <= set("<>"):
            is_redirected = True
        elif not is_redirected:
            found[-1].append(word)
    return [words for words in found if words]


def calls(text):
    """Every call of gpurun in shell blocks, as words."""
    lines = [line for typed in shell_lines(text) for line in (typed, *INSIDE.findall(typed)) if CALL.match(line)]
    found = [words for line in lines for words in commands(as_typed(line))]
    return [words for words in found if words[0] == "gpurun"]


def mentions(text):
    """Every call of gpurun between backquotes in running text, as words."""
    found = [words for line in INLINE.findall(FENCED.sub("", text)) for words in commands(as_typed(line))]
    return [words for words in found if words[0] == "gpurun"]


def context_of(words):
    """What click makes of a call. Raises click.UsageError for what the command does not take."""
    given = [VALUES.get(word, "7") if PLACEHOLDER.fullmatch(word) else word for word in words[1:]]
    args, program = split_command(given)
    context = get_command(app).make_context("gpurun", list(args), obj=program)
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return context


def problem(words, *, is_mention=False):
    """Why gpurun would refuse a call; None = it would not. A mention may leave out arguments."""
    try:
        context_of(words)
    except click.exceptions.NoArgsIsHelpError:
        return None
    except click.MissingParameter as error:
        return None if is_mention else f"{' '.join(words)}: {error.format_message()}"
    except click.UsageError as error:
        return f"{' '.join(words)}: {error.format_message()}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_every_command_of_a_page_is_one_that_gpurun_takes(page):
    text = page.read_text()
    found = [problem(words) for words in calls(text)]
    found += [problem(words, is_mention=True) for words in mentions(text)]
    assert [each for each in found if each] == []


def test_the_pages_have_the_commands_that_this_file_looks_for():
    texts = [page.read_text() for page in PAGES]
    assert sum(len(calls(text)) for text in texts) > 100
    assert sum(len(mentions(text)) for text in texts) > 100


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("gpurun submitt", "No such command"),
        ("gpurun status --wach", "No such option"),
        ("gpurun logs", "Missing argument"),
        ("gpurun logs one two", "unexpected extra argument"),
        ("gpurun logs JOB --rank three", "not a valid integer"),
        ("gpurun sweep stop", "Missing argument"),
    ],
)
def test_a_wrong_command_is_seen(wrong, why):
    assert why in (problem(calls(f"```console\n$ {wrong}\n```")[0]) or "")
    assert why in (problem(mentions(f"Type `{wrong}` now.")[0]) or "") or why == "Missing argument"


def test_lines_are_read_as_a_shell_reads_them():
    text = "```console\n$ gpurun why JOB; gpurun du --json > x.json  # gpurun nothing\ngpurun printed this\n```\n"
    assert calls(text) == [["gpurun", "why", "JOB"], ["gpurun", "du", "--json"]]
    assert calls("```\ngpurun submit -n 1 \\\n  -- sh -c 'a; b'\n```\n") == [
        ["gpurun", "submit", "-n", "1", "--", "sh", "-c", "a; b"]
    ]
    assert calls("```yaml\ngpurun status\n```\n") == []
    assert calls("```\nexport X=$(gpurun lab up)/y\n17 6 * * * me out=$(/usr/bin/gpurun doctor 2>&1) || x\n```\n") == [
        ["gpurun", "lab", "up"], ["gpurun", "doctor"],
    ]  # fmt: skip


ADDED = {
    "submit": "--dry-run", "sweep run": "--dry-run", "scale run": "--dry-run", "prune": "--dry-run",
    "timer install": "--dry-run", "inventory add": "--yes",
    "inventory set": "--yes", "inventory label": "--yes", "inventory remove": "--yes",
}  # fmt: skip
"""What makes a command run without hosts, or without somebody to answer."""
RUN = (
    *ADDED, "version", "config view", "status", "queue", "why", "follow", "logs", "events", "cancel", "wait",
    "outputs", "show", "diff", "history", "report", "du", "audit", "simulate", "recover", "man", "scale list",
    "validate", "inventory list", "inventory show", "inventory validate", "inventory schema", "inventory export",
)  # fmt: skip
KNOWN = {"JOB": "@last", "JOB…": "@last", "DIR": "made", "RECIPE": "recipe.yaml"}
INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks:
  r1: {hosts: {"gpu-r1-[01-16]": {}}}
  r2: {hosts: {"gpu-r2-[01-08]": {generation: volta, gpus: 8}}}
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with an inventory, recipes and a state directory with jobs that have ended."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "recipe.yaml").write_text((TOP / "recipes/noop/recipe.yaml").read_text())
    (tmp_path / "recipes").symlink_to(TOP / "recipes")
    (tmp_path / "gpurun").symlink_to(TOP)
    for name, value in {"HOME": tmp_path, "GPURUN_HOME": tmp_path / "state"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("GPURUN_INVENTORY", raising=False)
    monkeypatch.chdir(tmp_path)
    store = JobStore(tmp_path / "state")
    for name in ("small", "big", "newest"):
        spec = JobSpec(name=name, image="me/train:1", gpus=4, command=("true",))
        folder = store.create(spec, inventory=tmp_path / "inventory.yaml", now_s=time.time())
        folder.write(folder.record().but(state=State.SUCCEEDED, ended_s=time.time()))
        folder.outputs.mkdir()
    return tmp_path


def name_of(words):
    """The command of a call, such as ``sweep run``; "" if gpurun would refuse it."""
    try:
        return context_of(words).command_path.removeprefix("gpurun ")
    except click.UsageError:
        return ""


def runnable(words):
    """A call as it runs here; None if it needs hosts or Docker, or a name that nobody knows."""
    given = [str(Path(word).expanduser()) if word.startswith("~") else KNOWN.get(word, word) for word in words[1:]]
    name = name_of(words)
    if (
        name not in RUN
        or {"--caches", "--watch", "--requirements"} & {*words}
        or any(PLACEHOLDER.fullmatch(word) and word not in KNOWN for word in given)
    ):
        return None
    before, dashes, after = [*given, "--"], [], []
    if "--" in given:
        before, dashes, after = given[: given.index("--") + 1], ["--"], given[given.index("--") + 1 :]
    flag = ADDED.get(name)
    added = [flag] if flag is not None and flag not in before else []
    return [*before[:-1], *added, *dashes, *after]


STORIES = [page for page in PAGES if page.name != "commands.md" and any(map(runnable, calls(page.read_text())))]
"""Pages whose commands are typed one after the other. The reference has one example for each command."""


@pytest.mark.parametrize("page", STORIES, ids=lambda page: page.stem)
def test_what_needs_no_host_runs_in_the_order_of_the_page(page, world, gpurun):
    for words in filter(None, map(runnable, calls(page.read_text()))):
        code, _, err = gpurun(*words)
        assert code == 0, (words, err)
