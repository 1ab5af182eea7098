"""Which findings make a host out, whatever its jobs need; and what the folder's and the site's checks find."""

import dataclasses
import shlex

import pytest
from faulty_hosts import GPU_FAULTS, HOST_FAULTS, NAMES, TCP, found_of, healthy, inventory, replaced, with_nic

from gpurun.doctor.findings import MOST_LETTERS, Severity
from gpurun.doctor.survey import BLOCKING, CHECKS, Survey, judge, soundness
from gpurun.errors import AuthenticationFailed, HostKeyMismatch, HostNotReady, HostUnreachable
from gpurun.facts import DockerFacts, Gpu
from gpurun.inventory.model import Host

MIB = 1 << 20
DENIED = replaced(
    folder="/home/train/.gpurun", folder_fault="denied",
    folder_problem="train may not write to /home/train/.gpurun: it belongs to root and has mode 0755",
)  # fmt: skip
READ_ONLY = replaced(
    folder="/home/train/.gpurun", folder_fault="read-only",
    folder_problem="/home/train/.gpurun/jobs is on a read-only file system (ext4 on /home: ro,relatime,ro)",
)  # fmt: skip
FOLDER_FAULTS = {
    "denied": DENIED,
    "read-only": READ_ONLY,
    "hangs": replaced(folder="/x", folder_fault="hangs", folder_problem="the file system of /x does not answer"),
    "no bytes": replaced(folder="/x", folder_free_bytes=3 * MIB, folder_free_inodes=10**6),
    "no inodes": replaced(folder="/x", folder_free_bytes=10**12, folder_free_inodes=3),
    "a kind of a newer node": replaced(folder="/x", folder_fault="eaten", folder_problem="a {curly} {word}"),
}
FULL_ENGINE = replaced(docker=dataclasses.replace(healthy().docker, free_bytes=5 * MIB))


def out_of(change, fabric=TCP, **host):
    """What makes the seventh host out, by the name of the check; "" if nothing does."""
    hardware = {name: healthy(at) for at, name in enumerate(NAMES[:8], 1)}
    hardware[NAMES[6]] = change(hardware[NAMES[6]])
    found = soundness(inventory(fabric, **host), Survey(hardware, {}))
    assert set(found) <= {NAMES[6]}
    return found[NAMES[6]].check if found else ""


def test_healthy_hosts_are_sound():
    assert out_of(lambda found: found) == ""
    assert soundness(inventory(), Survey({}, {})) == {}


@pytest.mark.parametrize("check", ["gpu-driver", "gpu-count", "gpu-lost", "docker", "docker-gpu"])
def test_what_every_job_would_meet_makes_a_host_out(check):
    assert out_of({**GPU_FAULTS, **HOST_FAULTS}[check]) == check


@pytest.mark.parametrize(
    "check", sorted({*GPU_FAULTS, *HOST_FAULTS} - {"gpu-driver", "gpu-count", "gpu-lost", "docker", "docker-gpu"})
)
def test_what_some_jobs_do_not_need_makes_none_out(check):
    """Also what is only slow, or someone's process on a GPU, or a clock that is off by seconds."""
    assert out_of({**GPU_FAULTS, **HOST_FAULTS}[check]) == ""


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_a_folder_where_no_job_can_write_makes_a_host_out(fault):
    assert out_of(FOLDER_FAULTS[fault]) == "folder"
    (finding,) = found_of(FOLDER_FAULTS[fault], fabric=TCP)
    assert (finding.check, finding.severity, finding.hosts) == ("folder", Severity.ERROR, (NAMES[6],))
    assert finding.remedy


def test_the_folders_problem_is_told_with_what_to_do():
    (finding,) = found_of(DENIED, fabric=TCP, user="train")
    assert "belongs to root" in finding.evidence and "chown -R train /home/train/.gpurun" in finding.remedy
    (finding,) = found_of(READ_ONLY, fabric=TCP)
    assert "ro,relatime" in finding.evidence and "remount" in finding.remedy
    (finding,) = found_of(FOLDER_FAULTS["no inodes"], fabric=TCP)
    assert "3 inodes" in finding.evidence


def test_a_file_system_that_counts_no_inodes_is_not_full():
    assert out_of(replaced(folder="/x", folder_free_bytes=10**12, folder_free_inodes=None)) == ""


def test_an_engine_whose_disk_is_full_or_that_does_not_answer_makes_a_host_out():
    assert out_of(FULL_ENGINE) == "docker-space"
    late = "the Docker engine at /var/run/docker.sock does not answer within 10 s"
    assert out_of(replaced(docker=DockerFacts(problem=late))) == "docker"
    silent = replaced(docker=DockerFacts(), problems={"docker": "no answer within 15 s"})
    assert out_of(silent) == "docker"
    assert "journalctl" in next(one for one in found_of(silent, fabric=TCP) if one.check == "docker").remedy


def test_more_gpus_than_the_inventory_knows_make_no_host_out():
    more = replaced(gpus=tuple(Gpu(n, "Tesla P100-SXM2-16GB", "pascal", 16280) for n in range(4)))
    assert out_of(more) == ""
    (finding,) = found_of(more)
    assert (finding.check, finding.severity) == ("gpu-count", Severity.WARNING)


def test_a_host_without_gpus_needs_no_driver():
    host = Host(NAMES[0], "r1", "none", 0, "tcp")
    cluster = dataclasses.replace(inventory(TCP), hosts=(host,))
    bare = dataclasses.replace(healthy(1), gpus=(), gpu_problem="no NVIDIA driver: Driver Not Loaded")
    assert soundness(cluster, Survey({NAMES[0]: bare}, {})) == {}


@pytest.mark.parametrize("error", [HostUnreachable, HostKeyMismatch, AuthenticationFailed, HostNotReady])
def test_a_host_that_cannot_be_asked_is_out(error):
    found = soundness(inventory(), Survey({}, {NAMES[3]: error("no \x1b[2J", host=NAMES[3], hint="do this")}))
    assert {host: (one.check, one.remedy) for host, one in found.items()} == {NAMES[3]: ("ssh", "do this")}


def test_the_first_cause_is_named():
    """Without an engine, its disk is not known; the folder comes first."""
    both = lambda found: DENIED(FULL_ENGINE(found))  # noqa: E731
    assert out_of(both) == "folder"


def test_a_clock_that_no_gang_starts_with():
    assert out_of(replaced(clock_offset_s=-90.0)) == "clock"
    alone = {NAMES[0]: dataclasses.replace(healthy(1), clock_offset_s=-90.0)}
    assert set(soundness(inventory(), Survey(alone, {}))) == {NAMES[0]}


def test_hosts_that_the_inventory_no_longer_has_are_left_out():
    assert soundness(inventory(names=NAMES[:2]), Survey({NAMES[6]: DENIED(healthy(7))}, {})) == {}


def test_a_hosts_remedy_names_the_host():
    found = soundness(inventory(), Survey({NAMES[6]: GPU_FAULTS["gpu-generation"](DENIED(healthy(7)))}, {}))
    assert "{" not in found[NAMES[6]].remedy


@pytest.mark.parametrize("text", ["\x1b[2J\nx", "\u202eevil", "x" * 10**6, "a\tb"])
def test_what_a_lying_host_says_of_itself_is_fit_to_be_stored(text):
    lies = [replaced(folder=text, folder_fault=text, folder_problem=text), replaced(gpus=(), gpu_problem=text),
            replaced(docker=DockerFacts(problem=text))]  # fmt: skip
    for lie in lies:
        (finding,) = soundness(inventory(TCP), Survey({NAMES[0]: lie(healthy(1))}, {})).values()
        assert (finding.evidence + finding.remedy).isprintable() and finding.evidence
        assert len(finding.evidence) <= MOST_LETTERS >= len(finding.remedy)


@pytest.mark.parametrize("fault", ["denied", "full", "hangs", "read-only", "broken", "{0.__class__}"])
@pytest.mark.parametrize("folder", ["/x; rm -rf /", "$(id)", "{0.__class__}", "{", "it's"])
def test_a_folder_s_name_does_nothing_in_a_shell_or_in_a_format(fault, folder):
    (finding,) = found_of(replaced(folder=folder, folder_fault=fault, folder_problem="p"), fabric=TCP)
    assert shlex.quote(folder) in finding.remedy or fault == "read-only"


# -- the site's own check --------------------------------------------------------------------------------------


def survey_with(said, **hosts):
    return Survey({NAMES[at]: healthy(at + 1) for at in range(2)}, {}, health={NAMES[1]: said, **hosts})


def test_health_that_fails_makes_a_host_out_with_its_words():
    cluster = inventory(TCP, names=NAMES[:2], health=("/usr/local/bin/check host", "--fast"))
    found = soundness(cluster, survey_with("/usr/local/bin/check host exited with code 3: link ib0 is down"))
    assert list(found) == [NAMES[1]] and "link ib0 is down" in found[NAMES[1]].evidence
    assert found[NAMES[1]].remedy.endswith(f"ssh {NAMES[1]} '/usr/local/bin/check host' --fast")
    assert soundness(cluster, survey_with("")) == {}


def test_preflight_refuses_what_makes_a_host_out():
    """Else a gang would start on a host that is out for all others. Of missing GPUs, only those of the gang matter."""
    assert set(CHECKS) - BLOCKING == {"gpu-count"} and "gpu-missing" in BLOCKING
    cluster = inventory(TCP, names=NAMES[:2], health=("check",))
    assert judge(
        cluster, survey_with("check exited with code 1"), {NAMES[1]: (0,), NAMES[0]: (0,)}
    ).bad_hosts.keys() == {NAMES[1]}
    for change in (DENIED, FULL_ENGINE):
        survey = Survey({NAMES[0]: change(healthy(1))}, {})
        assert judge(cluster, survey, {NAMES[0]: (0,)}).bad_hosts.keys() == {NAMES[0]}


# -- IPv6 only -------------------------------------------------------------------------------------------------


def test_a_host_with_only_ipv6_is_found_before_a_gang_fails_there():
    only = lambda found: dataclasses.replace(with_nic(found, addresses=("fd00:7::11/64",)), resolves_to=())  # noqa: E731
    (finding,) = found_of(only, fabric=TCP, count=7)
    assert (finding.check, finding.severity) == ("ipv6-only", Severity.ERROR)
    assert finding.remedy.endswith(f": gpurun inventory set {NAMES[6]} fabric_address=fd00:7::11")
    assert found_of(only, fabric=TCP, count=7, fabric_address="fd00:7::11")[0].check == "address"  # of the other hosts
    assert out_of(only) == ""


def test_only_a_gang_on_several_hosts_needs_ipv4():
    survey = Survey(
        {name: with_nic(healthy(at), addresses=(f"fd00:7::{at}/64",)) for at, name in enumerate(NAMES[:2], 1)}, {}
    )
    grants = {NAMES[0]: (0,), NAMES[1]: (0,)}
    assert [one.check for one in judge(inventory(TCP), survey, grants).blocking] == ["ipv6-only"] * 2
    alone = Survey({NAMES[0]: survey.hardware[NAMES[0]]}, {})
    assert judge(inventory(TCP), alone, {NAMES[0]: (0,)}).blocking == ()
