"""Options whose values have units have one type each: a wrong value is one message. All output has one zone."""

from __future__ import annotations

import time
from pathlib import Path

import click
import pytest
from typer.main import get_command

from gpurun.cli.main import app
from gpurun.cli.manual import contexts
from gpurun.cli.options import Written
from gpurun.jobs.record import State
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.state.audit import AuditLog

GOOD = {"TIME": "1h30", "WHEN": "yesterday 18:00", "SIZE": "500GB", "RATE": "2.5gbit"}
HOSTILE = ["", "x", "inf", "nan", "1e400", "-1", "30", "٣h", "9" * 10_000, "1h\x1b[31m", "5 %", "--json"]


def test_options_for_times_sizes_and_rates_have_one_type_each():
    seen = []
    for context in contexts("gpurun", get_command(app)):
        for option in context.command.params:
            where = f"{context.command_path} {option.opts[0]}"
            if isinstance(option.type, Written):
                seen.append(where)
                assert option.type.convert(GOOD[option.type.name], option, context) > 0, where
                for text in HOSTILE:
                    with pytest.raises(click.BadParameter) as refused:
                        option.type.convert(text, option, context)
                    said = refused.value.format_message()
                    assert option.opts[0] in said and len(said) < 300 and said.isprintable(), (where, said)
            else:
                assert not isinstance(option.type, click.types.FloatParamType), f"{where}: a number without a unit"
    assert len(seen) >= 20 and "gpurun web --idle" in seen


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("web", "--idle", "x"), "Invalid value for '--idle': 'x' is not a time; write a number with"),
        (("tensorboard", "j", "--idle", "x"), "Invalid value for '--idle': 'x' is not a time"),
        (
            ("prune", "--older-than", "30"),
            "Invalid value for '--older-than': '30' has no unit; write 30s, 30m, 30h or 30d",
        ),
        (("inventory", "drain", "h", "--deadline", "2"), "Invalid value for '--deadline': '2' has no unit"),
        (("history", "--since", "1d", "--until", "2d"), "--until is before --since: "),
        (("report", "--since", "today", "--until", "yesterday"), "--until is before --since: "),
        (("lab", "up", "--disk", "1MiB", "--name", "x-none"), "a disk of 1 MiB is too small"),
    ],
)
def test_a_wrong_value_ends_with_2_and_one_message(gpurun, tmp_path, monkeypatch, argv, says):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path))
    code, out, err = gpurun(*argv)
    assert (code, out) == (2, "")
    assert says in err and "Traceback" not in err


def test_all_commands_show_one_zone_and_name_it(gpurun, tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path))
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    try:
        at_s = 1_764_200_000.0  # 2025-11-26 23:33:20 UTC
        store = JobStore(tmp_path)
        spec = JobSpec(name="t", image="i:1", gpus=1, command=("true",))
        job = store.create(spec, inventory=tmp_path / "inventory.yaml", now_s=at_s)
        job.write(job.record().but(state=State.FAILED, started_s=at_s, ended_s=at_s, reason="r", first_failure=None))
        Path(str(job.log)).write_bytes(b"2025-11-26T23:33:20.123456789Z o [0]<stdout>:a\n")
        AuditLog(tmp_path).note("submit", job=job.id)
        assert gpurun("status", job.id)[1].count("2025-11-27 08:33:20 +09:00") == 3
        assert gpurun("logs", job.id, "-t")[1] == "2025-11-27 08:33:20.123 +09:00 [0] a\n"
        assert gpurun("logs", job.id, "--since", "2025-11-27 08:33:20")[1] == "[0] a\n"
        assert gpurun("logs", job.id, "--since", "2025-11-26 23:33:21Z")[1] == ""
        assert " +09:00  " in gpurun("audit")[1]
    finally:
        monkeypatch.undo()
        time.tzset()
