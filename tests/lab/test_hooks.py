"""The site's programs on real hosts: `health` that fails and is repaired, `prolog` and `epilog` of jobs, and hangs."""

from __future__ import annotations

import json

import pytest
from cluster import LOOK_S, TINY, Cluster
from faulting import kill_supervisor
from waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("hooks")]

HEALTH = """\
#!/bin/sh
test ! -e /etc/hangs || { echo waits for /nfs; sleep 600; }
test ! -e /etc/sick || { cat /etc/sick; exit 3; }
"""
PROLOG = """\
#!/bin/sh
test "$GPURUN_GPUS" = 0,1 || exit 0
test ! -e /etc/hangs || sleep 600
echo "no scratch disk for a job on GPUs $GPURUN_GPUS"
exit 1
"""
EPILOG = """\
#!/bin/sh
docker ps --quiet --filter label=gpurun.job=$GPURUN_JOB >> /tmp/epilog
echo "$GPURUN_HOOK $GPURUN_JOB $GPURUN_ATTEMPT $GPURUN_USER" >> /tmp/epilog
test ! -e /etc/hangs || { echo cannot unmount; sleep 600; }
"""


@pytest.fixture
def site(cluster: Cluster):
    """Give every host a program of the site's, under one of the inventory's keys; hooks end after 2 s."""
    lab, keys = cluster.lab, []
    text = lab.inventory.read_text().replace("ssh_config: ssh_config", f"ssh_config: {lab.ssh_config}")
    cluster.inventory = cluster.folder / "hosts.yaml"
    cluster.inventory.write_text(text)
    cluster.environ["GPURUN_HOOK_LIMIT_S"] = "2"

    def give(key: str, program: str) -> Cluster:
        keys.append(key)
        for host in lab.hosts:
            on(
                cluster,
                host.name,
                f"cat > /usr/local/bin/site-{key} <<'END'\n{program}END\nchmod 755 /usr/local/bin/site-{key}",
            )
        argv = f"{key}=[/usr/local/bin/site-{key}]"
        done = cluster.gpurun("inventory", "set", "@all", argv, "-i", str(cluster.inventory), "--yes")
        assert done.code == 0, done.err
        return cluster

    yield give
    cluster.cancel_all()
    for host in lab.hosts:
        on(
            cluster,
            host.name,
            f"rm -f /etc/hangs /etc/sick /tmp/epilog {' '.join(f'/usr/local/bin/site-{key}' for key in keys)}",
        )


def on(cluster: Cluster, host: str, script: str) -> str:
    return cluster.lab.run(host, ["sh", "-c", script]).stdout.decode()


def submitted(cluster: Cluster, *args: str, gpus: int = 2, command: str = "true") -> str:
    flags = ["--launcher", "tasks", "--gpus-per-host", str(gpus), *args]
    done = cluster.gpurun(*cluster.submit_args(*flags, gpus=gpus, image=TINY), "--", "sh", "-c", command)
    assert done.code == 0, done.err
    return done.out.strip()


def events(cluster: Cluster, job: str) -> str:
    return (cluster.home / "jobs" / job / "events.jsonl").read_text()


def state_of(cluster: Cluster, host: str) -> dict:
    return next(each for each in cluster.status()["hosts"] if each["host"] == host)


@pytest.mark.parametrize(("file", "words"), [("sick", "no licence for this host"), ("hangs", "waits for /nfs")])
def test_a_host_that_its_site_calls_sick_is_out_until_it_is_repaired(site, file, words):
    cluster = site("health", HEALTH)
    sick = cluster.lab.hosts[0].name
    on(cluster, sick, f"echo {words} > /etc/{file}")
    jobs = [submitted(cluster) for _ in cluster.lab.hosts]
    for job in jobs:
        assert cluster.wait_for(job, "SUCCEEDED")["granted"][0]["host"] != sick
    found = state_of(cluster, sick)
    assert found["state"] == "out" and words in json.dumps(found), found
    waits = submitted(cluster, "--host", sick)
    assert words in cluster.gpurun("why", waits).out
    on(cluster, sick, f"rm /etc/{file}")
    assert cluster.wait_for(waits, "SUCCEEDED")["attempt"] >= 1
    assert state_of(cluster, sick)["state"] != "out"


def test_a_prolog_that_fails_for_one_job_takes_no_host_from_the_others(site):
    cluster = site("prolog", PROLOG)
    whole, half = submitted(cluster, gpus=2), submitted(cluster, gpus=1)
    cluster.wait_for(half, "SUCCEEDED")
    until(lambda: "is placed again in" in events(cluster, whole))  # after a try on each host
    assert "no scratch disk for a job on GPUs 0,1" in cluster.gpurun("why", whole).out
    waits = cluster.record(whole)
    assert (waits["state"], waits["restarts"]) == ("QUEUED", 0), waits
    assert not [each["host"] for each in cluster.status()["hosts"] if each["state"] == "out"]


def test_a_prolog_that_hangs_on_one_host_is_ended_and_the_job_runs_elsewhere(site):
    cluster = site("prolog", PROLOG.replace("exit 1", "exit 0"))
    slow = cluster.lab.hosts[0].name
    on(cluster, slow, "touch /etc/hangs")
    jobs = [submitted(cluster) for _ in cluster.lab.hosts]
    ended = [cluster.wait_for(job, "SUCCEEDED") for job in jobs]
    assert {each["granted"][0]["host"] for each in ended}.isdisjoint({slow})
    assert {each["restarts"] for each in ended} == {0}
    assert any("did not end within 2 s" in events(cluster, job) for job in jobs)
    assert "sleep 600" not in on(cluster, slow, "ps -eo args")


def test_an_epilog_runs_after_the_containers_and_one_that_hangs_keeps_no_gpu(site):
    cluster = site("epilog", EPILOG)
    host = cluster.lab.hosts[0].name
    job = submitted(cluster, "--host", host)
    cluster.wait_for(job, "SUCCEEDED")
    assert on(cluster, host, "cat /tmp/epilog").splitlines() == [f"epilog {job} 1 {cluster.record(job)['owner']}"]
    assert "epilog failed" not in events(cluster, job)
    on(cluster, host, "touch /etc/hangs")
    job = submitted(cluster, "--host", host)
    cluster.wait_for(job, "SUCCEEDED")
    assert "epilog failed" in events(cluster, job) and "cannot unmount" in events(cluster, job)
    on(cluster, host, "rm /etc/hangs")
    until(lambda: state_of(cluster, host)["free"] == 2, every_s=LOOK_S)


def test_an_epilog_whose_supervisor_is_killed_runs_again_before_the_gpus_are_free(site):
    """The first run waits; its agent ends it when the supervisor is gone."""
    cluster = site("epilog", "#!/bin/sh\necho $GPURUN_JOB >> /tmp/epilog\ntest ! -e /etc/hangs || sleep 600\n")
    cluster.environ["GPURUN_HOOK_LIMIT_S"] = "60"
    host = cluster.lab.hosts[0].name
    on(cluster, host, "touch /etc/hangs")
    job = submitted(cluster, "--host", host)
    until(lambda: job in on(cluster, host, "cat /tmp/epilog 2>/dev/null"), every_s=LOOK_S)
    kill_supervisor(cluster, job)
    until(lambda: "sleep 600" not in on(cluster, host, "ps -eo args"), every_s=LOOK_S)
    on(cluster, host, "rm /etc/hangs")
    assert (cluster.home / "leases" / f"{job}.json").exists()
    assert cluster.gpurun("status", job).code == 0  # starts a new supervisor
    cluster.wait_for(job, "SUCCEEDED")
    assert on(cluster, host, "cat /tmp/epilog").split() == [job, job]
    until(lambda: state_of(cluster, host)["free"] == 2, every_s=LOOK_S)
