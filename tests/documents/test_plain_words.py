"""Documents, help, messages, docstrings and comments use plain words: readers had to read the phrases below twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpurun

TOP = Path(__file__).parents[2]
DOCUMENTS = [TOP / "README.md", TOP / "CONTRIBUTING.md", *TOP.glob("docs/**/*.md"), *TOP.glob("recipes/**/*.md")]
PACKAGE = Path(gpurun.__file__).parent
CODE = sorted(PACKAGE.rglob("*.py"))
PHRASES = {
    r"\bwhat mends\b|\bmends (it|them|one)\b|\bmend (it|one|them)\b": "fix, repair",
    r"\b(goes|go|went|going) on (with|without|to|from|by|there|behind)\b": "continue, resume",
    r"(?<!not )\bgoes on;|jobs go on\b|training goes on|gang goes on": "continue",
    r"\b(gives?|gave|given|giving) way\b": "preempt, stop",
    r"\blets (it|them|one) go\b": "release",
    r"\b(tell|tells|told) of (its|their|it|them|a|an|the|progress|Xid|which)\b": "report",
    r"\b(come|comes|came|brought|bring|brings|coming) home\b": "copy to the head",
    r"\bthe pool that pays\b|\bended after this long\b": "charge the job to this pool; stop the job after this long",
    r"\bis none to\b|\bthat is none has nothing\b": "the noun again",
    r"\bwhat took the rest\b|\banother day\b": "measure it, or leave it out",
    r"\bfor want of (disk|memory|an?) say\b|, say\b(?=[.:]|$)": "for example",
}


def found(text: str) -> list[str]:
    """The phrases in a text, whatever its line breaks."""
    flat = " ".join(text.split())
    return [match.group() for phrase in PHRASES for match in re.finditer(phrase, flat, re.IGNORECASE)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(TOP)))
def test_documents(path):
    assert found(path.read_text()) == []


def test_code():
    assert {str(path): found(path.read_text()) for path in CODE if found(path.read_text())} == {}


@pytest.mark.parametrize(
    "text",
    [
        "What is wrong, and what mends it",
        "a gang\nmust give way",
        "outputs come\nhome",
        "The pool that pays.",
        "it goes on to",
    ],
)
def test_phrases_are_seen(text):
    assert found(text)
