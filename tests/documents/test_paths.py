"""What the documents name exists: programs, tests, recipes, what links lead to, variables and functions."""

from __future__ import annotations

import re
from pathlib import Path

import gpurun
from gpurun.runtime import gpurun_runtime

TOP = Path(__file__).parents[2]
PACKAGE = Path(gpurun.__file__).parent
PAGES = [*TOP.glob("*.md"), *sorted(TOP.glob("docs/**/*.md")), *sorted(TOP.glob("recipes/**/*.md"))]
NAMED = re.compile(r"(?<![\w./@-])((?:gpurun|tests|benchmarks|recipes|docs|\.ci)/[\w.*/-]*\w)(?!\w|:\w)")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")
VARIABLE = re.compile(r"\bGPURUN_[A-Z0-9_]*[A-Z0-9]\b")
FUNCTION = re.compile(r"(?<![\w/.-])(gpurun|gpurun_runtime)\.([a-z_]+)\(")
TARGET = re.compile(r"(?:^|[`$(]|&& )\s*make ((?:[a-z-]+(?: |(?=[`\n]|\Z)))+)", re.MULTILINE)
EXTRA = re.compile(r"gpurun\[([\w,]+)\]")
IMAGE = re.compile(r"\bgpurun/([a-z]\w*:[\w.]+)")
BUILT = re.compile(r"\bbuild\.py ([\w.]+)")
PROGRAM = re.compile(r"(?:\bpython3?\s+|(?<=`))((?:benchmarks|recipes|\.ci)/[\w./]+\.py)([^`|;]*)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
CHECK = re.compile(r'(?:[Ff]inding|_slower|told)\(\s*"([a-z][a-z-]+)"|"([a-z][a-z-]+)",\s*Severity\.')
OTHERS = {"docs/benchmarks.rst", "docs/benchmarks.md", "gpurun/inventory.yaml", "recipes/NAME"}
"""A file of Horovod, one of users, and a placeholder. Images have a colon behind their name."""


def missing(text: str, page: Path) -> list[str]:
    """The files that a page names or links to, and that are not there."""
    named = [path for path in NAMED.findall(text) if path not in OTHERS]
    named = [path for path in named if not [*TOP.glob(path), *PACKAGE.parent.glob(path)]]
    return named + [link for link in LINK.findall(text) if not (page.parent / link).exists()]


def test_every_file_that_a_page_names_is_there():
    found = {str(page.relative_to(TOP)): missing(page.read_text(), page) for page in PAGES}
    assert {page: files for page, files in found.items() if files} == {}


def test_a_missing_file_is_seen():
    text = (
        "`tests/test_nothing.py`, `gpurun submit recipes/no-such`, [x](no.md#y), `gpurun/tiny:1`, `tests/lab/test_*.py`"
    )
    assert missing(text, TOP / "README.md") == ["tests/test_nothing.py", "recipes/no-such", "no.md"]


def unknown(text: str) -> list[str]:
    """The functions of gpurun in Python that a page calls, and that are not there; in a program, either module's."""
    runtime = gpurun if "import gpurun_runtime as gpurun" not in text else gpurun_runtime
    places = {"gpurun": runtime, "gpurun_runtime": gpurun_runtime}
    return [f"{place}.{name}" for place, name in FUNCTION.findall(text) if not hasattr(places[place], name)]


def test_every_variable_and_function_that_a_page_names_is_there():
    code = "\n".join(
        path.read_text() for top in (PACKAGE, TOP / "tests", TOP / "benchmarks") for path in top.rglob("*.py")
    )
    known = {*VARIABLE.findall(code)}
    found = {str(page): {*VARIABLE.findall(page.read_text())} - known | {*unknown(page.read_text())} for page in PAGES}
    assert {page: names for page, names in found.items() if names} == {}
    assert unknown("`gpurun_runtime.chekpointed(step)`, gpurun.sumbit(x)") == [
        "gpurun_runtime.chekpointed",
        "gpurun.sumbit",
    ]


def test_every_target_extra_and_image_that_a_page_names_is_there():
    build = (TOP / "recipes/images/build.py").read_text()
    known = (
        (TARGET, {*re.findall(r"^([a-z-]+):", (TOP / "Makefile").read_text(), re.MULTILINE)}),
        (EXTRA, {*re.findall(r"^(\w+) = \[", (TOP / "pyproject.toml").read_text(), re.MULTILINE)}),
        (IMAGE, {*IMAGE.findall(build), "environment:KEY"}),
        (BUILT, {*re.findall(r'"([\w.]+)": "gpurun/', build)}),
    )
    found = [
        (str(page.relative_to(TOP)), name)
        for page in PAGES
        for named, names in known
        for name in re.split("[ ,]", " ".join(named.findall(page.read_text())))
        if name and name not in names
    ]
    assert found == []
    text = "`make setup tset`, gpurun[tpo], gpurun/train:tf2.51, $ python recipes/images/build.py tinny"
    assert [named.findall(text) for named, _ in known] == [["setup tset"], ["tpo"], ["train:tf2.51"], ["tinny"]]


def programs(text: str) -> list[tuple[str, str]]:
    """The repository's own programs that a page runs, in a line or between backquotes, and the words behind them."""
    pieces = [" ".join(piece.split()) for piece in re.findall(r"`[^`]+`", FENCED.sub("", text))]
    return [found for piece in (*pieces, *text.splitlines()) for found in PROGRAM.findall(piece)]


def unknown_options(text: str) -> list[str]:
    """The options that a page gives to these programs, and that they do not have."""
    return [
        f"{path} {option}"
        for path, words in programs(text)
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", words)
        if f'"{option}"' not in (TOP / path).read_text()
    ]


def test_every_option_of_a_program_of_the_repository_is_there():
    texts = {str(page.relative_to(TOP)): page.read_text() for page in PAGES}
    assert sum(words.count("--") for text in texts.values() for _, words in programs(text)) > 20
    assert {page: found for page, text in texts.items() if (found := unknown_options(text))} == {}
    wrong = "`python benchmarks/bench_ship.py\n  --no-such x` and\n$ python3 .ci/slowest.py --nor-this\n$ gpurun --x"
    assert unknown_options(wrong) == ["benchmarks/bench_ship.py --no-such", ".ci/slowest.py --nor-this"]


def test_every_check_of_doctor_is_in_the_guide():
    code = "\n".join(path.read_text() for path in (PACKAGE / "doctor").glob("*.py"))
    checks = {name for names in CHECK.findall(code) for name in names if name}
    assert {"gpu-stranger", "mtu", "link-rate", "probe"} < checks
    assert [check for check in sorted(checks) if f"`{check}`" not in (TOP / "docs/fabrics.md").read_text()] == []
