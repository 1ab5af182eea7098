"""Commands whose standard input is closed, as service managers and `<&-` leave it."""

import sys

import pytest


@pytest.mark.parametrize(("words", "said"), [("init", "says not which hosts"), ("top", "needs a terminal")])
def test_a_closed_input_is_as_none_that_answers(gpurun, tmp_path, monkeypatch, words, said):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of it
    code, out, err = gpurun(words)
    assert (code, out, said in err) == (2, "", True)
