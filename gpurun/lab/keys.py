"""Keys of a lab: one for the users on the head, and one for each host. They live as long as the disks."""

from __future__ import annotations

from pathlib import Path

from gpurun.lab.commands import run


def make_key(path: Path, comment: str) -> str:
    """Create an ed25519 key pair at `path` and ``PATH.pub`` unless it exists. Returns the public key line.

    The key is created elsewhere and then renamed, so that no later call takes half a key for a complete one.
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
