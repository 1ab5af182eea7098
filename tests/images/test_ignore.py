"""Against git itself: what it ignores is left out, everything else is not."""

import os
import subprocess
from pathlib import Path

import pytest
from how_many import examples
from hypothesis import given
from hypothesis import strategies as st

from gpurun.content.tree import Walk, ignored, parse_ignore_file

_FILES = """a b.pyc build/x build/deep/y src/build/z src/a.log src/keep.log doc/a/b/c.txt doc/c.txt #hash !bang [a]
a\\b ünï.txt -x star* q? A1 foo/bar/baz foo.d/bar .hidden/f"""
_PATTERNS = r"""a *.pyc build/ /build build src/build **/build build/** *.log !keep.log doc/**/c.txt doc/*/c.txt \#hash
#comment \!bang [[]a] [ab] [!a] [^a-y] a\\b * !* /* !src/ foo/** **/bar foo/**/baz ? ?? .* [[:upper:]]* [ [a a\ / //
** *** ! ünï* -* */ foo.d foo*d/bar [a-] []a] new*"""
FILES = [*_FILES.split(), "x y", "trailing ", "new\nline"]
PATTERNS = [*_PATTERNS.split(), "x\\ y", "x y", "trailing\\ ", "trailing ", ""]


def make(top: Path, files=FILES):
    for name in files:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def git(top, *argv):
    subprocess.run(["git", *argv], cwd=top, check=True, capture_output=True)


def git_says(top: Path) -> set[str]:
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(argv, cwd=top, capture_output=True, check=True).stdout
    return {name.decode() for name in out.split(b"\0") if name}


def we_say(top: Path) -> set[str]:
    walk = Walk(top)
    found = {path for path, entry in walk.entries() if not entry.is_dir(follow_symlinks=False)}
    there = {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()}
    assert {path for path in there if not walk.leaves_out(path)} == found
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    top = tmp_path_factory.mktemp("repo")
    git(top, "init", "-q")
    git(top, "config", "core.excludesFile", "/dev/null")
    make(top)
    return top


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_pattern(repository, pattern):
    (repository / ".gitignore").write_text(pattern + "\n")
    assert we_say(repository) == git_says(repository)


@examples("ignore files, read by git")
@given(st.lists(st.sampled_from(PATTERNS), max_size=5), st.lists(st.sampled_from(PATTERNS), max_size=3))
def test_several_patterns_in_two_files(repository, lines, inner):
    (repository / ".gitignore").write_text("\n".join(lines) + "\n")
    (repository / "src/.gitignore").write_text("\n".join(inner))
    try:
        assert we_say(repository) == git_says(repository)
    finally:
        (repository / "src/.gitignore").unlink()


@given(st.text(alphabet="ab*?[]!^-/\\ #:", max_size=8), st.text(alphabet="ab/-", min_size=1, max_size=6))
def test_no_pattern_breaks_it(pattern, path):
    ignored(path.strip("/") or "a", False, parse_ignore_file(pattern, ""))


def test_a_folder_inside_a_repository(tmp_path):
    git(tmp_path, "init", "-q")
    top = tmp_path / "deep" / "work"
    make(top)
    (tmp_path / ".gitignore").write_text("*.pyc\n/deep/work/build\nwork/a\n")
    (tmp_path / "deep/.gitignore").write_text("!*.pyc\nfoo/\n")
    (tmp_path / ".git/info/exclude").write_text("q?\n")
    (top / ".gitignore").write_text("doc\n")
    assert we_say(top) == git_says(top)
    assert "b.pyc" in we_say(top) and "q?" not in we_say(top)


def test_what_git_tracks_is_never_ignored(tmp_path):
    git(tmp_path, "init", "-q")
    make(tmp_path, ["out/model.bin", "out/other.bin", "a"])
    git(tmp_path, "add", "-f", "out/model.bin")
    (tmp_path / ".gitignore").write_text("out/\n")
    assert we_say(tmp_path) == {"out/model.bin", "a", ".gitignore"} == git_says(tmp_path)


def test_without_git_and_without_a_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    make(tmp_path, ["a", "b.pyc", ".git/config", "sub/.git/config"])
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    assert we_say(tmp_path) == {"a", ".gitignore"}


def test_a_pipe_in_the_place_of_an_ignore_file_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / ".gitignore")
    (tmp_path / "train.py").touch()
    assert [path for path, _ in Walk(tmp_path).entries()] == [".gitignore", "train.py"]
