"""Look at the copies of data sets on hosts, and damage them."""

import hashlib
import os
import stat
from pathlib import Path

from gpurun.node.transfer.spool import CHUNK


def folder_of(hosts, name):
    return hosts.home(name) / ".gpurun/data"


def shape(top: Path):
    found = {}
    for folder, names, files in os.walk(top):
        for name in [*names, *files]:
            path = Path(folder) / name
            content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[os.fsencode(path.relative_to(top))] = (stat.S_IFMT(path.lstat().st_mode), content)
    return found


def damage(hosts, host, digest):
    there = folder_of(hosts, host) / digest[7:] / "tree/big"
    there.chmod(0o600)
    there.write_bytes(os.urandom(3_000_000))


def describe_as_it_is(hosts, host, tree):
    """Let the hashes of a host's copy fit the copy as it is now."""
    folder = folder_of(hosts, host) / tree.digest[7:] / "tree"
    whole = b"".join((folder / entry.path).read_bytes() for entry in tree.entries if entry.kind == "file")
    hashes = b"".join(hashlib.sha256(whole[at : at + CHUNK]).digest() for at in range(0, len(whole), CHUNK))
    (folder.parent / "hashes").write_bytes(hashes)
