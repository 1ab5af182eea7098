"""A build against an engine that is none: what is asked of it, what is left, and who waits for whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import BASE, CONF, FakeEngine, ensure

from gpurun.content import build
from gpurun.content.environment import LABEL, PACKAGES
from gpurun.errors import BadInput, GpurunError, HostNotReady
from gpurun.jobs.recipe_values import environment_of


def test_it_is_built_once_and_is_the_base_and_one_layer(wanted, cache):
    engine = FakeEngine()
    image, environment = ensure(wanted, engine)
    assert image.layers[:-1] == ("sha256:l0",) and len(image.layers) == 2 and image.names == (image.reference,)
    assert (environment.base, environment.base_id, environment.packages) == (
        BASE,
        "sha256:" + "b" * 64,
        ("tinyone==1.0",),
    )
    again, _ = ensure(wanted, engine)
    assert again == image and engine.builds == 1
    assert engine.containers == {} and list(cache.iterdir()) == []


def test_the_image_keeps_what_the_base_says_and_finds_the_packages_first(wanted):
    image, _ = ensure(wanted, FakeEngine())
    assert image.facts["Env"] == ["PATH=/opt/gpurun/environment/bin:/base/bin", "VIRTUAL_ENV=/opt/gpurun/environment"]
    assert image.facts["Labels"][PACKAGES] == '["tinyone==1.0"]' and "Cmd" not in image.facts


def test_pip_runs_as_the_user_with_nothing_of_the_head_but_what_it_needs(wanted, tmp_path):
    seen = {}
    engine = FakeEngine(
        lambda folders: seen.update({str(p): p.read_text() for p in folders["/run/gpurun-build/in"].iterdir()})
    )
    ensure(wanted, engine)
    body = engine.bodies[0]
    host = body["HostConfig"]
    assert (
        body["User"] == f"{os.getuid()}:{os.getgid()}" and host["CapDrop"] == ["ALL"] and host["NetworkMode"] == "none"
    )
    assert host["LogConfig"] == {"Type": "none"} and "no-new-privileges" in host["SecurityOpt"]
    assert [m["Target"] for m in host["Mounts"] if not m["ReadOnly"]] == [
        "/run/gpurun-build/scratch", "/opt/gpurun/environment"
    ]  # fmt: skip
    assert {Path(path).name for path in seen} == {"pip.conf", "requirements.txt", "constraints.txt", "inside.py"}
    assert all(str(tmp_path) not in text for text in seen.values())


def test_a_rootless_engines_root_is_the_user(wanted):
    engine = FakeEngine()
    engine.rootless = True
    ensure(wanted, engine)
    assert engine.bodies[0]["User"] == "0:0"


def test_a_secret_is_in_a_file_that_only_the_build_sees(write, cache):
    path = write({"r.txt": "tinyone", "netrc": "machine x.example login me password s3cret"})
    wanted = environment_of(
        {"requirements": "r.txt", "index": "https://x.example/simple", "secret": "netrc"}, path.parent
    )
    environ = {**CONF, "PIP_PROXY": "http://me:pr0xy@p.example"}
    kept = []

    def pip(folders):
        kept.append((folders["/run/gpurun-build/in"] / "pip.conf").stat().st_mode & 0o777)
        (folders["/run/gpurun-build/scratch"] / "log").write_text("401 Error s3cret pr0xy for x.example")

    engine = FakeEngine(pip, code=1)
    with pytest.raises(BadInput, match="wants a password") as caught:
        ensure(wanted, engine, environ=environ)
    said = json.dumps(engine.bodies) + str(caught.value) + repr(wanted)
    assert "s3cret" not in said and "pr0xy" not in said and kept == [0o600]
    assert engine.bodies[0]["HostConfig"]["NetworkMode"] == "host"
    assert engine.containers == {} and list(cache.iterdir()) == []
    engine.code = 0
    ensure(wanted, engine, environ=environ)
    assert "s3cret" not in json.dumps(engine.made) and "pr0xy" not in json.dumps(engine.made)


def test_an_index_whose_url_cannot_be_read_is_found_before_docker_is_asked_for_anything(wanted, cache):
    engine = FakeEngine(code=1)
    with pytest.raises(BadInput, match="cannot read the URL in pip's setting index-url") as caught:
        ensure(replace(wanted, index=None), engine, environ={**CONF, "PIP_INDEX_URL": "http://me:s3cret@[::1/simple"})
    assert "s3cret" not in str(caught.value) and engine.bodies == []
    with pytest.raises(BadInput, match="cannot read the URL in pip's setting index-url"):
        ensure(replace(wanted, index="https://[::1"), engine)


def test_the_key_is_what_goes_in(wanted, write, wheel, tmp_path):
    def key(image=BASE, environ=CONF, engine=None, **changed):
        return build.planned(replace(wanted, **changed), image, engine or FakeEngine(), environ).key

    first = key()
    write({"copy/requirements.txt": "# the same\ntinyone==1.0"})
    assert key(path=str(tmp_path / "copy/requirements.txt"), secret="/anything") == first
    other = FakeEngine()
    other.made[BASE] = {**other.made[BASE], "Id": "sha256:" + "c" * 64}
    arm = FakeEngine()
    arm.made[BASE] = {**arm.made[BASE], "Architecture": "arm64"}
    keys = {first, key(engine=other), key(engine=arm), key(index=None), key(index="https://x.example")}
    keys |= {key(index=None, environ={**CONF, "PIP_INDEX_URL": "https://x.example"})}
    wheel("tinytwo")
    assert key() not in keys
    assert len({*keys, key()}) == 6  # pip's own index and the recipe's are one
    one, other = ({**CONF, "PIP_INDEX_URL": f"https://{who}@x.example"} for who in ("a:b", "c:d"))
    assert key(index=None, environ=one) == key(index=None, environ=other)


@pytest.mark.parametrize(
    ("step", "answer", "kind", "why"),
    [
        ("start", (400, {"message": 'exec: "python3": executable file not found'}), BadInput, "has no python3"),
        ("start", (500, {"message": "no space left on device"}), HostNotReady, "disk is full"),
        ("start", (500, None), HostNotReady, "did not start the build of the environment"),
        ("create", (500, {"message": "No space left on device"}), HostNotReady, "disk is full"),
        ("create", (409, {"message": "name in use"}), HostNotReady, "did not create a container: name in use"),
        ("upload", (500, {"message": "write /x: no space left on device"}), HostNotReady, "disk is full"),
    ],
)
def test_whatever_docker_refuses_nothing_is_left(wanted, cache, step, answer, kind, why):
    engine = FakeEngine()
    engine.refuse[step] = answer
    with pytest.raises(kind, match=why):
        ensure(wanted, engine)
    assert engine.containers == {} and list(cache.iterdir()) == [] and list(engine.made) == [BASE]


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt(), OSError(28, "No space left on device", "/x"), HostNotReady("gone")]
)
def test_an_interrupted_build_leaves_nothing(wanted, cache, raised):
    def pip(folders):
        raise raised

    engine = FakeEngine(pip)
    with pytest.raises((KeyboardInterrupt, GpurunError)):
        ensure(wanted, engine)
    assert engine.containers == {} and list(cache.iterdir()) == [] and list(engine.made) == [BASE]


def test_the_next_build_removes_what_a_killed_one_left_and_not_what_another_is_doing(wanted, cache):
    engine = FakeEngine()
    dead, dead2, busy = (
        build.container_name(cache, key, part)
        for key, part in (("dead", "build"), ("dead2", "layer"), ("busy", "build"))
    )
    engine.containers = dict.fromkeys((dead, dead2, busy, "gpurun-environment-99999-x-build", "other"))
    for name in ("dead/in", "dead/environment", "busy/in"):
        (cache / name).mkdir(parents=True)
    (cache / "dead.lock").touch()
    with build._free(cache, "busy") as is_free:
        assert is_free
        ensure(wanted, engine)
        assert sorted(path.name for path in cache.iterdir()) == ["busy", "busy.lock"]
    assert set(engine.containers) == {busy, "gpurun-environment-99999-x-build", "other"}


def test_two_that_want_the_same_build_it_once(wanted, cache):
    begun, go_on = threading.Event(), threading.Event()

    def pip(folders):
        begun.set()
        assert go_on.wait(30)

    engine, told = FakeEngine(pip), []
    results = []
    first = threading.Thread(target=lambda: results.append(ensure(wanted, engine)))
    first.start()
    assert begun.wait(30)

    def report(stage, _):
        told.append(stage)
        go_on.set()  # only now: the second is there

    results.append(ensure(wanted, engine, report=report))
    first.join(30)
    assert (
        engine.builds == 1
        and results[0] == results[1]
        and told == ["waiting for another build of the same environment"]
    )
    assert list(cache.iterdir()) == []


def test_what_another_user_has_built_meanwhile_is_used(wanted):
    others = FakeEngine()
    ensure(wanted, others)

    def pip(folders):
        engine.made = others.made

    engine = FakeEngine(pip)
    image, _ = ensure(wanted, engine)
    assert len(engine.bodies) == 1 and image.id == others.made[image.reference]["Id"]


def test_what_another_user_has_built_while_this_one_packs_its_layer_is_used(wanted):
    others = FakeEngine()
    ensure(wanted, others)

    class Packing(FakeEngine):
        def upload(self, path, tar):
            self.made = others.made
            return super().upload(path, tar)

    engine = Packing()
    image, _ = ensure(wanted, engine)
    assert engine.commits == 0 and image.id == others.made[image.reference]["Id"] and engine.containers == {}


def test_two_with_other_cache_folders_do_not_remove_each_others_containers(wanted, tmp_path, monkeypatch):
    def pip(folders):
        if engine.builds == 1:
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
            results.append(ensure(wanted, engine))

    engine, results = FakeEngine(pip), []
    results.append(ensure(wanted, engine))
    assert results[0] == results[1] and (engine.builds, engine.commits) == (2, 1) and engine.containers == {}
    assert [list(each.iterdir()) for each in tmp_path.rglob("gpurun/environments")] == [[], []]


def test_containers_of_a_cache_folder_that_nobody_uses_any_more_go_after_a_day(wanted):
    engine, mine = FakeEngine(), f"gpurun-environment-{os.getuid()}-"
    engine.containers = dict.fromkeys((f"{mine}elsewhere-old-build", f"{mine}elsewhere-new-layer", f"{mine}x-layer"))
    engine.created_s = {f"{mine}elsewhere-old-build": time.time() - 90000, f"{mine}x-layer": 1}
    ensure(wanted, engine)
    assert set(engine.containers) == {f"{mine}elsewhere-new-layer"}


@pytest.mark.parametrize("own", [True, False])
def test_a_container_that_docker_cannot_remove_keeps_its_folder_and_stops_its_own_build_only(wanted, cache, own):
    """It may still write there."""
    engine = FakeEngine()
    key = build.planned(wanted, BASE, engine, CONF).key if own else "dead"
    (cache / key / "environment").mkdir(parents=True)
    name = build.container_name(cache, key, "build")
    engine.containers[name] = {}
    engine.refuse["delete"] = lambda which: (500, {"message": "device is busy"}) if which == name else None
    if own:
        with pytest.raises(HostNotReady, match=f"did not remove the container {name}: device is busy"):
            ensure(wanted, engine)
    else:
        ensure(wanted, engine)
    assert engine.builds == (not own) and set(engine.containers) == {name}
    assert (cache / key / "environment").is_dir()


def test_a_container_that_docker_is_removing_is_waited_for(wanted, cache, monkeypatch):
    monkeypatch.setattr(build, "POLL_S", 0.001)
    engine, answers = FakeEngine(), [(409, {"message": "removal is already in progress"})] * 3
    engine.containers[build.container_name(cache, build.planned(wanted, BASE, engine, CONF).key, "build")] = {}
    engine.refuse["delete"] = lambda _: answers.pop() if answers else None
    ensure(wanted, engine)
    assert answers == [] and engine.builds == 1 and engine.containers == {}


def test_what_a_package_leaves_is_not_followed_and_not_believed(wanted, cache, tmp_path):
    (tmp_path / "private").write_text("top s3cret")

    def pip(folders):
        scratch = folders["/run/gpurun-build/scratch"]
        (scratch / "log").symlink_to(tmp_path / "private")
        (scratch / "packages.json").unlink()
        os.mkfifo(scratch / "packages.json")

    with pytest.raises(BadInput, match="printed no message") as caught:
        ensure(wanted, FakeEngine(pip, code=1))
    assert "s3cret" not in str(caught.value)
    with pytest.raises(BadInput, match="damaged the list"):
        ensure(wanted, FakeEngine(pip))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("labels", [None, {LABEL: "other"}])
def test_an_image_that_only_has_the_name_is_not_used(wanted, labels):
    engine = FakeEngine()
    plan = build.planned(wanted, BASE, engine, CONF)
    engine._add(plan.reference, "sha256:" + "f" * 64, ["sha256:other"], {"Labels": labels})
    image, _ = ensure(wanted, engine)
    assert engine.builds == 1 and image.id != "sha256:" + "f" * 64


def test_an_environment_is_no_base(wanted):
    engine = FakeEngine()
    image, _ = ensure(wanted, engine)
    with pytest.raises(BadInput, match="so the image cannot be a base image"):
        ensure(wanted, engine, image=image.reference)
    with pytest.raises(BadInput, match="is not on the head"):
        ensure(wanted, engine, image="no/such:1")


def test_what_runs_in_the_image_needs_nothing_of_gpurun_and_says_when_there_is_no_pip(tmp_path):
    code = Path(build.inside.__file__).read_text()
    code = code.replace("/run/gpurun-build", str(tmp_path / "place")).replace(
        "/opt/gpurun/environment", str(tmp_path / "e")
    )
    (tmp_path / "place/scratch").mkdir(parents=True)
    (tmp_path / "inside.py").write_text(code)
    python = Path(sys.base_prefix) / "bin/python3"
    no_pip = "import importlib.util as u, runpy; u.find_spec = lambda _: None"
    argv = [python, "-I", "-c", f"{no_pip}; runpy.run_path({str(tmp_path / 'inside.py')!r}, run_name='__main__')"]
    assert subprocess.run(argv, check=False).returncode == build.inside.NO_PIP
    assert (tmp_path / "e/bin/python3").exists()
