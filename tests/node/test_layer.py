"""What ranks write beside their code: a layer of each attempt on each host, which goes with the attempt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_stand_in import EngineStandIn
from waiting import LIMIT_S

from gpurun.node import data
from gpurun.node.agent import serve
from gpurun.node.agent.frames import Call, OpError
from gpurun.node.job import caches, gang, layer, parts, rules
from gpurun.node.job.gang import fence
from gpurun.node.transfer import sets

JOB, OTHER = f"j-{os.getpid():08x}", f"j-{os.getpid() ^ 0xFFFF:08x}"
REFUSED = (
    "Error processing tar file: read-only file system, or failed to mount local volume: mount overlay: invalid argument"
)
CREATE = """
import os
from gpurun.node.job import gang, layer
from gpurun.node.agent.frames import Call
layer._refusal = lambda *_: os.kill(os.getpid(), 9)
gang.create(Call(1, lambda *_: None, False, b""), %r, 1, {}, %r, None, layered=True)
"""


def call():
    return Call(1, lambda *_: None, False, b"")


def argv(attempt=1, job=JOB):
    labels = ["--label", f"gpurun.job={job}", "--label", f"gpurun.attempt={attempt}"]
    return ["docker", "run", "--detach", "--name", f"gpurun-{job}-{attempt}", *labels, "image"]


@pytest.fixture(params=["it's a home", "a,b:c"])
def host(tmp_path, monkeypatch, request):
    """A host with an engine; overlays take no comma in a path."""
    home = tmp_path / request.param
    home.mkdir()
    engine = EngineStandIn(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.path}")
    monkeypatch.setenv("PATH", f"{engine.bin}:{os.environ['PATH']}")
    monkeypatch.setattr(gang, "_make_key", lambda *_: "ssh-ed25519 AAAA")
    monkeypatch.setattr(gang, "_tool", lambda name: f"/usr/bin/{name}")
    yield SimpleNamespace(engine=engine, is_overlay="," not in request.param, top=home / ".gpurun")
    engine.shutdown()
    engine.server_close()


def prepare(attempt=1, job=JOB):
    """Prepare an attempt, with its code; return the code's folder and the one for what is written beside it."""
    gang.prepare(call(), job, attempt, "", True, False)
    code = Path(parts.job_folder(job)) / rules.CODE
    (code / "sub").mkdir(parents=True, exist_ok=True)
    (code / "train.py").write_text("print()")
    (code / "sub" / "a").write_text("a")
    os.utime(code / "train.py", ns=(10**18, 10**18))
    (code / "link").unlink(missing_ok=True)
    (code / "link").symlink_to("/nowhere")
    return code, Path(parts.layer_folder(job)) / "written"


def create(attempt=1, job=JOB):
    return gang.create(call(), job, attempt, {}, argv(attempt, job), None, layered=True)


def fenced(attempt=1, job=JOB):
    rest = fence(call(), job, attempt, timeout_s=LIMIT_S)
    assert not any(rest.values()), rest


def test_a_layer_lies_above_the_code_and_carries_the_jobs_labels(host):
    code, written = prepare()
    made = create()
    (volume,) = host.engine.volumes.values()
    assert volume["Name"] == rules.volume_name(JOB, 1) and volume["Driver"] == "local"
    assert volume["Labels"] == {"gpurun.job": JOB, "gpurun.attempt": "1", "gpurun.folder": serve.root()}
    if host.is_overlay:
        options = volume["DriverOpts"]["o"].split(",")
        assert [f"lowerdir={code}", f"upperdir={written}"] == options[:2] and made["copied"] == ""
        assert {option.partition("=")[2] for option in options[3:]} <= {"off"}
        assert list(written.iterdir()) == []
    else:
        assert volume["DriverOpts"] == {"type": "none", "device": str(written), "o": "bind"} and made["copied"]


def test_a_copy_of_the_code_takes_its_place_where_no_overlay_can_be_mounted(host):
    host.engine.mount_error = REFUSED
    code, written = prepare()
    made = create()
    assert (REFUSED in made["copied"]) is host.is_overlay and made["copied"]
    assert list(host.engine.containers) == [made["container"]], "the container that could not start is gone"
    (volume,) = host.engine.volumes.values()
    assert volume["DriverOpts"]["o"] == "bind"
    assert sorted(os.listdir(written)) == ["link", "sub", "train.py"] and (written / "sub" / "a").read_text() == "a"
    assert (written / "link").readlink() == Path("/nowhere")
    assert (written / "train.py").stat().st_mtime_ns == 10**18
    (written / "train.py").write_text("changed by the program")
    assert (code / "train.py").read_text() == "print()"


def test_a_copy_replaces_nothing_that_was_written_and_follows_no_link(host, tmp_path):
    host.engine.mount_error = REFUSED
    code, written = prepare()
    written.mkdir(parents=True)
    (written / "train.py").write_text("mine")
    (tmp_path / "outside").mkdir()
    (written / "sub").symlink_to(tmp_path / "outside")
    create()
    assert (written / "train.py").read_text() == "mine" and (written / "sub").is_symlink()
    assert list((tmp_path / "outside").iterdir()) == []
    assert (code / "sub" / "a").exists()


def test_a_fence_removes_the_layers_of_this_and_earlier_attempts_alone(host):
    prepare()
    create()
    for name in (f"{JOB}-9", f"{JOB}-x", f"{JOB}-99999999999", f"{OTHER}-1"):
        host.engine.volumes[rules.PREFIX + name] = {"Name": rules.PREFIX + name, "Labels": None}
    fenced(2)
    assert sorted(host.engine.volumes) == sorted(
        rules.PREFIX + name for name in (f"{JOB}-9", f"{JOB}-x", f"{JOB}-99999999999", f"{OTHER}-1")
    )
    assert not Path(parts.job_folder(JOB)).exists()


def test_a_fence_removes_the_layer_of_an_agent_that_was_killed(host):
    prepare()
    agent = subprocess.run([sys.executable, "-c", CREATE % (JOB, argv())], check=False)
    assert host.engine.volumes and (agent.returncode == -9) is host.is_overlay
    fenced()
    assert host.engine.volumes == {} and not Path(parts.job_folder(JOB)).exists()


def test_a_strangers_container_that_has_the_layer_keeps_no_gpus_and_the_next_job_removes_it(host):
    prepare()
    create()
    name = rules.volume_name(JOB, 1)
    host.engine.used.add(name)
    fenced()
    assert name in host.engine.volumes
    host.engine.used.clear()
    elsewhere = {"gpurun.job": JOB, "gpurun.folder": "/home/other/.gpurun"}
    for strange, labels in (("1", None), ("2", {"gpurun.job": "../x"}), ("3", elsewhere)):
        host.engine.volumes[rules.PREFIX + strange] = {"Name": rules.PREFIX + strange, "Labels": labels}
    prepare(job=OTHER)
    create(job=OTHER)
    assert set(host.engine.volumes) == {rules.PREFIX + each for each in ("1", "2", "3", f"{OTHER}-1")}


def test_what_a_power_cut_left_in_the_engines_own_folder_is_for_a_later_job(host, monkeypatch):
    """Only root may look into it, so this account cannot remove it; the kernel empties it at the next mount."""
    prepare()
    create()
    work = Path(parts.layer_folder(JOB)) / "work"
    (work / "work").mkdir(parents=True, exist_ok=True)
    (work / "work" / "#1f").write_text("torn")
    fenced()
    used = list((host.top / "outputs" / ".used-work").iterdir())
    assert [(each / "work" / "#1f").read_text() for each in used] == ["torn"]
    prepare(job=OTHER)
    create(job=OTHER)
    if host.is_overlay:
        assert (Path(parts.layer_folder(OTHER)) / "work" / "work" / "#1f").exists()
        assert list((host.top / "outputs" / ".used-work").iterdir()) == []


@pytest.mark.parametrize("what", ["is_full", "volumes_full"])
def test_an_engine_without_room_is_the_hosts_fault_and_leaves_nothing(host, what):
    prepare()
    setattr(host.engine, what, True)
    with pytest.raises(OpError, match="no space left") as refused:
        create()
    assert refused.value.kind == "engine"
    fenced()
    assert host.engine.volumes == {}


@pytest.mark.parametrize("pruned", [1, 9])
def test_a_layer_that_an_admin_pruned_is_made_again_or_refused(host, monkeypatch, pruned):
    """Docker makes an empty volume for a container that names one that is gone: ranks would lose what they write."""
    _, written = prepare()
    begin, left = gang.note_creating, [pruned]

    def prune(*given):
        begin(*given)
        if left[0]:
            left[0] -= 1
            name = rules.volume_name(JOB, 1)
            host.engine.volumes[name] = {"Name": name}

    monkeypatch.setattr(gang, "note_creating", prune)
    if pruned == 1:
        create()
        (volume,) = host.engine.volumes.values()
        assert str(written) in str(volume["DriverOpts"]) and len(host.engine.containers) == 1
        assert not list(written.glob(".gpurun-trial"))
    else:
        with pytest.raises(OpError, match="prune") as refused:
            create()
        assert refused.value.kind == "engine"
    fenced()
    assert host.engine.volumes == {}


@pytest.mark.parametrize("is_refused", [False, True])
def test_code_that_jobs_share_is_below_the_layer_until_the_head_has_what_was_written(host, is_refused):
    host.engine.mount_error = REFUSED if is_refused else host.engine.mount_error
    gang.prepare(call(), JOB, 1, "", first=True, outputs=True, beside=True)
    made, _ = prepare(job="j-00000009")
    shared = host.top / "code" / ("0" * 64) / "tree"
    shared.parent.mkdir(parents=True)
    made.rename(shared)
    data._link_code(JOB, "sha256:" + "0" * 64)
    create()
    (volume,) = host.engine.volumes.values()
    above = Path(parts.layer_folder(JOB)) / "written"
    if host.is_overlay and not is_refused:
        assert volume["DriverOpts"]["o"].startswith(f"lowerdir={shared},upperdir={above},")
    else:
        assert sorted(os.listdir(above)) == ["link", "sub", "train.py"]
    (above / "new").write_text("written")
    for _ in range(2):
        assert listed() == {"@workspace/new"}
        assert set(sets.pinned(sets.CODE)) == {"sha256:" + "0" * 64}
        fenced()
    assert (Path(parts.kept_layer(JOB)) / rules.CODE).is_symlink() and (shared / "train.py").exists()
    layer.remove_outputs(call(), JOB, 1)
    assert sets.pinned(sets.CODE) == {} and (shared / "train.py").exists()


def listed():
    with layer.Tops(JOB, 0) as tops:
        told = [(item["in"], json.loads(rows)) for item, rows in tops.told({}) if "in" in item]
    return {f"{folder}/{row[0]}" for folder, rows in told for row in rows}


def tick(top):
    """Go on once the file system's clock has."""
    (top / "clock").write_text("")
    began = (top / "clock").stat().st_ctime_ns
    while (top / "clock").stat().st_ctime_ns == began:
        os.utime(top / "clock")


def test_a_file_that_keeps_its_size_and_time_was_written_all_the_same(host):
    """``cp -p`` and ``rsync -t`` write such files; in an overlay, only written files are there."""
    gang.prepare(call(), JOB, 1, "", first=True, outputs=True, beside=True)
    code, above = prepare()
    (above / "sub").mkdir()
    (above / "sub" / "a").write_text("r")  # restored: what an earlier attempt wrote
    os.utime(above / "sub" / "a", ns=(10**18, 10**18))
    os.utime(code / "sub" / "a", ns=(10**18, 10**18))
    tick(host.top)
    made = create()
    assert listed() == {"@workspace/sub/a"}
    tick(host.top)
    (above / "train.py").write_text("PRINT()")
    os.utime(above / "train.py", ns=(10**18, 10**18))
    assert listed() == {"@workspace/sub/a", "@workspace/train.py"}
    host.engine.remove(made["container"])
    create()
    assert listed() == {"@workspace/sub/a", "@workspace/train.py"}, "a second start here forgets nothing"


def test_a_job_uses_its_users_caches_from_its_preparation_on_until_its_fence(host):
    """Image and data come after the preparation: they need the disk that old caches have."""
    owner = f"{'a' * 16}-1000"
    prepare()
    gang.prepare(call(), JOB, 1, "", True, False, caches={"owner": owner, "most_bytes": 1 << 30})
    create()
    top = Path(caches.caches_folder(owner))
    assert top == host.top / "caches" / owner / "files"
    (top / "model").write_text("kept")
    assert caches.trim(call(), owner, 0)["jobs"] == [JOB]
    fenced()
    assert (top / "model").read_text() == "kept"
    assert caches.list_caches(call(), owner)["jobs"] == []
