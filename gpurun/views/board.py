"""TensorBoard in this process. Only this module imports it."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gpurun.errors import BadInput
from gpurun.views.tensorboard import Guard, Shown

warnings.filterwarnings("ignore", module="tensorboard")
from tensorboard import default, program  # noqa: E402  it prints warnings during its import

RELOAD_S = 5


@dataclass(frozen=True)
class Board:
    """A running TensorBoard.

    Attributes:
        port: on 127.0.0.1.
    """

    guard: Guard
    port: int


def serve(shown: Shown, token: str, *, port: int | None, title: str) -> Board:
    """Start to serve on 127.0.0.1, in threads that end with the process.

    Args:
        port: None = 6006 or, if that is taken, the next free port.

    Raises:
        BadInput: the port is taken.
    """
    guards: list[Guard] = []

    class Guarded(program.WerkzeugServer):  # type: ignore[misc]  # TensorBoard has no types
        def __init__(self, wsgi_app: Any, flags: Any) -> None:
            guard = Guard(wsgi_app, shown, token)
            super().__init__(guard, flags)
            guards.append(guard)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    board = program.TensorBoard(default.get_plugins(), server_class=program.with_port_scanning(Guarded))
    flags = {
        "logdir": str(shown.folder), "host": "127.0.0.1", "window_title": title, "reload_interval": RELOAD_S,
        "reload_multifile": True,  # several ranks may write into one folder
        "load_fast": "false",  # the other loader keeps files open, and copies of outputs replace them
    } | ({} if port is None else {"port": port})  # fmt: skip
    board.configure(**flags)
    try:
        url = board.launch()
    except program.TensorBoardServerException as error:
        raise BadInput(error.msg, hint="leave out --port: gpurun then finds a free port") from error
    return Board(guards[-1], urlsplit(url).port or 0)
