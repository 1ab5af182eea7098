"""What comes back from ranks is plain data, whatever a host writes in its place."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import struct

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.api.job import NoResult, answer_of
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.runtime.gpurun_call import RESULTS, NotPlain, decoded, encoded

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.text(), st.booleans()), inner)
    ),
)


@given(PLAIN)
def test_plain_data_come_back_as_they_were(value):
    assert decoded(json.loads(json.dumps(encoded(value)))) == value


def test_arrays_sets_and_what_is_no_number_come_back():
    value = {"loss": math.inf, "nan": [math.nan], "ids": {1, 2}, "weights": numpy.arange(6.0).reshape(2, 3)}
    found = decoded(json.loads(json.dumps(encoded(value))))
    assert found["loss"] == math.inf and math.isnan(found["nan"][0]) and found["ids"] == {1, 2}
    assert found["weights"].shape == (2, 3) and found["weights"].dtype == float
    assert decoded(encoded(numpy.float32(0.5))) == 0.5


@pytest.mark.parametrize("value", [object(), [1, {"a": (open,)}], numpy.array([object()]), lambda: 1, 1j])
def test_anything_else_is_named(value):
    with pytest.raises(NotPlain, match=r"the result.* is a "):
        encoded(value)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "i.yaml").write_text("version: 1\n")
    made = JobStore(tmp_path / "home").create(JobSpec("n", "i", 2, ("x",)), inventory=tmp_path / "i.yaml", now_s=0.0)
    (made.outputs / RESULTS).mkdir(parents=True)
    return made


def leave(folder, text, rank=0):
    (folder.outputs / RESULTS / f"{rank}.json").write_bytes(text if isinstance(text, bytes) else text.encode())


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/gpurun-bomb",)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", '{"value": {"$pickle": "gASV"}}', '{"value": {"$set": [[1]]}}',
     '{"value": {"$dict": [1]}}', '{"value": {"$bytes": "***"}}', '{"value": {"$array": "AAAA"}}',
     '{"value": {"$float": "1; rm"}}',
     '{"value": {"$tuple": 1}}', '{"value": {"$tuple": [], "x": 1}}', '{"error": {"kind": 1, "text": "", "trace": ""}}',
     '{"error": "x"}', '{"value": ' + "[" * 100_000, b"\xff\xfe", pickle.dumps(Bomb())],
    ids=range(18),
)  # fmt: skip
def test_no_host_can_have_the_head_run_or_break_anything(folder, text):
    leave(folder, text)
    with pytest.raises(NoResult) as caught:
        answer_of(folder, 0)
    assert str(caught.value).startswith(f"{folder.id}: rank 0: the rank's result is damaged")


def test_a_pickled_array_is_not_loaded(folder):
    file = io.BytesIO()
    numpy.save(file, numpy.array([Bomb()], dtype=object), allow_pickle=True)
    leave(folder, json.dumps({"value": {"$array": base64.b64encode(file.getvalue()).decode()}}))
    with pytest.raises(NoResult):
        answer_of(folder, 0)


def numpy_file(header, body=b""):
    text = header.encode() + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body
    return {"$array": base64.b64encode(data).decode()}


def zipped():
    file = io.BytesIO()
    numpy.savez(file, a=numpy.zeros(3))
    return {"$array": base64.b64encode(file.getvalue()).decode()}


def shaped(shape, descr="<f8"):
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape},)}}"


@pytest.mark.parametrize(
    "value",
    [numpy_file(shaped(10**10)), numpy_file(shaped(10**40)), numpy_file(shaped(10**12, "|V0")), zipped(),
     numpy_file(shaped("-1, -8"), b"x" * 64), numpy_file("("*9000), numpy_file("-" * 9000 + "1"),
     numpy_file("{'descr': '<f8', 'shape': (1,) " + "'" * 3), numpy_file(shaped(1, "O"), b"x" * 8),
     {"$set": [n * (2**61 - 1) for n in range(50_000)]}, {"$dict": [[n * (2**61 - 1), 0] for n in range(50_000)]},
     {"$set": [float(n << 70) for n in range(5)] * 9},
     json.loads("[" * 900 + "]" * 900)],
    ids=["larger than memory", "beyond 64 bits", "without bytes", "archive", "negative", "nested", "signs", "unended",
         "objects", "set of one hash", "dictionary of one hash", "a set with repetitions", "deep"],
)  # fmt: skip
def test_no_value_takes_the_heads_memory_or_time(folder, value):
    """Each of these raised something that ended the thread which settles all futures, or held it for minutes."""
    leave(folder, json.dumps({"value": value}))
    with pytest.raises(NoResult, match="the rank's result is damaged"):
        answer_of(folder, 0)


def test_small_texts_of_many_values_are_not_read(folder, monkeypatch):
    """Each ``{}`` of two bytes takes 64 in memory."""
    monkeypatch.setattr("gpurun.api.job.MOST_VALUES", 100)
    leave(folder, json.dumps({"value": [{}] * 101}))
    with pytest.raises(NoResult, match="more than 100 values"):
        answer_of(folder, 0)
    leave(folder, json.dumps({"value": list(range(90))}))
    assert answer_of(folder, 0).value == list(range(90))


def test_a_traceback_is_cut_and_an_error_can_go_to_other_processes(folder):
    leave(folder, json.dumps({"error": {"kind": "K" * 5000, "text": "t", "trace": "x" * (5 << 20)}}))
    error = answer_of(folder, 0).error
    assert len(error.kind) == 200 and len(error.trace) == 1 << 20
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.kind, again.job) == (str(error), 0, error.kind, folder.id)


def test_no_link_leads_to_another_file_and_a_huge_one_is_not_read(folder, tmp_path, monkeypatch):
    (tmp_path / "other").write_text('{"value": "secret"}')
    (folder.outputs / RESULTS / "0.json").symlink_to(tmp_path / "other")
    with pytest.raises(NoResult):
        answer_of(folder, 0)
    monkeypatch.setattr("gpurun.api.job.MOST_BYTES", 10)
    leave(folder, '{"value": "' + "x" * 100 + '"}', rank=1)
    with pytest.raises(NoResult, match="larger than"):
        answer_of(folder, 1)
    assert answer_of(folder, 7) is None


def test_a_remote_traceback_is_text_that_steers_nothing(folder):
    trace = 'Traceback:\n  File "<cell>", line 1\nValueError: \x1b[2J\x07bad'
    leave(folder, json.dumps({"error": {"kind": "ValueError", "text": "\x1b]0;x\x07", "trace": trace}}))
    error = answer_of(folder, 0).error
    assert (error.rank, error.kind) == (0, "ValueError")
    assert "\x1b" not in str(error) and "\x07" not in str(error) and "line 1\nValueError" in str(error)
