"""What a user knows of machines: kept over processes, and by whatever lies in the place of the file."""

import json
import os
import threading
import time
from dataclasses import replace

import pytest

from gpurun.errors import StateUnavailable
from gpurun.state import hosts as store
from gpurun.state.hosts import Machine, Machines, Out, outs_of

UID = os.getuid()
BROKEN = Out("ssh", "no route to host", 100.0, "check that it is up")


def file(home):
    return home / "machines" / f"{UID}.json"


def test_what_is_noted_is_read_again(tmp_path):
    assert Machines(tmp_path).read(UID) == {}
    look = Machine("h1", 100.0, "a" * 32, BROKEN, "/i.yaml")
    Machines(tmp_path).note({"10.0.0.1:22": look})
    assert Machines(tmp_path).read(UID) == {"10.0.0.1:22": look}
    assert Machines(tmp_path).read(UID + 1) == {}, "another user knows nothing"


def test_a_host_that_stays_out_is_out_since_the_first_look(tmp_path):
    Machines(tmp_path).note({"m": Machine("h1", 100.0, "a" * 32, BROKEN)})
    Machines(tmp_path).note({"m": Machine("h1", 130.0, "", replace(BROKEN, since_s=130.0, reason="refused"))})
    assert Machines(tmp_path).read(UID)["m"] == Machine("h1", 130.0, "a" * 32, replace(BROKEN, reason="refused"))
    Machines(tmp_path).note({"m": Machine("h1", 160.0)})
    assert Machines(tmp_path).read(UID)["m"] == Machine("h1", 160.0, "a" * 32), "green: it is back, and keeps its id"
    Machines(tmp_path).note({"m": Machine("h1", 190.0, "", replace(BROKEN, since_s=190.0))})
    assert Machines(tmp_path).read(UID)["m"].out.since_s == 190.0


def test_how_often_a_host_was_named_slow_is_kept(tmp_path):
    for now_s in (100.0, 200.0):
        Machines(tmp_path).note_slow("m", "h1", "/i.yaml", "rank 2 is slow" + "x" * 9999, now_s=now_s)
    Machines(tmp_path).note({"m": Machine("h1", 300.0, "a" * 32)})
    Machines(tmp_path).note({"m": Machine("h1", 250.0, "a" * 32, begun_s=240.0)})
    known = Machines(tmp_path).read(UID)["m"]
    assert (known.slow_times, known.slow_s, len(known.slow_why), known.seen_s) == (2, 200.0, store.MOST_LETTERS, 300.0)


def test_a_burn_in_counts_passed_checks_in_a_row(tmp_path):
    needed = {"m": 3}
    Machines(tmp_path).note({"m": Machine("h1", 1000.0, out=BROKEN)}, needed)
    seen = [Machines(tmp_path).note({"m": Machine("h1", at_s)}, needed).get("m") for at_s in (1010.0, 1012.0, 1020.0)]
    assert [out.passed for out in seen] == [1, 1, 2]
    assert Machines(tmp_path).note({"m": Machine("h1", 1030.0)}, needed) == {}
    Machines(tmp_path).note({"m": Machine("h1", 2000.0, out=BROKEN)}, needed)
    assert Machines(tmp_path).note({"m": Machine("h1", 2010.0)}, needed)["m"].shown.endswith("(passed 1 of 3 checks)")
    assert Machines(tmp_path).note({"m": Machine("h1", 2020.0)}, {"m": 2}) == {}, "an inventory that now needs fewer"


def test_a_clock_that_was_set_back_lengthens_no_time_out_of_use(tmp_path):
    future_s = time.time() + 1e6
    Machines(tmp_path).note({"m": Machine("h1", future_s, out=replace(BROKEN, since_s=future_s))})
    Machines(tmp_path).note({"m": Machine("h1", 100.0, out=BROKEN)})
    assert Machines(tmp_path).read(UID)["m"].out.since_s == 100.0


def test_an_answer_that_comes_late_replaces_no_newer_one(tmp_path):
    """A pre-flight probe began, the host was mended and looked at, and then the old answer came."""
    Machines(tmp_path).note({"m": Machine("h1", 150.0, begun_s=140.0)})
    late = Machine("h1", 160.0, "a" * 32, BROKEN, memory_mib=64, cores=2, begun_s=100.0)
    Machines(tmp_path).note({"m": late})
    assert Machines(tmp_path).read(UID)["m"] == Machine("h1", 150.0, "a" * 32, None, "", 64, 2, 140.0)
    Machines(tmp_path).note({"m": replace(late, begun_s=141.0)})
    assert Machines(tmp_path).read(UID)["m"].out == BROKEN


def test_a_look_in_the_future_is_the_oldest(tmp_path):
    """The clock was set back: the look at the other address of the machine is newer, and so is every look to come."""
    future_s = time.time() + 3600
    for stamps in ({"seen_s": future_s}, {"seen_s": 5.0, "begun_s": future_s}):
        Machines(tmp_path).note({"a": Machine("h1", id=ONE, out=SICK, inventory="/i", **stamps)})
        Machines(tmp_path).note({"b": Machine("n1", 2.0, ONE, None, "/j")})
        assert outs_of(Machines(tmp_path).read(UID)) == {}
        Machines(tmp_path).note({"a": Machine("h1", 1.0)})
        assert Machines(tmp_path).read(UID)["a"].out is None


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b'{"machines": 1}', b'{"machines": {"m": {"name": 1, "seen_s": 1}}}', b"\xff\xfe",
    b'{"machines": {"m": {"name": "h", "seen_s": 1, "out": "no"}}}', b"[" * 100_000,
])  # fmt: skip
def test_a_damaged_file_tells_nothing_and_the_next_look_replaces_it(tmp_path, content):
    Machines(tmp_path).note({"m": Machine("h1", 100.0)})
    file(tmp_path).write_bytes(content)
    assert Machines(tmp_path).read(UID) == {}
    Machines(tmp_path).note({"n": Machine("h2", 100.0)})
    assert set(Machines(tmp_path).read(UID)) == {"n"}


def test_a_file_that_cannot_be_read_for_a_moment_is_not_replaced(tmp_path, monkeypatch):
    Machines(tmp_path).note({"m": Machine("h1", 100.0)})

    def fails(*_, **__):
        raise StateUnavailable("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(store.durable, "read_signed", fails)
        assert Machines(tmp_path).read(UID) == {}
        with pytest.raises(StateUnavailable):
            Machines(tmp_path).note({"n": Machine("h2", 100.0)})
    assert set(Machines(tmp_path).read(UID)) == {"m"}


@pytest.mark.parametrize("thing", ["folder", "pipe", "link", "hard link", "writable by all"])
def test_what_lies_in_the_place_of_the_file_is_not_believed_and_harms_nobody(tmp_path, thing):
    Machines(tmp_path).note({"m": Machine("h1", 100.0)})
    place, other = file(tmp_path), tmp_path / "other"
    other.write_bytes(place.read_bytes())
    if thing != "writable by all":
        place.unlink()
    make = {
        "folder": place.mkdir,
        "pipe": lambda: os.mkfifo(place),
        "link": lambda: place.symlink_to(other),
        "hard link": lambda: place.hardlink_to(other),
        "writable by all": lambda: place.chmod(0o666),
    }
    make[thing]()
    assert Machines(tmp_path).read(UID) == {}
    assert json.loads(other.read_bytes())["machines"]


@pytest.mark.skipif(UID != 0, reason="only root can give files to others")
@pytest.mark.parametrize("suffix", [".json", ".lock"])
def test_another_user_who_made_the_file_first_keeps_nobody_from_noting(tmp_path, suffix):
    (tmp_path / "machines").mkdir()
    squatted = tmp_path / "machines" / f"{UID}{suffix}"
    squatted.write_text(json.dumps({"machines": {"m": {"name": "h1", "seen_s": 1.0}}}))
    os.chown(squatted, 12345, -1)
    assert Machines(tmp_path).read(UID) == {}
    for second in (1.0, 2.0):
        Machines(tmp_path).note({"n": Machine("h2", second)})
    assert Machines(tmp_path).read(UID) == {"n": Machine("h2", 2.0)}
    assert squatted.stat().st_uid == 12345


@pytest.mark.skipif(UID != 0, reason="only root works in another user's state directory")
def test_root_leaves_the_folder_to_the_user_of_the_state_directory(tmp_path):
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", 12345, 12345)
    Machines(tmp_path / "home").note({"m": Machine("h1", 1.0)})
    assert (tmp_path / "home/machines").stat().st_uid == 12345, "or the user could note nothing"
    assert (tmp_path / "home/machines/0.json").stat().st_uid == 0


def test_long_words_of_a_host_are_cut(tmp_path):
    Machines(tmp_path).note({"m": Machine("h1", 100.0, out=Out("health", "x" * 10**6, 100.0, "y" * 10**6))})
    assert file(tmp_path).stat().st_size < 4 * store.MOST_LETTERS


def test_the_oldest_looks_are_forgotten_first(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST_MACHINES", 3)
    Machines(tmp_path).note({f"m{n}": Machine(f"h{n}", float(n)) for n in range(5)})
    assert set(Machines(tmp_path).read(UID)) == {"m2", "m3", "m4"}


def test_looks_of_many_writers_are_all_kept(tmp_path):
    def write(number):
        for n in range(5):
            Machines(tmp_path).note({f"m{number}.{n}": Machine("h", 1.0)})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Machines(tmp_path).read(UID)) == 20


def test_a_lock_of_this_user_is_held_by_one_process_at_a_time(tmp_path):
    again = Machines(tmp_path).own_lock("looking", patience_s=0.0)
    with (
        Machines(tmp_path).own_lock("looking"),
        Machines(tmp_path).own_lock("lock"),
        pytest.raises(StateUnavailable),
        again,
    ):
        pass
    with Machines(tmp_path).own_lock("looking", patience_s=0.0):
        assert (tmp_path / "machines" / f"{UID}.looking").stat().st_mode & 0o077 == 0


ONE = "a" * 32
SICK = Out("folder", "read-only", 5.0)


@pytest.mark.parametrize(("machines", "outs"), [
    ({"a": Machine("h1", 1.0, ONE, SICK, "/i"), "b": Machine("n1", 2.0, ONE, None, "/j")}, {}),
    ({"a": Machine("h1", 2.0, ONE, SICK, "/i"), "b": Machine("n1", 1.0, ONE, None, "/j")}, {"a": SICK, "b": SICK}),
    ({"a": Machine("h1", 2.0, ONE, BROKEN, "/i"), "b": Machine("n1", 1.0, ONE, None, "/j")}, {"a": BROKEN}),
    ({"a": Machine("h1", 1.0, ONE, BROKEN, "/i"), "b": Machine("n1", 2.0, ONE, None, "/j")}, {"a": BROKEN}),
    ({"a": Machine("h1", 2.0, ONE, SICK, "/i"), "b": Machine("h2", 1.0, ONE, None, "/i")}, {"a": SICK}),
    ({"a": Machine("h1", 2.0, "", SICK, "/i"), "b": Machine("n1", 1.0, "", None, "/j")}, {"a": SICK}),
], ids=["mended", "broken", "cut off", "still cut off", "clones", "unknown"])  # fmt: skip
def test_one_machine_behind_two_addresses_is_out_by_the_newest_look_at_it(machines, outs):
    assert outs_of(machines) == outs
