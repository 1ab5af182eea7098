"""What `gpurun top` shows while nothing can be read: the last picture, and why."""

from __future__ import annotations

import pytest

from gpurun.errors import StateError, words_of
from gpurun.jobs.store import JobStore
from gpurun.views.feed import Feed


@pytest.mark.parametrize(
    "error", [StateError("damaged"), OSError("gone"), MemoryError(), RuntimeError("can't start new thread")], ids=repr
)
def test_a_moment_that_cannot_be_read_is_a_message(tmp_path, error):
    def fails():
        raise error

    feed = Feed(JobStore(tmp_path), fails)
    before = feed.latest().picture
    feed.refresh()
    assert feed.latest().picture is before and feed.latest().problems == (words_of(error),)
