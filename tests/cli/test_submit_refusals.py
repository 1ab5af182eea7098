"""What submit refuses at once: the hint is about what was wrong."""

import pytest

from gpurun.errors import NeverFits
from gpurun.head.wish import refuse_impossible
from gpurun.inventory.load import parse
from gpurun.jobs.mounted import _outputs_path
from gpurun.jobs.recipe_values import _words
from gpurun.jobs.spec import JobSpec

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
            "its pools are: vision; choose one with --pool, or leave out --pool",
        ),
        (POOLS, {"pool": "vision", "gpus": 3}, "its pools are: vision; borrow with --preemptible"),
        (LIMITED, {"pool": "a", "gpus": 3}, "its pools are: a, b; choose one with --pool"),
        (
            LIMITED,
            {"pool": "a", "gpus": 3, "preemptible": True},
            "its pools are: a, b; choose one with --pool, or leave out --pool",
        ),
        (
            "pools: {a: {reservation: 2, limit: 2}}\n",
            {"pool": "a", "gpus": 3, "preemptible": True},
            "its pools are: a; leave out --pool",
        ),
        ("", {"gpus": 5}, "the inventory has 4 GPUs"),
    ],
)
def test_a_hint_is_about_pools_or_gpus_as_the_refusal_is(tmp_path, pools, more, hint):
    inventory = parse((TEXT + pools).encode(), source=tmp_path / "inventory.yaml")
    spec = JobSpec(**{"name": "n", "image": "i", "gpus": 1, "command": ("true",), **more})
    with pytest.raises(NeverFits) as caught:
        refuse_impossible(spec, inventory)
    assert hint == caught.value.hint if "pools are" in hint else hint in caught.value.hint


@pytest.mark.parametrize(
    ("line", "operator"),
    [
        ("echo hi && echo there", "&&"), ("a | b", "|"), ("a > log", ">"), ("a 2>&1", "2>&1"), ("a; b", "a;"),
        ("sleep 1 &", "&"), ("a || b", "||"), ("a >> log", ">>"),
    ],
)  # fmt: skip
def test_a_command_line_with_what_only_a_shell_carries_out_is_refused(line, operator):
    with pytest.raises(ValueError, match="which only a shell carries out") as caught:
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
