"""Manual pages: one for each command, that groff formats without a warning and that say what the help says."""

from __future__ import annotations

import re
import subprocess

import pytest

from gpurun import __version__
from gpurun.cli.manual import CommandPage, manual_page, pages
from gpurun.errors import EXIT_CODES

FORMAT = ("groff", "-man", "-Tutf8", "-P-cbou", "-ww", "-rLL=100n")


def formatted(source):
    """A page as people see it, and what groff warns of."""
    done = subprocess.run(FORMAT, input=source, capture_output=True, text=True)
    return done.stdout, done.stderr


def flat(text):
    return re.sub(r"[\s`]+", "", text)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    from gpurun.cli.main import main

    folder = tmp_path_factory.mktemp("man") / "man1"
    with pytest.raises(SystemExit) as ended:
        main(["--quiet", "man", "--to", str(folder)])
    assert ended.value.code == 0
    return folder


def test_each_command_has_a_page(written):
    names = {path.name for path in written.iterdir()}
    assert names == {f"{'-'.join(page.words)}.1" for page in pages()}
    assert {"gpurun.1", "gpurun-submit.1", "gpurun-inventory-set.1", "gpurun-lab-up.1"} <= names


def test_groff_warns_of_nothing(written):
    done = subprocess.run([*FORMAT, "-z", *sorted(written.iterdir())], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["gpurun", "gpurun submit", "gpurun inventory", "gpurun inventory set", "gpurun wait"])
def test_a_page_says_what_the_help_says(written, name):
    (page,) = (page for page in pages() if page.name == name)
    shown, _ = formatted((written / f"{'-'.join(page.words)}.1").read_text())
    text = flat(shown)
    wanted = [f"{'-'.join(page.words)} - {page.summary}", f"{name} {page.usage}", *page.about, *page.examples]
    wanted += [part for entry in (*page.arguments, *page.options) for part in entry]
    wanted += [f"{code} {meaning}" for code, meaning in EXIT_CODES.items()]
    assert [each for each in wanted if flat(each) not in text] == []
    assert f"gpurun {__version__}" in shown


def test_what_roff_would_take_for_its_own_is_printed_letter_for_letter():
    hostile = (".so /etc/passwd", "'br", r"back\\slash \fB \n[x]", "-minus --long-one", '^~`"quoted" … → ü')
    page = CommandPage(("gpurun", "x"), ".TH no", "[OPTIONS]", hostile, (), {}, ())
    shown, warnings = formatted(manual_page(page, "1"))
    assert warnings == ""
    assert [each for each in hostile if flat(each) not in flat(shown)] == []


def test_a_folder_that_cannot_be_written_is_named(gpurun, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = gpurun("man", "--to", str(tmp_path / "file" / "man1"))
    assert code == 2 and "file/man1: the manual pages cannot be written: Not a directory" in err
