"""What happens to one gang, drawn from a seed: its shape, its launcher's manners, and events in virtual time."""

from __future__ import annotations

import random
from typing import NamedTuple

from gpurun.jobs.spec import Retry

ATTEMPTS = 3
"""Events happen in the first attempts; a later one is left in peace."""
MOST_RETRIED = 6
"""In so many attempts a rank may fail by itself."""
FOR_GOOD = 1e9
CUT = ("link", "cut", "again", "late")
OUTSIDE = ("cancel", "preempt", "withdraw", "drain")
LAUNCHERS = ("follows", "follows", "follows", "hangs", "forgets", "exits 1", "names another")
WITHOUT_LAUNCHER = 0.1
"""In so many histories of gangs that are not elastic, gpurun itself starts the ranks."""
DRIVER_HANGS = 0.1
"""In so many histories of elastic gangs the driver does not end when all ranks have returned 0."""
CODES = (1, 1, 2, 37, 134, 139)
UNSEEN = 0.2
"""In so many histories a rank fails while no supervisor lives. Its successor hears of all ends at once."""
ADOPTED_BESIDE = 0.1
"""In so many histories a supervisor is killed just after a host was switched off, or became slow for a while."""
DRAINED = 0.05
"""In so many histories a host is drained long before the end of the ranks."""
STEPPED = 0.2
"""In so many histories the head's wall clock is set meanwhile."""
STEPS_S = (1.0, 3600.0, 25 * 3600.0, 3652 * 86400.0)
RETRIED = 0.4
"""In so many histories the job asks for retries."""
SCENES = 0.1
"""In so many histories one of `SCENES_OF` is all that happens: random events meet these situations too seldom."""


class Event(NamedTuple):
    """Something that happens.

    Attributes:
        at_s: seconds after the attempt entered RUNNING.
        place: which host or rank, counted from 0; taken modulo how many there are.
        value: a code, a duration or a way, by kind.
    """

    attempt: int
    at_s: float
    kind: str
    place: int = 0
    value: float = 0.0

    def __str__(self) -> str:
        return f"attempt {self.attempt}, {self.at_s:.2f} s: {self.kind}, place {self.place}, value {self.value:g}"


class Plan(NamedTuple):
    """One history.

    Attributes:
        least: as `gpurun.jobs.spec.JobSpec.min_gpus`.
        has_others: there are hosts outside the gang that can be asked.
        tells: its ranks report; those that an older gpurun started do not.
    """

    seed: int
    hosts: int
    gpus: int
    least: int | None
    launcher: str
    length_s: float
    spread_s: float
    max_restarts: int
    limit_s: float | None
    hang_s: float | None
    has_others: bool
    tells: bool
    events: tuple[Event, ...]
    retry: Retry | None = None

    def __str__(self) -> str:
        shape = f"{self.hosts} hosts with {self.gpus} ranks each"
        elastic = "" if self.least is None else f", elastic from {self.least} GPUs"
        return (
            f"{shape}{elastic}; trains {self.length_s:.1f} s; launcher {self.launcher}; {self.max_restarts} restarts; "
            f"time limit {self.limit_s}; hang timeout {self.hang_s}; "
            f"{'other hosts can be asked' if self.has_others else 'no other hosts'}"
            f"{'' if self.tells else '; ranks tell nothing'}"
            f"{'' if self.retry is None else f'; {self.retry.words}'}"
        )


def draw(seed: int) -> Plan:
    """The history with this number. The same for the same number, in every process."""
    dice = random.Random(seed)
    hosts, gpus = dice.randint(1, 4), dice.randint(1, 2)
    elastic = hosts > 1 and dice.random() < 0.3
    length_s = dice.uniform(10.0, 60.0)
    launcher = dice.choice(("follows", "follows", "exits 1")) if elastic else dice.choice(LAUNCHERS)
    if not elastic and random.Random(f"{seed} direct").random() < WITHOUT_LAUNCHER:
        launcher = "none"
    elif elastic and random.Random(f"{seed} driver").random() < DRIVER_HANGS:
        launcher = "hangs"
    events = [_event(dice, length_s) for _ in range(dice.choice((0, 1, 1, 2, 2, 3, 3, 4, 6)))]
    if dice.random() < DRAINED:
        events.append(Event(1, round(dice.uniform(2.0, length_s / 2), 2), "drain", dice.randrange(1, 8)))
    if dice.random() < UNSEEN:
        at_s = round(dice.uniform(2.0, length_s), 2)
        events = [Event(1, at_s, "kill", 0, 20.0), Event(1, at_s + 0.5, "fail", dice.randrange(8), 1.0), *events[:1]]
    elif dice.random() < ADOPTED_BESIDE:
        events = _beside_an_adoption(dice, round(dice.uniform(0.0, length_s), 2))
    plan = Plan(
        seed, hosts, gpus, dice.randint(1, hosts * gpus) if elastic else None,
        launcher,
        length_s, dice.choice((0.1, 0.4, 3.0, 12.0)), dice.randint(0, 3),
        dice.uniform(5.0, length_s + 10.0) if dice.random() < 0.1 else None, dice.choice((None, None, 20.0)),
        dice.random() < 0.7, elastic or launcher in ("forgets", "none") or dice.random() < 0.95, tuple(sorted(events)),
    )  # fmt: skip
    dice = random.Random(f"{seed} scene")
    plan = dice.choice(SCENES_OF)(dice, plan) if dice.random() < SCENES else plan
    dice = random.Random(f"{seed} retry")
    plan = with_retry(dice, plan) if dice.random() < RETRIED else plan
    dice = random.Random(f"{seed} clock")
    return with_steps(dice, plan) if dice.random() < STEPPED else plan


def with_retry(dice: random.Random, plan: Plan) -> Plan:
    """The same history of a job that asks for retries. In half of them, some rank fails in each attempt."""
    on = dice.choice((("failure", "hang"), ("failure",), ("time_limit",), ("failure", "hang", "time_limit")))
    wait_s = dice.choice((None, 0.0, 30.0, 900.0))
    retry = Retry(dice.randint(0, 4), on, only_with_progress=dice.random() < 0.7, wait_s=wait_s)
    fails = [
        Event(attempt, round(dice.uniform(0.0, plan.length_s), 2), "fail", dice.randrange(8), 1.0)
        for attempt in range(1, MOST_RETRIED + 1)
    ]
    events = (*plan.events, *(fails if dice.random() < 0.5 else ()))
    return plan._replace(retry=retry, events=tuple(sorted(events)))


def with_steps(dice: random.Random, plan: Plan) -> Plan:
    """The same history, on a head whose wall clock is set, once or twice."""
    steps = [
        Event(1, round(dice.uniform(0.0, plan.length_s), 2), "clock", 0, dice.choice((-1, 1)) * dice.choice(STEPS_S))
        for _ in range(dice.randint(1, 2))
    ]
    return plan._replace(events=tuple(sorted((*plan.events, *steps))))


def _off_at_an_adoption(dice: random.Random, plan: Plan) -> Plan:
    """An elastic gang could go on without a host that is switched off, and its supervisor is killed."""
    hosts, at_s = max(2, plan.hosts), dice.uniform(1.0, 15.0)
    events = (
        Event(1, at_s, "power", dice.randrange(1, hosts), FOR_GOOD),
        Event(1, at_s + dice.choice((0.01, 1.0)), "kill", 0, 0.5),
    )
    least = dice.randint(1, (hosts - 1) * plan.gpus)
    return plan._replace(
        hosts=hosts, least=least, launcher="follows", length_s=at_s + 40.0, limit_s=None, tells=True, events=events
    )


def _cut_off_in_turn(dice: random.Random, plan: Plan) -> Plan:
    """A host is out of reach for a moment, then the head: it reaches one host sooner than another when it is back."""
    hosts, at_s, for_s = max(2, plan.hosts), dice.uniform(1.0, 15.0), dice.uniform(12.0, 30.0)
    first = Event(1, at_s, "link", dice.randrange(hosts), dice.uniform(1.0, 8.0))
    events = (first, Event(1, at_s + dice.uniform(0.0, 1.0), "cut", 0, for_s))
    return plan._replace(hosts=hosts, length_s=at_s + for_s + 20.0, limit_s=None, launcher="follows", events=events)


def _launchers_container_ends(dice: random.Random, plan: Plan) -> Plan:
    """Somebody ends the container of the launcher and its ranks."""
    event = Event(1, dice.uniform(0.0, plan.length_s), "container", 0, float(dice.randrange(1, 4)))
    return plan._replace(least=None, limit_s=None, events=(event,))


def _container_ends_at_an_adoption(dice: random.Random, plan: Plan) -> Plan:
    """An elastic gang could go on without a host whose container ends while its supervisor is dead."""
    hosts, at_s = max(2, plan.hosts), dice.uniform(1.0, 15.0)
    events = (
        Event(1, at_s, "kill", 0, dice.choice((0.5, 3.0))),
        Event(1, at_s + 0.1, "container", dice.randrange(1, hosts), float(dice.randrange(1, 4))),
    )
    least = dice.randint(1, (hosts - 1) * plan.gpus)
    return plan._replace(hosts=hosts, least=least, launcher="follows", length_s=60.0, limit_s=None, events=events)


SCENES_OF = (_off_at_an_adoption, _cut_off_in_turn, _launchers_container_ends, _container_ends_at_an_adoption)


def _beside_an_adoption(dice: random.Random, at_s: float) -> list[Event]:
    """A host is off, or slow, or for some seconds out of reach, or slow after that; and the supervisor is killed."""
    place = dice.randrange(8)
    ways = (
        [Event(1, at_s, "power", place, FOR_GOOD)],
        [Event(1, at_s, "slow", place, dice.uniform(4.0, 12.0))],
        [Event(1, at_s, "link", place, dice.uniform(4.0, 8.0))],
        [Event(1, at_s, "link", place, dice.uniform(6.0, 8.0)), Event(1, at_s, "slow", place, dice.uniform(4.0, 5.0))],
    )
    return [*dice.choice(ways), Event(1, at_s + dice.choice((0.01, 1.0)), "kill", 0, 0.5)]


def _event(dice: random.Random, length_s: float) -> Event:
    kind = dice.choice(
        (
            *(
                "fail",
                "fail",
                "fail",
                "fail",
                "signal",
                "script",
                "hang",
                "container",
                "engine",
                "power",
                "link",
                "cut",
                "cut",
            ),
            *("again", "late", "kill", "kill", "kill", "cancel", "preempt", "drain", "fatal", "hint", "oom"),
            *("stop error", "fence error", "copy error"),
        )
    )
    value = {
        "fail": lambda: float(dice.choice(CODES)),
        "signal": lambda: float(dice.choice((137, 143))),
        "container": lambda: float(dice.randrange(4)),
        "engine": lambda: dice.choice((2.0, 8.0, 20.0, FOR_GOOD)),
        "power": lambda: dice.choice((30.0, FOR_GOOD, FOR_GOOD)),
        "link": lambda: dice.choice((2.0, 8.0, 12.0, 20.0, 60.0)),
        "cut": lambda: dice.choice((3.0, 12.0, 20.0, 60.0)),
        "late": lambda: dice.uniform(0.2, 3.0),
        "kill": lambda: dice.choice((0.5, 3.0, 10.0, 40.0)),
        "preempt": lambda: dice.choice((0.1, 1.0, FOR_GOOD)),
        "stop error": lambda: float(dice.randint(1, 3)),
        "fence error": lambda: float(dice.randint(1, 3)),
        "copy error": lambda: float(dice.randint(1, 3)),
    }.get(kind, lambda: 0.0)()
    attempt = dice.choice((1, 1, 1, 1, 2, ATTEMPTS))
    # Faults come in showers: something often happens around the end of the ranks.
    at_s = dice.choice((dice.uniform(0.0, length_s + 8.0), length_s + dice.uniform(-2.0, 8.0), dice.uniform(8.0, 12.0)))
    return Event(attempt, round(max(0.0, at_s), 2), kind, dice.randrange(8), value)
