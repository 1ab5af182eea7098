"""What of the head the container of a build sees: packages run code there, with the network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from gpurun.content.build import build_container
from gpurun.content.environment import PipSettings


def mounted(**settings: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return pip's settings in the container, and the local mounts: path on the head -> path in the container."""
    plan: Any = SimpleNamespace(
        settings=PipSettings({key.replace("_", "-"): (value,) for key, value in settings.items()}),
        wheels=None, secret=None,
    )  # fmt: skip
    made = build_container(plan, Path("/work"), None)
    assert not any(writable for source, _, writable in made.mounts if not source.startswith("/work/"))
    there = {source: target for source, target, _ in made.mounts if "/local/" in target}
    return {key: words[0] for key, words in made.settings.values.items()}, there


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in (".ssh", "simple", "my index", "wheels"):
        (tmp_path / name).mkdir()
    (tmp_path / ".ssh/id").write_text("secret")
    return tmp_path


@pytest.mark.parametrize("name", ["simple", "simple/", "my index"])
@pytest.mark.parametrize("key", ["index_url", "extra_index_url"])
def test_an_index_in_the_home_folder_shows_nothing_else_of_it(home: Path, name: str, key: str) -> None:
    values, there = mounted(**{key: f"file://{home}/{quote(name)}"})
    assert list(there) == [str(home / name)]
    (target,) = there.values()
    assert values[key.replace("_", "-")] == f"file://{quote(target)}"


def test_the_files_of_a_mirror_are_where_its_index_looks_for_them(home: Path) -> None:
    """bandersnatch: `web/simple/NAME/index.html` links to `../../packages/...`."""
    (home / "packages").mkdir()
    values, there = mounted(index_url=f"file://{home}/simple", extra_index_url=f"file://{home}/my%20index")
    assert sorted(there) == sorted(str(home / name) for name in ("simple", "packages", "my index"))
    assert len({target.rpartition("/")[0] for target in there.values()}) == 1, "beside each other"
    assert values["index-url"].endswith("/simple") and there[str(home / "packages")].endswith("/packages")


def test_the_files_of_an_index_may_lie_in_a_folder_of_another_name_if_its_pages_say_so(home: Path) -> None:
    """A folder `files` beside an index may be a person's. pip failed: "No such file or directory: …/files/x.whl"."""
    (home / "files").mkdir()
    (home / "simple/x").mkdir()
    for page in (None, "<a href='https://a.example/files/x.whl'>", "<a href=../../.ssh/id>", "../../filesystem/x"):
        if page is not None:
            (home / "simple/x/index.html").write_text(page)
        assert list(mounted(index_url=f"file://{home}/simple")[1]) == [str(home / "simple")]
    (home / "simple/x/index.html").write_bytes(b'<a href="../../files/x-1-py3-none-any.whl#sha256=0">\xff')
    _, there = mounted(index_url=f"file://{home}/simple")
    assert [target.rpartition("/")[2] for target in there.values()] == ["simple", "files"]
    (home / "simple/x/index.html").unlink()
    (home / "simple/x/index.html").mkdir()
    assert list(mounted(index_url=f"file://{home}/simple")[1]) == [str(home / "simple")]


def test_a_folder_of_wheels_and_a_certificate_are_mounted_as_themselves(home: Path) -> None:
    (home / "ca.pem").touch()
    values, there = mounted(find_links=f"{home}/wheels", cert=f"{home}/ca.pem", index_url="file:///no/such/simple")
    assert sorted(there) == [f"{home}/ca.pem", f"{home}/wheels"]
    assert (values["find-links"], values["cert"]) == (there[f"{home}/wheels"], there[f"{home}/ca.pem"])
    assert values["index-url"] == "file:///no/such/simple"
