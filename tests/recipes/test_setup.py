"""What `make setup` installs on a bare machine is what the lab and the image builds look for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.lab.process import PACKAGE_OF


@pytest.fixture
def script(recipes):
    return recipes.parent / ".ci" / "install-packages"


@pytest.fixture
def machine(tmp_path):
    """PATH of a machine on which apt-get only writes down how it was called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "mktemp", "rm", "cat", "test", "grep"):
        (programs / name).symlink_to(shutil.which(name))
    put(programs / "id", 'echo "${AS-0}"')
    put(programs / "python3", f'exec "{sys.executable}" "$@"')
    put(programs / "apt-get", f'echo "$@" >>"{tmp_path}/calls"')
    put(programs / "apt-cache", 'exit "${UNKNOWN-0}"')
    return tmp_path


def put(program, text):
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


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


def test_missing_packages_are_installed_in_one_go_without_questions(script, machine):
    done, calls = run(script, machine)
    assert done.returncode == 0, done.stderr
    assert calls[0] == "update"
    assert calls[1].startswith("--yes --no-install-recommends install ")
    assert len(calls[1].split()) == len(set(calls[1].split())), "each package once"
    assert {"gcc", "mmdebstrap", "docker-cli"} <= set(calls[1].split())


def test_a_client_package_that_the_distribution_does_not_have_is_not_asked_for(script, machine):
    done, calls = run(script, machine, UNKNOWN="100")
    assert done.returncode == 0, done.stderr
    assert "docker-cli" not in calls[1].split()


def test_a_failed_installation_says_what_apt_said(script, machine):
    put(machine / "bin" / "apt-get", "echo 'E: no mirror answers'; exit 100")
    done, _ = run(script, machine)
    assert done.returncode == 1
    assert "E: no mirror answers" in done.stderr


def test_an_ordinary_user_is_told_the_command_that_installs(script, machine):
    done, calls = run(script, machine, AS="1000")
    assert (done.returncode, calls) == (1, [])
    assert "sudo apt-get install --no-install-recommends " in done.stderr
    assert {"gcc", "mmdebstrap", "docker-cli"} <= set(done.stderr.split())


@pytest.mark.parametrize("python", ["echo 'Python 3.9.2'; exit 1", None])
def test_a_python_that_is_missing_or_too_old_is_named_before_anything_is_installed(script, machine, python):
    (machine / "bin" / "python3").unlink()
    if python is not None:
        put(machine / "bin" / "python3", python)
    done, calls = run(script, machine)
    assert (done.returncode, calls) == (1, [])
    assert "Python 3.9.2" in done.stderr if python else "apt-get install python3" in done.stderr


PROGRAM = re.compile(r"""which\(\s*["']([a-z][\w.-]*)["']""")


def test_every_program_that_a_test_or_benchmark_looks_for_is_installed(script):
    """A test that skips for want of a program never runs on a fresh machine unless the program's package is named."""
    top = script.parents[1]
    wanted = {
        found
        for folder in ("tests", "benchmarks")
        for file in (top / folder).rglob("*.py")
        for found in PROGRAM.findall(file.read_text())
    }
    assert {"gcc", "iperf3", "strace", "pdsh"} <= wanted
    text = script.read_text()
    missing = {name for name in wanted if not re.search(rf"command -v {re.escape(name)}$", text, re.MULTILINE)}
    assert missing == {"sh", "env", "grep", "mkdir", "cat"}, "each of these skips tests on a fresh machine"


def test_a_machine_that_has_everything_is_left_alone(script, machine):
    for name in re.findall(r"command -v ([\w.-]+)", script.read_text()):
        if not (machine / "bin" / name).exists():
            (machine / "bin" / name).symlink_to("/bin/true")
    for path in ("/usr/include/stdio.h", "/usr/share/keyrings/debian-archive-keyring.gpg"):
        if not Path(path).exists():
            pytest.skip(f"needs {path}: run .ci/install-packages")
    done, calls = run(script, machine)
    assert (done.returncode, done.stdout, done.stderr, calls) == (0, "", "", [])
