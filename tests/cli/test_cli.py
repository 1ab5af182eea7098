from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from typer.main import get_command

from gpurun.cli.main import COMMANDS, app, split_command
from gpurun.inventory.read import load_inventory
from gpurun.jobs.record import GpuHolder
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.leases.lease import remember
from gpurun.state.hosts import Cordon, Cordons, Machine, Machines
from gpurun.state.paths import home
from gpurun.supervisor.hosts import refused_end

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics:
  tcp: {kind: tcp, interface: eth0}
racks:
  r1: {hosts: {"h[1-2]": {}}}
  r2: {hosts: {"h[3-4]": {generation: volta}}}
"""


@pytest.fixture
def inventory(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY)
    return str(path)


def dry(gpurun, inventory, *flags, command=("true",)):
    code, out, err = gpurun("submit", "-i", inventory, "--image", "i:1", *flags, "--dry-run", "--json", "--", *command)
    assert code == 0, err
    return json.loads(out)


def test_a_dry_run_says_all_that_submit_would_do(gpurun, inventory):
    document = dry(gpurun, inventory, "-n", "6", "--launcher", "horovod", command=["python3", "a b", "c\n'd"])
    assert document["placement"] == {
        "generation": "pascal",
        "racks": ["r1"],
        "hosts": [
            {"host": host["host"], "rack": "r1", "gpus": host["gpus"]} for host in document["placement"]["hosts"]
        ],
    }
    assert sum(len(host["gpus"]) for host in document["placement"]["hosts"]) == 6
    assert list(document["containers"]) == [host["host"] for host in document["placement"]["hosts"]]
    for argv in document["containers"].values():
        assert argv[:2] == ["docker", "run"]
        assert "--privileged" not in argv
    assert document["launch"][0] == "horovodrun"
    assert document["launch"][-1] == "/gpurun/bin/rank"
    assert document["job"]["command"] == ["python3", "a b", "c\n'd"]
    assert document["job"]["gpus"] == 6


def test_a_dry_run_shows_memory_and_cores_by_what_is_known_of_each_host(gpurun, inventory, tmp_path):
    (before,) = dry(gpurun, inventory, "-n", "1")["shares"].values()
    assert (before["memory_mib"], before["gpus"], before["weight"]) == (None, 1, 1024)
    hosts = load_inventory(Path(inventory)).hosts
    Machines(home(os.environ)).note(
        {host.machine: Machine(host.name, 1.0, memory_mib=64 << 10, cores=32) for host in hosts}
    )
    (known,) = dry(gpurun, inventory, "-n", "1")["shares"].values()
    part = 1 / known["of"]
    assert (known["memory_mib"], known["cpus"]) == (int((64 * 1024 - 3276) * part), 32 * part)
    (asked,) = dry(gpurun, inventory, "-n", "1", "--memory", "50GiB", "--cpus", "2.5")["shares"].values()
    assert (asked["memory_mib"], asked["cpus"], asked["is_over"]) == (50 << 10, 2.5, True)


def test_keys_of_a_recipe_are_flags_with_the_same_rules(gpurun, inventory):
    given = ("--shm-size", "8GiB", "--grace", "1m30s", "--outputs-every", "5s", "--hang-timeout", "30m")
    job = dry(gpurun, inventory, "-n", "1", *given)["job"]
    assert [job[key] for key in ("shm_size_mib", "grace_s", "outputs_every_s", "hang_timeout_s")] == [8192, 90, 5, 1800]
    for flag in given[::2]:
        code, _, err = gpurun("submit", "-i", inventory, "--image", "i:1", "-n", "1", flag, "soon\x1b", "--", "true")
        assert (code, flag in err, "\x1b" in err) == (2, True, False)


def test_the_same_input_gives_the_same_plan(gpurun, inventory):
    assert dry(gpurun, inventory, "-n", "3") == dry(gpurun, inventory, "-n", "3")


def test_a_dry_run_shows_what_ranks_are_told_that_gpurun_starts(gpurun, inventory, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path)
    found = dry(gpurun, inventory, "-n", "2", "--workdir", "code", command=["torchrun", "--max-restarts=3", "train.py"])
    assert "gpurun starts the ranks (torchrun); each runs: python3 -u train.py" in found["said"]
    assert any("left out: --max-restarts=3 (gpurun itself starts a failed job again" in text for text in found["said"])
    assert found["job"]["retry"] == {
        "times": 3, "on": ["failure", "hang"], "only_with_progress": True, "wait_s": None,
    }  # fmt: skip
    assert found["job"]["launcher"] == "torchrun"
    assert found["job"]["workdir"] == str(tmp_path / "code")
    assert (found["launch"], found["job"]["command"]) == (["/gpurun/bin/rank"], ["python3", "-u", "train.py"])
    assert [told["RANK"] for host in found["ranks"].values() for told in host] == ["0", "1"]
    code, _, err = gpurun("submit", "-i", inventory, "--image", "i:1", "-n", "1", "--launcher", "slurm", "--", "true")
    assert (code, "there is no launcher 'slurm'" in err) == (2, True)


def test_what_a_recipe_can_say_of_files_and_hosts_flags_can_say_too(gpurun, inventory, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("t")
    (tmp_path / "recipe.yaml").write_text("image: i:1\ngpus: 1\ncommand: x\nsecrets: {key: token}\nmounts: [/a:/a]\n")
    monkeypatch.chdir(tmp_path)
    every = dry(gpurun, inventory, "-n", "1")["placement"]["hosts"][0]["host"]
    flags = ["--outputs", "/out", "--mount", "/data:/d", "--mount", "/b:/b:rw", "--secret", "hf=token"]
    found = dry(gpurun, inventory, "recipe.yaml", *flags, "--avoid", every)
    assert found["placement"]["hosts"][0]["host"] != every
    job = found["job"]
    assert job["outputs"] == "/out" and job["mounts"] == [["/data", "/d", "ro"], ["/b", "/b", "rw"]]
    assert job["secret_files"] == {"key": str(tmp_path / "token"), "hf": str(tmp_path / "token")}
    assert dry(gpurun, inventory, "-n", "1", "--host", "@all&" + every)["placement"]["hosts"][0]["host"] == every


def test_a_secret_in_env_is_told_by_name_alone(gpurun, inventory):
    flags = ("-n", "1", "-e", "HF_TOKEN=hf_abc", "-e", "LR=0.1", "--dry-run", "--json", "--", "true")
    code, out, err = gpurun("submit", "-i", inventory, "--image", "i:1", *flags)
    assert code == 0 and json.loads(out)["placement"]
    assert "HF_TOKEN" in err and "/run/secrets" in err and "hf_abc" not in err and "LR" not in err


def test_a_dry_run_tells_of_the_rehearsal(gpurun, inventory):
    flags = ("--rehearse", "1m", "--dry-run", "--", "true")
    code, out, _ = gpurun("submit", "-i", inventory, "--image", "i:1", "-n", "2", *flags)
    assert code == 0 and "before the job starts, one rank rehearses on one GPU for 1m00s" in out
    assert "rehearses" not in gpurun("submit", "-i", inventory, "--image", "i:1", "-n", "1", *flags)[1]
    assert gpurun("submit", "-i", inventory, "--image", "i:1", "-n", "2", "--rehearse", "soon", "--", "true")[0] == 2


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_dry_run_says_that_submit_would_refuse_the_image(gpurun, inventory, tmp_path, flags, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'no-such-socket'}")
    argv = ("submit", "-i", inventory, "--image", "i:1", "-n", "1", "--dry-run", *flags, "--", "true")
    code, out, err = gpurun(*argv)
    assert code == 0 and out
    assert "submit would refuse this job: on the head, Docker does not answer" in err and "→ start Docker" in err
    assert not flags or "Docker does not answer" in json.loads(out)["image_problem"]


def test_a_dry_run_leaves_no_state(gpurun, inventory, tmp_path):
    dry(gpurun, inventory, "-n", "1")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["-n", "0"], 2, "--gpus: '0' is out of range (allowed: 1 to 1000000)"),
        (["-n", "-1"], 2, "--gpus"),
        (["-n", "3.5"], 2, "--gpus"),
        (["-n", "9"], 3, "9 GPUs"),
        (["-n", "1000000"], 3, "GPUs"),
        (["-n", "1", "--generation", "hopper"], 3, "hopper"),
        (["-n", "8", "--locality", "host"], 3, ""),
        (["-n", "2", "--gpus-per-host", "5"], 2, "cannot be split"),
        (["-n", "2", "--locality", "planet"], 2, "--locality: 'planet' is not a known word (allowed: host, rack, any)"),
        (["-n", "2", "--time-limit", "soon"], 2, "--time-limit"),
        (["-n", "2", "-e", "NOVALUE"], 2, "NAME=VALUE"),
        (["-n", "2", "-e", "A B=1"], 2, "name in --env: 'A B' is not a variable's name"),
        (["-n", "2", "--name", "a\nb"], 2, "--name"),
        (["-n", "2", "--outputs", "out"], 2, "--outputs: 'out' is not an absolute path such as /checkpoints"),
        (["-n", "2", "--mount", "/a"], 2, "--mount"),
        (["-n", "2", "--secret", "token"], 2, "--secret must look like NAME=FILE, not 'token'"),
        (["-n", "2", "--secret", "../a=/etc/passwd"], 2, "--secret"),
        (["-n", "2", "--secret", "a=/nosuch"], 2, "the secret 'a' is not a file"),
        (["-n", "2", "--host", "nosuch"], 2, "the inventory has no host 'nosuch'"),
        (["-n", "2", "--host", "$(id)"], 2, "is not a host set"),
        (["-n", "2", "--avoid", "@all"], 3, ""),
        (["-n", "2", "--image", "--privileged"], 2, "--image"),
        (["-n", "2", "--bogus"], 2, "No such option"),
        ([], 2, "no gpus"),
    ],
)
def test_bad_input_is_one_clear_message(gpurun, inventory, flags, code, message):
    found, out, err = gpurun("submit", "-i", inventory, "--image", "i:1", *flags, "--", "true")
    assert (found, out) == (code, "")
    assert message in err


def test_an_unknown_recipe_key(gpurun, inventory, tmp_path):
    (tmp_path / "recipe.yaml").write_text("image: i\ngpus: 1\ncommand: x\ngpu_per_host: 2\n")
    code, _, err = gpurun("submit", str(tmp_path), "-i", inventory)
    assert code == 2
    assert "recipe.yaml:4:1: unknown key 'gpu_per_host' in the recipe" in err


def test_no_inventory_and_a_broken_one(gpurun, inventory, tmp_path):
    assert gpurun("status", "-i", str(tmp_path / "none.yaml"))[0] == 2
    broken = tmp_path / "broken.yaml"
    broken.write_text(INVENTORY.replace("gpus: 4", "gpus: four"))
    code, _, err = gpurun("status", "-i", str(broken))
    assert code == 2
    assert "broken.yaml:2:" in err


def test_status_shows_jobs_where_there_is_no_inventory(gpurun, inventory, tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "empty"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delenv("GPURUN_INVENTORY", raising=False)
    assert gpurun("status")[0] == 2  # nothing to show
    spec = JobSpec(name="train", image="i:1", gpus=2, command=("true",))
    job = JobStore(tmp_path / "home").create(spec, inventory=Path(inventory), now_s=1.0)
    JobStore(tmp_path / "home").retire(job.id)  # no waiter starts for it
    code, out, err = gpurun("status", "--json", "--all")
    assert (code, [each["id"] for each in json.loads(out)["jobs"]], json.loads(out)["hosts"]) == (0, [job.id], [])
    assert "found no inventory" in err
    assert job.id in gpurun("status", "--all")[1]
    assert gpurun("status", "--watch")[0] == 2


def test_status_is_one_document(gpurun, inventory):
    code, out, err = gpurun("status", "-i", inventory, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["jobs"] == []
    assert document["hosts"][0] == {
        "host": "h1", "rack": "r1", "generation": "pascal", "gpus": 4, "free": 4, "state": "ok",
        "seen_s": None,
    }  # fmt: skip


def test_a_damaged_lease_is_named_and_set_aside_only_when_asked(gpurun, inventory, tmp_path):
    leases = tmp_path / "home" / "leases"
    leases.mkdir(parents=True)
    (leases / "j-00000001.json").write_text("{")
    code, out, err = gpurun("status", "-i", inventory, "--json")
    assert code == 5
    assert "j-00000001.json" in err
    assert json.loads(out)["hosts"]
    assert gpurun("recover")[0] == 5
    assert gpurun("recover", "--discard", "nothing.json")[0] == 2
    assert gpurun("recover", "--discard", "j-00000001.json")[0] == 0
    assert gpurun("status", "-i", inventory, "--json")[0] == 0
    assert len(list((tmp_path / "home" / "discarded").iterdir())) == 1


@pytest.mark.parametrize("command", ["logs", "cancel", "wait", "exec", "outputs"])
@pytest.mark.parametrize("job", ["nope", "", "../../etc", "a'; touch /tmp/x #"])
def test_a_job_that_does_not_exist(gpurun, inventory, command, job):
    code, _, err = gpurun(command, job)
    assert code == 2
    assert "there is no job" in err


def test_words_after_two_dashes_belong_to_the_program():
    assert split_command(["submit", "-n", "2", "--", "x", "--", "-n"]) == (["submit", "-n", "2"], ("x", "--", "-n"))
    assert split_command(["submit", "r"]) == (["submit", "r"], None)
    assert split_command(["lab", "run", "h", "--", "ls"]) == (["lab", "run", "h", "--", "ls"], None)


def test_heavy_imports_stay_out_of_quick_commands(inventory):
    script = (
        "import sys; from gpurun.cli.main import main\n"
        f"try: main(['status', '--json', '-i', {inventory!r}])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('paramiko', 'fabric', 'rich') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_help_is_quick(real_starts):
    """It imports little more than Typer: the promised 0.3 s cannot be judged on a machine whose speed nobody knows."""

    def cpu_s(*python: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *python], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(cpu_s("-m", "gpurun", "--help"), cpu_s("-c", "import typer, typer.core")) for _ in range(5)]
    assert min(ours / typers for ours, typers in pairs) < 1.5, pairs


def test_every_command_is_where_its_group_says():
    """Commands are imported when they are called, so that a wrong name would be seen by a user only."""
    group = get_command(app)
    for name, short_help in ((name, place.short_help) for name, place in COMMANDS.items()):
        command = group.get_command(None, name)
        assert (command.name, command.short_help) == (name, short_help)
        if isinstance(command, click.Group):
            for inner in command.list_commands(None):
                assert command.get_command(None, inner).name == inner
                assert command.get_command(None, inner).get_short_help_str()


def test_a_mistyped_command_is_compared_with_all(gpurun):
    code, _, err = gpurun("statsu")
    assert (code, err.count("Did you mean `gpurun status`?"), err.count("Did you mean")) == (2, 1, 1)
    code, _, err = gpurun("inventory", "vaildate")
    assert (code, "Did you mean `gpurun inventory validate`?" in err) == (2, True)


def test_a_job_in_the_queue_says_what_it_waits_for(gpurun, inventory, tmp_path, monkeypatch):
    """Its record has no reason: passes decide anew each time."""
    monkeypatch.setattr("gpurun.head.waiter.Waiter.resume", lambda *_: None)  # no process is left behind
    store = JobStore(tmp_path / "home")
    with Cordons(store.home).changing() as cordons:
        cordons.update(dict.fromkeys(("h1", "h3"), Cordon("cordoned", "me", 1.0, "fan")))
    specs = [JobSpec(name="n", image="i:1", gpus=gpus, command=("true",)) for gpus in (8, 99)]
    later, never = (each.id for each in store.create_many(specs, inventory=Path(inventory), now_s=1.0))
    assert "needs hosts that are out of use" in gpurun("status", later)[1]
    assert "the job needs 99 GPUs" in gpurun("status", never)[1]
    assert "the job needs 99 GPUs" in gpurun("why", never)[1]
    listed = gpurun("status", "-i", inventory)[1]
    assert "needs hosts that are out of use" in listed and "the job needs 99 GPUs" in listed
    assert "h2 " in listed and "kept" not in listed, "what a pass would grant is not granted"
    (store.home / "cordons.json").write_text("no JSON")
    assert "gpurun cannot decide when jobs start: " in gpurun("status", later)[1]
    (store.home / "cordons.json").unlink()
    rows = {row["job"]: row for row in json.loads(gpurun("queue", "--json")[1])["queue"]}
    assert (rows[later]["position"], rows[never]["position"]) == (1, None)


def test_a_job_that_waits_for_a_process_says_whose(gpurun, inventory, tmp_path, monkeypatch):
    monkeypatch.setattr("gpurun.head.waiter.Waiter.resume", lambda *_: None)  # no process is left behind
    spec = JobSpec(name="n", image="i:1", gpus=16, command=("true",))
    folder = JobStore(tmp_path / "home").create(spec, inventory=Path(inventory), now_s=1.0)
    eve = GpuHolder((0, 1), user="eve", process="python3 of eve (pid 7)", why="no gpurun job started this process")
    end = refused_end({"h1": [eve]})
    refusals: tuple = ()
    for _ in range(5):  # a host that refuses so often is left alone for a minute: slow machines get through this test
        refusals = remember(refusals, end.refused, now_s=time.time())
    folder.write(folder.record().but(reason=end.reason, refusals=refusals))
    said = "h1: python3 of eve (pid 7) holds GPUs 0, 1: no gpurun job started this process"
    for argv in (["why", folder.id], ["status", folder.id], ["status", "-i", inventory]):
        assert said in gpurun(*argv)[1], argv
    assert said in json.loads(gpurun("why", folder.id, "--json")[1])["reason"]
    assert "h1: GPUs 0, 1 are used by python3 of eve (pid 7)" in gpurun("status", "-i", inventory)[1]
    hosts = json.loads(gpurun("status", "-i", inventory, "--json")[1])["hosts"]
    ((foreign,),) = (host["foreign"] for host in hosts if "foreign" in host)
    assert (foreign["gpus"], foreign["user"], foreign["process"]) == ([0, 1], "eve", "python3 of eve (pid 7)")


def test_a_forgotten_double_dash_is_explained(gpurun, inventory):
    for argv in (("python3", "train.py"), ("train.py", "--lr", "3")):
        code, _, err = gpurun("submit", "-i", inventory, "-n", "2", "--image", "i", *argv)
        assert (code, "write a program and its arguments after --" in err) == (2, True)
    assert "[-- COMMAND…]" in gpurun("submit", "--help")[1]
    for argv in (("status", "--nope"), ("sweep",), ("scale",), ("sweep", "run", "x", "--random", "0"), ("ssh",)):
        code, _, err = gpurun(*argv)
        assert (code, "follow --" in err) == (2, False), argv
    assert "gpurun ssh HOST -- ls -l" in gpurun("ssh", "h1", "ls")[2]


@pytest.mark.parametrize("command", [("doctor",), ("inventory", "probe")])
def test_a_check_of_no_host_is_an_error(gpurun, inventory, command):
    code, _, err = gpurun(*command, "@lost", "-i", inventory)
    assert (code, "no host is @lost now" in err) == (2, True)


def test_a_dry_run_shows_alike_hosts_by_what_differs(gpurun, inventory):
    Path(inventory).write_text(INVENTORY.replace("h[1-2]", "h[1-2],h[5-8]"))
    flags = ("-n", "24", "--image", "i", "--launcher", "horovod", "--dry-run")
    code, out, err = gpurun("submit", "-i", inventory, *flags, "--", "true")
    assert code == 0, err
    assert out.count("docker run") == 2, "the host that launches, and one of the others"
    assert out.count(": the same as on h2") == 4


@pytest.mark.parametrize(("words", "path", "said"), [(["x" * 140_000], None, "too long"), (["true"], "/", "ssh")])
def test_an_ssh_that_cannot_start_is_one_message(gpurun, inventory, monkeypatch, words, path, said):
    """Linux takes no argument of more than 128 KiB, and the quoted command is one: a traceback."""
    monkeypatch.setattr("gpurun.remote.route.resolve", lambda _: None)
    monkeypatch.setattr("gpurun.remote.system_ssh.live", lambda _: {})
    monkeypatch.setattr("gpurun.remote.system_ssh.terminal", lambda route, masters, command, tty: ["ssh", command])
    if path is not None:
        monkeypatch.setenv("PATH", path)
    code, _, err = gpurun("ssh", "h1", "-i", inventory, "--", *words)
    assert code == 2 and "ssh cannot start: " in err and said in err
