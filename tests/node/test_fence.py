"""What a fence proves while others are at work: agents of a dead supervisor, Docker, and the job's next attempt."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_stand_in import EngineStandIn
from how_many import count
from waiting import LIMIT_S, until

from gpurun.node.agent import frames
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.job import claims, gang, layer, parts
from gpurun.node.job.gang import NOTE, fence, note_creating

JOB = f"j-{os.getpid():08x}"  # hosts know a job's processes by its name: tests run beside each other
NAME = f"gpurun-{JOB}-1"
CREATE = """
import sys
from gpurun.node.job import gang
from gpurun.node.agent.frames import Call
call = Call(1, lambda *_: None, False, b"")
gang.create(call, %r, 1, {}, %r, None)
"""


def call():
    return Call(1, lambda *_: None, False, b"")


def argv(attempt=1, name=NAME):
    labels = ["--label", f"gpurun.job={JOB}", "--label", f"gpurun.attempt={attempt}"]
    return ["docker", "run", "--detach", "--name", name, *labels, "image"]


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with an engine, on which an attempt was prepared."""
    home = tmp_path / "home's"
    home.mkdir()
    engine = EngineStandIn(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.path}")
    monkeypatch.setenv("PATH", f"{engine.bin}:{os.environ['PATH']}")
    monkeypatch.setattr(gang, "_make_key", lambda *_: "ssh-ed25519 AAAA")
    monkeypatch.setattr(gang, "_tool", lambda name: f"/usr/bin/{name}")
    yield SimpleNamespace(engine=engine, folder=Path(parts.job_folder(JOB)))
    engine.may_finish.set()
    engine.shutdown()
    engine.server_close()


def prepare(attempt):
    gang.prepare(call(), JOB, attempt, "", True, True)


def fenced(attempt=1, **options):
    return fence(call(), JOB, attempt, timeout_s=options.pop("timeout_s", LIMIT_S), **options)


class Fencing:
    """A fence in a thread of its own."""

    def __init__(self, **options):
        self.rest = None
        self._thread = threading.Thread(target=self._fence, kwargs=options)
        self._thread.start()

    def _fence(self, **options):
        self.rest = fenced(**options)

    def end(self):
        self._thread.join(LIMIT_S)
        assert self.rest is not None
        return self.rest


def files_left(host):
    return sorted(os.listdir(host.folder.parent))


# -- a container that Docker is still creating --------------------------------------------------------


def test_a_container_that_docker_still_creates_for_a_client_that_died_is_no_rest_of_a_fenced_job(host):
    prepare(1)
    host.engine.slow = NAME
    note_creating(JOB, 1, NAME)
    labels = {"gpurun.job": JOB, "gpurun.attempt": "1"}
    docker = threading.Thread(target=host.engine.make, args=(NAME, labels))
    docker.start()
    assert host.engine.began.wait(LIMIT_S)
    rest = fenced(timeout_s=0.5)
    assert rest["containers"] == [NAME] and host.folder.exists()
    fencing = Fencing()
    host.engine.may_finish.set()
    assert not any(fencing.end().values())
    docker.join(LIMIT_S)
    assert host.engine.containers == {} and files_left(host) == []


def test_a_fence_waits_for_what_an_agent_that_was_killed_had_docker_create(host):
    """The docker command outlives the agent."""
    prepare(1)
    host.engine.slow = NAME
    agent = subprocess.Popen([sys.executable, "-c", CREATE % (JOB, argv())])
    assert host.engine.began.wait(LIMIT_S)
    agent.kill()
    agent.wait()
    fencing = Fencing()
    time.sleep(0.3)
    assert fencing.rest is None
    host.engine.may_finish.set()
    assert not any(fencing.end().values())
    assert host.engine.containers == {} and files_left(host) == []


def test_a_docker_command_that_is_killed_with_its_agent_is_missed_by_nobody(host):
    prepare(1)
    host.engine.slow = NAME
    agent = subprocess.Popen([sys.executable, "-c", CREATE % (JOB, argv())], start_new_session=True)
    assert host.engine.began.wait(LIMIT_S)
    os.killpg(agent.pid, 9)
    agent.wait()
    assert fenced(timeout_s=0.5)["containers"] == [NAME]
    host.engine.may_finish.set()
    assert not any(fenced().values())
    assert host.engine.containers == {} and files_left(host) == []


def test_a_container_that_was_never_begun_keeps_no_fence_waiting(host):
    prepare(1)
    note_creating(JOB, 1, NAME)
    assert not any(fenced().values())
    assert host.engine.containers == {} and files_left(host) == []


@pytest.mark.parametrize("cause", ["no image", "full disk"])
def test_what_kept_docker_from_creating_a_container_keeps_no_host_from_its_proof(host, cause):
    prepare(1)
    host.engine.is_full, host.engine.images = True, [] if cause == "no image" else ["sha256:1"]
    with pytest.raises(OpError, match="no space left"):
        gang.create(call(), JOB, 1, {}, argv(), None)
    assert not any(fenced().values())
    assert files_left(host) == []


@pytest.mark.parametrize("note", [b"", b"[]", b'{"attempt": 1, "name": "../x"}', b'{"attempt": "x"}', b"\xff\0", b"{"])
def test_a_damaged_note_keeps_no_fence_waiting(host, note):
    prepare(1)
    (host.folder / NOTE).write_bytes(note)
    assert not any(fenced().values())
    assert files_left(host) == []


def test_a_container_that_was_created_leaves_no_note(host):
    prepare(1)
    made = gang.create(call(), JOB, 1, {}, argv(), None)
    assert made["container"] in host.engine.containers
    assert not (host.folder / NOTE).exists()


def test_an_agent_that_was_cut_off_creates_nothing_after_the_fence(host):
    prepare(1)
    assert not any(fenced().values())
    claim = {"claimant": {"job": JOB, "attempt": 1, "state": "0" * 8}, "cards": [[0, ""]]}
    with pytest.raises(OpError) as refused:
        gang.create(call(), JOB, 1, {"secrets/token": ["s", 0o400]}, argv(), None, claim)
    assert refused.value.kind == "fenced"
    assert host.engine.containers == {} and files_left(host) == []


def test_no_value_of_a_variable_is_in_the_process_list_while_docker_creates_a_container(host):
    """Everybody on a host reads a process's arguments; its environment only its own account does."""
    prepare(1)
    values = {
        "WANDB_API_KEY": "s3cr3t",
        "GOOGLE_API_KEY": "s3cr3t",
        "WORDS": "it's\n two=lines \u00e9",
        "EMPTY": "",
        "GPURUN_JOB": JOB,
    }
    own = {"PATH": "/opt/conda/bin", "DOCKER_HOST": "tcp://elsewhere", "LD_LIBRARY_PATH": "/x", "HOME": "/tmp"}
    given = [word for name, value in {**values, **own}.items() for word in ("--env", f"{name}={value}")]
    run = [*argv()[:-1], *given, "--entrypoint", "/bin/sh", "image", "train.sh", "--env", "STAGE=s3cr3t-of-nobody"]
    gang.create(call(), JOB, 1, {}, run, None)
    (asked,) = host.engine.asked
    assert asked["Env"][:-1] == [f"{name}={value}" for name, value in {**values, **own}.items()]
    words = asked["argv"]
    assert words[words.index("--entrypoint") :] == run[run.index("--entrypoint") :], "the job's own words"
    assert not any("s3cr3t" in word or "two=lines" in word for word in words[: words.index("--entrypoint")])


# -- the job's next attempt ---------------------------------------------------------------------------


@pytest.fixture
def process():
    """Start what looks like the job's own sshd."""
    started = []

    def start(folder):
        words = ["sshd", "-c", "import time; time.sleep(600)", f"{folder}/sshd/config"]
        started.append(subprocess.Popen(words, executable=sys.executable))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def test_the_fence_of_an_attempt_leaves_a_later_one_alone(host, process):
    prepare(1)
    gang.create(call(), JOB, 1, {}, argv(), None)
    prepare(2)
    later = gang.create(call(), JOB, 2, {"it's a\nfile": ["x", 0o600]}, argv(2, f"gpurun-{JOB}-2"), None)["container"]
    checkpoint = Path(parts.outputs_folder(JOB)) / "checkpoint"
    checkpoint.touch()
    sshd = process(host.folder)
    assert not any(fenced(1, outputs=True).values()), "it has nothing there any more"
    assert list(host.engine.containers) == [later]
    assert (host.folder / "it's a\nfile").exists() and checkpoint.exists() and sshd.poll() is None
    layer.remove_outputs(call(), JOB, 1)
    assert checkpoint.exists()
    assert not any(fenced(2, outputs=True).values())
    assert host.engine.containers == {} and files_left(host) == [] and not checkpoint.exists()
    until(lambda: sshd.poll() is not None)


def test_a_container_of_an_image_that_was_made_of_a_jobs_container_belongs_to_nobody(host):
    """`docker commit` copies a container's labels into the image, and from there into whatever somebody starts."""
    prepare(1)
    labels = {"gpurun.job": JOB, "gpurun.attempt": "1", "gpurun.gpus": "0,1"}
    host.engine.image_labels = {"sha256:2": labels, "sha256:3": {"gpurun.job": "j-00000000"}, "sha256:4": None}
    (mine, *jobs) = [host.engine.run(labels) for _ in range(4)]
    for ident, image in zip((mine, *jobs), host.engine.image_labels, strict=False):
        host.engine.containers[ident]["ImageID"] = image
    gang.create(call(), JOB, 1, {}, argv(), None)
    assert len(claims.DockerStore(call()).look().containers) == 4
    assert not any(fenced().values())
    assert list(host.engine.containers) == [mine]
    assert claims.DockerStore(call()).look().containers == ()


def test_the_fence_of_an_attempt_ends_those_before_it_too(host):
    prepare(1)
    gang.create(call(), JOB, 1, {}, argv(), None)
    for attempt in ("", "x", "-1", "9" * 30):
        host.engine.make(f"odd-{attempt}", {"gpurun.job": JOB, "gpurun.attempt": attempt})
    assert not any(fenced(2).values())
    assert host.engine.containers == {} and files_left(host) == []


@pytest.mark.parametrize("text", [b"", b"\0\0", b"-1", b"9" * 5000, "²".encode(), b"1 2"])
def test_a_folder_whose_attempt_is_damaged_belongs_to_none(host, text):
    prepare(1)
    (host.folder / parts.ATTEMPT_FILE).write_bytes(text)
    assert parts.owner(JOB) == 0
    prepare(7)
    assert parts.owner(JOB) == 7


def test_an_earlier_attempt_never_takes_the_folder_back(host):
    prepare(2)
    prepare(1)
    assert parts.owner(JOB) == 2


def test_a_later_attempt_that_comes_while_the_fence_is_at_work_loses_nothing(host):
    """The two meet at every moment: the folder is whole and the later attempt's, or the fence never saw it."""
    rounds = count("attempts that meet a fence")
    for round_ in range(rounds):
        prepare(1)
        for number in range(20):
            (host.folder / "run" / f"{number}").touch()
        fencing = Fencing()
        time.sleep(0.03 * round_ / rounds)
        prepare(2)
        assert not any(fencing.end().values())
        assert parts.owner(JOB) == 2
        assert {"attempt", "launch", "run", "sshd"} <= set(os.listdir(host.folder))
        assert not any(fenced(2).values())
    assert files_left(host) == []


# -- the lock -----------------------------------------------------------------------------------------


def test_one_holds_the_lock_at_a_time_and_its_file_goes_with_it(host):
    inside, most = [0], [0]

    def work():
        for _ in range(50):
            with parts.hold_job(call(), JOB):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LIMIT_S)
    assert most == [1] and files_left(host) == []


def test_whoever_is_cancelled_waits_no_longer(host):
    waiting = call()
    with parts.hold_job(call(), JOB):
        threading.Timer(0.1, waiting.cancel).start()
        with pytest.raises(OpError, match="cancelled"), parts.hold_job(waiting, JOB):
            pass


@pytest.mark.parametrize("plant", [Path.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_something_else_in_the_place_of_the_lock_keeps_no_fence_from_its_proof(host, plant):
    prepare(1)
    plant(Path(parts.lock_file(JOB)))
    assert not any(fenced().values())
    assert not host.folder.exists()
    with pytest.raises(OSError):
        prepare(1)


# -- late words of a head that is gone ------------------------------------------------------------------------------


def late(*payload):
    """An operation of an agent whose head has sent these pieces; what is a function happens before the next one."""
    made = Call(1, lambda *_: None, True, b"")

    def chunks():
        for piece in payload:
            if callable(piece):
                piece()
            else:
                yield piece

    made.chunks = chunks
    return made


def model(text):
    marks, sha = [len(text), 0, 0, 0], hashlib.sha256(text).hexdigest()
    entry = frames.encode({"p": "model", "k": "file", "m": 0o600, "t": 0, "s": len(text)})
    return entry, frames.encode({"n": 0, "marks": marks, "sha": sha, "after": marks}, text)


def fence_first(host):
    rest = fence(call(), JOB, 1, outputs=False, timeout_s=LIMIT_S)
    assert not any(rest.values())


def test_outputs_that_arrive_after_a_fence_replace_nothing_of_the_next_attempt(host):
    """The agent of a head that was cut off may still hold what that head sent: for 90 s."""
    prepare(1)
    there = Path(parts.outputs_folder(JOB))

    def next_attempt():
        fence_first(host)
        prepare(2)
        (there / "model").write_text("of the second attempt")

    entry, content = model(b"of the first attempt")
    with pytest.raises(OpError) as caught:
        layer.write_outputs(late(entry, next_attempt, content), JOB, 1)
    assert caught.value.kind == "fenced"
    assert {path.name: path.read_text() for path in there.iterdir()} == {"model": "of the second attempt"}
    assert os.listdir(there.parent) == [JOB], "nothing half written stays"
    assert layer.write_outputs(late(entry, content), JOB, 2) == {"files": 1}


def test_nothing_that_arrives_after_a_fence_comes_back(host):
    prepare(1)
    assert gang.put(late(b"secret"), JOB, 1, "secrets/token", 0o400) == {"bytes": 6}
    assert (host.folder / "secrets/token").read_text() == "secret"
    fence_first(host)
    layer.remove_outputs(call(), JOB, 1)
    entry, content = model(b"m")
    for write in (
        lambda: gang.put(late(b"secret"), JOB, 1, "secrets/token", 0o400),
        lambda: layer.write_outputs(late(entry, content), JOB, 1),
    ):
        with pytest.raises(OpError, match="fenced"):
            write()
    assert not host.folder.exists() and not Path(parts.outputs_folder(JOB)).exists()


@pytest.mark.parametrize("name", ["../j-00000001/x", "/etc/x", "", "a/../../x", "a\0b"])
def test_no_file_is_put_outside_the_jobs_folder(host, name):
    prepare(1)
    with pytest.raises(OpError):
        gang.put(late(b"x"), JOB, 1, name, 0o600)
