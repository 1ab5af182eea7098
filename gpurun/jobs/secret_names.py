"""Recognise variables of a job's environment that look like secrets. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(r"(TOKEN|(\A|_)KEY|_PAT|(\A|_)CREDENTIALS?)\Z|PASSWORD|PASSWD|SECRET", re.IGNORECASE)


def visible_secrets(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables whose values look secret.

    Every user with access to Docker on a GPU host sees a container's environment in `docker inspect`. A name that ends
    with ``_FILE`` or ``_PATH`` only says where a secret is stored.
    """
    return tuple(sorted(name for name, value in env.items() if value and _SECRET.search(name) and not _is_place(name)))


def _is_place(name: str) -> bool:
    return name.upper().endswith(("_FILE", "_PATH", "_DIR"))
