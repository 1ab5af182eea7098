"""The probe's parts that need no machine of a special kind, and the document of this one."""

import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import LIMIT_S, until

import gpurun
from gpurun.facts import Hardware, hardware_from_document
from gpurun.node import nvml
from gpurun.node.agent import processes
from gpurun.node.agent.frames import Call, Cancelled
from gpurun.node.nvml_apart import NoAnswer, Nvml
from gpurun.node.probe import facts, probe

PLACE = Path(gpurun.__file__).parents[1]
RUN = f"import sys; sys.path.insert(0, {str(PLACE)!r}); from gpurun.node.probe.probe import main; main()"


# -- a process of its own ----------------------------------------------------------------------------------

HEALTHY = """
class NVMLError(Exception):
    value = 999
class NVMLLibraryMismatchError(Exception):
    pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 0
def nvmlSystemGetCudaDriverVersion(): return 12040
def nvmlSystemGetDriverVersion(): return b"550.54"
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Make processes that ask NVML import a module of these lines, behind those of a healthy driver without GPUs."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(lines=""):
        (tmp_path / "pynvml.py").write_text(HEALTHY + lines)

    return install


FACTS = {"driver": "550.54", "cuda": "12.4", "gpus": []}
HANGS = "import time\ndef nvmlDeviceGetCount(): time.sleep(3600)\n"


def test_one_process_answers_every_kind_of_question(driver):
    driver()
    with Nvml() as apart:
        assert apart.ask_host("facts") == FACTS
        assert apart.ask_host("sample") == {"gpus": []}
        assert apart.ask([]) == {"gpus": []}
        assert apart.ask_host("facts") == FACTS


@pytest.mark.parametrize("what", ["facts", "sample"])
def test_a_driver_that_hangs_costs_its_time_out_once(driver, what):
    driver(HANGS)
    began_s = time.monotonic()
    with Nvml() as apart, pytest.raises(NoAnswer, match=r"hangs.*0\.5 s"):
        apart.ask_host(what, timeout_s=0.5)
    assert 0.5 <= time.monotonic() - began_s < LIMIT_S


def test_a_driver_that_hangs_hides_no_other_section_of_the_document(driver, monkeypatch):
    driver(HANGS)
    monkeypatch.setattr(Nvml.ask_host, "__defaults__", (0.5,))
    found = probe.probe_document()
    assert (found["gpus"], found["gpu_problem"]) == ([], "the NVIDIA driver hangs: NVML did not answer within 0.5 s")
    assert found["hostname"] == socket.gethostname()


def test_a_driver_that_kills_its_process(driver):
    driver("import os\ndef nvmlDeviceGetCount(): os.abort()\n")
    with Nvml() as apart, pytest.raises(NoAnswer, match="died"):
        apart.ask_host("facts")


@pytest.mark.parametrize("noise", ["print('loading')", "print('1')", "import os; os.write(1, b'no line')"])
def test_what_a_library_prints_is_no_answer(driver, noise):
    driver(f"{noise}\ndef nvmlDeviceGetCount():\n    {noise}\n    return 0\n")
    with Nvml() as apart:
        assert [apart.ask_host("facts"), apart.ask_host("sample")] == [FACTS, {"gpus": []}]


def test_bytes_without_an_end_are_no_answer(driver):
    driver("import os\ndef nvmlDeviceGetCount():\n    while True:\n        os.write(fd, b'x' * 99)\n"
           "fd = next(n for n in range(3, 99) if os.path.exists(f'/proc/self/fd/{n}') and 'pipe' in "
           "os.readlink(f'/proc/self/fd/{n}'))\n")  # fmt: skip
    with Nvml() as apart, pytest.raises(NoAnswer, match="hangs"):
        apart.ask_host("facts", timeout_s=2.0)


def test_a_module_that_cannot_be_imported_is_named(driver):
    driver("raise OSError('libnvidia-ml.so is damaged')\n")
    with Nvml() as apart, pytest.raises(NoAnswer, match=r"reading NVML failed: OSError: libnvidia-ml\.so is damaged"):
        apart.ask_host("facts")


def test_an_exception_is_named_with_its_place(driver):
    driver("def nvmlDeviceGetCount(): return 1 / 0\n")
    with Nvml() as apart:
        with pytest.raises(NoAnswer, match=r"reading NVML failed: ZeroDivisionError.*pynvml\.py:\d+"):
            apart.ask_host("facts")
        assert apart.ask([]) == {"gpus": []}, "the next question is answered all the same"


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
@pytest.mark.parametrize(("code", "said"), [(9, "no NVIDIA driver: x"), (12, "no NVIDIA driver: x"), (18, "NVML: x")])
def test_what_nvml_refuses_is_told_as_it_is(driver, function, code, said):
    driver(f"def {function}():\n    error = NVMLError('x')\n    error.value = {code}\n    raise error\n")
    assert probe._gpus(probe.Roots()) == {"gpus": [], "gpu_problem": said}
    call = Call(1, lambda *_: None, False, b"")
    (sample,) = probe.sample(call)
    assert (sample["gpus"], sample["problem"]) == ([], said)


def test_a_host_without_pynvml_says_so(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PLACE), *(each for each in sys.path if "site-packages" not in each)])
    found = probe._gpus(probe.Roots())
    assert found == {"gpus": [], "gpu_problem": "reading NVML failed: No module named 'pynvml'"}


def test_samples_come_until_nobody_wants_more(driver):
    driver()
    call = Call(1, lambda *_: None, False, b"")
    source = probe.sample(call, interval_s=0.01)
    assert [next(source)["gpus"] for _ in range(3)] == [[], [], []]
    call.cancel()
    with pytest.raises(Cancelled):
        next(source)


def test_a_process_that_hung_in_a_driver_leaves_no_zombie_behind_the_next_question(driver, monkeypatch):
    driver(HANGS)
    with monkeypatch.context() as kernel:  # a process in a driver cannot be killed
        kernel.setattr(subprocess.Popen, "kill", lambda _: None)
        apart = Nvml()
        pid = apart._process.pid
        assert probe_hangs(apart)
        apart.close()
        del apart
    os.kill(pid, signal.SIGKILL)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    driver()
    with Nvml() as apart:
        assert apart.ask_host("facts") == FACTS
    assert not Path(f"/proc/{pid}").exists()


def probe_hangs(apart):
    try:
        apart.ask_host("facts", timeout_s=0.2)
    except NoAnswer:
        return True
    return False


def test_the_other_process_holds_none_of_our_files(driver):
    driver()
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    with Nvml() as apart:
        assert apart.ask_host("facts") == FACTS
        os.close(writer)
        assert os.read(reader, 1) == b""  # would block if the child still had the writing end
    os.close(reader)


def test_closing_ends_the_other_process(driver):
    driver()
    with Nvml() as apart:
        assert apart.ask_host("facts") == FACTS
        pid = apart._process.pid
        assert processes.read_process(pid) is not None
    until(lambda: processes.read_process(pid) is None)


# -- interfaces --------------------------------------------------------------------------------------------

IP_JSON = [
    {"ifname": "lo", "operstate": "UNKNOWN", "mtu": 65536, "addr_info": [{"local": "127.0.0.1", "prefixlen": 8}]},
    {"ifname": "docker0", "operstate": "DOWN", "mtu": 1500, "addr_info": []},
    {"ifname": "veth1a2b3c4", "operstate": "UP", "mtu": 1500, "addr_info": []},
    {"ifname": "ens1f0", "operstate": "UP", "mtu": 9000, "address": "b8:ce:f6:00:00:01", "addr_info": [
        {"family": "inet", "local": "10.200.1.10", "prefixlen": 24},
        {"family": "inet6", "local": "fe80::1", "prefixlen": 64},
        {"family": "inet6", "local": "2010:200::1", "prefixlen": 64}]},
    {"ifname": "broken"},
]  # fmt: skip


def test_nics(tmp_path):
    found = facts.nics(str(tmp_path), IP_JSON, lambda _: 25000)
    assert [nic["name"] for nic in found] == ["ens1f0", "broken"]
    assert found[0]["addresses"] == ["10.200.1.10/24", "2010:200::1/64"]
    assert (found[0]["mtu"], found[0]["speed_mbit"], found[1]["mtu"]) == (9000, 25000, None)


def test_only_real_interfaces_and_bonds_have_a_driver(tmp_path):
    (tmp_path / "class/net/ens1f0/device").mkdir(parents=True)
    (tmp_path / "drivers/mlx5_core").mkdir(parents=True)
    (tmp_path / "class/net/ens1f0/device/driver").symlink_to("../../../../drivers/mlx5_core")
    (tmp_path / "class/net/bond0/bonding").mkdir(parents=True)
    documents = [{"ifname": name} for name in ("ens1f0", "bond0", "eth0")]
    found = facts.nics(str(tmp_path), documents, lambda _: None)
    assert [nic["driver"] for nic in found] == ["mlx5_core", "bonding", ""]


MLNX_QOS = """DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
\tprio:0 dscp:07,06,05,04,03,02,01,00,
Cable len: 7
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   1   0   1   0   0
\tbuffer      0   0   0   1   0   0   0   0
tc: 0 ratelimit: unlimited, tsa: vendor
\t priority:  1
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (MLNX_QOS, {"trust": "dscp", "pfc": [3, 5]}),
        ("Priority trust state: pcp\nPFC configuration:\n priority 0 1\n enabled 0 0\n", {"trust": "pcp", "pfc": []}),
        ("", {}),
        ("Failed to open /sys", {}),
    ],
)
def test_qos(text, found):
    assert facts.parse_qos(text) == found


def test_connect_tells_open_from_refused_from_dropped():
    done = threading.Event()
    listener = facts.Listener("127.0.0.1", [[0, 0], [23022, 32021]], done.is_set, 30)
    thread = threading.Thread(target=listener.serve)
    thread.start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    targets = [{"address": "127.0.0.1", "port": port} for port in (*listener.ports, closed)]
    targets.append({"address": "no address", "port": 1})
    outcomes = facts.try_connections(targets, "127.0.0.1", LIMIT_S)
    done.set()
    thread.join()
    assert [one["ok"] for one in outcomes] == [True, True, False, False]
    assert outcomes[2]["error"] == "refused"
    assert 23022 <= listener.ports[1] <= 32021


def test_a_full_backlog_is_a_time_out_and_costs_it_once():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fill = [socket.socket() for _ in range(4)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        started = time.monotonic()
        outcomes = facts.try_connections([{"address": "127.0.0.1", "port": port}] * 300, None, 1.0)
        assert [one["error"] for one in outcomes] == ["timeout"] * 300
        assert time.monotonic() - started < 100
        for sock in fill:
            sock.close()


def test_an_address_that_is_not_ours_cannot_be_listened_on():
    with pytest.raises(OSError, match="Cannot assign"):
        facts.Listener("192.0.2.77", [[0, 0]], lambda: True, 1)


# -- sysfs and /proc ---------------------------------------------------------------------------------------


def test_no_rdma_at_all(tmp_path):
    assert facts.hcas(str(tmp_path)) == []
    assert facts.peermem(str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("version", "kernel", "answer"),
    [
        (None, "6.1.0", None),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.06", "6.1.0-13-amd64", False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54", "5.15.0-91-generic", True),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54", "5.4.0-91-generic", False),
    ],
)
def test_dmabuf(tmp_path, version, kernel, answer):
    if version:
        (tmp_path / "driver/nvidia").mkdir(parents=True)
        (tmp_path / "driver/nvidia/version").write_text(version)
    assert facts.dmabuf(str(tmp_path), kernel) is answer


def test_garbage_in_sysfs_is_not_believed(tmp_path):
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "gids").mkdir(parents=True)
    for name, text in (
        ("state", "weird"),
        ("rate", "fast"),
        ("link_layer", "\x00\xff"),
        ("gids/0", "zz"),
        ("gids/x", "fe80::1"),
    ):
        (port / name).write_text(text)
    (hca,) = facts.hcas(str(tmp_path))
    assert (hca["ports"][0]["state"], hca["ports"][0]["rate_gbit"]) == ("", None)
    assert [gid["address"] for gid in hca["ports"][0]["gids"]] == ["zz"]


CONTAINER = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "cgroup",
    [f"0::/system.slice/docker-{CONTAINER}.scope\n", f"12:cpu:/docker/{CONTAINER}\n0::/x\n", f"0::/../{CONTAINER}\n"],
)
def test_processes_get_owner_command_and_container(tmp_path, cgroup):
    folder = tmp_path / "77"
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "cmdline").write_bytes(b"python3\0train 'a'.py\0--x\xff\0")
    gpus = [{"processes": [{"pid": 77, "memory_mib": 5}, {"pid": 78, "memory_mib": None}]}]
    nvml.name_processes(gpus, str(tmp_path), {CONTAINER: "job-1"})
    first, gone = gpus[0]["processes"]
    assert first["container"] == CONTAINER[:12]
    assert first["job"] == "job-1"
    assert first["command"] == "python3 train 'a'.py --x\ufffd"
    assert first["user"]
    assert (gone["user"], gone["command"], gone["container"]) == ("", "", "")


# -- the document ------------------------------------------------------------------------------------------


def pythons():
    found = [sys.executable, *map(str, sorted(Path.home().glob(".pyenv/versions/3.8*/bin/python3.8")))]
    return [pytest.param(one, id=Path(one).name) for one in found]


@pytest.mark.parametrize("python", pythons())
def test_the_document_of_this_machine(python):
    done = subprocess.run(
        [python, "-I", "-c", RUN], capture_output=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    document = json.loads(done.stdout)
    fields = {field.name for field in dataclasses.fields(Hardware)} - {"host", "clock_offset_s", "clock_error_s"}
    assert set(document) - {"gpus", "driver", "cuda", "gpu_problem"} <= fields
    found = hardware_from_document("here", document)
    assert found.hostname == socket.gethostname()
    assert found.gpus or found.gpu_problem
    assert found.nics
    assert not set(found.problems) - {"nics"}


def test_one_broken_section_hides_no_other(monkeypatch):
    monkeypatch.setattr(probe, "ip_addresses", lambda: struct.unpack("I", b""))
    found = probe.probe_document()
    assert "error" in found["problems"]["nics"]
    assert found["hostname"]
    assert "hcas" in found


def test_look_up_knows_absent_names_from_silence(monkeypatch):
    silent = threading.Event()

    def getaddrinfo(name, *_):
        if name == "slow":
            assert silent.wait(LIMIT_S)
        if name == "none":
            raise socket.gaierror
        return [(2, 1, 6, "", ("10.0.0.1", 0)), (2, 1, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    known = {"good": ["10.0.0.1"], "none": []}
    assert probe.look_up(["good", "none"], LIMIT_S) == known
    assert probe.look_up(["slow", *known], 0.3)["slow"] is None
    silent.set()


def test_the_probe_sees_gdrcopy_s_device(tmp_path):
    roots = probe.Roots(dev=str(tmp_path))
    assert probe._hcas(roots)["gdrdrv"] is False
    (tmp_path / "gdrdrv").touch()
    assert probe._hcas(roots)["gdrdrv"] is True
