"""The agent's code as a zip, and the command line that starts it on a host without leaving a file there."""

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

# Runs as `python3 -ISc`. One line, no single quote, no backslash, no exclamation mark: any login shell passes it on as
# it is. A memory file descriptor holds the zip, so nothing is written to a disk and nothing is left behind.
_START = (
    "import sys,os;"
    'sys.version_info<(3,8) and sys.exit("gpurun needs Python 3.8 or newer, this is "+sys.version.split()[0]);'
    "d=sys.stdin.buffer.read({size});"
    'f=os.memfd_create("gpurun-agent");'
    "os.write(f,d);"
    "del d;"
    'sys.path.insert(0,"/proc/self/fd/"+str(f));'
    "from gpurun.node.agent import main;"
    'main("{nonce}",{silence_limit_s!r},{docker_host},{folder})'
)
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-]+")
"""What every shell passes on as one word, and Python reads as itself between quotes."""


def command(size: int, nonce: str, silence_limit_s: float, target: Target) -> str:
    """The command that the host's login shell is given: reads `size` bytes of zip from stdin and becomes the agent.

    Raises:
        BadInput: the host's Python, Docker or folder cannot be written so that every shell reads it alike.
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
    """Every module of `gpurun.node`, and pynvml if it is installed here.

    Each as source and, compiled, as the ``.pyc`` of this head's Python: a host with the same Python saves the
    compilation, any other ignores it.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
        for name, path in _modules():
            for ending, content in ((".py", path.read_bytes()), (".pyc", _compiled(name, path))):
                # ZipInfo's date is fixed: the zip's bytes depend on its content alone.
                out.writestr(zipfile.ZipInfo(name + ending), content, zipfile.ZIP_DEFLATED, 1)
    return archive.getvalue()


def _modules() -> Iterator[tuple[str, Path]]:
    """(name in the zip without its ending, file) of everything the agent may import."""
    node = Path(gpurun.node.__file__).parent
    yield "gpurun/__init__", node.parent / "__init__.py"
    for path in sorted(node.glob("*.py")):
        yield f"gpurun/node/{path.stem}", path
    pynvml = importlib.util.find_spec("pynvml")
    if pynvml is not None and pynvml.origin is not None:
        yield "pynvml", Path(pynvml.origin)


def _compiled(name: str, path: Path) -> bytes:
    """A hash-based ``.pyc`` that is never checked against its source (PEP 552)."""
    # Through the loader, so that the compilation itself is cached in __pycache__.
    spec = importlib.util.spec_from_file_location(name.replace("/", "."), path)
    assert spec is not None and spec.loader is not None
    code: CodeType = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    unchecked_hash = (1).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + unchecked_hash + bytes(8) + marshal.dumps(code)
