"""A recipe's ``python`` section as a value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from gpurun.errors import BadInput
from gpurun.jobs.disagreement import Disagreement
from gpurun.jobs.spec import Environment

_WEB = re.compile(r"https?://[^\s\x00-\x1f]+\Z")
_WITH_PASSWORD = re.compile(r"[a-z+]+://[^/]*@", re.IGNORECASE)


def environment_of(keys: Mapping[str, str], folder: Path) -> Environment:
    """Return the environment that `PythonKeys` describe, with paths relative to `folder` made absolute.

    Raises:
        BadInput: there is not exactly one source of packages, or a URL has a password.
    """
    kinds: list[Literal["requirements", "lock", "project"]] = ["requirements", "lock", "project"]
    named = [kind for kind in kinds if kind in keys]
    if len(named) != 1:
        raise BadInput(
            f"python must name one source of packages, but names {' and '.join(named) or 'none'}",
            hint=f"give exactly one of the keys {', '.join(kinds)}",
        )
    index = keys.get("index")
    if index is not None and _WITH_PASSWORD.match(index):
        hint = "put the password into a netrc file, and write the file's path into the recipe: `python: {secret: FILE}`"
        raise Disagreement("python: the index has a password in its URL", "python", "index", hint=hint)
    if index is not None and not _WEB.match(index):
        index = str(folder / index)
    secret = str(folder / keys["secret"]) if "secret" in keys else None
    return Environment(named[0], str(folder / keys[named[0]]), index, secret)
