"""Where a rank is, decided from what hosts say."""

from __future__ import annotations

import pytest

from gpurun.errors import BadInput, HostUnreachable
from gpurun.jobs.spec import Grant
from gpurun.leases.lease import Lease
from gpurun.supervisor.rank_places import RankPlace, host_of

GRANTS = (Grant("h1", (0, 1)), Grant("h2", (0, 1)))
LEASE = Lease("j-0000000a", 2, "alice", 1, "pascal", ("r1",), GRANTS, 23000, 1.0, "/i.yaml")
SILENT = {"h3": HostUnreachable("no answer", host="h3")}


def living(host, *ranks, age_s=10.0):
    return [RankPlace(host, rank, None, age_s) for rank in ranks]


def test_a_rank_is_where_its_host_says_whatever_the_grants_order():
    places = [*living("h1", 2, 3), *living("h2", 0, 1)]
    assert [host_of(LEASE, rank, places, {}) for rank in range(4)] == ["h2", "h2", "h1", "h1"]
    assert host_of(LEASE, 3, places, SILENT) == "h1"


def test_of_several_ranks_of_one_number_the_newest_that_lives_counts():
    places = [*living("h1", 0), *living("h2", 0, age_s=3.0), RankPlace("h3", 0, 1, 1.0)]
    assert host_of(LEASE, 0, places, {}) == "h2"


def test_a_job_whose_ranks_report_nothing_has_the_grants_order():
    assert [host_of(LEASE, rank, [], {}) for rank in range(4)] == ["h1", "h1", "h2", "h2"]
    assert host_of(LEASE, 2, [], SILENT) == "h2"
    with pytest.raises(BadInput, match="ranks 0 to 3, not 4"):
        host_of(LEASE, 4, [], {})


def test_a_rank_that_has_ended_is_refused_and_the_living_are_named():
    places = [*living("h1", 0, 1, 2, 5), *living("h2", 4), RankPlace("h2", 3, 137, 1.0), RankPlace("h2", 3, 1, 9.0)]
    with pytest.raises(BadInput, match="rank 3 has ended with code 137 on h2") as caught:
        host_of(LEASE, 3, places, {})
    assert caught.value.hint == "ranks that live: 0-2,5 on h1; 4 on h2"
    with pytest.raises(BadInput, match="no rank 77 has started") as caught:
        host_of(LEASE, 77, places, {})
    assert "0-2,5 on h1" in caught.value.hint
    with pytest.raises(BadInput) as caught:
        host_of(LEASE, 3, places[-1:], {})
    assert caught.value.hint == "no rank of this job lives any more"


def test_a_rank_may_be_on_a_host_that_does_not_answer():
    for places in (living("h1", 0), [*living("h1", 0), RankPlace("h1", 3, 1, 5.0)]):
        with pytest.raises(HostUnreachable, match="no answer"):
            host_of(LEASE, 3, places, SILENT)
