"""Words that the shell completes: jobs, hosts, pools and their like as they are now.

A completion never fails: if gpurun cannot read a file, it offers no words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpurun.inventory.model import Inventory
    from gpurun.jobs.record import JobRecord
    from gpurun.jobs.spec import JobSpec

MOST_JOBS = 100
ENGINES = ("auto", "mpi", "horovod")
"""What `gpurun bench` measures allreduce with."""


def _quietly(find: Callable[[str], Iterable[str]]) -> Callable[[str], list[str]]:
    @wraps(find)
    def words(incomplete: str) -> list[str]:
        try:
            return [word for word in find(incomplete) if word.startswith(incomplete) and word.isprintable()]
        except Exception:  # noqa: BLE001 - an error message would appear in the command line that a person types
            return []

    return words


@_quietly
def jobs(incomplete: str) -> Iterable[str]:
    """Complete ids and names of jobs that have not ended, and of the jobs that ended last."""
    from gpurun.jobs.store import JobStore
    from gpurun.state.paths import home

    store = JobStore(home(os.environ))
    ids = [*store.live_ids(), *store.recently_ended(MOST_JOBS)][:MOST_JOBS]
    names = () if incomplete.startswith("j-") else [record.name for record in store.records(lambda _: None, ids=ids)]
    return ["@last", *ids, *dict.fromkeys(names)]


@_quietly
def job_names(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete names of jobs."""
    return dict.fromkeys(record.name for record in _records())


def nothing(incomplete: str) -> list[str]:  # noqa: ARG001 - as the others
    """Complete names that are new."""
    return []


@_quietly
def states(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete states of jobs."""
    from gpurun.jobs.record import State

    return State.__members__


@_quietly
def ended_states(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete states of jobs that have ended."""
    from gpurun.jobs.record import ENDED

    return sorted(state.value for state in ENDED)


@_quietly
def sweeps(incomplete: str) -> Iterable[str]:
    """Complete ids and names of sweeps."""
    from gpurun.errors import StateError
    from gpurun.state.paths import home
    from gpurun.studies.store import SweepStore

    store = SweepStore(home(os.environ))
    ids, names = store.ids()[:MOST_JOBS], list[str]()
    for each in () if incomplete.startswith("s-") else ids:
        with suppress(StateError):  # damaged
            names.append(store.get(each).plan().name)
    return [*ids, *dict.fromkeys(names)]


def jobs_and_sweeps(incomplete: str) -> list[str]:
    """Complete jobs and sweeps."""
    return [*jobs(incomplete), *sweeps(incomplete)]


@_quietly
def campaigns(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete names of campaigns."""
    from gpurun.state.paths import home
    from gpurun.studies.campaigns import CampaignStore

    return CampaignStore(home(os.environ)).ids()


@_quietly
def users(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete users who have jobs."""
    return dict.fromkeys(record.owner for record in _records())


@_quietly
def images(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete images of recent jobs: to ask Docker takes longer than a person waits for a word."""
    return dict.fromkeys(spec.image for spec in _specs())


@_quietly
def projects(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete projects of recent jobs."""
    return dict.fromkeys(spec.project for spec in _specs() if spec.project)


@_quietly
def data_sources(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete where data may come from, besides a folder of the head."""
    return ["host:/", *(f"{record.id}:outputs/" for record in _records() if record.state.ended)]


def stageable(incomplete: str) -> list[str]:
    """Complete what can be copied to hosts, besides a folder of the head: outputs of jobs."""
    return [word for word in data_sources(incomplete) if not word.startswith("host:")]


@_quietly
def data_sets(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete data sets of recent jobs, as `gpurun data list` names them: to ask the hosts takes too long."""
    found = dict.fromkeys(source.digest for spec in _specs() for source in spec.data.values() if source.digest)
    return [digest.removeprefix("sha256:")[:12] for digest in found]


@_quietly
def notify_targets(incomplete: str) -> Iterable[str]:
    """Complete events and the kind of a target: ``start,failure=mail:``."""
    from gpurun.jobs.spec import EVENTS, KINDS

    events, equals, _ = incomplete.rpartition("=")
    if equals:
        return [f"{events}={kind}:" for kind in KINDS]
    before, comma, _ = incomplete.rpartition(",")
    return [*(f"{kind}:" for kind in KINDS), *(f"{before}{comma}{event}=" for event in EVENTS)]


@_quietly
def stop_rules(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete rules by which a sweep stops trials."""
    return ["asha", "asha:min=1,factor=3", "none"]


@_quietly
def bench_engines(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete what `bench` measures allreduce with."""
    return ENGINES


@_quietly
def groups(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete groups of this machine."""
    import grp

    return (group.gr_name for group in grp.getgrall())


@_quietly
def launchers(incomplete: str) -> Iterable[str]:
    """Complete the last launcher of a list."""
    from gpurun.launch.launchers import NAMES

    before, comma, _ = incomplete.rpartition(",")
    return [before + comma + name for name in NAMES]


@_quietly
def hosts(incomplete: str) -> Iterable[str]:
    """Complete the last host or group of a host set, such as ``gpu-r1-01,@ra``."""
    found = _inventory().hosts
    before, comma, _ = incomplete.rpartition(",")
    groups = [
        f"@{group}:{name}"
        for group in ("rack", "generation", "fabric")
        for name in dict.fromkeys(getattr(host, group) for host in found)
    ]
    labels = dict.fromkeys(f"@label:{name}={value}" for host in found for name, value in host.labels.items())
    states = ["@all", "@cordoned", "@draining", "@lost"]
    return (before + comma + word for word in (*(host.name for host in found), *groups, *labels, *states))


@_quietly
def generations(incomplete: str) -> Iterable[str]:
    """Complete the last generation of a list."""
    before, comma, _ = incomplete.rpartition(",")
    return [before + comma + name for name in _inventory().generations]


@_quietly
def gpu_models(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete models of GPUs."""
    return dict.fromkeys(host.gpu_model for host in _inventory().hosts if host.gpu_model)


@_quietly
def pools(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete names of pools."""
    return (pool.name for pool in _inventory().pools)


@_quietly
def settings(incomplete: str) -> Iterable[str]:
    """Complete what `inventory add` and `inventory set` take: a key, or a value that another host has."""
    from gpurun.inventory.fields import HOST

    key, equals, _ = incomplete.partition("=")
    if not equals:
        labels = [f"labels.{name}=" for host in _inventory().hosts for name in host.labels] if "." in key else []
        return [*(f"{name}=" for name in HOST if name != "labels"), "rack=", *dict.fromkeys(labels)]
    values = (getattr(host, key) for host in _inventory().hosts)
    return dict.fromkeys(f"{key}={value}" for value in values if isinstance(value, str | int))


@_quietly
def labels(incomplete: str) -> Iterable[str]:
    """Complete what `inventory label` takes: a label to set, one to remove, or a value that another host has."""
    name, equals, _ = incomplete.partition("=")
    found = dict.fromkeys(pair for host in _inventory().hosts for pair in host.labels.items())
    if equals:
        return [f"{each}={value}" for each, value in found if each == name]
    return dict.fromkeys(word for each, _ in found for word in (f"{each}=", f"{each}-"))


@_quietly
def inventory_changes(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete numbers of recorded changes of the inventory."""
    from gpurun.cli.stores import inventory_file, located

    return (str(change.number) for change in inventory_file(located(None)).history.changes())


@_quietly
def fabrics(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete kinds of fabrics."""
    from gpurun.inventory.fields import FABRIC

    return FABRIC["kind"].options


@_quietly
def lab_fabrics(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete kinds of a lab's fabric."""
    from gpurun.lab.spec import FABRICS

    return FABRICS


@_quietly
def imports(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete formats that `inventory import` reads."""
    from gpurun.inventory.imports.source import FORMATS

    return FORMATS


@_quietly
def exports(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete formats that `inventory export` writes."""
    from gpurun.inventory.exports import EXPORTS

    return EXPORTS


@_quietly
def policies(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete policies of `simulate`."""
    from gpurun.simulate.replay import POLICIES

    return POLICIES


@_quietly
def labs(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete labs that are up."""
    from gpurun.lab.spec import labs as found

    return (record.spec.name for record in found())


@_quietly
def lab_hosts(incomplete: str) -> Iterable[str]:  # noqa: ARG001 - the caller filters
    """Complete hosts of all labs that are up."""
    from gpurun.lab.spec import hosts_of
    from gpurun.lab.spec import labs as found

    return dict.fromkeys(host.name for record in found() for host in hosts_of(record.spec, record.subnet))


def lab_ports(incomplete: str) -> list[str]:
    """Complete hosts of labs, and the head."""
    return [*lab_hosts(incomplete), *(["head"] if "head".startswith(incomplete) else [])]


def _inventory() -> Inventory:
    from gpurun.inventory.read import find_inventory, load_inventory

    return load_inventory(find_inventory(None, os.environ))


def _records() -> list[JobRecord]:
    """Return the jobs that have not ended, and those that ended last."""
    from gpurun.jobs.store import JobStore
    from gpurun.state.paths import home

    store = JobStore(home(os.environ))
    ids = [*store.live_ids(), *store.recently_ended(MOST_JOBS)][:MOST_JOBS]
    return list(store.records(lambda _: None, ids=ids))


def _specs() -> Iterator[JobSpec]:
    from gpurun.errors import StateError
    from gpurun.jobs.store import JobStore
    from gpurun.state.paths import home

    store = JobStore(home(os.environ))
    for record in _records():
        with suppress(StateError):  # damaged
            yield store.get(record.id).spec()


BY_VALUE: Mapping[str, Callable[[str], list[str]]] = {
    "JOB": jobs, "[JOB…]": jobs, "HOST": hosts, "HOSTS": hosts, "POOL": pools, "PROJECT": projects, "IMAGE": images,
    "history STATE": ended_states, "prune STATE": ended_states, "history USER": users, "report USER": users,
    "LAUNCHER,LAUNCHER…": launchers, "KEY=VALUE…": settings, "rack=RACK KEY=VALUE…": settings, "POLICY": policies,
    "export FORMAT": exports, "import FORMAT": imports, "NAME=VALUE…": labels, "diff [NUMBER]": inventory_changes,
    "import KIND": fabrics, "up KIND": lab_fabrics, "stage SOURCE": stageable, "[DIGEST]…": data_sets,
    "TARGET": notify_targets, "RULE": stop_rules, "ENGINE": bench_engines, "GROUP": groups, "history TEXT": job_names,
    "CAMPAIGN": campaigns, "add HOSTS": nothing,
}  # fmt: skip
"""What completes a value that its declaration says nothing of: by the word for it in the help, with or without a
command. Of other commands, a USER is an account on hosts."""
