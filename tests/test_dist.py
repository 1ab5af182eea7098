"""What the wheel and the source distribution contain: gpurun, what builds it, and nothing else."""

from __future__ import annotations

from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import gpurun

TOP = Path(__file__).parents[1]
ENDINGS = {".py", ".pyi", ".c", ".h", ".typed"}
NEEDED = {
    "gpurun/py.typed", "gpurun/__init__.pyi", "gpurun/node/agent/serve.py", "gpurun/runtime/gpurun_runtime.py",
    "gpurun/content/inside.py", "gpurun/doctor/bench_job/bench.py", "gpurun/lab/nvml/library.c",
}  # fmt: skip
"""Files that gpurun reads or sends, besides its modules."""

pytestmark = pytest.mark.skipif(not (TOP / "gpurun").is_dir(), reason="gpurun is the wheel's: `make dist-test`")


def contents(builder):
    return {each.distribution_path for each in builder(str(TOP)).recurse_included_files()}


def test_the_wheel_has_each_file_of_the_package_and_no_other():
    files = [path for path in (TOP / "gpurun").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} == ENDINGS
    assert contents(WheelBuilder) == {path.relative_to(TOP).as_posix() for path in files} >= NEEDED


def test_the_source_distribution_has_what_the_wheel_is_built_from():
    """hatchling adds pyproject.toml, README.md, LICENSE and .gitignore."""
    assert contents(SdistBuilder) == contents(WheelBuilder) | {"CHANGELOG.md"}


def test_the_wheel_says_its_version_licence_and_command():
    found = ProjectMetadata(str(TOP), PluginManager())
    shown = Parser().parsestr(found.core.config and WheelBuilder(str(TOP)).config.core_metadata_constructor(found))
    assert (shown["Name"], shown["Version"]) == ("gpurun", gpurun.__version__)
    assert (shown["License-Expression"], shown["License-File"]) == ("Apache-2.0", "LICENSE")
    assert found.core.scripts == {"gpurun": "gpurun.cli.main:main"}
