"""Wheels that are made here: of one module, without a tool."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel, byte for byte the same each time."""
    folder.mkdir(exist_ok=True)
    told = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n",
        f"{told}/METADATA": "\n".join([*metadata, ""]),
        f"{told}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{told}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{told}/RECORD"))
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as out:
        for inner, content in files.items():
            out.writestr(zipfile.ZipInfo(inner), content)
    return path
