"""What a failed rank printed last, as public issues quote it, and what gpurun says to do; and lines that look alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.jobs.spec import DataSource, JobSpec
from gpurun.launch.output import Line
from gpurun.supervisor.verdict.causes import Failed, hint_for, path_hint

SPEC = JobSpec(
    "n", "image:1", 4, ("python3", "train.py"), workdir="/home/me/code", outputs="/out",
    workdir_read_only=True,
    mounts=(("/scratch", "/scratch", "ro"), ("/big", "/big", "rw")), data={"mnist": DataSource("folder", "/x")},
    left_out=("data", "runs/new.pt", "runs/old.pt", "secrets.py"),
)  # fmt: skip
TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    main()"]
WATCHDOG = (
    "[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before"
)
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691"


def said(*lines, code=1, spec=SPEC, stream="stderr"):
    return hint_for(Failed(code, [Line(0, stream, line) for line in lines], spec, "h1"))


def raised(error, *more, **options):
    return said(*TRACEBACK, error, *more, **options)


GPU = "the memory of the rank's GPU is full"
DRIVER = "does not fit the NVIDIA driver of h1"
PORT = "another process on h1 has this port"
HIDDEN = "has data on the head, but .gitignore excludes data"


def test_a_script_in_a_folder_finds_the_modules_of_its_repository_by_pythonpath():
    """minGPT's README says `pip install -e .`, then `python projects/adder/adder.py`."""
    error = "ModuleNotFoundError: No module named 'mingpt'"
    for script, is_said in (("projects/adder/adder.py", True), ("/workspace/a/b.py", True), ("./b.py", False),
                            ("b.py", False), ("/workspace/b.py", False), ("/opt/a/b.py", False), ("a/../b.py", False),
                            ("../b.py", False), ("\udcff/b.py", True), ("a/\n.py", False)):  # fmt: skip
        for words in (("python3", script, "--x"), ("sh", "-c", f"python3 {script}")):
            hint = raised(error, spec=replace(SPEC, command=words))
            assert "--requirements FILE" in hint
            assert ("add -e PYTHONPATH=/workspace" in hint) is (is_said and words[0] == "python3")
    assert "PYTHONPATH" not in raised(error, spec=replace(SPEC, command=("python3", "a/b.py"), workdir=None))


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("OSError: [Errno 30] Read-only file system: 'outputs'", "makes /workspace read-only: write to /out"),
        ("OSError: [Errno 30] Read-only file system: '/workspace/a/b.pt'", "makes /workspace read-only: write to /out"),
        ("OSError: [Errno 30] Read-only file system: '/data/mnist/x'", "is in a data set, which is read-only"),
        ("OSError: [Errno 30] Read-only file system: '/scratch/x'", "/scratch is mounted read-only: give the mount"),
        ("OSError: [Errno 30] Read-only file system: '/gpurun/x'", "/gpurun/x is read-only in the container"),
        ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 10.92 GiB total capacity", GPU),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total", GPU),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total", GPU),
        ("RuntimeError: CUDA error:out of memory", GPU),
        ("RuntimeError: CUDA error: out of memory", GPU),
        ("jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 62 bytes.", GPU),
        (
            "tensorflow.errors.ResourceExhaustedError: OOM when allocating tensor with shape[1,7] "
            "and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:AddV2]",
            GPU,
        ),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update", DRIVER),
        ("RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version", DRIVER),
        ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
         "NumCudaDevices() that might have already set an error? Error 804: forward compatibility was attempted on non "
         "supported HW", DRIVER),
        ("RuntimeError: Unexpected error. Error 803: system has unsupported display driver / cuda driver combination",
         DRIVER),
        ("RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.", DRIVER),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "--generation"),
        ("AssertionError: Torch not compiled with CUDA enabled", "the image's PyTorch is built for CPUs only"),
        ("OSError: [Errno 98] Address already in use", PORT),
        ("RuntimeError: Address already in use", PORT),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. The "
         "server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).", PORT),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
         "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", PORT),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/train.csv'", HIDDEN),
        ("FileNotFoundError: [Errno 2] No such file or directory: './data'", HIDDEN),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/workspace/runs/old.pt'", "has runs/old.pt on"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/workspace/runs/old.pt'", "--data NAME=runs and"),
        ("ModuleNotFoundError: No module named 'yaml'", "--requirements FILE installs packages"),
        ("ImportError: libstdc++.so.6: cannot open shared object file: No such file or directory", "no libstdc++"),
        ("OSError: libcudart.so.12: cannot open shared object file: No such file or directory", "no libcudart.so.12:"),
        ("ModuleNotFoundError: No module named 'secrets'", "has secrets on the head, but .gitignore excludes secrets"),
        (f"torch.distributed.DistBackendError: {NCCL}, unhandled system error (run with", "NCCL_DEBUG="),
        (f"RuntimeError: {NCCL}, unhandled cuda error, NCCL version 2.10.3", "add -e NCCL_DEBUG=WARN"),
        (f"torch.distributed.DistBackendError: {NCCL}, remote process exited or there was a network error", "lost its"),
    ],
)  # fmt: skip
def test_the_error_that_ended_a_program_tells_what_to_do(error, hint):
    assert hint in raised(error)
    later = ["wandb: Find logs at: ./wandb/run-1/logs", "[W1] Warning: process group has NOT been destroyed"]
    assert hint in raised(error, *later, stream="stdout"), "2>&1 | tee log"
    with_rank = [f"[rank3]: {line}" for line in (*TRACEBACK, error)]
    assert hint in said(*with_rank), "as PyTorch prints it since 2.2"
    others = [Line(0, "stdout", f"step {n}") for n in range(99)]
    lines = [Line(0, "stderr", line) for line in (*TRACEBACK, error)]
    assert hint in hint_for(Failed(1, [*others, *lines, *others], SPEC, "h1"))


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("mkdir: cannot create directory ‘ckpt’: Read-only file system", "makes /workspace read-only"),
        ("touch: cannot touch 'a b': Read-only file system", "makes /workspace read-only"),
        ("touch: log: Read-only file system", "makes /workspace read-only"),
        ("./train.sh: line 3: out.log: Read-only file system", "makes /workspace read-only"),
        ("train.sh: 3: cannot create out.log: Read-only file system", "makes /workspace read-only"),
        ("python3: can't open file '/workspace/secrets.py': [Errno 2] No such file or directory", "secrets.py on the"),
        ("cat: data/x: No such file or directory", HIDDEN),
        ("ls: cannot access 'data': No such file or directory", HIDDEN),
        ("sh: 1: cannot open data/x: No such file", HIDDEN),
        ("init.cc:795 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3", "choose its own"),
        ("RuntimeError: DataLoader worker (pid 27) is killed by signal: Bus error. It is possible", "--shm-size"),
        (WATCHDOG, "that other ranks did not join"),
        ("Test NCCL failure all_reduce.cu:44 'Cuda failure 'out of memory''", GPU),
    ],
)  # fmt: skip
def test_so_do_the_last_lines_of_programs_that_are_not_python(line, hint):
    assert hint in said("one", "two", line, "")


@pytest.mark.parametrize(
    "lines",
    [
        ["RuntimeError: CUDA out of memory. Tried to allocate 2 MiB", "step 1", "step 2", "step 3"],  # caught, printed
        [*TRACEBACK, "RuntimeError: CUDA out of memory. Tried to allocate 2 MiB", *["step"] * 50],  # caught long ago
        [*TRACEBACK, "RuntimeError: CUDA out of memory. Tried to allocate 2 MiB", *TRACEBACK, "ValueError: bad lr"],
        ["XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 1099511627776 bytes."],  # also on CPUs
        [*TRACEBACK, "ResourceExhaustedError: OOM when allocating tensor with shape[9] and type float on "
         "/job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu"],
        [*TRACEBACK, "MemoryError"],
        [*TRACEBACK, "ValueError: the file system is a Read-only file system: '/x'"],
        [*TRACEBACK, "OSError: [Errno 30] Read-only file system: '/big/x'"],  # rw, so it is the host's disk
        ["Read-only file system"],
        ["checking: Read-only file system", "a", "b", "c"],
        ["UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)",
         *TRACEBACK, "ValueError: bad lr"],
        ["onnxruntime CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version", *TRACEBACK,
         "RuntimeError: CUDA error: device-side assert triggered"],
        [*TRACEBACK, "FileNotFoundError: [Errno 2] No such file or directory: 'data2/train.csv'"],
        [*TRACEBACK, "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.csv'"],
        [*TRACEBACK, "FileNotFoundError: [Errno 2] No such file or directory: '../data/train.csv'"],
        [*TRACEBACK, "FileNotFoundError: [Errno 2] No such file or directory: 'runs'"],
        [*TRACEBACK, "ModuleNotFoundError: No module named 'a.b'; 'a' is not a package"],
        [*TRACEBACK, "ValueError: step 98: Address is used"],
        ["serving: Address already in use, trying the next port", *TRACEBACK, "ValueError: bad lr"],
        [*TRACEBACK, f"RuntimeError: {NCCL}, invalid usage, NCCL version 2.10.3"],
        ["h:1:1 [0] NCCL WARN Call to connect failed", *TRACEBACK, f"RuntimeError: {NCCL}, unhandled system error"],
        ["[0] NCCL INFO Bootstrap : no socket interface found"],  # and nobody has set one
        ["Traceback (most recent call last):"],
        ["   ", ""],
        [],
        ["\x1b[31mRead-only\x00 file system: \udcff"],
        ["OSError: [Errno 30] Read-only file system: ''"],
    ],
)  # fmt: skip
def test_lines_that_look_alike_tell_nothing(lines):
    assert said(*lines) == ""


def test_a_program_that_a_signal_ended_is_not_judged_by_an_exception_that_it_survived():
    error = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 MiB"
    assert raised(error, code=137) == raised(error, code=139) == raised(error, code=143) == ""
    aborted = ["terminate called after throwing an instance of 'c10::Error'", "  what():  CUDA error: out of memory"]
    assert GPU in said(*aborted, code=134)


def test_an_error_is_found_behind_those_that_it_led_to():
    first = [*TRACEBACK, "OSError: [Errno 30] Read-only file system: '/workspace/outputs/a.log'"]
    second = ["", "The above exception was the direct cause of the following exception:", "", *TRACEBACK]
    assert "read-only" in said(*first, *second, "ValueError: Unable to configure handler 'file'")
    child = ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "]
    assert "read-only" in said(*first, *TRACEBACK, *child)
    assert "read-only" in said(*first, *TRACEBACK, "subprocess.CalledProcessError: Command '['python']' returned 1")
    handled = ["", "During handling of the above exception, another exception occurred:", "", *TRACEBACK]
    before = [*TRACEBACK, "FileNotFoundError: [Errno 2] No such file or directory: 'outputs/1'", *handled]
    assert "read-only" in said(*before, first[-1])
    unrelated = [*first, *TRACEBACK, "ValueError: bad lr"]
    assert said(*unrelated) == ""


def test_without_outputs_or_workdir_it_says_no_folder_that_is_not_there():
    error = "OSError: [Errno 30] Read-only file system: 'x'"
    assert "--outputs" in raised(error, spec=replace(SPEC, outputs=None))
    assert raised(error, spec=replace(SPEC, workdir=None)) == raised(error, spec=replace(SPEC, workdir_read_only=False))
    assert raised(error, spec=replace(SPEC, workdir=None)) == ""


def test_an_interface_that_the_user_named_and_that_is_not_there():
    spec = replace(SPEC, env={"NCCL_SOCKET_IFNAME": "ib7"})
    assert "NCCL_SOCKET_IFNAME=ib7" in said("[0] NCCL WARN Bootstrap : no socket interface found", spec=spec)


def test_a_path_that_the_user_replaced():
    assert path_hint({}) == ""
    assert path_hint({"PATH": "/x"}) == "`env` replaces the image's PATH by '/x'"
    assert "does not expand $PATH" in path_hint({"PATH": "/opt/x/bin:$PATH"})


@given(st.lists(st.text(max_size=80), max_size=20), st.integers(-5, 300) | st.none())
def test_any_lines_are_read(lines, code):
    assert isinstance(said(*lines, code=code), str)


def test_lines_of_a_megabyte_are_read_in_no_time():
    for unit in ("a: ", "'", "NCCL error", "/dev/shm ", "OOM when allocating tensor with shape", "A.Error"):
        said(*TRACEBACK, unit * 100_000)
        said(unit * 100_000)
