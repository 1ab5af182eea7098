"""What people do to files: inventories under many names, and every way to damage, remove, link and repair a file."""

from __future__ import annotations

import os
import random
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

HEAD = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 2, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
"""
POOLS = "pools: {p: {reservation: 2, limit: 4}, q: {reservation: 0, limit: 6}}\n"
PLAIN = HEAD + "racks: {r1: {hosts: {m1: {}, m2: {}}}, r2: {hosts: {m3: {}, m4: {}}}, r3: {hosts: {m5: {}}}}\n" + POOLS
TEXTS = {
    "cluster/inventory.yaml": PLAIN,
    "cluster/clone.yaml": PLAIN,
    "cluster/renamed.yaml": HEAD
    + "racks: {z: {hosts: {x3: {address: M3}, x1: {address: M1}}}, y: {hosts: {x2: {address: m2, gpus: 2}}}}\n",
    "cluster/part.yaml": HEAD + "racks: {r1: {hosts: {m2: {}, m4: {}, m5: {}}}}\n",
    "cluster/twice.yaml": HEAD + "racks: {r1: {hosts: {m1: {}, y1: {address: m1}, m5: {}}}}\n",
    "cluster/address.yaml": HEAD + "racks: {r1: {hosts: {m1: {address: 10.0.0.1}, m2: {address: 10.0.0.2}, m3: {}}}}\n",
}
TWICE = "cluster/twice.yaml"
"""It names a machine twice, so gpurun refuses it, until somebody edits it."""

SPELLINGS = (
    "cluster/inventory.yaml", "cluster/../cluster/inventory.yaml", "cluster/link.yaml", "linked/inventory.yaml",
    "cluster/clone.yaml", "cluster/renamed.yaml", "cluster/part.yaml", "cluster/twice.yaml", "cluster/address.yaml",
)  # fmt: skip
ODD = (b"", b"{", b"\0" * 200, b"[" * 3000, b"\xff\xfe{}", b'{"job": 1}', b"null")
EDITS = {
    "conflict": lambda text: "<<<<<<< HEAD\n" + text + "=======\n" + text + ">>>>>>> theirs\n",
    "no m2": lambda text: text.replace("m2: {}", "m9: {}"),
    "m2 moves": lambda text: text.replace("m2: {}", "m2: {address: m4}"),
    "m4 by address": lambda text: text.replace("m4: {}", "m4: {address: 10.0.0.2}"),
    "m1 and m3 swap": lambda text: text.replace("m1: {}", "m1: {address: m3}").replace("m3: {}", "m3: {address: m1}"),
    "other names": lambda text: re.sub(r"m(\d): {}", r"n\1: {address: m\1}", text),
    "shifted": lambda text: re.sub(r"m(\d): {}", lambda one: f"m{one[1]}: {{address: m{int(one[1]) % 5 + 1}}}", text),
    "fewer GPUs": lambda text: text.replace("gpus: 2, fabric", "gpus: 1, fabric"),
    "more GPUs": lambda text: text.replace("gpus: 2, fabric", "gpus: 3, fabric"),
    "other racks": lambda text: text.replace("r1:", "rr:"),
    "no pools": lambda text: text.replace(POOLS, ""),
    "none": lambda text: text,
    "empty": lambda text: "",
}  # fmt: skip


def make_inventories(root: Path) -> Path:
    """Every inventory, under every name."""
    folder = root / "cluster"
    folder.mkdir(mode=0o755)
    (root / "linked").symlink_to(folder)
    reset_inventories(root)
    return folder


def reset_inventories(root: Path) -> None:
    """Make every inventory what it was in the beginning."""
    for name, text in TEXTS.items():
        path = root / name
        if path.is_symlink() or not path.is_file() or path.read_text() != text:
            remove(path)
            replace(path, text.encode())
    link = root / "cluster" / "link.yaml"
    remove(link)
    link.symlink_to("inventory.yaml")


def mend_inventories(root: Path) -> None:
    """Make every inventory one that gpurun accepts, with all hosts that a gang may have been granted."""
    reset_inventories(root)
    replace(root / TWICE, EDITS["m1 and m3 swap"](TEXTS[TWICE]).encode())


def edit_inventory(root: Path, dice: random.Random) -> str:
    """One thing that an editor or git does to an inventory; in words."""
    name = dice.choice([*TEXTS, *["cluster/inventory.yaml"] * 4])
    path, link = root / name, root / "cluster" / "link.yaml"
    match dice.randrange(10):
        case 0:
            remove(path)
            return f"{name} is deleted"
        case 1:
            other = root / dice.choice(
                [one for one in TEXTS if one != TWICE]
            )  # `mend_inventories` keeps its hosts only
            if path.exists() and other != path:
                path.replace(other)
            return f"{name} is renamed to {other.name}"
        case 2:
            remove(link)
            link.symlink_to(os.path.relpath(path, link.parent))
            return f"link.yaml leads to {name}"
        case 3:
            remove(path)
            path.symlink_to(dice.choice(["inventory.yaml", path.name, "nowhere"]))
            return f"{name} is now a link to {path.readlink()}"
        case _:
            what = dice.choice([*EDITS, *["m1 and m3 swap", "shifted"] * 3])
            replace(path, EDITS[what](TEXTS[name]).encode())
            return f"{name}: {what}"


@dataclass
class Damage:
    """A file that is not what gpurun wrote.

    Attributes:
        before: its content; None if there was no file.
        after: its content; None if it is gone or something else.
    """

    path: Path
    before: bytes | None
    after: bytes | None
    how: str
    uid: int = 0

    def repair(self) -> bool:
        """Put back what was there, if nothing else has been put there since; True if so."""
        if content(self.path) != self.after or not self.path.parent.is_dir():
            return False
        remove(self.path)
        if self.before is not None:
            replace(self.path, self.before)
            with suppress(PermissionError):
                os.chown(self.path, self.uid, -1)
        return True


def damage(path: Path, dice: random.Random) -> Damage:
    """Do something to a file, as its owner."""
    before = content(path)
    how = dice.choice(("torn", "odd in place", "odd", "removed", "dangling link", "link to itself", "a folder"))
    if how in ("torn", "odd in place") and not os.access(path, os.W_OK, effective_ids=True):
        how = "odd"
    match how:
        case "torn" if before:
            path.write_bytes(before[: dice.randrange(len(before))])
        case "odd in place" if before is not None:
            path.write_bytes(dice.choice(ODD))
        case "removed":
            remove(path)
        case "dangling link" | "link to itself":
            remove(path)
            path.symlink_to("nowhere" if how == "dangling link" else path.name)
        case "a folder":
            remove(path)
            path.mkdir()
        case _:
            remove(path)
            replace(path, dice.choice(ODD))
    return Damage(path, before, content(path), how)


def content(path: Path) -> bytes | None:
    """A regular file's bytes."""
    with suppress(OSError):
        if path.is_file() and not path.is_symlink():
            return path.read_bytes()
    return None


def replace(path: Path, data: bytes) -> None:
    """A new file in the place of the old one, as editors write."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(data)
    draft.chmod(0o644)
    draft.replace(path)


def remove(path: Path) -> None:
    """Whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Opened(NamedTuple):
    """An open descriptor. Its number alone may be another file's by now."""

    descriptor: int
    inode: int


def opened(descriptor: int) -> Opened:
    return Opened(descriptor, os.fstat(descriptor).st_ino)


def descriptors_below(root: Path) -> set[Opened]:
    """Open descriptors of files below a folder."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{root}/"):  # noqa: PTH115 (deleted files too)
                found.add(opened(int(name)))
    return found
