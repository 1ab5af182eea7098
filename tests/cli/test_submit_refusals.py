"""What submit refuses at once: the hint is about what was wrong."""

import shlex

import pytest

from gpurun.errors import BadInput, NeverFits
from gpurun.head.submit import refuse_impossible, refuse_longer_idle
from gpurun.inventory.read import parse_inventory
from gpurun.jobs.recipe import name_of
from gpurun.jobs.recipe_values import _outputs_path, _words
from gpurun.jobs.spec import Constraints, JobSpec

TEXT = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""


POOLS = "pools: {vision: {reservation: 2}}\n"
LIMITED = "pools: {a: {reservation: 1, limit: 2}, b: {reservation: 3}}\n"


@pytest.mark.parametrize(
    ("pools", "more", "hint"),
    [
        (
            POOLS,
            {"pool": "nosuch'; --"},
            "the inventory's pools are: vision; choose a pool with --pool, or leave out --pool",
        ),
        (POOLS, {"pool": "vision", "gpus": 3}, "the inventory's pools are: vision; borrow with --preemptible"),
        (LIMITED, {"pool": "a", "gpus": 3}, "the inventory's pools are: a, b; choose a pool with --pool"),
        (
            LIMITED,
            {"pool": "a", "gpus": 3, "preemptible": True},
            "the inventory's pools are: a, b; choose a pool with --pool, or leave out --pool",
        ),
        (
            "pools: {a: {reservation: 2, limit: 2}}\n",
            {"pool": "a", "gpus": 3, "preemptible": True},
            "the inventory's pools are: a; leave out --pool",
        ),
        ("", {"gpus": 5}, "the inventory has 4 pascal GPUs"),
        ("", {"pool": "foo"}, "leave out --pool"),
    ],
)
def test_a_hint_is_about_pools_or_gpus_as_the_refusal_is(tmp_path, pools, more, hint):
    inventory = parse_inventory((TEXT + pools).encode(), source=tmp_path / "inventory.yaml")
    spec = JobSpec(**{"name": "n", "image": "i", "gpus": 1, "command": ("true",), **more})
    with pytest.raises(NeverFits) as caught:
        refuse_impossible(spec, inventory)
    assert hint == caught.value.hint if "pools are" in hint else hint in caught.value.hint


@pytest.mark.parametrize(
    ("pool", "own_s", "is_refused"),
    [("lab", 7200.0, True), ("team", 3600.1, True), ("lab", 3600.0, False), ("lab", None, False),
     ("free", 7200.0, False), (None, 7200.0, False)],
)  # fmt: skip
def test_an_idle_time_longer_than_the_pools_is_refused(tmp_path, pool, own_s, is_refused):
    pools = "pools: {lab: {idle_timeout: 1h}, team: {parent: lab}, free: {idle_timeout: 1h, idle_longer: true}}\n"
    inventory = parse_inventory((TEXT + pools).encode(), source=tmp_path / "inventory.yaml")
    spec = JobSpec(name="n", image="i", gpus=1, command=("true",), pool=pool, idle_timeout_s=own_s)
    if not is_refused:
        refuse_longer_idle(spec, inventory)
        return
    with pytest.raises(BadInput) as caught:
        refuse_longer_idle(spec, inventory)
    assert "is longer than idle_timeout 1h00m of pool lab" in caught.value.message
    assert caught.value.hint.startswith("use at most 1h00m; `idle_longer: true` of the pool")


TWO = TEXT.replace("{h1: {}}", "{h1: {}, h2: {gpus: 1, generation: volta}}")


@pytest.mark.parametrize(
    ("wants", "message"),
    [
        ({"generations": ("pascl",)}, "no GPUs of generation 'pascl'; did you mean 'pascal'?"),
        ({"generations": ("x'; --",)}, 'no GPUs of generation "x\'; --"'),
        ({"hosts": ("h1",), "avoid": ("h1",)}, "needs 1 GPU; all named hosts are also among the hosts to avoid"),
        ({"hosts": ("h1",), "gpus_per_host": 8}, "cannot be split into 8 per host"),
    ],
)
def test_a_refusal_names_what_is_wrong(tmp_path, wants, message):
    inventory = parse_inventory(TWO.encode(), source=tmp_path / "inventory.yaml")
    spec = JobSpec(name="n", image="i", gpus=1, command=("true",), constraints=Constraints(**wants))
    with pytest.raises(NeverFits) as caught:
        refuse_impossible(spec, inventory)
    assert message in caught.value.message
    assert (
        caught.value.hint == "the inventory has 4 pascal GPUs, 1 volta GPU; all GPUs of a job must be of one generation"
    )


def test_a_pool_of_an_inventory_without_pools_is_refused(tmp_path):
    inventory = parse_inventory(TEXT.encode(), source=tmp_path / "inventory.yaml")
    spec = JobSpec(name="n", image="i", gpus=1, command=("true",), pool="foo")
    with pytest.raises(NeverFits, match="there is no pool 'foo': the inventory has no pools"):
        refuse_impossible(spec, inventory)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python3 train.py --epochs 3", "train"), ("python src/my_train.py x.py", "my_train"), ("./run.sh", "run"),
        ("torchrun --nnodes 2 train.py", "train"), ("bash -c 'python x.py && y'", "bash"), ("/bin/true", "true"),
        ("python3 -m pkg.train --lr 1", "train"), ("python3 -m torch.distributed.run train.py", "train"),
        ("python3 -m", "python3"), ("python3", "python3"), ("uv run train.py", "train"), ("env A=b.py x", "env"),
        ("accelerate launch --config_file c.yaml train.py", "train"), ("bin/all_reduce_perf -b 8", "all_reduce_perf"),
        ("deepspeed a/.py", "deepspeed"), ("sh 日本.sh", "日本"), ("mpirun -m 4 prog", "mpirun"),
    ],
)  # fmt: skip
def test_a_job_without_a_name_is_called_after_its_script(command, name):
    assert name_of(shlex.split(command)) == name


@pytest.mark.parametrize(
    ("line", "operator"),
    [
        ("echo hi && echo there", "&&"), ("a | b", "|"), ("a > log", ">"), ("a 2>&1", "2>&1"), ("a; b", "a;"),
        ("sleep 1 &", "&"), ("a || b", "||"), ("a >> log", ">>"),
    ],
)  # fmt: skip
def test_a_command_line_with_what_only_a_shell_carries_out_is_refused(line, operator):
    with pytest.raises(ValueError, match="but only a shell understands") as caught:
        _words(line)
    assert f"has {operator}," in str(caught.value)


@pytest.mark.parametrize(
    "line", ["bash -c 'a && b | c > d; e'", "echo \"&&\" '|'", "x --a=b&c", r"find . -exec ls {} \;"]
)
def test_a_command_line_whose_operators_are_quoted_is_words(line):
    assert _words(line)


def test_a_backslash_at_the_end_of_a_line_continues_the_command():
    assert _words("torchrun --nnodes=1 \\\n  train.py --lr \\\r\n 1 --a=x\\\ny") == [
        "torchrun", "--nnodes=1", "train.py", "--lr", "1", "--a=xy"
    ]  # fmt: skip
    assert _words("sh -c 'a \\\\\n b'") == ["sh", "-c", "a \\\\\n b"]


@pytest.mark.parametrize("path", ["/usr", "/usr/", "/etc", "/proc/x", "/dev/shm", "/gpurun/x", "/workspace", "/run"])
def test_outputs_do_not_hide_what_a_container_needs(path):
    with pytest.raises(ValueError, match="hides the container's own"):
        _outputs_path(path)


def test_outputs_may_be_anywhere_else():
    assert [_outputs_path(path) for path in ("/usr/local/out", "/checkpoints", "/var/out", "/opt")]
