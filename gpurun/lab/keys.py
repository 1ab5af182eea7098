"""Keys of a lab: one for the people on the head, one for each host. They are kept for as long as the disks."""

from __future__ import annotations

from pathlib import Path

from gpurun.lab.commands import run


def make_key(path: Path, comment: str) -> str:
    """Make an ed25519 key pair at `path` and ``PATH.pub`` unless there is one; returns the public line.

    A key is moved into place whole: a half-written one would be taken for the real one next time.
    """
    public = path.with_name(f"{path.name}.pub")
    if not (path.exists() and public.exists()):
        draft = path.with_name(f".{path.name}.draft")
        draft.unlink(missing_ok=True)
        draft_public = draft.with_name(f"{draft.name}.pub")
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(draft)])
        draft.rename(path)
        draft_public.rename(public)
    return public.read_text().strip()
