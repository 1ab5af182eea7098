"""Detect the format of a file, and find the files beside it."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpurun.documents.plain import shown
from gpurun.errors import BadInput
from gpurun.inventory.imports import again, ansible, lists, slurm
from gpurun.inventory.imports.draft import Draft
from gpurun.inventory.read import MAX_BYTES
from gpurun.inventory.read import read_inventory_bytes as read_bytes

FORMATS = ("ansible", "ssh-config", "slurm", "hostfile", "csv", "skypilot", "dstack", "etc-hosts")
_FILES = ("slurm.conf", "hosts", "hosts.yml", "hosts.yaml", "hosts.ini", "inventory", "inventory.yml", "inventory.yaml",
          "inventory.ini", "ssh_node_pools.yaml", ".dstack.yml", "config", "hostfile")  # fmt: skip
"""Names of inventory files in a folder."""
_ENDINGS = ("", ".yml", ".yaml", ".json")
_MOST_FILES, _MOST_FOLDERS = 1000, 10
_HOSTFILE_LINE = re.compile(r"\s*[A-Za-z0-9][\w.@-]*(:\d+)?(\s+[\w-]+=\S+|\s+\d+\s+\S+@\S+(\s+\S+)?)*\s*(#.*)?\Z")
_TORQUE_LINE = re.compile(r"\s*[A-Za-z0-9][\w.-]*\s(?:.*\s)?np=\d")
_SHOWN_NOTES, _LONGEST_NOTE = 2, 160
_SSH_LINE = re.compile(r"^\s*Host(\s+|\s*=\s*)\S", re.IGNORECASE | re.MULTILINE)
_SLURM_LINE = re.compile(r"^\s*(NodeName|SwitchName|ClusterName)\s*=", re.IGNORECASE | re.MULTILINE)


def read_source(path: Path, kind: str | None = None, meant: ansible.Meant = ansible.BY_NAME) -> Draft:
    """Return the draft of a file, or of the inventory file in a folder.

    Args:
        kind: one of FORMATS; default: detect it.
        meant: for Ansible: the groups that are racks, and the groups that contain the hosts.
    Raises BadInput: the file is unreadable, or has no known format.
    """
    file = file_of(path)
    data = read_bytes(file)
    if len(data) > MAX_BYTES:
        raise BadInput(f"the file is larger than {MAX_BYTES >> 20} MiB", where=str(file))
    if b"\0" in data:
        raise BadInput(
            f"the file is not text: line {data[: data.index(0)].count(10) + 1} has a NUL byte", where=str(file)
        )
    text = data.decode("utf-8-sig", "replace")
    kind = kind or detect(file, text)
    draft = Draft(str(file))
    _read_as(kind, data, text, draft, file, meant)
    if file != path and kind == "ansible" and (others := _others(path, file)):
        draft.leave(f"gpurun reads one file of a folder, and did not read {', '.join(others)}", str(path))
    draft.leave_out_sliced(str(file))
    draft.leave_out_twins(str(file))
    if not draft.values:
        raise BadInput(
            f"gpurun read the file as {kind} and found no host",
            where=str(file),
            hint=_short(draft.out or draft.left),
        )
    return draft


def file_of(path: Path) -> Path:
    """Return a file, or the file in a folder that lists hosts. Raises BadInput: the folder has none."""
    return _file_in(path) if path.is_dir() else path


def _file_in(folder: Path) -> Path:
    found = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if found is None:
        raise BadInput(
            "no file in the folder has the usual name of a host list", where=str(folder),
            hint=f"name the file; in a folder, gpurun looks only for {', '.join(_FILES)}",
        )  # fmt: skip
    return found


def _others(folder: Path, file: Path) -> list[str]:
    """Return the names of other files in a folder that Ansible would read as inventories."""
    names = [path.name for path in sorted(folder.iterdir()) if path.is_file() and path != file]
    return [name for name in names if name[0] != "." and Path(name).suffix in ("", ".ini", ".yml", ".yaml")][:5]


def _read_as(kind: str, data: bytes, text: str, draft: Draft, file: Path, meant: ansible.Meant) -> None:
    name = str(file)
    if kind == "ansible" and file.suffix in (".yml", ".yaml"):
        ansible.read_yaml(data, draft, name, _variable_files(file), meant)
    elif kind == "ansible":
        ansible.read_ini(text, draft, name, _variable_files(file), meant)
    elif kind == "ssh-config":
        lists.read_ssh_config(text, draft, str(file.absolute()), _included)
    elif kind == "slurm":
        slurm.read_slurm(text, draft, name, _text_beside(file))
    elif kind in ("skypilot", "dstack"):
        (again.read_skypilot if kind == "skypilot" else again.read_dstack)(data, draft, name)
    else:
        lines = {"hostfile": lists.read_hostfile, "etc-hosts": lists.read_etc_hosts, "csv": lists.read_table}
        lines[kind](text, draft, name)


def _short(notes: Sequence[str]) -> str | None:
    """Return the first notes as one line that a person can read."""
    shown_notes = [note if len(note) <= _LONGEST_NOTE else f"{note[:_LONGEST_NOTE]}…" for note in notes[:_SHOWN_NOTES]]
    more = len(notes) - len(shown_notes)
    return "; ".join([*shown_notes, *([f"and {more} more"] if more else [])]) or None


def detect(path: Path, text: str) -> str:
    """Return the format of a file, from its name and content. Raises BadInput if the format is unknown."""
    lines = [line for line in text.splitlines() if line.strip() and line.strip()[0] not in "#;"]
    if path.suffix in (".yml", ".yaml") and (pool := again.kind_of(text.encode(), str(path))):
        return pool
    if text.lstrip().startswith("{") and '"_meta"' in text:
        raise BadInput(
            "the file is JSON from an Ansible inventory script, but gpurun imports Ansible's YAML", where=str(path),
            hint=f"run `{ansible.AS_YAML}`, then import hosts.yml",
        )  # fmt: skip
    signs = {
        "csv": path.suffix in (".csv", ".tsv"),
        "ansible": path.suffix in (".yml", ".yaml", ".ini"),
        "slurm": path.name == "slurm.conf" or _SLURM_LINE.search(text),
        "ssh-config": _SSH_LINE.search(text),
    }
    weaker_signs = {
        "etc-hosts": bool(lines)
        and all(lists.is_one(line.split()[0]) and len(line.split()) > 1 for line in lines)
        and not any("=" in line for line in lines),
        "ansible": any(line.lstrip().startswith("[") or "ansible_" in line for line in lines),
        "hostfile": bool(lines) and (all(map(_HOSTFILE_LINE.match, lines)) or all(map(_TORQUE_LINE.match, lines))),
        "csv": bool(lines) and any(mark in lines[0] for mark in ",;\t"),
    }
    for kind, found in (*signs.items(), *weaker_signs.items()):
        if found:
            return kind
    odd = next((line for line in lines if not _HOSTFILE_LINE.match(line)), None)
    raise BadInput(
        "gpurun does not know the format of the file"
        + (f": one line is {shown(odd.strip())}" if odd else ": the file has no line with text"),
        where=str(path),
        hint=f"name the format with --from: {', '.join(FORMATS)}",
    )


def _variable_files(inventory: Path) -> ansible.VariableFiles:
    """Return a function that reads the variable files beside an inventory. Source: Ansible's ``find_vars_files``."""

    def read_all(name: str) -> Sequence[tuple[str, bytes]]:
        folder, _, entity = name.partition("/")
        if not entity.strip() or "/" in entity or entity in (".", ".."):
            return ()
        places = (inventory.parent / folder / (entity + ending) for ending in _ENDINGS)
        place = next((place for place in places if place.exists()), None)
        found = [] if place is None else [*_files_in(place, 0)] if place.is_dir() else [place]
        return [(str(path), read_bytes(path)) for path in found[:_MOST_FILES] if path.is_file()]

    return read_all


def _files_in(folder: Path, depth: int) -> Iterator[Path]:
    """Return the variable files in a folder and its subfolders, without hidden files, backups and links to folders."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name.endswith("~"):
            continue
        if path.is_dir() and not path.is_symlink() and depth < _MOST_FOLDERS:
            yield from _files_in(path, depth + 1)
        elif path.suffix in _ENDINGS and path.is_file():
            yield path


def _text_beside(file: Path) -> slurm.ReadBeside:
    def read_beside(name: str) -> str | None:
        path = file.parent / name
        return read_bytes(path).decode("utf-8", "replace") if path.is_file() else None

    return read_beside


def _included(patterns: str) -> Iterator[tuple[str, str]]:
    """Return the files of an ssh Include; relative names are below ``~/.ssh``, as in ssh_config(5)."""
    for pattern in patterns.replace('"', " ").split():
        whole = str(Path("~/.ssh").expanduser() / Path(pattern).expanduser())
        for name in sorted(glob.glob(whole)):  # noqa: PTH207  an absolute pattern
            if Path(name).is_file():
                yield name, read_bytes(Path(name)).decode("utf-8", "replace")
