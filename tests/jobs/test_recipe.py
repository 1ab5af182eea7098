from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.errors import BadInput
from gpurun.jobs.recipe import build_spec, convert_flag, read_recipe
from gpurun.jobs.recipe_keys import CONSTRAINTS, FIELDS, HOROVOD, PYTHON, ROLES, SWEEP

GOOD = """\
image: gpurun/train:tf2.15
gpus: 4
command: [python3, train.py, --epochs, "3"]
workdir: .
outputs: /checkpoints
constraints: {generation: pascal, locality: rack}
horovod: {fusion_threshold_mb: 64, cycle_time_ms: 1}
max_restarts: 2
time_limit: 1h
"""


def recipe(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "a'; echo foo"
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(text)
    return folder


def test_a_whole_recipe(tmp_path):
    spec = build_spec(read_recipe(recipe(tmp_path, GOOD)), {}, {})
    assert spec.name == "a'; echo foo"
    assert spec.command == ("python3", "train.py", "--epochs", "3")
    assert spec.workdir == str(tmp_path / "a'; echo foo")
    assert spec.constraints.generations == ("pascal",)
    assert spec.constraints.locality == "rack"
    assert spec.horovod.fusion_threshold_mb == 64
    assert spec.time_limit_s == 3600
    assert spec.max_restarts == 2


def test_flags_win_and_env_is_merged(tmp_path):
    text = GOOD + "env: {A: '1', B: '2'}\n"
    spec = build_spec(
        read_recipe(recipe(tmp_path, text)), {"gpus": 8, "env": {"B": "x y"}}, {"generations": ("hopper",)}
    )
    assert spec.gpus == 8
    assert spec.env == {"A": "1", "B": "x y"}
    assert spec.constraints.generations == ("hopper",)
    assert spec.constraints.locality == "rack"


@pytest.mark.parametrize("gpus", ["0", "-1", "3.5", "four", "1e3", "", "null", "[1]", "{}", "99999999999999999999"])
def test_a_gpu_count_that_cannot_be(tmp_path, gpus):
    with pytest.raises(BadInput, match=r"recipe.yaml:2:\d+: gpus.* \(allowed: 1 to 1000000\)"):
        read_recipe(recipe(tmp_path, GOOD.replace("gpus: 4", f"gpus: {gpus}")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpu: 4", "unknown key 'gpu' in the recipe; did you mean 'gpus'"),
        ("gpus_per_host: 4", "'gpus_per_host' in the recipe; did you mean 'constraints: {gpus_per_host: …}'?"),
        ("fusion_threshold_mb: 4", "did you mean 'horovod: {fusion_threshold_mb: …}'?"),
        ("image: '--privileged'", "image: '--privileged' is not a Docker image reference"),
        ("image: 'a b'", "image: 'a b' is not a Docker image reference"),
        ("outputs: ../x", "outputs: '../x' is not an absolute path"),
        ("outputs: /", "outputs: '/' must be a folder below /, such as /checkpoints"),
        ("image: UPPER:1", "image: 'UPPER:1' is not a Docker image reference in lower case"),
        ("time_limit: 0", "time_limit: '0' must be more than 0"),
        ("time_limit: 0s", "time_limit: '0s' must be more than 0"),
        ("time_limit: soon", "time_limit: 'soon' is not a time; write a number with its unit"),
        ("time_limit: 1:30", "time_limit: '1:30' could be hours or minutes; write 1h30m or 1m30s"),
        ("controller: slurm", r"controller: 'slurm' is not a known word \(allowed: gloo, mpi\)"),
        ("constraints: {localty: rack}", "unknown key 'localty' in constraints; did you mean 'locality'"),
        ("constraints: [1]", "constraints must be a mapping"),
        ("env: {'A B': x}", "name in env: 'A B' is not a variable's name"),
        ("env: [A]", "env must be a mapping"),
        ("command: ''", "command: '' is not a command that names a program"),
        ('command: "\'"', "command: .* cannot be split into words: No closing quotation"),
        ("secrets: {../x: y}", "name in secrets: '../x' is not a file name"),
        ("mounts: /data", "mounts: '/data' is not a mount such as"),
        ("preemptible: maybe", r"preemptible: 'maybe' is not a truth value \(allowed: true, false\)"),
        ('name: "a\\nb"', r"name: 'a\\nb' is not a text of 1 to 200 characters"),
        ("horovod: {fusion_threshold_mb: -1}", r"fusion_threshold_mb: '-1' is out of range \(allowed: 0 to 1000000\)"),
        ("gpus: 5\ngpus: 6", "given twice"),
        ("x: !!python/object/apply:os.system ['true']", "tags and directives are not allowed"),
        ("\tgpus: 4", "tab"),
        (f"time_limit: {'9' * 400}d", "time_limit: '9{80}…' is too long for a time"),
        ("time_limit: 3651d", "time_limit: '3651d' is more than 3650d"),
        ("horovod: {gloo_timeout: 99999999999999999999999d}", "gloo_timeout: .* is more than 3650d"),
        ("shm_size: 99999999999999999999999TiB", "shm_size: .* is more than 1048576TiB"),
        ("memory: 1Ki", "memory: '1Ki' is less than 1MiB"),
        ("memory: 16", "memory: '16' has no unit; write 16MiB or 16GiB"),
        ("memory: 16Gx", "memory: '16Gx' has the unknown unit 'Gx'; the units are KiB, MiB, GiB"),
        ("memory: 50%", "memory: '50%' is a percentage; write the size itself, such as 16GiB"),
        ("cpus: 0", r"cpus: '0' is out of range \(allowed: 0.1 to 4096\)"),
        ("env: {[a]: b}", "a key of env must be a plain word"),
        ("env: {A: 1, A: 2}", "'A' is given twice in env"),
        ("env: {A: [1]}", "env.A must be a text, not a list or a mapping"),
        ("name: [a]", "name must be a text of 1 to 200"),
    ],
)
def test_wrong_values_name_their_place(tmp_path, line, message):
    key = line.split(":")[0]
    kept = "".join(one + "\n" for one in GOOD.splitlines() if not one.startswith(key + ":"))
    with pytest.raises(BadInput, match=message) as caught:
        read_recipe(recipe(tmp_path, kept + line + "\n"))
    assert "recipe.yaml:" in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_problem_is_said_at_once(tmp_path):
    with pytest.raises(BadInput) as caught:
        read_recipe(recipe(tmp_path, "gpus: 0\nimage: ''\nwhat: 1\n"))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("missing", ["image", "gpus", "command"])
def test_what_a_job_needs(tmp_path, missing):
    kept = "".join(one + "\n" for one in GOOD.splitlines() if not one.startswith(missing + ":"))
    with pytest.raises(BadInput, match=f"no {missing}"):
        build_spec(read_recipe(recipe(tmp_path, kept)), {}, {})


def test_contradictions(tmp_path):
    given_recipe = read_recipe(recipe(tmp_path, GOOD))
    with pytest.raises(BadInput, match="cannot be split"):
        build_spec(given_recipe, {}, {"gpus_per_host": 3})
    with pytest.raises(BadInput, match="min_gpus"):
        build_spec(given_recipe, {"min_gpus": 9}, {})
    with pytest.raises(BadInput, match=r"memory is 8 MiB; at least 16 MiB"):
        build_spec(given_recipe, {"memory_mib": 8}, {})
    with pytest.raises(BadInput, match=r"shm_size \(64 MiB\) is more than memory \(32 MiB\)"):
        build_spec(given_recipe, {"memory_mib": 32, "shm_size_mib": 64}, {})
    with pytest.raises(BadInput, match="the folder does not exist"):
        build_spec(given_recipe, {"workdir": "/nonexistent"}, {})


def test_no_recipe_there(tmp_path):
    with pytest.raises(BadInput, match="none: the recipe does not exist"):
        read_recipe(tmp_path / "none")
    with pytest.raises(BadInput, match=r"the folder has no recipe\.yaml"):
        read_recipe(tmp_path)
    (tmp_path / "my train.py").write_text("print('a'); b: int = 1")
    with pytest.raises(BadInput, match="the file is a program, not a recipe") as caught:
        read_recipe(tmp_path / "my train.py")
    assert caught.value.hint.endswith(f"-- python3 '{tmp_path}/my train.py'")
    with pytest.raises(BadInput, match="empty"):
        read_recipe(recipe(tmp_path, "# nothing\n"))


def test_arguments_arrive_byte_for_byte(tmp_path):
    words = ("sh", "-c", "a'b\"c\n$d `e` \\ \t ü 💥", "")
    assert convert_flag("the command", "command", list(words)) == ("command", words)
    with pytest.raises(BadInput, match="NUL"):
        convert_flag("the command", "command", ["a\0b"])


def test_a_time_without_a_unit_is_refused_whatever_its_key(tmp_path):
    keys = [
        "time_limit: {}", "hang_timeout: {}", "grace: {}", "outputs_every: {}", "rehearse: {}",
        "constraints: {{locality_wait: {}}}", "horovod: {{gloo_timeout: {}}}", "horovod: {{start_timeout: {}}}",
    ]  # fmt: skip
    kept = GOOD.replace("constraints: {generation: pascal, locality: rack}\n", "").replace("time_limit: 1h\n", "")
    kept = kept.replace("horovod: {fusion_threshold_mb: 64, cycle_time_ms: 1}\n", "")
    for key in keys:
        with pytest.raises(BadInput, match=r": '30' has no unit; write 30s, 30m, 30h or 30d"):
            read_recipe(recipe(tmp_path, kept + key.format("30") + "\n"))
        read_recipe(recipe(tmp_path, kept + key.format("1h30") + "\n"))
    assert build_spec(read_recipe(recipe(tmp_path, kept + "time_limit: 1h30\n")), {}, {}).time_limit_s == 5400
    with pytest.raises(BadInput, match=r"gloo_timeout: '0.4s' is less than 1s"):
        read_recipe(recipe(tmp_path, kept + "horovod: {gloo_timeout: 0.4s}\n"))


@given(st.text(max_size=200))
def test_no_text_is_a_traceback(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "recipe.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        build_spec(read_recipe(folder), {}, {})
    except BadInput as error:
        assert error.exit_code == 2


@pytest.mark.parametrize("place", ["x" * 5000, "a" * 300 + "/recipe.yaml"])
def test_a_path_that_cannot_be_looked_at(place):
    with pytest.raises(BadInput, match="cannot read the recipe: File name too long"):
        read_recipe(Path(place))


def test_a_pipe_is_no_recipe(tmp_path):
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(BadInput, match="must be a regular file"):
        read_recipe(tmp_path)


def test_a_recipe_that_fails_while_it_is_read():
    with pytest.raises(BadInput, match="cannot read the recipe"):
        read_recipe(Path("/proc/self/mem"))


def test_a_recipe_without_end():
    with pytest.raises(BadInput, match="regular file"):
        read_recipe(Path("/dev/zero"))


def test_packages_are_named_relative_to_the_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("python: {requirements: r.txt, index: ./wheels, secret: ../n}")
    found = read_recipe(tmp_path).given["python"]
    assert (found.kind, found.path, found.index) == ("requirements", f"{tmp_path}/r.txt", f"{tmp_path}/wheels")
    assert found.secret == f"{tmp_path}/../n"
    assert convert_flag("--requirements", "python", {"requirements": "/r.txt"})[1].path == "/r.txt"


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("{}", "python must name one source of packages, but names none"),
        ("{index: ./wheels}", "python must name one source of packages, but names none"),
        ("{requirements: r.txt, project: .}", "but names requirements and project"),
        ("{requirements: r.txt, index: 'https://me:s3cret@x.example/simple'}", "has a password in its URL"),
        ("{requirement: r.txt}", "did you mean 'requirements'"),
        ("[numpy]", "python must be a mapping"),
        ("{requirements: [numpy]}", "requirements must be a text"),
    ],
)
def test_packages_come_from_one_source(tmp_path, python, why):
    (tmp_path / "recipe.yaml").write_text(f"python: {python}")
    with pytest.raises(BadInput, match=why) as caught:
        read_recipe(tmp_path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("given", [{"command": ("a\ud800",)}, {"name": "\udcff"}, {"env": {"A": "\udcff"}}])
def test_what_is_not_utf_8_is_refused_before_anything_is_stored(given):
    with pytest.raises(BadInput, match="is not UTF-8"):
        build_spec(None, {"image": "i", "gpus": 1, "command": ("true",), **given}, {})


SECTIONS = {
    "": FIELDS, "constraints": CONSTRAINTS, "horovod": HOROVOD, "roles": ROLES, "sweep": SWEEP, "python": PYTHON,
}  # fmt: skip
EXAMPLES = [
    (section, key, example)
    for section, keys in SECTIONS.items()
    for key, kind in keys.items()
    for example in kind.examples
]


@pytest.mark.parametrize(("section", "key", "example"), EXAMPLES)
def test_the_examples_of_a_key_are_right(tmp_path, section, key, example):
    line = f"{key}: {example}\n"
    line += "  requirements: r.txt\n" if key in ("index", "secret") else ""
    (tmp_path / "recipe.yaml").write_text(f"{section}:\n  {line}" if section else line)
    found = read_recipe(tmp_path)
    assert found.sweep if "sweep" in (section, key) else found.given


def test_every_key_says_what_it_means_with_an_example():
    kinds = [(key, kind) for keys in SECTIONS.values() for key, kind in keys.items()]
    assert [key for key, kind in kinds if not kind.about or not kind.examples] == []


@pytest.mark.parametrize(
    ("fits", "longer", "why"),
    [
        ({"env": {"A": "ü" * 32_766}}, {"env": {"A": "ü" * 32_767}}, "at most 65536 are allowed"),
        ({"env": {"A": "'" * 3000}}, {"env": {"A": "'" * 13_000}}, "at most 65536 are allowed"),
        ({"command": ("'" * 131_071,)}, {"command": ("x" * 131_072,)}, "Linux allows at most 131071"),
        ({"command": ("x" * 131_000,) * 4}, {"command": ("x" * 131_000,) * 5}, "at most 524288"),
    ],
)  # fmt: skip
def test_what_no_launcher_could_pass_on_is_refused_before_anything_starts(fits, longer, why):
    """Horovod quotes the environment a second time, and hands all of it to one ``sh -c``."""
    given = {"image": "i", "gpus": 1, "command": ("true",)}
    assert build_spec(None, {**given, **fits}, {})
    with pytest.raises(BadInput, match=why):
        build_spec(None, {**given, **longer}, {})


@pytest.mark.parametrize("name", ["GPURUN_RUN", "GPURUN_ATTEMPT", "GPURUN_RANK", "GPURUN_NEW"])
def test_what_a_rank_needs_to_say_how_it_ends_is_not_a_persons_to_set(tmp_path, name):
    """A rank without its folder was a container that ended with 70, and its host was blamed and left."""
    source = read_recipe(recipe(tmp_path, GOOD))
    with pytest.raises(BadInput, match=f"env: gpurun itself sets {name}"):
        build_spec(source, {"env": {name: "/x", "GPURUN_PARAMETERS": "{}"}}, {})
    assert build_spec(source, {"env": {"GPURUN_PARAMETERS": "{}", "gpurun_x": ""}}, {})


@pytest.mark.parametrize("word", ["", "-", "--", "-x", "--help"])
def test_a_command_begins_with_a_program(tmp_path, word):
    """A shell took ``exec --`` for nothing to do, and the gang had succeeded."""
    with pytest.raises(BadInput, match="is not a program"):
        build_spec(read_recipe(recipe(tmp_path, GOOD)), {"command": (word, "true")}, {})
