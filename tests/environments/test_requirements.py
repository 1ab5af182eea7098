"""Requirement files, as people write them and as an attacker would."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from gpurun.content.environment import read_requirements
from gpurun.errors import BadInput


def test_comments_joined_lines_and_included_files_become_one_list(write):
    path = write({
        "requirements.txt": "# all\nnumpy<2  # old\n-r sub/more.txt\n-c limits.txt\n\nfoo==1 \\\n --hash=sha256:ab\n",
        "sub/more.txt": "requests[socks]>=2 ; python_version > '3.8'\n-r ../requirements.txt\n--pre\n",
        "limits.txt": "urllib3<3\n",
    })  # fmt: skip
    found = read_requirements(path)
    assert found.lines == (
        "numpy<2", "requests[socks]>=2 ; python_version > '3.8'", "--pre", "foo==1  --hash=sha256:ab"
    )  # fmt: skip
    assert found.constraints == ("urllib3<3",) and not found.has_index and not found.locked


@pytest.mark.parametrize("same", ["numpy<2\n", "numpy<2", "\ufeffnumpy<2\r\n", "# numpy\n\n  numpy<2   # numpy\n"])
def test_what_changes_nothing_changes_no_line(write, same):
    assert read_requirements(write({"r.txt": same})).lines == ("numpy<2",)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-r /etc/shadow", "includes the file '/etc/shadow', which is outside"),
        ("--requirement=/etc/shadow", "is outside the folder"),
        ("-c ../outside.txt", "is outside the folder"),
        ("-r link.txt", "is outside the folder"),
        ("-r .", "must be a regular file"),
        ("-r missing.txt", "cannot read the requirements"),
        ("-e .", "cannot install an editable package"),
        ("--editable=git+https://example.org/x", "cannot install an editable package"),
        ("--index-url file:///etc", "is not a URL with http"),
        ("-i /etc", "is not a URL with http"),
        ("--extra-index-url https://me:s3cret@example.org/simple", "user name or password in a URL"),
        ("foo @ https://tok3n@example.org/foo.whl", "user name or password in a URL"),
        ("--trusted-host example.org", "not an option that gpurun passes"),
        ("--config-settings x=y", "not an option that gpurun passes"),
        ("--pre yes", "not an option that gpurun passes"),
        ("--no-index", "not an option that gpurun passes"),
        ("--find-links", "is not a URL"),
        ("./local.whl", "does not begin with the name of a package"),
        ("/etc/passwd", "does not begin with the name of a package"),
        ("file:///etc/passwd", "is a path|does not begin"),
        ("folder/package", "does not begin with the name|is a path"),
        ("foo @ file:///etc/passwd", "is not a URL with http"),
        ("foo @ ../other", "is not a URL with http"),
        ("'; rm -rf ~ #", "does not begin with the name of a package"),
        ('"quoted"', "does not begin with the name of a package"),
        ("$(touch /tmp/x)", "does not begin with the name of a package"),
        ("foo==${HOME}", "uses an environment variable"),
        ("foo\x00bar", "control character"),
        ("foo\x1b[31m==1", "control character"),
        ("foo==1 \\ # comment", "backslash"),
        ("-", "not an option that gpurun passes"),
        ("--", "not an option that gpurun passes"),
    ],
)
def test_hostile_lines_are_refused_with_their_place(write, line, why):
    path = write({"in/requirements.txt": f"numpy\n{line}\n", "outside.txt": "a\n"})
    (path.parent / "link.txt").symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match=why) as caught:
        read_requirements(path)
    assert caught.value.exit_code == 2 and "s3cret" not in str(caught.value) and "tok3n" not in str(caught.value)
    assert ":2" in str(caught.value) or "must be" in why or "cannot read" in why


@pytest.mark.parametrize("name", ["a'; echo foo #.txt", 'q"uote.txt', "new\nline.txt", "ünïcode.txt", "-r.txt"])
def test_a_file_may_have_any_name(write, name):
    assert read_requirements(write({name: "numpy"})).lines == ("numpy",)


def test_a_requirement_that_pip_must_judge_is_passed_on_as_it_is(write):
    lines = ("foo ; bogus == 'x;y'", "foo===what ever", "foo @ git+https://example.org/x@main#egg=foo")
    assert read_requirements(write({"r.txt": "\n".join(lines)})).lines == lines


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"numpy==1.0\n" * 100_000, "larger than 1 MiB", id="larger than 1 MiB"), (b"", "names no package"),
        (b"--pre\n# all\n", "names no package"), (b"\xff\xfe\x00", "not UTF-8"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_packages_is_refused(write, content, why):
    with pytest.raises(BadInput, match=why):
        read_requirements(write({"r.txt": content}))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "r.txt")
    with pytest.raises(BadInput, match="regular file"):
        read_requirements(tmp_path / "r.txt")


def test_a_thousand_files_that_include_each_other_are_refused(write):
    files = {f"r{n}.txt": f"-r r{n + 1}.txt\nfoo{n}" for n in range(200)}
    with pytest.raises(BadInput, match="more than 64 files"):
        read_requirements(write(files))


def test_a_file_that_is_a_constraint_and_a_requirement_is_both(write):
    path = write({"r.txt": "-c base.txt\n-r base.txt\nfoo\n", "base.txt": "numpy==2.0\n"})
    found = read_requirements(path)
    assert found.lines == ("numpy==2.0", "foo") and found.constraints == ("numpy==2.0",)


def test_an_index_that_a_constraint_file_names_is_known(write):
    assert read_requirements(write({"r.txt": "-c c.txt\nfoo\n", "c.txt": "-i https://x/simple\n"})).has_index


@pytest.mark.parametrize("line", ["foo" + " " * 100_000 + "x", "foo @ " + "a" * 100_000, "a1" * 50_000])
def test_a_long_line_is_read_in_little_time(write, line):
    began = time.process_time()
    with contextlib.suppress(BadInput):
        read_requirements(write({"r.txt": f"{line}\n"}))
    assert time.process_time() - began < 2
