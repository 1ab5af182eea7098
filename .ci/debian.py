"""A root folder of another Debian, from the mirror that this machine's apt uses.

Needs root and mmdebstrap. On a machine that is no Debian, mmdebstrap's own mirror is used.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes" / "images"))
import rootfs

SUITE = rootfs.SUITE
ROLLING = ("sid", "unstable")  # releases without updates and security archives of their own


def bootstrap(tree: Path, packages: Sequence[str], suite: str, *options: str) -> None:
    """Make `tree` a Debian of the release `suite` with `packages`, apt, and this machine's settings for mirrors.

    Args:
        options: more options of mmdebstrap.

    Raises:
        subprocess.CalledProcessError: mmdebstrap failed; its message is on stderr.
    """
    argv = ["mmdebstrap", "--mode=root", "--variant=minbase", f"--include={','.join(packages)}"]
    argv += [f"--aptopt={line}" for line in rootfs.apt_settings(_output("apt-config", "dump"))]
    done = subprocess.run([*argv, *options, suite, str(tree), *_sources(suite)], check=False, capture_output=True)
    if done.returncode:
        sys.stderr.buffer.write(done.stdout + done.stderr)
        done.check_returncode()


def _sources(suite: str) -> list[str]:
    targets = _output(
        "apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)", "Created-By: Packages"
    )
    found = []
    for line in rootfs.sources(machine_release(), targets):
        kind, uri, name, component = line.split()
        pocket = name.removeprefix(SUITE)
        if not (pocket and suite in ROLLING):
            found.append(f"{kind} {uri} {suite}{pocket} {component}")
    return found


def machine_release() -> dict[str, str]:
    """This machine's ``/etc/os-release``."""
    return rootfs._os_release()


def _output(*argv: str) -> list[str]:
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
