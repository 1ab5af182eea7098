"""What agents of simulated hosts answer to a supervisor that explains an end, and to one that carries it out."""

from __future__ import annotations

from typing import Any

from gang_events import EventfulWorld
from gang_ranks import Rank
from gang_world import GRACE_S, Host

from gpurun.remote.agent import RemoteOpFailed, Reply

NOTHING_LEFT = {"containers": [], "processes": [], "folder": False, "users": [], "gpu_problem": "", "claims": []}


class AgentOf:
    """The agent of one host. Each operation is a method: ``gang.signal`` is `gang_signal`."""

    def __init__(self, world: EventfulWorld, host: Host) -> None:
        self._world = world
        self._there = host
        self.host = host.name

    def call(self, op: str, **arguments: Any) -> Reply:
        return Reply(getattr(self, op.replace(".", "_"))(**arguments))

    def gang_engine(self, **_: object) -> object:
        there = self._there
        if not there.has_engine:
            return {"state": "gone", "up_s": None, "why": "no such socket"}
        if there.engine_began_s is not None:
            return {"state": "restarted", "up_s": self._world.now_s - there.engine_began_s, "why": "another pid"}
        return {"state": "same", "up_s": None, "why": ""}

    # -- the ladder -----------------------------------------------------------------------------------------

    def gang_signal(self, **_: object) -> object:
        """SIGTERM to the ranks. Most of them save and end; some do not heed it."""
        world = self._world
        for rank in self._ranks():
            if not rank.is_told and world.chance("heeds the notice", rank.number) < 0.9:
                rank.is_told = True
                delay_s = world.between(0.05, GRACE_S, "grace", rank.number)
                world.in_attempt(delay_s, world.end_rank, rank, 143, "notice")
        return [rank.number for rank in self._ranks()]

    def ranks_count(self, **_: object) -> object:
        return len(self._ranks())

    def docker_request(self, **_: object) -> object:
        """The container is killed."""
        self._need_engine()
        self._world.end_box(self._there, 137, "fence")
        return {}

    def _ranks(self) -> list[Rank]:
        return [rank for rank in self._world.of(self.host) if rank.ended_s is None]

    # -- outputs and the fence ------------------------------------------------------------------------------

    def outputs_list(self, **_: object) -> object:
        return self._there.has_outputs

    def outputs_remove(self, **_: object) -> object:
        self._world.remove_outputs(self._there)
        return {}

    def gang_fence(self, *, outputs: bool, **_: object) -> object:
        """Real fences try for long; this one says at once what is left."""
        world = self._world
        self._need_engine()
        if world.fence_errors:
            world.fence_errors -= 1
            world.note(f"{self.host} cannot be fenced for now")
            return NOTHING_LEFT | {"containers": ["c0ffee"]}
        world.end_box(self._there, 137, "fence")
        self._there.is_claimed = False
        if outputs:
            world.remove_outputs(self._there)
        return NOTHING_LEFT

    def _need_engine(self) -> None:
        if not self._there.has_engine:
            raise RemoteOpFailed("no such socket", kind="no-docker", host=self.host)
