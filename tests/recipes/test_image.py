"""The training image and the recipes' own code, run as gpurun runs them: no capability, not root, nothing writable."""

import json
import re
import subprocess
import time
import uuid

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.train, pytest.mark.xdist_group("training-image")]

UID = 1500
MAX_BYTES = 1_400_000_000
GLOO = ("horovodrun", "-np", "2", "-H", "localhost:2", "--disable-cache", "--gloo")
SIGNAL_RANKS = (
    "for f in /proc/[0-9]*/environ; do p=${f#/proc/}; p=${p%/environ}; "
    "tr '\\0' '\\n' 2>/dev/null <$f | grep -q ^HOROVOD_RANK= && kill -TERM $p; done; true"
)


class Container:
    """One container with gpurun's own restrictions."""

    def __init__(self, engine, folder, recipe, *argv):
        self.name = f"gpurun-test-{uuid.uuid4().hex[:12]}"
        self.engine = engine
        (folder / "passwd").write_text(f"root:x:0:0:root:/root:/bin/sh\ntrain:x:{UID}:{UID}:train:/tmp:/bin/sh\n")
        (folder / "outputs").mkdir(exist_ok=True)
        (folder / "outputs").chmod(0o777)
        mounts = {folder / "passwd": "/etc/passwd:ro", recipe: "/workspace:ro", folder / "outputs": "/checkpoints"}
        self.argv = [
            *("docker", "run", "--name", self.name, "--init", "--network", "host", "--user", f"{UID}:{UID}"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp"),
            *("--shm-size", "1024m", "--workdir", "/workspace", "--env", "GPURUN_OUTPUTS=/checkpoints"),
            *(part for source, target in mounts.items() for part in ("--volume", f"{source}:{target}")),
            *("gpurun/train:tf2.15", *argv),
        ]

    def __enter__(self):
        self.process = subprocess.Popen(
            self.argv, env=self.engine._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self

    def __exit__(self, *_):
        self.engine.ask("rm", "--force", self.name)
        self.process.wait(30)

    def finish(self, timeout_s=240):
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output


@pytest.fixture(scope="module")
def engine(build):
    engine = build.Engine(build.engine_host())
    if not engine.ask("image", "inspect", "gpurun/train:tf2.15"):
        pytest.fail("there is no gpurun/train:tf2.15 on the head's engine: make image")
    return engine


def run(engine, folder, recipe, *argv):
    with Container(engine, folder, recipe, *argv) as container:
        return container.finish()


def test_the_image_is_small_and_its_layers_go_from_rarely_to_often_changed(engine):
    (image,) = json.loads(engine.ask("image", "inspect", "gpurun/train:tf2.15"))
    (base,) = json.loads(engine.ask("image", "inspect", "gpurun/base:bookworm"))
    assert image["Size"] < MAX_BYTES
    layers = image["RootFS"]["Layers"]
    assert layers[0] == base["RootFS"]["Layers"][0]
    history = engine.ask("history", "--no-trunc", "--format", "{{.CreatedBy}}", "gpurun/train:tf2.15").splitlines()
    assert sum("COPY dir" in line for line in history) == 2  # TensorFlow, then Horovod


def test_the_image_has_what_ranks_need_and_no_build_tools(engine, tmp_path, recipes):
    script = (
        "for tool in g++ gcc cmake make ld strip pip; do command -v $tool && echo unwanted; done; "
        "for tool in ssh mpirun orted horovodrun tr grep; do command -v $tool >/dev/null || echo no $tool; done; "
        "python -c 'import sys' || echo READMEs say python; "
        "test -d /usr/local/lib/python3.11/dist-packages/tensorflow/include && echo headers; "
        "touch /usr/local/x 2>/dev/null && echo writable; "
        "python3 -c 'import cloudpickle, psutil, yaml, packaging, setuptools, mpi4py.MPI, horovod.tensorflow'"
    )
    assert run(engine, tmp_path, recipes / "noop", "sh", "-c", script) == (0, "")


ONE_SIDED = """
from mpi4py import MPI
import numpy
world = MPI.COMM_WORLD
counter = numpy.zeros(1, "q")
window = MPI.Win.Create(counter if world.rank == 0 else None, comm=world)
one, before = numpy.ones(1, "q"), numpy.zeros(1, "q")
window.Lock(0)
window.Fetch_and_op(one, before, 0)
window.Unlock(0)
taken = world.gather(int(before[0]))
if world.rank == 0:
    print(sorted(taken))
window.Free()
"""


def test_one_sided_mpi_works_whatever_the_launcher_says_of_transports(engine, tmp_path, recipes):
    """Open MPI's transport over OFI aborted: "BTL OFI will now abort", fi_fetch_atomic failed."""
    mpirun = ("mpirun", "--oversubscribe", "-np", "2", "-mca", "pml", "ob1", "-mca", "btl", "^openib")
    assert run(engine, tmp_path, recipes / "noop", *mpirun, "python3", "-c", ONE_SIDED) == (0, "[0, 1]\n")


def test_tensorflow_starts_from_byte_code_that_is_in_the_image(engine, tmp_path, recipes):
    script = (
        "import sys, os, tensorflow; "
        "files = [m for m in list(sys.modules.values()) if 'dist-packages' in (getattr(m, '__file__', None) or '')]; "
        "missing = [m.__file__ for m in files if m.__file__.endswith('.py') and not os.path.exists(m.__cached__)]; "
        "print(len(files) > 1000, missing)"
    )
    assert run(engine, tmp_path, recipes / "noop", "python3", "-c", script) == (0, "True []\n")


def test_a_wrong_sum_on_one_rank_fails_the_check_everywhere(engine, tmp_path, recipes):
    folder = tmp_path / "recipe"
    folder.mkdir()
    broken = "return rank % 3 + 1 + (os.environ.get('HOROVOD_RANK') == '1')"  # as if rank 1 sent something else
    text = (recipes / "allreduce-check" / "check.py").read_text()
    assert "return rank % 3 + 1\n" in text
    (folder / "check.py").write_text(text.replace("return rank % 3 + 1\n", broken + "\n"))
    code, output = run(engine, tmp_path, folder, *GLOO, "python3", "check.py")
    assert code != 0
    assert re.search(r"\[0\]<stderr>:Horovod: int32\[1\]\[0\] is \d+, not 3", output), output


FEWER = """
import gzip, pathlib, struct
for file in pathlib.Path("/usr/share/datasets/fashion-mnist").glob("*.gz"):
    data = gzip.decompress(file.read_bytes())
    count, header = 10000 if "train" in file.name else 1000, 4 + 4 * data[3]
    each = (len(data) - header) // struct.unpack(">i", data[4:8])[0]
    fewer = data[:4] + struct.pack(">i", count) + data[8:header] + data[header : header + count * each]
    pathlib.Path("/checkpoints", file.name).write_bytes(gzip.compress(fewer, 1))
"""


@pytest.mark.timeout(600)
def test_training_stops_with_a_checkpoint_and_continues_from_it_with_fewer_ranks(engine, tmp_path, recipes):
    """On a sixth of the images. A network that is less accurate than was asked fails."""
    recipe = recipes / "fashion-mnist"
    assert run(engine, tmp_path, recipe, "python3", "-c", FEWER) == (0, "")
    train = ("python3", "train.py", "--data", "/checkpoints", "--epochs", "2", "--accuracy")
    with Container(engine, tmp_path, recipe, *GLOO, *train, "0.6") as container:
        wait_for_line(container, "[0]<stdout>:epoch 1/2")
        engine.ask("exec", container.name, "sh", "-c", SIGNAL_RANKS)
        code, output = container.finish(120)
    assert code != 0
    seen = set(re.findall(r"told to stop after (\d+) images of epoch 2", output))
    assert len(seen) == 1, output  # every rank at the same step
    assert "Exit code: 143" in output, output
    code, output = run(engine, tmp_path, recipe, *train, "0.6")
    assert code == 0, output
    assert f"resuming from /checkpoints/ckpt-2: epoch 2, {seen.pop()} images into it" in output
    assert "epoch 1/2" not in output
    assert re.search(r"test accuracy 0\.[6-9]", output)
    code, output = run(engine, tmp_path, recipe, *train, "0.99")
    assert code == 1
    assert "that is less than 0.99" in output


def wait_for_line(container, text, timeout_s=200):
    deadline = time.monotonic() + timeout_s
    for line in container.process.stdout:
        if text in line:
            return
        assert time.monotonic() < deadline
    pytest.fail(f"ended without saying {text!r}")
