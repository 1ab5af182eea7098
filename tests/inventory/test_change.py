"""Changing the file: whole, in turn, recorded, and back again."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from waiting import LIMIT_S

from gpurun.documents.plain import DocumentError
from gpurun.errors import BadInput, StateError, StateUnavailable
from gpurun.inventory import change as history
from gpurun.inventory import change as write
from gpurun.inventory.change import BY_HAND, Author, Conflict, InventoryFile
from gpurun.inventory.edit import AddHosts, RemoveHosts, SetFields, apply, parse_labels, parse_settings
from gpurun.inventory.read import load_inventory
from gpurun.state import locks

TEXT = """\
version: 1  # ours
defaults: {generation: pascal, gpus: 4}
fabrics: {tcp: {kind: tcp, interface: eno1}}
racks:
  r1: {hosts: {"gpu-r1-[01-16]": {}}}  # row a
"""
ME = Author("me'; rm -rf /", "gpurun inventory set", 1_700_000_000.0)
MAC = 8
EDITS = 15


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "a 'folder' $x"
    folder.mkdir()
    file = folder / "inventory [1].yaml"
    file.write_text(TEXT)
    return file


@pytest.fixture
def file(path: Path, tmp_path: Path) -> InventoryFile:
    return InventoryFile(path, tmp_path / "state")


def set_(path: Path, hosts: str, *words: str):
    from gpurun.inventory.hostset import expand

    return lambda data: apply(data, path, SetFields(expand(hosts), parse_settings(words)))


def test_a_change_is_recorded_with_who_when_command_and_diff(file: InventoryFile, path: Path) -> None:
    change = file.commit(set_(path, "gpu-r1-07", "gpus=8"), ME)
    assert change is not None
    (kept,) = file.history.changes()
    assert kept == change
    assert (kept.who, kept.command, kept.when_s, kept.number) == (ME.who, ME.command, ME.when_s, 1)
    assert '+  r1: {hosts: {"gpu-r1-[01-06,08-16]": {}, "gpu-r1-07": {gpus: 8}}}  # row a' in kept.diff
    assert load_inventory(path).by_name["gpu-r1-07"].gpus == 8
    assert file.commit(set_(path, "gpu-r1-07", "gpus=8"), ME) is None
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


@pytest.mark.parametrize("mode", [0o640, 0o664, 0o600])
def test_its_history_is_as_open_as_the_file(file: InventoryFile, path: Path, mode: int) -> None:
    path.chmod(mode)
    group = next((group for group in os.getgroups() if group != os.getgid()), os.getgid() + (os.geteuid() == 0))
    os.chown(path, -1, group)
    before = os.umask(0o077)
    try:
        file.commit(set_(path, "gpu-r1-07", "gpus=8"), ME)
    finally:
        os.umask(before)
    kept = [found for found in file.history.folder.plain.rglob("*") if found.is_file()]
    assert len(kept) == 3
    assert {(stat.S_IMODE(found.stat().st_mode), found.stat().st_gid) for found in kept} == {(mode, group)}


def test_permissions_and_links_stay(file: InventoryFile, path: Path, tmp_path: Path) -> None:
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    InventoryFile(link, tmp_path / "state").commit(set_(path, "gpu-r1-07", "gpus=8"), ME)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert len(file.history.changes()) == 1


def test_undo_goes_back_step_by_step(file: InventoryFile, path: Path) -> None:
    texts = [path.read_bytes()]
    for gpus in (1, 2, 3):
        file.commit(set_(path, "gpu-r1-01", f"gpus={gpus}"), ME)
        texts.append(path.read_bytes())
    for text in reversed(texts[:-1]):
        target, preview = file.preview_undo(ME)
        assert preview.after == text
        undone = file.undo(ME, shown=preview)
        assert undone is not None
        assert undone.undoes == target.number
        assert path.read_bytes() == text
    with pytest.raises(BadInput, match="no change to undo"):
        file.undo(ME)
    file.commit(set_(path, "gpu-r1-01", "gpus=7"), ME)
    file.undo(ME)
    assert path.read_bytes() == texts[0]


def test_a_change_by_hand_is_noticed_and_can_be_undone(file: InventoryFile, path: Path) -> None:
    file.commit(set_(path, "gpu-r1-01", "gpus=1"), ME)
    ours = path.read_bytes()
    path.write_bytes(ours + b"# by hand\n")
    file.commit(set_(path, "gpu-r1-02", "gpus=2"), ME)
    assert [c.command for c in file.history.changes()] == [ME.command, BY_HAND, ME.command]
    file.undo(ME)
    assert path.read_bytes() == ours + b"# by hand\n"
    file.undo(ME)
    assert path.read_bytes() == ours


def test_what_is_not_valid_is_not_written(file: InventoryFile, path: Path) -> None:
    with pytest.raises(DocumentError):
        file.commit(lambda data: data.replace(b"gpus: 4", b"gpus: four"), ME)
    assert path.read_text() == TEXT
    assert file.history.changes() == ()


def test_what_was_agreed_to_is_what_is_done(file: InventoryFile, path: Path) -> None:
    rewrite = set_(path, "@all".replace("@all", "gpu-r1-[01-16]"), "gpus=8")
    shown = file.preview(rewrite)
    path.write_text(TEXT.replace("# row a", "# row b"))
    with pytest.raises(Conflict) as conflict:
        file.commit(rewrite, ME, shown=shown)
    assert "# row b" in conflict.value.preview.diff
    path.write_text("# moved down a line\n" + TEXT)
    assert file.commit(rewrite, ME, shown=shown) is not None


class Holding:
    def __init__(self, jobs: Mapping[str, Sequence[str]]) -> None:
        self.jobs = jobs

    def frozen(self):
        return nullcontext(self.jobs)


@pytest.mark.parametrize("words", ["gpus=8", "user=eve", "address=10.0.0.9", "port=22", "generation=volta"])
def test_what_a_lease_relies_on_stays(path: Path, tmp_path: Path, words: str) -> None:
    file = InventoryFile(path, tmp_path / "state", Holding({"gpu-r1-07:22": ["j-12345678"], "elsewhere:22": ["j-0"]}))
    with pytest.raises(StateError) as refused:
        file.commit(set_(path, "gpu-r1-07", words), ME)
    assert "j-12345678" in str(refused.value)
    assert "gpu-r1-07" in str(refused.value)
    assert "drain" in (refused.value.hint or "")
    assert path.read_text() == TEXT
    assert file.commit(set_(path, "gpu-r1-06", words), ME) is not None


def test_a_leased_host_is_not_removed_but_may_be_labelled(path: Path, tmp_path: Path) -> None:
    file = InventoryFile(path, tmp_path / "state", Holding({"gpu-r1-07:22": ["j-12345678"]}))
    with pytest.raises(StateError, match="cannot remove the host now: j-12345678 runs on the host"):
        file.commit(lambda data: apply(data, path, RemoveHosts(("gpu-r1-07",))), ME)
    with pytest.raises(StateError, match="cannot change the fabric now"):
        file.commit(lambda data: data.replace(b"eno1", b"eno2"), ME)
    label = SetFields(("gpu-r1-07",), tuple(parse_labels(["team=vision"])))
    assert file.commit(lambda data: apply(data, path, label), ME) is not None


CRASHES = ("write", "fsync", "fchmod", "fchown", "rename", "replace", "unlink", "mkdir")
"""Calls that change what is on the disk: a crash before any other one leaves what the one before it has left."""


def _crash_at(step: int, path: Path, state: Path) -> None:
    """Makes a change, and dies without a word at the given system call."""
    left = step

    def crashing(real):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(9)
            return real(*args, **kwargs)

        return call

    for name in CRASHES:
        setattr(os, name, crashing(getattr(os, name)))
    InventoryFile(path, state).commit(set_(path, "gpu-r1-07", "gpus=8"), ME)
    os._exit(0)


def test_a_crash_at_every_step_leaves_the_old_file_or_the_new(path: Path, tmp_path: Path) -> None:
    old = TEXT.encode()
    new = apply(old, path, SetFields(("gpu-r1-07",), parse_settings(["gpus=8"])))
    context = multiprocessing.get_context("fork")
    seen = set()
    for step in range(1, 2000):
        path.write_bytes(old)
        state = tmp_path / f"state{step}"
        process = context.Process(target=_crash_at, args=(step, path, state))
        process.start()
        process.join()
        seen.add(path.read_bytes())
        assert path.read_bytes() in (old, new), step
        done = path.read_bytes() == new
        file = InventoryFile(path, state)
        file.commit(set_(path, "gpu-r1-01", "gpus=2"), ME)
        assert len(file.history.changes()) == (2 if done else 1), step
        file.undo(ME)
        assert path.read_bytes() == (new if done else old), step
        assert [p.name for p in path.parent.iterdir()] == [path.name], step
        if process.exitcode == 0:
            break
    else:
        pytest.fail("never got through")
    assert step > 20
    assert seen == {old, new}


def _edit(path: Path, state: Path, host: str, begin) -> None:
    file = InventoryFile(path, state)
    begin.wait(LIMIT_S)
    for count in range(EDITS):
        file.commit(lambda data: apply(data, path, AddHosts((f"{host}-{count}",), host)), ME)  # noqa: B023


def test_two_processes_lose_no_change(path: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begin, state = context.Barrier(2), tmp_path / "state"
    workers = [context.Process(target=_edit, args=(path, state, name, begin)) for name in ("one", "two")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    names = {host.name for host in load_inventory(path).hosts}
    assert {f"{host}-{count}" for host in ("one", "two") for count in range(EDITS)} <= names
    assert len(InventoryFile(path, state).history.changes()) == 2 * EDITS


def test_the_record_has_an_end(file: InventoryFile, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_CHANGES", 3)
    for gpus in range(1, 8):
        file.commit(set_(path, "gpu-r1-01", f"gpus={gpus}"), ME)
    numbers = [change.number for change in file.history.changes()]
    assert numbers == [4, 5, 6, 7]
    assert len((file.history.folder / "texts").names()) == 5
    file.undo(ME)
    assert load_inventory(path).by_name["gpu-r1-01"].gpus == 6


def test_a_damaged_record_is_named(file: InventoryFile, path: Path) -> None:
    file.commit(set_(path, "gpu-r1-01", "gpus=1"), ME)
    record = file.history.folder / "000001.json"
    record.plain.write_text("{")
    with pytest.raises(StateError, match=r"000001\.json"):
        file.undo(ME)
    with pytest.raises(StateError, match=r"000001\.json") as refused:
        file.commit(set_(path, "gpu-r1-01", "gpus=2"), ME)
    run_hint(refused.value)
    assert file.commit(set_(path, "gpu-r1-01", "gpus=2"), ME) is not None


def test_a_damaged_text_is_named(file: InventoryFile, path: Path) -> None:
    change = file.commit(set_(path, "gpu-r1-01", "gpus=1"), ME)
    assert change is not None
    (file.history.folder / "texts" / change.after).plain.write_text("?")
    path.write_text(path.read_text() + "# by hand\n")
    with pytest.raises(StateError, match="text of the inventory is damaged") as refused:
        file.commit(set_(path, "gpu-r1-01", "gpus=2"), ME)
    run_hint(refused.value)
    assert file.commit(set_(path, "gpu-r1-01", "gpus=2"), ME) is not None


def run_hint(error: StateError) -> None:
    """Run the command between backticks."""
    subprocess.run((error.hint or "").split("`")[1], shell=True, check=True)


def test_a_history_that_cannot_be_kept_keeps_the_file(path: Path) -> None:
    with pytest.raises(StateError, match="cannot be made"):
        InventoryFile(path, Path("/proc/nowhere")).commit(set_(path, "gpu-r1-01", "gpus=1"), ME)
    assert path.read_text() == TEXT


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput), write.locked(tmp_path / "none" / "inventory.yaml"):
        pass


def test_who_keeps_the_lock_of_the_file_is_named_then_given_up_on(
    file: InventoryFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody who may write in the folder can hold it."""
    monkeypatch.setattr(write, "PATIENCE_S", 0.1)
    with locks.alone(path.with_name(f".{path.name}.gpurun.lock")):
        with pytest.raises(StateUnavailable, match="the file is locked by") as refused:
            file.commit(set_(path, "gpu-r1-01", "gpus=1"), ME)
        assert "fuser" in (refused.value.hint or "")
    assert file.commit(set_(path, "gpu-r1-01", "gpus=1"), ME) is not None
