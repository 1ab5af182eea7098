"""Files that people write, and what is kept beside them: read, or refused with a reason; never a traceback."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import pytest
import typer
from hypothesis import given
from mutations import WRONG, YAML_SNIPPETS, damaged_bytes, damaged_json, examples
from test_fuzz_state import in_time, talking

from gpurun.cli import main as command_line
from gpurun.content import tree
from gpurun.content.export import Exporter
from gpurun.content.store import LayerStore
from gpurun.content.workdir import Code, write_code
from gpurun.doctor import bench
from gpurun.doctor.findings import result_from_document
from gpurun.errors import GpurunError, StateError
from gpurun.inventory import read as cache
from gpurun.inventory.read import load_inventory, parse_inventory
from gpurun.jobs.recipe import build_spec, read_recipe
from gpurun.jobs.spec import HorovodKnobs, JobSpec
from gpurun.jobs.store import JobStore
from gpurun.launch.launchers.horovod import reuse
from gpurun.node import images
from gpurun.remote import known_hosts
from gpurun.scheduler.model import Gang, Snapshot
from gpurun.scheduler.passes import schedule
from gpurun.state import caches, durable
from gpurun.state.paths import StatePath

INVENTORIES = (
    b"""version: 1
defaults: {user: train, generation: pascal, gpus: 2, fabric: tcp, labels: {a: b}}
fabrics:
  tcp: {kind: tcp, interface: eth0}
  ib: {kind: infiniband, interface: ib0, hcas: [mlx5_0, mlx5_1]}
racks:
  r1: &r {hosts: {"h[1-3]": {port: 2222}}}
  r2:
    hosts:
      "gpu[01-04]": {address: "10.0.0.[1-4]", gpu_memory_mib: 81920, generation: hopper, fabric: ib}
pools:
  a: {share: 2, limit: 4}
""",
    b"version: 1\ndefaults: {user: u, generation: g, gpus: 1, fabric: t}\nfabrics: {t: {kind: tcp, interface: e}}\n"
    b"racks: {r: {hosts: {h: {}}}}\n",
)
RECIPES = (
    b"""image: gpurun/train:tf2.15
gpus: 4
min_gpus: 2
command: [python3, train.py, --epochs, "3"]
workdir: .
outputs: /checkpoints
env: {A: b, C: "d e"}
mounts: [/data:/data:ro]
constraints: {generation: pascal, locality: rack, min_gpu_memory: 16GiB, locality_wait: 5m}
horovod: {fusion_threshold_mb: 64, cycle_time_ms: 1, gloo_timeout: 5m}
max_restarts: 2
time_limit: 1h
grace: 10s
shm_size: 2GiB
""",
    b"image: i\ngpus: 1\ncommand: true\n",
)
KNOWN_HOSTS = (
    b"h1,10.0.0.1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVtbXk=\n|1|c2FsdA==|ZGlnZXN0 ssh-rsa AAAA\n"
    b"@revoked *.x ssh-rsa AAAA\n"
    b"[h2]:2222 ssh-rsa AAAA\n!h3,h* ssh-rsa AAAA\n@cert-authority * ssh-rsa AAAA\n",
)
RECORD = json.dumps({
    "sha256:ab": {"local": "sha256:ab", "names": ["a:1"], "layers": ["sha256:cd"], "shipped_s": 1.0, "temporary": False}
}).encode()  # fmt: skip
RESULT = json.dumps({
    "version": 1, "world": 2, "skipped": {"mpi": "why"}, "mpi": "x",
    "pairs": [{"seconds": 1.0, "bytes": 1000, "source": 0, "target": 1, "latency_us": 2.0}],
    "allreduce": [{"engine": "nccl", "bytes": 10, "time_us": 1.0}],
}).encode()  # fmt: skip
AUTOTUNE = (
    b"hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score\n"
    b"0,1,1,2.5,64,100.0\n1,0,0,3.5,128,200.0\n"
)

pytestmark = pytest.mark.timeout(3600)


def test_inventories(tmp_path):
    @examples("damaged inventories")
    @given(damaged_bytes(INVENTORIES, YAML_SNIPPETS))
    def fuzz(data):
        with in_time(), suppress(GpurunError):
            inventory = parse_inventory(data, tmp_path / "inventory.yaml")
            schedule(Snapshot(inventory, queue=(Gang(id="j-00000001", gpus=1),)))

    fuzz()


def test_recipes(tmp_path):
    file = tmp_path / "recipe.yaml"

    @examples("damaged recipes")
    @given(damaged_bytes(RECIPES, YAML_SNIPPETS))
    def fuzz(data):
        file.write_bytes(data)
        with in_time(), suppress(GpurunError):
            what_is_accepted_can_be_kept(build_spec(read_recipe(file), {}, {}))

    fuzz()


RECIPE_KEYS = st.sampled_from([
    "image", "gpus", "min_gpus", "command", "workdir", "outputs", "env", "secrets", "mounts", "constraints", "horovod",
    "name",
    "max_restarts", "time_limit", "grace", "hang_timeout", "shm_size", "pool", "priority", "preemptible", "controller",
])  # fmt: skip
TIMES = st.sampled_from(
    [
        "9" * 400 + "d",
        "9" * 309,
        "1 " * 2000,
        "1" + " " * 20_000 + "x",
        "\u0663s",
        "1e5",
        "0.0s",
        "1h1d",
        "9" * 400 + "GiB",
    ]
)


def test_recipes_with_other_values(tmp_path):
    """JSON is YAML: well formed, with wrong values anywhere."""
    file = tmp_path / "recipe.yaml"
    plain = {"image": "i", "gpus": 1, "command": ["true"]}
    inner = st.dictionaries(st.sampled_from(["generation", "locality", "locality_wait", "gpus_per_host",
    "min_gpu_memory", "hosts",
                            "cycle_time_ms", "gloo_timeout", "thread_affinity", "autotune"]), WRONG | TIMES,
                            max_size=3)  # fmt: skip

    @examples("damaged recipes")
    @given(st.dictionaries(RECIPE_KEYS, WRONG | TIMES | inner, min_size=1, max_size=3))
    def fuzz(values):
        file.write_text(json.dumps({**plain, **values}))
        with in_time(), suppress(GpurunError):
            what_is_accepted_can_be_kept(build_spec(read_recipe(file), {}, {}))

    fuzz()


def what_is_accepted_can_be_kept(spec: JobSpec) -> None:
    """A spec that was accepted is the same after it was stored."""
    data = msgspec.json.encode(spec)
    assert msgspec.json.decode(data, type=JobSpec) == spec


ARGUMENTS = st.one_of(
    st.sampled_from(["\udcff", "a\udcff", "\x1b[2J", "", "-", "--", "-1", "9" * 5000, "x" * 50_000, "\u202e", "a=b",
    "=", "\n", "NaN", "1e9",
                     "9" * 400 + "d", "1" + " " * 20_000 + "x", "/dev/zero", "/dev/null", "/proc/self/mem", "/", "..",
                     "a:b:c", "h[1-"]),
    st.text(max_size=12),
)  # fmt: skip
FLAGS = st.sampled_from(["-n", "--image", "--generation", "--gpus-per-host", "--locality", "--pool", "--priority",
    "--time-limit",
                         "--max-restarts", "-e", "--name", "--controller", "-i"])  # fmt: skip


def test_arguments_of_submit(tmp_path, monkeypatch):
    """Up to the plan, and the spec that would be stored."""
    (tmp_path / "inventory.yaml").write_bytes(INVENTORIES[0])
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(command_line, "app", typer.main.get_command(command_line.app))

    def stored(specs, *_, **__):
        store = JobStore(tmp_path / "home")
        (folder,) = store.create_many(specs, inventory=tmp_path / "inventory.yaml", now_s=1.0)
        assert [folder.spec()] == specs
        return submit.Submission((folder,))

    from gpurun.head import submit

    monkeypatch.setattr(submit, "submit_jobs", stored)

    @examples("arguments")
    @given(
        st.lists(st.tuples(FLAGS, ARGUMENTS), max_size=3),
        st.lists(ARGUMENTS, max_size=3),
        st.booleans(),
        st.none() | ARGUMENTS,
    )
    def fuzz(flags, words, dry, recipe):
        given_flags = [word for pair in flags for word in pair]
        argv = ["submit", *([recipe] if recipe else []), "-n", "1", "--image", "i", *given_flags,
        *(["--dry-run"] if dry else []),
                "--", "true", *words]  # fmt: skip
        with in_time(), talking(), pytest.raises(SystemExit) as ended:
            command_line.main(argv)
        assert ended.value.code in (0, 2, 3), ended.value.code

    fuzz()


def test_known_hosts(tmp_path):
    file = tmp_path / "known_hosts"

    @examples("damaged caches")
    @given(damaged_bytes([*KNOWN_HOSTS]))
    def fuzz(data):
        file.write_bytes(data)
        with in_time():
            entries = known_hosts.load_known_hosts([str(file)])
            for host, port in (("h1", 22), ("h2", 2222), ("x" * 200, 22)):
                known_hosts.find_entries(entries, host, port)

    fuzz()


def test_what_hosts_and_jobs_leave(tmp_path, monkeypatch):
    """Image records, a benchmark's result and history, autotune's log: none of them is the head's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "gpurun").mkdir()
    (tmp_path / "bench").mkdir()
    links = b'{"time_s": 1.0, "links": [["h1", "h2", 9.1, 20.0]]}\n'

    @examples("damaged caches")
    @given(*(damaged_bytes([one]) | damaged_json([one]) for one in (RECORD, RESULT, links, AUTOTUNE)))
    def fuzz(record, result, history, autotune):
        with in_time():
            (tmp_path / "gpurun" / "images.json").write_bytes(record)
            for entry in images.read_shipped().values():
                assert all(isinstance(word, str) for word in (entry["local"], *entry["names"], *entry["layers"]))
                time.localtime(entry["shipped_s"])
            with suppress(GpurunError, ValueError, RecursionError):
                result_from_document(json.loads(result), ["h1", "h2"], ["h1", "h2"])
            bench.BenchHistory(tmp_path).file().plain.write_bytes(history)
            bench.slower(bench.BenchHistory(tmp_path).read(), ["h1", "h2"])
            knobs = reuse(HorovodKnobs(autotune=True), autotune.decode("utf-8", "replace"))
            assert msgspec.json.decode(msgspec.json.encode(knobs), type=HorovodKnobs) == knobs

    fuzz()


def test_caches_of_the_head(tmp_path, monkeypatch):
    """The inventory's, the workdir's digests and the layer store: what is wrong in them is made again."""
    monkeypatch.setattr(cache, "MIN_HOSTS", 1)
    monkeypatch.setattr(caches, "is_settled", lambda *_: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "inventory.yaml"
    file.write_bytes(INVENTORIES[0])
    wanted = load_inventory(file)
    (kept,) = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a").write_text("x")
    os.utime(folder / "a", (1, 1))
    right = tree.scan(folder)
    monkeypatch.setattr(tree, "RACY_S", -1.0)
    tree.scan(folder)
    (memory,) = (tmp_path / "cache/gpurun/trees").iterdir()
    code = StatePath(tmp_path) / "code"
    write_code(code, right)
    sound = code.read_bytes()
    store = LayerStore(tmp_path / "layers", 1 << 30)
    blob = store.put([b"layer" * 1000])

    @examples("damaged documents")
    @given(damaged_bytes([kept.read_bytes()]),
    damaged_json([memory.read_bytes()]) | damaged_bytes([memory.read_bytes()]),
           damaged_bytes([blob.hashes]), damaged_bytes([sound]))  # fmt: skip
    def fuzz(of_inventory, of_digests, of_chunks, of_code):
        with in_time():
            kept.write_bytes(of_inventory)
            assert load_inventory(file) == wanted
            memory.write_bytes(of_digests)
            assert [entry.path for entry in tree.scan(folder).entries] == [entry.path for entry in right.entries]
            code.plain.write_bytes(of_code)
            with suppress(StateError):
                kept_code = Code(code)
                for digest, entry in kept_code.files.items():
                    assert len(b"".join(kept_code.content(digest))) == entry.size
            blob.path.with_suffix(".chunks").write_bytes(of_chunks)
            found = store.find(blob.digest)
            assert found is None or len(found.hashes) == len(blob.hashes)

    fuzz()


def test_a_cached_configuration_is_made_again(tmp_path):
    """What is no configuration of the image is not one, whatever it is."""
    image = SimpleNamespace(id="sha256:ab", layers=("sha256:cd",))
    export = Exporter.__new__(Exporter)
    export._image, export._containerd = image, True

    @examples("damaged documents")
    @given(
        damaged_json([b'{"rootfs": {"diff_ids": ["sha256:cd"]}}'])
        | damaged_bytes([b'{"rootfs": {"diff_ids": ["sha256:cd"]}}'])
    )
    def fuzz(data):
        assert isinstance(export._is_config(data), bool)

    fuzz()


def test_records_of_any_bytes_and_values(tmp_path):
    """`durable.read_record` alone, fast: a spec, or a StateError."""
    path = StatePath(tmp_path) / "spec.json"
    spec = msgspec.json.encode(JobSpec(name="n", image="i", gpus=2, command=("a",), env={"A": "b"}))

    @examples("damaged recipes")
    @given(damaged_bytes([spec]) | damaged_json([spec]))
    def fuzz(data):
        path.plain.write_bytes(data)
        with in_time(), suppress(GpurunError):
            assert isinstance(durable.read_record(path, JobSpec), JobSpec)

    fuzz()


def test_the_alarm_of_these_tests_rings():
    with pytest.raises(AssertionError, match="no answer in 1 s"), in_time(1):
        signal.pause()
