"""What a hostile host puts in front of gpurun's agent. It runs in the agent's process, before the agent begins.

`/opt/lies/plan.json` is a list of {operation: lie}. Each job that this host has not seen before gets the next of them.
"""

import fcntl
import json
import os
import re

from gpurun.node.agent import frames, serve
from gpurun.node.agent.frames import OpReply

FOLDER = "/opt/lies/"
honest_find = serve.find_op
known = {}


def lies_for(params):
    found = re.search(r"'job': '(j-[0-9a-f]{8})'", repr(params))  # not an id in a list of other jobs
    job = found.group(1) if found else known.get("last")
    known["last"] = job
    if job is None or os.path.exists(FOLDER + "off"):
        return {}
    with open(FOLDER + "turns.json", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        turns = json.load(file)
        if job not in turns:
            turns[job] = len(turns)
            file.seek(0)
            json.dump(turns, file)
    with open(FOLDER + "plan.json") as file:
        plan = json.load(file)
    return plan[turns[job]] if turns[job] < len(plan) else {}


def find(op):
    def act(call, **params):
        lie = lies_for(params).get(op)
        return honest_find(op)(call, **params) if lie is None else globals()[lie](call, op, params)

    return act


def honest(call, op, params):
    return honest_find(op)(call, **params)


def rubbish(call, op, params):
    return {"kind": ["x"], "ranks": 7, "state": {}, "id": -1}


def stream_of_rubbish(call, op, params):
    while True:
        yield {"kind": "confession", "stream": 7}


def fails(call, op, params):
    raise OSError(5, "\x1b]0;owned\x07 it says what it likes\n" * 1000)


def hangs(call, op, params):
    call.wait(1e6)


def closes(call, op, params):
    os._exit(1)


def endless(call, op, params):
    """A reply in pieces that has no end; nobody's room is asked for."""
    while True:
        call.check()
        call._send({"t": "part", "id": call.id}, bytes(frames.PIECE))


def huge(call, op, params):
    return ["x" * (1 << 20)] * 15


def floods(call, op, params):
    """Ranks without end, each with a name of its own."""
    for number in range(1 << 40):
        yield {"kind": "start", "id": "0.%d.1" % number, "rank": 0, "age_s": 0.0}


def noise(call, op, params):
    call._send({"t": "out", "id": 424242, "v": "nobody asked"}, b"x" * 1000)
    call._send({"t": "done", "id": call.id + 1, "v": "nor for this"}, b"")
    return honest(call, op, params)


def no_frames(call, op, params):
    os.write(3, b"\xff" * 4096)
    for descriptor in range(3, 12):
        try:
            os.write(descriptor, b"\xff" * 4096)
        except OSError:
            pass
    return honest(call, op, params)


def others(call, op, params):
    """The end of every rank of the gang, and what they print."""
    for rank in range(1, 64):
        name = "%d.7.7" % rank
        yield {"kind": "start", "id": name, "rank": rank, "age_s": 1.0}
        yield OpReply({"kind": "output", "id": name, "rank": rank, "stream": "o", "end": 7}, b"forged\n")
        yield {"kind": "end", "id": name, "rank": rank, "code": 3, "age_s": 1.0}
    yield from honest(call, op, params)


def another(call, op, params):
    """An account that is somebody else's."""
    return dict(honest(call, op, params), user="root\n  ProxyCommand touch /tmp/owned", uid="0")


def same_name(call, op, params):
    return dict(honest(call, op, params), hostname="localhost")


def outside(call, op, params):
    for path in ("../../../owned", "/etc/owned", "a/../../b"):
        yield OpReply(None, frames.encode({"p": path, "k": "file", "m": 0o777, "t": 0, "s": 1, "i": [0, 1]}))
    return {"present": True}


def below_a_link(call, op, params):
    inner = {"p": "a/owned", "k": "file", "m": 0o777, "t": 0, "s": 1, "i": [0, 1]}
    entries = {"p": "a", "k": "link", "to": "/", "t": 0}, inner
    for entry in entries:
        yield OpReply(None, frames.encode(entry))
    return {"present": True}


def other_bytes(call, op, params):
    for item in honest(call, op, params):
        yield OpReply(None, bytes(reversed(bytes(item.payload))))
    return None


def far(call, op, params):
    """Progress of every rank, beyond all others."""
    told = {str(rank): {"progress": {"step": 1 << 60}} for rank in range(64)}
    return {"age_s": 0.0, "checkpoint_age_s": 0.0, "ranks": told}


def all_gone(call, op, params):
    return {"containers": [], "processes": [], "folder": False, "users": [], "gpu_problem": "", "claims": []}


serve.find_op = find
