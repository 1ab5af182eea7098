"""Each setting is declared once: a recipe, a flag of three commands and Python say the same, in the same words."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
import yaml

from gpurun.api import asking
from gpurun.cli import completion
from gpurun.cli.groups import SCALE
from gpurun.cli.groups import SWEEP as SWEEPS
from gpurun.cli.job_options import MEASURE, OUTPUT, flags_of, settings_for
from gpurun.cli.main import COMMANDS, _load
from gpurun.cli.sweep_commands import _wish
from gpurun.errors import BadInput
from gpurun.inventory.read import load_inventory
from gpurun.jobs.recipe import build_spec, convert_flag, read_recipe
from gpurun.jobs.recipe_keys import CONSTRAINTS, FIELDS, GROUPS, RETRY, SETTINGS, SWEEP
from gpurun.jobs.spec import Retry

PLACES = {"submit": COMMANDS["submit"], "sweep run": SWEEPS["run"], "scale run": SCALE["run"]}
INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, fabric: tcp}
fabrics: {tcp: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {"h[1-2]": {}}}, r2: {hosts: {"h[3-4]": {}}}}
"""
BASE = {"image": "i:1", "gpus": 8, "command": ["true"], "memory": "128GiB", "name": "n"}
OWN_NAMES = ("hosts", "mounts", "secrets", "python", "retry_only_with_progress")
VALUES = {"hosts": "[h1, h3]", "avoid": "[h2]"}
"""Values that the examples of the documentation cannot have here."""


@pytest.fixture
def found(tmp_path, monkeypatch):
    monkeypatch.setenv("GPURUN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "token.txt").touch()
    return load_inventory(tmp_path / "inventory.yaml")


def option_of(command, key):
    place = PLACES[command]
    (one,) = (each for each in _load(command.split()[-1], place).params if each.name == key)
    return one


def parsed(command, *words):
    """What a command's function gets as `given`."""
    values = _load(command.split()[-1], PLACES[command]).make_context("x", list(words)).params
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}  # as Typer does
    own = {setting.key for setting in settings_for(command)}
    return {key: value for key, value in lists.items() if key in own and value not in (None, [])}


def words_of(setting, value):
    """The words of a command line that say what a recipe says."""
    name = setting.names[-1]
    if setting.is_switch:
        return [name]
    if setting.key == "python":
        return [name, value["requirements"]]
    if setting.is_named:
        return [
            each
            for key, one in value.items()
            for each in (name, f"{key}={','.join(one) if isinstance(one, list) else one}")
        ]
    return [each for one in (value if isinstance(value, list) else [value]) for each in (name, str(one))]


def spec_by(flags):
    """The spec of flags, as `gpurun.head.submit.spec_of` makes it."""
    overrides, constraints = {}, {}
    for flag, (key, value) in flags.items():
        if value is not None:
            field, converted = convert_flag(flag, key, value)
            fields = constraints if key in CONSTRAINTS else overrides
            fields[field] = {**fields.get(field, {}), **converted} if field == "retry" else converted
    return build_spec(None, overrides, constraints)


def test_each_setting_has_a_flag_of_the_same_words_on_three_commands_or_a_reason():
    assert {*FIELDS, *CONSTRAINTS, *SWEEP, *(f"retry_{key}" for key in RETRY if key != "times")} == {*SETTINGS}
    for key, setting in SETTINGS.items():
        if setting.flag is None:
            assert len(setting.no_flag) > 10, key
            continue
        assert setting.names[-1] == f"--{key.replace('_', '-')}" or key in OWN_NAMES, key
        assert bool(setting.flag.why) == (len(setting.flag.only) < len(PLACES)), key
        assert setting.is_switch or setting.value.strip("aAbBrw[]:|"), key
        assert setting.flag.complete in (None, "files", "folders", *vars(completion)), key
        assert setting.is_many == setting.help.endswith(f"You can repeat {setting.names[-1]}."), key
        for command in setting.flag.only:
            option = option_of(command, key)
            assert (option.help, option.metavar, option.rich_help_panel) == (
                setting.help, setting.value, setting.flag.group,
            ), (command, key)  # fmt: skip
            assert option.opts == list(setting.names) and option.multiple == setting.is_many, (command, key)
            assert option.secondary_opts == ([f"--not-{setting.names[-1][2:]}"] if setting.is_switch else [])
    for command, place in PLACES.items():
        assert {setting.key for setting in settings_for(command)} >= {*CONSTRAINTS, "log_limit", "outputs_limit"}
        page = _load(command.split()[-1], place).params
        groups = [one.rich_help_panel for one in page if getattr(one, "rich_help_panel", None)]
        order = [MEASURE, *GROUPS, OUTPUT]
        assert groups == sorted(groups, key=order.index), command


def test_a_key_a_flag_and_python_set_the_same_field(found, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(asking, "spec_of", lambda _r, _i, flags, **_: (asked.append(flags), ()))
    for key in (*CONSTRAINTS, *FIELDS):
        if key == "sweep":
            continue
        for example in [VALUES[key]] if key in VALUES else SETTINGS[key].kind.examples:
            text = yaml.load(example, yaml.BaseLoader)  # texts as they are written
            recipe = {**BASE, **({"constraints": {key: text}} if key in CONSTRAINTS else {key: text})}
            (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
            by_key = build_spec(read_recipe(tmp_path), {}, {})
            python = {**BASE, key: text if key == "retry" else yaml.safe_load(example)}  # YAML 1.1: `on` is true
            asking._spec((python.pop("command"), (), {}), found, python, ExitStack())
            assert spec_by(asked.pop()) == by_key, (key, example)
            if SETTINGS[key].flag is None or (key == "retry" and isinstance(text, dict)):
                continue
            for command in SETTINGS[key].flag.only:
                more = ["-n", "1"] if command == "scale run" else []
                given = {**BASE, **parsed(command, *more, *words_of(SETTINGS[key], text))}
                words = given.pop("command")
                assert spec_by(flags_of(given, words, None, found)) == by_key, (command, key, example)


def test_the_flags_of_retry_give_what_its_keys_give_and_a_flag_changes_one_key_of_a_recipe(found, tmp_path):
    keys = {"times": "4", "on": ["time_limit", "hang"], "only_with_progress": "false", "wait": "90s"}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**BASE, "retry": keys}))
    recipe = read_recipe(tmp_path)
    by_key = build_spec(recipe, {}, {}).retry
    assert by_key == Retry(4, ("time_limit", "hang"), only_with_progress=False, wait_s=90.0)
    words = [
        "--retry",
        "4",
        "--retry-on",
        "time_limit",
        "--retry-on",
        "hang",
        "--not-retry-only-progress",
        "--retry-wait",
        "90s",
    ]
    given = {**BASE, **parsed("submit", *words)}
    command = given.pop("command")
    assert spec_by(flags_of(given, command, None, found)).retry == by_key
    _, wait = convert_flag("--retry-wait", "retry_wait", "5s")
    assert build_spec(recipe, {"retry": wait}, {}).retry == replace(by_key, wait_s=5.0)
    _, times = convert_flag("--retry", "retry", "0")
    assert build_spec(recipe, {"retry": times}, {}).retry == replace(by_key, times=0)
    (tmp_path / "recipe.yaml").write_text(json.dumps(BASE))
    with pytest.raises(BadInput, match="but not how often"):
        build_spec(read_recipe(tmp_path), {"retry": wait}, {})


@pytest.mark.parametrize("wrong", ["-1", "1001", "many", "", '{"times": "3", "on": "end"}', '{"wait": "25h"}', "[3]"])
def test_a_wrong_retry_is_refused_with_its_line(wrong, tmp_path):
    (tmp_path / "recipe.yaml").write_text(json.dumps(BASE)[:-1] + f',\n"retry": {wrong or "null"}}}')
    if not wrong:
        assert build_spec(read_recipe(tmp_path), {}, {}).retry is None
        return
    with pytest.raises(BadInput, match=r"recipe\.yaml:2:"):
        build_spec(read_recipe(tmp_path), {}, {})


def test_a_key_of_a_sweep_and_its_flag_say_the_same(found, tmp_path):
    points = {"grid": {"lr": ["1"]}}
    for key in SWEEP:
        for example in SETTINGS[key].kind.examples:
            text = yaml.load(example, yaml.BaseLoader)
            (tmp_path / "recipe.yaml").write_text(json.dumps({**BASE, "sweep": {**points, key: text}}))
            ranges = [f"{name}={value}" for name, value in text.items()] if key == "space" else []
            words = [] if key in ("grid", "space") else ["--grid", "lr=1"]
            words += ["--grid", "lr=1", *ranges] if key == "space" else words_of(SETTINGS[key], text)
            given = parsed("sweep run", *words)
            assert _wish(None, given, ranges) == _wish(read_recipe(tmp_path), {}, ()), (key, example)
    plain = _wish(read_recipe(tmp_path), parsed("sweep run", "--tpe", "5"), ())
    assert (plain.tpe, plain.random, dict(plain.grid)) == (5, None, {"lr": ("1",)})


def test_hosts_may_be_repeated_and_are_host_sets(found):
    given = parsed("submit", "--host", "@rack:r1&h1", "--host", "h[3-4],h1")
    assert flags_of(given, None, None, found) == {"--host": ("hosts", ["h1", "h3", "h4"])}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--secret", "=x\x1b", "--data", "x"), "--data must look like NAME=SOURCE, not 'x'"),
        (("--env", "A\n"), "--env must look like NAME=VALUE, not 'A\\n'"),
        (("--host", "nosuch"), "the inventory has no host 'nosuch'"),
        (("--outputs-limit", "1XB"), "--outputs-limit"),
        (("--prefer", "planet"), "--prefer: 'planet' is not a known word (allowed: host, rack, any)"),
        (("--gpu-model", "\0"), "--gpu-model"),
        (("--locality-wait", "soon"), "--locality-wait"),
    ],
)
def test_a_wrong_value_names_its_flag_on_each_command(found, words, said):
    for command in PLACES:
        more = ["-n", "1"] if command == "scale run" else []
        with pytest.raises(BadInput) as caught:
            spec_by({**flags_of(parsed(command, *more, *words), ["true"], None, found), "-n": ("gpus", 1)})
        assert said in str(caught.value)


def test_a_number_with_a_kind_of_gpu_is_taken_apart_and_an_empty_command_is_said(found):
    """`--gpus A100:8` was no whole number, and of `--` alone gpurun said that the command is not a command."""
    for text, hint in {
        "A100:8": "-n 8 --gpu-model A100;", "8xH100": "-n 8 --gpu-model H100;", "gpu:4": "-n 4", "2:V100-32G":
        "-n 2 --gpu-model V100-32G;",
    }.items():  # fmt: skip
        with pytest.raises(BadInput, match="--gpus takes a number of GPUs, not") as caught:
            flags_of({"gpus": text}, ["x"], None, found)
        assert caught.value.hint.startswith(f"use {hint}"), text
    with pytest.raises(BadInput, match="no command follows `--`"):
        flags_of({"gpus": "4"}, (), None, found)
    for text in ("4:", ":4", "8x", "x8", "A100:8:1", "-1", "1e400"):
        assert flags_of({"gpus": text}, None, None, found) == {"--gpus": ("gpus", text)}


def test_dry_runs_of_sweeps_and_campaigns_start_nothing(gpurun, found, tmp_path):
    base = ("--image", "i:1", "-i", "inventory.yaml", "--host", "@rack:r2", "--dry-run")
    code, out, err = gpurun(
        "sweep", "-n", "2", *base, "--grid", "lr=1,2", "--as-flags", "--json", "--time-limit", "1h", "--", "true"
    )
    plan = json.loads(out)
    assert code == 0 and plan["trials"] == 2 and plan["job"]["time_limit_s"] == 3600, err
    assert plan["job"]["command"] == ["true", "--lr=1"] and plan["placement"]["hosts"][0]["host"] in ("h3", "h4")
    code, out, err = gpurun("scale", *base, "-n", "1,2,99", "--json", "--launcher", "tasks", "--", "true")
    plan = json.loads(out)
    assert code == 0 and plan["runs"] == 6 and [each["gpus"] for each in plan["refused"]] == [99], err
    assert plan["job"]["gpus"] == 2 and plan["placement"]["hosts"][0]["host"] in ("h3", "h4")
    for words, first in ((("sweep", "-n", "1", "--grid", "a=1,2"), "2 trials; "), (("scale", "-n", "1"), "3 runs, ")):
        code, out, _ = gpurun(*words, *base, "--launcher", "tasks", "--", "true")
        assert code == 0 and out.startswith(first)
    assert not (tmp_path / "home" / "sweeps").exists() and not (tmp_path / "home" / "scaling").exists()


def test_a_followed_sweep_prints_its_document_and_exits_with_its_code(gpurun, found, monkeypatch):
    from gpurun.studies import runner

    class Folder:
        id = "s-0000abcd"

        @staticmethod
        def plan():
            return type("Plan", (), {"trials": 2})

    monkeypatch.setattr(runner, "submit_sweep", lambda *_: Folder())
    monkeypatch.setattr("gpurun.cli.sweep_commands._follow", lambda _folder: 1)
    base = ("sweep", "-n", "1", "--image", "i:1", "-i", "inventory.yaml", "--grid", "lr=1,2")
    for more, expected in (("--follow", 1), ("", 0)):
        code, out, _ = gpurun(*base, *filter(None, [more]), "--json", "--", "true")
        assert (code, json.loads(out)) == (expected, {"sweep": "s-0000abcd", "trials": 2})
    assert gpurun(*base, "--follow", "--", "true")[:2] == (1, "")
