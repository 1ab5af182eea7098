"""The YAML, JSON and Python of the documents is read by its reader: whole lines were once lost, and nobody noticed."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from gpurun.errors import BadInput
from gpurun.inventory import fields
from gpurun.inventory.read import parse_inventory
from gpurun.jobs.recipe import read_recipe
from gpurun.jobs.recipe_keys import CONSTRAINTS, FIELDS
from gpurun.jobs.record import FirstFailure, JobRecord, State
from gpurun.jobs.spec import Grant, JobSpec
from gpurun.notify import payload

TOP = Path(__file__).parents[2]
BLOCK = re.compile(r"^ *```(yaml|json|python)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
SETTING = re.compile(r"([a-z_]+): \S")
PAGES = sorted([TOP / "README.md", *TOP.glob("docs/**/*.md"), *TOP.glob("recipes/**/*.md")])
HOST = "racks: {r: {hosts: {h: {user: u, gpus: 1, generation: pascal, fabric: %s%s}}}}\n"
TCP = "fabrics: {tcp: {kind: tcp, interface: eno1}}\n"
PROMETHEUS = {"scrape_configs", "job_name", "scrape_interval", "static_configs", "targets"}


def blocks() -> list[tuple[str, str, str]]:
    return [
        (f"{page.relative_to(TOP)}: {text.splitlines()[0]}", kind, text)
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text())
    ]


def settings() -> list[tuple[str, str]]:
    """The keys of recipes and hosts in running text, with a value: `time_limit: 1h`."""
    return [
        (str(page.relative_to(TOP)), code)
        for page in PAGES
        if "decisions" not in page.parts and "evidence" not in page.stem  # which also quote what was wrong
        for code in map(" ".join, map(str.split, INLINE.findall(FENCED.sub("", page.read_text()))))
        if (match := SETTING.match(code)) and (match[1] in FIELDS or match[1] in CONSTRAINTS or match[1] in fields.HOST)
        if "…" not in code
    ]


def problem(kind: str, text: str, folder: Path) -> str:
    """Why the reader of a block refuses it; "": it does not. A part of an inventory or a recipe is completed."""
    try:
        if kind == "python":
            ast.parse(text)
        elif kind == "json":
            json.loads(text)
        elif text.startswith("version:"):
            parse_inventory(text.encode(), Path("/inventory.yaml"))
        elif text.startswith("fabrics:"):
            parse_inventory(
                f"version: 1\n{text}{HOST % (next(iter(yaml.safe_load(text)['fabrics'])), '')}".encode(), Path("/i")
            )
        elif text.startswith("scrape_configs:"):
            yaml.safe_load(text)
            return ", ".join({*re.findall(r"[a-z_]+(?=: )|[a-z_]+(?=:$)", text, re.MULTILINE)} - PROMETHEUS)
        else:
            (folder / "recipe.yaml").write_text(text)
            read_recipe(folder)
    except (SyntaxError, yaml.YAMLError, json.JSONDecodeError, BadInput, KeyError, TypeError) as error:
        return str(error)
    return ""


def problem_of_setting(code: str, folder: Path) -> str:
    """Why neither a recipe nor a host takes a setting; "": one of them does."""
    key = code.partition(":")[0]
    if key in fields.HOST:
        host = HOST % ("tcp", "" if key in ("user", "gpus", "generation", "fabric") else f", {code}")
        text = host if key not in host.partition(code)[0] or code in host else re.sub(rf"{key}: \w+", code, host)
        host_problem = problem("yaml", f"version: 1\n{TCP}{text}", folder)
        if not host_problem or key not in FIELDS:
            return host_problem
    return problem("yaml", f"constraints: {{{code}}}\n" if key in CONSTRAINTS else f"{code}\n", folder)


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that recipes of the documents name."""
    for name in ("requirements.txt", "token.txt"):
        (tmp_path / name).write_text("numpy\n")
    return tmp_path


def test_each_block_is_taken_by_its_reader(folder):
    found = blocks()
    assert {kind for _, kind, _ in found} == {"yaml", "json", "python"}
    assert [f"{place}: {why}" for place, kind, text in found if (why := problem(kind, text, folder))] == []


def test_each_setting_in_running_text_is_taken_by_a_recipe_or_a_host(folder):
    found = settings()
    assert len(found) > 15
    assert [f"{page}: {why}" for page, code in found if (why := problem_of_setting(code, folder))] == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("yaml", "gpus: 4\n command: [x]\n"), ("yaml", "gpuss: 4\n"), ("yaml", "time_limit: 1x\n"),
        ("yaml", "version: 1\nracks: {}\nhost: {}\n"), ("yaml", "fabrics: {tcp: {kind: tpc, interface: x}}\n"),
        ("json", '{"a": 1,}'), ("json", "{'a': 1}"), ("python", "def x(:\n"), ("yaml", "scrape_configs:\n  - [\n"),
        ("yaml", "scrape_configs:\n  - job: x\n"),
    ],
)  # fmt: skip
def test_a_wrong_block_is_seen(kind, text, folder):
    assert problem(kind, text, folder)


def test_a_wrong_setting_is_seen(folder):
    for code in ("grace: 15 parsecs", "gpus: -1", "cache_quota_mib: 5 bananas", "locality: planet"):
        assert problem_of_setting(code, folder), code
    assert problem_of_setting("gpus: 0", folder) == "", "a host may have none"


def test_the_inventory_guide_shows_what_gpurun_says_about_its_own_example_with_mistakes():
    page = (TOP / "docs/inventory.md").read_text()
    (example,) = [text for kind, text in BLOCK.findall(page) if kind == "yaml"]
    wrong = example.replace("gpus: 4,", "gpus: four,", 1).replace("kind: roce,", "kind: rocee,", 1)
    with pytest.raises(BadInput) as refused:
        parse_inventory(wrong.encode(), Path("inventory.yaml"))
    assert "\n".join(str(refused.value).splitlines()[:2]) in page


def test_the_message_of_a_job_in_the_guide_is_one_that_gpurun_sends():
    (shown,) = [json.loads(text) for _, kind, text in blocks() if kind == "json"]
    failure = FirstFailure(shown["reason"], rank=shown["failed_rank"], host=shown["failed_host"],
                           exit_code=shown["exit_code"])  # fmt: skip
    times = {key: shown[key] for key in ("submitted_s", "started_s", "ended_s")}
    record = JobRecord(
        shown["job"], name=shown["name"], owner=shown["owner"], owner_uid=1, inventory="/i", gpus=shown["gpus"],
        state=State(shown["state"]), queued_s=0, attempt=shown["attempt"], reason=shown["reason"], pool=shown["pool"],
        first_failure=failure, **times,
    )  # fmt: skip
    grants = tuple(Grant(host, tuple(range(shown["gpus"] // len(shown["hosts"])))) for host in shown["hosts"])
    spec = JobSpec(shown["name"], "i", shown["gpus"], ("true",), project=shown["project"])
    sent = payload((shown["event"], "failure"), record, spec, grants, head=shown["head"], now_s=shown["time_s"])
    assert sent == shown and list(sent) == list(shown)


SWEEP = re.compile(r"gpurun sweep (?:run )?recipes/([\w-]+) ([^#`\n]*)")


def unknown_to(program: str, words: list[str]) -> list[str]:
    """The parameters that a sweep sets and its metric, unless the program reads and reports them."""
    tree = ast.parse(program)
    names = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    reports = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("report")
    ]
    metrics = {keyword.arg for call in reports for keyword in call.keywords}
    calls_parameters = any(isinstance(node, ast.Attribute) and node.attr == "parameters" for node in ast.walk(tree))
    flags = list(itertools.pairwise(words))
    set_here = [value.partition("=")[0] for flag, value in flags if flag == "--grid"]
    metric = [value.partition(":")[0] for flag, value in flags if flag == "--metric"]
    return [each for each in set_here if not (calls_parameters and each in names)] + [
        each for each in metric if each not in metrics
    ]


def test_sweeps_of_recipes_set_what_the_program_reads_and_compare_what_it_reports():
    """A sweep once stood in README whose trials all trained the same network, and failed."""
    shown = {found for page in PAGES for found in SWEEP.findall(page.read_text())}
    assert any("--grid" in words for _, words in shown)
    for recipe, words in shown:
        program = (TOP / "recipes" / recipe / "train.py").read_text()
        assert unknown_to(program, shlex.split(words)) == [], (recipe, words)


def test_a_sweep_that_the_program_does_not_know_is_seen():
    words = ["--grid", "lr=1,2", "--metric", "accuracy:max"]
    assert unknown_to("gpurun.progress(1, accuracy=1)", words) == ["lr", "accuracy"]
    assert unknown_to("gpurun.parameters()['lr']; gpurun.report(1, accuracy=1)", words) == []


def test_a_line_for_cron_names_each_program_by_its_path():
    """cron looks for programs in /usr/bin and /bin only, and gpurun is in neither."""
    lines = [line for page in PAGES for line in page.read_text().splitlines() if re.match(r"([\d*/,-]+ +){5}\S", line)]
    assert len(lines) > 1
    assert [line for line in lines if re.search(r"(?<![/\w-])gpurun\b", line)] == []
