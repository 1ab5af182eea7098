"""Inside a build container: install every wheel of a folder into /out/usr/local and leave only what runs.

Two builds from the same wheels give the same layer, byte for byte, so that hosts which have it are not sent it again
after a rebuild. Byte code is kept for the
modules that a start-up imports (compiling TensorFlow anew at each start of each rank costs seconds, and a rank may
not write to the image) and for nothing else.
"""

from __future__ import annotations

import argparse
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PREFIX = Path("/usr/local")
OUT = Path("/out")  # becomes the layer: copied over "/", whose own time no layer records
PACKAGES = PREFIX / "lib/python3.11/dist-packages"
# Headers, sources and the libraries' own tests: for building against them, not for running.
UNUSED = (
    "tensorflow/include", "tensorflow/xla_aot_runtime_src", "numpy/tests", "numpy/*/tests", "numpy/core/include",
    "numpy/core/lib/*.a", "numpy/random/lib/*.a", "numpy/f2py/src", "h5py/tests", "psutil/tests",
)  # fmt: skip
# Only these: patchelf'ed libraries of other wheels do not survive strip.
STRIPPED = ("tensorflow/**/*.so", "tensorflow/*.so.2", "horovod/**/*.so")
EPOCH = 1_700_000_000
LIST_LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
for file in {getattr(module, "__file__", None) for module in list(sys.modules.values())} - {None}:
    print(file)
"""


def main() -> None:
    """Install, remove, strip, compile, move to /out, and set every time stamp there to the same moment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--warm", default="", help="modules to import; what they load keeps its byte code")
    arguments = parser.parse_args()
    install(arguments.wheels)
    for pattern in UNUSED:
        for path in PACKAGES.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for library in sorted({path for pattern in STRIPPED for path in PACKAGES.glob(pattern)}):
        subprocess.run(["strip", "--strip-unneeded", library], check=True)
    compile_sources(loaded_by(arguments.warm.split(",")) if arguments.warm else sorted(PACKAGES.rglob("*.py")))
    shutil.move(PREFIX, OUT / PREFIX.relative_to("/"))
    for path in (OUT, *OUT.rglob("*")):
        os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)


def install(wheels: Path) -> None:
    """Install all wheels but pip's own with pip from its wheel."""
    (pip,) = wheels.glob("pip-*.whl")
    argv = [sys.executable, str(pip / "pip"), "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    argv += ["--break-system-packages", "--root-user-action=ignore", "--no-cache-dir"]
    subprocess.run([*argv, *sorted(str(wheel) for wheel in wheels.glob("*.whl") if wheel != pip)], check=True)


def loaded_by(modules: Iterable[str]) -> list[Path]:
    """Source files of all that importing `modules` loads from the installed packages.

    In a process of its own: setuptools provides distutils, which TensorFlow imports, only from the next start on.
    """
    done = subprocess.run(
        [sys.executable, "-B", "-c", LIST_LOADED, *modules], check=True, stdout=subprocess.PIPE, text=True
    )
    files = [Path(line) for line in done.stdout.splitlines()]
    return sorted(file for file in files if file.suffix == ".py" and file.is_relative_to(PACKAGES))


def compile_sources(sources: Iterable[Path]) -> None:
    """Compile without checks against the source's time, which a copy between layers may change."""
    for source in sources:
        py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, quiet=1)


if __name__ == "__main__":
    main()
