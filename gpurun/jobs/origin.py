"""Where a job comes from: what a person needs later to know which code and which gpurun it was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """The head and the workdir at a job's submission.

    Attributes:
        gpurun, python: versions.
        head: the machine's name.
        commit: of the workdir's Git repository; "" = it is in none.
        diff: what the workdir had changed since, as ``git diff --binary`` says it; what is too long is left out.
        untracked: files of the workdir that the repository does not know.
    """

    gpurun: str = ""
    python: str = ""
    head: str = ""
    commit: str = ""
    diff: str = ""
    untracked: int = 0
