"""Which copies of outputs are one whole state of the program (docs/decisions/0050-generations-of-outputs.md)."""

from __future__ import annotations

import pytest
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st

from gpurun.node.folder.contents import CHANGING, Listed
from gpurun.supervisor.outputs.keeping import (
    LOG_LOOKS,
    LOG_S,
    REST_S,
    REWRITTEN_S,
    OutputsSeen,
    is_complete,
    same_state,
)
from gpurun.supervisor.outputs.listing import Declared, HostOutputs, Unbrought

MIB = 1 << 20


def file(path, version=0, size=0, inode=1, at_ns=0):
    return Listed(path, "file", 0o644, at_ns or version, size or version, (at_ns or version, inode))


def host(*entries, name="h1", declared=None):
    return HostOutputs(name, {each.path: each for each in entries}, declared=declared)


def looked(*looks, step_s=REST_S, begin=None):
    """The looks at some lists of hosts, one every so many seconds."""
    known = begin or OutputsSeen()
    for hosts in looks:
        known = known.looked(known.at_s + step_s, hosts if isinstance(hosts, tuple) else (hosts,))
    return known


def test_two_looks_that_show_the_same_make_a_copy_whole_after_five_seconds():
    model = host(file("model", 1))
    first = looked(model)
    assert not first.is_whole(first.at_s), "no look has followed the copy"
    assert not looked(model, step_s=REST_S - 0.1, begin=first).is_whole(first.at_s)
    assert looked(model, begin=first).is_whole(first.at_s)


def test_folders_alone_are_no_state_to_begin_with():
    """Before its first checkpoint a program has at most made folders. A restart begins with what came after them."""
    folder = Listed("@workspace", "dir", 0o755, 1, 4096, (1, 1))
    first = looked(host(folder), host(folder))
    assert first.is_at_rest and not looked(host(folder), begin=first).is_whole(first.at_s)
    assert looked(host(folder, file("ckpt", 1)), host(folder, file("ckpt", 1)), begin=first).has_files


def test_a_copy_that_is_made_at_rest_needs_only_another_look():
    rested = looked(host(file("m", 1)), host(file("m", 2)), host(file("m", 2)))
    assert looked(host(file("m", 2)), step_s=0.1, begin=rested).is_whole(rested.at_s)
    assert not looked(host(file("m", 3)), step_s=0.1, begin=rested).is_whole(rested.at_s)


@pytest.mark.parametrize(
    "then",
    [
        (host(file("a", 1)),),
        (host(file("a", 1), file("b", 2)),),
        (host(file("a", 1), file("b", 1), file("c", 1)),),
        (host(file("a", 1), Listed("b", "link", target="x")),),
        (host(file("a", 1), Listed("b", "dir")),),
        (host(file("a", 1), file("b", 1, inode=2)),),
        (host(file("a", 1), file("b", 1)), host(file("a", 1), name="h2")),
        (host(file("a", 1), file("b", 1), name="h2"),),
    ],
)
def test_any_change_on_any_host_begins_the_rest_anew(then):
    before = looked(host(file("a", 1), file("b", 1)))
    assert not looked(then, begin=before).is_whole(before.at_s)


def test_a_folders_times_are_no_change():
    before = looked(host(file("a", 1), Listed("it", "dir", 0o755, 1)))
    assert looked(host(file("a", 1), Listed("it", "dir", 0o700, 2)), begin=before).is_whole(before.at_s)


def test_one_host_that_writes_keeps_the_gangs_copy_from_being_whole():
    rests = host(file("a", 1), name="h1")
    before = looked((rests, host(file("b", 1), name="h2")))
    assert not looked((rests, host(file("b", 2), name="h2")), begin=before).is_whole(before.at_s)


@pytest.mark.parametrize(("declared_ns", "whole"), [(9, False), (10, True), (11, True)])
def test_what_the_program_declares_after_its_last_change_needs_no_rest(declared_ns, whole):
    model = host(file("model", 1, at_ns=10), declared=Declared(7, declared_ns))
    before = looked(model)
    assert looked(model, step_s=0.1, begin=before).is_whole(before.at_s) is whole
    assert before.step == 7


def test_a_host_that_declares_nothing_must_rest():
    one, other = host(file("a", 1, at_ns=1), declared=Declared(7, 2)), host(file("b", 1), name="h2")
    before = looked((one, other))
    assert not looked((one, other), step_s=0.1, begin=before).is_whole(before.at_s)
    assert looked((one, other), begin=before).is_whole(before.at_s)


def logging(count, *others, size=lambda number: 10 + number, step_s=60.0, begin=None, inode=lambda _: 1):
    return looked(
        *(host(file("log", 1 + number, size(number), inode(number)), *others) for number in range(count)),
        step_s=step_s, begin=begin,
    )  # fmt: skip


def test_a_log_is_no_part_and_hides_nothing():
    looks = logging(LOG_LOOKS - 1, file("m", 1))
    assert looks.logs == set() and not looks.is_whole(looks.at_s - 60)
    looks = logging(LOG_LOOKS, file("m", 1))
    assert looks.logs == {("h1", "log")}
    assert looks.is_whole(looks.at_s - 60) and not looks.is_whole(looks.at_s - 120)
    assert not looked(host(file("log", 99, 99), file("m", 2)), begin=looks).is_whole(looks.at_s)


def test_a_file_that_takes_half_a_minute_to_write_is_no_log():
    assert logging(LOG_LOOKS + 1, step_s=5.0).logs == set()


def test_a_log_that_rests_is_a_part_again_and_has_rested_since_the_look_before():
    looks = logging(LOG_LOOKS + 2)
    rested = looked(host(file("log", LOG_LOOKS + 2, 10 + LOG_LOOKS + 1)), step_s=1.0, begin=looks)
    assert rested.logs == set()
    assert not rested.is_whole(looks.at_s) and rested.rested_s == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"size": lambda number: (number % 2 + 1) * MIB},
        {"size": lambda number: (number % 3) * 20 * MIB},
        {"size": lambda _: 2 * MIB},  # each look came between two saves of equal size
    ],
)
def test_a_large_file_that_is_written_anew_is_no_log(options):
    looks = logging(9, **options)
    assert looks.logs == set() and not looks.is_whole(looks.at_s - 60)


def test_one_file_that_a_rename_replaces_is_whole_whenever_it_is_copied():
    """Such a program may never rest, and needs none: its newest copy, not an old one, goes back."""
    before = looked(host(file("m", 1, at_ns=10)))
    renamed = Listed("m", "file", 0o644, 20, 5, (21, 2))
    assert looked(host(renamed), begin=before).is_one_file
    assert not looked(host(renamed), begin=looked(host(renamed), begin=before)).is_one_file, "it may be written since"
    assert not looked(host(renamed, file("b", 1)), begin=before).is_one_file
    assert not looked((host(renamed), host(file("m", 1), name="h2")), begin=before).is_one_file
    assert not looked(host(renamed._replace(mark=(20, 2))), begin=before).is_one_file, "it may be written now"
    assert not looked(host(renamed._replace(mark=(21, 1))), begin=before).is_one_file
    said = host(renamed._replace(mark=(20, 2)), declared=Declared(7, 20))
    assert looked(said, begin=before).is_one_file


def test_a_small_file_that_is_written_anew_is_a_log():
    assert logging(9, size=lambda number: number % 3 + 1, inode=lambda number: number).logs


def test_a_log_that_was_rotated_is_a_log_again_after_a_while():
    looks = logging(9, size=lambda number: (number % 5 + 1) * MIB)
    assert not looks.logs
    minutes = int(REWRITTEN_S / 60) + 1
    assert logging(minutes, size=lambda number: (9 + number) * MIB, begin=looks).logs


def test_what_never_comes_is_no_part_and_what_may_come_is_missing():
    logs = frozenset({("h1", "log")})
    assert is_complete([Unbrought("h1", "pipe", "is a FIFO", is_lost=False), Unbrought("h1", "log", CHANGING)], logs)
    assert not is_complete([Unbrought("h1", "model", CHANGING)], logs)
    assert not is_complete([Unbrought("h2", "log", CHANGING)], logs)
    assert not is_complete([Unbrought("h1", "model", "does not fit", no_room=True)], logs)
    assert not is_complete([Unbrought("h1", "", "did not answer")], logs)


def test_the_same_state_but_for_logs():
    looks = logging(LOG_LOOKS + 1, file("m", 1))
    assert same_state(looked(host(file("log", 1), file("m", 1))), looks)
    assert not same_state(looked(host(file("m", 2))), looks)
    assert not same_state(looked(host(file("m", 1), file("gone", 1))), looks)
    assert not same_state(looked(host(file("m", 1), name="h2")), looks)


PATHS = ("a", "b", "c")
changes = st.lists(st.tuples(st.sampled_from(("h1", "h2")), st.sampled_from(PATHS)), max_size=2)
steps = st.lists(st.tuples(st.sampled_from((0.5, 2.0, 5.0, 60.0)), changes), min_size=2, max_size=40)


@examples("looks at outputs")
@given(steps)
def test_whatever_the_program_does_a_whole_copy_is_a_state_that_lasted(steps):
    """The rule's promise: from a whole copy's look on, no file but logs changed, nor for five seconds."""
    versions = {(name, path): 1 for name in ("h1", "h2") for path in PATHS}
    known, history = OutputsSeen(), []
    for step_s, changed in steps:
        for where in changed:
            versions[where] += 1
        hosts = [host(*(file(path, versions[name, path]) for path in PATHS), name=name) for name in ("h1", "h2")]
        known = known.looked(known.at_s + step_s, hosts)
        history.append((known.at_s, dict(versions)))
        for number, (at_s, then) in enumerate(history[:-1]):
            if not known.is_whole(at_s):
                continue
            since = [was for _, was in history[number:]]
            for where in versions.keys() - known.logs:
                assert {was[where] for was in since} == {then[where]}
            rested = [was for was_s, was in history if known.at_s - was_s <= REST_S]
            first = max((s for s, _ in history if known.at_s - s >= REST_S), default=None)
            assert first is not None
            rested.append(dict(history)[first])
            for where in versions.keys() - known.logs:
                assert len({was[where] for was in rested}) == 1
    for where in known.logs:
        last = list(enumerate(steps))[-LOG_LOOKS:]  # in the first look, each file is new
        assert all(number == 0 or where in changed for number, (_, changed) in last)
        assert known.at_s - known.restless[where].since_s >= LOG_S


def test_hosts_that_have_saved_different_steps_must_rest():
    """The second host's ranks have not begun to write what the first's have saved."""
    hosts = (
        host(file("a", 1, at_ns=10), declared=Declared(7, 11)),
        host(file("b", 1, at_ns=5), name="h2", declared=Declared(6, 6)),
    )
    before = looked(hosts)
    assert not looked(hosts, step_s=0.1, begin=before).is_whole(before.at_s)
    assert looked(hosts, begin=before).is_whole(before.at_s)
