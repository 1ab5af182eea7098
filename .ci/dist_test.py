#!/usr/bin/env python3
"""Run the quick tests with the wheel in dist/, not with the clone's gpurun: `make dist-test`.

The tests and what they read beside them are copied into build/dist-test, without gpurun. So a test that reads gpurun's
files from the clone fails here.

Usage: .ci/dist_test.py [PYTEST ARGUMENT...]; without arguments, all quick tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[1]
PLACE = TOP / "build" / "dist-test"
PYTHON = PLACE / "venv" / "bin" / "python"
WHERE = "import gpurun; print(gpurun.__file__)"


def install(wheel: Path) -> None:
    """Install the wheel, and what the tests need, into an empty environment."""
    uv = (sys.executable, "-m", "uv")
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, PLACE / "venv"], check=True)
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", PYTHON, f"{wheel}[dev]"], check=True)


def copy(to: Path) -> None:
    """Copy each file that git knows, except gpurun's own."""
    shutil.rmtree(to, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if not name.startswith("gpurun/") and (TOP / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / name, to / name)


def main(arguments: list[str]) -> int:
    """Install, copy, run; return pytest's exit code."""
    wheels = sorted((TOP / "dist").glob("gpurun-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit("there is no wheel in dist: run `make dist`")
    install(wheels[-1])
    copy(PLACE / "tree")
    environ = {**os.environ, "VIRTUAL_ENV": str(PLACE / "venv"), "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"}
    run = {"cwd": PLACE / "tree", "env": environ}
    found = subprocess.run([PYTHON, "-c", WHERE], check=True, capture_output=True, text=True, **run).stdout
    if not Path(found).is_relative_to(PLACE / "venv"):
        sys.exit(f"the tests would import gpurun from {found.strip()}, not from the wheel")
    print(f"{wheels[-1].name}: {found.strip()}", flush=True)
    options = arguments or ["-n", "2", "--dist", "worksteal"]
    return subprocess.run([PYTHON, "-m", "pytest", "-m", "not lab", *options], check=False, **run).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
