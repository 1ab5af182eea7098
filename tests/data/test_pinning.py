"""What a recipe and flags say of data, what is pinned of it at submit, and where containers get it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpurun.content import data as pinning
from gpurun.content.data import Pins
from gpurun.errors import BadInput
from gpurun.jobs.recipe import build_spec, convert_flag, read_recipe
from gpurun.jobs.spec import DataSource
from gpurun.launch.container import HostAccount, mounts
from gpurun.state import caches


def pin(data, home):
    pinned = pinning.Pins(home).pin(data.values())
    return {name: pinned[source] for name, source in data.items()}


GIVEN = {"image": "i", "gpus": 1, "command": ("true",)}


def spec_with(data):
    return build_spec(None, {**GIVEN, **dict([convert_flag("--data", "data", data)])}, {})


def test_a_recipe_and_a_flag(top, tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("image: i\ngpus: 1\ncommand: x\ndata: {a: data, b: 'host:/nfs/x y', c: 'j-1:outputs/sub'}\n")
    monkeypatch.chdir(top)
    spec = build_spec(read_recipe(recipe), {"data": convert_flag("--data", "data", {"d": "sub"})[1]}, {})
    assert spec.data == {
        "a": DataSource("folder", str(top)),
        "b": DataSource("host", "/nfs/x y"),
        "c": DataSource("job", "j-1:outputs/sub"),
        "d": DataSource("folder", str(top / "sub")),
    }


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "a'b", 'a"b', "a b", "ünï", "a\nb", "a,b", "-x", "x" * 65])
def test_a_name_that_could_be_another_path_or_word_is_refused(name):
    with pytest.raises(BadInput, match="name in --data"):
        spec_with({name: "host:/nfs"})


@pytest.mark.parametrize(
    "source", ["", "host:", "host:relative", "host:/a/../b", "host:/", "host:/a\nb", "a\nb", "j-1:outputs/../../x"]
)
def test_a_source_that_means_nothing_is_refused(source):
    with pytest.raises(BadInput, match=r"source of data|leads out|must be a folder below /"):
        spec_with({"a": source})


def test_a_folder_that_is_none_and_a_place_that_is_taken(top):
    with pytest.raises(BadInput, match="not a folder"):
        spec_with({"a": str(top / "none")})
    with pytest.raises(BadInput, match="both a mount and the data set 'a'"):
        build_spec(None, {**GIVEN, "mounts": (("/x", "/data/a/", "ro"),), "data": {"a": DataSource("host", "/x")}}, {})
    with pytest.raises(BadInput, match="both outputs"):
        build_spec(None, {**GIVEN, "outputs": "/data/a", "data": {"a": DataSource("host", "/x")}}, {})


def test_pinned_data_are_what_the_folder_held(top, tmp_path):
    pinned = pin({"a": DataSource("folder", str(top)), "h": DataSource("host", "/nfs")}, tmp_path)
    assert pinned["h"] == DataSource("host", "/nfs")
    assert pinned["a"].digest.startswith("sha256:")
    assert pinned["a"].size_bytes > 3_000_000
    assert caches.known()[pinned["a"].digest].source == str(top)
    assert Pins(tmp_path).as_pinned(pinned["a"]).digest == pinned["a"].digest
    (top / "new").touch()
    assert Pins(tmp_path).as_pinned(pinned["a"]) is None
    with pytest.raises(BadInput):
        pin({"a": DataSource("folder", str(top / "gone"))}, tmp_path)


@pytest.fixture
def ended(top, tmp_path, monkeypatch):
    """A job whose outputs are the folder `top`."""
    job = SimpleNamespace(id="j-00000001", outputs=top, state=SimpleNamespace(ended=True))
    job.record = lambda: job
    monkeypatch.setattr(pinning, "JobStore", lambda _: SimpleNamespace(find=lambda _: job))
    return job


def test_outputs_of_a_job_that_has_ended(ended, tmp_path):
    pinned = pin({"a": DataSource("job", "my-job:outputs/sub")}, tmp_path)["a"]
    assert pinned.path == "j-00000001:outputs/sub"
    assert pinned.digest != pin({"a": DataSource("job", "my-job:outputs")}, tmp_path)["a"].digest
    ended.state.ended = False
    with pytest.raises(BadInput, match="has not ended"):
        pin({"a": DataSource("job", "my-job:outputs")}, tmp_path)


@pytest.mark.parametrize("below", ["big", "none", "dangling"])
def test_outputs_that_are_no_folder(ended, tmp_path, below):
    with pytest.raises(BadInput, match="have no folder with this path"):
        pin({"a": DataSource("job", f"my-job:outputs/{below}")}, tmp_path)


def test_a_link_of_the_job_s_program_leads_nowhere_else(ended, top, tmp_path):
    (tmp_path / "private").mkdir()
    (top / "out").symlink_to(tmp_path / "private")
    with pytest.raises(BadInput, match="leads to a place outside"):
        pin({"a": DataSource("job", "my-job:outputs/out")}, tmp_path)


def test_outputs_that_are_a_link_lead_nowhere_else(ended, top, tmp_path):
    """The job's owner can put one there, and whoever takes the outputs as data would send hosts their own files."""
    (tmp_path / "outputs").symlink_to(top)
    ended.outputs = tmp_path / "outputs"
    for path in ("my-job:outputs", "my-job:outputs/sub"):
        with pytest.raises(BadInput, match="leads to a place outside"):
            pin({"a": DataSource("job", path)}, tmp_path)


def test_containers_read_data_and_cannot_write_them():
    account = HostAccount("1", "1", "u", "/home/u/.gpurun", "h", "10.0.0.1")
    data = {"a": DataSource("folder", "/x", f"sha256:{'1' * 64}", 1), "b": DataSource("host", '/nfs/"x",y')}
    spec = replace(spec_with({}), data=data)
    flags = [mount.argv()[1] for mount in mounts("j-00000001", 1, spec, account) if mount.target.startswith("/data")]
    assert flags == [
        f"type=bind,source=/home/u/.gpurun/data/{'1' * 64}/tree,target=/data/a,readonly",
        'type=bind,"source=/nfs/""x"",y",target=/data/b,readonly',
    ]
    assert spec.data_digests == spec.wants.data_digests == (f"sha256:{'1' * 64}",)
    assert Path(account.data_folder(None)).name == "tree"
