"""Every command: without arguments, with wrong ones, for help, as JSON, without colours, on a narrow terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import click
import pytest
from how_many import count
from typer.main import get_command

import gpurun as package
from gpurun.cli.main import app
from gpurun.cli.manual import contexts, pages
from gpurun.jobs.spec import JobSpec
from gpurun.jobs.store import JobStore
from gpurun.remote.fleet import Fleet

INVENTORY = """\
version: 1
defaults: {user: train, generation: pascal, gpus: 4, port: 1, ssh: paramiko}
fabrics: {tcp: {kind: tcp, interface: lo}}
racks: {r1: {hosts: {h1: {address: 127.0.0.1}}}}
"""
CODES = {0, 1, 2, 3, 4, 5}
PAGES = [page for page in pages() if len(page.words) > 1]
COMMANDS = [page for page in PAGES if not page.commands]
NAMES = [page.name for page in COMMANDS]
GROUPS = [page for page in PAGES if page.commands]
COMMAND_OF = {context.command_path: context.command for context in contexts("gpurun", get_command(app))}
NOT_RUN = ("gpurun web", "gpurun lab", "gpurun timer", "gpurun inventory edit")
"""Commands that serve until Ctrl-C, change the machine, or open an editor: only their help and refusals are tried."""
AS_IT_IS = (
    "gpurun doctor",
    "gpurun metrics",
    "gpurun config view",
    "gpurun inventory schema",
    "gpurun inventory show",
    "gpurun inventory export",
)
"""Commands whose output is for other programs, or word for word: a terminal wraps it."""
ARGUMENTS = {  # what a command needs to print JSON, and the exit codes that it may have then
    "submit": (["--image", "i:1", "-n", "1", "--dry-run"], {0}),
    "simulate": (["trace.csv"], {0}),
    "inventory cordon": (["h1"], {0}), "inventory uncordon": (["h1"], {0}),
    "inventory drain": (["h1"], {0}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cluster(tmp_path, monkeypatch):
    """One host that refuses connections; no job, no terminal, and an empty home."""
    for name in ("HOME", "GPURUN_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        (tmp_path / name.lower()).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "trace.csv").write_text("submit_time_s,duration_s,gpus,job_id\n0,60,1,a\n")
    monkeypatch.setenv("GPURUN_INVENTORY", str(tmp_path / "inventory.yaml"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.chdir(tmp_path)


def may_run(page) -> bool:
    return not page.name.startswith(NOT_RUN)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_help_fits_a_narrow_terminal_without_colours(gpurun, page, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = gpurun(*page.words[1:], "--help")
    assert (code, err) == (0, "")
    assert out.startswith(("Usage: ", "usage: ")) and "\x1b" not in out
    too_wide = [line for line in out.splitlines() if len(line) > 60 and " " in line.strip()[:50]]
    assert not [line for line in too_wide if not line.startswith("  $ gpurun ")]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_wrong_option_is_one_message(gpurun, page):
    code, out, err = gpurun(*page.words[1:], "--no-such-option")
    assert (code, out) == (2, "")
    assert "--no-such-option" in err


@pytest.mark.parametrize("page", [page for page in COMMANDS if may_run(page)], ids=lambda page: page.name)
def test_without_arguments_and_with_nobody_to_ask(gpurun, page, monkeypatch):
    with Path("/dev/null").open() as closed:
        monkeypatch.setattr(sys, "stdin", closed)
        code, out, err = gpurun(*page.words[1:])
    assert code in CODES
    assert "\x1b" not in out + err
    if code:
        assert err.strip()


@pytest.mark.parametrize("page", GROUPS, ids=lambda page: page.name)
def test_a_group_without_a_command_shows_its_help(gpurun, page):
    code, out, err = gpurun(*page.words[1:])
    if page.name == "gpurun config":  # it has one command
        assert (code, out) == (0, gpurun("config", "view")[1])
    else:
        assert code == 2 and "Usage: " in out + err


@pytest.mark.parametrize("page", [page for page in COMMANDS if may_run(page)], ids=lambda page: page.name)
def test_output_fits_a_narrow_terminal_without_colours(gpurun, page, monkeypatch, tmp_path):
    """One job has ended. Only a word of its own may be wider than the terminal: nobody wants a path in two pieces."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    store = JobStore(tmp_path / "gpurun_home")
    spec = JobSpec(name="a'; \x1b[31m训练 " * 9, image="i:1", gpus=1, command=("train", "x" * 99))
    store.retire(store.create(spec, inventory=tmp_path / "inventory.yaml", now_s=1.0).id)
    code, out, err = gpurun(*page.words[1:], *ARGUMENTS.get(" ".join(page.words[1:]), ([], CODES))[0])
    assert code in CODES and "\x1b" not in out
    assert not re.search(r"\x1b\[[\d;]*m", err)  # a bar moves the cursor
    if not page.name.startswith(AS_IT_IS):
        assert [line for line in out.splitlines() if len(line) > 60 and " " in line.strip()[:50]] == []


@pytest.mark.parametrize(
    "page", [page for page in COMMANDS if may_run(page) or not page.arguments], ids=lambda page: page.name
)
def test_a_wrong_argument_is_one_message(gpurun, page):
    words = ["$(touch pwned)'\n"] * max(1, sum(name.isupper() for name, _ in page.arguments))
    code, out, err = gpurun(*page.words[1:], *words)
    assert code == 2, err
    assert out == "" and err.strip() and "\x1b" not in err


@pytest.mark.parametrize(
    "page", [page for page in COMMANDS if may_run(page) and any("--json" in name for name, _ in page.options)],
    ids=lambda page: page.name,
)  # fmt: skip
def test_json_is_one_document_or_nothing(gpurun, page):
    words, codes = ARGUMENTS.get(" ".join(page.words[1:]), ([], CODES))
    code, out, err = gpurun(*page.words[1:], *words, "--json", *(["--", "true"] if "submit" in page.words else []))
    assert code in codes, err
    if out:
        json.loads(out)
    else:
        assert code and err.strip()


OF_A_JOB = (
    "status",
    "why",
    "follow",
    "logs",
    "events",
    "cancel",
    "requeue",
    "wait",
    "outputs",
    "show",
    "rerun",
    "diff",
    "exec",
)


@pytest.mark.parametrize("name", OF_A_JOB)
def test_ctrl_c_while_a_job_is_looked_for(gpurun, name, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(JobStore, "find", interrupted)
    assert gpurun(name, *["j-00000000"] * (2 if name == "diff" else 1))[0] == 130


@pytest.mark.parametrize("name", ["doctor", "images", "inventory probe", "data list"])
def test_ctrl_c_while_hosts_are_asked(gpurun, name, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Fleet, "open", interrupted)
    assert gpurun(*name.split())[0] == 130


NEEDED = {  # arguments that a command parses before it begins
    "gpurun scale run": ["-n", "1"], "gpurun inventory add": ["h9", "rack=r1", "gpus=1"], "gpurun man": ["--to", "man"],
    "gpurun inventory diff": ["1"], "gpurun share": ["shared", "--group", "root"],
}  # fmt: skip


def interrupt_call(number):
    """Raise KeyboardInterrupt in the main thread, as Ctrl-C does, at the n-th call of a function of gpurun.

    Not while a module is imported: tests that follow would meet half a module.
    """
    here, calls = str(Path(package.__file__).parent), 0

    def profile(frame, event, _):
        nonlocal calls
        if event != "call" or not frame.f_code.co_filename.startswith(here):
            return
        calls += 1
        if calls >= number and not imports(frame):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)


def imports(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def words_of(page):
    """Arguments with which a command does more than refuse them."""
    words, _ = ARGUMENTS.get(" ".join(page.words[1:]), ([], CODES))
    names = [name for name, _ in page.arguments if name.isupper()]
    known = {"JOB": ["j-00000001"], "JOB…": ["j-00000001"], "HOST": ["h1"], "HOSTS": ["h1"]}
    return words or NEEDED.get(page.name) or [word for name in names for word in known.get(name, ["x"])]


@pytest.mark.parametrize("page", COMMANDS, ids=NAMES)
def test_ctrl_c_at_any_call_is_exit_code_130(gpurun, page, monkeypatch):
    """Commands that may not run are interrupted at once; so is `ssh`, which would replace this process."""
    callback = COMMAND_OF[page.name].callback
    ended = False
    for number in (1, 10, 100, 1000) if may_run(page) and page.name != "gpurun ssh" else (1,):
        if ended:
            break

        def begin(*args, number=number, **options):
            interrupt_call(number)
            try:
                return callback(*args, **options)
            finally:
                nonlocal ended
                ended = sys.getprofile() is not None
                sys.setprofile(None)

        monkeypatch.setattr(COMMAND_OF[page.name], "callback", begin)
        code, _, err = gpurun(*page.words[1:], *words_of(page))
        assert code in (CODES if ended else {130}), (number, err)


WRONG = (
    "x'\n\x1b[2J",
    "",
    "-1",
    "9" * 40,
    "日本",
    "nan",
    "1e999",
    "\udcff",
    "a" * 5000,
    "../..",
    "@x",
    "[",
    "=",
    ",",
    "1:30:x",
)
"""No number, time, size or file, or one out of every range."""
ANY_TEXT = re.compile(r"name|reason|user|pool|project|host|job|resume|to|html|svg|zipapp|discard|textfile|plot|workdir")
"""Options that take some of them: names, texts, and files to write."""
ONLY_PARSED = (*NOT_RUN, "gpurun ssh")


def wrong_values():
    """For each option of each command some wrong values: one for each change, all with the long profile."""
    every = [
        (page, option)
        for page in COMMANDS
        for option in COMMAND_OF[page.name].params
        if isinstance(option, click.Option) and not option.is_flag and not option.hidden
    ]
    for at, (page, option) in enumerate(every):
        for value in dict.fromkeys(
            WRONG[(at + more) % len(WRONG)] for more in range(count("wrong values of an option"))
        ):
            yield page, option, value


def test_a_wrong_value_of_an_option_is_one_message(gpurun, monkeypatch, tmp_path):
    """Exit code 2, or the command runs where any text is a value. Commands that may not run are only parsed."""
    for page in COMMANDS:
        if page.name.startswith(ONLY_PARSED):
            monkeypatch.setattr(COMMAND_OF[page.name], "callback", lambda **_: None)
    for number, (page, option, value) in enumerate(wrong_values()):
        if number % 20 == 0:  # files that commands write have such names, too
            (tmp_path / str(number)).mkdir()
            monkeypatch.chdir(tmp_path / str(number))
        words = [word for word in words_of(page) if word != "x" or "[" not in str(page.arguments)]
        code, out, err = gpurun(*page.words[1:], *words, f"{option.opts[0]}={value}")
        case = (page.name, option.opts[0], value[:40], err[:300])
        assert code in CODES and bool(code) <= bool(err.strip()), case
        assert "\x1b" not in out + err, case
        assert code == 2 or page.name.startswith(ONLY_PARSED) or ANY_TEXT.search(option.name), case


def test_values_that_were_tracebacks_are_refused(gpurun, tmp_path):
    for argv in (
        ("inventory", "probe", "--zipapp", "."), ("inventory", "probe", "--zipapp", "a" * 5000),
        ("share", "shared", "--group", "9" * 40), ("share", "shared", "--group", str(2**32 - 1)),
        ("report", "--project", "\udcff"), ("history", "--name", "\udcff"), ("logs", "\udcff"),
        ("web", "--idle", "x"), ("tensorboard", "s", "--idle", "x"), ("status", "-i", ""), ("data", "stage", "none"),
    ):  # fmt: skip
        code, out, err = gpurun(*argv)
        assert (code, out) == (2, ""), argv
        assert "b'" not in err and "\udcff" not in err, argv


def test_a_change_of_an_inventory_cannot_control_a_terminal(gpurun, tmp_path):
    path = tmp_path / "inventory.yaml"
    assert gpurun("inventory", "set", "h1", "gpus=2", "--yes")[0] == 0
    path.write_text(f"{path.read_text()}# \x1b[2J\x9b2J\n")
    for words in (["undo", "--dry-run"], ["undo", "--yes"], ["diff"], ["set", "h1", "gpus=3", "--dry-run"]):
        _, out, err = gpurun("inventory", *words)
        assert "\x1b" not in out + err and "\x9b" not in out + err, words


def test_no_name_is_a_traceback_where_the_locale_has_no_unicode(gpurun, monkeypatch, tmp_path):
    """Each command and its help, on a stdout that has Latin-1 alone. A job has a Chinese name."""
    store = JobStore(tmp_path / "gpurun_home")
    spec = JobSpec(name="llm-训练…", image="i:1", gpus=1, command=("训练", "…"))
    store.retire(store.create(spec, inventory=tmp_path / "inventory.yaml", now_s=1.0).id)
    for page in pages():
        runs = page in COMMANDS and not page.name.startswith(ONLY_PARSED)
        for words in (["--help"], *([words_of(page)] if runs else [])):
            written = io.BytesIO()
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
            code, _, err = gpurun(*page.words[1:], *words)
            assert code in CODES and "Unicode" not in err, page.name
            assert written.getvalue() or words != ["--help"], page.name
