"""The tables of ``gpurun status``."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpurun.cli.printing import job_json, waited_s
from gpurun.cli.tables import print_status, print_table, print_text, redrawn
from gpurun.cli.why import _line
from gpurun.jobs.record import JobRecord, Restart, State
from gpurun.views.lines import plain, table_lines, width_of
from gpurun.views.picture import FREE, HostCells, WaitingJob, picture_of, shown_for_s

HOST = HostCells("h1", "r1", "pascal", 4, 4, "ok", "ok", (FREE,) * 4)


@pytest.fixture
def shown(capsys):
    """What status prints into a pipe."""

    def show(hosts, records, most_queued=9, foreign=()):
        print_status(picture_of(hosts, records, 100.0, ",".join), foreign, most_queued=most_queued)
        return capsys.readouterr().out.splitlines()

    return show


def record(ident, owner, uid):
    return JobRecord(
        id=ident, name="n", owner=owner, owner_uid=uid, inventory="/i", gpus=1, state=State.QUEUED, submitted_s=1.0,
        queued_s=1.0,
    )  # fmt: skip


HEADS, ROWS = ("trial", "why"), [(("1", "head"), ("best", "head")), ("2", "日本 [/x] :bomb:")]


def test_a_table_that_is_piped_is_not_wrapped(capsys):
    print_table(HEADS, [*ROWS, ("3", "x" * 300)])
    assert capsys.readouterr().out.splitlines() == [
        "trial  why", "1      best", "2      日本 [/x] :bomb:", f"3      {'x' * 300}",
    ]  # fmt: skip


def on_a_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)


@pytest.mark.parametrize("columns", [44, 43])
def test_what_does_not_fit_a_terminal_stands_below_its_row(capsys, monkeypatch, columns):
    """44 columns have room for it."""
    on_a_terminal(monkeypatch, columns)
    wide = "日本 [/x] :bomb:"
    print_table(HEADS, [ROWS[0], ("2", f"{wide} {wide} yes")])
    out = capsys.readouterr().out
    assert "\x1b[1m" in out
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    if columns == 44:
        assert lines == ["trial  why", "1      best", f"2      {wide} {wide} yes"]
    else:
        assert lines == ["trial", "1", "    why best", "2", f"    why {wide} {wide}", "    yes"]


NAMES = ("j-bb749448", "gpu-r1-[01-16],gpu-r2-[03-07]", "日本" * 9, "x" * 70, "a; b", "-")


@pytest.mark.parametrize("columns", [None, 40, 60, 80, 100, 250])
def test_no_name_is_broken_and_no_cell_is_lost_at_any_width(columns):
    heads = ("job", "name", "hosts", "GPU h", "reason")
    rows = [(f"j-bb74944{at}", name, f"{name}!", f"{at}.0", f"why {name} {name}") for at, name in enumerate(NAMES)]
    for figures in (0, 2):
        lines = [plain(line) for line in table_lines(heads, rows, columns, figures=figures)]
        text = "\n".join(lines)
        for cells in rows:
            for word in " ".join(cells).split():
                assert re.search(rf"(?<!\S){re.escape(word)};?(?!\S)", text), (columns, word)
        too_wide = [line for line in lines if columns and width_of(line) > columns and len(line.split()) > 2]
        assert too_wide == []
    assert len(lines) == len(rows) + 1 or columns is not None


def test_figures_are_right_aligned():
    shown = table_lines(("job", "files", "size"), [("j-1", "12", "1.0 GiB"), ("j-22", "3", "0 B")], figures=2)
    assert [plain(line) for line in shown] == ["job   files     size", "j-1      12  1.0 GiB", "j-22      3      0 B"]


@pytest.mark.parametrize("columns", [None, 40])
def test_what_could_steer_the_terminal_is_made_visible_wherever_it_stands(columns):
    bad = "a\x1b[2J\nb"
    lines = [plain(line) for line in table_lines((bad, bad), [(bad, bad * 9), ((bad, "bad"), (bad, "bad"))], columns)]
    assert "\x1b" not in "".join(lines) and "\n" not in "".join(lines) and r"a\x1b[2J\nb" in lines[0]


def test_a_text_is_wrapped_between_words_on_a_terminal_alone(capsys, monkeypatch):
    print_text("failures by host: " + "gpu-r1-01 3, " * 9)
    assert len(capsys.readouterr().out.splitlines()) == 1
    on_a_terminal(monkeypatch, 40)
    print_text("failures by host: " + "gpu-r1-01 3, " * 9)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 40
    assert sum(line.count("gpu-r1-01") for line in lines) == 9


def test_a_picture_that_is_drawn_again_fits_the_terminal_and_counts_what_does_not(capsys, monkeypatch):
    on_a_terminal(monkeypatch, 80)
    monkeypatch.setenv("LINES", "10")
    with redrawn() as draw:
        draw([[(f"line {at}", "")] for at in range(9)])
        draw([[(f"row {at}", "")] for at in range(30)])
    out = capsys.readouterr().out
    assert "line 8" in out and "row 7" in out and "row 8" not in out and "… 22 more lines" in out


def test_jobs_of_several_owners_say_whose_they_are(shown):
    lines = shown([HOST], [record("j-0000000a", "alice", 1), record("j-0000000b", "bo\x1b[2Jb", 2)])
    (header,) = (line.split() for line in lines if line.startswith("job"))
    assert header[:3] == ["job", "owner", "name"]
    assert [line.split()[:2] for line in lines if line.startswith("j-")] == [
        ["j-0000000a", "alice"], ["j-0000000b", "bo\\x1b[2Jb"]
    ]  # fmt: skip


def test_jobs_of_one_owner_do_not(shown):
    assert "owner" not in "".join(shown([HOST], [record("j-0000000a", "alice", 1), record("j-0000000b", "alice", 1)]))


def test_a_long_queue_is_cut_short_and_says_so(shown):
    waiting = [record(f"j-{number:08x}", "alice", 1) for number in range(30)]
    running = record("j-000000ff", "alice", 1).but(state=State.RUNNING)
    lines = shown([HOST], [*waiting, running], most_queued=20)
    rows = [line.split()[0] for line in lines if line.startswith("j-")]
    assert rows == [job.id for job in (*waiting[:20], running)]
    assert "10 more jobs wait; `gpurun queue` lists all waiting jobs in order" in lines


def test_scripts_always_see_the_owner():
    assert job_json(record("j-0000000a", "alice", 1))["owner"] == "alice"


def test_free_gpus_of_hosts_that_get_no_gangs_are_not_counted_as_free(shown):
    hosts = [
        HOST, HOST._replace(name="h2", free=1, state="lost"), HOST._replace(name="h3", state="cordoned")
    ]  # fmt: skip
    assert shown(hosts, [])[-1] == "4 of 12 GPUs free on 3 hosts; 5 more free GPUs are on hosts that get no new jobs"


def test_all_free_says_nothing_of_others(shown):
    assert shown([HOST], [])[-1] == "4 of 4 GPUs free on 1 host"


def test_who_else_holds_gpus_is_named(shown):
    foreign = {"host": "h1", "foreign": [{"gpus": [2], "job": "j-1", "user": "bo\x1b[2Jb", "head": "h", "process": ""}]}
    assert "h1: GPUs 2 belong to j-1 of bo\\x1b[2Jb on h" in shown([HOST], [], foreign=[foreign])
    foreign["foreign"] = [{"gpus": [0, 2], "job": "", "user": "eve", "head": "", "process": "py\x1b of eve (pid 7)"}]
    assert "h1: GPUs 0, 2 are used by py\\x1b of eve (pid 7)" in shown([HOST], [], foreign=[foreign])


def test_a_job_that_is_back_in_the_queue_is_shown_for_as_long_as_it_waits_now():
    again = record("j-0000000a", "alice", 1).but(queued_s=900.0, granted_s=5.0, attempt=1)
    assert waited_s(again, 1020.0) == 120.0
    assert shown_for_s(again, 1020.0) == 120.0
    granted = again.but(state=State.PREPARING, granted_s=1000.0, attempt=2)
    assert waited_s(granted, 1500.0) == 100.0
    ended = again.but(state=State.CANCELLED, ended_s=950.0)
    assert waited_s(ended, 5000.0) == 50.0
    assert waited_s(record("j-0000000b", "a", 1), 61.0) == 60.0
    running = granted.but(state=State.RUNNING, started_s=1010.0)
    assert shown_for_s(running, 1500.0) == 490.0
    assert waited_s(again, 0.0) == 0.0, "the head's clock was set back"


def test_a_restart_that_is_due_waits_for_gpus_and_is_not_said_to_happen_now():
    due = record("j-0000000a", "alice", 1).but(restart=Restart(at_s=100.0, attempt=2, of=4), reason="h1 is gone")
    assert due.story(99.0) == "restarts in 1s (attempt 2 of 4): h1 is gone"
    assert due.story(220.0) == "waits to be restarted (attempt 2 of 4): h1 is gone"


def test_an_expected_start_that_is_over_is_no_start_in_0_s():
    row = WaitingJob("j", "n", "ann", 1, 1, None, 0, "inventory.yaml", 1.0, "m", 50.0)
    assert _line(row, 60.0).endswith("m, expected soon")
    assert _line(row, 40.0).endswith("m, expected in 10s")
    assert _line(replace(row, expected_start_s=None), 40.0).endswith(": m")
