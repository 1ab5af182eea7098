"""Which hosts answer the supervisor that asks them."""

from __future__ import annotations

import pytest

from gpurun.supervisor.links import FirstAnswers


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_a_host_is_mute_from_its_first_question_to_its_first_answer(clock):
    answers = FirstAnswers(clock)
    answers.asks("a")
    answers.answered("a")
    clock.now_s = 103.0
    answers.asks("b")
    clock.now_s = 108.0
    answers.asks("b")
    answers.asks("a")
    assert answers.mute_since == {"b": 103.0}
    answers.answered("b")
    assert answers.mute_since == {}
    answers.asks("b")
    assert answers.mute_since == {}, "it was heard once: how long it is silent says the rest"


def test_nobody_is_mute_before_anybody_answers(clock):
    """The head may be cut off."""
    answers = FirstAnswers(clock)
    for host in "abc":
        answers.asks(host)
    clock.now_s = 160.0
    assert answers.mute_since == {}
    answers.answered("b")
    assert answers.mute_since == {"a": 160.0, "c": 160.0}
