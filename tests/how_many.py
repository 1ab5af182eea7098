"""How much is tried at random: a sample for each change, many more with `pytest --hypothesis-profile=long`.

All of these numbers are here. A sample is the same in each run; the long profile draws new ones each time.
"""

from __future__ import annotations

from hypothesis import settings

HOW_MANY: dict[str, tuple[int, int]] = {
    # what a test draws: (for each change, with the long profile)
    "examples": (25, 1000),  # of each Hypothesis test that asks for no other number
    "files of any bytes": (50, 2000),
    "forests of pools": (50, 2000),
    "placements, by brute force": (100, 4000),
    "GPUs of a host, by brute force": (100, 5_000),
    "placements near data": (50, 2000),
    "racks with free GPUs": (40, 1500),
    "inventories with a change": (10, 400),
    "ignore files, read by git": (15, 600),
    "documents of a type": (3, 50),
    "houses of a few rooms": (20, 400),
    "logs that another supervisor continues": (8, 400),
    "fits": (8, 200),
    "fits of wild figures": (3, 60),
    # longer stories: each is a history of many steps
    "traces": (12, 400),
    "streams of gangs": (20, 800),
    "full clusters": (60, 3000),
    "random passes": (100, 5000),
    "random lives of a cluster": (8, 300),
    "long lives of a cluster": (1, 100),
    "histories of a cluster": (20, 600),
    "histories of leases": (5, 600),
    "reconnects over paramiko": (20, 500),
    "reconnects over ssh": (10, 200),
    "races of two passes": (15, 800),
    "looks at outputs": (100, 5000),
    "attempts that meet a fence": (20, 600),
    "histories of a gang": (100, 4000),
    "histories of ownership": (2, 20),
    "shells that start ranks": (3, 4),
    "calls that fail once": (6, 1_000_000),  # of each kind of process
    "power cuts": (8, 200),
    "power cuts of programs that save": (1, 50),
    # damage: what `tests/fuzz` does to files and arguments
    "damaged state files": (30, 1500),
    "foreign names": (15, 600),
    "damaged inventories": (60, 2500),
    "damaged recipes": (80, 4000),
    "damaged caches": (40, 1500),
    "damaged documents": (25, 1000),
    "arguments": (80, 4000),
    "wrong values of an option": (2, 15),
    "state files with something else in their place": (45, 1000),
}


def count(what: str) -> int:
    """Return how many the profile asks for that runs."""
    return HOW_MANY[what][settings.get_current_profile_name() == "long"]


def examples(what: str) -> settings:
    """Return the settings of a Hypothesis test or state machine that tries so many."""
    return settings(max_examples=count(what))
