"""Doctor shows people commands with the names of claims in them. A host must not write such a command."""

import pytest

from gpurun.errors import HostNotReady
from gpurun.facts import held

HOSTILE = ["x'; touch /tmp/x; '", "$(id)", "`id`", "a b", "a\nb", "-f", "", "x" * 300, "ünï", "a;b", "../x", "a\x1b[2J"]
WHO = ["j-0a1b2c3d", 1, "state", "ada", 1000, "head"]


def answer(volume="gpurun-gpu-GPU-1", container="0" * 64):
    return {
        "volumes": [[volume, [0, "GPU-1"], WHO, 1000, 5, True, True]],
        "containers": [[container, WHO, [[0, "GPU-1"]], "running"]],
    }


def as_lists(document):
    return [document["volumes"], document["containers"]]


def test_names_that_docker_gives_are_taken():
    (one,) = held("h", as_lists(answer()))
    assert one.volumes == ("gpurun-gpu-GPU-1",) and one.containers == ("0" * 64,)


@pytest.mark.parametrize("name", HOSTILE)
def test_other_names_are_refused_and_the_host_is_named(name):
    for document in (answer(volume=name), answer(container=name)):
        with pytest.raises(HostNotReady) as caught:
            held("h", as_lists(document))
        assert caught.value.host == "h" and "\x1b" not in str(caught.value) and "\n" not in str(caught.value)
