"""Where a job comes from: what a person later needs to identify the code and the version of gpurun."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """The head and the workdir at a job's submission.

    Attributes:
        gpurun, python: versions.
        head: the machine's name.
        commit: the commit of the workdir's Git repository; "" = there is none.
        diff: uncommitted changes as ``git diff --binary`` prints them; left out if too long.
        untracked: untracked files of the workdir.
    """

    gpurun: str = ""
    python: str = ""
    head: str = ""
    commit: str = ""
    diff: str = ""
    untracked: int = 0
