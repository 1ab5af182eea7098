"""How people write times, sizes, rates and moments, and how gpurun writes them: one parser and one spelling each.

times       90s, 15m, 1h30m, 2d ⇄ seconds
sizes       512MiB, 16GiB, 500GB ⇄ bytes
rates       25gbit → bits per second
moments     10m ago, yesterday, 2026-11-27 10:00 → a datetime
counts      1 job, 2 jobs
texts       what each of these parsers refuses first
local_time  seconds since the epoch → 2026-11-27 10:00:00 +01:00; the only module that reads the environment (TZ)

A parser takes a text and returns a number. It raises ValueError with a message that completes "VALUE …": what is wrong,
and what to write instead.
"""
