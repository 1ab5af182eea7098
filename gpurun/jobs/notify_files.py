"""Resolve and check the files that a job's notifications name."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpurun.jobs.disagreement import Disagreement
from gpurun.jobs.mounted import mode_of
from gpurun.jobs.notify_wish import NotifyWish
from gpurun.jobs.spec import JobSpec


def notify_below(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the `notify` field of a spec, if given, with files relative to `folder`."""
    return {"notify": tuple(_below(wish, folder) for wish in given["notify"])} if "notify" in given else {}


def _below(wish: NotifyWish, folder: Path) -> NotifyWish:
    if not wish.is_file:
        return wish
    return replace(wish, target=str((folder / Path(wish.target).expanduser()).absolute()))


def check_notify(spec: JobSpec) -> None:
    """Raise Disagreement if a file with a URL is missing."""
    for wish in spec.notify:
        if wish.is_file and not stat.S_ISREG(mode_of(Path(wish.target))):
            hint = "put the URL into the file, and protect the file with chmod 600"
            raise Disagreement("notify: the file with the URL does not exist", "notify", where=wish.target, hint=hint)
