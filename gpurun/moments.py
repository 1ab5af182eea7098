"""Moments: ``10m`` ago, ``yesterday``, ``10:00``, ``2026-11-27 10:00``, with a zone or in the head's. Pure."""

from __future__ import annotations

import re
import time
from datetime import date, datetime, timedelta, timezone
from datetime import time as clock_time

from gpurun.quantities import duration_s, stripped

# Moments for people, in the head's time zone (the environment's TZ, else the machine's), with the zone's offset.


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


WHEN = "write how long ago, such as 10m or 7d, or write yesterday, 10:00 or 2026-11-27 10:00"
FIRST_YEAR, LAST_YEAR = 1970, 2999

_ZONE = r"(?: *(Z|UTC|GMT|[+-]\d\d(?::?\d\d)?))?"
_WHEN = re.compile(
    r"(?:(today|yesterday)|(\d{4})-(\d\d?)-(\d\d?))?(?:(?:^|[T ] *)(\d\d?):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?"
    + _ZONE,
    re.ASCII | re.IGNORECASE,
)
_AGO = re.compile(r"(.*?) +ago", re.ASCII | re.IGNORECASE)
_DATE_LIKE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}.*", re.ASCII)


def moment(text: str, now: datetime) -> datetime:
    """Return a moment. Without a zone in the text, a date or clock time returns a naive datetime: it is local time.

    Args:
        now: with the local zone.

    Raises:
        ValueError: with the reason, and what to write.
    """
    text = stripped(text, "a time", WHEN)
    if text.lower() == "now":
        return now
    found = _WHEN.fullmatch(text)
    if found is not None and (found[1] or found[2] or found[5]):
        return _at(found, now)
    if _DATE_LIKE.fullmatch(text) or not text[0].isdigit():
        raise ValueError(f"is not a time; {WHEN}" + (" +01:00 (or UTC)" if text[0].isdigit() else ""))
    ago = _AGO.fullmatch(text)
    return now - timedelta(seconds=duration_s(ago[1] if ago else text))


def _at(found: re.Match[str], now: datetime) -> datetime:
    word, year, month, day, hour, minute, second, part, zone_text = found.groups()
    try:
        zone = _zone(zone_text)
        if year:
            on = date(int(year), int(month), int(day))
        else:
            on = (now.astimezone(zone) if zone else now).date() - timedelta(days=(word or "").lower() == "yesterday")
        clock = clock_time(int(hour or 0), int(minute or 0), int(second or 0), int((part or "")[:6].ljust(6, "0")))
        when = datetime.combine(on, clock, zone)
    except ValueError:
        raise ValueError("is a date or a time that does not exist") from None
    if not FIRST_YEAR <= when.year <= LAST_YEAR:
        raise ValueError(f"is not between the years {FIRST_YEAR} and {LAST_YEAR}")
    return when


def _zone(text: str | None) -> timezone | None:
    if text is None:
        return None
    if text[0] not in "+-":
        return timezone.utc
    digits = text[1:].replace(":", "").ljust(4, "0")
    if int(digits[2:]) > 59:
        raise ValueError
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return timezone(-offset if text[0] == "-" else offset)
