"""Find the script of a job's command in the workdir, before a GPU is taken. Nothing of it is executed."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import stat
from itertools import islice
from pathlib import Path, PurePosixPath

from gpurun.errors import BadInput
from gpurun.images.ignore import Walk
from gpurun.jobs.spec import JobSpec
from gpurun.launch.launchers.choosing.programs import StartedProgram, programs_of
from gpurun.launch.launchers.lines import wrappers

WORKSPACE = PurePosixPath("/workspace")
MOVES = ("-C", "--chdir", "--directory", "--cwd", "-wd", "--wd")
"""Flags of wrappers and of mpirun that start a program in another folder."""
SHEBANG = re.compile(rb"#![ \t]*/[^\r]*\Z")
"""A first line by which Linux finds an interpreter. One that ends as Windows' lines do finds none."""
EXPANDED = re.compile(r"[$`*]|\A~")
"""What a shell would have replaced."""
MOST_WRAPPERS, MOST_FILES, MOST_ALIKE, MOST_LETTERS = 20, 5000, 4, 200


def missing_script(spec: JobSpec) -> BadInput | None:
    """Return what is wrong with the script that a job starts; None if it is there, or only the container knows.

    A whole command in quotes is one word, which is no program.

    Paths of the image, addresses, paths of a shell's text and paths below a mount are not judged.
    """
    if _is_quoted(spec):
        (word,) = spec.command
        return BadInput(
            f"the command {word!r} is one word, and no program has this name",
            hint=f"write the command without quotes: {word}\n    or let a shell read it: bash -c {shlex.quote(word)}",
        )
    program = None if spec.workdir is None or _moves(spec.launcher_flags) else _program(spec.command)
    if program is None or spec.workdir is None:
        return None
    top = Path(spec.workdir)
    if program.kind == "module":
        return _missing_module(program.what, top)
    path = os.path.relpath(WORKSPACE / os.path.normpath(program.what), WORKSPACE)
    if path.split("/")[0] == ".." or "\0" in path or "://" in program.what or _is_below_mount(spec, path):
        return None
    return _missing_file(path, top, is_run=program.kind == "program")


def runs_itself(spec: JobSpec) -> bool:
    """Return whether the first word of a command is an executable file of the workdir that names its interpreter."""
    word = spec.command[0]
    path = os.path.relpath(WORKSPACE / os.path.normpath(word), WORKSPACE) if "/" in word else ".."
    if spec.workdir is None or path.split("/")[0] == ".." or "\0" in path:
        return False
    real, root = Path(os.path.realpath(Path(spec.workdir) / path)), Path(os.path.realpath(spec.workdir))
    try:
        mode = real.stat().st_mode
        if not real.is_relative_to(root) or not stat.S_ISREG(mode) or not mode & 0o111:
            return False
        with real.open("rb") as file:
            return SHEBANG.match(file.readline(MOST_LETTERS)) is not None
    except OSError:
        return False


def _is_quoted(spec: JobSpec) -> bool:
    word = spec.command[0]
    if len(spec.command) > 1 or len(word.split()) < 2 or "\0" in word or word.startswith("/"):
        return False
    return spec.workdir is None or not os.path.lexists(Path(spec.workdir) / word)


def _program(words: tuple[str, ...]) -> StartedProgram | None:
    """Return the file or module that a command starts in the working directory; None if words do not tell."""
    for _ in range(MOST_WRAPPERS):
        inner = wrappers.look_through(words)
        if inner is None:
            break
        if _moves(inner.around):
            return None
        if wrappers.name_of(words) == "uv" and inner.words and inner.words[0].endswith(".py"):
            return StartedProgram("python", inner.words[0])
        words = inner.words
    if (text := wrappers.shell_text(words)) is not None and len(words) > 4 and words[1:3] == ("-c", text):
        if text.startswith('exec "$@"'):
            return _program(words[4:])
        return StartedProgram("python", words[4]) if 'script="$1"; shift; ' in text else None  # `with_local_rank`
    if words and "/" in words[0]:
        return StartedProgram("program", words[0])
    found = programs_of(words)[0]
    is_file = found.kind in ("python", "shell") and found.what not in words[:1]
    return found if (is_file or found.kind == "module") and not found.in_shell else None


def _moves(words: tuple[str, ...]) -> bool:
    return any(word.startswith(MOVES) or word == "-D" for word in words)


def _is_below_mount(spec: JobSpec, path: str) -> bool:
    targets = [target for _, target, _ in spec.mounts] + [spec.outputs or "/", spec.scratch or "/"]
    return any((WORKSPACE / path).is_relative_to(target) for target in targets if target != "/")


def _missing_file(path: str, top: Path, *, is_run: bool) -> BadInput | None:
    real, root = Path(os.path.realpath(top / path)), Path(os.path.realpath(top))
    try:
        mode = real.stat().st_mode
    except (OSError, ValueError):
        return BadInput(f"the workdir has no {path}", where=str(top), hint=_alike(path, top))
    if not real.is_relative_to(root):
        return None  # a link that leads out of the workdir
    inside, quoted = str(real.relative_to(root)), shlex.quote(path)
    if real != root and Walk(root).leaves_out(inside):
        return BadInput(
            f".gitignore excludes {path} in the workdir, so gpurun does not copy {path} to hosts", where=str(top),
            hint=f"change .gitignore, or run `git add -f {shlex.quote(inside)}`: gpurun sends files that git tracks",
        )  # fmt: skip
    if is_run and stat.S_ISREG(mode) and not mode & 0o111:
        starter = "python3" if path.endswith(".py") else "bash"
        hint = f"run `chmod +x {quoted}`, or write the command as: {starter} {quoted}"
        return BadInput(f"{path} is not executable", where=str(top), hint=hint)
    return None


def _missing_module(name: str, top: Path) -> BadInput | None:
    """Judge a module of a package of the workdir. Another one may be in the image."""
    first, *rest = name.split(".")
    if not rest or not all(part.isidentifier() for part in (first, *rest)):
        return None
    if not (top / first / "__init__.py").exists():
        return None
    base = top.joinpath(first, *rest)
    if base.with_name(f"{base.name}.py").exists() or base.is_dir() or list(base.parent.glob(f"{base.name}.*.so")):
        return None
    path = "/".join((first, *rest)) + ".py"
    return BadInput(f"the workdir has no module {name} ({path})", where=str(top), hint=_alike(path, top))


def _alike(path: str, top: Path) -> str:
    """Return what a person may have meant: a file of the workdir, or a shell that expands the name."""
    if EXPANDED.search(path):
        return "gpurun starts no shell to expand the name: write the command as sh -c '…'"
    wanted, found = PurePosixPath(path), islice(Walk(top.resolve()).entries(), MOST_FILES)
    try:
        files = [PurePosixPath(name) for name, entry in found if entry.is_file(follow_symlinks=False)]
    except OSError:
        files = []
    same = [file for file in files if file.name == wanted.name]
    near = difflib.get_close_matches(path[:MOST_LETTERS], map(str, files), n=MOST_ALIKE)
    others = sorted((file for file in files if file.suffix == wanted.suffix != ""), key=lambda file: len(file.parts))
    shown = list(dict.fromkeys([*map(str, same), *near, *map(str, others)]))[:MOST_ALIKE]
    if not shown:
        return "give the folder of the program with --workdir; write a file of the image with its absolute path"
    return f"the workdir has {', '.join(shown)}; write a file of the image with its absolute path"
