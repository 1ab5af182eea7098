"""What `make setup` installs on a bare machine is what the lab and the image builds look for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.lab.requirements import PACKAGE_OF


@pytest.fixture
def script(recipes):
    return recipes.parent / ".ci" / "install-packages"


@pytest.fixture
def machine(tmp_path):
    """PATH of a machine on which apt-get only writes down how it was called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "id", "mktemp", "rm", "cat", "test"):
        (programs / name).symlink_to(shutil.which(name))
    (programs / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "apt-get").write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/calls"\n')
    (programs / "apt-cache").write_text('#!/bin/sh\nexit "${UNKNOWN-0}"\n')
    for name in ("python3", "apt-get", "apt-cache"):
        (programs / name).chmod(0o755)
    return tmp_path


def run(script, machine, **extra):
    # The script adds /usr/sbin and /sbin to PATH: what this machine has there counts as installed.
    environment = {**os.environ, "PATH": str(machine / "bin"), **extra}
    done = subprocess.run([shutil.which("sh"), script], env=environment, capture_output=True, text=True)
    calls = machine / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_every_program_the_lab_needs_has_its_package_in_the_setup(script):
    text = script.read_text()
    for program, package in PACKAGE_OF.items():
        assert re.search(rf"^need {re.escape(package)} ", text, re.MULTILINE), program


@pytest.mark.skipif(os.geteuid() != 0, reason="as root it installs")
def test_missing_packages_are_installed_in_one_go_without_questions(script, machine):
    done, calls = run(script, machine)
    assert done.returncode == 0, done.stderr
    assert calls[0] == "update"
    assert calls[1].startswith("--yes --no-install-recommends install ")
    assert {"gcc", "mmdebstrap", "docker-cli"} <= set(calls[1].split())


@pytest.mark.skipif(os.geteuid() != 0, reason="as root it installs")
def test_a_client_package_that_the_distribution_does_not_have_is_not_asked_for(script, machine):
    done, calls = run(script, machine, UNKNOWN="100")
    assert done.returncode == 0, done.stderr
    assert "docker-cli" not in calls[1].split()


@pytest.mark.skipif(os.geteuid() != 0, reason="as root it installs")
def test_a_failed_installation_says_what_apt_said(script, machine):
    (machine / "bin" / "apt-get").write_text("#!/bin/sh\necho 'E: no mirror answers'\nexit 100\n")
    done, _ = run(script, machine)
    assert done.returncode == 1
    assert "E: no mirror answers" in done.stderr


def test_a_machine_that_has_everything_is_left_alone(script, machine):
    for name in {*PACKAGE_OF, "mmdebstrap", "docker"}:
        if not (machine / "bin" / name).exists():
            (machine / "bin" / name).symlink_to("/bin/true")
    for path in ("/usr/include/stdio.h", "/usr/share/keyrings/debian-archive-keyring.gpg"):
        if not Path(path).exists():
            pytest.skip(f"no {path} on this machine")
    done, calls = run(script, machine)
    assert (done.returncode, done.stdout, done.stderr, calls) == (0, "", "", [])
