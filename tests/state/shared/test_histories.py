"""Histories of inventories in a shared state directory."""

from __future__ import annotations

import os
import stat

import pytest
from shared_code import INVENTORY, needs_root
from users import BOB, GROUP

from gpurun.errors import BadInput, StateError

pytestmark = needs_root


def test_folders_of_histories_stay_open(state, tmp_path):
    from gpurun.inventory.change import Author, History

    history = History(state, tmp_path / "inventory.yaml")
    history.record(None, b"x", Author("a", "c", 1.0))
    for folder in (history.folder, history.folder / "texts"):
        assert folder.stat().st_mode & stat.S_IWGRP
    assert history.folder.stat().st_gid == GROUP


@pytest.mark.parametrize("what", ["folder", "texts"])
def test_a_link_in_the_place_of_a_history_leads_root_nowhere(state, bob, tmp_path, what):
    from gpurun.inventory.change import Author, History

    victim = tmp_path / "victim"
    victim.mkdir()
    history = History(state, tmp_path / "inventory.yaml")
    planted = history.folder if what == "folder" else history.folder / "texts"
    link = "import os, sys; os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True); os.symlink(*sys.argv[2:0:-1])"
    assert bob.run("-c", link, str(planted), str(victim)).stderr == ""
    with pytest.raises(StateError, match="link"):
        history.record(b"before", b"after", Author("a", "c", 1.0))
    assert list(victim.iterdir()) == []


def test_a_change_that_a_member_invents_is_not_undone(state, alice, bob, tmp_path):
    """Bob may not change the inventory; what he writes into its history would be the text that `undo` brings back."""
    from gpurun.inventory.change import Author, InventoryFile

    path = tmp_path / "inventory.yaml"
    invent = f"""
import os
from pathlib import Path
from gpurun.inventory.change import Author, History
os.umask(0o007)
history = History(Path(os.environ["GPURUN_HOME"]), Path({str(path)!r}))
history.record(b"evil", Path({str(path)!r}).read_bytes(), Author("root", "gpurun inventory set", 1.0))
print(len(history.changes()))
"""
    assert bob.python(invent) == "0", "his own gpurun does not count it either"
    file = InventoryFile(path, state)
    with pytest.raises(BadInput, match="no change to undo"):
        file.undo(Author("root", "c", 2.0))
    assert path.read_text() == INVENTORY
    os.chown(path, BOB, BOB)  # it is his inventory now, and so is its history
    assert [change.who for change in file.history.changes()] == ["root"]


@pytest.mark.parametrize("name", ["²²².json", "000002.json", "999999999.json", f"{'9' * 240}.json"], ids=range(4))
@pytest.mark.parametrize("thing", ["file", "folder", "link"])
def test_what_a_member_puts_among_records_stops_no_change(state, tmp_path, name, thing):
    from gpurun.inventory.change import Author, History

    history, author = History(state, tmp_path / "inventory.yaml"), Author("root", "c", 1.0)
    history.record(b"", b"x", author)
    planted = history.folder.plain / name
    {"file": planted.touch, "folder": planted.mkdir, "link": lambda: planted.symlink_to("/etc/passwd")}[thing]()
    os.chown(planted, BOB, BOB, follow_symlinks=False)
    history.record(b"x", b"y", author)
    history.record(b"y", b"z", author)
    assert [history.text(change.after) for change in history.changes()] == [b"x", b"y", b"z"]


def test_a_history_is_read_and_carried_on_by_whoever_may_change_the_file(state, alice, bob, tmp_path):
    folder = tmp_path / "shared inventory"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2770)
    path = folder / "inventory.yaml"
    path.write_text(INVENTORY)
    path.chmod(0o660)
    change = f"""
import os
from pathlib import Path
from gpurun.inventory.change import InventoryFile
from gpurun.inventory.change import Author
file = InventoryFile(Path({str(path)!r}), Path(os.environ["GPURUN_HOME"]))
file.commit(lambda data: data + b"# more\\n", Author("x", "c", 1.0))
print(len(file.history.changes()), file.history.text(file.history.changes()[0].before).decode().count("more"))
"""
    assert alice.python(change, umask=0o077) == "1 0"
    assert bob.python(change, umask=0o077) == "2 0"
    assert alice.python(change, umask=0o077) == "3 0"
