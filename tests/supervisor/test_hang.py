"""The hang watch reads what ranks say of themselves, whatever they say; what is found names a rank."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import HostUnreachable
from gpurun.jobs.spec import Grant
from gpurun.remote.agent import RemoteOpFailed
from gpurun.remote.answers import NotAnAnswer, checked_answer
from gpurun.supervisor import hang
from gpurun.supervisor.ranks import Seating
from gpurun.supervisor.verdict.ends import Reached
from gpurun.supervisor.verdict.hang import Hang, HangSigns, LastCollective, StackFrame, Standing, explain, ranks_text

ODD = [[], None, "7", 7, {}, {"step": None}, {"step": "7"}, {"step": True}, {"step": 1.5}, {"step": []}]
NOTHING = {"stacks": [], "recorder": [], "ras": ""}


class Hosts:
    """The hosts of a gang: what they say of progress, of outputs, and of where their ranks stand."""

    def __init__(self, told, *, written=None, looks=(), failed=None):
        self.told, self.written, self.failed = told, written or {}, failed if failed is not None else {}
        self.looks, self.asked = list(looks), []
        self.notes, self.stuck = [], ""

    def each(self, call, hosts=None):
        agent = SimpleNamespace(call=lambda op, **arguments: SimpleNamespace(value=op))
        op = call(agent)
        self.asked.append(op)
        answers = {
            "gang.progress": lambda: self.told,
            "hang.written": lambda: {host: {"age_s": self.written.get(host)} for host in self.told},
            "hang.look": lambda: self.looks.pop(0) if len(self.looks) > 1 else (self.looks or [{}])[0],
        }[op]()
        if op == self.stuck:
            return SimpleNamespace(ok={}, failed={host: HostUnreachable("no answer", host=host) for host in self.told})
        return SimpleNamespace(ok=dict(answers), failed=dict(self.failed))


def watching(hosts, hang_timeout_s=10.0, grants=(), most=2):
    return SimpleNamespace(
        spec=SimpleNamespace(
            hang_timeout_s=hang_timeout_s, wants=SimpleNamespace(ports_on=lambda grants: 2)
        ),
        links=SimpleNamespace(each=hosts.each, is_open=lambda host: True), hosts=list(hosts.told),
        lease=SimpleNamespace(job="j-00000001", attempt=1, grants=grants, ssh_port=23022),
        record=SimpleNamespace(attempt=1), seating=Seating(grants, None if grants else most),
        note=lambda text, **fields: hosts.notes.append((text, fields)),
    )  # fmt: skip


def said(*ranks, age_s=99.0):
    files = {str(number): {"progress": progress} for number, progress in enumerate(ranks)}
    return {"age_s": age_s, "checkpoint_age_s": None, "ranks": files}


@pytest.fixture
def clock(own_copy):
    now = [1000.0]
    own_copy(hang, "time", monotonic=lambda: now[0])
    return now


def judged(watch, silent_s, **more):
    """Ask until the thread that looks has answered."""
    for _ in range(300):
        found = watch.hung(silent_s, **more)
        thread = watch._look._thread
        if found is not None or thread is None:
            return found
        if not thread.is_alive():
            return watch.hung(silent_s, **more)
        time.sleep(0.01)
    raise AssertionError(threading.enumerate())


@pytest.mark.parametrize("odd", ODD)
def test_odd_progress_neither_saves_nor_breaks_the_verdict(odd, clock):
    watch = hang.HangWatch(watching(Hosts({"a": said({"step": 9}, odd), "b": said({"step": 8})})))
    clock[0] += 60
    assert judged(watch, 60.0) == Hang(
        "no rank has printed, reported progress or written outputs for 10s; rank 0 on b is furthest behind, at step 8"
    )


@pytest.mark.parametrize("odd", ODD)
def test_the_furthest_step_is_that_of_a_rank_that_told_one(odd):
    two = watching(Hosts({"a": said({"step": 9}, odd), "b": said({"step": 8}, odd)}))
    assert hang.furthest(two) == Reached(9, None)
    none = watching(Hosts({"a": said(odd), "b": {"age_s": None, "checkpoint_age_s": None, "ranks": {}}}))
    assert hang.furthest(none) == Reached(None, None)


def test_a_host_does_not_say_how_far_the_ranks_of_others_are():
    hosts = Hosts({"a": said({"step": 9}, {"step": 1000}), "b": said({"step": 0}, {"step": 8})})
    watched = watching(hosts, grants=(Grant("a", (0,)), Grant("b", (3,))))
    assert hang.furthest(watched) == Reached(9, None)
    assert hang._furthest_behind(hosts.told, watched.seating).endswith("rank 1 on b is furthest behind, at step 8")


def test_a_host_that_does_not_answer_is_not_a_silent_one(clock):
    """Its ranks may have printed a second ago."""
    hosts = Hosts({"a": said()}, failed={"b": HostUnreachable("cut", host="b")})
    watch = hang.HangWatch(watching(hosts))
    clock[0] += 60
    assert judged(watch, 60.0) is None
    hosts.failed.clear()
    clock[0] += 9
    assert judged(watch, 69.0) is None, "what was printed meanwhile is on its way"
    clock[0] += 6
    assert "no rank has printed" in judged(watch, 75.0).reason


def test_a_host_out_of_reach_has_its_time_after_it_is_back(clock):
    watch = hang.HangWatch(watching(Hosts({"a": said(), "b": said()})))
    for _ in range(60):
        clock[0] += 1
        assert judged(watch, 60.0, is_heard=False) is None
    clock[0] += 9
    assert judged(watch, 69.0) is None
    clock[0] += 6
    assert judged(watch, 75.0) is not None


def test_a_gang_that_waits_for_the_disk_of_its_outputs_hangs(clock):
    """As the agent that looks for new files there."""
    hosts = Hosts({"a": said(), "b": said()})
    hosts.stuck = "hang.written"
    watch = hang.HangWatch(watching(hosts))
    clock[0] += 60
    assert judged(watch, 60.0) is not None


def test_a_host_that_answers_that_it_cannot_know_saves_no_gang(clock):
    """A rank may have taken away its folder's permissions."""
    watch = hang.HangWatch(watching(Hosts({"a": said()}, failed={"b": RemoteOpFailed("denied", kind="internal")})))
    clock[0] += 60
    assert judged(watch, 60.0) is not None


@pytest.mark.parametrize(
    "life", [{"told": {"a": said(age_s=3.0)}}, {"told": {"a": said(age_s=None)}, "written": {"a": 3.0}}]
)
def test_progress_and_outputs_are_signs_of_life(clock, life):
    hosts = Hosts(**life)
    watch = hang.HangWatch(watching(hosts))
    for _ in range(20):
        clock[0] += 6
        assert judged(watch, 60.0) is None
    assert not hosts.notes and "hang.look" not in hosts.asked


def collective(number, entered, state="scheduled", *, group="default_pg", host="a", name="nccl:all_reduce"):
    done = entered if state == "completed" else entered - 1
    return LastCollective(host, number, group, entered, done, name, state)


def told_collectives(*each):
    keys = ("group", "entered", "done", "name", "state")
    ranks = [{"rank": one.number, "problem": "", "groups": [{key: getattr(one, key) for key in keys}]} for one in each]
    return {"a": {**NOTHING, "recorder": ranks}}


def test_collectives_that_go_on_are_a_sign_of_life(clock):
    """A program that prints nothing and reports nothing for an hour."""
    looks = [told_collectives(collective(0, 100 * n), collective(1, 100 * n)) for n in range(1, 200)]
    hosts = Hosts({"a": said(age_s=None)}, looks=looks)
    watch = hang.HangWatch(watching(hosts))
    for _ in range(100):
        clock[0] += 3
        assert judged(watch, clock[0] - 1000) is None
    hosts.looks = [told_collectives(collective(0, 21), collective(1, 20, "completed"))]
    for _ in range(20):
        clock[0] += 3
        if (found := judged(watch, clock[0] - 1000)) is not None:
            break
    assert found.reason.endswith("rank 1 on a did not come to all_reduce 21, in which the others wait")


def test_a_recorder_that_answers_now_and_then_does_not_save_a_hanging_gang(clock):
    """PyTorch looks at its pipe when its watchdog has time."""
    late, waits = collective(1, 20, "completed"), collective(0, 21)
    looks = [told_collectives(*each) for _ in range(50) for each in ((waits, late), (waits,), (late,))]
    hosts = Hosts({"a": said(age_s=None)}, looks=looks)
    watch = hang.HangWatch(watching(hosts))
    for _ in range(8):
        clock[0] += 2.5
        if (found := judged(watch, clock[0] - 1000)) is not None:
            break
    assert found is not None and clock[0] - 1000 <= 15


def test_the_longer_a_gang_is_silent_the_rarer_it_is_interrupted(clock):
    """A program without collectives that computes for a day, and prints nothing."""
    hosts = Hosts({"a": said(age_s=None)})
    watch = hang.HangWatch(watching(hosts, hang_timeout_s=None))
    while clock[0] < 1000 + 86400:
        clock[0] += 10
        judged(watch, clock[0] - 1000)
    assert 20 < hosts.asked.count("hang.look") < 150


def test_a_person_is_told_while_it_hangs_and_once(clock):
    hosts = Hosts({"a": said(age_s=None)}, looks=[told_collectives(collective(0, 21), collective(1, 20, "completed"))])
    watch = hang.HangWatch(watching(hosts, hang_timeout_s=100.0))
    for _ in range(9):
        clock[0] += 10
        assert judged(watch, clock[0] - 1000) is None
    ((text, fields),) = hosts.notes
    assert text.startswith("no rank has printed, reported progress or written outputs for 50s; rank 1 on a did not")
    assert fields["warning"] == 1 and fields["lines"]
    clock[0] += 10
    assert judged(watch, 100.0).rank is None, "no stack says which process it is"
    assert judged(watch, 1.0) is None
    assert hosts.notes[1][1] == {"over": "hang"}


def test_without_a_limit_only_what_stands_still_and_names_a_rank_is_told(clock):
    still = {"a": {**NOTHING, "stacks": [stack(0, 5, "wait"), stack(1, 5, "wait"), stack(2, 3, "load")]}}
    hosts = Hosts({"a": said(age_s=None)}, looks=[still])
    watch = hang.HangWatch(watching(hosts, hang_timeout_s=None, most=3))
    for _ in range(200):
        clock[0] += 7
        assert judged(watch, clock[0] - 1000) is None
        if hosts.notes:
            break
    assert 600 + hang.AGAIN_S <= clock[0] - 1000 < 700
    moving = [
        {"a": {**NOTHING, "stacks": [stack(0, n, "wait"), stack(1, n, "wait"), stack(2, 3, "f")]}} for n in range(99)
    ]
    hosts = Hosts({"a": said(age_s=None)}, looks=moving)
    watch = hang.HangWatch(watching(hosts, hang_timeout_s=None, most=3))
    clock[0] += 600
    for _ in range(90):
        clock[0] += 7
        assert judged(watch, clock[0]) is None
    assert not hosts.notes


def stack(rank, line, function, *, inner=None, state="S"):
    frames = [["/workspace/train.py", line, function], ["/workspace/train.py", 99, "<module>"]]
    return {"rank": rank, "inner": inner, "pid": 7, "frames": frames, "threads": 1, "state": state}


def test_a_host_is_believed_only_about_ranks_that_run_there():
    seating = Seating((Grant("a", (0,)), Grant("b", (3,))))
    told = {host: {**NOTHING, "stacks": [stack(0, 5, "x"), stack(1, 5, "x")]} for host in ("a", "b")}
    recorder = told_collectives(collective(0, 9), collective(1, 9))["a"]["recorder"]
    told["a"]["recorder"] = recorder
    seen = hang.seen_of(told, seating)
    assert [(each.host, each.rank) for each in seen.standings] == [("a", 0), ("b", 1)]
    assert [(each.host, each.number) for each in seen.collectives] == [("a", 0)]


@pytest.mark.parametrize(
    "odd",
    [
        [], {}, {**NOTHING, "ras": 7}, {**NOTHING, "stacks": [{}]}, {**NOTHING, "stacks": [stack(-1, 5, "x")]},
        {**NOTHING, "stacks": [stack(0, 5, "x" * 301)]}, {**NOTHING, "stacks": [stack(0, 5, "x")] * 257},
        {**NOTHING, "ras": "x" * 70_000}, {**NOTHING, "recorder": [{"rank": 0, "groups": 7, "problem": ""}]},
    ],
)  # fmt: skip
def test_an_answer_of_another_shape_is_refused(odd):
    with pytest.raises(NotAnAnswer):
        checked_answer("hang.look", odd)


# Which rank it is.


def standing(number, *frames, host="a", state="S"):
    made = tuple(StackFrame(*frame) for frame in (*frames, ("/workspace/train.py", 20, "main")))
    return Standing(host, number, number, made, state)


TORCH = ("/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2806, "all_reduce")
LOGGED = ("/usr/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper")
WAITS = (TORCH, LOGGED, ("/workspace/train.py", 13, "train"))
LOADS = (("/usr/lib/python3.11/socket.py", 700, "recv"), ("/workspace/data.py", 7, "load"))


def test_who_stands_outside_of_the_collective_is_waited_for():
    seen = HangSigns(tuple(standing(number, *(LOADS if number == 2 else WAITS)) for number in range(4)))
    found = explain(seen, "silent")
    assert (found.rank, found.host) == (2, "a")
    why = "rank 2 on a did not come to all_reduce, in which the others wait"
    assert found.reason == f"silent; {why}: it is at /workspace/data.py:7 in load"
    assert (
        found.lines[1]
        == "ranks 0-1, 3: /workspace/train.py:13 in train (in all_reduce) < /workspace/train.py:20 in main"
    )


def test_the_recorder_is_believed_before_stacks():
    """The rank that is behind is in a collective, too: of another group."""
    standings = tuple(standing(number, *WAITS) for number in range(4))
    seen = HangSigns(standings, tuple(collective(number, 9 - (number == 1)) for number in range(4)))
    assert explain(seen, "s").reason.startswith(
        "s; rank 1 on a did not come to all_reduce 9, in which the others wait: it"
    )


def test_of_several_groups_the_one_whose_late_rank_does_not_wait_tells():
    """Ranks 0 and 1 share a group, 1 and 2 another: 0 waits for 1, which waits for 2."""
    seen = HangSigns(collectives=(
        collective(0, 5, group="first"), collective(1, 4, "completed", group="first"), collective(1, 8, group="second"),
        collective(2, 7, "completed", group="second"),
    ))  # fmt: skip
    assert "rank 2 on a did not come to all_reduce 8" in explain(seen, "s").reason


RAS = """Errors:

#0-0 MISMATCH
  Communicator ranks have different AllReduce operation counts
  Rank 0 has launched up to operation 21 -- GPU 0 managed by process 443 on node 127.0.0.1
  Rank 1 has launched up to operation 20 -- GPU 0 managed by process 444 on node 127.0.0.1
"""


def test_nccl_names_a_rank():
    found = explain(HangSigns(ras=RAS, standings=(standing(0, *LOADS), standing(1, *LOADS))), "s")
    assert found.reason.startswith("s; rank 1 on a did not come to AllReduce 21, in which the others wait: it is at")
    assert found.evidence.startswith("NCCL RAS: #0-0 MISMATCH / Communicator ranks have different AllReduce operation")


def of_recorder(number, entered, done, *, group="default_pg", host="a"):
    return LastCollective(host, number, group, entered, done, "nccl:all_reduce", "scheduled")


ITEM = (("/workspace/train.py", 320, "train"),)
STEP = (("/workspace/train.py", 290, "train"),)


def test_who_ran_ahead_of_its_gpu_less_far_is_not_waited_for():
    """As in nanoGPT, rank 0 waits for its GPU to print the loss; the others go on to the next step's collectives."""
    ahead = tuple(of_recorder(number, 110 if number == 0 else 120, 100) for number in (0, 1, 3))
    standings = (standing(0, *ITEM), standing(1, *STEP), standing(2, *LOADS), standing(3, *STEP))
    found = explain(HangSigns(standings, (*ahead, of_recorder(2, 100, 100))), "s")
    assert found.reason.startswith("s; rank 2 on a did not come to collective 101, in which the others wait: it is at")
    assert (found.rank, found.host) == (2, "a")


def test_nobody_is_late_for_a_collective_that_all_have_called():
    """A cut network or a broken GPU."""
    ahead = tuple(of_recorder(number, 110 if number == 0 else 120, 100) for number in range(4))
    standings = (standing(0, *ITEM), *(standing(number, *STEP) for number in (1, 2, 3)))
    more = {"ras": RAS.replace("21", "120").replace("20 ", "110 ")}
    assert explain(HangSigns(standings, ahead, **more), "s").reason == "s"
    tensor = tuple(of_recorder(number, 50 + number, 50, group="tp 3") for number in (0, 1))
    assert explain(HangSigns(standings, (*ahead, *tensor)), "s").reason == "s", "it waits in the other group itself"


def test_who_has_not_come_to_the_first_collective_is_waited_for():
    """The recorder knows no group of it."""
    first = tuple(of_recorder(number, 1, 0) for number in range(3))
    found = explain(HangSigns((*(standing(n, *STEP) for n in range(3)), standing(3, *LOADS)), first), "s")
    assert (
        "rank 3 on a did not come to a collective, in which the others wait: it is at /workspace/data" in found.reason
    )


def test_two_programs_of_the_same_numbers_are_not_compared():
    """Each host has a gang of its own: `torchrun --standalone`."""
    two = tuple(of_recorder(number, 100 * (1 + (host == "a")), 99, host=host) for number in (0, 1) for host in "ab")
    assert explain(HangSigns(collectives=two), "s").reason == "s"


RECORD = (
    "/usr/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py",
    355,
    "wrapper",
)
FSDP = ("/usr/lib/python3.11/site-packages/torch/distributed/fsdp/fully_sharded_data_parallel.py", 864, "forward")
SAVES = ("/usr/lib/python3.11/site-packages/torch/distributed/checkpoint/filesystem.py", 200, "_write_item")


@pytest.mark.parametrize("around", [RECORD, FSDP])
def test_what_calls_the_users_code_is_no_collective(around):
    """`@record` of torchrun, and FSDP around a model that does not return."""
    seen = HangSigns(tuple(standing(n, *(LOADS if n == 2 else WAITS), around) for n in range(4)))
    found = explain(seen, "s")
    assert (
        "rank 2 on a did not come to all_reduce, in which the others wait: it is at /workspace/data.py" in found.reason
    )


def test_a_wrapper_made_at_run_time_is_in_the_call_and_an_import_is_none():
    library = "/usr/lib/python3.11/site-packages/horovod/"
    hvd = (("<string>", 59, "horovod_allreduce"), (library + "tensorflow/mpi_ops.py", 130, "_allreduce"))
    assert standing(0, *hvd).call == "_allreduce"
    assert standing(0, (library + "__init__.py", 3, "<module>")).call == ""


def test_a_rank_that_writes_its_part_of_a_checkpoint_waits_for_a_disk():
    save = ("/workspace/train.py", 40, "save")
    seen = HangSigns(tuple(standing(n, SAVES if n == 1 else TORCH, save) for n in range(4)))
    assert explain(seen, "s").rank == 1


def spawned(host, rank, *frames):
    """A child of `torch.multiprocessing.spawn`: its environment is that of its parent, so it has no number."""
    return standing(rank, *frames, host=host)


def test_a_child_without_a_number_of_its_own_is_not_taken_for_another():
    """Rank 1 of `torch.distributed` is on the first host; gpurun's rank 1 is the second host's launcher."""
    standings = tuple(spawned(host, rank, *WAITS) for rank, host in enumerate("ab") for _ in range(4))
    counts = tuple(of_recorder(n, 9 - (n == 1), 8, host="a" if n < 4 else "b") for n in range(8))
    found = explain(HangSigns(standings, counts), "s")
    assert found.reason == "s; rank 1 on a did not come to all_reduce 9, in which the others wait"
    assert (found.rank, found.host) == (None, "a")
    standings = (*(spawned("a", 0, *WAITS) for _ in range(3)), spawned("a", 0, *LOADS))
    assert "it is at /workspace/data.py:7 in load" in explain(HangSigns(standings), "s").reason


MONITOR = (("/usr/lib/python3.11/selectors.py", 468, "select"), ("/workspace/monitor.py", 9, "main"))


def test_a_monitor_beside_a_rank_is_not_the_rank():
    watches = tuple(
        Standing("a", n, n, tuple(StackFrame(*frame) for frame in MONITOR), "S") for n in range(4)
    )  # fmt: skip
    seen = HangSigns((*watches, *(standing(n, *WAITS) for n in range(4))))
    assert explain(seen, "s").reason == "s"
    seen = HangSigns((*watches, *(standing(n, *(LOADS if n == 3 else WAITS)) for n in range(4))))
    assert (
        "rank 3 on a did not come to all_reduce, in which the others wait: it is at /workspace/data"
        in explain(seen, "s").reason
    )


TABLE = """Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         2         1         8         {0}         {1}   RUNNING  MISMATCH

Warnings
========

#0-0 (78db921d1c117b4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
"""
ONE = (
    "  7 ranks have launched up to operation 64\n"
    "  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 16 on node n\n"
)
TWO = (
    "  6 ranks have launched up to operation 64\n  2 ranks have launched up to operation 60\n"
    "  Rank 2 -- GPU 2 managed by process 48 on node n\n  Rank 5 -- GPU 5 managed by process 49 on node n\n"
)
NONE = "  7 ranks have launched up to operation 1\n  Rank 3 has not launched any operations -- GPU 3\n"


@pytest.mark.parametrize(
    ("told", "words"),
    [(ONE, "rank 7 did not come to AllReduce 61,"), (TWO, "ranks 2, 5 did not come to AllReduce 61,"),
     (NONE, "rank 3 did not come to AllReduce 1,")],
)  # fmt: skip
def test_nccl_tells_ranks_with_equal_counts_together(told, words):
    assert words in explain(HangSigns(ras=TABLE.format(8, 8) + told), "s").reason


def test_nccl_numbers_ranks_anew_in_each_communicator():
    """Rank 7 of a part of the gang may be any rank."""
    assert explain(HangSigns(ras=TABLE.format(8, 16) + ONE), "s").reason == "s"
    assert explain(HangSigns(tuple(standing(n, *WAITS) for n in range(16)), ras=ONE), "s").reason == "s"


def test_what_a_host_says_of_its_files_is_printable():
    said = told_collectives(collective(0, 9))["a"] | {"recorder": [{"rank": 0, "groups": [], "problem": "\x1b[2Jx"}]}
    found = explain(hang.seen_of({"a": said}, Seating((Grant("a", (0,)),))), "s")
    assert found.lines and "\x1b" not in found.lines[-1]


def test_a_line_has_an_end():
    many = tuple(LastCollective("a", n, "g", 9, 8, "n", f"{n:0300}") for n in range(256))
    assert all(len(line) <= 2000 for line in explain(HangSigns(collectives=many), "s").lines)


def test_a_rank_that_waits_for_a_disk():
    seen = HangSigns((*(standing(number, *WAITS) for number in range(3)), Standing("b", 3, 3, (), "D")))
    assert (
        "rank 3 on b did not come to all_reduce, in which the others wait: it waits in the kernel"
        in explain(seen, "s").reason
    )


def test_nobody_is_named_if_nothing_tells():
    assert explain(HangSigns(), "s") == Hang("s")
    alike = HangSigns(tuple(standing(number, *LOADS) for number in range(4)))
    assert explain(alike, "s").reason == "s" and explain(alike, "s").rank is None
    halves = HangSigns(tuple(standing(n, ("/w/a.py", n % 2, "f")) for n in range(4)))
    assert explain(halves, "s").rank is None
    all_wait = HangSigns(collectives=tuple(collective(number, 9) for number in range(4)))
    assert explain(all_wait, "s").reason == "s" and "all_reduce 9, scheduled" in explain(all_wait, "s").lines[0]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [({3}, "rank 3"), ({1, 2, 3}, "ranks 1-3"), ({0, 2, 3, 9}, "ranks 0, 2-3, 9"),
     (set(range(0, 40, 2)), "ranks 0, 2, 4, 6 and 16 more groups")],
)  # fmt: skip
def test_ranks_for_people(numbers, text):
    assert ranks_text(numbers) == text


NAMES = st.text(max_size=20)
STANDINGS = st.builds(
    Standing, st.just("a"), st.integers(0, 9), st.integers(0, 9),
    st.lists(st.builds(StackFrame, NAMES | st.just(TORCH[0]), st.integers(0, 99), NAMES), max_size=5).map(tuple),
    st.sampled_from(["S", "D", "R", ""]),
)  # fmt: skip
COLLECTIVES = st.builds(
    LastCollective, st.just("a"), st.integers(0, 9), NAMES, st.integers(0, 99), st.integers(0, 99), NAMES, NAMES
)


@given(
    st.builds(
        HangSigns, st.lists(STANDINGS, max_size=8).map(tuple), st.lists(COLLECTIVES, max_size=8).map(tuple),
        NAMES | st.just(RAS) | st.just(RAS * 3),
    )
)  # fmt: skip
def test_whatever_hosts_find_is_told_in_one_printable_line(seen):
    found = explain(seen, "silent")
    for text in (found.reason, found.evidence, *found.lines):
        assert text.isprintable() or not any(ord(c) < 32 and c != "\t" for c in text), text
    assert found.rank is None or any(each.rank == found.rank for each in seen.standings)
