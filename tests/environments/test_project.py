"""Dependencies of a project and of a lock: read, never run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpurun.content.environment import read_lock, read_project
from gpurun.errors import BadInput

PROJECT = '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.8"\n'
UV = str(Path(sys.executable).parent / "uv")  # of the development extras


def test_a_projects_dependencies_are_taken_and_its_code_is_not(write):
    top = write({
        "pyproject.toml": PROJECT + 'dependencies = ["numpy<2", "requests ; python_version>\'3\'"]\n',
        "setup.py": "raise SystemExit('run')",
    }).parent  # fmt: skip
    found = read_project(top)
    assert found.lines == ("numpy<2", "requests ; python_version>'3'") and not found.locked


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[tool.x]\n", r"has no table \[project\]"),
        (PROJECT + "dynamic = ['dependencies']\n", "only during its build"),
        (PROJECT, "names no package"),
        (PROJECT + "dependencies = 'numpy'\n", "must be a list"),
        (PROJECT + "dependencies = [1]\n", "must be a list"),
        (PROJECT + "dependencies = ['-r /etc/shadow']\n", "the option --requirement, which is not a package"),
        (PROJECT + "dependencies = ['a\\nb', '-e .']\n", "editable|backslash"),
        (PROJECT + "dependencies = ['x @ file:///etc/passwd']\n", "is not a URL with http"),
        ("]" * 100_000, "is not TOML"),
        ("a=" + "[" * 50_000, "is not TOML"),
    ],
)
def test_what_lists_no_dependencies_is_refused(write, text, why):
    with pytest.raises(BadInput, match=why):
        read_project(write({"pyproject.toml": text}).parent)


LOCK = """version = 1
requires-python = ">=3.8"
[[package]]
name = "mine"
version = "1"
source = { virtual = "." }
dependencies = [{ name = "tinyone", marker = "python_version > '3'" }]
[package.dev-dependencies]
dev = [{ name = "tinydev" }]
""" + "".join(
    f"""[[package]]
name = "{name}"
version = "1.5"
source = {{ registry = "https://example.org/simple" }}
wheels = [{{ url = "https://example.org/{name}-1.5-py3-none-any.whl", hash = "sha256:{digit * 64}" }}]
"""
    for name, digit in {"tinyone": "1", "tinydev": "2"}.items()
)


def test_a_lock_gives_exactly_what_it_pins_with_hashes(write):
    project = PROJECT + 'dependencies = ["tinyone"]\n[dependency-groups]\ndev = ["tinydev"]\n'
    path = write({"uv.lock": LOCK, "pyproject.toml": project, "setup.py": "raise SystemExit('run')"})
    found = read_lock(path)
    assert found.locked and len(found.lines) == 1
    assert found.lines[0].startswith("tinyone==1.5") and f"--hash=sha256:{'1' * 64}" in found.lines[0]


@pytest.mark.parametrize("text", ["", "not toml [", "version = 99\n"])
def test_a_damaged_lock_is_refused(write, text):
    path = write({"uv.lock": text, "pyproject.toml": PROJECT})
    with pytest.raises(BadInput, match=r"uv cannot read the lock file|names no package"):
        read_lock(path)


def test_a_lock_has_its_name_and_is_there(write, tmp_path):
    with pytest.raises(BadInput, match=r"must have the name uv\.lock"):
        read_lock(write({"poetry.lock": ""}))
    with pytest.raises(BadInput, match="is not a file"):
        read_lock(tmp_path / "uv.lock")


def test_without_uv_the_error_says_how_to_get_it(write, monkeypatch):
    monkeypatch.setattr("gpurun.content.environment.importlib.import_module", failing)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInput, match="needs uv") as caught:
        read_lock(write({"uv.lock": "version = 1"}))
    assert "gpurun[lock]" in caught.value.hint


def failing(name):
    raise ImportError(name)
