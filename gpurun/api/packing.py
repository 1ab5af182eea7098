"""Pack a function and its arguments into a workdir that any image with the same Python can run."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from gpurun.errors import BadInput
from gpurun.runtime import gpurun_call

COMMAND = ("python3", "-u", "gpurun_call.py")
OWN = ("call.json", gpurun_call.CALL, "gpurun_call.py", "cloudpickle")
"""What a packed call has beside the workdir's files."""
MOST_BYTES = 256 << 20
"""Of a pickled call: larger data belongs into a file system that hosts mount, or into the workdir."""


def pack(
    folder: Path, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], workdir: Path | None
) -> None:
    """Fill an empty folder with files that run `function(*args, **kwargs)`.

    Modules next to the notebook or script are pickled by value, with the function.

    Args:
        workdir: a folder whose files to add, too.

    Raises:
        BadInput: something cannot be pickled or is too large, or cloudpickle is not installed.
    """
    try:
        import cloudpickle  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        raise BadInput(
            "gpurun needs cloudpickle to send a function to hosts, but cloudpickle is not installed",
            hint="install cloudpickle: pip install 'gpurun[python]'",
        ) from error
    with _PACKING, _by_value(cloudpickle):
        try:
            data = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
        except Exception as error:
            name = getattr(function, "__qualname__", type(function).__name__)
            raise BadInput(
                f"gpurun cannot send {name} to hosts: {_what_stays(cloudpickle, function, args, kwargs)}{error}",
                hint="create the named object inside the function",
            ) from error
    if len(data) > MOST_BYTES:
        raise BadInput(
            f"the function and its arguments take {len(data) >> 20} MiB, more than the limit of {MOST_BYTES >> 20} MiB",
            hint="let the function read its data from a mount, the image or the workdir",
        )
    try:
        _fill(folder, data, workdir, Path(cloudpickle.__file__).parent)
    except OSError as error:  # a full disk, or a workdir that cannot be read
        raise BadInput(
            f"gpurun cannot store the function and its arguments: {error.strerror or error}", where=str(folder)
        ) from error


def _fill(folder: Path, data: bytes, workdir: Path | None, cloudpickle: Path) -> None:
    if workdir is not None:
        if taken := [name for name in OWN if os.path.lexists(workdir / name)]:
            raise BadInput(
                f"the folder contains {taken[0]}, but gpurun itself creates a file with this name",
                where=str(workdir),
                hint=f"rename {taken[0]}",
            )
        shutil.copytree(workdir, folder, symlinks=True, dirs_exist_ok=True)
    (folder / gpurun_call.CALL).write_bytes(data)
    (folder / "call.json").write_text(json.dumps({"python": "{}.{}".format(*sys.version_info[:2])}))
    shutil.copyfile(Path(gpurun_call.__file__), folder / "gpurun_call.py")
    shutil.copytree(cloudpickle, folder / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__"))


def _what_stays(cloudpickle: Any, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Name the one variable or argument that cannot be pickled, if there is exactly one."""
    parts: dict[str, Any] = {}
    with suppress(TypeError, ValueError):  # no function, or one with an empty cell
        used = inspect.getclosurevars(function)
        parts = {f"the function's variable {name}": value for name, value in {**used.globals, **used.nonlocals}.items()}
    parts |= {f"argument {number}": value for number, value in enumerate(args)}
    parts |= {f"argument {name}": value for name, value in kwargs.items()}
    for where, value in parts.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001  its class is the user's
            return f"{where}: "
    return ""


_PACKING = threading.Lock()
"""cloudpickle has one list of modules by value for all threads."""


@contextmanager
def _by_value(cloudpickle: Any) -> Iterator[None]:
    """Pickle modules that the image does not have by value, with their content."""
    here = Path.cwd()
    mine = [module for module in list(sys.modules.values()) if _is_own(module, here)]
    known = set(cloudpickle.list_registry_pickle_by_value())
    new = [module for module in mine if module.__name__ not in known]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: object, here: Path) -> bool:
    """Return whether a module is a file below a folder into which no package was installed."""
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not file or module.__name__.partition(".")[0] in ("__main__", "gpurun"):
        return False
    path = Path(file).absolute()
    if not path.is_relative_to(here) or "site-packages" in path.parts:
        return False
    return not any(path.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
