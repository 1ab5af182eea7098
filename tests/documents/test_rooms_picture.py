"""The picture of rooms shows what imports what: whole, without what follows from other lines, and nothing overlaps."""

from __future__ import annotations

from itertools import combinations, pairwise

import rooms
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def houses(draw):
    """Rows of rooms, and imports that only go down."""
    rows, names = [], iter("abcdefghijklmnop")
    for _ in range(draw(st.integers(1, 5))):
        rows.append([next(names) for _ in range(draw(st.integers(1, 3)))])
    below = {room: [each for lower in rows[at + 1 :] for each in lower] for at, row in enumerate(rows) for room in row}
    some = {
        room: frozenset(draw(st.sets(st.sampled_from(others)))) if others else frozenset()
        for room, others in below.items()
    }
    return rows, some


@examples("houses of a few rooms")
@given(houses())
def test_what_is_left_out_follows_from_the_rest(house):
    _, imports = house
    kept = rooms.without_detours(imports)
    assert all(kept[room] <= imports[room] for room in imports)
    assert all(rooms.reached(kept, room) == rooms.reached(imports, room) for room in imports)


@examples("houses of a few rooms")
@given(houses())
def test_no_room_lies_on_another_room_or_on_a_line_that_passes(house):
    rows, imports = house
    lines = rooms.threads(rows, imports)
    x = rooms.laid_out(rows, lines)
    row_of = {(room,): number for number, row in enumerate(rows) for room in row}
    row_of |= {node: int(node[2]) for node in x if len(node) > 1}
    for one, other in combinations(x, 2):
        if row_of[one] == row_of[other] and 1 in (len(one), len(other)):
            assert abs(x[one] - x[other]) > rooms.BOX_WIDTH / 2
    assert all(row_of[lower] == row_of[upper] + 1 for line in lines for upper, lower in pairwise(line))


def test_rooms_of_gpurun():
    imports = rooms.imports_of(["cli", "jobs", "state", "errors", "node"])
    assert {"jobs", "state", "errors"} <= imports["cli"] and not imports["node"]
    assert rooms.is_shown("state", imports) and not rooms.is_shown("errors", imports)
