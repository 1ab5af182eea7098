"""State on a file system whose locks do not lock is refused: real processes, with a C library that lies."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.errors import StateUnavailable, UnsafeState
from gpurun.leases.store import AllocatorLock
from gpurun.state import filesystem
from gpurun.state.filesystem import check_locks, local_only, mount_of, mounts_below

LIAR = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>
static int told;
static int is_probe(void) { char b[99] = ""; FILE *f = fopen("/proc/self/cmdline", "r"); int n = fread(b, 1, 98, f);
    fclose(f); for (int i = 0; i + 1 < n; i++) if (b[i] == '-' && b[i + 1] == 'S') return 1; return 0; }
static int unlocks(void *lock) { return ((struct flock *)lock)->l_type == F_UNLCK; }
int fcntl64(int fd, int operation, ...) {
    va_list rest; va_start(rest, operation); void *lock = va_arg(rest, void *); va_end(rest);
    int (*real)(int, int, ...) = dlsym(RTLD_NEXT, "fcntl64");
    return operation == F_OFD_SETLK || operation == F_OFD_SETLKW ? (%s) : real(fd, operation, lock); }
int fcntl(int fd, int operation, ...) {
    va_list rest; va_start(rest, operation); void *lock = va_arg(rest, void *); va_end(rest);
    return fcntl64(fd, operation, lock); }
"""
OPEN = """
from pathlib import Path
from gpurun.leases.store import AllocatorLock
with AllocatorLock(Path({!r})).held():
    pass
"""
ROOT = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n"


def mountinfo(point: str, kind: str, source: str, options: str) -> str:
    return f"{ROOT}99 22 0:42 / {point} rw,relatime shared:1 - {kind} {source} rw,{options}\n"


@pytest.mark.parametrize(
    ("lies", "said"),
    [
        ("0", "one lock was granted to two processes at the same time"),
        ("(errno = ENOLCK, -1)", "locking fails: No locks available"),
        ("(errno = EOPNOTSUPP, -1)", "locking fails: Operation not supported"),
        ("(errno = ENOSYS, -1)", "locking fails: Function not implemented"),
        ("(errno = EINVAL, -1)", "locking fails: Invalid argument"),
        ("unlocks(lock) || !told++ ? 0 : (errno = EWOULDBLOCK, -1)", "one lock was granted to two processes"),
        ("unlocks(lock) || !is_probe() ? 0 : (errno = EWOULDBLOCK, -1)", "stays held after its release"),
    ],
)
def test_locks_that_do_not_lock_are_refused(tmp_path, lies, said):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc: apt-get install gcc libc6-dev")
    source, library = tmp_path / "liar.c", tmp_path / "liar.so"
    source.write_text(LIAR % lies)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    home = tmp_path / "home"
    for _ in range(2):  # a refusal is not remembered as fine
        done = subprocess.run(
            [sys.executable, "-c", OPEN.format(str(home))], env={**os.environ, "LD_PRELOAD": str(library)},
            capture_output=True, text=True,
        )  # fmt: skip
        assert "UnsafeState" in done.stderr
        assert said in done.stderr
        assert str(home) in done.stderr


def test_a_local_disk_is_fine_and_looked_at_once(tmp_path, monkeypatch):
    with AllocatorLock(tmp_path).held():
        pass
    assert (tmp_path / "locks.json").exists()
    monkeypatch.setattr(filesystem, "try_locks", lambda home: pytest.fail("tried again"))
    check_locks(tmp_path)


@pytest.mark.parametrize("stamp", [b"", b"{", b"\0" * 100, b'{"device": 1, "boot": "another"}'])
def test_a_stamp_of_another_boot_or_a_damaged_one_means_nothing(tmp_path, stamp, monkeypatch):
    (tmp_path / "locks.json").write_bytes(stamp)
    tried = []
    monkeypatch.setattr(filesystem, "try_locks", tried.append)
    check_locks(tmp_path)
    assert tried == [tmp_path]
    check_locks(tmp_path)
    assert len(tried) == 1


def test_no_directory_no_check(tmp_path):
    check_locks(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("kind", "options", "refused"),
    [
        ("nfs", "vers=3,nolock,local_lock=all", "nolock"),
        ("nfs4", "vers=4.2,local_lock=posix", "local_lock=posix"),
        ("nfs4", "vers=4.2,local_lock=none", None),
        ("cifs", "vers=3.1.1,nobrl", "nobrl"),
        ("cifs", "vers=3.1.1", None),
        ("fuse.sshfs", "user_id=0", "fuse.sshfs"),
        ("fuse.glusterfs", "user_id=0", None),
        ("lustre", "localflock", "localflock"),
        ("ext4", "nolock", None),
    ],
)
def test_mounts_with_local_locks(kind, options, refused):
    mount = mount_of(Path("/mnt/state/gpurun"), mountinfo("/mnt/state", kind, "server:/export", options))
    assert mount.kind == kind
    found = local_only(mount)
    assert found is None if refused is None else refused in (found or "")


def test_a_refusal_names_path_file_system_and_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(
        filesystem, "mount_of", lambda path, text: filesystem.MountEntry("/mnt", "nfs", "server:/x", ("nolock",))
    )
    with pytest.raises(UnsafeState) as caught:
        check_locks(tmp_path)
    assert caught.value.exit_code == 5
    for part in (str(tmp_path), "nfs", "server:/x at /mnt", "nolock"):
        assert part in str(caught.value)
    assert "GPURUN_HOME" in caught.value.hint


def test_a_network_file_system_with_locks_gets_one_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        filesystem, "mount_of", lambda path, text: filesystem.MountEntry("/mnt", "nfs4", "server:/x", ())
    )
    check_locks(tmp_path)
    assert "is on nfs4" in capsys.readouterr().err
    check_locks(tmp_path)
    assert capsys.readouterr().err == ""


def test_mount_points_with_odd_names_and_mounts_over_mounts():
    text = mountinfo(r"/mnt/a\040b", "xfs", "/dev/a", "x") + "x\n" + mountinfo(r"/mnt/a\040b", "nfs", "s:/b", "y")
    assert mount_of(Path("/mnt/a b/c"), text).kind == "nfs"
    assert mount_of(Path("/mnt/a bc"), text).kind == "ext4"
    assert mount_of(Path("/"), text).kind == "ext4"


@pytest.mark.parametrize(
    ("point", "is_below"),
    [("/s/jobs/j-1", True), (r"/s/jobs/j-1/a\040b", True), ("/s/jobs/j-10", False), ("/s", False), ("/", False)],
)
def test_a_mount_at_or_below_a_folder_is_seen(point, is_below):
    lines = f"22 1 8:1 / / rw - ext4 /dev/a rw\n23 22 8:1 /x {point} rw,relatime shared:1 - ext4 /dev/a rw\nno mount\n"
    assert mounts_below(Path("/s/jobs/j-1"), lines) == ((point.replace(r"\040", " "),) if is_below else ())


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_machine_that_can_start_no_process_says_nothing_about_its_file_system(tmp_path, own_copy, number):
    """UnsafeState would end a supervisor whose head has just booted."""

    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    own_copy(filesystem, "subprocess", Popen=fails)
    with pytest.raises(StateUnavailable, match="cannot test the locks of the state directory now"):
        filesystem.check_locks(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_as_it_tries_the_locks_says_nothing_about_them(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "PROBE", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(StateUnavailable, match="cannot test the locks of the state directory now"):
        filesystem.check_locks(tmp_path)
