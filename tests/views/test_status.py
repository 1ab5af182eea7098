"""Racks, hosts and jobs as lines: what is alike is folded, nothing needs colour, nothing is cut."""

from __future__ import annotations

import re

import pytest

from gpurun.cli.tables import painted
from gpurun.inventory.folding import fold
from gpurun.inventory.hostset import expand
from gpurun.jobs.record import JobRecord, State
from gpurun.jobs.spec import Grant
from gpurun.quantities import duration
from gpurun.views.lines import job_lines, mark_line, plain, rack_lines, width_of, wrapped
from gpurun.views.picture import FOREIGN, FREE, KEPT, LOST, HostCells, letters, picture_of, racks_of


def host(name, cells, rack="r1", state="ok", generation="pascal"):
    free = sum(cell == FREE for cell in cells)
    return HostCells(name, rack, generation, len(cells), free, state, state, tuple(cells))


def job(number, name="train", state=State.RUNNING, **changes):
    fields = {
        "id": f"j-{number:08x}", "name": name, "owner": "ada", "owner_uid": 1, "inventory": "/i", "gpus": 4,
        "state": state, "submitted_s": float(number), "queued_s": 0.0, **changes,
    }  # fmt: skip
    return JobRecord(**fields)


def racks(picture, columns=None):
    return [plain(line) for line in rack_lines(picture, fold, columns)]


def table(picture, columns=None):
    return [plain(line) for line in job_lines(picture, picture.jobs, columns, duration)]


def test_each_gpu_is_a_letter_of_its_job_and_hosts_that_are_alike_are_one():
    jobs = [job(1), job(2)]
    one, two = jobs[0].id, jobs[1].id
    hosts = [
        host("n1", [one] * 4), host("n2", [one] * 4), host("n3", [two, two, FREE, FREE]), host("n4", [FREE] * 4),
        host("n5", [FREE] * 4, state="cordoned"),
    ]  # fmt: skip
    picture = picture_of(hosts, jobs, 10.0, fold)
    assert racks(picture) == [
        "r1  pascal  5 hosts  6 of 20 GPUs free", "  n[1-2] aaaa", "  n3 bb..", "  n4 ....", "  n5 .... cordoned"
    ]  # fmt: skip
    assert [line.split()[:2] for line in table(picture)[1:]] == [["a", one], ["b", two]]
    assert plain(mark_line(picture)) == ". free"


def test_a_reason_that_the_record_and_the_queue_give_is_shown_once():
    waits = job(1, state=State.QUEUED, reason="its host failed")
    (row,) = picture_of([], [waits], 10.0, fold, {waits.id: "its host failed"}).jobs
    assert row.reason == "its host failed"
    (row,) = picture_of([], [waits], 10.0, fold, {waits.id: "4 GPUs are free"}).jobs
    assert row.reason == "its host failed; 4 GPUs are free"


def test_racks_that_are_alike_are_one_line():
    hosts = [host(f"r{rack}-n{number}", [FREE] * 8, f"r{rack}") for rack in range(3) for number in range(1, 5)]
    hosts.append(host("r3-n1", ["j-1"] * 8, "r3"))
    assert racks(picture_of(hosts, [], 0.0, fold)) == [
        "r[0-2]  pascal  12 hosts  96 of 96 GPUs free", "  r[0-2]-n[1-4] ........",
        "r3  pascal  1 host  0 of 8 GPUs free", "  r3-n1 aaaaaaaa",
    ]  # fmt: skip


def test_a_heading_of_many_racks_fits_a_narrow_terminal():
    hosts = [host(f"r{rack}-n1", [FREE] * 8, f"r{rack}") for rack in range(0, 40, 3)]
    lines = racks(picture_of(hosts, [], 0.0, fold), 60)
    assert max(map(width_of, lines[:2])) <= 60 and lines[1] == "  pascal  14 hosts  112 of 112 GPUs free"


def test_hosts_of_other_generations_or_sizes_are_not_alike():
    hosts = [host("n1", [FREE] * 2), host("n2", [FREE] * 2, generation="volta"), host("n3", [])]
    found = racks_of(hosts)
    assert [group.names for group in found[0].groups] == [("n1",), ("n2",), ("n3",)]
    assert racks(picture_of(hosts, [], 0.0, fold))[-1] == "  n3 no GPUs"


def test_marks_that_no_job_has_are_explained_only_where_they_occur():
    picture = picture_of([host("n1", [LOST, FOREIGN, KEPT])], [], 0.0, fold)
    said = plain(mark_line(picture))
    assert racks(picture)[1] == "  n1 !#+"
    assert "! lost" in said and "# held by another gpurun" in said and "+ kept" in said and ". free" not in said


@pytest.mark.parametrize(
    ("count", "first", "last"), [(1, "a", "a"), (52, "a", "Z"), (53, "a0", "f2"), (520, "a0", "Z9")]
)
def test_every_job_has_a_letter_of_its_own_and_all_are_as_long(count, first, last):
    named = letters([f"j-{number}" for number in range(count)])
    found = list(named.values())
    assert (found[0], found[-1]) == (first, last)
    assert len(set(found)) == count and len({len(each) for each in found}) == 1


def cluster(hosts=1000, jobs=300):
    """Jobs of one to 32 GPUs in a large cluster, packed in order."""
    slots = [(number, gpu) for number in range(hosts) for gpu in range(8)]
    records, held = [], {}
    for number in range(jobs):
        mine, slots = slots[: 1 << number % 6], slots[1 << number % 6 :]
        grants = {}
        for at, gpu in mine:
            held[at, gpu] = f"j-{number:08x}"
            grants.setdefault(f"gpu-r{at // 32}-{at % 32 + 1:02}", []).append(gpu)
        granted = tuple(Grant(name, tuple(gpus)) for name, gpus in grants.items())
        records.append(job(number, f"sweep-{number // 25}", granted=granted, gpus=len(mine)))
    cells = [
        host(f"gpu-r{at // 32}-{at % 32 + 1:02}", [held.get((at, gpu), FREE) for gpu in range(8)], f"r{at // 32}")
        for at in range(hosts)
    ]
    return picture_of(cells, records, 1e6, fold)


def test_names_that_do_not_fold_take_lines_and_none_is_lost():
    names = [f"host{chr(97 + at % 26)}{at}x" for at in range(40)]
    picture = picture_of([host(name, [FREE] * 4) for name in names], [], 0.0, fold)
    lines = racks(picture, 60)
    assert max(map(width_of, lines)) <= 60 and lines[-1].endswith(" ....")
    assert sorted(expand("".join(line.strip() for line in lines[1:]).removesuffix(" ...."))) == sorted(names)


@pytest.mark.parametrize("columns", [100, 60])
def test_a_thousand_hosts_fit_a_terminal(columns):
    picture = cluster()
    lines = racks(picture, columns)
    assert max(map(width_of, [*lines, *table(picture, columns)])) <= columns
    assert len(lines) < (150 if columns == 100 else 260)
    shown = "\n".join(lines)
    assert all(letter in shown for letter in picture.letters.values())
    assert "gpu-r[13-30]-[01-32],gpu-r31-[01-08] . . ." in shown


def test_a_pipe_gets_whole_lines_and_a_narrow_terminal_gets_all_of_them_below_each_other():
    why = "waits for " + "8 more GPUs and " * 12 + "THE-END"
    record = job(1, "a-very-long-name-of-a-job-" * 3, State.QUEUED, reason=why)
    picture = picture_of([host("n1", [FREE])], [record], 10.0, fold)
    assert len(table(picture)) == 2 and table(picture)[1].endswith(why)
    narrow = table(picture, 60)
    assert "`gpurun status j-00000001` shows the whole reason" in narrow[-1] and max(map(width_of, narrow)) <= 60
    short = picture_of([host("n1", [FREE])], [record.but(name="n", reason=why[:150])], 10.0, fold)
    lines = table(short, 60)
    assert max(map(width_of, lines)) <= 60 and "".join(lines[2:]).replace(" ", "") == why[:150].replace(" ", "")


def test_hostile_names_steer_no_terminal():
    hostile = "\x1b[2J\nx\u202e"
    records = [job(1, hostile, owner=hostile), job(2, "训练" * 3, owner="bob", reason=hostile)]
    picture = picture_of([host("n1", ["j-00000001", "j-00000002"])], records, 10.0, fold)
    for columns in (None, 60):
        lines = table(picture, columns)
        assert not {"\x1b", "\n", "\u202e"} & set("".join(lines))
        assert len([line for line in lines if re.search(r"^[ab]  j-", line)]) == 2


def test_wide_letters_count_twice():
    assert width_of("训练") == 4 and width_of("e\u0301") == 1
    assert list(wrapped("aaaa bbbb " + "c" * 12, 8)) == ["aaaa", "bbbb", "cccccccc", "cccc"]


def test_colour_is_added_to_letters_and_takes_nothing_away():
    picture = picture_of([host("n1", ["j-00000001", FREE])], [job(1)], 10.0, fold)
    lines = [*rack_lines(picture, fold, 80), *job_lines(picture, picture.jobs, 80, duration)]
    for line in lines:
        assert re.sub(r"\x1b\[[0-9;]*m", "", painted(line)).rstrip() == plain(line)
    cell = next(painted(line) for line in lines if "n1" in plain(line))
    assert re.search(r"\x1b\[38;5;16;48;5;(\d+)ma\x1b\[0m", cell)
