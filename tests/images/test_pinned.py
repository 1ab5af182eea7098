"""An image is what its name meant at submit, and a host's word for it is an image ID or nothing."""

from __future__ import annotations

import pytest

from gpurun.content.images import Engine
from gpurun.content.ship import _local_id
from gpurun.errors import BadInput, HostFailure

OLD, NEW = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


def engine(**images):
    """An engine of the head: what it knows, by name and by ID."""
    known = {**images, **{ident: ident for ident in images.values()}}

    class Fake(Engine):
        def get(self, path):
            reference = path.removeprefix("/images/").removesuffix("/json")
            if reference not in known:
                return 404, {"message": f"No such image: {reference}"}
            return 200, {"Id": known[reference], "RootFS": {"Layers": []}}

    return Fake(None)


@pytest.mark.parametrize("now", [{"i": NEW, "kept": OLD}, {"kept": OLD}], ids=["rebuilt", "untagged"])
def test_a_name_that_has_moved_changes_nothing_and_is_given_to_no_host(now):
    image = engine(**now).image("i", OLD)
    assert (image.reference, image.id, image.names) == ("i", OLD, ())


@pytest.mark.parametrize("ident", ["", OLD])
def test_a_name_that_still_means_it_is_given_to_hosts(ident):
    image = engine(i=OLD).image("i", ident)
    assert (image.id, image.names) == (OLD, ("i:latest",))


def test_an_image_that_is_gone_is_said_to_be_gone_and_not_replaced():
    with pytest.raises(BadInput, match=r"the image .*, which had the name i at submit, is no longer on the head"):
        engine(i=NEW).image("i", OLD)


@pytest.mark.parametrize(
    "said",
    ["", None, 7, "sha256:", f"sha256:{'g' * 64}", f"{OLD} --privileged", "--privileged", f"{OLD}\n", ["x"], "busybox"],
)
def test_what_a_host_calls_an_image_must_be_an_id(said):
    with pytest.raises(HostFailure, match="not an image ID"):
        _local_id("h1", said)


def test_an_id_is_one():
    assert _local_id("h1", OLD) == OLD
