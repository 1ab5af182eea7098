"""Words and options of other tools, and those typed wrong: what of gpurun each means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches

from gpurun.jobs.recipe import FOREIGN
from gpurun.jobs.recipe_keys import SETTINGS

TABLE: Mapping[str, Mapping[str, str]] = {
    "gpurun": {
        **dict.fromkeys(("run", "launch", "sbatch", "srun", "start", "train", "job", "create", "apply"), "submit"),
        **dict.fromkeys(("ps", "jobs", "squeue", "qstat", "list", "ls", "get", "describe", "info"), "status"),
        **dict.fromkeys(("stop", "kill", "scancel", "qdel", "delete", "del", "rm", "abort", "end"), "cancel"),
        **dict.fromkeys(("sinfo", "nodes", "hosts", "pbsnodes", "machines", "gpus"), "inventory list"),
        **dict.fromkeys(("sacct", "past"), "history"), **dict.fromkeys(("log", "tail", "cat"), "logs"),
        **dict.fromkeys(("attach", "watch"), "follow"), **dict.fromkeys(("shell", "bash", "login"), "ssh"),
        **{word: f"inventory {word}" for word in (
            "add", "set", "label", "probe", "trust", "connect", "import", "export", "cordon", "uncordon", "drain",
        )},
        "best": "sweep best", "check": "doctor", "copy": "outputs", "cp": "outputs", "download": "outputs",
        "resubmit": "rerun", "restart": "rerun", "ui": "web", "dashboard": "web", "usage": "report",
        "help": "--help", "completion": "--install-completion", "upgrade": "version", "docs": "man",
    },
    "gpurun inventory": {
        "ls": "list", "hosts": "list", "nodes": "list", "get": "show", "describe": "show", "info": "show",
        "check": "validate", "lint": "validate", "update": "set", "rm": "remove", "delete": "remove", "del": "remove",
        "revert": "undo", "resume": "uncordon", "init": "import", "new": "import",
    },
    "gpurun sweep": {"list": "status", "ls": "status", "show": "status", "kill": "stop", "cancel": "stop"},
    "gpurun scale": {"ls": "list", "status": "show"},
    "gpurun data": {"ls": "list", "add": "stage", "copy": "stage", "rm": "evict", "delete": "evict", "remove": "evict"},
    "gpurun lab": {"start": "up", "create": "up", "list": "status", "ls": "status", "stop": "down", "delete": "down"},
}  # fmt: skip
"""For each group of commands: a word of another tool → what to type behind the group's name."""
_OTHERS = {
    "--gpus": "-G -N", "--pool": "-p -A", "--time-limit": "-t", "--cpus": "-c", "--name": "-J", "--host": "-w",
    "--avoid": "-x", "--generation": "-C", "--workdir": "-D", "--mount": "-v", "--tail": "--lines",
    "--inventory": "--cluster --infra --config --hostfile", "--dry-run": "--dryrun --test-only --plan",
    "--state": "--states --status -t", "--user": "--me --users -u", "--mine": "--me --user -u",
    "--since": "--starttime --start-time -S", "--until": "--endtime --end-time -E",
    "--rank": "--node --replica --container -c", "--watch": "--iterate",
}  # fmt: skip


def _options() -> dict[str, str]:
    of_keys = {
        SETTINGS[key].names[-1]: " ".join(f"--{word.replace('_', '-')} --{word}" for word in words.split())
        for key, words in FOREIGN.items()
        if key in SETTINGS and SETTINGS[key].flag is not None
    }
    return {option: f"{of_keys.get(option, '')} {_OTHERS.get(option, '')}" for option in {**of_keys, **_OTHERS}}


OPTIONS: Mapping[str, str] = _options()
"""An option of gpurun → options of Slurm, SkyPilot, dstack, Ray, Docker and others with its meaning."""
HOSTS = ("--nodes", "-N", "--num-nodes", "--nnodes")
AGREES = ("--yes", "--purge", "--all", "--discard")
"""Options that a word which is only a little like them never means."""
REMOVES = ("cancel", "prune", "stop", "remove", "evict", "down", "crash", "cut", "drain")
"""Commands that end or remove something. A word that is only a little like one of them means no such command."""
_NEAR, _VERY_NEAR = 0.6, 0.75


def meant(group: str, word: str, commands: Sequence[str]) -> str | None:
    """Return the command line that a word means in a group, such as ``gpurun status``; None if none is near."""
    if (known := TABLE.get(group, {}).get(word.lower())) is not None:
        return f"{group} {known}"
    if not re.fullmatch(r"[A-Za-z][A-Za-z_-]{1,30}", word):
        return None
    for near in get_close_matches(word.lower(), commands, n=len(commands), cutoff=_NEAR):
        if near not in REMOVES or _is_slip(word.lower(), near):
            return f"{group} {near}"
    return None


def meant_option(word: str, options: Sequence[str]) -> str | None:
    """Return the option of a command that a wrong one means; None if none is near.

    Args:
        options: all options of the command.
    """
    known = [option for option, words in OPTIONS.items() if word in words.split()]
    names = [each[2:] for each in options if each.startswith("--") and each not in AGREES]
    near = [] if known else get_close_matches(word.lstrip("-"), names, n=1, cutoff=_NEAR)
    return next((option for option in (*known, *(f"--{name}" for name in near)) if option in options), None)


def _is_slip(word: str, command: str) -> bool:
    return word[0] == command[0] and SequenceMatcher(None, word, command).ratio() >= _VERY_NEAR
