"""Each check finds its fault, names the right host, and is silent on a healthy one."""

import dataclasses

import pytest
from faulty_hosts import (
    GPU_FAULTS,
    HOST_FAULTS,
    NAMES,
    ROCE,
    TCP,
    found_of,
    healthy,
    inventory,
    replaced,
    with_gpu,
    with_nic,
    with_port,
)  # fmt: skip

from gpurun.doctor.findings import Finding, Severity, merged, unhealthy
from gpurun.doctor.survey import Survey, diagnose, judge, unreachable
from gpurun.errors import AuthenticationFailed, HostKeyMismatch, HostNotReady, HostUnreachable
from gpurun.facts import DockerFacts, Gid, GpuProcess, Limits


def test_a_healthy_gang_has_no_finding():
    assert found_of(lambda found: found) == ()
    assert found_of(lambda found: found, fabric=TCP) == ()


@pytest.mark.parametrize(("check", "change"), [*GPU_FAULTS.items(), *HOST_FAULTS.items()])
def test_each_fault_is_found_on_its_host_and_nothing_else(check, change):
    (finding,) = found_of(change)
    assert (finding.check, finding.hosts) == (check, (NAMES[6],))
    assert finding.evidence
    assert finding.remedy
    assert finding.is_fault


@pytest.mark.parametrize(
    ("change", "severity"),
    [(replaced(clock_offset_s=-90.0), Severity.ERROR), (replaced(clock_offset_s=2.0), Severity.WARNING)],
)
def test_clock_severity(change, severity):
    assert found_of(change)[0].severity is severity


def test_a_wrong_clock_on_the_head_is_not_held_against_the_hosts():
    hardware = {name: dataclasses.replace(healthy(at), clock_offset_s=40.0) for at, name in enumerate(NAMES, 1)}
    assert diagnose(inventory(), Survey(hardware, {})) == ()


def test_an_offset_within_its_own_error_is_nothing():
    assert found_of(replaced(clock_offset_s=3.0, clock_error_s=2.5)) == ()


def test_several_faults_at_once_are_told_apart():
    hardware = {name: healthy(at) for at, name in enumerate(NAMES, 1)}
    for at, change in ((0, "mtu"), (1, "hca-port"), (2, "clock"), (3, "gpu-lost"), (4, "driver"), (5, "driver")):
        hardware[NAMES[at]] = {**HOST_FAULTS, **GPU_FAULTS}[change](hardware[NAMES[at]])
    found = diagnose(inventory(), Survey(hardware, {NAMES[9]: HostUnreachable("timed out", host=NAMES[9])}))
    assert {(one.check, one.hosts) for one in found} == {
        ("mtu", (NAMES[0],)),
        ("hca-port", (NAMES[1],)),
        ("clock", (NAMES[2],)),
        ("gpu-lost", (NAMES[3],)),
        ("driver", (NAMES[4], NAMES[5])),
        ("ssh", (NAMES[9],)),
    }
    assert unhealthy(found) == {*NAMES[:6], NAMES[9]}


def test_without_a_majority_both_sides_are_named():
    hardware = {NAMES[0]: healthy(1), NAMES[1]: with_nic(healthy(2), mtu=1500)}
    (finding,) = diagnose(inventory(), Survey(hardware, {}))
    assert finding.hosts == NAMES[:2]
    assert "9000" in finding.evidence
    assert "1500" in finding.evidence


def test_of_two_link_rates_the_slower_is_the_fault():
    hardware = {NAMES[0]: healthy(1), NAMES[1]: with_port(healthy(2), rate_gbit=10.0)}
    (finding,) = diagnose(inventory(), Survey(hardware, {}))
    assert finding.hosts == (NAMES[1],)


def test_different_gid_tables_are_only_a_note():
    moved = (Gid(5, "::ffff:10.0.0.7", "RoCE v2", "ens1f0"),)
    (finding,) = found_of(lambda found: with_port(found, gids=moved))
    assert (finding.check, finding.severity) == ("gid-table", Severity.NOTE)
    assert not unhealthy([finding])


def test_a_fixed_gid_index_that_is_wrong_on_one_host_is_an_error():
    fixed = dataclasses.replace(ROCE, gid_index=3)
    moved = (Gid(3, "::ffff:10.0.0.7", "IB/RoCE v1", "ens1f0"), Gid(5, "::ffff:10.0.0.7", "RoCE v2", "ens1f0"))
    (finding,) = found_of(lambda found: with_port(found, gids=moved), fabric=fixed)
    assert (finding.check, finding.severity, finding.hosts) == ("roce-gid", Severity.ERROR, (NAMES[6],))


def test_two_hosts_with_one_address():
    (finding,) = found_of(lambda found: with_nic(found, addresses=("10.0.0.3/24",)), fabric=TCP)[:1]
    assert (finding.check, finding.hosts) == ("address", (NAMES[2], NAMES[6]))


def engine(**changes):
    return lambda found: dataclasses.replace(found, docker=dataclasses.replace(found.docker, **changes))


def test_an_engine_that_cannot_give_locked_memory():
    (finding,) = found_of(engine(memlock_bytes=8 << 20, may_raise_limits=False))
    assert (finding.check, finding.severity) == ("memlock", Severity.ERROR)
    assert "8192 KiB" in finding.evidence
    assert found_of(engine(memlock_bytes=8 << 20, may_raise_limits=False), fabric=TCP) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"memlock_bytes": -1, "may_raise_limits": False},
        {"memlock_bytes": 8 << 20, "may_raise_limits": True},
        {"memlock_bytes": 8 << 20},
    ],
)
def test_an_engine_that_can(changes):
    assert found_of(engine(**changes)) == ()


def test_a_machine_where_nobody_may_raise_limits_is_only_noted():
    def change(found):
        limited = engine(memlock_bytes=8 << 20, may_raise_limits=False)(found)
        return dataclasses.replace(limited, limits=Limits(8 << 20, 1024, machine_may_raise=False))

    (finding,) = found_of(change)
    assert finding.severity is Severity.NOTE


def test_the_sessions_own_limit_does_not_matter():
    assert found_of(replaced(limits=Limits(8 << 20, 1024))) == ()


def test_a_gpurun_jobs_own_process_is_no_stranger():
    own = GpuProcess(7, 100, "root", "python3", "abc", job="j-1")
    assert found_of(lambda found: with_gpu(found, processes=(own,))) == ()


def test_the_inventorys_model_and_memory():
    found = found_of(lambda found: found, gpu_model="Tesla P40", gpu_memory_mib=24576)
    assert {one.check for one in found} == {"gpu-model", "gpu-memory"}
    assert found[0].hosts == NAMES  # folded into one finding


def test_a_tcp_fabric_asks_nothing_of_hcas():
    assert found_of(replaced(hcas=(), infiniband_nodes=(), peermem=""), fabric=TCP) == ()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (HostKeyMismatch("changed"), "gpurun inventory trust"),
        (AuthenticationFailed("refused"), "authorized_keys"),
        (HostNotReady("no python3"), "python3"),
        (HostUnreachable("timed out", hint="ask Bob"), "ask Bob"),
        (HostUnreachable("timed out"), "ssh h true"),
    ],
)
def test_unreachable_hosts_say_what_to_do(error, remedy):
    assert remedy in unreachable("h", error).remedy


def test_a_remedy_can_be_pasted_into_any_shell():
    """zsh refuses an unquoted ``gpu[1-2]``: no matches found."""
    found = [
        Finding("x", Severity.ERROR, (host,), "e", "gpurun inventory set {hosts} gpus=3") for host in ("gpu1", "gpu2")
    ]
    (finding,) = merged(found)
    assert finding.remedy == "gpurun inventory set 'gpu[1-2]' gpus=3"
    (finding,) = merged(found[:1])
    assert finding.remedy == "gpurun inventory set gpu1 gpus=3"


def test_merged_keeps_order_and_unites_hosts():
    found = found_of(lambda found: found, gpu_model="x")
    assert merged([*found, *found]) == found


def test_preflight_blocks_on_strangers_and_only_on_granted_gpus():
    used = with_gpu(healthy(1), processes=(GpuProcess(7, 100, "eve", "python3 'a b'"),))
    survey = Survey({NAMES[0]: used}, {})
    mine = judge(inventory(), survey, {NAMES[0]: (0,)})
    assert [(one.check, one.gpus) for one in mine.blocking] == [("gpu-stranger", {NAMES[0]: (0,)})]
    assert "eve" in mine.bad_hosts[NAMES[0]]
    assert judge(inventory(), survey, {NAMES[0]: (1,)}).blocking == ()


def test_preflight_lets_a_slow_link_pass_but_not_a_dead_one():
    slow = Survey({NAMES[0]: healthy(1), NAMES[1]: with_port(healthy(2), rate_gbit=10.0)}, {})
    grants = {NAMES[0]: (0,), NAMES[1]: (0,)}
    result = judge(inventory(), slow, grants)
    assert (result.blocking, [one.check for one in result.other]) == ((), ["link-rate"])
    dead = Survey({NAMES[0]: healthy(1), NAMES[1]: with_port(healthy(2), state="DOWN")}, {})
    assert list(judge(inventory(), dead, grants).bad_hosts) == [NAMES[1]]


def test_preflight_blocks_an_engine_with_its_own_network_only_in_gangs_of_several_hosts():
    engine = dataclasses.replace(healthy(1).docker, socket="/run/user/1000/docker.sock", has_own_network=True)
    survey = Survey({NAMES[0]: dataclasses.replace(healthy(1), docker=engine), NAMES[1]: healthy(2)}, {})
    grants = {NAMES[0]: (0,), NAMES[1]: (0,)}
    assert [one.check for one in judge(inventory(), survey, grants).blocking] == ["docker-network"]
    alone = Survey({NAMES[0]: survey.hardware[NAMES[0]]}, {})
    assert judge(inventory(), alone, {NAMES[0]: (0,)}).blocking == ()


SHARED = (
    "nfs nfs4 cifs smb3 lustre ceph fuse.sshfs 9p gpfs beegfs beegfs_nodev wekafs panfs pvfs2 orangefs quobyte "
    "fuse.quobyte juicefs fuse.juicefs fuse.daos cvfs cxfs fhgfs glusterfs vboxsf"
)


@pytest.mark.parametrize("kind", SHARED.split())
def test_preflight_blocks_a_folder_that_hosts_may_share(kind):
    shared = dataclasses.replace(healthy(1), folder="/home/train/.gpurun", folder_kind=kind)
    (finding,) = judge(inventory(), Survey({NAMES[0]: shared}, {}), {NAMES[0]: (0,)}).blocking
    assert finding.check == "shared-folder" and kind in finding.evidence and "folder=DIR" in finding.remedy
    own = dataclasses.replace(shared, folder_kind="xfs")
    assert judge(inventory(), Survey({NAMES[0]: own}, {}), {NAMES[0]: (0,)}).blocking == ()


def test_podman_is_named_with_what_to_do():
    podman = DockerFacts(problem="Podman answers at /var/run/docker.sock: gpurun needs Docker's own engine")
    (finding,) = found_of(lambda found: dataclasses.replace(found, docker=podman))
    assert finding.check == "docker" and "podman-docker" in finding.remedy


def test_preflight_names_a_granted_gpu_that_is_gone():
    gone = dataclasses.replace(healthy(1), gpus=healthy(1).gpus[:1])
    result = judge(inventory(), Survey({NAMES[0]: gone}, {}), {NAMES[0]: (0, 1)})
    assert [one.check for one in result.blocking] == ["gpu-missing"]
    assert judge(inventory(), Survey({NAMES[0]: gone}, {}), {NAMES[0]: (0,)}).blocking == ()


def test_hostile_text_from_a_host_stays_text():
    process = GpuProcess(1, None, "a'; rm -rf /", "\x1b[2J$(id) x", "", "")
    (finding,) = found_of(lambda found: with_gpu(found, processes=(process,)))
    assert "kill 1" in finding.remedy
    assert "rm -rf" not in finding.remedy


def test_addresses_that_are_none_break_nothing():
    found = found_of(
        lambda found: dataclasses.replace(with_port(found, gids=(Gid(3, "zz", "RoCE v2"),)), resolves_to=("\n",))
    )
    assert {one.check for one in found} == {"roce-gid", "own-name"}
