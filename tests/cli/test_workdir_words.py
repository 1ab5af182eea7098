"""What `submit` and its dry run say of a workdir."""

from __future__ import annotations

import json
import os

import pytest

from gpurun.cli.dry_run import LARGE_BYTES, words
from gpurun.content.tree import MOST_COUNTED, MOST_KEPT, Copied, LeftOut, counted, look_at_folder, missed, scan
from gpurun.jobs.spec import given_again


@pytest.fixture
def work(tmp_path):
    """A folder as people have it, in a repository."""
    top = tmp_path / "work"
    (top / ".git").mkdir(parents=True)
    (top / ".gitignore").write_text("data/\n*.pt\n__pycache__\n.venv\n")
    for name in ("train.py", "data/a.csv", "data/b/c.csv", "runs/old.pt", "__pycache__/x.pyc", ".venv/bin/python"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    return top


def said(top):
    return words(str(top), *look_at_folder(top))


def test_what_ignore_rules_leave_out_is_named_with_its_size_but_nothing_that_no_rank_misses(work):
    (line,) = said(work)
    assert line.startswith("workdir: .gitignore leaves out data, runs/old.pt (3 files, 33 B). ")
    assert scan(work).left_out == ("data", "runs/old.pt")
    (work / "x.pt").touch()
    (work / "y.pt").touch()
    assert "data, x.pt, y.pt and 1 more (5 files" in said(work)[0]


def test_a_line_for_gitignore_and_a_data_set_are_named_that_give_ranks_what_is_left_out(work):
    assert said(work)[0].endswith(
        "add a line such as `!/data` at the end of .gitignore, or submit with --data NAME=data: ranks read /data/NAME"
    )
    (work / ".gitignore").write_text("*.bin\n*.pkl\n")  # nanoGPT's: all of one folder, or one file after the other
    for name in ("train.bin", "val.bin", "meta.pkl"):
        (work / "data/b" / name).touch()
    assert said(work)[0].endswith(
        " `!/data/b/*` at the end of .gitignore, or submit with --data NAME=data/b: ranks read /data/NAME"
    )
    (work / ".gitignore").write_text("*.bin\n*.pkl\n!/data/b/*\n")
    assert said(work) == ()
    assert given_again("a.bin", ("a.bin", "b.bin")) == ("a.bin", "!/a.bin")  # the top is no data set
    assert given_again("d/a.bin", ("d/a.bin", "e/b.bin")) == ("d/a.bin", "!/d/a.bin")


def test_links_that_lead_out_or_to_what_is_left_out_are_named(work, tmp_path):
    (tmp_path / "shared").mkdir()
    links = {
        "far": "../shared", "abs": "/opt/x", "cache": "data/b", "runs/up": "../../shared", "ok": "train.py",
        "runs/good": "../train.py", "here": ".",
    }  # fmt: skip
    for name, target in links.items():
        (work / name).symlink_to(target)
    line = said(work)[1]
    assert line.startswith("workdir: abs → /opt/x, cache → data/b, far → ../shared and 1 more point outside")
    for name in ("abs", "cache", "far"):
        (work / name).unlink()
    assert said(work)[1].startswith("workdir: runs/up → ../../shared points outside the copied files")


def test_a_large_folder_is_named_with_what_is_largest_in_it(work):
    with (work / "big.bin").open("wb") as file:
        file.truncate(LARGE_BYTES)
    line = said(work)[1]
    assert "in 3 files (big.bin 100.0 MiB, .gitignore" in line and "--data" in line
    assert words("/w", Copied({"a/b": LARGE_BYTES - 1}, {}), LeftOut()) == ()


def test_a_folder_without_surprises_says_nothing(tmp_path):
    (tmp_path / "train.py").touch()
    assert said(tmp_path) == ()


def test_a_folder_of_very_many_files_is_not_counted_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("gpurun.content.tree.MOST_COUNTED", 2)
    (tmp_path / "d").mkdir()
    for name in "abcd":
        (tmp_path / "d" / name).write_text("x")
    found = counted(tmp_path, ["d"])
    assert (found.files, found.is_all) == (2, False)
    assert "at least 2 files" in words("/w", Copied({}, {}), found)[0]
    assert len(missed(f"{n}.pt" for n in range(1000))) == MOST_KEPT and MOST_COUNTED > 1000


def test_names_of_any_bytes_are_told(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_bytes(b"*.pt\n")
    for name in (b"\xff.pt", b"\x1b\n.pt"):
        os.close(os.open(os.fsencode(tmp_path) + b"/" + name, os.O_CREAT))
    os.symlink(b"../\xff", os.fsencode(tmp_path) + b"/link")  # noqa: PTH211 (any bytes)
    os.symlink(b"../x", os.fsencode(tmp_path) + b"/\xfe")  # noqa: PTH211
    left, links = said(tmp_path)
    assert "1 file, 0 B" in left
    assert links.startswith("workdir: link → ../\ufffd points outside")
    assert "".join(scan(tmp_path).left_out).encode()


def test_a_dry_run_says_it_in_json_too(gpurun, tmp_path, monkeypatch, work):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(
        "version: 1\ndefaults: {user: t, generation: pascal, gpus: 4, fabric: tcp}\n"
        "fabrics: {tcp: {kind: tcp, interface: eth0}}\nracks: {r1: {hosts: {h1: {}}}}\n"
    )
    flags = ["-n", "1", "--image", "i:1", "--workdir", str(work), "--launcher", "tasks", "--dry-run"]
    code, out, err = gpurun("submit", "-i", str(inventory), *flags, "--json", "--", "true")
    assert (code, "leaves out data" in err) == (0, True)
    assert any("leaves out data" in text for text in json.loads(out)["said"])
