"""Install packages into an environment. Runs in a container of the base image and imports nothing of gpurun.

The environment is a virtual environment that also sees the image's packages. Nothing outside its folder changes. Its
content depends only on the packages: it has no times and no machine names, and byte code without time stamps.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from typing import List

PLACE = "/run/gpurun-build"
ENVIRONMENT = "/opt/gpurun/environment"
COMPILING = b"gpurun: compiling\n"
NO_PIP, NO_VENV = 41, 42
"""Exit codes of their own: the image lacks pip and the head has none either; the image's Python is too small."""


def main(options: List[str]) -> int:
    """Create the environment; return pip's exit code."""
    os.umask(0o022)
    log = os.open(PLACE + "/scratch/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        import importlib.metadata
        import importlib.util
        import venv

        venv.EnvBuilder(system_site_packages=True, symlinks=True).create(ENVIRONMENT)
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        return NO_VENV
    pip = ["-m", "pip"] if importlib.util.find_spec("pip") else [PLACE + "/pip/pip"]
    if pip[0] != "-m" and not os.path.exists(pip[0]):
        return NO_PIP
    python = ENVIRONMENT + "/bin/python3"
    code = subprocess.call(
        [
            python,
            *pip,
            "install",
            "--log",
            PLACE + "/scratch/pip.log",
            "--no-input",
            "--disable-pip-version-check",
            "--no-cache-dir",
            "--no-compile",
            "--progress-bar",
            "off",
            "--no-warn-script-location",
            "-r",
            PLACE + "/in/requirements.txt",
            *options,
        ]
    )
    if code:
        return code
    sys.stdout.buffer.write(COMPILING)
    sys.stdout.flush()
    subprocess.call(
        [
            python,
            "-m",
            "compileall",
            "-q",
            "-j",
            "0",
            "--invalidation-mode",
            "unchecked-hash",
            ENVIRONMENT + "/lib",
        ]
    )
    folders = glob.glob(ENVIRONMENT + "/lib/python*/site-packages")
    found = importlib.metadata.distributions(path=folders)
    named = sorted(f"{each.metadata['Name']}=={each.version}" for each in found)
    with open(PLACE + "/scratch/packages.json", "w") as out:
        json.dump(named, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
