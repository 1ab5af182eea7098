"""Run a Python function from the head on every rank, and write its result to the outputs.

Uses only the standard library and ``cloudpickle``, which gpurun sends with this file. The head reads results with
`decoded`. A result is plain data and never a pickle: it comes from a host, and a pickle can run any code when it is
loaded.
"""

import base64
import io
import json
import math
import os
import pickle
import sys
import traceback
from typing import Any, Dict, List

RESULTS = ".gpurun-results"
"""Folder below the outputs, with one file per rank."""
CALL = "call.pickle"
MOST_KIND, MOST_TEXT = 200, 1 << 20
MOST_BYTES = 256 << 20
"""Limit for the result of one rank."""


class NotPlain(TypeError):
    """A value that is not plain data."""


def main() -> int:
    """Call the function. Returns 0 if it returned, 1 if it raised."""
    import gpurun_runtime  # noqa: PLC0415  exists only in the container

    rank = gpurun_runtime.gang().rank
    path = os.path.join(gpurun_runtime.outputs(), RESULTS, "%d.json" % rank)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.exists(path):  # from an earlier attempt
        os.remove(path)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "call.json")) as file:
        told = json.load(file)
    mine = "%d.%d" % sys.version_info[:2]
    if told["python"] != mine:
        text = "the head has Python %s, but the image has Python %s: a function needs the same version in both" % (
            told["python"],
            mine,
        )
        return _failed(path, "PythonMismatch", text, "")
    try:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), CALL), "rb") as file:
            function, args, kwargs = pickle.load(file)  # noqa: S301  from the head, which started this rank
        text = _as_text({"value": encoded(function(*args, **kwargs))})
    except SystemExit as error:
        if error.code in (None, 0):
            text = _as_text({"value": None})
        else:
            raise
    except BaseException as error:  # noqa: BLE001  reported to the head
        traceback.print_exc()
        return _failed(path, type(error).__name__, _words(error), traceback.format_exc())
    _write(path, text)
    return 0


def _failed(path: str, kind: str, text: str, trace: str) -> int:
    sys.stderr.write("" if trace else text + "\n")
    told = {"kind": kind[:MOST_KIND], "text": text[-MOST_TEXT:], "trace": trace[-MOST_TEXT:]}
    _write(path, _as_text({"error": told}))
    return 1


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # noqa: BLE001  the exception class is user code
        return "the exception has no text, because its __str__ raised %s" % type(other).__name__


def _as_text(answer: Dict[str, Any]) -> str:
    text = json.dumps(answer)
    if len(text) > MOST_BYTES:
        raise NotPlain("the result is larger than %d MiB: write it into gpurun_runtime.outputs()" % (MOST_BYTES >> 20))
    return text


def _write(path: str, text: str) -> None:
    with open(path + ".new", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def encoded(value: Any, where: str = "the result") -> Any:
    """Encode plain data for JSON: numbers, text, bytes, None, lists, tuples, sets, dictionaries, and NumPy arrays.

    Raises:
        NotPlain: the value contains other data.
    """
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return _all(value, where)
    if isinstance(value, dict):
        return _dictionary(value, where)
    for kinds, mark, as_json in _MARKED:
        if isinstance(value, kinds):
            return {mark: as_json(value, where)}
    return {"$array": _array(value, where)}


def _all(values: Any, where: str) -> List[Any]:
    return [encoded(each, "%s[%d]" % (where, number)) for number, each in enumerate(values)]


def _dictionary(value: Dict[Any, Any], where: str) -> Dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encoded(each, "%s[%r]" % (where, key)) for key, each in value.items()}
    return {"$dict": [[encoded(key, where), encoded(each, "%s[%r]" % (where, key))] for key, each in value.items()]}


def _base64(value: Any, _where: str = "") -> str:
    return base64.b64encode(value).decode("ascii")


def _array(value: Any, where: str) -> str:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)) or value.dtype.hasobject:
        raise NotPlain(
            "%s is a %s.%s: return plain data or NumPy arrays, or write a file into gpurun_runtime.outputs()"
            % (where, type(value).__module__, type(value).__qualname__)
        )
    file = io.BytesIO()
    numpy.save(file, numpy.asarray(value), allow_pickle=False)
    return _base64(file.getvalue())


_MARKED = (
    ((float,), "$float", lambda value, _where: repr(value)),  # values that JSON lacks
    ((bytes, bytearray), "$bytes", _base64),
    ((tuple,), "$tuple", _all),
    ((set, frozenset), "$set", _all),
)


def decoded(value: Any) -> Any:
    """Decode the output of `encoded`. A NumPy scalar becomes an array without dimensions.

    Raises:
        Exception: the value is not an output of `encoded`. NumPy raises many types.
    """
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decoded(each) for key, each in value.items()}
    ((mark, inner),) = value.items()
    return _UNMARKED[mark](inner)


def _loaded(text: str) -> Any:
    """Return an array. NumPy's own reader allocates as much memory as the header claims, and opens archives."""
    import numpy  # noqa: PLC0415  a user who returns arrays has it

    data = bytearray(base64.b64decode(text, validate=True))
    file = io.BytesIO(data)
    form = numpy.lib.format
    headers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    shape, is_fortran, kind = headers[form.read_magic(file)](file)
    size = kind.itemsize
    for length in shape:
        size *= length
    if kind.hasobject or not kind.itemsize or size != len(data) - file.tell():
        raise ValueError("the size of the array differs from its header")
    return numpy.ndarray(shape, kind, data, file.tell(), order="F" if is_fortran else "C")


def _distinct(keys: List[Any]) -> List[Any]:
    """Check the keys of a set or a dictionary. Many keys with one hash would block the head."""
    if len(set(map(hash, keys))) < len(keys) // 2:
        raise ValueError("most keys of a set or dictionary have the same hash")
    return keys


_UNMARKED = {
    "$float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$tuple": lambda values: tuple(decoded(each) for each in values),
    "$set": lambda values: set(_distinct([decoded(each) for each in values])),
    "$dict": lambda pairs: dict(
        zip(_distinct([decoded(key) for key, _ in pairs]), [decoded(each) for _, each in pairs])
    ),
    "$array": _loaded,
}  # type: Dict[str, Any]


if __name__ == "__main__":
    sys.exit(main())
