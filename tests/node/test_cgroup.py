"""What the kernel counted for a container, under cgroup v1 and v2, and in copies that the container could forge."""

from __future__ import annotations

import os

import pytest

from gpurun.node.job.watch import Counted, counted, counted_in

V2 = {
    "memory.events": "low 0\nhigh 0\nmax 17\noom 2\noom_kill 1\noom_group_kill 0\n", "memory.max": "1073741824\n",
    "memory.peak": "1073741824\n", "memory.current": "4096\n", "pids.events": "max 3\n", "pids.max": "16384\n",
}  # fmt: skip
V1 = {
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", "memory.limit_in_bytes": "1073741824\n",
    "memory.max_usage_in_bytes": "1073000000\n", "memory.failcnt": "0\n",
}  # fmt: skip
OWN = Counted(1 << 30, 1 << 30, 1, True, 3, 16384, 2)


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder)


@pytest.fixture
def host(tmp_path):
    """A host's /proc with one container's process, 7, and the folders of its control groups."""

    def make(mounts, groups):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/7").mkdir()
        lines = (
            f"30 25 0:26 {root} {tmp_path}/{place} rw - {kind} {kind} rw,{names}\n"
            for root, place, kind, names in mounts
        )
        (tmp_path / "proc/self/mountinfo").write_text("".join(lines))
        (tmp_path / "proc/7/cgroup").write_text(groups)
        return str(tmp_path / "proc")

    return make


def test_cgroup_v2(host, tmp_path):
    proc = host([("/", "fs", "cgroup2", "nsdelegate")], "0::/system.slice/docker-abc.scope\n")
    write(tmp_path / "fs/system.slice/docker-abc.scope", V2)
    assert counted(7, proc) == OWN


def test_cgroup_v1_beside_an_empty_v2(host, tmp_path):
    proc = host(
        [("/", "unified", "cgroup2", "x"), ("/", "memory", "cgroup", "memory"), ("/up", "pids", "cgroup", "pids")],
        "8:pids:/up/docker/abc\n4:memory:/docker/abc\n3:name=systemd:/x:y\n0::/\n",
    )
    write(tmp_path / "memory/docker/abc", V1)
    write(tmp_path / "pids/docker/abc", {"pids.events": "max 3\n", "pids.max": "16384\n"})
    assert counted(7, proc) == OWN._replace(peak_bytes=1_073_000_000, ooms=None)


def test_a_process_killed_without_its_own_limit_reached_is_a_victim_of_the_host(tmp_path):
    v2 = write(tmp_path / "v2", V2 | {"memory.events": "max 0\noom 0\noom_kill 1\n"})
    v1 = write(tmp_path / "v1", V1 | {"memory.max_usage_in_bytes": "900000000\n"})
    free = write(tmp_path / "free", V2 | {"memory.max": "max\n"})
    for folder in (v1, v2, free):
        found = counted_in(folder, folder)
        assert (found.kills, found.is_own_limit) == (1, False)
    assert counted_in(free, free).limit_bytes is None
    unlimited = write(tmp_path / "v1max", V1 | {"memory.limit_in_bytes": "9223372036854771712\n"})
    assert counted_in(unlimited, unlimited).limit_bytes is None


def test_an_older_kernel_knows_no_peak(tmp_path):
    folder = write(tmp_path / "g", {name: text for name, text in V2.items() if name != "memory.peak"})
    assert counted_in(folder, folder).peak_bytes == 4096


@pytest.mark.parametrize(
    "text", ["", "oom_kill", "oom_kill -1", "oom_kill ²", "oom_kill 1e9", "oom_kill " + "9" * 5000, "\0\xff\n" * 9000]
)
def test_nonsense_is_nothing(tmp_path, text):
    folder = write(tmp_path / "g", {"memory.events": text, "memory.oom_control": text, "memory.max": text})
    assert counted_in(folder, folder) is None


def test_no_link_is_followed_and_no_pipe_awaited(tmp_path):
    folder = write(tmp_path / "g", {})
    (tmp_path / "true").write_text(V2["memory.events"])
    (tmp_path / "g/memory.events").symlink_to(tmp_path / "true")
    os.mkfifo(tmp_path / "g/memory.oom_control")
    assert counted_in(folder, folder) is None
    assert counted(7, str(tmp_path / "none")) is None
