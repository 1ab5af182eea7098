"""Every page of help: each argument and option is explained, each command says what it does."""

from __future__ import annotations

import os
import re
import shlex

import click
import pytest
from typer.main import get_command

from gpurun.cli import printing
from gpurun.cli.foreign import OPTIONS, REMOVES, TABLE, meant
from gpurun.cli.main import COMMANDS, SECTIONS, TAKES_COMMAND, app, split_command
from gpurun.cli.manual import pages as command_pages
from gpurun.jobs.recipe import FOREIGN
from gpurun.jobs.recipe_keys import SETTINGS


def pages():
    """Every command below `gpurun`: its words, and itself."""
    found, left = [], [(("gpurun",), get_command(app))]
    while left:
        words, command = left.pop()
        found.append((words, command))
        if isinstance(command, click.Group):
            context = click.Context(command, help_option_names=["-h", "--help"])
            left += [((*words, name), command.get_command(context, name)) for name in command.list_commands(context)]
    return sorted(found, key=lambda page: page[0])


PAGES = pages()


@pytest.mark.parametrize(("words", "command"), PAGES, ids=[" ".join(words) for words, _ in PAGES])
def test_help_explains_every_argument_and_option(words, command):
    context = click.Context(
        command, info_name=" ".join(words), help_option_names=["-h", "--help"]
    )  # a command keeps it
    page = command.get_help(context)
    flat = " ".join(page.split())
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion") or getattr(parameter, "hidden", False):
            continue
        help_text = getattr(parameter, "help", None)
        assert help_text, f"{words}: {parameter.name} has no help"
        assert help_text[0].isupper() and help_text.rstrip(")")[-1] in ".?", f"{words}: {parameter.name}: {help_text!r}"
        assert re.sub(r"\s", "", help_text) in re.sub(r"\s", "", flat), f"{words}: {parameter.name} is not shown"
    assert command.help and command.help[0].isupper(), words
    assert re.search(r"[.:]$", command.help.strip().split("\n\n")[0]) or words[0] == "gpurun", words


def test_help_says_what_ctrl_c_does_to_the_job():
    helps = {" ".join(words): command for words, command in PAGES}
    (follow,) = (one for one in helps["gpurun submit"].params if one.name == "follow")
    assert "Ctrl-C cancels the job" in follow.help
    assert "Ctrl-C ends the view, and the job continues." in helps["gpurun follow"].help


def test_usage_shows_where_a_program_goes():
    for words, command in PAGES:
        takes = words[1:] and words[1] in TAKES_COMMAND and not isinstance(command, click.Group)
        if takes and words[-1] in ("submit", "exec", "ssh", "run"):
            assert "[-- COMMAND…]" in command.get_usage(click.Context(command)), words


def test_a_group_shows_one_whole_line_for_each_command():
    for words, command in PAGES:
        if isinstance(command, click.Group):
            context = click.Context(
                command, info_name=" ".join(words), help_option_names=["-h", "--help"]
            )  # a command keeps it
            page = command.get_help(context)
            assert "..." not in page[page.index("Start:" if words == ("gpurun",) else "Commands:") :], words


@pytest.mark.parametrize(("words", "command"), PAGES, ids=[" ".join(words) for words, _ in PAGES])
def test_one_option_has_one_meaning_in_all_commands(words, command):
    shared = {"--json": "as_json", "--inventory": "inventory", "--yes": "yes"}
    for parameter in command.params:
        for name in parameter.opts:
            assert shared.get(name, parameter.name) == parameter.name, words


def test_every_option_that_writes_a_file_is_to_file_with_one_wording():
    """It was `--to FILE.svg`, `--svg`, `--plot`, `--html`, `--textfile` and `--zipapp`, each with other words."""
    options = [
        (words[1:], each) for words, command in PAGES for each in command.params if isinstance(each, click.Option)
    ]
    write = {words: each for words, each in options if re.match(r"Write .* to this .*file", each.help or "")}
    names = {"bench", "inventory probe", "metrics", "report", "simulate", "sweep plot"}
    assert {" ".join(words) for words in write} == names
    assert all(each.metavar == "FILE" and "--to" in each.opts for each in write.values())
    assert {each.metavar for _, each in options if "--to" in each.opts} == {"FILE", "DIR"}


def test_the_help_lists_commands_in_six_groups_and_says_where_the_docs_are(gpurun):
    code, out, _ = gpurun("--help")
    heads = [line.rstrip(":") for line in out.splitlines() if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert (code, heads) == (0, ["Options", *SECTIONS]) and len(SECTIONS) == 6
    assert len(COMMANDS) == sum(map(len, SECTIONS.values()))
    lines = re.findall(r"^  ([a-z]+ +)[A-Z]", out[out.index("Start:") :], re.MULTILINE)
    columns = {len(each) for each in lines}
    assert (len(columns), len(lines)) == (1, len(COMMANDS)), "one column for all groups"
    assert "docs/tutorial.md" in out and "gpurun man" in out


ALL = {page.name for page in command_pages()}


def test_words_of_other_tools_name_a_command_that_there_is():
    for group, words in TABLE.items():
        for word, command in words.items():
            words_of = [part for part in f"{group} {command}".split() if not part.startswith("--")]
            assert " ".join(words_of) in ALL, (group, word)
            assert f"{group} {word}" not in ALL, f"{group} {word} is a command"


WRONG_WORDS = {
    "gpurun status": "squeue ps jobs list ls LS staus sattus", "gpurun cancel": "kill scancel delete stop cancle cancl",
    "gpurun submit": "run launch sbatch sumbit", "gpurun inventory list": "sinfo nodes hosts",
    "gpurun --help": "help", "gpurun --install-completion": "completion", "gpurun prune": "prnue",
    "gpurun inventory remove": "inventory/rm", "gpurun sweep status": "sweep/stauts", "gpurun data list": "data/lsit",
    "gpurun lab down": "lab/stop",
}  # fmt: skip
HARMLESS = ("runs", "rune", "proud", "tune", "can", "panel", "share1", "inventory/move", "inventory/moved", "lab/town")
STRANGE = ("", "x" * 4000, "日本語", "$(touch x)", "a\nb", "\x1b[31m", "[", "*")


def test_a_wrong_word_gets_one_suggestion_and_a_harmless_one_never_what_removes(gpurun, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    wanted = {word: command for command, words in WRONG_WORDS.items() for word in words.split()}
    for word in (*wanted, *HARMLESS, *STRANGE):
        code, out, err = gpurun(*word.split("/"))
        found = re.findall(r"Did you mean `(.*?)`", err)
        assert (code, out, "No such command" in err, "\x1b" in err) == (2, "", True, False), word
        assert err.count("Did you mean") == len(found) <= 1, err
        if word in wanted:
            assert found == [wanted[word]]
        assert word in wanted or not [one for one in found if one.split()[-1] in REMOVES], err


WRONG_OPTIONS = {
    "submit -N 2": "--gpus", "submit --nodes=2": "--gpus", "submit --gres gpu:4": "--gpus", "submit -t 1:00:00":
    "--time-limit", "submit --time 1h": "--time-limit", "submit --mem 16G": "--memory", "submit -p gpu": "--pool",
    "submit --cpus-per-task 4": "--cpus", "submit -J x": "--name", "submit --partition gpu": "--pool",
    "submit --imgae x": "--image", "submit --nproc_per_node=4": "--gpus-per-host", "status -u me": "--user",
    "status -t RUNNING": "--state", "cancel -u me": "--mine", "history -S now-1day": "--since", "cancel --forse": "",
    "cancel --al": "", "prune --purg": "", "submit --zzz": "", "submit -Z": "", "top -n 1": "", "audit --since 1h": "",
    "sweep run -N 2": "--gpus", "scale run --partition x": "--pool",
}  # fmt: skip


def test_a_wrong_option_gets_the_one_that_it_means(gpurun):
    """`--partition` suggested `--generation`, and `--cpus-per-task` suggested `--gpus-per-host`."""
    for line, wanted in WRONG_OPTIONS.items():
        code, out, err = gpurun(*line.split())
        assert (code, out) == (2, "") and "No such option" in err, (line, err)
        assert re.findall(r"Did you mean '(.*?)'\?", err) == [wanted] * bool(wanted), (line, err)
    assert "`-n 8 --gpus-per-host 4` takes two hosts" in gpurun("submit", "-N", "2")[2]
    known = {name for _, command in PAGES for param in command.params for name in param.opts}
    assert {*OPTIONS} <= known
    assert {*FOREIGN} <= {*SETTINGS}


def test_hosts_in_several_words_are_answered_with_a_host_set(gpurun):
    for line in ("inventory list h1 h2", "doctor h1 h2 h3", "inventory cordon h1 h2", "images h1 h2"):
        code, _, err = gpurun(*line.split())
        assert code == 2 and err.endswith(
            "→ write all hosts as one word, such as gpu-01,gpu-02 or gpu-[01-16] or @rack:r1\n"
        ), err
    assert "as one word" not in gpurun("config", "view", "x")[2]


def test_a_program_without_its_dashes_is_shown_with_them(gpurun):
    for line, shown in {
        "submit -n 4 --image x:1 python train.py": "gpurun submit -n 4 --image x:1 -- python train.py",
        "submit -n 4 torchrun train.py --epochs 3": "gpurun submit -n 4 -- torchrun train.py --epochs 3",
        "submit python train.py -n 4": "gpurun submit … -- python3 train.py",
        "submit -n 4 it's x": "gpurun submit … -- python3 train.py",
        "exec job python3 x.py": "gpurun exec JOB -- nvidia-smi",
    }.items():
        code, _, err = gpurun(*line.split())
        assert code == 2 and f"  → write a program and its arguments after --: {shown}\n" in err, (line, err)


def test_no_command_that_removes_is_near_to_a_word_that_begins_otherwise():
    for group in ("gpurun", "gpurun inventory", "gpurun sweep", "gpurun lab", "gpurun data"):
        commands = [name.removeprefix(f"{group} ") for name in ALL if name.startswith(f"{group} ")]
        for removes in set(commands) & set(REMOVES):
            for other in (f"x{removes}", removes[1:], f"an-{removes}"):
                found = TABLE.get(group, {}).get(other) or meant(group, other, commands)
                assert found is None or found.split()[-1] != removes, (group, other)


@pytest.mark.parametrize(
    "argv", [("status",), ("inventory", "list"), ("config", "view"), ("lab", "status"), ("config",)]
)
def test_quiet_and_no_color_also_stand_behind_a_command(gpurun, argv, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("GPURUN_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):  # neither this machine's jobs nor its labs
        monkeypatch.setenv(name, str(tmp_path / name))
    for flag in ("-q", "--quiet", "--no-color"):
        for words in ((*argv, flag), (argv[0], flag, *argv[1:])):
            monkeypatch.setenv("NO_COLOR", "")
            monkeypatch.setattr(printing, "quiet", False)
            _, _, err = gpurun(*words)
            assert "No such option" not in err, words
            assert printing.quiet == (flag != "--no-color"), words
            assert (os.environ["NO_COLOR"] == "1") == (flag == "--no-color"), words
            assert gpurun(*argv, "--help")[1].count(flag) == 0, "its help does not repeat them"


def test_an_example_is_one_line_behind_a_dollar_at_any_width(gpurun, monkeypatch):
    for columns in ("40", "60", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        for page in command_pages():
            for example in page.examples:
                assert f"\n  $ {example}\n" in gpurun(*page.words[1:], "--help")[1], (columns, page.name)


def test_commands_that_need_one_have_an_example_and_click_takes_each():
    """A command with an argument, or with three options of its own, needs one. Nothing of it runs."""
    for page in command_pages():
        own = [name for name, _ in page.options if not re.search(r"--(json|help|inventory|yes)\b", name)]
        if not page.commands and (page.arguments or len(own) > 2):
            assert page.examples, page.name
        for example in page.examples:
            line = re.split(r" (?:&&|>|\|) ", example)[0]
            words, _ = split_command(shlex.split(line)[1:])
            context = get_command(app).make_context("gpurun", words)
            while isinstance(context.command, click.Group):
                _, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
                context = command.make_context(command.name, rest, parent=context)
            assert context.command_path.startswith(page.name), example


def test_what_an_option_takes_is_said_in_a_word():
    """Neither click's own names of types nor single letters; what may be given twice says so."""
    for words, command in PAGES:
        for one in command.params:
            if isinstance(one, click.Option) and not one.is_flag and not one.hidden:
                taken = one.make_metavar(click.Context(command))
                assert taken not in ("INTEGER", "FLOAT", "INTEGER RANGE", "FLOAT RANGE")
                assert len(taken.split("=")[0].strip("[]")) > 1, (words, one.name, taken)
                assert not one.multiple or f"You can repeat {one.opts[-1]}." in (one.help or ""), (words, one.name)
