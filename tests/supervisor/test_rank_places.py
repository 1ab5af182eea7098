"""Where a rank is, decided from what hosts say."""

from __future__ import annotations

import pytest

from gpurun.errors import BadInput, HostUnreachable
from gpurun.jobs.spec import Grant
from gpurun.supervisor.ranks import RankPlace, Seating
from gpurun.supervisor.ranks import host_of as host_of_job

GRANTS = (Grant("h1", (0, 1)), Grant("h2", (0, 1)))
STATIC, ELASTIC = Seating(GRANTS), Seating(GRANTS, most=6)
SILENT = {"h3": HostUnreachable("no answer", host="h3")}


def living(host, *ranks, age_s=10.0):
    return [RankPlace(host, rank, None, age_s) for rank in ranks]


def host_of(rank, places, silent, seating=ELASTIC):
    return host_of_job("j-0000000a", rank, places, silent, seating)


def test_a_rank_is_where_its_host_says_whatever_the_grants_order():
    places = [*living("h1", 2, 3), *living("h2", 0, 1)]
    assert [host_of(rank, places, {}) for rank in range(4)] == ["h2", "h2", "h1", "h1"]
    assert host_of(3, places, SILENT) == "h1"


def test_of_several_ranks_of_one_number_the_newest_that_lives_counts():
    places = [*living("h1", 0), *living("h2", 0, age_s=3.0), RankPlace("h3", 0, 1, 1.0)]
    assert host_of(0, places, {}) == "h2"


def test_before_its_ranks_have_reported_a_gang_that_is_not_elastic_has_the_grants_order():
    assert [host_of(rank, [], {}, STATIC) for rank in range(4)] == ["h1", "h1", "h2", "h2"]
    assert host_of(2, [], SILENT, STATIC) == "h2"
    with pytest.raises(BadInput, match="ranks 0 to 3, not 4"):
        host_of(4, [], SILENT, STATIC)


def test_nobody_guesses_where_a_rank_of_an_elastic_gang_is():
    """The driver numbers hosts as they appear: the command would run in another rank's container."""
    with pytest.raises(HostUnreachable, match="no answer"):
        host_of(0, [], SILENT)
    with pytest.raises(BadInput, match="no rank 0 has started"):
        host_of(0, [], {})


def test_a_rank_that_has_ended_is_refused_and_the_living_are_named():
    places = [*living("h1", 0, 1, 2, 5), *living("h2", 4), RankPlace("h2", 3, 137, 1.0), RankPlace("h2", 3, 1, 9.0)]
    with pytest.raises(BadInput, match="rank 3 has ended with code 137 on h2") as caught:
        host_of(3, places, {})
    assert caught.value.hint == "ranks that run now: 0-2,5 on h1; 4 on h2"
    with pytest.raises(BadInput, match="ranks 0 to 5, not 77"):
        host_of(77, places, {})
    with pytest.raises(BadInput) as caught:
        host_of(3, places[-1:], {})
    assert caught.value.hint == "no rank of this job runs now"


def test_a_rank_may_be_on_a_host_that_does_not_answer():
    for places in (living("h1", 0), [*living("h1", 0), RankPlace("h1", 3, 1, 5.0)]):
        with pytest.raises(HostUnreachable, match="no answer"):
            host_of(3, places, SILENT)
