"""Which files of outputs TensorBoard gets to see: outputs come from hosts, and hosts may lie."""

from __future__ import annotations

import os
import shutil

import pytest

from gpurun.views.tensorboard import Shown, ShownRun, run_name


@pytest.fixture
def outputs(tmp_path):
    folder = tmp_path / "jobs" / "j-1" / "outputs"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def shown(tmp_path, outputs):
    view = tmp_path / "view"
    view.mkdir()
    return Shown(view, [ShownRun("one", outputs)])


def seen(shown):
    return sorted(str(path.relative_to(shown.folder)) for path in shown.folder.rglob("*") if not path.is_dir())


def test_event_files_are_shown_as_they_come_and_go(shown, outputs):
    assert shown.refresh() == 0
    (outputs / "train").mkdir()
    (outputs / "train" / "events.out.tfevents.1.host").write_bytes(b"one")
    (outputs / "model.ckpt").write_bytes(b"big")
    assert shown.refresh() == 1
    assert seen(shown) == ["one/train/events.out.tfevents.1.host"]
    (outputs / "train" / "new").write_bytes(b"one two")  # as a copy of outputs does
    (outputs / "train" / "new").replace(outputs / "train" / "events.out.tfevents.1.host")
    assert shown.refresh() == 1
    assert (shown.folder / "one/train/events.out.tfevents.1.host").read_bytes() == b"one two"
    shutil.rmtree(outputs)  # the job was pruned
    assert shown.refresh() == 0
    assert seen(shown) == []


def test_no_link_is_followed_and_nothing_but_a_file_is_shown(shown, outputs, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "events.out.tfevents.1").write_bytes(b"of another job")
    (outputs / "linked").symlink_to(secret)
    (outputs / "tfevents.link").symlink_to(secret / "events.out.tfevents.1")
    (outputs / "tfevents.folder").mkdir()
    os.mkfifo(outputs / "tfevents.pipe")
    (outputs / "projector_config.pbtxt").write_text('metadata_path: "/etc/passwd"')
    assert shown.refresh() == 0
    assert seen(shown) == []


def test_a_file_that_becomes_a_link_is_shown_no_more(shown, outputs, tmp_path):
    file = outputs / "tfevents.1"
    file.write_bytes(b"mine")
    assert shown.refresh() == 1
    file.unlink()
    (tmp_path / "other").write_bytes(b"not mine")
    file.symlink_to(tmp_path / "other")
    assert shown.refresh() == 0
    assert seen(shown) == []


def test_a_file_may_become_a_folder_and_a_folder_a_file(shown, outputs):
    changing = outputs / "tfevents.x"
    changing.write_bytes(b"x")
    assert shown.refresh() == 1
    changing.unlink()
    changing.mkdir()
    (changing / "tfevents.y").write_bytes(b"y")
    assert shown.refresh() == 1
    assert seen(shown) == ["one/tfevents.x/tfevents.y"]
    shutil.rmtree(changing)
    changing.write_bytes(b"z")
    assert shown.refresh() == 1  # its folder is still in the way, which harms nobody


def test_names_of_any_bytes_and_folders_without_rights_harm_nobody(shown, outputs):
    (outputs / "sub").mkdir()
    (outputs / "sub" / os.fsdecode(b"tfevents.\xff\n'")).write_bytes(b"x")
    (outputs / "sub").chmod(0)
    assert shown.refresh() in (0, 1)  # root sees it, others do not
    (outputs / "sub").chmod(0o700)
    assert shown.refresh() == 1


def test_traces_are_found_by_their_names(shown, outputs):
    for name in ("horovod-timeline.json", "host_1.pt.trace.json", "x.pt.trace.json.gz", "config.json", "trace.txt"):
        (outputs / name).write_text("{}")
    shown.refresh()
    assert sorted(trace.name for trace in shown.traces) == [
        "one/horovod-timeline.json", "one/host_1.pt.trace.json", "one/x.pt.trace.json.gz"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name"),
    [("lr=0.1,n=2", "lr=0.1,n=2"), ("../../etc", "__.._etc"), ("a/b\n\x1b[2J", "a_b___2J"), ("", "_"),
     (".hidden", "_hidden"), ("ü" * 300, "ü" * 100)],
)  # fmt: skip
def test_a_run_is_called_so_that_it_is_one_plain_folder(text, name):
    assert run_name(text) == name
