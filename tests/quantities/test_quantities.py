"""What people type is read in one way, and what cannot be meant is refused with what to write instead."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun import moments
from gpurun.moments import moment
from gpurun.quantities import MOST_S, count, duration, duration_s, rate_bps, size_bytes, size_mib, size_text

HOSTILE = [
    "",
    " ",
    "x",
    "-",
    ":",
    "inf",
    "nan",
    "infs",
    "1e400",
    "1e4s",
    "-1",
    "-1h",
    "-1GiB",
    "-5gbit",
    "+5m",
    "٣h",
    "３h",
    "5\u2009µs",
    "1" * 10_000,
    "1" * 10_000 + "h",
    "9" * 30 + "d",
    "9" * 30 + "TiB",
    "9" * 30 + "gbit",
    "1h\0",
    "1h\n2",
    "1h;reboot",
    "$(id)",
    "1,5h",
    "0x10s",
    "1_000s",
    "1..5h",
    "1.h",
    ".5h",
    "5 %",
    "[5m]",
    "None",
    "5 apples",
    "🕐",
]
ZONE = timezone(timedelta(hours=1))
NOW = datetime(2026, 11, 27, 10, 0, tzinfo=ZONE)
UTC = timezone.utc


def read(parse, text):
    """The value, or the reason of the refusal."""
    try:
        return parse(text)
    except ValueError as error:
        return str(error)


def wrong(parse, cases):
    """The cases whose value is another, or whose reason does not contain the given words."""
    found = {text: read(parse, text) for text in cases}
    return {
        text: (found[text], meant)
        for text, meant in cases.items()
        if found[text] != meant
        and not (isinstance(meant, str) and isinstance(found[text], str) and meant in found[text])
    }


def test_times():
    cases = {
        "90s": 90,
        "90 s": 90,
        "15m": 900,
        "90 min": 5400,
        "1h30m": 5400,
        "1h 30 min": 5400,
        "1h30": 5400,
        "1 h 30": 5400,
        "1.5h": 5400,
        "2d": 172_800,
        "1d12": 129_600,
        "1d12h": 129_600,
        "1w": 604_800,
        "2 weeks": 1_209_600,
        "1w3": 864_000,
        "30sec": 30,
        "1hr": 3600,
        "2 hours": 7200,
        "1H": 3600,
        "1m30": 90,
        "0.5s": 0.5,
        "3650d": MOST_S,
        "1:30:00": 5400,
        "90:00:00": 324_000,
        "1-12": 129_600,
        "1-12:30": 131_400,
        "1-12:00:00": 129_600,
        "0-00:00:30": 30,
        " 5m ": 300,
        "30": "has no unit; write 30s, 30m, 30h or 30d",
        "0": "must be more than 0",
        "1.5": "has no unit",
        "0s": "must be more than 0",
        "1:30": "could be hours or minutes; write 1h30m or 1m30s",
        "5M": "minutes or months; write 5m",
        "1mo": "no fixed length; write days",
        "2 years": "no fixed length",
        "1h90": "no unit after 90",
        "30s5": "no unit after 5",
        "5 6": "no unit after 6",
        "1m1h": "wrong order",
        "1h1h": "wrong order",
        "1d12.5": "no unit after 12.5",
        "5x": "unknown unit 'x'; the units are s, m, h, d and w",
        "3651d": "more than 3650d",
        "1:60:00": "at most 59 minutes, 59 seconds",
        "1-24:00:00": "after a number of days, 23 hours",
        "-5m": "negative",
        "-1:00:00": "negative",
        "1:2:3:4": "not a time",
        "500ms": "unknown unit 'ms'",
        "": "is empty; write",
        "1" * 41 + "s": "too long",
    }
    assert wrong(duration_s, cases) == {}
    zeros = {"0": 0.0, "0s": 0.0, "0.0": 0.0, "0h": 0.0, "5": "has no unit", "1h30": 5400.0, "-0": "negative"}
    assert wrong(lambda text: duration_s(text, zero=True), zeros) == {}


def test_sizes():
    cases = {
        "512MiB": 512 << 20,
        "16GiB": 16 << 30,
        "16G": 16 << 30,
        "16g": 16 << 30,
        "16Gi": 16 << 30,
        "1t": 1 << 40,
        "500gib": 500 << 30,
        "64KiB": 65_536,
        "64k": 65_536,
        "1 P": 1 << 50,
        "16GB": 16_000_000_000,
        "16 gb": 16_000_000_000,
        "500MB": 500_000_000,
        "4096B": 4096,
        "1.5GiB": 3 << 29,
        "0MiB": 0,
        "1048576TiB": 1 << 60,
        "16": "has no unit; write 16MiB or 16GiB",
        "50%": "is a percentage",
        "16X": "unknown unit 'X'; the units are",
        "16GiBit": "unknown unit",
        "1048577TiB": "more than 1048576TiB",
        "1e3M": "not a size",
        "": "is empty",
    }
    assert wrong(size_bytes, cases) == {}
    assert (
        wrong(size_mib, {"16GiB": 16384, "16GB": 15258, "0G": 0, "64KiB": "less than 1MiB", "0.5M": "less than 1MiB"})
        == {}
    )
    assert [size_text(size) for size in (0, 4096, 3 << 29, 1 << 62)] == ["0 B", "4.0 KiB", "1.5 GiB", "4096.0 PiB"]


def test_rates():
    cases = {
        "10gbit": 10**10,
        "2.5gbit": 2_500_000_000,
        "100mbit": 10**8,
        "8kbit": 8000,
        "25 Gbit/s": 25 * 10**9,
        "25Gb/s": 25 * 10**9,
        "25G": 25 * 10**9,
        "1tbit": 10**12,
        "10gbps": "bits or bytes",
        "10GB/s": "bits or bytes",
        "10gb": "bits or bytes",
        "10": "not a rate; write bits",
        "7kbit": "not between 8kbit",
        "0gbit": "not between",
        "2000tbit": "not between",
        "1gbit; reboot": "not a rate",
    }
    assert wrong(rate_bps, cases) == {}


def test_moments():
    cases = {
        "now": NOW,
        "10m": NOW - timedelta(minutes=10),
        "10 min": NOW - timedelta(minutes=10),
        "10 minutes ago": NOW - timedelta(minutes=10),
        "7d": NOW - timedelta(days=7),
        "1d12": NOW - timedelta(hours=36),
        "1:30:00": datetime(2026, 11, 27, 1, 30),
        "today": datetime(2026, 11, 27),
        "yesterday": datetime(2026, 11, 26),
        "Yesterday 18:30": datetime(2026, 11, 26, 18, 30),
        "08:15": datetime(2026, 11, 27, 8, 15),
        "8:15": datetime(2026, 11, 27, 8, 15),
        "08:15Z": datetime(2026, 11, 27, 8, 15, tzinfo=UTC),
        "2026-11-01": datetime(2026, 11, 1),
        "2026-11-27 10:00": datetime(2026, 11, 27, 10),
        "2026-11-27T10:00:05.25": datetime(2026, 11, 27, 10, 0, 5, 250_000),
        "2026-11-27T10:00:05.123456789Z": datetime(2026, 11, 27, 10, 0, 5, 123_456, tzinfo=UTC),
        "2026-11-27 10:00 UTC": datetime(2026, 11, 27, 10, tzinfo=UTC),
        "2026-11-27 10:00:00 +01:00": NOW,
        "2026-11-27T10:00+0100": NOW,
        "2026-11-27T10:00-05": datetime(2026, 11, 27, 15, tzinfo=UTC),
        "7": "has no unit",
        "1:30:61": "does not exist",
        "25:00": "does not exist",
        "2026-13-01": "does not exist",
        "2026-02-30": "does not exist",
        "2026-11-27 10:00 +99:00": "does not exist",
        "2026-11-27 10:00 CET": "write",
        "1969-12-31": "not between the years 1970 and 2999",
        "9999-12-31": "not between",
        "27.11.2026": "is not a time; write",
        "11/27/2026": "is not a time",
        "tomorrow": "is not a time",
        "10m later": "is not a time",
        "ago": "is not a time",
    }
    found = wrong(lambda text: moment(text, NOW), cases)
    assert found == {}
    just_after_midnight_in_utc = datetime(2026, 11, 27, 0, 30, tzinfo=ZONE)
    assert moment("today Z", just_after_midnight_in_utc) == datetime(2026, 11, 26, tzinfo=UTC)


def test_hostile_text_is_refused_in_words():
    for parse in (duration_s, size_bytes, size_mib, rate_bps, lambda text: moment(text, NOW)):
        for text in HOSTILE:
            answer = read(parse, text)
            assert isinstance(answer, str), (parse, text[:40], answer)
            assert 10 < len(answer) < 200, (text[:40], answer)
            assert re.match(r"(is|has|could|counts) ", answer), (text[:40], answer)


@given(st.one_of(st.text(max_size=50), st.from_regex(r"[0-9.:wdhmsMGTkiB +-]{1,20}", fullmatch=True)))
def test_any_text_is_read_or_refused(text):
    for parse in (duration_s, size_bytes, rate_bps, lambda text: moment(text, NOW)):
        assert read(parse, text) is not None


@given(st.integers(0, int(MOST_S)))
def test_a_written_time_is_read_as_what_it_says(seconds):
    written = duration(seconds)
    back = duration_s(written, zero=True)
    assert back <= seconds < back + {"s": 1, "m": 60, "h": 3600}[written[-1]]


def test_what_gpurun_writes():
    assert [duration(s) for s in (0, 42.9, 187, 18_120, 273_600, -5)] == ["0s", "42s", "3m07s", "5h02m", "3d04h", "0s"]
    assert [duration(s) for s in (0.04, 0.5, 0.99, 1.5)] == ["0s", "0.5s", "0.9s", "1s"]
    assert [duration(s) for s in (float("inf"), float("nan"))] == ["?", "?"]
    assert [count(n, "job") for n in (0, 1, 2)] == ["0 jobs", "1 job", "2 jobs"]
    assert [count(n, "copy", "copies") for n in (1, 2)] == ["1 copy", "2 copies"]


@pytest.mark.parametrize(
    ("zone", "winter", "summer", "name"),
    [
        ("UTC", "2026-11-27 09:00:00 UTC", "2026-07-01 09:00:00 UTC", "UTC"),
        ("CET-1CEST,M3.5.0,M10.5.0/3", "2026-11-27 10:00:00 +01:00", "2026-07-01 11:00:00 +02:00", "CET/CEST"),
        ("JST-9", "2026-11-27 18:00:00 +09:00", "2026-07-01 18:00:00 +09:00", "JST"),
        ("EST5", "2026-11-27 04:00:00 -05:00", "2026-07-01 04:00:00 -05:00", "EST"),
    ],
)
def test_moments_are_written_in_the_local_zone_and_read_back(monkeypatch, zone, winter, summer, name):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for when, text in (
            (datetime(2026, 11, 27, 9, tzinfo=UTC), winter),
            (datetime(2026, 7, 1, 9, tzinfo=UTC), summer),
        ):
            assert moments.date_time(when.timestamp()) == text
            assert moment(text, moments.now()) == when
            assert moments.date_minute(when.timestamp()) == text[:16] + text[19:]
            assert moments.day_minute(when.timestamp()) == text[5:16]
            assert moment(text[:19], moments.now()).timestamp() == when.timestamp()
        assert moments.zone_name() == name
        assert [moments.date_time(s) for s in (float("inf"), float("nan"), 1e400, -1e18)] == ["?"] * 4
    finally:
        monkeypatch.undo()
        time.tzset()
