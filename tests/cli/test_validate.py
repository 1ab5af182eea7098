"""`gpurun validate`: recipes without an inventory, and their JSON Schema."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest
import yaml

from gpurun.jobs.recipe_keys import recipe_schema

TOP = Path(__file__).parents[2]
WHOLE = "image: i:1\ngpus: 4\ncommand: [python3, train.py]\n"


@pytest.fixture(autouse=True)
def no_inventory(tmp_path, monkeypatch):
    monkeypatch.delenv("GPURUN_INVENTORY", raising=False)
    for name in ("HOME", "GPURUN_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)


def test_every_recipe_here_is_valid_and_fits_the_schema(gpurun):
    checker = jsonschema.Draft202012Validator(recipe_schema())
    checker.check_schema(recipe_schema())
    found = sorted(TOP.glob("recipes/*/recipe.yaml"))
    assert len(found) > 5
    for path in found:
        assert gpurun("validate", str(path.parent))[:2] == (0, ""), path
        assert not list(checker.iter_errors(yaml.safe_load(path.read_text()))), path


def test_a_schema_refuses_what_gpurun_refuses_and_takes_what_it_takes(gpurun):
    code, out, err = gpurun("validate", "--schema")
    assert (code, err) == (0, "") and json.loads(out) == recipe_schema()
    checker = jsonschema.Draft202012Validator(json.loads(out))
    for text, fits in {
        "env: {N: 4, ON: true}": True, "gpus: many": False, "gpu: 1": False, "time_limit: 90m": True, "gpus: 0": False,
        "command: python3 train.py": True, "constraints: {locality: rack}": True, "preemptible: maybe": False,
        "constraints: {locality: moon}": False, "notify: mail:a@b.c": True, "constraints: {nowhere: 1}": False,
    }.items():  # fmt: skip
        whole = {**yaml.safe_load(WHOLE), **yaml.safe_load(text)}
        Path("recipe.yaml").write_text(yaml.safe_dump(whole))
        assert checker.is_valid(whole) == fits, text
        assert gpurun("validate", "recipe.yaml")[0] == (0 if fits else 2), text


def test_each_problem_has_its_place(gpurun):
    Path("odd'; \x1b[2J.yaml").write_text(WHOLE.replace("gpus", "gpsu") + "time_limit: 5\n")
    code, out, err = gpurun("validate", "odd'; \x1b[2J.yaml")
    places = [line.split(": ")[0].rsplit(".yaml", 1)[1] for line in out.splitlines()]
    assert (code, err, places) == (2, "", [":2:1", ":4:13"]) and "\x1b" not in out
    code, out, _ = gpurun("validate", "odd'; \x1b[2J.yaml", "--json")
    told = json.loads(out)
    assert (code, told["valid"], [each["line"] for each in told["problems"]]) == (2, False, [2, 4])


def test_values_that_contradict_each_other_are_found_and_what_flags_give_is_not_missed(gpurun):
    Path("recipe.yaml").write_text(WHOLE + "constraints: {gpus_per_host: 3}\n")
    code, out, _ = gpurun("validate", ".")
    assert (code, out) == (2, "recipe.yaml:4:15: 4 GPUs cannot be split over hosts with exactly 3 GPUs each\n")
    for text, told in {
        "memory: 1GiB\nshm_size: 2GiB\n": "5:1: shm_size (2048 MiB) is more than memory",
        "\n\nmin_gpus: 8\n": "6:1: min_gpus (8) is more than gpus (4)",
        "env:\n  A: b\n  GPURUN_RANK: 3\n": "6:3: env: gpurun itself sets GPURUN_RANK",
        "env: {<<: {GPURUN_RANK: 3}}\n": "4:12: env: gpurun itself sets GPURUN_RANK",
        "secrets:\n  a'; b: no\\x1b[2J\n": "5:3: ",
        "secrets:\n  token: nosuch\n": "5:3: ",
        "data: {a: /nosuch}\n": "4:8: /nosuch: the data set 'a' is not a folder",
        "workdir: nosuch\n": "4:1: ",
        "notify: [https-file:nosuch]\n": "4:",
        "python:\n  requirements: r.txt\n  index: https://a:b@c/\n": "6:3: python: the index has a password",
    }.items():
        Path("recipe.yaml").write_text(WHOLE + text)
        code, out, err = gpurun("validate", ".")
        assert code == 2 and out.startswith(f"recipe.yaml:{told}"), (text, out, err)
    Path("recipe.yaml").write_text("image: i:1\ncommand: [x]\n")
    assert gpurun("validate", ".") == (0, "", "recipe.yaml: valid; give gpus on the command line\n")
    assert json.loads(gpurun("validate", ".", "--json")[1])["missing"] == ["gpus"]


INVENTORY = """version: 1
defaults: {gpus: 8, generation: pascal, fabric: eth}
fabrics: {eth: {kind: tcp, interface: eth0}}
racks: {r1: {hosts: {h1: {}}}}
"""


def test_submit_sweeps_and_campaigns_name_the_line_that_validate_names(gpurun):
    """All of them named the contradiction, and no line; launchers' and sweeps' contradictions were valid."""
    Path("inventory.yaml").write_text(INVENTORY)
    for text, place, told in (
        ("constraints: {gpus_per_host: 3}", "4:15", "4 GPUs cannot be split over hosts with exactly 3 GPUs each"),
        ("env: {A: b, GPURUN_RANK: 3}", "4:13", "env: gpurun itself sets GPURUN_RANK"),
        ("workdir: nosuch", "4:1", "workdir: the folder does not exist, or you may not read it"),
        ("min_gpus: 2\nlauncher: tensorflow", "4:1", "the launcher tensorflow cannot be elastic (min_gpus)"),
        ("\nlauncher: torchrun\nhorovod: {cycle_time_ms: 1}", "6:1", "only the launcher horovod uses"),
        ("launcher: tensorflow\nroles: {workers: 1}", "5:9", "1 worker needs one GPU each, but the job has 4 GPUs"),
        ("launcher: torchrun\nenv: {WORLD_SIZE: 4}", "5:7", "torchrun itself sets WORLD_SIZE"),
        ("launcher: tasks\nenv: {<<: {RANK: 4}}", "5:12", "all 4 ranks would have the same value of RANK"),
        ("command: [torchrun, --bogus, train.py]", "4:1", "gpurun does not know the flag --bogus"),
        ("command: [env, GPURUN_RANK=1, torchrun, train.py]", "4:1", "gpurun itself sets GPURUN_RANK"),
        ("launcher: tasks\nsweep: {grid: {lr: [1, 1]}}", "5:1", "the parameter lr has a value twice"),
        ("launcher: tasks\nsweep: {random: 3, tpe: 3, space: {lr: '1..2'}}", "5:1", "--random and --tpe"),
    ):
        base = WHOLE.replace("command: [python3, train.py]\n", "") if "command:" in text else WHOLE
        line = place if base == WHOLE else f"{int(place[0]) - 1}{place[1:]}"
        Path("recipe.yaml").write_text(f"{base}{text}\n")
        code, out, _ = gpurun("validate", ".")
        assert code == 2 and out.startswith(f"recipe.yaml:{line}: ") and told in out, (text, out)
        found = out.split(" → ")[0].strip()
        for words in (("submit", "."), ("submit", ".", "--dry-run"), ("sweep", ".")):
            if "sweep:" in text and words[0] == "submit":
                continue
            code, _, err = gpurun(*words, "-i", "inventory.yaml")
            assert code == 2 and f"gpurun: {found}\n" in err.replace(" and more", ""), (text, words, err)
    Path("recipe.yaml").write_text("image: i:1\nlauncher: tasks\ncommand: [x]\nconstraints: {gpus_per_host: 3}\n")
    code, _, err = gpurun("scale", ".", "--gpus", "4", "-i", "inventory.yaml")
    assert (code, err) == (2, "gpurun: recipe.yaml:4:15: 4 GPUs cannot be split over hosts with exactly 3 GPUs each\n")


def test_a_key_of_another_tool_names_the_key_that_it_means(gpurun):
    """Each was answered with all 36 keys, and dstack's `nodes` with `roles`."""
    Path("recipe.yaml").write_text("resources: {}\nnum_nodes: 2\nrun: x\nnodes: 2\nsetup: x\ncpu: 1\nzzz: 1\nenv: {}\n")
    code, out, _ = gpurun("validate", ".")
    found = [line.rpartition("did you mean ")[2] for line in out.splitlines() if "allowed:" not in line]
    assert (code, found) == (2, ["'gpus'?", "'gpus'?", "'command'?", "'gpus'?", "'python'?", "'cpus'?"]), out
    assert out.count("allowed:") == 1 and "unknown key 'zzz'" in out


def test_what_flags_say_is_not_a_line_of_the_recipe(gpurun):
    Path("inventory.yaml").write_text(INVENTORY)
    Path("recipe.yaml").write_text(f"{WHOLE}launcher: tasks\nconstraints: {{gpus_per_host: 2}}\nenv: {{A: b}}\n")
    for words, told in (
        (("--gpus-per-host", "3"), "gpurun: 4 GPUs cannot be split over hosts with exactly 3 GPUs each\n"),
        (("-n", "3"), "gpurun: recipe.yaml:5:15: 3 GPUs cannot be split over hosts with exactly 2 GPUs each\n"),
        (("-e", "GPURUN_RANK=1"), "gpurun: env: gpurun itself sets GPURUN_RANK\n"),
        (("-e", "B=1", "--workdir", "nosuch"), "workdir: the folder does not exist, or you may not read it\n"),
        (("--", "env", "GPURUN_RANK=1", "torchrun", "x.py"), "gpurun: gpurun itself sets GPURUN_RANK\n"),
    ):
        code, _, err = gpurun("submit", ".", "-i", "inventory.yaml", *words)
        assert code == 2 and told in err, (words, err)
        assert (".yaml:" in told) == (".yaml:" in err), (words, err)


def test_what_is_no_recipe_is_refused(gpurun):
    os.mkfifo("fifo")
    Path("empty.yaml").write_text("")
    Path("deep.yaml").write_text("[" * 100_000)
    Path("bytes.yaml").write_bytes(b"\xff\xfe\0")
    for words in (
        (),
        ("--schema", "x.yaml"),
        ("none.yaml",),
        ("empty.yaml",),
        ("deep.yaml",),
        ("bytes.yaml",),
        ("fifo",),
    ):
        code, out, err = gpurun("validate", *words)
        assert code == 2 and (out or err), words
