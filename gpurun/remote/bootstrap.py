"""The agent's code as a zip, and the command that starts it on a host without a file there."""

from __future__ import annotations

import importlib.util
import io
import marshal
import re
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType

import gpurun.node
from gpurun.errors import BadInput
from gpurun.remote.target import Target

PYTHON = "python3"

# Runs as `python3 -ISc`. One line, without single quotes, backslashes and exclamation marks, so that every login shell
# passes it on unchanged. A memory file descriptor holds the zip, so gpurun writes nothing to a disk.
_START = (
    "import sys,os;"
    'sys.version_info<(3,8) and sys.exit("gpurun needs Python 3.8 or newer, but the host has "+sys.version.split()[0]);'
    "d=sys.stdin.buffer.read({size});"
    'f=os.memfd_create("gpurun-agent");'
    'o=open(f,"wb",closefd=False);o.write(d);o.close();'
    "del d;"
    'sys.path.insert(0,"/proc/self/fd/"+str(f));'
    "from gpurun.node.agent.serve import main;"
    'main("{nonce}",{silence_limit_s!r},{docker_host},{folder})'
)
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-]+")
"""Texts that every shell passes on as one word, and that Python reads unchanged between quotes."""


def command(size: int, nonce: str, silence_limit_s: float, target: Target) -> str:
    """Return the command for the host's login shell. It reads `size` bytes of zip from stdin and becomes the agent.

    Raises:
        BadInput: the host's Python, Docker or folder has characters that shells interpret differently.
    """
    code = _START.format(
        size=size, nonce=nonce, silence_limit_s=silence_limit_s,
        docker_host=_literal(target.docker_host), folder=_literal(target.folder),
    )  # fmt: skip
    return f"exec {_plain(target.python or PYTHON)} -ISc '{code}'"


def _literal(text: str | None) -> str:
    return "None" if text is None else f'"{_plain(text)}"'


def _plain(text: str) -> str:
    if not _PLAIN.fullmatch(text):
        raise BadInput(f"{text!r} cannot be passed to a host's shell", hint="use letters, digits and _ . / : @ + -")
    return text


@lru_cache(maxsize=1)
def agent_zip() -> bytes:
    """Return every module of `gpurun.node`, and pynvml if it is installed on the head.

    The zip has the source and the compiled ``.pyc`` of each module, for the head's version of Python. A host with the
    same version skips the compilation; other hosts ignore the ``.pyc``.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
        for name, path in _modules():
            for ending, content in ((".py", path.read_bytes()), (".pyc", _compiled(name, path))):
                # The date of a ZipInfo is fixed, so the zip's bytes depend only on its content.
                out.writestr(zipfile.ZipInfo(name + ending), content, zipfile.ZIP_DEFLATED, 1)
    return archive.getvalue()


def _modules() -> Iterator[tuple[str, Path]]:
    """Return name (in the zip, without extension) and file of each module that the agent may import."""
    node = Path(gpurun.node.__file__).parent
    yield "gpurun/__init__", node.parent / "__init__.py"
    for path in sorted(node.rglob("*.py")):
        yield path.relative_to(node.parent.parent).with_suffix("").as_posix(), path
    pynvml = importlib.util.find_spec("pynvml")
    if pynvml is not None and pynvml.origin is not None:
        yield "pynvml", Path(pynvml.origin)


def _compiled(name: str, path: Path) -> bytes:
    """Return a hash-based ``.pyc`` that Python never compares with its source (PEP 552)."""
    # The loader caches the compilation in __pycache__.
    spec = importlib.util.spec_from_file_location(name.replace("/", "."), path)
    assert spec is not None and spec.loader is not None
    code: CodeType = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    unchecked_hash = (1).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + unchecked_hash + bytes(8) + marshal.dumps(code)
