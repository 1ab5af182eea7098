"""Where gpurun keeps its files on a host: a folder that nobody else can have prepared."""

import os
from pathlib import Path

import pytest

from gpurun.node import images
from gpurun.node.agent import serve
from gpurun.node.job import parts
from gpurun.node.transfer import blobs

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:44 / /home rw,relatime shared:5 - nfs4 server:/export/home rw,vers=4.2
31 30 8:17 / /home/a\\040b rw - xfs /dev/sdb1 rw
32 22 0:50 / /homework rw - tmpfs tmpfs rw
garbage
33 22
""".splitlines()


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {"HOME": "/home/train"})


def test_files_are_below_the_home_folder_unless_another_is_named(environment, tmp_path):
    assert parts.job_folder("j-00000001") == "/home/train/.gpurun/jobs/j-00000001"
    serve.use(str(tmp_path))
    own = f"{tmp_path}/gpurun-{os.getuid()}"
    assert parts.job_folder("j-00000001") == f"{own}/jobs/j-00000001"
    assert parts.outputs_folder("j-00000001") == f"{own}/outputs/j-00000001"
    assert blobs.spool_folder().startswith(own) and images.shipped_folder().startswith(own)
    assert Path(own).stat().st_mode & 0o777 == 0o700
    serve.use(str(tmp_path))


@pytest.mark.parametrize("trick", ["a link", "a file", "open to all", "somebody else's"])
def test_a_folder_that_somebody_else_prepared_is_refused(environment, tmp_path, trick):
    own = tmp_path / f"gpurun-{os.getuid()}"
    if trick == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    elif trick == "a file":
        own.touch(mode=0o600)
    else:
        own.mkdir(mode=0o700)
        if trick == "open to all":
            own.chmod(0o777)
        elif os.getuid():
            pytest.skip("needs root")
        else:
            os.chown(own, 12345, 12345)
    with pytest.raises(serve.NotOwn):
        serve.use(str(tmp_path))
    assert "GPURUN_FOLDER" not in os.environ


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/train/.gpurun", "nfs4"), ("/home", "nfs4"), ("/home/a b/x", "xfs"), ("/homework/x", "tmpfs"),
        ("/local", "ext4"), ("/", "ext4"),
    ],
)  # fmt: skip
def test_the_file_system_of_a_path(path, kind):
    assert serve.filesystem(path, MOUNTS) == kind
    assert serve.filesystem(path, []) == ""
