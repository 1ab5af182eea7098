"""Moments for people, in the head's time zone (the environment's TZ, else the machine's), with the zone's offset."""

from __future__ import annotations

import time
from datetime import datetime, timezone

UNKNOWN = "?"


def now() -> datetime:
    """Return the time now, with the local zone."""
    return datetime.now(timezone.utc).astimezone()


def date_time(when_s: float) -> str:
    """Write seconds since the epoch: ``2026-11-27 10:00:00 +01:00``, with UTC for +00:00."""
    return _written(when_s, "%Y-%m-%d %H:%M:%S", with_zone=True)


def date_minute(when_s: float) -> str:
    """Write seconds since the epoch: ``2026-11-27 10:00 +01:00``."""
    return _written(when_s, "%Y-%m-%d %H:%M", with_zone=True)


def day_minute(when_s: float) -> str:
    """Write seconds since the epoch for a column whose head names the zone (`zone_name`): ``11-27 10:00``."""
    return _written(when_s, "%m-%d %H:%M", with_zone=False)


def of_log(stamp: str) -> str:
    """Write a time of a log (RFC 3339, UTC): ``2026-11-27 10:00:00.123 +01:00``. A damaged one stays as it is."""
    try:
        when = datetime.fromisoformat(stamp[:26] + "+00:00").astimezone()
    except (OverflowError, OSError, ValueError):
        return stamp
    return f"{when.strftime('%Y-%m-%d %H:%M:%S')}.{when.microsecond // 1000:03} {_offset(when)}"


def zone_name() -> str:
    """Return the name of the local zone: ``UTC``, or ``CET/CEST`` where clocks change."""
    return "/".join(dict.fromkeys(time.tzname if time.daylight else time.tzname[:1]))


def _written(when_s: float, form: str, *, with_zone: bool) -> str:
    try:
        when = datetime.fromtimestamp(when_s, timezone.utc).astimezone()
    except (OverflowError, OSError, ValueError):
        return UNKNOWN
    return when.strftime(form) + (f" {_offset(when)}" if with_zone else "")


def _offset(when: datetime) -> str:
    digits = when.strftime("%z")
    return "UTC" if digits in ("+0000", "") else f"{digits[:3]}:{digits[3:5]}"
