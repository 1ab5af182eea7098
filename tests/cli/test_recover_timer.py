from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from gpurun.cli import recover
from gpurun.errors import BadInput, HostNotReady, StateError
from gpurun.head.waiter import Recovery, kept

HOSTILE = {"GPURUN_HOME": "/var/lib/a b/50%/\"q\"/$x/'s'/\\n", "PATH": "/usr/bin:/bin"}


def recovery(everybody: bool = False) -> Recovery:
    return Recovery((sys.executable, "-m", "gpurun", "recover"), HOSTILE, everybody)


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text.strip()[1:-1]).replace("%%", "%")


@pytest.mark.parametrize("everybody", [True, False])
def test_the_units_are_what_systemd_reads(tmp_path, everybody):
    units = recovery(everybody).units()
    for name, text in units.items():
        (tmp_path / name).write_text(text)
        parsed = configparser.RawConfigParser(strict=False)
        parsed.optionxform = str
        parsed.read_string(text)
        assert parsed.has_section("Unit")
    service, timer = units["gpurun-recover.service"], units["gpurun-recover.timer"]
    values = [unescape(line.partition("=")[2]) for line in service.splitlines() if line.startswith("Environment=")]
    assert values == [f"{key}={value}" for key, value in HOSTILE.items()]
    for line in ("OnBootSec=15s", "OnCalendar=minutely", "Persistent=true", "WantedBy=timers.target"):
        assert line in timer.splitlines()
    assert "KillMode=process" in service.splitlines(), "or the supervisors would end with it"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd")
@pytest.mark.parametrize("everybody", [True, False])
def test_systemd_has_nothing_against_the_units(tmp_path, everybody):
    for name, text in recovery(everybody).units().items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "gpurun-recover" in line]
    assert complaints == [], done.stderr


def test_the_crontab_lines_run_the_same(tmp_path):
    lines = recovery().crontab().splitlines()
    assert [line.split(" ")[0] for line in lines] == ["@reboot", "*"]
    command = lines[0].partition(" ")[2]
    assert not re.search(r"(?<!\\)%", command)
    words = shlex.split(command.replace(r"\%", "%"))
    assert words[0] == f"GPURUN_HOME={HOSTILE['GPURUN_HOME']}"
    assert words[2:6] == [sys.executable, "-m", "gpurun", "recover"]


@pytest.mark.parametrize("value", ["a\nExecStart=/bin/evil", "\x00", "\x1b"])
def test_what_could_break_out_of_a_unit_is_refused(value):
    for make in (Recovery.units, Recovery.crontab):
        with pytest.raises(BadInput):
            make(Recovery(("gpurun",), {"GPURUN_HOME": value}, False))


def test_only_what_matters_is_kept():
    environ = {"GPURUN_INVENTORY": "/i", "AWS_SECRET": "s", "PATH": "/bin", "DOCKER_HOST": ""}
    assert kept(environ, "/h") == {"GPURUN_INVENTORY": "/i", "PATH": "/bin", "GPURUN_HOME": "/h"}


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """A systemctl that writes down what it is told, and a folder for units."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "systemctl").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/told\ntest ! -e {tmp_path}/refuse\n')
    (tools / "systemctl").chmod(0o755)
    (tools / "loginctl").symlink_to("systemctl")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(recover, "BOOTED", tmp_path)
    monkeypatch.setattr(recover, "unit_folder", lambda: tmp_path / "units")
    return tmp_path


def test_install_and_uninstall(systemd):
    recover.install(dry_run=False)
    recover.install(dry_run=False)
    assert sorted(os.listdir(systemd / "units")) == ["gpurun-recover.service", "gpurun-recover.timer"]
    told = (systemd / "told").read_text()
    assert told.count("enable --now gpurun-recover.timer") == 2
    recover.uninstall(dry_run=True)
    assert sorted(os.listdir(systemd / "units")) == ["gpurun-recover.service", "gpurun-recover.timer"]
    recover.uninstall(dry_run=False)
    recover.uninstall(dry_run=False)
    assert os.listdir(systemd / "units") == []
    assert (systemd / "told").read_text().count("disable --now gpurun-recover.timer") == 1


def test_a_refusal_of_systemd_is_told(systemd):
    (systemd / "refuse").touch()
    with pytest.raises(StateError, match="daemon-reload` failed"):
        recover.install(dry_run=False)


def test_dry_run_writes_nothing(systemd, capsys):
    recover.install(dry_run=True)
    assert not (systemd / "units").exists()
    shown = capsys.readouterr().out
    assert "[Timer]" in shown
    assert str(systemd / "units" / "gpurun-recover.service") in shown


def test_without_systemd_the_crontab_lines_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recover, "BOOTED", tmp_path / "none")
    monkeypatch.setattr(recover, "unit_folder", lambda: tmp_path / "units")
    with pytest.raises(HostNotReady, match="gpurun installed no timer"):
        recover.install(dry_run=False)
    assert capsys.readouterr().out.startswith("@reboot ")
    assert not (tmp_path / "units").exists()
