"""Which ranks a host may speak of."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpurun.errors import BadInput
from gpurun.jobs.spec import Grant, JobSpec, Roles
from gpurun.remote.agent import Reply
from gpurun.remote.fleet import Results
from gpurun.supervisor.ranks import Seating, ask_places, host_of

GRANTS = (Grant("a", (0, 3)), Grant("b", (1,)))
SPEC = JobSpec(name="x", image="i", gpus=3, command=("true",))
ELASTIC = JobSpec(name="x", image="i", gpus=3, min_gpus=1, command=("true",))


@pytest.mark.parametrize(
    ("spec", "host", "mine"),
    [
        (SPEC, "a", [0, 1]), (SPEC, "b", [2]), (SPEC, "c", []), (SPEC, "", []),
        (ELASTIC, "a", [0, 1, 2]), (ELASTIC, "joined", [0, 1, 2]),
    ],
)  # fmt: skip
def test_a_host_speaks_of_the_ranks_that_were_placed_there(spec, host, mine):
    """An elastic launcher numbers hosts again after each change, but never beyond the GPUs that the job asked for."""
    seating = Seating.of(GRANTS, spec)
    assert [rank for rank in range(-2, 1 << 12) if seating.has(host, rank)] == mine
    assert not seating.has(host, 1 << 20)


def test_of_what_a_host_says_by_rank_its_own_part_counts():
    said = {"0": "zero", "1": "one", "2": "two", "0002": "again", "9999999": "far"}
    assert dict(Seating.of(GRANTS, SPEC).own("a", said)) == {0: "zero", 1: "one"}
    assert dict(Seating.of(GRANTS, SPEC).own("b", {"2": "two", "0": "zero"})) == {2: "two"}


def test_a_host_that_claims_all_ranks_gets_nobody_who_enters_another():
    """``gpurun exec --rank 0`` would type into the liar's container."""
    claims = [{"id": f"{rank}.1.1", "rank": rank, "code": None, "age_s": 0.0} for rank in range(8)]
    links = SimpleNamespace(
        open=lambda **_: {},
        each=lambda call: Results(
            {h: call(SimpleNamespace(host=h, call=lambda *_, **__: Reply(claims))) for h in "ab"}, {}
        ),
    )
    places, silent = ask_places(links, "j-0000000a", 1, Seating.of(GRANTS, SPEC))
    seating = Seating.of(GRANTS, SPEC)
    assert [host_of("j-0000000a", rank, places, silent, seating) for rank in range(3)] == ["a", "a", "b"]
    with pytest.raises(BadInput, match="ranks 0 to 2, not 5"):
        host_of("j-0000000a", 5, places, silent, seating)


def test_ranks_without_a_gpu_are_spoken_of_by_the_hosts_on_which_they_were_placed():
    """Workers 0 to 2, then the chief on the first host, and servers from the last host on."""
    roles = Roles(ps=2, chief=True)
    seating = Seating.of(GRANTS, replace(SPEC, roles=roles))
    assert [rank for rank in range(9) if seating.has("a", rank)] == [0, 1, 3, 5]
    assert [rank for rank in range(9) if seating.has("b", rank)] == [2, 4]
    assert [host_of("j-0000000a", rank, [], {}, seating) for rank in range(6)] == ["a", "a", "b", "a", "b", "a"]
    with pytest.raises(BadInput, match="ranks 0 to 5, not 6"):
        host_of("j-0000000a", 6, [], {}, seating)
